"""Adds an update to the residual stream and normalises the sum: op, kernel and reference.

Limit: at decoding's few rows, the launch. One kernel replaces three: adding the parts of a split product, adding them
to the residual stream, and the norm of the sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import choose
from pallas_kernels.partial_sums import PartialSums, sum_of_parts
from pallas_kernels.rms_norm import rms_norm_reference


def add_rms_norm(
    x, update: PartialSums, scale, *, eps=1e-6, zero_centred=False, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Adds an update to x, and normalises the sum (RMSNorm, 1910.07467).

    The update is rounded to its dtype before it is added, and the sum to x's dtype before it is normalised, as the
    separate operations do. Differentiable in reverse mode.

    Args:
        x: [..., D] floating, the residual stream.
        update: Product [..., D], such as the output of a layer.
        scale: [D] floating.
        eps: Added to the mean square before the square root.
        zero_centred: Multiplies by `1 + scale` instead of `scale`.
        implementation: "xla" (the reference), "triton" (the kernel, on CUDA and ROCm), "interpreted" (the kernel in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`.

    Returns:
        The sum and its norm, both [..., D] in x's dtype.

    Raises:
        ValueError: The implementation is unknown, or shapes do not fit.
    """
    if x.ndim == 0 or scale.shape != x.shape[-1:] or update.shape != x.shape:
        raise ValueError(f"x {x.shape} does not fit scale {scale.shape} and an update {update.shape}")
    shape = {"rows": x.size // x.shape[-1], "width": x.shape[-1], "parts": len(update.parts), "dtype": str(x.dtype)}
    chosen = choose("add_rms_norm", implementation, ("xla", "triton"), shape)
    if chosen == "xla" or x.size == 0:
        return add_rms_norm_reference(x, update, scale, eps=eps, zero_centred=zero_centred)
    return _add_rms_norm_triton(x, update, scale, eps, zero_centred, chosen == "interpreted")


def add_rms_norm_reference(x, update: PartialSums, scale, *, eps=1e-6, zero_centred=False):
    """Computes `add_rms_norm` in plain JAX, which defines its meaning."""
    total = (x + update.total()).astype(x.dtype)
    return total, rms_norm_reference(total, scale, eps=eps, zero_centred=zero_centred)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _add_rms_norm_triton(x, update, scale, eps, zero_centred, interpret):
    """Runs the kernel over rows [R, D]: each program takes one block of whole rows."""
    num_rows, width = x.size // x.shape[-1], x.shape[-1]
    # A row is padded to a power of two. As in `rms_norm`, the block depends on the width alone.
    padded = pl.next_power_of_2(width)
    block = max(1, 4096 // padded)
    block_of_rows = pl.BlockSpec((block, padded), lambda i: (i, 0))
    parts = update.parts.reshape(-1, num_rows, width)
    total, normed = pl.pallas_call(
        functools.partial(
            _add_rms_norm_kernel,
            dtype=update.dtype,
            num_rows=num_rows,
            width=width,
            eps=eps,
            zero_centred=zero_centred,
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), x.dtype)] * 2,
        grid=(pl.cdiv(num_rows, block),),
        in_specs=[
            block_of_rows,
            pl.BlockSpec((len(parts), block, padded), lambda i: (0, i, 0)),
            pl.BlockSpec((padded,), lambda i: (0,)),
        ],
        out_specs=[block_of_rows] * 2,
        compiler_params=plt.CompilerParams(num_warps=8 if padded >= 4096 else 4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=(4 + len(parts)) * x.size,
            transcendentals=num_rows,
            bytes_accessed=3 * x.nbytes + parts.nbytes + pl.cdiv(num_rows, block) * scale.nbytes,
        ),
        interpret=interpret,
        name="add_rms_norm",
    )(x.reshape(num_rows, width), parts, scale)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _add_rms_norm_kernel(
    x_ref, parts_ref, scale_ref, total_ref, normed_ref, *, dtype, num_rows, width, eps, zero_centred
):
    """Handles one block of rows: x_ref and the outputs [block, padded], parts_ref [P, block, padded]."""
    block, padded = x_ref.shape
    column = jnp.arange(padded)
    row = pl.program_id(0) * block + jnp.arange(block)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    # Add the parts in order, and round where the separate operations would.
    x = plt.load(x_ref, mask=mask, other=0.0)
    update = sum_of_parts(
        lambda part: plt.load(parts_ref.at[np.int32(part)], mask=mask, other=0.0), parts_ref.shape[0], dtype
    )
    total = (x.astype(jnp.float32) + update.astype(jnp.float32)).astype(x.dtype)
    plt.store(total_ref, total, mask=mask)
    # The norm, in float32; masked elements are zero and add nothing to the sum of squares.
    total = total.astype(jnp.float32)
    scale = plt.load(scale_ref, mask=column < width, other=0.0).astype(jnp.float32) + (1.0 if zero_centred else 0.0)
    inverse = jax.lax.rsqrt(jnp.sum(total * total, axis=1, keepdims=True) / width + eps)
    plt.store(normed_ref, (total * inverse * scale[None, :]).astype(normed_ref.dtype), mask=mask)


def _forward(x, update, scale, eps, zero_centred, interpret):
    return _add_rms_norm_triton(x, update, scale, eps, zero_centred, interpret), (x, update, scale)


def _backward(eps, zero_centred, interpret, residuals, gradients):
    del interpret
    # Differentiates the reference.
    _, pull = jax.vjp(functools.partial(add_rms_norm_reference, eps=eps, zero_centred=zero_centred), *residuals)
    return pull(gradients)


_add_rms_norm_triton.defvjp(_forward, _backward)
