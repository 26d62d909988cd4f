"""Runs a compiled pass over whole rows of text, on the devices with the parameters, and returns its scores."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mtpjax.compat import library_settings
from mtpjax.distributed import gather_processes
from mtpjax.models.sharding import data_size, mesh_of


@library_settings()
def run_on_rows(
    score: Callable[..., Any], params: dict, draft_params: Any, rows: Any, *, batch_size: int, **settings: Any
) -> Any:
    """Scores rows with a jitted function that calls `mtpjax.models.decoding_layout.run_on_shards`.

    Args:
        score: `score(params, draft_params, rows, **settings)` returns arrays `[B, ...]`.
        params: the model's parameters, whose sharding determines the mesh.
        draft_params: the drafter's parameters; {} if there are none.
        rows: tree of arrays `[P, ...]` on the host.
        batch_size: maximum number of rows per pass on each device.
        **settings: static arguments.

    Returns:
        The arrays for all rows, on the host of every process.
    """
    embedding, count = params["embedding"], len(jax.tree.leaves(rows)[0])
    mesh = mesh_of(embedding) if isinstance(embedding, jax.Array) else None
    # All batches have one size and share one compiled program. All shards over `data` have the same number of rows.
    size = data_size(mesh) * min(batch_size, -(-count // data_size(mesh)))
    parts = []
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        for begin in range(0, count, size):
            # Fill the last batch with copies of the first row.
            chosen = [row if row < count else 0 for row in range(begin, begin + size)]
            batch = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], rows)
            parts.append(jax.device_get(gather_processes(score(params, draft_params, batch, **settings))))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[:count], *parts)
