"""Plans how a model runs on many GPUs, for `mtpjax plan`: which meshes have room for it, and how long a round takes.

Bytes of weights, caches and state are arithmetic: the shapes of the decoding call's arguments, divided as they lie on
the mesh. Temporary memory and time are estimates; `mtpjax.evaluation.compiled_call` compiles the call to know the
former.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from mtpjax.decoding.capacity import choose_prefill_chunk
from mtpjax.evaluation.compiled_call import call_shapes
from mtpjax.evaluation.roofline import (
    Device,
    Part,
    Work,
    count_launches,
    count_weights,
    parts_of_round,
    seconds_of_parts,
)
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import find_copies, part_specs
from mtpjax.models.model import MTPModel
from mtpjax.models.params import is_of_modules
from mtpjax.models.sharding import num_shards, param_spec, path_name

GPUS_PER_NODE = 8
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is the driver's, the allocator's and that of collectives
SECONDS_PER_COLLECTIVE = {"link": 10e-6, "network": 30e-6}  # assumed latency, by whether it leaves the node


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a round.

    Attributes:
        name: what travels.
        axis: the mesh axis.
        count: how many there are.
        nbytes: bytes that a device sends in all of them.
        seconds: estimated time.
    """

    name: str
    axis: str
    count: int
    nbytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on one mesh.

    Attributes:
        mesh: sizes of the axes.
        rows: rows of the batch, filled up to a multiple of `data`.
        slots: cache slots of each row.
        weights: bytes of the parameters per device.
        state: bytes of the caches and of the rest of the decoding state per device.
        temp: estimated bytes besides.
        bytes_per_row: bytes of the state of one more row on a device.
        bytes_per_slot: bytes of one more slot in each row of a device.
        prefill_chunk: tokens of a prefill pass.
    """

    mesh: dict[str, int]
    rows: int
    slots: int
    weights: int
    state: int
    temp: int
    bytes_per_row: float
    bytes_per_slot: float
    prefill_chunk: int

    @property
    def arguments(self) -> int:
        """Bytes of weights and state per device."""
        return self.weights + self.state

    @property
    def total(self) -> int:
        """Bytes per device, with the estimated temporary memory."""
        return self.arguments + self.temp

    def free(self, device: Device) -> float:
        """Bytes that are left of a device's usable memory."""
        return USABLE_SHARE * device.memory - self.total

    def largest_batch(self, device: Device) -> int:
        """Rows that fit with these slots; temporary memory grows with them."""
        data = self.mesh.get("data", 1)
        per_row = self.bytes_per_row + self.temp * data / self.rows
        return max(0, self.rows // data + math.floor(self.free(device) / per_row)) * data

    def largest_context(self, device: Device) -> int:
        """Slots of each row that fit with these rows."""
        return max(0, self.slots + math.floor(self.free(device) / max(self.bytes_per_slot, 1)))


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a batch on a mesh.

    Attributes:
        num_steps: draft levels.
        parts: bytes and operations of a device.
        seconds_of_parts: estimated seconds of each.
        launches: kernels.
        seconds_of_launches: estimated seconds of all launches.
        collectives: what travels.
    """

    num_steps: int
    parts: tuple[Part, ...]
    seconds_of_parts: tuple[float, ...]
    launches: int
    seconds_of_launches: float
    collectives: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        """Estimated seconds of the round: nothing overlaps."""
        travelling = sum(collective.seconds for collective in self.collectives)
        return sum(self.seconds_of_parts) + self.seconds_of_launches + travelling


def list_meshes(count: int) -> list[dict[str, int]]:
    """Lists the meshes `data x tensor` of a number of GPUs, the largest `tensor` first.

    Experts need no axis of their own: `data` splits them too.
    """
    return [{"data": count // tensor, "tensor": tensor} for tensor in range(count, 0, -1) if count % tensor == 0]


def plan_layout(
    config: ModelConfig,
    params: dict,
    sizes: Mapping[str, int],
    *,
    rows: int,
    slots: int,
    num_steps: int,
    prefill_chunk: int | None = None,
) -> Plan:
    """Computes what a decoding call needs on a mesh.

    Args:
        config: the model's config.
        params: shapes of its parameters, as from `mtpjax.evaluation.compiled_call.stored_shapes`.
        sizes: sizes of the mesh axes by name.
        rows: rows of the batch.
        slots: cache slots of each row.
        num_steps: draft levels.
        prefill_chunk: tokens of a prefill pass; None: as `speculative_generate` chooses for prompts of half the slots.

    Returns:
        The plan.

    Raises:
        ValueError: a number is out of range, there are draft levels without MTP modules, or the mesh does not divide
            the model.
    """
    for name, value, least in (("batch", rows, 1), ("context", slots, 2), ("num_steps", num_steps, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if num_steps and not config.num_mtp_modules:
        raise ValueError(f"{num_steps} draft levels need at least one MTP module, and the model has none")
    for problem in find_copies(config, sizes):
        raise ValueError(problem)
    data = sizes.get("data", 1)
    rows = -(-rows // data) * data
    fitted, params, state = call_shapes(config, params, sizes, rows=rows, slots=slots, num_steps=num_steps)
    _, _, more_rows = call_shapes(config, {}, sizes, rows=rows + data, slots=slots, num_steps=num_steps)
    _, _, more_slots = call_shapes(config, {}, sizes, rows=rows, slots=slots + 128, num_steps=num_steps)
    nbytes = sum(amount for _, _, amount in _bytes_of_parts(params, fitted, sizes))
    states = [_state_bytes(each, fitted, sizes) for each in (state, more_rows, more_slots)]
    if prefill_chunk is None:
        model = MTPModel(fitted, implementation="triton")
        prefill_chunk = choose_prefill_chunk(model, rows, "cuda", longest_prompt=slots // 2, max_length=slots)
    return Plan(
        mesh=dict(sizes),
        rows=rows,
        slots=slots,
        weights=round(nbytes),
        state=states[0],
        temp=estimate_temp(fitted, sizes, rows=rows, prefill_chunk=prefill_chunk),
        bytes_per_row=states[1] - states[0],
        bytes_per_slot=(states[2] - states[0]) / 128,
        prefill_chunk=prefill_chunk,
    )


def estimate_temp(config: ModelConfig, sizes: Mapping[str, int], *, rows: int, prefill_chunk: int) -> int:
    """Estimates the temporary memory of a decoding call: the widest arrays of a prefill pass.

    With experts these are, for each token and chosen expert, the activations and the output, of the rows of all `data`
    devices; else the activations of the feed-forward layer. bfloat16.

    Args:
        config: the model's config.
        sizes: sizes of the mesh axes by name.
        rows: rows of the batch.
        prefill_chunk: tokens of a prefill pass.

    Returns:
        Bytes.
    """
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    tokens, width = rows * prefill_chunk // data, config.hidden_size
    widest = 0.0
    if any(not kind.is_moe for kind in config.trunk_kinds):
        widest = 2.0 * tokens * config.intermediate_size / tensor
    if config.is_moe:
        all_tokens = rows * prefill_chunk
        chosen = all_tokens * config.num_experts_per_tok
        experts = 2.0 * chosen * (width + config.moe_intermediate_size / tensor) + 2 * all_tokens * width
        widest = max(widest, experts)
    return round(widest + 6 * tokens * width)


def _bytes_of_parts(tree: Any, config: ModelConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple, float]]:
    """Yields path, whole shape and bytes on one device of each parameter."""
    specs = part_specs(tree, config, sizes)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        yield path_name(path), leaf.shape, _share(leaf, spec, sizes)


def _state_bytes(state: Any, config: ModelConfig, sizes: Mapping[str, int]) -> int:
    specs = part_specs(state, config, sizes, is_state=True)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True)
    return round(sum(_share(leaf, spec, sizes) for leaf, spec in pairs))


def _share(leaf, spec, sizes: Mapping[str, int]) -> float:
    """Returns the bytes of an array that one device holds."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize / num_shards(spec, sizes)


def estimate_round(
    config: ModelConfig,
    params: dict,
    device: Device,
    sizes: Mapping[str, int],
    *,
    rows: int,
    context: int,
    num_steps: int,
) -> Round:
    """Estimates the time of a round on a mesh.

    Args:
        config: the model's config.
        params: shapes of its parameters.
        device: the GPU.
        sizes: sizes of the mesh axes by name.
        rows: rows of the batch, a multiple of `data`.
        context: tokens in each row's KV cache.
        num_steps: draft levels.

    Returns:
        The round.
    """
    leaves = list(_bytes_of_parts(params, config, sizes))
    # Scales are bytes that are read, and no numbers of a product.
    numbers = [
        (name.removesuffix("/values"), shape, amount / leaf.dtype.itemsize)
        for (name, shape, amount), leaf in zip(leaves, jax.tree.leaves(params), strict=True)
        if not name.endswith("/scales")
    ]
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    work = Work(
        count_weights(config, numbers),
        count_weights(config, leaves),
        rows=rows // data,
        expert_rows=rows,
        tensor=tensor,
    )
    parts = tuple(parts_of_round(config, work, context, num_steps))
    has_fp8 = any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(params))
    launches = count_launches(config, num_steps)
    return Round(
        num_steps,
        parts,
        seconds_of_parts(parts, device, has_fp8=has_fp8),
        launches,
        launches * device.seconds_per_launch,
        tuple(_collectives(config, device, sizes, rows, num_steps)),
    )


def _collectives(
    config: ModelConfig, device: Device, sizes: Mapping[str, int], rows: int, num_steps: int
) -> Iterator[Collective]:
    """Yields what travels in a round. In a ring of n devices each sends `2 (n-1)/n` of a sum's bytes."""
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    passes = [(config.trunk_kinds, num_steps + 1)] + [((config.mtp_kind,), num_steps + 1)] * bool(num_steps)
    passes += [((config.mtp_kind,), 1)] * max(num_steps - 1, 0)
    moe = sum(nodes * sum(kind.is_moe for kind in kinds) for kinds, nodes in passes)  # layers x tokens of a row
    moe_count = sum(sum(kind.is_moe for kind in kinds) for kinds, _ in passes)
    layers, count = sum(nodes * len(kinds) for kinds, nodes in passes), sum(len(kinds) for kinds, _ in passes)
    row_bytes, own_rows = 2 * config.hidden_size, rows // data

    def travel(name: str, axis: str, count: int, nbytes: float) -> Collective:
        # `tensor` is the innermost axis. What leaves a node goes at the speed of the network.
        place = "link" if (tensor if axis == "tensor" else tensor * data) <= GPUS_PER_NODE else "network"
        seconds = count * SECONDS_PER_COLLECTIVE[place] + nbytes / getattr(device, place)
        return Collective(name, axis, count, nbytes, seconds)

    if tensor > 1:
        # One sum of attention and one of the feed-forward layer; where rows are gathered, experts sum those of all.
        share = 2 * (tensor - 1) / tensor
        sums = layers * own_rows + (layers - moe) * own_rows + moe * (rows if data > 1 else own_rows)
        yield travel("sums of layers", "tensor", 2 * count, share * row_bytes * sums)
        heads = 1 + num_steps
        yield travel(
            "embedding and best tokens", "tensor", 3 * heads, share * row_bytes * own_rows * (2 * num_steps + 1)
        )
    if data > 1:
        if moe:
            share = (data - 1) / data
            yield travel("rows to experts and back", "data", 2 * moe_count, 2 * share * row_bytes * moe * rows)
        yield travel("whether all rows have ended", "data", 1, 1)


def train_bytes(params: dict, sizes: Mapping[str, int], *, trains: str = "all") -> int:
    """Computes the bytes of parameters and optimiser per device in training.

    Args:
        params: shapes of the parameters as they are stored, which a frozen trunk keeps.
        sizes: sizes of the mesh axes by name.
        trains: the trained part, as in `mtpjax.TrainConfig`: float32, with AdamW's two moments.

    Returns:
        Bytes.
    """
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        own = math.prod(leaf.shape) / num_shards(param_spec(name, leaf.shape, sizes), sizes)
        is_trained = trains != "modules" or is_of_modules(name)
        total += own * (3 * 4 if is_trained else leaf.dtype.itemsize)
    return round(total)
