"""What differs between JAX versions, and nothing else."""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, use_abstract_mesh

# Since jax 0.11 a Triton kernel lowers without a GPU only under a mesh that names the device; 0.10 accepts it too.
_GPUS = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "rocm": AbstractDevice(device_kind="gfx942", num_cores=304, platform="gpu"),  # MI300X, which only goes by this name
}

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84978434048  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def make_mesh(shape, devices=None) -> Mesh:
    """Makes a mesh from axis sizes by name, such as `{"data": 2, "model": 4}`, whose axes are all automatic.

    `jax.make_mesh` would make them explicit, where linen modules fail. `devices` defaults to all of `jax.devices()`, of
    which the first that suffice are taken; fewer than the product of the sizes is a ValueError.
    """
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=devices)


def lower_for(function, *arguments, platforms=("cuda", "rocm")) -> dict[str, jax.stages.Lowered]:
    """Lowers a function for GPUs on a machine that has none: `{platform: lowered}`, where `.as_text()` is the module.

    `function` is a Python function or a jitted one, `arguments` are arrays or `jax.ShapeDtypeStruct`s, `platforms` some
    of "cuda" (an H100) and "rocm" (an MI300X). One device; the result can be read but not compiled.
    """
    unknown = set(platforms) - set(_GPUS)
    if unknown:
        raise ValueError(f"platforms {sorted(unknown)} are none of {sorted(_GPUS)}")
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    lowered = {}
    for platform in platforms:
        mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=_GPUS[platform])
        with use_abstract_mesh(mesh):
            lowered[platform] = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
    return lowered


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """What Pallas hands to the Triton compiler."""

    name: str
    ir: str  # the module in Triton's dialect of MLIR (TTIR), as text
    num_warps: int
    num_stages: int


def triton_kernels(lowered: jax.stages.Lowered) -> list[TritonKernel]:
    """The Triton kernels of a module that `lower_for` gave, in the order of their calls."""
    from jax._src.lib.triton import dialect  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    kernels = []

    def visit(operation: Any):
        if operation.name == "stablehlo.custom_call" and "triton" in operation.attributes["call_target_name"].value:
            call = operation.attributes["mhlo.backend_config"]
            # Bytecode, and in a context of its own: jax's does not know the dialect.
            with ir.Context() as context, ir.Location.unknown():
                dialect.register_dialect(context)
                text = ir.Module.parse(call["ir"].value_bytes).operation.get_asm()
            kernels.append(
                TritonKernel(
                    name=call["name"].value,
                    ir=str(text),
                    num_warps=call["num_warps"].value,
                    num_stages=call["num_stages"].value,
                )
            )
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return kernels


@functools.cache  # one device is one object, so that meshes made in two places are equal
def h100_devices(topology: str = "1x1x1") -> tuple:
    """H100s to compile for ahead of time, on a machine that has none; nothing runs on them.

    `topology` is partitions x hosts x GPUs per host. Needs the jax-cuda13-plugin and jax-cuda13-pjrt wheels, in jax's
    own version (without their dependencies); where they are missing a RuntimeError says so::

        mesh = make_mesh({"data": 8}, h100_devices("1x1x8"))
        with use_abstract_mesh(mesh.abstract_mesh):
            x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
            compiled = jax.jit(function).lower(x).compile()
    """
    try:
        return tuple(topologies.get_topology_desc("", "cuda", target_config=_H100, topology=topology).devices)
    except RuntimeError as error:
        raise RuntimeError(
            "no CUDA plug-in to compile for an H100 with: install jax-cuda13-plugin and jax-cuda13-pjrt in the version "
            f"of jax, {jax.__version__}, and set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before jax starts"
        ) from error
