"""Predicts the time of a decoding round on a GPU from bytes, operations and launches, for `mtpjax profile --predict`.

Nothing runs and no weights are read, because all counts come from the configuration. A prediction is an estimate for
the kernels in this package, not a measurement; its assumptions are the constants in this file.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.models.cache import empty_cache
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.params import param_shapes
from mtpjax.models.sharding import CACHE_AXES, path_name


@dataclasses.dataclass(frozen=True)
class Device:
    """Data-sheet figures of a GPU, plus assumed kernel efficiencies.

    Attributes:
        name: name of the GPU.
        memory: memory size in bytes.
        bandwidth: bytes per second.
        flops: dense bfloat16 operations per second.
        bandwidth_share: share of the bandwidth that bfloat16 kernels are assumed to reach.
        fp8_bandwidth_share: the same share for kernels that read and convert fp8 weights.
        flops_share: share of `flops` that kernels are assumed to reach.
        seconds_per_launch: assumed time from the end of a kernel to the start of the next one in a CUDA or HIP graph.
        link: bytes per second that a GPU can send to GPUs in its node, in one direction.
        network: bytes per second that a GPU can send to GPUs in other nodes.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    bandwidth_share: float
    fp8_bandwidth_share: float
    flops_share: float
    seconds_per_launch: float
    link: float
    network: float

    def peak_flops(self, dtype: str) -> float:
        """Returns the FLOP/s of dense matrix products in "bfloat16", or in "float32", which JAX multiplies as TF32."""
        return self.flops / (1 if dtype == "bfloat16" else 2)


# The bandwidth shares are estimates from the kernels' machine code, based on loads in flight and instructions per tile.
DEVICES = {
    "h100": Device("H100 SXM", 80e9, 3.35e12, 989e12, 0.8, 0.65, 0.5, 2e-6, 450e9, 50e9),
    "h200": Device("H200", 141e9, 4.8e12, 989e12, 0.8, 0.55, 0.5, 2e-6, 450e9, 50e9),
    "mi300x": Device("MI300X", 192e9, 5.3e12, 1307e12, 0.65, 0.23, 0.35, 3e-6, 448e9, 50e9),
}


def find_device(device_kind: str) -> Device | None:
    """Returns the figures of the GPU with JAX's name `device_kind`, such as "NVIDIA H100 80GB HBM3".

    Returns None for other devices, and for the slower PCIe forms of these GPUs.
    """
    words = device_kind.lower().split()
    if "pcie" in words or "nvl" in words:
        return None
    return next((device for name, device in DEVICES.items() if name in words), None)


# Launch counts from `python -m experiments.kernels.gpu_launches`, for modules compiled for an H100.
LAUNCHES_PER_DENSE_LAYER = 9
LAUNCHES_OF_LINEAR_ATTENTION = 8  # more than softmax attention, because XLA runs convolution, decay and gates
LAUNCHES_OF_EXPERTS = 5  # more than a dense layer
LAUNCHES_OF_QUERY_LATENT = 2  # more if latent attention also projects its queries through a latent
LAUNCHES_OF_INDEXER = 12  # estimated rather than counted; XLA runs the indexer
LAUNCHES_PER_ROUND = 27  # outside layers: embedding, masks, head, sampling, commit
LAUNCHES_PER_LEVEL = 14  # per draft level, in addition to the module's layer


@dataclasses.dataclass(frozen=True)
class Part:
    """The bytes and operations of one part of a round.

    Attributes:
        name: "weights" (the trunk without experts or head), "experts", "head", "cache" or "MTP modules".
        nbytes: number of bytes that must be read at least once.
        flops: number of operations.
    """

    name: str
    nbytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a round.

    Attributes:
        name: what is sent.
        axis: the mesh axis.
        count: number of collectives.
        nbytes: bytes that each device sends in total.
        seconds: estimated total time.
    """

    name: str
    axis: str
    count: int
    nbytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Round:
    """The estimated time of one round for a batch, on one device or on a mesh of devices.

    Attributes:
        num_steps: draft levels.
        parts: bytes and operations by part.
        seconds_of_parts: seconds per part, either for its bytes or for its operations, whichever takes longer.
        launches: number of kernel launches.
        seconds_of_launches: seconds for all launches.
        collectives: the collectives in the round.
    """

    num_steps: int
    parts: tuple[Part, ...]
    seconds_of_parts: tuple[float, ...]
    launches: int
    seconds_of_launches: float
    collectives: tuple[Collective, ...] = ()

    @property
    def seconds_of_collectives(self) -> float:
        return sum(collective.seconds for collective in self.collectives)

    @property
    def seconds(self) -> float:
        """Seconds per round, assuming that nothing overlaps."""
        return sum(self.seconds_of_parts) + self.seconds_of_launches + self.seconds_of_collectives

    @property
    def seconds_by_part(self) -> dict[str, float]:
        return {part.name: time for part, time in zip(self.parts, self.seconds_of_parts, strict=True)}

    @property
    def seconds_by_column(self) -> dict[str, float]:
        """Seconds by table column, which are the seconds by part, except that the head counts as dense weights."""
        seconds = self.seconds_by_part
        seconds["weights"] += seconds.pop("head")
        return seconds

    @property
    def limit(self) -> str:
        """The name of the slowest part, or "launches"."""
        seconds = {**self.seconds_by_part, "launches": self.seconds_of_launches}
        return max(seconds, key=lambda name: seconds[name])


def predict_round(
    config: ModelConfig,
    device: Device,
    *,
    batch: int,
    context: int,
    num_steps: int,
    weight_bytes: float = 2.0,
    num_devices: int = 1,
) -> Round:
    """Predicts the time of one round, in which the trunk verifies each row's drafts and the draft levels run.

    Experts are assumed to be chosen uniformly. With several devices, weights, caches and work are split evenly, and
    communication is not counted.

    Args:
        batch: number of rows.
        context: tokens in each row's KV cache.
        num_steps: draft levels; 0 is plain decoding.
        weight_bytes: bytes per weight; 1 for fp8.
        num_devices: number of GPUs that share the model.

    Raises:
        ValueError: a number is out of range, or there are draft levels but no MTP modules.
    """
    least = {"batch": (batch, 1), "context": (context, 1), "num_steps": (num_steps, 0), "num_devices": (num_devices, 1)}
    check_numbers(config, num_steps, least)
    if not weight_bytes > 0:
        raise ValueError(f"weight_bytes must be above 0, got {weight_bytes}")
    # 1. Count the weights by group, from shapes alone.
    leaves, _ = jax.tree_util.tree_flatten_with_path(param_shapes(config))
    shapes = [(path_name(path), leaf.shape) for path, leaf in leaves]
    elements = count_weights(config, ((name, shape, math.prod(shape)) for name, shape in shapes))
    nbytes = {name: weight_bytes * count for name, count in elements.items()}
    # 2. Compute the time of one device that does all the work. Several devices share the parts' time evenly.
    work = Work(elements, nbytes, rows=batch, expert_rows=batch)
    return make_round(config, device, work, context, num_steps, has_fp8=weight_bytes < 1.5, num_devices=num_devices)


def check_numbers(config: ModelConfig, num_steps: int, least: Mapping[str, tuple[int, int]]) -> None:
    """Checks each `(number, minimum)` pair in `least`, and that the model can draft `num_steps` levels.

    Raises:
        ValueError: a number is out of range, or there are draft levels but no MTP modules.
    """
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if num_steps and not config.num_mtp_modules:
        raise ValueError(f"{num_steps} draft levels need at least one MTP module, and the model has none")


def make_round(
    config: ModelConfig,
    device: Device,
    work: "Work",
    context: int,
    num_steps: int,
    *,
    has_fp8: bool,
    num_devices: int = 1,
    collectives: tuple[Collective, ...] = (),
) -> Round:
    """Estimates how many seconds a round's parts and launches take.

    Args:
        work: a device's share of the model and batch.
        context: tokens in each row's KV cache.
        has_fp8: whether the weights are fp8. Caches stay bfloat16, and the other parts consist mostly of weights.
        num_devices: number of devices that share the parts' time evenly. Each device launches all kernels, so the time
            of launches is not divided.
    """
    parts, launches = tuple(parts_of_round(config, work, context, num_steps)), count_launches(config, num_steps)

    # Each part takes the time for its bytes or for its operations, whichever is longer.
    def seconds(part: Part) -> float:
        is_converted = has_fp8 and part.name != "cache"
        share = device.fp8_bandwidth_share if is_converted else device.bandwidth_share
        return max(part.nbytes / (device.bandwidth * share), part.flops / (device.flops * device.flops_share))

    seconds_of_parts = tuple(seconds(part) / num_devices for part in parts)
    return Round(num_steps, parts, seconds_of_parts, launches, launches * device.seconds_per_launch, collectives)


def count_launches(config: ModelConfig, num_steps: int) -> int:
    """Counts the kernel launches in a round at batch 1."""
    levels = num_steps * (LAUNCHES_PER_LEVEL + launches_of_layer(config, config.mtp_kind)) if num_steps else 0
    return LAUNCHES_PER_ROUND + sum(launches_of_layer(config, kind) for kind in config.trunk_kinds) + levels


def launches_of_layer(config: ModelConfig, kind: LayerKind) -> int:
    """Counts the kernel launches in a layer."""
    is_latent = kind.attention == "latent"
    return (
        LAUNCHES_PER_DENSE_LAYER
        + LAUNCHES_OF_EXPERTS * kind.is_moe
        + LAUNCHES_OF_QUERY_LATENT * (is_latent and bool(config.q_lora_rank))
        + LAUNCHES_OF_LINEAR_ATTENTION * (kind.attention == "delta")
        + LAUNCHES_OF_INDEXER * (kind.indexer == "full")
    )


def weights_of(config: ModelConfig, *, weight_bytes: float = 2.0) -> float:
    leaves = jax.tree.leaves(param_shapes(config))
    return weight_bytes * sum(math.prod(leaf.shape) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Work:
    """A device's share of a model and a batch.

    Attributes:
        elements: number of weights by group: "trunk" and "module" (layers without routed experts), "trunk experts",
            "module experts", and "head".
        nbytes: bytes of these weights.
        rows: number of rows on the device.
        expert_rows: number of rows whose tokens the device's experts process.
        tensor: number of devices over which heads are sharded.
    """

    elements: Mapping[str, float]
    nbytes: Mapping[str, float]
    rows: int
    expert_rows: int
    tensor: int = 1


def parts_of_round(config: ModelConfig, work: Work, context: int, num_steps: int) -> Iterator[Part]:
    """Yields one device's bytes and operations in a round; `context` is the number of tokens in each row's cache."""
    # Each draft level runs one module. The first level processes the round's new tokens, and the others one token each.
    elements, nbytes, nodes = work.elements, work.nbytes, num_steps + 1
    tokens = work.rows * nodes
    # 1. The trunk verifies all nodes in one pass.
    yield Part("weights", nbytes["trunk"], 2 * tokens * elements["trunk"])
    if elements["trunk experts"]:
        yield _experts("experts", config, work, "trunk experts", [nodes])
    yield Part("head", nbytes["head"], 2 * tokens * elements["head"])
    yield _cache(config, config.trunk_kinds, work, context, tokens)
    if not num_steps:
        return
    # 2. Each draft level reads a module and the head again.
    passes, modules = [nodes] + [1] * (num_steps - 1), config.num_mtp_modules
    read = num_steps * (nbytes["module"] / modules + nbytes["head"])
    flops = 2 * work.rows * (sum(passes) * elements["module"] / modules + num_steps * elements["head"])
    if elements["module experts"]:
        experts = _experts("", config, work, "module experts", passes)
        read, flops = read + experts.nbytes / modules, flops + experts.flops / modules
    cache = _cache(config, (config.mtp_kind,), work, context, work.rows * sum(passes))
    yield Part("MTP modules", read + num_steps * cache.nbytes, flops + cache.flops)


def count_weights(config: ModelConfig, leaves: Iterable[tuple[str, Any, float]]) -> dict[str, float]:
    """Adds up the amounts that a pass reads, by the groups of `Work`.

    `leaves` are the path, global shape and amount (elements or bytes) of each array. Embeddings do not count, because
    only a few rows are looked up, but a tied embedding counts as the head.
    """
    # A pass reads all weights of the trunk and the modules, but only the chosen experts, which are counted separately.
    counts = {name: 0.0 for name in ("trunk", "trunk experts", "module", "module experts", "head")}
    for name, shape, amount in leaves:
        is_stack = "/experts/" in name and len(shape) > 2 and shape[0] == config.n_routed_experts
        owner = "trunk" if name.startswith("trunk") else "module" if name.startswith("mtp_") else None
        if name == "head" or (name == "embedding" and config.tie_word_embeddings):
            counts["head"] += amount
        elif owner and ("embedding" not in name or owner == "trunk"):
            counts[owner + " experts" * is_stack] += amount
    return counts


def _experts(name: str, config: ModelConfig, work: Work, group: str, passes: Sequence[int]) -> Part:
    """Returns the bytes and operations of the experts that are expected to receive at least one token of a pass."""
    share = config.num_experts_per_tok / config.n_routed_experts
    tokens = [work.expert_rows * nodes for nodes in passes]
    chosen = sum(1 - (1 - share) ** count for count in tokens)
    return Part(name, work.nbytes[group] * chosen, 2 * work.elements[group] * share * sum(tokens))


def _cache(config: ModelConfig, kinds, work: Work, context: int, tokens: int) -> Part:
    """Returns the caches' bytes, and the operations of attention, in which every query reads every key and value."""
    nbytes = flops = 0.0
    for kind in kinds:
        # A layer with a sliding window reads only the slots in the window.
        read = min(context, config.sliding_window) if kind.is_sliding else context
        made = jax.eval_shape(lambda kind=kind, read=read: empty_cache(config, (kind,), 1, read, jnp.bfloat16))
        nbytes += sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize / (work.tensor if "heads" in CACHE_AXES[name] else 1)
            for name, leaf in made.layers[0].items()
        )
        # A score costs one product per element of the key; weighting a value costs one per element of the value.
        if kind.attention == "grouped":
            heads, widths = config.of_layer(kind).num_attention_heads, config.head_dim + config.value_dim
            flops += 2 * tokens * heads * widths * read
        elif kind.attention == "latent":
            width = 2 * config.kv_lora_rank + config.qk_rope_head_dim
            flops += 2 * tokens * config.num_attention_heads * width * context
    return Part("cache", work.rows * nbytes, flops / work.tensor)


def tokens_per_round(acceptance_rate: float, num_steps: int) -> float:
    """Returns the expected number of tokens per round, for a chain whose levels have this acceptance rate."""
    return sum(acceptance_rate**level for level in range(num_steps + 1))
