"""Multiplies a few rows by a matrix, optionally in fp8 with block scales, with a kernel or in plain JAX.

Bottleneck: reading the matrix. With at most 64 rows, reading the weights takes longer than multiplying them, so the
kernel is optimised for its loads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.block_scaled_matmul.kernel import choose_tiles, multiply_few_rows
from pallas_kernels.block_scaled_matmul.reference import block_scaled_matmul_reference, block_scaled_matmul_xla
from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.device import call_by_platform
from pallas_kernels.dispatch import choose
from pallas_kernels.fp8 import is_converted_by_integers
from pallas_kernels.partial_sums import PartialSums

__all__ = ["block_scaled_matmul", "block_scaled_matmul_reference", "partial_matmul", "partial_matmuls"]
MAX_ROWS = 64  # with more rows, multiplying takes longer than reading


def block_scaled_matmul(x, weights, scales=None, *, block=128, implementation="auto") -> jax.Array:
    """Multiplies a few rows by a matrix, as `x @ weights` or, with block scales, `x @ (weights * scales)`.

    DeepSeek-V3 (2412.19437, section 3.3) stores float8_e4m3fn with one scale per 128 x 128 block. Here every output
    column has a scale for each block of inputs; a checkpoint's scales are repeated along the outputs.

    The kernel multiplies weights as they are stored, scales the sum of each block, accumulates in float32 and rounds
    once. "xla" rounds each scaled weight to x's dtype first. On ROCm, the kernel reads a float8_e4m3fn NaN as 480.
    Differentiable in reverse mode, with the gradient of "xla".

    Args:
        x: [..., D] floating.
        weights: [D, F] floating, such as float8_e4m3fn.
        scales: [ceil(D / block), F] floating, or None for weights without scales.
        block: Number of neighbouring inputs that share a scale.
        implementation: As for every op, or "jax_triton" (a kernel called through the jax_triton package). With more
            than 64 rows, "xla" always runs.

    Returns:
        [..., F] in x's dtype.

    Raises:
        ValueError: The kernel was requested for a block that is not a power of two of at least 16, or for one-byte
            weights of 2^31 elements or more, which exceed its 32-bit offsets.
    """
    return partial_matmul(x, weights, scales, block=block, implementation=implementation).total()


def partial_matmul(x, weights, scales=None, *, block=128, dtype=None, implementation="auto") -> PartialSums:
    """Computes `block_scaled_matmul` except for the final sum over parts of the inputs; returns [P, ..., F].

    The multiplication and the total use `dtype` (None: x's dtype), to which the kernel converts x as it loads it.
    """
    [sums] = partial_matmuls(x, ((weights, scales),), block=block, dtype=dtype, implementation=implementation)
    return sums


def partial_matmuls(
    x, matrices: Sequence[tuple], *, block=128, dtype=None, implementation="auto"
) -> tuple[PartialSums, ...]:
    """Computes `partial_matmul` of the same rows with several matrices, in one kernel launch.

    `matrices` are pairs of weights [D, F] and scales or None. In one kernel launch, all weights must have the same
    dtype, and either all or none must have scales.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    for matrix in matrices:
        check_matrix(x, *matrix, block=block)
    kinds = {(weights.dtype, scales is not None) for weights, scales in matrices}
    # A launch supports only one kind of weights, so matrices of different kinds run one by one.
    if len(kinds) > 1:
        each = functools.partial(partial_matmul, x, block=block, dtype=dtype, implementation=implementation)
        return tuple(each(*matrix) for matrix in matrices)
    chosen = choose_for_few_rows(
        "block_scaled_matmul",
        implementation,
        x,
        matrices,
        block=block,
        dtype=dtype,
        make_case=make_case,
        has_jax_triton_form=True,
    )
    if chosen == "xla":
        parts = tuple(product[None] for product in _multiply_xla(x, matrices, block, dtype))
    else:
        parts: tuple = _multiply_by_kernel(x, tuple(matrices), block, dtype, chosen)
    return tuple(PartialSums(part, dtype) for part in parts)


def make_case(shape: Shape) -> Case:
    return make_matrix_case(block_scaled_matmul, shape)


def _multiply_xla(x, matrices, block, dtype):
    """Multiplies by each matrix in plain JAX."""
    return tuple(block_scaled_matmul_xla(x.astype(dtype), *matrix, block=block) for matrix in matrices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _multiply_by_kernel(x, matrices, block, dtype, chosen):
    """Runs a kernel over x as rows [n, D]; returns the parts [P, ..., F] of each product."""
    rows = x.reshape(-1, x.shape[-1])
    if chosen == "jax_triton":
        run = functools.partial(_multiply_jax_triton, block=block, dtype=dtype)
        parts = call_by_platform(run, rows, matrices, interpret=False)
    else:
        interpret = chosen == "interpreted"
        run = functools.partial(multiply_few_rows, block=block, dtype=dtype, interpret=interpret)
        differs = is_converted_by_integers(matrices[0][0].dtype, "rocm")
        parts = call_by_platform(run, rows, matrices, interpret=interpret, differs=differs)
    return tuple(part.reshape(len(part), *x.shape[:-1], -1) for part in parts)


def _multiply_jax_triton(rows, matrices, *, block, dtype, platform):
    # Imported here, because the package is optional.
    from pallas_kernels.block_scaled_matmul import jax_triton_kernel

    multiply, sizes = jax_triton_kernel.multiply_few_rows, {"block": block, "dtype": dtype}
    return [
        multiply(rows, *matrix, tiles=choose_tiles(rows, [matrix], **sizes), platform=platform, **sizes)
        for matrix in matrices
    ]


def _forward(x, matrices, block, dtype, chosen):
    return _multiply_by_kernel(x, matrices, block, dtype, chosen), (x, matrices)


def _backward(block, dtype, chosen, residuals, gradients):
    # Differentiate the XLA form, because training has many rows, for which XLA's matmuls are best.
    del chosen
    # A product is the sum of its parts, so all parts have the product's gradient. Use the gradient of the first part.
    products, pull = jax.vjp(functools.partial(_multiply_xla, block=block, dtype=dtype), *residuals)
    return pull(tuple(part[0].astype(product.dtype) for part, product in zip(gradients, products, strict=True)))


_multiply_by_kernel.defvjp(_forward, _backward)


def check_matrix(x, weights, scales, block: int, *, layout: str = "[D, F]", multiple: int = 1) -> None:
    """Raises ValueError for weights [D, F] and scales [ceil(D / block), F] or None that do not fit x [..., D].

    The message calls the weights' shape `layout`; `multiple` must divide F.
    """
    if x.ndim == 0 or weights.ndim != 2 or x.shape[-1] != weights.shape[0] or weights.shape[1] % multiple:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape}: expected [..., D] and {layout}")
    if scales is not None and scales.shape != (pl.cdiv(len(weights), block), weights.shape[1]):
        raise ValueError(f"scales {scales.shape} do not fit weights {weights.shape} in blocks of {block} inputs")


def choose_for_few_rows(
    op: str,
    implementation: str,
    x,
    matrices: Sequence[tuple[Any, Any]],
    *,
    block: int,
    dtype,
    make_case: Callable[[Shape], Case],
    has_jax_triton_form: bool = False,
) -> str:
    """Returns the implementation that an op runs; "xla" for no rows or for more rows than the kernels support.

    Args:
        x: [..., D].
        matrices: Pairs of weights [D, F] and scales or None, all of one kind.
        has_jax_triton_form: Whether the op also has a jax_triton kernel.
    """
    D, F = x.shape[-1], sum(weights.shape[1] for weights, _ in matrices)
    rows = x.size // D if D else 0
    # The kernels support few rows, or any number within `batch_invariant`.
    has_few_rows = 0 < rows <= (rows if is_batch_invariant() else MAX_ROWS) and F > 0
    reasons = (_find_unsupported_reason(*matrix, block=block) for matrix in matrices) if has_few_rows else ()
    shape = {"rows": rows, "inputs": D, "outputs": F, "dtype": str(dtype), "weights": str(matrices[0][0].dtype)}
    reason = next(filter(None, reasons), None)
    offered = ["xla", "triton"]
    # jax_triton is optional, and the only fp8 dtype that its kernel supports is float8_e4m3fn.
    if has_jax_triton_form:
        weights_dtype = matrices[0][0].dtype
        obstacle = None
        if not HAS_JAX_TRITON:
            obstacle = "the jax_triton and triton packages are not installed"
        elif weights_dtype.itemsize == 1 and weights_dtype != jnp.float8_e4m3fn:
            obstacle = f"the jax_triton kernel does not support {weights_dtype} weights"
        if obstacle is None:
            offered.append("jax_triton")
        elif implementation == "jax_triton":
            raise ValueError(obstacle)
    # Many rows run in XLA, but an unknown implementation still raises an error.
    chosen = choose(op, implementation, offered, shape, unsupported_reason=reason, make_case=make_case)
    return chosen if has_few_rows else "xla"


def _find_unsupported_reason(weights, scales, block: int) -> str | None:
    """Returns why the few-row kernels do not support these weights, or None if they do.

    Args:
        weights: [D, F].
        scales: [blocks, F] or None.
    """
    # A tile must fit into a block of inputs, and Pallas uses 32-bit offsets for any array of at most 2^32 bytes.
    if scales is not None and (block < 16 or block & (block - 1)):
        return f"the kernel needs blocks of 16, 32, 64, ... inputs, not of {block}"
    if weights.dtype.itemsize == 1 and weights.size >= 2**31:
        return f"weights {weights.shape} have 2^31 elements or more, which exceeds 32-bit offsets"
    return None


def make_matrix_case(op: Callable[..., Any], shape: Shape) -> Case:
    """Makes a `Case` for an op whose arguments are rows, a matrix and its scales."""
    keys, D, F = random_keys(), shape["inputs"], shape["outputs"]
    arrays = random_normal(keys, (shape["rows"], D), shape["dtype"]), random_normal(keys, (D, F), shape["weights"])
    return op, (*arrays, jnp.ones((-(-D // 128), F))) if shape["weights"].startswith("float8") else arrays
