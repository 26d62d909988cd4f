"""Predicts the time of a training update on GPUs, part by part, from operations, bytes, launches and links.

Nothing runs and no weights are read. A prediction is an estimate, not a measurement; its assumptions are the constants
in this file and the figures in `mtpjax.evaluation.roofline.DEVICES`. Nothing is assumed to overlap, experts are assumed
to be chosen uniformly, and losses are assumed to be computed in chunks of the vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from mtpjax.evaluation.plan_rounds import GPUS_PER_NODE
from mtpjax.evaluation.roofline import Device, launches_of_layer
from mtpjax.evaluation.update_flops import PartFlops, Trained, flops_by_part, update_flops
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.flops import ROUTED_EXPERTS, RowCounts, matrices
from mtpjax.models.params import is_of_modules
from mtpjax.models.sharding import num_shards, param_spec, path_name

PRODUCT_SHARE = 0.7  # share of the peak that large bfloat16 products reach
ATTENTION_SHARE = 0.35  # the same for attention: FlashAttention-2 on an H100 (2407.08608)
BACKWARD_ATTENTION = 2.5  # operations of attention's backward pass by those of its forward pass: 5 products, not 2
# Elements of activations that norms, rotations, gates, residuals and copies move for each element that a product reads
# or writes. Counted in the kernels of a dense 8B's layer that XLA compiles for an H100.
ELEMENTWISE = 1.7
LOGIT_BYTES = {"forward": 8, "backward": 16}  # per float32 logit: written and read, then again with its gradient
OPTIMIZER_BYTES = 32  # per parameter: read the gradient twice, read and write the parameter and its two moments
OPTIMIZER_LAUNCHES = 100


class UpdateSetting(NamedTuple):
    """The update to predict.

    Attributes:
        sizes: sizes of the mesh axes; every device has the same number of rows.
        rows: the rows of one device.
        trained: what the update trains.
        recomputes_layers: whether the backward pass runs every layer forward again (`remat="layers"`), or only
            attention and elementwise operations.
    """

    sizes: Mapping[str, int]
    rows: RowCounts
    trained: Trained
    recomputes_layers: bool = True


class _Pass(NamedTuple):
    """The work of a forward pass over some layers on one device."""

    products: float  # operations in products with matrices
    attention: float  # operations in attention
    moved: float  # elements that these products read and write, without the matrices
    weights: float  # elements of the matrices
    weight_bytes: float  # bytes of an element as it is stored
    launches: int


def predict_update(config: ModelConfig, params: Any, device: Device, setting: UpdateSetting) -> list[dict[str, Any]]:
    """Predicts the parts of an update on one device of a mesh.

    Args:
        config: the model.
        params: shapes of its stored parameters, with unrolled layers; trained parameters are float32 in any case.
        device: the GPU.
        setting: the update, which trains the model or its MTP modules.

    Returns:
        The "name", "flops" (model FLOPs) and "seconds" of "trunk", "modules" and "losses" (their forward passes),
        "backward", "optimizer" and "links" (collectives, which are left out on a single device).
    """
    rows, trained, sizes = setting.rows, setting.trained, setting.sizes
    counted = update_flops(config, params, rows, trained)
    assert counted is not None, "MTP modules are always counted"
    # 1. Collect the forward passes over trunk and modules.
    modules = [params[f"mtp_{min(depth, config.num_mtp_modules) - 1}"] for depth in range(1, trained.num_depths + 1)]
    trunk = _pass(config, {"trunk": params["trunk"]}, counted["trunk"], config.trunk_kinds, setting)
    depths = [{"mtp": each} for each in modules]
    module = _pass(config, depths, counted["modules"], (config.mtp_kind,) * trained.num_depths, setting)
    heads = counted["losses"]
    logits = rows.tokens * config.vocab_size * (1 + trained.num_depths)
    # 2. Time them, with the backward passes of what is trained. Chunked losses compute the logits again.
    flops, bandwidth = PRODUCT_SHARE * device.flops, device.bandwidth_share * device.bandwidth
    backward = sum(
        _backward_seconds(each, device, setting)
        for each, is_trained in ((trunk, trained.trains != "modules"), (module, True))
        if is_trained
    )
    backward += (heads.backward + heads.forward) / flops + logits * LOGIT_BYTES["backward"] / bandwidth
    # 3. The optimiser updates a device's shards of the trained parameters.
    is_trained = lambda name: trained.trains != "modules" or is_of_modules(name)
    own = sum(size / shards for name, size, _, shards in _shards(params, sizes) if is_trained(name))
    seconds = {
        "trunk": _forward_seconds(trunk, device) * trained.runs_trunk,
        "modules": _forward_seconds(module, device),
        "losses": heads.forward / flops + logits * LOGIT_BYTES["forward"] / bandwidth,
        "backward": backward,
        "optimizer": own * OPTIMIZER_BYTES / bandwidth + OPTIMIZER_LAUNCHES * device.seconds_per_launch,
    }
    if math.prod(sizes.values()) > 1:
        seconds["links"] = _link_seconds(config, params, device, setting)
    operations = flops_by_part(counted)
    return [{"name": name, "flops": operations.get(name, 0.0), "seconds": took} for name, took in seconds.items()]


def _pass(config: ModelConfig, params: Any, counted: PartFlops, kinds: Iterable[LayerKind], setting) -> _Pass:
    """Adds up the work of a forward pass over layers."""
    tokens, experts = setting.rows.tokens, setting.sizes.get("expert", 1)
    moved = weights = 0.0
    for name, shape in matrices(params):
        is_routed = ROUTED_EXPERTS.search(name) is not None
        weights += math.prod(shape) / (experts if is_routed else 1)
        # A token reads the input and writes the output of a matrix, and of each of its experts.
        times, shape = (config.num_experts_per_tok, shape[1:]) if is_routed else (1, shape)
        if name.endswith(("key_up", "value_up", "conv")):
            times, shape = shape[0], shape[1:]  # a matrix per head
        moved += times * (shape[0] + math.prod(shape[1:]))
    leaves, weight_bytes = jax.tree.leaves(params), 4.0
    if setting.trained.trains == "modules" and "trunk" in params:
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        nbytes = (size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True))
        weight_bytes = sum(nbytes) / sum(sizes)
    launches = sum(launches_of_layer(config, kind) for kind in kinds)
    return _Pass(counted.products, counted.attention, tokens * moved, weights, weight_bytes, launches)


def _forward_seconds(work: _Pass, device: Device) -> float:
    """Returns the time of a forward pass. Weights that are not bfloat16 are written as bfloat16 first."""
    bandwidth = device.bandwidth_share * device.bandwidth
    product_bytes = 2 * (work.moved + work.weights)
    cast_bytes = (work.weight_bytes + 2) * work.weights if work.weight_bytes != 2 else 0
    products = max(work.products / (PRODUCT_SHARE * device.flops), product_bytes / bandwidth)
    others = (2 * ELEMENTWISE * work.moved + cast_bytes) / bandwidth + work.launches * device.seconds_per_launch
    return products + others + work.attention / (ATTENTION_SHARE * device.flops)


def _backward_seconds(work: _Pass, device: Device, setting: UpdateSetting) -> float:
    """Returns the time of the backward pass over trained layers, with what it computes again."""
    bandwidth = device.bandwidth_share * device.bandwidth
    # Each product has two, for the gradients of its input and of its matrix, which is written in float32.
    twice = work._replace(products=2 * work.products, moved=2 * work.moved, launches=2 * work.launches)
    seconds = _forward_seconds(twice._replace(attention=BACKWARD_ATTENTION * work.attention), device)
    seconds += 4 * work.weights / bandwidth
    if setting.recomputes_layers:
        return seconds + _forward_seconds(work, device)
    return seconds + work.attention / (ATTENTION_SHARE * device.flops) + 2 * ELEMENTWISE * work.moved / bandwidth


def _shards(params: Any, sizes: Mapping[str, int]) -> Iterable[tuple[str, int, int, int]]:
    """Yields the path, elements, bytes and shards of every parameter."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, size = path_name(path), math.prod(leaf.shape)
        yield name, size, size * leaf.dtype.itemsize, num_shards(param_spec(name, leaf.shape, sizes), sizes)


def _link_seconds(config: ModelConfig, params: Any, device: Device, setting: UpdateSetting) -> float:
    """Returns the time of the collectives of an update, at the speed of a node's links or of the network."""
    sizes, trains = setting.sizes, setting.trained.trains
    fsdp, context, expert, data = (sizes.get(axis, 1) for axis in ("fsdp", "context", "expert", "data"))
    fsdp *= context
    sent = 0.0
    for name, size, nbytes, shards in _shards(params, sizes):
        is_trained = trains != "modules" or is_of_modules(name)
        is_split = shards % fsdp == 0 and fsdp > 1
        whole = size * (fsdp if is_split else 1) / shards  # elements after joining the shards of fsdp
        others = fsdp * expert * data / shards  # devices that hold the same shard
        if is_split:
            # Trunk layers are gathered for each pass, everything else once; then the gradients are scattered.
            gathers = 2 if name.startswith("trunk") and is_trained else 1
            each = 4 if is_trained else nbytes / size
            sent += (gathers * each + 4 * is_trained) * whole * (fsdp - 1) / fsdp
        if is_trained and others > 1:
            sent += 2 * 4 * size / shards * (others - 1) / others
    # Rows travel to the experts of other devices and back, in the forward pass, its repetition and the backward pass.
    trunk_layers = sum(kind.is_moe for kind in config.trunk_kinds)
    module_layers = config.mtp_kind.is_moe * setting.trained.num_depths
    trained_layers = trunk_layers * (trains != "modules") + module_layers
    passes = trunk_layers + module_layers + trained_layers * (1 + setting.recomputes_layers)
    sent += passes * 2 * 2 * (expert - 1) * setting.rows.tokens * config.hidden_size
    is_one_node = math.prod(sizes.values()) <= GPUS_PER_NODE
    return sent / (device.link if is_one_node else device.network)
