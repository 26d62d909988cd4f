"""The few-row kernel in Triton's own language, called through the optional jax_triton package.

It is an alternative to the Pallas kernel (`kernel.py`) with the same tiles, parts and fp8 conversions, for JAX versions
without Pallas's Triton backend. This module imports jax_triton and triton, so import it only if they are installed.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax.experimental import pallas as pl

from pallas_kernels.fp8 import FP8_DIVISOR


def multiply_few_rows(x, weights, scales, *, tiles, block, dtype, platform) -> jax.Array:
    """Multiplies rows x [n, D] by weights [D, F] and optional float32 scales; the only fp8 dtype is float8_e4m3fn.

    `tiles` is the result of `kernel.choose_tiles`. Returns parts [P, n, F] in float32; a single part is in `dtype`.
    """
    (n, D), F = x.shape, weights.shape[1]
    rows, num_row_blocks, inputs, columns, num_parts = tiles
    # Pass fp8 as bytes, because Triton's frontend rejects float8_e4m3fn for an MI300X.
    is_fp8 = weights.dtype == jnp.float8_e4m3fn
    operands = [x, jax.lax.bitcast_convert_type(weights, jnp.uint8) if is_fp8 else weights]
    operands.append(x if scales is None else scales)  # without scales, a placeholder
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_type=jax.ShapeDtypeStruct((num_parts, n, F), dtype if num_parts == 1 else jnp.float32),
        grid=(pl.cdiv(F, columns), num_parts, num_row_blocks),
        num_warps=4,
        num_stages=1 if weights.dtype.itemsize == 1 else 4 if rows < 64 else 3,
        name="block_scaled_matmul_jax_triton",
        n=n,
        D=D,
        F=F,
        num_parts=num_parts,
        block=block,
        rows=rows,
        inputs=inputs,
        columns=columns,
        num_threads=min(16, inputs),
        dtype=_TRITON_DTYPES[jnp.dtype(dtype).name],
        has_scales=scales is not None,
        is_fp8=is_fp8,
        is_cuda=platform == "cuda",
        divisor=FP8_DIVISOR,
    )


def _mend_jax_triton() -> None:
    """Patches jax_triton 0.4.1, which does not support JAX 0.12 or Triton 3.7 and later."""
    library = jax_triton.triton_lib
    # Its dead-code rule takes one argument fewer than JAX 0.12 passes. JAX's default rule also removes unused calls.
    library.pe.dce_rules.pop(library.triton_kernel_call_p, None)
    # Triton's AMD compiler reads the cluster size from metadata that jax_triton does not set.
    make_llir = library.hb.HIPBackend.make_llir

    def make_llir_with_clusters(module, metadata, options):
        metadata.setdefault("num_ctas", 1)
        return make_llir(module, metadata, options)

    library.hb.HIPBackend.make_llir = staticmethod(make_llir_with_clusters)


_mend_jax_triton()
_TRITON_DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit
def kernel(
    x,
    weights,
    scales,
    out,
    n: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    num_parts: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    inputs: tl.constexpr,
    columns: tl.constexpr,
    num_threads: tl.constexpr,
    dtype: tl.constexpr,
    has_scales: tl.constexpr,
    is_fp8: tl.constexpr,
    is_cuda: tl.constexpr,
    divisor: tl.constexpr,
):
    """Computes part of a column of tiles for some rows; x is [n, D], weights [D, F], and out [num_parts, n, F]."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    part = tl.program_id(1)
    row = tl.program_id(2) * rows + tl.arange(0, rows)
    inner = tl.arange(0, inputs)
    # Load byte rows in an order in which each thread's own rows are neighbouring inputs (see `multiply_tile`).
    per_thread: tl.constexpr = inputs // num_threads
    order = inner % num_threads * per_thread + inner // num_threads if is_fp8 else inner
    num_tiles: tl.constexpr = (D + inputs - 1) // inputs
    total = tl.full((rows, columns), 0.0, tl.float32)
    for tile in range(part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts):
        first = tile * inputs
        is_x = (row < n)[:, None] & (first + inner < D)[None, :]
        x_tile = tl.load(x + row[:, None] * D + (first + inner)[None, :], mask=is_x, other=0.0).to(dtype)
        is_weight = (first + order < D)[:, None] & (column < F)[None, :]
        offsets = (first + order).to(tl.int64)[:, None] * F + column[None, :]
        tile_of_weights = tl.load(weights + offsets, mask=is_weight, other=0)
        if is_fp8:
            tile_of_weights = tl.reshape(tile_of_weights, (per_thread, num_threads, columns))
            tile_of_weights = tl.reshape(tl.permute(tile_of_weights, (1, 0, 2)), (inputs, columns))
            if is_cuda:
                tile_of_weights = tile_of_weights.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            else:
                # As in `convert_fp8`, s eeee fff -> s 0 eeee fff 0000000 gives the number / `divisor` in float16.
                bits = ((tile_of_weights.to(tl.int32) << 24) >> 1) >> 16
                tile_of_weights = (bits & 0xBF80).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        product = tl.dot(x_tile, tile_of_weights.to(dtype), input_precision="ieee")
        if has_scales:
            scale = tl.load(scales + first // block * F + column, mask=column < F, other=0.0)
            product = product * scale[None, :]
        total += product
    if is_fp8 and not is_cuda:
        total = total * divisor
    target = out + (part * n + row[:, None]).to(tl.int64) * F + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < n)[:, None] & (column < F)[None, :])
