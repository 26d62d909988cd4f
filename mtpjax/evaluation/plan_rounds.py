"""Estimates the time of a round on a mesh from its parts, launches and collectives."""

from collections.abc import Iterator, Mapping

import jax

from mtpjax.evaluation.compiled_call import bytes_of_shards
from mtpjax.evaluation.roofline import Collective, Device, Round, Work, count_weights, make_round
from mtpjax.models.config import ModelConfig

GPUS_PER_NODE = 8
SECONDS_PER_COLLECTIVE = {"link": 10e-6, "network": 30e-6}  # assumed latencies within a node and between nodes


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
    """Estimates the time of a round on a mesh with axis `sizes`.

    `params` are shapes, `rows` is a multiple of the size of `data`, and `context` is the number of tokens in each row's
    KV cache.
    """
    leaves = list(bytes_of_shards(params, config, sizes))
    # Quantisation scales count as bytes to read, but not as weights to multiply.
    numbers = [
        (name.removesuffix("/values"), shape, amount / leaf.dtype.itemsize)
        for (name, shape, amount), leaf in zip(leaves, jax.tree.leaves(params), strict=True)
        if not name.endswith("/scales")
    ]
    # Rows are split over `data`, but experts process the rows of all devices.
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    elements, nbytes = count_weights(config, numbers), count_weights(config, leaves)
    work = Work(elements, nbytes, rows=rows // data, expert_rows=rows, tensor=tensor)
    has_fp8 = any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(params))
    collectives = tuple(_collectives(config, device, sizes, rows, num_steps))
    return make_round(config, device, work, context, num_steps, has_fp8=has_fp8, collectives=collectives)


def _collectives(
    config: ModelConfig, device: Device, sizes: Mapping[str, int], rows: int, num_steps: int
) -> Iterator[Collective]:
    """Yields a round's collectives. In a ring sum, each of n devices sends `2 (n-1)/n` of the array's bytes."""
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    # 1. List each pass's layers and tokens per row, for verification, the first draft level and the other levels.
    passes = [(config.trunk_kinds, num_steps + 1)] + [((config.mtp_kind,), num_steps + 1)] * bool(num_steps)
    passes += [((config.mtp_kind,), 1)] * max(num_steps - 1, 0)
    moe = sum(nodes * sum(kind.is_moe for kind in kinds) for kinds, nodes in passes)  # layers x tokens of a row
    moe_count = sum(sum(kind.is_moe for kind in kinds) for kinds, _ in passes)
    layers, count = sum(nodes * len(kinds) for kinds, nodes in passes), sum(len(kinds) for kinds, _ in passes)
    row_bytes, local_rows = 2 * config.hidden_size, rows // data

    def travel(name: str, axis: str, count: int, nbytes: float) -> Collective:
        # `tensor` is the innermost axis. Traffic between nodes runs at network speed.
        place = "link" if (tensor if axis == "tensor" else tensor * data) <= GPUS_PER_NODE else "network"
        seconds = count * SECONDS_PER_COLLECTIVE[place] + nbytes / getattr(device, place)
        return Collective(name, axis, count, nbytes, seconds)

    # 2. Heads and columns are sharded over `tensor`, rows and experts over `data`.
    if tensor > 1:
        # Each layer sums after attention and after the feed-forward layer. Experts sum all rows if rows are gathered.
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
