"""Moves experts between devices to change the placement of a running model (`mtpjax.models.expert_placement`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import AXES, part_specs
from mtpjax.models.expert_placement import STACKS
from mtpjax.models.parallel import axes_that_divide, num_shards


def move_experts(experts: dict[str, Any], placement: dict[str, jax.Array], *, config: ModelConfig) -> dict[str, Any]:
    """Moves the experts of a layer to new slots.

    On a mesh, the devices pass their slots around in a ring, and each device copies the slots that it needs. A device
    holds at most its old slots, its new slots, and the slots in transit.

    Args:
        experts: parameters of the layer's experts, with a placement. On a mesh they are sharded for decoding.
        placement: tables of the new placement (`placement_tables`), with the same number of slots.

    Returns:
        The changed parameters, which are the stacks (with bit-identical experts) and the placement.
    """
    stacks = {name: experts[name] for name in STACKS if name in experts}
    # Find, for each new slot, the slot that currently holds its expert (the first one if there are several copies).
    source = experts["placement"]["slots_of_expert"][placement["expert_of_slot"], 0]
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name in AXES if name in mesh.shape}
    over = axes_that_divide(len(source), lambda axis: sizes.get(axis, 1))
    if not over:
        return {**jax.tree.map(lambda leaf: leaf[source], stacks), "placement": placement}
    assert not any(kind is AxisType.Manual for kind in mesh.axis_types)
    # Move one array at a time, so that only its shards are in transit.
    specs = part_specs({"experts": stacks}, config, sizes)["experts"]
    move = lambda stacks, source: jax.tree.map(lambda leaf: _take_around_ring(leaf, source, over), stacks)
    moved = jax.shard_map(move, in_specs=(specs, PartitionSpec()), out_specs=specs, check_vma=False)(stacks, source)
    return {**moved, "placement": jax.lax.with_sharding_constraint(placement, PartitionSpec())}


def _take_around_ring(own: jax.Array, source: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """Returns this device's shard of `leaf[source]`, where `own` is its shard of `leaf` along the axes `over`.

    XLA's automatic partitioning of `leaf[source]` would materialise the whole leaf on every device.
    """
    num_devices, device, size = math.prod(map(num_shards, over)), jax.lax.axis_index(over), len(own)
    wanted = jax.lax.dynamic_slice_in_dim(source, device * size, size)
    from_next = [(sender, (sender - 1) % num_devices) for sender in range(num_devices)]

    def take(passing: jax.Array, taken: jax.Array, step: jax.Array | int) -> jax.Array:
        """Copies the slots that this device needs from `passing`, the slots of the device `step` positions ahead."""
        place = wanted - (device + step) % num_devices * size
        is_here = ((place >= 0) & (place < size)).reshape(size, *[1] * (own.ndim - 1))
        return jnp.where(is_here, jnp.take(passing, place, axis=0, mode="clip"), taken)

    def pass_on(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        passing = jax.lax.ppermute(carry[0], over, from_next)
        return passing, take(passing, carry[1], step)

    _, taken = jax.lax.fori_loop(1, num_devices, pass_on, (own, take(own, own, 0)))
    return taken
