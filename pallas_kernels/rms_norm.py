"""Op, kernel and reference for root mean square normalisation.

Bottleneck: memory bandwidth. The kernel reads each element of x once and writes it once; the arithmetic is a few
operations per element. This is the smallest kernel in the package, so copy it as a starting point for a new kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.dispatch import choose
from pallas_kernels.gradients import differentiated_by


def rms_norm(x, scale, *, eps=1e-6, zero_centred=False, implementation="auto") -> jax.Array:
    """Divides each row by its root mean square and multiplies it by a learned scale (RMSNorm, 1910.07467).

    The arithmetic is float32 and the result is rounded once, at the end. Differentiable in reverse mode.

    Args:
        x: [..., D] floating.
        scale: [D] floating.
        eps: Added to the mean square before the square root.
        zero_centred: Multiplies by `1 + scale` instead of `scale`, as Gemma and Qwen3-Next store their weights.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: `scale` does not match the last dimension of `x`.
    """
    if x.ndim == 0 or scale.shape != x.shape[-1:]:
        raise ValueError(f"x {x.shape} does not fit scale {scale.shape}: expected [..., D] and [D]")
    shape = {"rows": x.size // x.shape[-1], "width": x.shape[-1]}
    chosen = choose("rms_norm", implementation, ("xla", "triton"), shape)
    if chosen == "xla" or x.size == 0:
        return rms_norm_reference(x, scale, eps=eps, zero_centred=zero_centred)
    return _rms_norm_triton(x, scale, eps, zero_centred, chosen == "interpreted")


def rms_norm_reference(x, scale, *, eps=1e-6, zero_centred=False):
    """Computes `rms_norm` of x [..., D] with scale [D] in plain JAX, which defines its meaning."""
    x32 = x.astype(jnp.float32)
    scale32 = scale.astype(jnp.float32) + (1.0 if zero_centred else 0.0)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale32.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


@differentiated_by(rms_norm_reference, 2)
def _rms_norm_triton(x, scale, eps, zero_centred, interpret):
    """Runs the kernel over x as rows [R, D]; each program normalises one block of whole rows."""
    num_rows, width = x.size // x.shape[-1], x.shape[-1]
    # Triton arrays have power-of-two sizes, so a row is padded and its padding masked.
    padded = pl.next_power_of_2(width)
    # A block holds about 4096 elements, or one longer row. Its size depends only on the width, so a row gets the same
    # bits with any number of other rows.
    block = max(1, 4096 // padded)
    # The grid has one program per block of rows. Programs share only the scale.
    block_of_rows = pl.BlockSpec((block, padded), lambda i: (i, 0))
    grid = (pl.cdiv(num_rows, block),)
    out = pl.pallas_call(
        functools.partial(_rms_norm_kernel, num_rows=num_rows, width=width, eps=eps, zero_centred=zero_centred),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), x.dtype),
        grid=grid,
        in_specs=[block_of_rows, pl.BlockSpec((padded,), lambda i: (0,))],
        out_specs=block_of_rows,
        compiler_params=plt.CompilerParams(num_warps=8 if padded >= 4096 else 4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=4 * x.size,
            transcendentals=num_rows,
            bytes_accessed=2 * x.nbytes + grid[0] * scale.nbytes,  # each program reads the scale
        ),
        interpret=interpret,
        name="rms_norm",
    )(x.reshape(num_rows, width), scale)
    return out.reshape(x.shape)


def _rms_norm_kernel(x_ref, scale_ref, out_ref, *, num_rows, width, eps, zero_centred):
    """Normalises one block of rows; x_ref and out_ref are [block, padded], scale_ref is [padded]."""
    block, padded = x_ref.shape
    # Use masks, because the last block may extend beyond the rows, and every row beyond its width. Masked elements load
    # as zero, so they add nothing to the sum of squares, and are not stored.
    column = jnp.arange(padded)
    row = pl.program_id(0) * block + jnp.arange(block)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    x = plt.load(x_ref, mask=mask, other=0.0).astype(jnp.float32)
    scale = plt.load(scale_ref, mask=column < width, other=0.0).astype(jnp.float32) + (1.0 if zero_centred else 0.0)
    # A single pass loads each element once and keeps it in registers between the sum and the product. The mean divides
    # by the true width, not by the padded width.
    inverse = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / width + eps)
    plt.store(out_ref, (x * inverse * scale[None, :]).astype(out_ref.dtype), mask=mask)
