"""An op that adds an update to the residual stream and normalises the sum, with its kernel and reference.

Bottleneck: the launch, because decoding has few rows. One kernel replaces three, which add the parts of a split matmul,
add their sum to the residual stream, and normalise.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.case import Case, Shape, random_keys, random_normal, random_parts
from pallas_kernels.dispatch import choose
from pallas_kernels.gradients import differentiated_by
from pallas_kernels.partial_sums import PartialSums, load_sum
from pallas_kernels.rms_norm import rms_norm_reference


def add_rms_norm(
    x, update: PartialSums, scale, *, eps=1e-6, zero_centred=False, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Adds an update to x, and normalises the sum (RMSNorm, 1910.07467).

    The update is rounded to its dtype before it is added, and the sum is rounded to x's dtype before it is normalised,
    as in separate operations. Differentiable in reverse mode.

    Args:
        x: [..., D] floating, the residual stream; None if the stream starts with the update.
        update: [..., D], such as the output of a layer, possibly in parts (`PartialSums`).
        scale: [D] floating.
        eps: Added to the mean square before the square root.
        zero_centred: Multiplies by `1 + scale` instead of `scale`.

    Returns:
        The sum and its norm, both [..., D], in x's dtype or, without x, in the update's dtype.
    """
    stream = update if x is None else x
    if update.shape != stream.shape or not update.shape or scale.shape != update.shape[-1:]:
        raise ValueError(f"x {stream.shape} does not fit scale {scale.shape} and an update {update.shape}")
    width = update.shape[-1]
    rows = math.prod(update.shape) // width if width else 0
    shape = {"rows": rows, "width": width, "parts": len(update.parts), "dtype": str(stream.dtype)}
    chosen = choose("add_rms_norm", implementation, ("xla", "triton"), shape, make_case=make_case)
    if chosen == "xla" or rows == 0:
        return add_rms_norm_reference(x, update, scale, eps=eps, zero_centred=zero_centred)
    return _add_rms_norm_triton(x, update, scale, eps, zero_centred, chosen == "interpreted")


def make_case(shape: Shape) -> Case:
    keys, size = random_keys(), (shape["rows"], shape["width"])
    update = PartialSums(random_parts(keys, shape["parts"], size, shape["dtype"]), jnp.dtype(shape["dtype"]))
    return add_rms_norm, (random_normal(keys, size, shape["dtype"]), update, random_normal(keys, size[1:]))


def add_rms_norm_reference(x, update: PartialSums, scale, *, eps=1e-6, zero_centred=False):
    """Computes `add_rms_norm` in plain JAX, which defines its meaning."""
    total = update.total() if x is None else (x + update.total()).astype(x.dtype)
    return total, rms_norm_reference(total, scale, eps=eps, zero_centred=zero_centred)


@differentiated_by(add_rms_norm_reference, 3)
def _add_rms_norm_triton(x, update, scale, eps, zero_centred, interpret):
    """Runs the kernel over rows [R, D], with one block of whole rows per program."""
    *outer, width = update.shape
    num_rows, dtype = math.prod(outer), update.dtype if x is None else x.dtype
    # A row is padded to a power of two. As in `rms_norm`, the block depends only on the width.
    padded = pl.next_power_of_2(width)
    block = max(1, 4096 // padded)
    block_of_rows = pl.BlockSpec((block, padded), lambda i: (i, 0))
    parts = update.parts.reshape(-1, num_rows, width)
    total, normed = pl.pallas_call(
        functools.partial(
            _add_rms_norm_kernel, dtype=update.dtype, num_rows=num_rows, width=width, eps=eps, zero_centred=zero_centred
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), dtype)] * 2,
        grid=(pl.cdiv(num_rows, block),),
        in_specs=[
            *([] if x is None else [block_of_rows]),
            pl.BlockSpec((len(parts), block, padded), lambda i: (0, i, 0)),
            pl.BlockSpec((padded,), lambda i: (0,)),
        ],
        out_specs=[block_of_rows] * 2,
        compiler_params=plt.CompilerParams(num_warps=8 if padded >= 4096 else 4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=(4 + len(parts)) * num_rows * width,
            transcendentals=num_rows,
            bytes_accessed=(2 if x is None else 3) * num_rows * width * jnp.dtype(dtype).itemsize
            + parts.nbytes
            + pl.cdiv(num_rows, block) * scale.nbytes,
        ),
        interpret=interpret,
        name="add_rms_norm",
    )(*([] if x is None else [x.reshape(num_rows, width)]), parts, scale)
    return total.reshape(update.shape), normed.reshape(update.shape)


def _add_rms_norm_kernel(*refs, dtype, num_rows, width, eps, zero_centred):
    """Handles one block of rows; x_ref and the outputs are [block, padded], parts_ref is [P, block, padded]."""
    *x_refs, parts_ref, scale_ref, total_ref, normed_ref = refs
    block, padded = total_ref.shape
    column = jnp.arange(padded)
    row = pl.program_id(0) * block + jnp.arange(block)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    # Add the parts in order, and round where the separate operations would.
    total = load_sum(parts_ref, (), mask, dtype)
    for x_ref in x_refs:
        x = plt.load(x_ref, mask=mask, other=0.0)
        total = (x.astype(jnp.float32) + total.astype(jnp.float32)).astype(x.dtype)
    plt.store(total_ref, total, mask=mask)
    # Normalise in float32; masked elements are zero and add nothing to the sum of squares.
    total = total.astype(jnp.float32)
    scale = plt.load(scale_ref, mask=column < width, other=0.0).astype(jnp.float32) + (1.0 if zero_centred else 0.0)
    inverse = jax.lax.rsqrt(jnp.sum(total * total, axis=1, keepdims=True) / width + eps)
    plt.store(normed_ref, (total * inverse * scale[None, :]).astype(normed_ref.dtype), mask=mask)
