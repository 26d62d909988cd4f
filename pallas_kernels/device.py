"""Finds the platform and size of the device that a kernel is compiled for, and orders programs to suit its caches."""

import functools

import jax
import jax.numpy as jnp

_H100_PROCESSORS = 132
NUM_DIES = 8  # on an MI300X


def num_processors() -> int:
    """Returns the GPU's number of processors, such as 132 for an H100 or 304 for an MI300X.

    The GPU is the current mesh's abstract device (when compiling ahead of time) or else JAX's first GPU. Without a GPU,
    an H100 is assumed, so that interpreted kernels split their work as on an H100.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and device.num_cores:
        return device.num_cores
    if jax.default_backend() == "gpu":
        return getattr(jax.devices()[0], "core_count", None) or _H100_PROCESSORS
    return _H100_PROCESSORS


def call_by_platform(run, *operands, interpret: bool, differs: bool = True):
    """Calls `run(*operands, platform=...)` with the platform that the computation is lowered for, "cuda" or "rocm".

    If `differs` is False, both platforms use the same code, and only one is traced.
    """
    if interpret or not differs:
        return run(*operands, platform="cuda")
    cuda, rocm = (functools.partial(run, platform=platform) for platform in ("cuda", "rocm"))
    return jax.lax.platform_dependent(*operands, rocm=rocm, default=cuda)


def die_order(*ids, grid, is_reordered: bool = True):
    """Reorders the programs of a grid so that neighbours run on the same die of an MI300X and share its L2 cache.

    An MI300X has eight dies, each with its own L2 cache. By default, consecutive programs run on the dies in turn, with
    program p on die p % 8. Here each die gets a run of consecutive grid positions instead. If the number of programs is
    not divisible by the number of dies, the lengths of the runs differ by one.

    Args:
        ids: The program's index along each grid axis, int32; the first axis varies fastest.
        grid: Number of programs along each axis.
        is_reordered: False keeps the program's position, for other devices and for programs that share no data.

    Returns:
        The program's new position along each axis, int32. Exactly one program gets each position.
    """
    if not is_reordered:
        return ids
    # The program's index in launch order.
    program, num_programs = jnp.int32(0), 1
    for index, size in zip(ids, grid, strict=True):
        program, num_programs = program + index * jnp.int32(num_programs), num_programs * size
    # Die d has the programs d, d + 8, d + 16 and so on. Its run starts after the runs of earlier dies; the first
    # `num_longer` runs are one position longer.
    run, num_longer = divmod(num_programs, NUM_DIES)
    die = jax.lax.rem(program, jnp.int32(NUM_DIES))
    place = die * jnp.int32(run) + jnp.minimum(die, jnp.int32(num_longer)) + jax.lax.div(program, jnp.int32(NUM_DIES))
    # Convert the position back to an index per axis.
    places = []
    for size in grid:
        places.append(jax.lax.rem(place, jnp.int32(size)))
        place = jax.lax.div(place, jnp.int32(size))
    return tuple(places)
