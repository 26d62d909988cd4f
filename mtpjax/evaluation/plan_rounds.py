"""Estimates how long a round takes on a mesh: its parts, launches and collectives."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax

from mtpjax.evaluation.compiled_call import bytes_of_shards
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

GPUS_PER_NODE = 8
SECONDS_PER_COLLECTIVE = {"link": 10e-6, "network": 30e-6}  # assumed latency, by whether it leaves the node


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a round.

    Attributes:
        name: what is sent.
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
class Round:
    """One round of a batch on a mesh.

    Attributes:
        num_steps: draft levels.
        parts: bytes and operations of a device.
        seconds_of_parts: estimated seconds of each.
        launches: kernels.
        seconds_of_launches: estimated seconds of all launches.
        collectives: its collectives.
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
    """Estimates the time of a round on a mesh with `sizes` by axis.

    `params` are shapes; `rows` is a multiple of the axis `data`, and `context` the tokens in each row's KV cache.
    """
    leaves = list(bytes_of_shards(params, config, sizes))
    # Quantisation scales add to the bytes that are read, but not to the weights that are multiplied.
    numbers = [
        (name.removesuffix("/values"), shape, amount / leaf.dtype.itemsize)
        for (name, shape, amount), leaf in zip(leaves, jax.tree.leaves(params), strict=True)
        if not name.endswith("/scales")
    ]
    # Rows are split over `data`, but experts process the rows of all devices.
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
    """Yields the collectives of a round. In a ring of n devices each sends `2 (n-1)/n` of a sum's bytes."""
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    passes = [(config.trunk_kinds, num_steps + 1)] + [((config.mtp_kind,), num_steps + 1)] * bool(num_steps)
    passes += [((config.mtp_kind,), 1)] * max(num_steps - 1, 0)
    moe = sum(nodes * sum(kind.is_moe for kind in kinds) for kinds, nodes in passes)  # layers x tokens of a row
    moe_count = sum(sum(kind.is_moe for kind in kinds) for kinds, _ in passes)
    layers, count = sum(nodes * len(kinds) for kinds, nodes in passes), sum(len(kinds) for kinds, _ in passes)
    row_bytes, local_rows = 2 * config.hidden_size, rows // data

    def travel(name: str, axis: str, count: int, nbytes: float) -> Collective:
        # `tensor` is the innermost axis. Traffic that leaves a node has the speed of the network.
        place = "link" if (tensor if axis == "tensor" else tensor * data) <= GPUS_PER_NODE else "network"
        seconds = count * SECONDS_PER_COLLECTIVE[place] + nbytes / getattr(device, place)
        return Collective(name, axis, count, nbytes, seconds)

    if tensor > 1:
        # One sum of attention and one of the feed-forward layer; where rows are gathered, experts sum those of all.
        share = 2 * (tensor - 1) / tensor
        sums = layers * local_rows + (layers - moe) * local_rows + moe * (rows if data > 1 else local_rows)
        yield travel("sums of layers", "tensor", 2 * count, share * row_bytes * sums)
        heads = 1 + num_steps
        yield travel(
            "embedding and best tokens", "tensor", 3 * heads, share * row_bytes * local_rows * (2 * num_steps + 1)
        )
    if data > 1:
        if moe:
            share = (data - 1) / data
            yield travel("rows to experts and back", "data", 2 * moe_count, 2 * share * row_bytes * moe * rows)
        yield travel("whether all rows have ended", "data", 1, 1)
