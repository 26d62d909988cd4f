"""Lowers functions for GPUs on a machine without one, and reads the Triton kernels of the result."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

# Since jax 0.11, lowering a Triton kernel without a GPU needs a mesh that specifies the device; 0.10 accepts one.
_GPUS = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "rocm": AbstractDevice(device_kind="gfx942", num_cores=304, platform="gpu"),  # the name of an MI300X
}


def lower_for(function, *arguments, platforms=("cuda", "rocm")) -> dict[str, jax.stages.Lowered]:
    """Lowers a function, jitted or not, for an H100 ("cuda") or an MI300X ("rocm") on a machine without a GPU.

    The result can be inspected but not compiled.

    Returns:
        The lowered function per platform; its `as_text()` is the StableHLO module.

    Raises:
        ValueError: a platform is unknown.
    """
    unknown = set(platforms) - set(_GPUS)
    if unknown:
        raise ValueError(f"unknown platforms {sorted(unknown)}: expected some of {sorted(_GPUS)}")
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    lowered = {}
    for platform in platforms:
        # The mesh specifies the device for the Triton lowering; both platforms lower from the same trace.
        mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=_GPUS[platform])
        with use_abstract_mesh(mesh):
            lowered[platform] = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
    return lowered


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A kernel as Pallas passes it to the Triton compiler."""

    name: str
    ir: str  # the module in Triton's dialect of MLIR (TTIR), as text
    num_warps: int
    num_stages: int


def triton_kernels(lowered: jax.stages.Lowered) -> list[TritonKernel]:
    """Collects the Triton kernels of a lowered function."""
    # JAX has no public module for these, so the private import stays inside the function.
    from jax._src.lib.triton import dialect  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    kernels = []

    def visit(operation: Any):
        if operation.name == "stablehlo.custom_call" and "triton" in operation.attributes["call_target_name"].value:
            call = operation.attributes["mhlo.backend_config"]
            # The call contains the kernel as MLIR bytecode. JAX's context does not have Triton's dialect, so parse
            # it in a new context.
            with ir.Context() as context, ir.Location.unknown():
                dialect.register_dialect(context)
                text = ir.Module.parse(call["ir"].value_bytes).operation.get_asm()
            sizes = {name: call[name].value for name in ("num_warps", "num_stages")}
            kernels.append(TritonKernel(call["name"].value, str(text), **sizes))
        return ir.WalkResult.ADVANCE

    # Kernels can be nested in loops and called functions, so walk every operation.
    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return kernels
