"""A hash that is the same for two engines if their pages are interchangeable."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.models.config import ModelConfig

VERSION = 1  # version of the page contents
NUM_SAMPLED = 16  # values of each parameter that are hashed


def model_digest(
    params: dict,
    config: ModelConfig,
    decode: DecodeConfig,
    page_size: int,
    page_shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    draft_params: Any = None,
) -> bytes:
    """Hashes everything that a page's entries depend on, except the text.

    Args:
        params: the model's parameters. Only a few values of each are hashed.
        config: the model's config.
        decode: settings that all requests share.
        page_size: positions per page.
        page_shapes: shapes and dtypes of a page's entries.
        draft_params: the drafter's own parameters, if it has any.
    """
    digest = hashlib.sha256()
    drafting = (decode.drafter, decode.draft_window, decode.draft_sinks, decode.kv_cache_dtype)
    shapes = [(each.shape, str(each.dtype)) for each in page_shapes]
    digest.update(repr((VERSION, config, drafting, page_size, shapes)).encode())
    first = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf[(0,) * (leaf.ndim - 1)][:NUM_SAMPLED], tree))
    for tree in (params,) if draft_params is None else (params, draft_params):
        leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(first(tree)))
        for (path, leaf), whole in zip(leaves, jax.tree.leaves(tree), strict=True):
            digest.update(repr((jax.tree_util.keystr(path), whole.shape, str(whole.dtype))).encode())
            digest.update(np.asarray(leaf).tobytes())
    return digest.digest()
