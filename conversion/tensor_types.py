"""Checks the dtypes and scales of tensors, and chooses the parameters' dtypes."""

from collections.abc import Mapping

import numpy as np

from conversion.files import TensorSource
from conversion.quantized_formats import ORIGINAL, SCALE_ENDS
from conversion.read_params import ScaleMap
from conversion.safetensors_header import DTYPES, E4M3, E8M0, FLOAT32, FLOATS, TensorInfo
from conversion.tensor_slice import ParamSpec
from mtpjax.errors import CheckpointFileError
from mtpjax.messages import count_of

# Scales are floats, or exponents (e8m0, which means 2^(x - 127)), which some programs store as plain bytes.
SCALES = (*FLOATS, E8M0, DTYPES["U8"])
SUPPORTED = "float32, float16, bfloat16, and float8_e4m3fn with a scale for each block"


def param_dtype(path: str, spec: ParamSpec, files: TensorSource, scales: ScaleMap, dtype) -> np.dtype:
    """Chooses a parameter's dtype, and rejects tensors with unsupported dtypes.

    If a parameter is assembled from tensors with different dtypes, such as q in bfloat16 and k in float32, it becomes
    float32, which represents all of their values exactly.

    Args:
        dtype: the dtype to cast to; None keeps the files' dtype.

    Raises:
        CheckpointFileError: a tensor has an unsupported dtype.
    """
    for piece in spec.slices:
        problem = _find_problem(piece.name, files.tensors[piece.name], scales, dtype is not None)
        if problem is not None:
            raise CheckpointFileError(f"{files.path}: {problem}")
    if dtype is not None:
        return np.dtype(dtype)
    found = {files.tensors[piece.name].dtype for piece in spec.slices}
    return found.pop() if len(found) == 1 else FLOAT32


def describe_mixed(specs: Mapping[str, ParamSpec], files: TensorSource) -> str:
    """Describes the parameters that are assembled from tensors with different dtypes.

    Returns:
        A clause with the number of parameters and an example, or "" if there are none. Missing tensors are ignored.
    """
    mixed = {}
    for path, spec in specs.items():
        names = dict.fromkeys(piece.name for piece in spec.slices if piece.name in files.tensors)
        if len({files.tensors[name].dtype for name in names}) > 1:
            mixed[path] = [f"{name} {files.tensors[name].dtype}" for name in names]
    if not mixed:
        return ""
    path, named = next(iter(mixed.items()))
    return (
        f"{count_of(len(mixed), 'parameter')} with tensors of different dtypes, read as float32: {path} "
        f"from {', '.join(named[:3])}{', …' if len(named) > 3 else ''}"
    )


def _find_problem(name: str, tensor: TensorInfo, scales: ScaleMap, is_cast: bool) -> str | None:
    """Returns the problem with a tensor's dtype, or None if it is supported."""
    if tensor.dtype in FLOATS or name in scales.names:
        return None
    what = f"tensor {name} has unsupported dtype {tensor.dtype}"
    if tensor.dtype == np.float64:
        # This is the only wider dtype. Casting changes its values, so the user decides.
        return None if is_cast else f"{what}; cast it: mtpjax convert --dtype float32 (or mtpjax.load with dtype)"
    if tensor.dtype == E4M3:
        return f"{what}; it is supported only for matrices with scales"
    # Integers and other 8-bit floats need scales, whose meaning is unknown.
    return f"{what}; supported: {SUPPORTED}"


def find_scales(
    tensors: Mapping[str, TensorInfo], wanted: dict[str, tuple[int, ...]], block: tuple[int, int] | None, said: str
) -> tuple[dict[str, str], list[str]]:
    """Finds the scales of every fp8 tensor, which are `weight_scale_inv` or, in some checkpoints, `weight_scale`.

    Args:
        block: rows and columns that share a scale, or None if the configuration does not describe fp8.
        said: the checkpoint's own description of its quantization, for messages.

    Returns:
        `(scales, problems)`: the name of each tensor's scale tensor, and messages about problems.
    """
    scales, problems = {}, []
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].dtype != E4M3 or len(shape) != 2:
            continue
        found = next((f"{name}{end}" for end in SCALE_ENDS if f"{name}{end}" in tensors), None)
        if found is None:
            problems.append(f"tensor {name} is float8_e4m3fn, but its scales {name}_scale_inv are missing")
        elif block is None:
            problems.append(
                f"tensor {name} is float8_e4m3fn, and its scales {found} have shape {tensors[found].shape}, but the "
                f"configuration does not describe block-wise fp8 (quant_method fp8): {said or 'no settings found'}. "
                f"What to do: {ORIGINAL}"
            )
        elif (problem := _find_scale_problem(found, tensors[found], shape, block)) is not None:
            problems.append(problem)
        else:
            scales[name] = found
    return scales, problems


def _find_scale_problem(name: str, tensor: TensorInfo, shape: tuple[int, ...], block: tuple[int, int]) -> str | None:
    # There is one scale per block. Blocks at the edges may be smaller.
    grid = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    kinds = {(): "one scale per tensor", (1,): "one scale per tensor", (1, 1): "one scale per tensor"}
    kinds |= {(shape[0],): "one scale per output", (shape[0], 1): "one scale per output"}
    if tensor.shape != grid:
        kind = kinds.get(tensor.shape)
        form = f": the weights are fp8 with {kind}, which is not supported. What to do: {ORIGINAL}" if kind else ""
        return f"tensor {name} has shape {tensor.shape}; weights {shape} in blocks of {block} need {grid}{form}"
    if tensor.dtype not in SCALES:
        return (
            f"tensor {name} has scales of unsupported dtype {tensor.dtype}; supported: float32, float16, bfloat16, "
            "and exponents (e8m0) as float8_e8m0fnu or uint8"
        )
    return None
