"""A small loop that tests whether CUDA can run the loop of a decoding call as a graph."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax import compat

NUM_TURNS = 3  # iterations of the loop


def trial_loop(mesh: Mesh, options: dict[str, str] | None) -> Any:
    """Returns a jitted loop like a decoding call's, with a dynamic length, collectives and a donated state.

    CUDA and NCCL accept or reject a loop because of the kinds of nodes in its graph, not because of its size. This loop
    has the same kinds of nodes as a decoding call, but compiles quickly.

    Returns:
        A function that takes values `[P, 8]`, one row per device, and a number of iterations. Each iteration replaces
        every row with the mean of all rows plus 1.
    """

    def loop(x: jax.Array, num_turns: jax.Array) -> jax.Array:
        def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, x = carry
            if mesh.size > 1:
                # Decoding uses these two kinds of collectives, a sum and a gather.
                x = jax.lax.psum(x, mesh.axis_names) / mesh.size
                x = jax.lax.all_gather(x, mesh.axis_names).mean(0)
            return index + 1, x + 1

        return jax.lax.while_loop(lambda carry: carry[0] < num_turns, turn, (jnp.int32(0), x))[1]

    if mesh.size > 1:
        rows = PartitionSpec(mesh.axis_names)
        loop = jax.shard_map(loop, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False)
    return jax.jit(loop, compiler_options=options, donate_argnums=0)


def try_loop(mesh: Mesh, options: dict[str, str]) -> None:
    """Runs the trial loop as a graph.

    Args:
        options: compiler options that turn the loop into a graph.

    Raises:
        JaxRuntimeError: the loop fails or computes wrong numbers.
    """
    if mesh.size > 1:
        compat.allow_recorded_collectives(mesh.devices.flat)
    loop, x = trial_loop(mesh, options), jnp.ones((1, 8))
    if mesh.size > 1:
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        x = jax.make_array_from_callback((mesh.size, 8), sharding, lambda index: np.ones((1, 8), np.float32))
    # XLA runs the first call kernel by kernel and records the second one. Some errors appear only when the result is
    # read.
    for _ in range(2):
        x = jax.block_until_ready(loop(x, np.int32(NUM_TURNS)))
    found = np.asarray(x.addressable_data(0))
    if not (found == 1 + 2 * NUM_TURNS).all():
        raise jax.errors.JaxRuntimeError(f"a loop computed {found[0, 0]} instead of {1 + 2 * NUM_TURNS}")


def wait_for_devices(mesh: Mesh) -> None:
    """Waits until this process's devices in a mesh have finished all dispatched calls."""
    jax.block_until_ready(_barrier(mesh)())


@functools.cache
def _barrier(mesh: Mesh) -> Any:
    """Returns a program that runs on every device without collectives; each device runs its programs in order."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(lambda: jnp.zeros(mesh.size), out_shardings=sharding)
