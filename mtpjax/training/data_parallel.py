"""Shards the rows of a training run over all devices, and parameters and optimiser state over "fsdp" and "context".

Over the axis "context", each row is split by its tokens (`mtpjax.models.context`). The other axes split whole rows.

A trunk layer is gathered when it runs, and again for its backward pass, so that no device holds the whole trunk
(`mtpjax.models.sharding.gather_layers`). The backward pass also reduce-scatters the layer's gradients. The embedding,
the head, and the MTP modules or the drafter are gathered once per update. Experts are also sharded over the axis
"expert". They are not gathered; instead, rows are sent to them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax import compat, distributed
from mtpjax.models.context import AXIS, all_tokens, token_order
from mtpjax.models.forward import trunk_states
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import param_shardings, shard_params
from mtpjax.training.config import TrainConfig
from mtpjax.training.train_state import trainable_params


def make_run_mesh(config: TrainConfig) -> Mesh | None:
    """Makes the mesh for a run; returns None for a single device."""
    sizes, is_multiprocess = dict(config.mesh), distributed.is_multiprocess()
    devices = distributed.mesh_devices(sizes)
    # Clocks differ between processes, so the processes would end after different numbers of updates.
    if is_multiprocess and config.seconds < math.inf:
        raise ValueError(
            f"seconds {config.seconds} is unsupported with several processes, whose clocks differ: use steps"
        )
    return compat.make_mesh(sizes, devices) if len(devices) > 1 else None


def row_spec(mesh: Mesh, ndim: int = 2) -> PartitionSpec:
    """Returns the partition spec of rows `[B, T]`, or of states `[B, T, D]`, which "context" splits by tokens."""
    by_row = tuple(axis for axis in mesh.axis_names if axis != AXIS)
    return PartitionSpec(by_row, AXIS) if ndim == 3 and AXIS in mesh.axis_names else PartitionSpec(by_row)


def shard_batch(arrays: Any, mesh: Mesh) -> Any:
    """Shards the rows of arrays over the mesh.

    Args:
        arrays: tree of arrays `[B, T]` and states `[B, T, D]`; every process has the whole batch.
    """
    return jax.tree.map(lambda rows: shard_rows(rows.shape, rows.__getitem__, mesh), arrays)


def shard_rows(shape: tuple[int, ...], read: Callable[[Any], np.ndarray], mesh: Mesh) -> jax.Array:
    """Makes rows `[B, T]` or states `[B, T, D]` that are sharded over the mesh, from the parts that this process needs.

    Args:
        read: returns the part at an index, which is a tuple of slices, or of a slice and an array of tokens.
    """
    sharding = NamedSharding(mesh, row_spec(mesh, len(shape)))
    if len(sharding.spec) == 1:
        return jax.make_array_from_callback(shape, sharding, read)
    order = token_order(shape[1], mesh.shape[AXIS])

    def read_in_order(index: Any) -> np.ndarray:
        return read((index[0], order[index[1]], *index[2:]))

    return jax.make_array_from_callback(shape, sharding, read_in_order)


def shard_train_state(state: Any, mesh: Mesh, *, optimizer: optax.GradientTransformation, trains: str) -> Any:
    """Shards a `TrainState` over the mesh."""
    params, replicated = shard_params(state.params, mesh), NamedSharding(mesh, PartitionSpec())

    # Muon handles only some parameters, and its state has placeholders without an array for the others.
    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    # In the optimiser state, leaves that correspond to a parameter get its sharding, and all others are replicated.
    optimizer_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: leaf if is_masked(leaf) else jax.device_put(leaf, param.sharding),
        state.optimizer,
        trainable_params(params, trains),
        transform_non_params=lambda leaf: jax.device_put(leaf, replicated),
        is_leaf=is_masked,
    )
    return state.replace(params=params, optimizer=optimizer_state, step=jax.device_put(state.step, replicated))


def sharded_loss_and_gradients(compute_gradients: Callable[..., Any], mesh: Mesh, *, trains: str) -> Callable[..., Any]:
    """Turns a gradient function for one device's rows into a gradient function for a batch sharded over the mesh.

    The returned function takes the arguments of `compute_gradients`. It returns the loss and losses of the whole batch,
    and gradients that are sharded like their parameters.
    """
    sum_over_devices = functools.partial(jax.lax.psum, axis_name=mesh.axis_names)

    # Each device has the gradients for its local rows. Sum them over the devices that hold the same shard. Over the
    # gathered axes, one reduce-scatter sums and splits; the trunk has already done this for its layers. Experts
    # already have the sum over the expert axis, because rows were sent to them.
    def scatter(path, gradient, spec):
        axes = _gathered_axes(spec)
        if axes and not _is_gathered_by_layer(path):
            gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=spec.index(axes), tiled=True)
        others = tuple(axis for axis in mesh.axis_names if axis not in spec and axis not in axes)
        return jax.lax.psum(gradient, others) if others else gradient

    def compute_batch_gradients(params, batch, *numbers):
        specs = _param_specs(params, mesh)
        trainable = trainable_params(specs, trains)

        # Each device's losses are shares of the batch's losses (they use the batch's target counts), so their sum over
        # the devices is the loss of the batch.
        def on_device(shards, batch, *numbers):
            (loss, losses), gradients = compute_gradients(
                _gather_params(shards, specs),
                batch,
                *numbers,
                sum_over_devices=sum_over_devices,
            )
            return sum_over_devices((loss, losses)), jax.tree_util.tree_map_with_path(scatter, gradients, trainable)

        # Scalars and target counts are the same on every device.
        rows, replicated = jax.tree.map(lambda array: row_spec(mesh, array.ndim), batch), PartitionSpec()
        in_specs = (specs, rows, *(replicated for _ in numbers))
        out_specs = (replicated, trainable)
        local = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return local(params, batch, *numbers)

    return compute_batch_gradients


@functools.partial(jax.jit, static_argnames=("model", "mesh", "layer_ids"))
def sharded_trunk_states(
    params: dict, tokens: jax.Array, segment_ids: jax.Array, *, model: MTPModel, mesh: Mesh, layer_ids: tuple[int, ...]
) -> jax.Array:
    """Runs `trunk_states` for rows that are sharded over the mesh, with the same arguments and result."""
    specs = _param_specs(params, mesh)

    def on_device(shards, tokens, segment_ids):
        params = _gather_params(shards, specs)
        states = trunk_states(params, tokens, segment_ids, model=model, layer_ids=layer_ids)
        return all_tokens(states, axis=1)

    rows = row_spec(mesh)
    local = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, rows, rows), out_specs=rows, check_vma=False)
    return local(params, tokens, segment_ids)


def _param_specs(params: dict, mesh: Mesh) -> dict:
    return jax.tree.map(lambda sharding: sharding.spec, param_shardings(params, mesh))


def _gather_params(shards: dict, specs: dict) -> dict:
    """Gathers the parameters that the trunk does not gather layer by layer."""

    def gather(path, shard, spec):
        axes = _gathered_axes(spec)
        if _is_gathered_by_layer(path) or not axes:
            return shard
        return jax.lax.all_gather(shard, axes, axis=spec.index(axes), tiled=True)

    return jax.tree_util.tree_map_with_path(gather, shards, specs)


def _is_gathered_by_layer(path) -> bool:
    """Returns whether a parameter belongs to a layer that the trunk gathers when it runs."""
    return path[0].key == "trunk"


def _gathered_axes(spec: PartitionSpec) -> tuple[str, ...] | str:
    """Returns the entry of a parameter's spec that splits its model width; () if there is none."""
    return next((axes for axes in spec if axes in ("fsdp", AXIS, ("fsdp", AXIS))), ())
