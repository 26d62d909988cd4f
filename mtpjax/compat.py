"""All code that depends on the JAX version."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

# XLA's description of an H100 (SXM), used instead of a device to compile ahead of time.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84978434048  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@contextlib.contextmanager
def library_settings() -> Iterator[None]:
    """Sets the JAX settings that the library's functions need, regardless of the caller's settings.

    The programs rely on standard dtype promotion, and calls transfer their arguments to the device. Callers may set
    `jax_numpy_dtype_promotion="strict"` and `transfer_guard("disallow")` to find mistakes in other code. Also usable as
    a decorator.
    """
    with jax.numpy_dtype_promotion("standard"), jax.transfer_guard("allow"):
        yield


def make_mesh(shape, devices=None) -> Mesh:
    """Makes a device mesh whose axes are all automatic.

    Args:
        shape: axis sizes by name, such as `{"data": 2, "model": 4}`.
        devices: the devices to use, in order; by default, the first of `jax.devices()`.

    Raises:
        ValueError: there are fewer devices than the product of the sizes.
    """
    # `jax.make_mesh` makes axes explicit by default, and Flax linen modules fail under explicit axes.
    types = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=devices)
    allow_recorded_collectives(mesh.devices.flat)
    return mesh


def is_one_node(devices: Iterable[Any]) -> bool:
    """Returns whether all devices are on one node."""
    # XLA exchanges the hosts' boot IDs, and assigns the same slice to all processes on one host. Devices from
    # `h100_devices` have no host, so each of their processes counts as one.
    name = "process_index" if jax.process_count() == 1 else "slice_index"
    return len({getattr(device, name, device.process_index) for device in devices}) == 1


def has_graph_flags() -> bool:
    """Returns whether the user's XLA_FLAGS determine what CUDA graphs record."""
    return "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", "")


def allow_recorded_collectives(devices: Iterable[Any]) -> None:
    """Lets CUDA graphs record loops that contain collectives between GPUs of one node.

    It sets NCCL_GRAPH_MIXING_SUPPORT to 0, unless the user has set it. With mixing, NCCL adds event nodes that order
    each recorded collective with collectives outside graphs. CUDA allows no event nodes in loops, and a decoding call
    has no collectives outside its graph. NCCL reads the variable when its first communicator starts, so call this
    before the first program on several GPUs.
    """
    devices = list(devices)
    if len(devices) > 1 and devices[0].platform != "cpu" and is_one_node(devices) and not has_graph_flags():
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")


def is_cuda() -> bool:
    """Returns whether JAX's default device is an NVIDIA GPU. Initializes JAX's backend."""
    device = jax.devices()[0]
    return device.platform in ("gpu", "cuda") and "cuda" in device.client.platform_version.lower()


@functools.cache  # devices compare by identity, and equal meshes need the same objects
def h100_devices(topology: str = "1x1x1") -> tuple:
    """Returns H100 devices for ahead-of-time compilation on a machine without a GPU. Nothing can run on them.

    `topology` is partitions x hosts x GPUs per host. Requires the jax-cuda13-plugin and jax-cuda13-pjrt wheels for the
    installed jax version, installed without their dependencies. Example::

        mesh = make_mesh({"data": 8}, h100_devices("1x1x8"))
        with use_abstract_mesh(mesh.abstract_mesh):
            x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
            compiled = jax.jit(function).lower(x).compile()

    Raises:
        RuntimeError: the wheels are missing, or `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is not set.
    """
    try:
        return tuple(topologies.get_topology_desc("", "cuda", target_config=_H100, topology=topology).devices)
    except RuntimeError as error:
        raise RuntimeError(
            "compiling for an H100 needs JAX's CUDA plug-in: install jax-cuda13-plugin and jax-cuda13-pjrt "
            f"{jax.__version__}, the installed jax version, and set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before jax starts"
        ) from error


@functools.cache
def tpu_devices(topology: str = "v5e:2x2") -> tuple:
    """Returns TPU devices for ahead-of-time compilation on a machine without a TPU. Nothing can run on them.

    Requires the libtpu wheel. `topology` is a name such as "v5e:2x2" or "v5p:2x2x1". Use the devices as in the example
    of `h100_devices`; a mesh may also consist of only the first few devices.

    Raises:
        RuntimeError: the wheel is missing, or does not know the topology.
    """
    # Without a TPU there is no metadata server to ask for the machine's type.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return tuple(topologies.get_topology_desc(topology, "tpu").devices)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"cannot compile for the TPU topology {topology}: is the libtpu wheel installed?") from error
