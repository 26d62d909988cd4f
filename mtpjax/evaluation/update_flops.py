"""Counts the model FLOPs of a training update, from which runs compute their model FLOPs utilisation (MFU).

MFU is model FLOPs / (seconds x peak FLOP/s of the devices), as PaLM defines it (2204.02311, appendix B). Operations
that rematerialisation repeats do not count. `mtpjax.models.flops` says what a forward pass counts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.flops import RowCounts, attention_flops, indexer_flops, matrices, product_flops
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.models.quantized import is_scaled


class Trained(NamedTuple):
    """What an update trains.

    Attributes:
        trains: "all", "modules" or "detached", as in `TrainConfig`.
        num_depths: number of draft depths.
        runs_trunk: whether updates run the trunk; False if its states are cached.
        drafter: the `TrainedDrafter` that trains instead of MTP modules, or None.
        num_anchors: anchors per row of a drafter that draws them.
    """

    trains: str = "all"
    num_depths: int = 0
    runs_trunk: bool = True
    drafter: Any = None
    num_anchors: int = 0


class PartFlops(NamedTuple):
    """Model FLOPs of a part of an update.

    Attributes:
        products: operations of the forward pass in products with matrices.
        attention: operations of the forward pass between tokens, including a sparse indexer's.
        backward: operations of the backward pass.
    """

    products: float
    attention: float
    backward: float

    @property
    def forward(self) -> float:
        return self.products + self.attention


def update_flops(
    config: ModelConfig, params: Mapping[str, Any], rows: RowCounts, trained: Trained
) -> dict[str, PartFlops] | None:
    """Counts the model FLOPs of an update.

    A trained matrix has two products in the backward pass, for the gradients of its input and of itself. A frozen
    trunk has no backward pass, and a frozen head under trained depths only passes the gradient of its input.

    Args:
        config: the model.
        params: parameters or their shapes, with stacked or unrolled layers.
        rows: the rows of the update.
        trained: what the update trains.

    Returns:
        The parts "trunk", "modules" (the MTP modules or the drafter) and "losses" (the products with the heads); None
        for a drafter that does not count its operations (`TrainedDrafter.network_flops`).
    """
    # Only shapes matter, and a block-scaled matrix has the shape of the matrix that it stands for.
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), dict(params), is_leaf=is_scaled)
    head = params["embedding"] if config.tie_word_embeddings else params["head"]
    if trained.drafter is None:
        modules, depth_heads = _module_flops(config, params, rows, trained)
    else:
        found = _drafter_flops(params, head, rows, trained)
        if found is None:
            return None
        modules, depth_heads = found
    # The trunk, and its head, whose loss is computed even if the trunk is frozen.
    trunk = PartFlops(0.0, 0.0, 0.0)
    if trained.runs_trunk:
        trunk = _layers(config, params["trunk"], config.trunk_kinds, rows, is_trained=trained.trains != "modules")
    columns = params[DRAFT_IDS].size if DRAFT_IDS in params else config.vocab_size
    own = 2.0 * head.size * columns / config.vocab_size * rows.tokens
    losses = PartFlops(own, 0.0, 2 * own if trained.trains != "modules" else 0.0)
    return {"trunk": trunk, "modules": modules, "losses": _add(losses, depth_heads)}


def flops_by_part(parts: Mapping[str, PartFlops]) -> dict[str, float]:
    """Returns the operations of each part's forward pass, and of the whole "backward" pass."""
    forward = {name: part.forward for name, part in parts.items()}
    return {**forward, "backward": sum(part.backward for part in parts.values())}


def total_flops(parts: Mapping[str, PartFlops]) -> float:
    """Returns the operations of forward and backward pass over all parts."""
    return sum(flops_by_part(parts).values())


def _layers(config: ModelConfig, params: Any, kinds, rows: RowCounts, *, is_trained: bool) -> PartFlops:
    """Counts layers. A sparse indexer only selects, so it has no backward pass."""
    named = list(matrices(params))
    runs_indexer = rows.row_length > config.index_topk
    indexers = [(name, shape) for name, shape in named if "indexer/" in name]
    learned = rows.tokens * product_flops(config, (each for each in named if each not in indexers))
    selecting = rows.tokens * product_flops(config, indexers) * runs_indexer
    attention = attention_flops(config, kinds, rows)
    backward = 2 * (learned + attention) * is_trained
    return PartFlops(learned + selecting, attention + indexer_flops(config, kinds, rows), backward)


def _module_flops(config: ModelConfig, params, rows: RowCounts, trained: Trained) -> tuple[PartFlops, PartFlops]:
    """Counts the MTP depths without and with only their heads. Depths beyond the modules run the last one again."""
    modules = heads = PartFlops(0.0, 0.0, 0.0)
    for depth in range(1, trained.num_depths + 1):
        index = min(depth, config.num_mtp_modules) - 1
        modules = _add(modules, _layers(config, params[f"mtp_{index}"], (config.mtp_kind,), rows, is_trained=True))
        forward = 2.0 * config.vocab_size * config.hidden_size * rows.tokens
        # A head that the depths do not train only passes the gradient of its input.
        is_trained = f"mtp_head_{index}" in params or trained.trains == "all"
        heads = _add(heads, PartFlops(forward, 0.0, forward * (2 if is_trained else 1)))
    return modules, heads


def _drafter_flops(params, trunk_head, rows: RowCounts, trained: Trained) -> tuple[PartFlops, PartFlops] | None:
    """Counts the network of a drafter, and its heads; None if the drafter does not count its operations."""
    drafter, network, num_levels = trained.drafter, params[DRAFTER], trained.num_depths
    num_anchors = min(trained.num_anchors, rows.row_length - 1)
    counted = drafter.network_flops(network, rows, num_levels, num_anchors)
    if counted is None:
        return None
    # Level k reads head k, or the only head. A frozen head of the trunk only passes the gradient of its input.
    heads = jax.eval_shape(lambda own, head: drafter.heads(own, head, num_levels), network, trunk_head)
    positions = rows.num_rows * (num_anchors if drafter.draws_anchors else rows.row_length)
    forward = 2.0 * positions * sum(heads[min(level, len(heads) - 1)].size for level in range(num_levels))
    is_trained = any(name in network for name in drafter.head_names)
    head_part = PartFlops(forward, 0.0, forward * (2 if is_trained else 1))
    products, attention = counted
    return PartFlops(products, attention, 2 * (products + attention)), head_part


def _add(one: PartFlops, other: PartFlops) -> PartFlops:
    return PartFlops(*(a + b for a, b in zip(one, other, strict=True)))
