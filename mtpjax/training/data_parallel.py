"""Training on a mesh: rows are split over all devices, parameters and optimiser state over the axis "fsdp".

An update all-gathers the parameters once, accumulates the gradients of each device's rows on that device, and
reduce-scatters the sums once. So the traffic does not grow with the number of parts of a batch (`accumulation`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax.models.sharding import param_shardings, shard_params
from mtpjax.training.gradients import trained


def place_rows(arrays: Any, mesh: Mesh) -> Any:
    """Splits the rows of arrays over the mesh.

    Args:
        arrays: tree of arrays `[B, ...]`; every process has the whole batch.
        mesh: the mesh.

    Returns:
        The tree as global arrays. Each process copies only its own rows to its devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(lambda rows: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__), arrays)


def place_state(state: Any, mesh: Mesh, *, optimizer: optax.GradientTransformation, trains: str) -> Any:
    """Lays a `TrainState` out over the mesh.

    Args:
        state: the state.
        mesh: the mesh.
        optimizer: the optimiser that made the state's optimiser part.
        trains: the trained part, as in `TrainConfig`.

    Returns:
        The state. Parameters are sharded by `mtpjax.models.sharding`, moments like their parameters; counters are on
        every device.
    """
    params, everywhere = shard_params(state.params, mesh), NamedSharding(mesh, PartitionSpec())

    # Muon handles only some parameters, and its state has placeholders without an array for the others.
    def is_none(leaf):
        return isinstance(leaf, optax.MaskedNode)

    # Walk over the optimiser state: leaves that correspond to a parameter take its sharding, others are replicated.
    kept = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: leaf if is_none(leaf) else jax.device_put(leaf, param.sharding),
        state.optimizer,
        trained(params, trains),
        transform_non_params=lambda leaf: jax.device_put(leaf, everywhere),
        is_leaf=is_none,
    )
    return state.replace(params=params, optimizer=kept, step=jax.device_put(state.step, everywhere))


def over_mesh(of_rows: Callable[..., Any], mesh: Mesh, *, trains: str) -> Callable[..., Any]:
    """Turns a function of one device's rows into a function of a batch that is split over the mesh.

    Args:
        of_rows: `mtpjax.training.gradients.gradients_of_rows` with its settings bound.
        mesh: the mesh.
        trains: the trained part, as in `TrainConfig`.

    Returns:
        A function with the arguments of `of_rows` that returns the loss and losses of the whole batch, and gradients
        sharded like their parameters.
    """
    add = functools.partial(jax.lax.psum, axis_name=mesh.axis_names)
    others = tuple(name for name in mesh.axis_names if name != "fsdp")

    # Every device computes with whole parameters, so leaves that are split over fsdp are gathered first.
    def gather(shard, spec):
        return jax.lax.all_gather(shard, "fsdp", axis=spec.index("fsdp"), tiled=True) if "fsdp" in spec else shard

    # Each device has the gradient of its own rows. Sum them over all devices, and leave each device its shard: over
    # fsdp, sum and split are one reduce-scatter; a plain sum over the other axes follows.
    def scatter(gradient, spec):
        if "fsdp" not in spec:
            return add(gradient)
        mine = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True)
        return jax.lax.psum(mine, others)

    def of_batch(params, batch, *numbers):
        specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings(params, mesh))
        changing = trained(specs, trains)

        # The losses of a device's rows are shares of the batch's losses (they use the batch's target counts), so the
        # sum over devices is the batch's value.
        def on_device(shards, batch, *numbers):
            (loss, losses), gradients = of_rows(jax.tree.map(gather, shards, specs), batch, *numbers, add_devices=add)
            return add((loss, losses)), jax.tree.map(scatter, gradients, changing)

        # Rows are split over all axes; scalars and target counts are the same on every device.
        rows, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
        inside = (specs, rows, *(everywhere for _ in numbers))
        outside = (everywhere, changing)
        local = jax.shard_map(on_device, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
        return local(params, batch, *numbers)

    return of_batch
