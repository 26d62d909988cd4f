"""An op that multiplies a few rows by SwiGLU's gate and up matrices, with its kernel and reference.

Bottleneck: reading the matrices. Each program multiplies by the same columns of gate and up, so SwiGLU needs no
separate launch, and the products are never written to memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.block_scaled_matmul import check_matrix, choose_for_few_rows, make_matrix_case
from pallas_kernels.block_scaled_matmul.kernel import TILE_BYTES, elements, load_inputs, multiply_tile, tile_rows
from pallas_kernels.block_scaled_matmul.reference import block_scaled_matmul_reference, block_scaled_matmul_xla
from pallas_kernels.case import Case, Shape
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform, num_processors
from pallas_kernels.fp8 import FP8_DIVISOR, is_converted_by_integers
from pallas_kernels.gradients import differentiated_by


def gated_matmul(x, weights, scales=None, *, block=128, implementation="auto") -> jax.Array:
    """Computes `silu(x @ gate) * (x @ up)` (SwiGLU, 2002.05202) for a few rows, optionally with fp8 block scales.

    The kernel rounds once; "xla" rounds the products and each factor to x's dtype. Differentiable in reverse mode, with
    the gradient of "xla".

    Args:
        x: [..., D] floating.
        weights: [D, 2 F] floating, such as float8_e4m3fn, with the gate columns before the up columns.
        scales: [ceil(D / block), 2 F] floating, or None for weights without scales.
        implementation: As for every op. With more than 64 rows, "xla" always runs.

    Returns:
        [..., F] in x's dtype.
    """
    check_matrix(x, weights, scales, block, layout="[D, 2 F]", multiple=2)
    chosen = choose_for_few_rows(
        "gated_matmul", implementation, x, ((weights, scales),), block=block, dtype=x.dtype, make_case=make_case
    )
    if chosen == "xla":
        return _gated_matmul_xla(x, weights, scales, block)
    return _gated_matmul_triton(x, weights, scales, block, chosen == "interpreted")


def make_case(shape: Shape) -> Case:
    return make_matrix_case(gated_matmul, shape)


def gated_matmul_reference(x, weights, scales=None, *, block=128):
    """Computes `gated_matmul` in plain float32 JAX, which defines its meaning."""
    products = block_scaled_matmul_reference(x.astype(jnp.float32), weights, scales, block=block)
    gate, up = jnp.split(products, 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _gated_matmul_xla(x, weights, scales, block):
    gate, up = jnp.split(block_scaled_matmul_xla(x, weights, scales, block), 2, axis=-1)
    return jax.nn.silu(gate) * up


@differentiated_by(_gated_matmul_xla, 3)
def _gated_matmul_triton(x, weights, scales, block, interpret):
    """Calls `_run_kernel` with the fp8 conversion for the platform that the computation is lowered for."""
    run = functools.partial(_run_kernel, block=block, interpret=interpret)
    differs = is_converted_by_integers(weights.dtype, "rocm")
    return call_by_platform(run, x, weights, scales, interpret=interpret, differs=differs)


def _run_kernel(x, weights, scales, *, block, interpret, platform):
    """Runs the kernel over x as rows [n, D]; each program computes some columns of the result."""
    D, F = weights.shape[0], weights.shape[1] // 2
    n = x.size // D
    padded, num_row_blocks = tile_rows(n)
    itemsize, is_float32 = weights.dtype.itemsize, x.dtype.itemsize == 4
    columns = _num_columns(F, is_float32=is_float32)
    # A gate tile and an up tile together take 16 KB, or less with few columns, because 64 rows of x must also fit. See
    # `block_scaled_matmul` for float32, scales and stages.
    inputs = 32 if is_float32 else min(128, TILE_BYTES // (2 * columns * itemsize))
    inputs = inputs if scales is None else min(inputs, block)
    inputs = min(inputs, max(16, pl.next_power_of_2(D)))
    num_programs, num_tiles = pl.cdiv(F, columns), pl.cdiv(D, inputs)
    gated = pl.pallas_call(
        functools.partial(
            _gated_matmul_kernel,
            padded=padded,
            tile=(inputs, columns),
            block=block,
            has_row_blocks=num_row_blocks > 1,
            is_integer_fp8=is_converted_by_integers(weights.dtype, platform),
        ),
        out_shape=jax.ShapeDtypeStruct((n, F), x.dtype),
        grid=(num_row_blocks, num_programs) if num_row_blocks > 1 else (num_programs,),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1 if itemsize == 1 else 4 if padded < 64 else 3),
        cost_estimate=pl.CostEstimate(
            flops=4 * num_row_blocks * padded * D * F,
            transcendentals=n * F,
            bytes_accessed=num_programs * x.nbytes
            + num_row_blocks * weights.nbytes
            + (0 if scales is None else num_row_blocks * num_tiles * 2 * F * scales.dtype.itemsize)
            + n * F * x.dtype.itemsize,
        ),
        metadata=loads_from_l2((x.nbytes, num_programs)),
        interpret=interpret,
        name="gated_matmul",
    )(x.reshape(n, D), weights, *([] if scales is None else [scales]))
    return gated.reshape(*x.shape[:-1], F)


def _num_columns(F: int, *, is_float32: bool) -> int:
    """Returns the largest number of columns per program that still gives nearly every processor a program.

    Gate times up needs complete sums, so with few columns the inputs cannot be split over programs instead.
    """
    columns = 32 if is_float32 else 64
    while columns > 16 and pl.cdiv(F, columns) < 0.75 * num_processors():
        columns //= 2
    return columns


def _gated_matmul_kernel(x_ref, weights_ref, *refs, padded, tile, block, has_row_blocks, is_integer_fp8):
    """Computes columns of the result [n, F] from x_ref [n, D], weights_ref [D, 2 F] and scales_ref [blocks, 2 F]."""
    *scales_refs, out_ref = refs
    inputs, columns = tile
    (n, D), F = x_ref.shape, out_ref.shape[1]
    row = (pl.program_id(0) * padded if has_row_blocks else 0) + jnp.arange(padded)
    column = pl.program_id(1 if has_row_blocks else 0) * columns + jnp.arange(columns)
    is_column = column < F if F % columns else None

    multiply = functools.partial(multiply_tile, block=block, is_integer_fp8=is_integer_fp8)

    def add_tile(index, totals):
        # Multiply by the same columns of gate and up.
        first = index * inputs
        x = load_inputs(x_ref, row, first, inputs)
        return tuple(
            total + multiply(x, weights_ref, scales_refs, first, begin + column, is_column)
            for total, begin in zip(totals, (0, F), strict=True)
        )

    zeros = jnp.zeros((padded, columns), jnp.float32)
    gate, up = jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(D, inputs)), add_tile, (zeros, zeros))
    # Undo the integer conversion's division before the activation, because the activation is not linear.
    if is_integer_fp8:
        gate, up = gate * FP8_DIVISOR, up * FP8_DIVISOR
    is_inside = (row < n)[:, None] & (column < F)[None, :]
    gated = gate * jax.nn.sigmoid(gate) * up
    plt.store(elements(out_ref, row, column), gated.astype(out_ref.dtype), mask=is_inside)
