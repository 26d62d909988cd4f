"""Estimates the memory that a training update needs on each device, for `mtpjax plan --train` and `remat="auto"`.

Parameters and optimiser state are counted exactly, from shapes and shardings. Temporary memory is the largest of three
moments: the losses, the backward pass of an MTP module, and the backward pass of the trunk's largest layer. Each is the
sum of the arrays that are in memory then. Compiled updates are compared with it in docs/results/meshes.md.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import jax
from jax.sharding import PartitionSpec

from mtpjax.models.config import LayerKind, ModelConfig, Remat
from mtpjax.models.masks import MAX_DENSE
from mtpjax.models.params import is_of_modules
from mtpjax.models.sharding import num_shards, param_spec, path_name
from mtpjax.training.position_losses import choose_vocab_chunk
from pallas_kernels.grouped_matmul.reference import blocks_of_rows

REMATS: tuple[Remat, ...] = get_args(Remat)  # from the fastest to the one that needs the least memory
FLOAT32 = 4  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateShape:
    """What decides the memory of an update, besides the model.

    Attributes:
        tokens: tokens of a device's rows in one forward pass.
        row_length: tokens of a row.
        trains: "all", "detached" or "modules", as in `TrainConfig`.
        remat: as in `MTPModel`.
        num_depths: draft depths with a loss.
        vocab_chunk: as in `Objective`; None means the choice for a GPU.
        itemsize: bytes of a number that layers compute with.
        is_accumulated: the update sums the gradients of several forward passes.
        expert_parts: devices over which the experts are split; `estimate_update` sets it.
    """

    tokens: int
    row_length: int
    trains: Literal["all", "modules", "detached"] = "all"
    remat: Remat = "none"
    num_depths: int = 1
    vocab_chunk: int | None = None
    itemsize: int = 2
    is_accumulated: bool = False
    expert_parts: int = 1


class UpdateMemory(NamedTuple):
    """Bytes per device.

    Attributes:
        arguments: parameters and optimiser state, exact.
        temps: estimated temporary memory at each moment, by name; the largest counts.
    """

    arguments: int
    temps: dict[str, int]

    @property
    def temp(self) -> int:
        return max(self.temps.values())

    @property
    def total(self) -> int:
        return self.arguments + self.temp


class _Leaf(NamedTuple):
    """The bytes of one parameter on a device."""

    part: str  # first name in the path
    layer: str  # name of the trunk layer or module
    arguments: float
    is_feed_forward: bool
    cast: float  # the copy that layers compute with, joined over `fsdp` and `context`
    gradient: float  # joined in the same way
    gradient_shard: float


def estimate_update(config: ModelConfig, params: dict, sizes: Mapping[str, int], shape: UpdateShape) -> UpdateMemory:
    """Estimates the memory of an update with AdamW.

    Args:
        config: the model's config.
        params: shapes of the parameters with unrolled layers, such as `stored_shapes`; trained ones become float32.
        sizes: sizes of the mesh axes.
        shape: rows, policy and losses.

    Returns:
        The bytes per device.
    """
    return _estimate(config, list(_leaves(params, sizes, shape)), sizes, shape)


def _estimate(config: ModelConfig, leaves: list[_Leaf], sizes: Mapping[str, int], shape: UpdateShape) -> UpdateMemory:
    shape = dataclasses.replace(shape, expert_parts=sizes.get("expert", 1))

    def total(field: str, chosen: Callable[[_Leaf], bool] = lambda leaf: True) -> float:
        return sum(getattr(leaf, field) for leaf in leaves if chosen(leaf))

    # 1. All the time: the sum of the gradients of earlier forward passes.
    always = total("gradient") * shape.is_accumulated
    # 2. What the forward pass keeps for the trunk's backward pass; nothing if the trunk is frozen.
    kept = 0.0
    if shape.trains != "modules":
        kinds_and_numbers = collections.Counter(config.trunk_kinds).items()
        kept = shape.tokens * sum(number * _kept_bytes(config, kind, shape) for kind, number in kinds_and_numbers)
    # 3. The losses: the gradients of the heads. XLA computes no gradients for frozen ones.
    has_modules = config.num_mtp_modules > 0 and shape.num_depths > 0
    of_heads = total("gradient", lambda leaf: leaf.part == "head" or leaf.part.startswith("mtp_head"))
    temps = {"losses": of_heads + _loss_bytes(config, shape)}
    # 4. The module: also its weights, the gradients of its feed-forward matrices, and its two inputs' norms.
    if has_modules:
        weights = total("cast", lambda leaf: leaf.layer == "mtp_0")
        weights += total("cast", lambda leaf: leaf.layer == "mtp_0" and leaf.is_feed_forward)
        inputs = shape.tokens * config.hidden_size * 2 * (shape.itemsize + FLOAT32)
        temps["module"] = of_heads + weights + inputs + _backward_bytes(config.of_modules, config.mtp_kind, shape)
        # Without remat, the products of gate and up, their activations and the result are still there.
        if shape.remat == "none":
            inner = _feed_forward_width(config.of_modules, config.mtp_kind)
            temps["module"] += shape.tokens * shape.itemsize * 5 * inner
    # 5. A layer: its weights and all gradients.
    casts, whole_gradients = collections.defaultdict(float), collections.defaultdict(float)
    for leaf in leaves:
        if leaf.part == "trunk":
            casts[leaf.layer] += leaf.cast
            whole_gradients[leaf.layer] += leaf.gradient
    weights = max(casts.values())
    kinds = set(config.trunk_kinds)
    if shape.trains == "modules":
        temps["layer"] = weights + max(_forward_bytes(config, kind, shape) for kind in kinds)
    else:
        # The next layer's weights are joined while a layer runs, and the last layer's gradients are sent in float32.
        if max(sizes.get(axis, 1) for axis in ("fsdp", "context")) > 1:
            weights = 2 * weights + max(whole_gradients.values())
        of_all = total("gradient_shard", lambda leaf: leaf.part == "trunk" or leaf.layer.startswith("mtp_"))
        of_all += total("gradient", lambda leaf: leaf.part in ("embedding", "head"))
        temps["layer"] = weights + of_all + max(_backward_bytes(config, kind, shape) for kind in kinds)
    return UpdateMemory(
        round(total("arguments")), {name: round(always + kept + nbytes) for name, nbytes in temps.items()}
    )


def choose_remat(
    config: ModelConfig, params: dict, sizes: Mapping[str, int], shape: UpdateShape, memory: float
) -> Remat:
    """Chooses the fastest `remat` whose estimate fits into `memory` bytes per device; "layers" if none fits."""
    leaves = list(_leaves(params, sizes, shape))
    for remat in REMATS:
        if _estimate(config, leaves, sizes, dataclasses.replace(shape, remat=remat)).total <= memory:
            return remat
    return REMATS[-1]


def longest_row(config: ModelConfig, params: dict, sizes: Mapping[str, int], shape: UpdateShape, memory: float) -> int:
    """Returns the longest row, a multiple of 1,024 tokens, that fits into `memory` bytes per device.

    Each device has one row, or shares one with the other devices of "context".
    """
    leaves, low, high = list(_leaves(params, sizes, shape)), 0, 2**14
    while low < high:
        middle = (low + high + 1) // 2
        own = 1024 * middle // sizes.get("context", 1)
        tried = dataclasses.replace(shape, tokens=own, row_length=1024 * middle)
        fits = _estimate(config, leaves, sizes, tried).total <= memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return 1024 * low


def _leaves(params: dict, sizes: Mapping[str, int], shape: UpdateShape) -> Iterator[_Leaf]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        part, *others = name.split("/")
        is_trained = shape.trains != "modules" or is_of_modules(name)
        # A trained matrix has no scales.
        if is_trained and name.endswith("/scales"):
            continue
        size, spec = math.prod(leaf.shape), param_spec(name, leaf.shape, sizes)
        shard = size / num_shards(spec, sizes)
        joined = _joined_shards(spec, sizes)
        is_joined, whole = joined > 1, shard * joined
        itemsize = FLOAT32 if is_trained else leaf.dtype.itemsize
        yield _Leaf(
            part=part,
            layer="/".join([part, *others[:1]]) if part == "trunk" else part,
            arguments=shard * (3 * FLOAT32 if is_trained else itemsize),
            is_feed_forward=re.search("(dense|experts)/", name) is not None,
            cast=whole * shape.itemsize * (leaf.ndim > 1 and (is_joined or itemsize != shape.itemsize)),
            gradient=whole * FLOAT32 * is_trained,
            gradient_shard=shard * FLOAT32 * is_trained,
        )


def _joined_shards(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards of a parameter that are joined when its layer runs."""
    axes = (axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))
    return math.prod(sizes[axis] for axis in axes if axis in ("fsdp", "context"))


def _attention_widths(config: ModelConfig, kind: LayerKind) -> tuple[int, int, int]:
    """Returns the numbers per token of queries, of keys and values, and of attention's result."""
    config = config.of_layer(kind)
    heads = config.num_attention_heads
    if kind.attention == "delta":
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return keys, keys + values, values
    if kind.attention == "latent":
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads * key, heads * (key + config.v_head_dim), heads * config.v_head_dim
    both = config.head_dim + config.value_dim
    return heads * config.head_dim, config.num_key_value_heads * both, heads * config.value_dim


def _feed_forward_width(config: ModelConfig, kind: LayerKind) -> int:
    """Returns the numbers per token of a feed-forward layer's inner width, over all experts of the token."""
    if not kind.is_moe:
        return config.intermediate_size
    return config.num_experts_per_tok * config.moe_intermediate_size + config.shared_width


def _kept_bytes(config: ModelConfig, kind: LayerKind, shape: UpdateShape) -> float:
    """Returns the bytes per token that a trunk layer keeps until its backward pass."""
    queries, keys_and_values, result = _attention_widths(config, kind)
    width = config.hidden_size  # the layer's input
    if shape.remat != "layers" and shape.row_length > MAX_DENSE:
        width += result
    if shape.remat == "none":
        # Weight matmuls: queries, keys and values; the output projection; gate and up.
        width += queries + keys_and_values + config.hidden_size + 2 * _feed_forward_width(config, kind)
    return shape.itemsize * width


def _backward_bytes(config: ModelConfig, kind: LayerKind, shape: UpdateShape) -> float:
    """Returns the bytes of the arrays in the backward pass of a layer, which it computes again if `remat` says so."""
    queries, keys_and_values, result = _attention_widths(config, kind)
    inner = _feed_forward_width(config, kind)
    # The residual stream before and after attention, both norms' outputs, and the stream's gradient; queries and result
    # with their gradients; keys and values, whose gradients are summed in float32.
    width = shape.itemsize * (5 * config.hidden_size + 2 * queries + 2 * result + keys_and_values)
    width += FLOAT32 * keys_and_values
    # The gradients of gate and up, as two arrays and joined.
    width += shape.itemsize * 4 * inner
    return shape.tokens * width + _score_bytes(config, shape) + _expert_bytes(config, kind, shape, is_backward=True)


def _forward_bytes(config: ModelConfig, kind: LayerKind, shape: UpdateShape) -> float:
    """Returns the bytes of the arrays while a frozen layer runs."""
    queries, keys_and_values, result = _attention_widths(config, kind)
    inner = _feed_forward_width(config, kind)
    width = 3 * config.hidden_size + max(queries + keys_and_values + 2 * result, 3 * inner)
    return (
        shape.tokens * shape.itemsize * width
        + _score_bytes(config, shape)
        + _expert_bytes(config, kind, shape, is_backward=False)
    )


def _score_bytes(config: ModelConfig, shape: UpdateShape) -> float:
    """Returns the bytes of the scores of short rows, with their softmax and its gradient in float32."""
    if shape.row_length > MAX_DENSE:
        return 0
    return 3 * FLOAT32 * shape.tokens * shape.row_length * config.num_attention_heads


def _expert_bytes(config: ModelConfig, kind: LayerKind, shape: UpdateShape, *, is_backward: bool) -> float:
    """Returns the bytes of the arrays that XLA's experts make in addition to their inner width."""
    if not kind.is_moe:
        return 0
    # Each block of rows has a copy of its expert's matrices: of gate and up, which count as two, and in the backward
    # pass also of down. There are three arrays of all blocks' rows: inputs, results and the gradient.
    parts = shape.expert_parts
    rows, blocks = blocks_of_rows(shape.tokens * config.num_experts_per_tok, config.n_routed_experts // parts)
    width = blocks * ((3 if is_backward else 2) * config.moe_intermediate_size + 3 * rows)
    # If experts are split, the rows of all devices, the experts' results and a gradient are joined.
    width += 3 * shape.tokens * parts * (parts > 1)
    return shape.itemsize * width * config.hidden_size


def _loss_bytes(config: ModelConfig, shape: UpdateShape) -> float:
    """Returns the bytes of the arrays in the backward pass of the losses."""
    levels, columns = 1 + shape.num_depths, shape.vocab_chunk
    if columns is None:
        columns = choose_vocab_chunk(shape.tokens, levels, config.vocab_size, platform="gpu")
    columns = columns or config.vocab_size
    # Each level has logits in float32 and hidden states. Each trained level also has the gradient of its logits, and
    # the sum of its hidden states' gradient, old and new.
    forward = FLOAT32 * columns + shape.itemsize * config.hidden_size
    backward = shape.itemsize * columns + 2 * FLOAT32 * config.hidden_size
    trained = shape.num_depths if shape.trains == "modules" else levels
    return shape.tokens * (levels * forward + trained * backward)
