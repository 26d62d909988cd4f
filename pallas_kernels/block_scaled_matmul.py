"""Few rows times a matrix, which may be fp8 in scaled blocks: op, kernel, reference.

A product of few rows costs what reading the matrix costs. So all is arranged for the loads: every weight is loaded
once, 16 bytes a thread, and enough programs have tiles under way for the memory never to wait. One form serves one row
and 64, fp8 and other weights, padded to 16 rows for the tensor cores. One row does not need them, but they make it
cheaper too: 2 instructions a thread for a bfloat16 weight, against 4 with multiplications and additions. And up to 16
rows are the same code in the same order: a row gives the same bits alone, in a batch, and among the drafts verified
with it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import loads_from_l2
from pallas_kernels.dequantise import dequantise
from pallas_kernels.dispatch import choose

MOST_ROWS = 64  # beyond, multiplying takes longer than reading
_TILE_BYTES = 16384  # of weights: eight loads of 16 bytes for each of 128 threads


def block_scaled_matmul(x, weights, scales=None, *, block=128, implementation="auto") -> jax.Array:
    """`x @ weights`, or with a scale for every `block` inputs of an output `x @ (weights * scales)`.

    x [..., D], weights [D, F] and scales [ceil(D / block), F], floating, -> [..., F] in x's dtype. DeepSeek-V3
    (2412.19437, 3.3) has float8_e4m3fn in blocks of 128 x 128; here each output has its own scale: 3 % more bytes. The
    kernel multiplies a weight as it is stored and a block's sum by its scale, accumulates in float32 and rounds once;
    "xla" rounds each scaled weight to x's dtype.

    `implementation` is "xla", "triton" (the kernel: CUDA and ROCm), "interpreted" (the kernel on any machine, slowly)
    or "auto", see `pallas_kernels.dispatch`. The kernel is for up to 64 rows: more are left to "xla",
    whichever is asked for. Differentiable in reverse mode: the gradient is that of "xla". Raises
    ValueError for other implementations, for shapes that do not fit, and from the kernel for blocks that are no power
    of two from 16 on and for one-byte weights of 2^31 elements or more, which its 32-bit offsets do not reach.
    """
    if x.ndim == 0 or weights.ndim != 2 or x.shape[-1] != weights.shape[0]:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape}: they are [..., D] and [D, F]")
    D, F = weights.shape
    if scales is not None and scales.shape != (pl.cdiv(D, block), F):
        raise ValueError(f"scales {scales.shape} do not fit weights {weights.shape} in blocks of {block} inputs")
    rows = x.size // D if D else 0
    is_few, unfit = 0 < rows <= MOST_ROWS and F > 0, None
    if is_few and scales is not None and (block < 16 or block & (block - 1)):
        unfit = f"the kernel takes blocks of 16 inputs, 32, 64 and so on, not of {block}"
    if is_few and weights.dtype.itemsize == 1 and weights.size >= 2**31:
        unfit = f"weights {weights.shape} are 2^31 elements or more, which 32-bit offsets do not reach"
    shape = {"rows": rows, "inputs": D, "outputs": F, "dtype": str(x.dtype), "weights": str(weights.dtype)}
    chosen = choose("block_scaled_matmul", implementation, ("xla", "triton"), shape, unfit=unfit)
    if chosen == "xla" or not is_few:
        return _block_scaled_matmul_xla(x, weights, scales, block)
    return _block_scaled_matmul_triton(x, weights, scales, block, chosen == "interpreted")


def block_scaled_matmul_reference(x, weights, scales=None, *, block=128):
    """What `block_scaled_matmul` means: x [..., D], weights [D, F], scales [ceil(D / block), F] -> [..., F]."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.matmul(x.astype(jnp.float32), _scaled(weights, scales, block), precision=exact).astype(x.dtype)


def _block_scaled_matmul_xla(x, weights, scales, block):
    """Weights in x's dtype, as tensor cores want them for many rows."""
    return x @ (weights if scales is None else _scaled(weights, scales, block)).astype(x.dtype)


def _scaled(weights, scales, block):
    return weights.astype(jnp.float32) if scales is None else dequantise(weights, scales, block, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _block_scaled_matmul_triton(x, weights, scales, block, interpret):
    """The kernel over x as rows [n, D]: a program takes a column of tiles, or an even part of one."""
    D, F = weights.shape
    n = x.size // D
    padded = max(16, pl.next_power_of_2(n))
    is_narrow, is_exact = weights.dtype.itemsize == 1, x.dtype.itemsize == 4  # exact: no tensor cores, more registers
    columns = min(64 if is_exact else 128, max(16, pl.next_power_of_2(F)))
    inputs = 32 if is_exact else _TILE_BYTES // (128 * weights.dtype.itemsize)  # 128 of one byte, 64 of two, 32 of four
    inputs = inputs if scales is None else min(inputs, block)
    num_tiles, num_columns = pl.cdiv(D, inputs), pl.cdiv(F, columns)
    parts = _num_parts(num_tiles, num_columns, inputs, padded, is_narrow=is_narrow)
    out_dtype = x.dtype if parts == 1 else jnp.float32

    sums = pl.pallas_call(
        functools.partial(_block_scaled_matmul_kernel, padded=padded, tile=(inputs, columns), block=block),
        out_shape=jax.ShapeDtypeStruct((parts, n, F), out_dtype),
        grid=(num_columns, parts),
        out_specs=pl.BlockSpec((None, n, F), lambda column, part: (part, 0, 0)),
        # One byte: no stages, see the kernel; other programs hide its wait. 64 rows: 64 KB is all that an MI300X has.
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1 if is_narrow else 4 if padded < 64 else 3),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * D * F,
            transcendentals=0,
            bytes_accessed=num_columns * n * D * x.dtype.itemsize  # each column of tiles needs all of x
            + D * F * weights.dtype.itemsize
            + (0 if scales is None else num_tiles * F * scales.dtype.itemsize)
            + parts * n * F * jnp.dtype(out_dtype).itemsize,
        ),
        metadata=loads_from_l2((x.nbytes, num_columns)),
        interpret=interpret,
        name="block_scaled_matmul",
    )(x.reshape(n, D), weights, *([] if scales is None else [scales]))
    # One after the other, so that the order is always the same; XLA makes it part of what reads the result.
    total = functools.reduce(jnp.add, [sums[part] for part in range(parts)])
    return total.astype(x.dtype).reshape(*x.shape[:-1], F)


def _num_parts(num_tiles, num_columns, inputs, padded, *, is_narrow):
    """Into how many parts a column of tiles is split. Of the number of rows, only the padded one counts.

    An H100 has 132 processors and needs about 3.3 MB under way. Each program has three tiles of 16 KB on their way, so
    that two for a processor are plenty; but one-byte weights half of a tile on average, so three. No more than run at
    once: a few left over would take as long as all before them. A part has at least 16 inputs for each row: the sums of
    fewer would be more than half as many bytes as the fp8 weights that they are made of.
    """
    at_once = (3 if is_narrow else 2) * 132
    return max(1, min(at_once // num_columns, num_tiles * inputs // (16 * padded)))


def _block_scaled_matmul_kernel(x_ref, weights_ref, *refs, padded, tile, block):
    """A part of a column of tiles: x_ref [n, D], weights_ref [D, F], scales_ref [blocks, F], out_ref [n, F].

    A tile of one-byte weights arrives with 16 columns of every 16th row in a thread's registers. Tensor cores take
    neighbouring inputs of one column, and bytes that lie along F in shared memory come out of it one by one. So rows
    are loaded in an order in which a thread's own are neighbours, and they move four at a time. Through stages they
    would lie along F again. By way of float32 all conversions are fast: fp8 to float16, float32, bfloat16; straight
    from float16 to bfloat16 the hardware has a quarter of the speed, no more than the memory's.
    """
    *scales_refs, out_ref = refs
    inputs, columns = tile
    (n, D), F = x_ref.shape, weights_ref.shape[1]
    row, inner = jnp.arange(padded), jnp.arange(inputs)
    column = pl.program_id(0) * columns + jnp.arange(columns)
    is_narrow = weights_ref.dtype.itemsize == 1
    threads = min(16, inputs)  # of 128, eight beside each other
    own = inputs // threads
    order = inner % threads * own + inner // threads if is_narrow else inner

    def add_tile(index, total):
        first = index * inputs
        weights = _load(weights_ref, first + order, column)
        if is_narrow:
            weights = weights.reshape(own, threads, columns).transpose(1, 0, 2).reshape(tile)
        x = _load(x_ref, row, first + inner)
        weights = weights.astype(jnp.float32).astype(x.dtype)
        made = jnp.dot(x, weights, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        for scales_ref in scales_refs:
            made = made * _load(scales_ref, first // block + jnp.arange(1), column)
        return total + made

    num_tiles, parts, part = pl.cdiv(D, inputs), pl.num_programs(1), pl.program_id(1)
    begin, end = (jnp.int32(edge * num_tiles // parts) for edge in (part, part + 1))
    total = jax.lax.fori_loop(begin, end, add_tile, jnp.zeros((padded, columns), jnp.float32))
    is_inside = (row < n)[:, None] & (column < F)[None, :]
    plt.store(_at(out_ref, row, column), total.astype(out_ref.dtype), mask=is_inside)


def _load(ref, row, column):
    """`ref[row, column]` and zero beyond its ends, with a mask only where the last tile reaches beyond."""
    masks = []
    if ref.shape[0] % len(row):
        masks.append(jnp.broadcast_to((row < ref.shape[0])[:, None], (len(row), len(column))))
    if ref.shape[1] % len(column):
        masks.append(jnp.broadcast_to((column < ref.shape[1])[None, :], (len(row), len(column))))
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    return plt.load(_at(ref, row, column), mask=mask, other=jnp.zeros((), ref.dtype) if masks else None)


def _at(ref, row, column):
    shape = (len(row), len(column))
    return ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)]


def _forward(x, weights, scales, block, interpret):
    return _block_scaled_matmul_triton(x, weights, scales, block, interpret), (x, weights, scales)


def _backward(block, interpret, residuals, gradient):
    del interpret  # XLA's own: what is trained has many rows, where its products are the best
    _, pull = jax.vjp(functools.partial(_block_scaled_matmul_xla, block=block), *residuals)
    return pull(gradient)


_block_scaled_matmul_triton.defvjp(_forward, _backward)
