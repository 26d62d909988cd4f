"""A run over a mesh: rows over all of its devices, parameters and optimiser over `fsdp`.

An update gathers the parameters once, adds up gradients where their rows are, and scatters the sums once: however many
parts a batch is split into, no array moves between its passes.
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
    """Arrays `[B, ...]`, which every process holds whole, with their rows over the mesh: each takes its own."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(lambda rows: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__), arrays)


def place_state(state: Any, mesh: Mesh, *, optimizer: optax.GradientTransformation, trains: str) -> Any:
    """A `TrainState` laid out over the mesh: parameters by the tables of `mtpjax.models.sharding`, what the optimiser
    keeps of
    one as the parameter lies, the rest on every device.
    """
    params, everywhere = shard_params(state.params, mesh), NamedSharding(mesh, PartitionSpec())

    def is_none(leaf):
        return isinstance(leaf, optax.MaskedNode)

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
    """`gradients_of_rows` of a batch that lies over the mesh: the batch's own losses, and gradients as `params` lie."""
    add = functools.partial(jax.lax.psum, axis_name=mesh.axis_names)
    others = tuple(name for name in mesh.axis_names if name != "fsdp")

    def gather(shard, spec):
        return jax.lax.all_gather(shard, "fsdp", axis=spec.index("fsdp"), tiled=True) if "fsdp" in spec else shard

    def scatter(gradient, spec):
        if "fsdp" not in spec:
            return add(gradient)
        mine = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True)
        return jax.lax.psum(mine, others)

    def of_batch(params, batch, *numbers):
        specs = jax.tree.map(lambda sharding: sharding.spec, param_shardings(params, mesh))
        changing = trained(specs, trains)

        def on_device(shards, batch, *numbers):
            (loss, losses), gradients = of_rows(jax.tree.map(gather, shards, specs), batch, *numbers, add_devices=add)
            return add((loss, losses)), jax.tree.map(scatter, gradients, changing)

        rows, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
        inside = (specs, rows, *(everywhere for _ in numbers))
        outside = (everywhere, changing)
        local = jax.shard_map(on_device, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
        return local(params, batch, *numbers)

    return of_batch
