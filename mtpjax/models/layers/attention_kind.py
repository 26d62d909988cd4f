"""`AttentionKind` describes one kind of attention to the rest of the model."""

import dataclasses
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

from mtpjax.models.view import Entries

Axes = tuple[str | None, ...]  # one axis name of `mtpjax.models.sharding.MESH_AXES` per array axis; None: not split


def _keep(entries: Entries, _: jax.Array) -> Entries:
    """Leaves entries unchanged, because accepted entries are already in place and others are never read."""
    return entries


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """One kind of attention.

    To add a kind, write a file with its module and its `AttentionKind`, add a row to `ATTENTION_KINDS`, and add the
    names of its checkpoint tensors to `conversion.attention_names.ATTENTION_NAMES`.

    Attributes:
        scope: name of the layer's parameters within a block, such as "attention".
        module: makes the Flax module from the config, the layer's kind, the kernel implementation and the scope. The
            module maps `(x [B, T, D], view, layer_cache, selection)` to the output `[B, T, D]` as `PartialSums`, the
            layer's new entries, and the indexer's selection.
        empty_entries: makes the zero-filled cache entries of one layer from the config, the layer's kind, the batch
            size B, the slots S, and the dtype.
        cache_axes: axis names of each cache entry.
        split_sizes: names of the config fields that count the heads split by the mesh axis `tensor`.
        param_axes: (regular expression for the parameter path, axis names) pairs; the first match applies.
        commit: updates the entries so that they cover only the first `num_committed [B]` tokens of the last pass.
        reset: prepares the rows `is_new [B]` for new texts.
        is_recurrent: True if the layer keeps a state instead of an entry per slot.
    """

    scope: str
    module: Callable[..., nn.Module]
    empty_entries: Callable[..., Entries]
    cache_axes: Mapping[str, Axes]
    split_sizes: tuple[str, ...]
    param_axes: tuple[tuple[str, Axes], ...]
    commit: Callable[[Entries, jax.Array], Entries] = _keep
    reset: Callable[[Entries, jax.Array], Entries] = _keep
    is_recurrent: bool = False
