"""Sizes of the device that a kernel is compiled for."""

import jax

_H100_PROCESSORS = 132


def num_processors() -> int:
    """Returns the number of processors of the GPU: 132 for an H100, 304 for an MI300X.

    It is that of the device that a mesh names without owning one, as when compiling ahead of time, else that of JAX's
    first GPU. Without a GPU it is an H100's, so that interpreted kernels split their work as there.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and device.num_cores:
        return device.num_cores
    if jax.default_backend() == "gpu":
        return getattr(jax.devices()[0], "core_count", None) or _H100_PROCESSORS
    return _H100_PROCESSORS
