"""The record that describes one kind of attention to the rest of the model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.view import Entries

Axes = tuple[str | None, ...]  # one axis name of `mtpjax.models.sharding.MESH_AXES` per array axis; None: not split


def keep_entries(entries: Entries, num_committed: jax.Array) -> Entries:
    """Commits an attention layer: its accepted entries are already in place."""
    return entries


def keep_rows(entries: Entries, is_new: jax.Array) -> Entries:
    """Resets an attention layer for new texts: entries after the committed length are never read."""
    return entries


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """One kind of attention. A new kind is one file with its module and record, and one row in `ATTENTION_KINDS`.

    Names of its checkpoint tensors are a row of `conversion.attention_names.ATTENTION_NAMES`.

    Attributes:
        scope: name of the layer's parameters within a block, such as "attention".
        module: makes the Flax module from the config, the layer's kind, the kernels' implementation and the scope. The
            module maps `(x [B, T, D], view, layer_cache, selection)` to the output `[B, T, D]` as `PartialSums`, the
            layer's new entries, and the indexer's selection.
        empty_entries: makes the zero-filled cache entries of one layer from the config, the layer's kind, the batch
            size B, the slots S, and the dtype.
        cache_axes: axis names of each cache entry.
        split_sizes: fields of the config with the heads that `tensor` of a mesh splits.
        param_axes: (regular expression of the parameter's path, axis names) pairs; the first match counts.
        commit: keeps what the first `num_committed [B]` tokens of the last pass left in the entries.
        reset: prepares the rows `is_new [B]` for new texts.
        is_recurrent: whether the layer keeps a state instead of an entry per slot.
    """

    scope: str
    module: Callable[[ModelConfig, LayerKind, str, str], nn.Module]
    empty_entries: Callable[[ModelConfig, LayerKind, int, int, Any], Entries]
    cache_axes: Mapping[str, Axes]
    split_sizes: tuple[str, ...]
    param_axes: tuple[tuple[str, Axes], ...]
    commit: Callable[[Entries, jax.Array], Entries] = keep_entries
    reset: Callable[[Entries, jax.Array], Entries] = keep_rows
    is_recurrent: bool = False
