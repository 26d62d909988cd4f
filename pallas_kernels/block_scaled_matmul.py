"""A few rows times a matrix, optionally fp8 with block scales: op, kernel, reference.

Limit: the bytes of the matrix. With at most 64 rows, reading the weights takes longer than multiplying them, so the
kernel is arranged for its loads. It loads each weight once, 16 bytes per thread, and runs enough programs that tiles
are always in flight.

One form serves 1 to 64 rows and weights of any dtype. Rows are padded to 16 or more, the fewest that tensor cores
multiply; tensor cores also need fewer instructions per weight than scalar multiplications. Up to 16 rows run the same
code in the same order, so a row gets the same bits alone, in a batch, and among the draft tokens that are verified with
it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import loads_from_l2
from pallas_kernels.dequantise import dequantise
from pallas_kernels.device import num_processors
from pallas_kernels.dispatch import choose
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.row_product import row_times_matrix

MAX_ROWS = 64  # with more rows, multiplying takes longer than reading
TILE_BYTES = 16384  # weights per tile: eight loads of 16 bytes for each of 128 threads


def block_scaled_matmul(x, weights, scales=None, *, block=128, implementation="auto") -> jax.Array:
    """Multiplies a few rows by a matrix: `x @ weights`, or `x @ (weights * scales)` with block scales.

    DeepSeek-V3 (2412.19437, section 3.3) stores float8_e4m3fn with one scale per 128 x 128 block. Here every output has
    its own scale for each block of inputs; a checkpoint's scales are repeated along the outputs.

    The kernel multiplies weights as they are stored, scales the sum of each block, accumulates in float32 and rounds
    once. "xla" rounds each scaled weight to x's dtype first. Differentiable in reverse mode, with the gradient of
    "xla".

    Args:
        x: [..., D] floating.
        weights: [D, F] floating, such as float8_e4m3fn.
        scales: [ceil(D / block), F] floating, or None for weights without scales.
        block: Number of neighbouring inputs that share a scale.
        implementation: "xla" (plain JAX), "triton" (the kernel, on CUDA and ROCm), "interpreted" (the kernel in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`. More than 64 rows always run
            "xla".

    Returns:
        [..., F] in x's dtype.

    Raises:
        ValueError: The implementation is unknown, shapes do not fit, or the kernel was requested for a block that is
            not a power of two from 16 up, or for one-byte weights of 2^31 elements or more, which exceed its 32-bit
            offsets.
    """
    return partial_matmul(x, weights, scales, block=block, implementation=implementation).total()


def partial_matmul(x, weights, scales=None, *, block=128, dtype=None, implementation="auto") -> PartialSums:
    """Computes `block_scaled_matmul` without its last step, the sum over parts of the inputs.

    Args:
        x: As in `block_scaled_matmul`, and so are the other arguments.
        weights: [D, F].
        scales: [ceil(D / block), F] or None.
        block: Number of neighbouring inputs that share a scale.
        dtype: Dtype of x in the products, and of their total; None: x's. The kernel converts x while it loads.
        implementation: "xla", which always gives one part, "triton", "interpreted" or "auto".

    Returns:
        Parts [P, ..., F], whose total is the product.

    Raises:
        ValueError: As in `block_scaled_matmul`.
    """
    if x.ndim == 0 or weights.ndim != 2 or x.shape[-1] != weights.shape[0]:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape}: they are [..., D] and [D, F]")
    D, F = weights.shape
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if scales is not None and scales.shape != (pl.cdiv(D, block), F):
        raise ValueError(f"scales {scales.shape} do not fit weights {weights.shape} in blocks of {block} inputs")
    rows = x.size // D if D else 0
    has_few_rows = 0 < rows <= MAX_ROWS and F > 0
    shape = {"rows": rows, "inputs": D, "outputs": F, "dtype": str(dtype), "weights": str(weights.dtype)}
    chosen = choose(
        "block_scaled_matmul",
        implementation,
        ("xla", "triton"),
        shape,
        unsupported_reason=find_unsupported_reason(weights, scales, block) if has_few_rows else None,
        check=functools.partial(
            difference_from_reference, dtype=dtype, weights_dtype=weights.dtype, has_scales=scales is not None
        ),
    )
    if chosen == "xla" or not has_few_rows:
        return PartialSums(_block_scaled_matmul_xla(x.astype(dtype), weights, scales, block)[None], dtype)
    return PartialSums(_block_scaled_matmul_triton(x, weights, scales, block, dtype, chosen == "interpreted"), dtype)


def find_unsupported_reason(weights, scales, block: int) -> str | None:
    """Returns why the kernels of few rows cannot take these weights, or None if they can.

    Args:
        weights: [D, F].
        scales: [blocks, F] or None.
        block: Number of neighbouring inputs that share a scale.
    """
    # A tile must fit into a block of inputs, and Pallas uses 32-bit offsets for any array of at most 2^32 bytes.
    if scales is not None and (block < 16 or block & (block - 1)):
        return f"the kernel takes blocks of 16 inputs, 32, 64 and so on, not of {block}"
    if weights.dtype.itemsize == 1 and weights.size >= 2**31:
        return f"weights {weights.shape} are 2^31 elements or more, which exceed 32-bit offsets"
    return None


def difference_from_reference(implementation: str, *, dtype, weights_dtype, has_scales: bool) -> float:
    """Compares an implementation with `block_scaled_matmul_reference` on small arrays.

    Args:
        implementation: One of `block_scaled_matmul`.
        dtype: Dtype of x.
        weights_dtype: Dtype of the weights.
        has_scales: Weights with scales.

    Returns:
        The largest difference over its bound: more than 1 means that the numbers are wrong.
    """
    n, D, F, block = 3, 256, 128, 64
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, D), dtype)
    weights = (jax.random.normal(keys[1], (D, F)) * 0.1).astype(weights_dtype)
    scales = jax.random.uniform(keys[2], (D // block, F)) if has_scales else None
    found = block_scaled_matmul(x, weights, scales, block=block, implementation=implementation)
    expected = block_scaled_matmul_reference(x.astype(jnp.float32), weights, scales, block=block)
    bound = (1e-4 if dtype == jnp.float32 else 3e-2) * jnp.abs(expected).max()
    return float(jnp.abs(found.astype(jnp.float32) - expected).max() / bound)


def block_scaled_matmul_reference(x, weights, scales=None, *, block=128):
    """Computes `block_scaled_matmul` in plain float32 JAX, which defines its meaning."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.matmul(x.astype(jnp.float32), _dequantised(weights, scales, block), precision=highest).astype(x.dtype)


def _block_scaled_matmul_xla(x, weights, scales, block):
    """Rounds the scaled weights to x's dtype, which the tensor cores need for many rows."""

    def product():
        return x @ (weights if scales is None else _dequantised(weights, scales, block)).astype(x.dtype)

    def product_of_one_row():
        wide = row_times_matrix(x.reshape(-1), _dequantised(weights, scales, block))
        return wide.astype(x.dtype).reshape(*x.shape[:-1], -1)

    if x.size != x.shape[-1]:
        return product()
    return jax.lax.platform_dependent(cpu=product, default=product_of_one_row)


def _dequantised(weights, scales, block):
    return weights.astype(jnp.float32) if scales is None else dequantise(weights, scales, block, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _block_scaled_matmul_triton(x, weights, scales, block, dtype, interpret):
    """Runs the kernel over x as rows [n, D]: each program computes one column of tiles, or one part of it."""
    D, F = weights.shape
    n = x.size // D
    padded = max(16, pl.next_power_of_2(n))
    is_one_byte, is_float32 = weights.dtype.itemsize == 1, dtype.itemsize == 4
    # Tile of the weights, `inputs x columns`: 16 KB, or less where x is multiplied in float32, because exact float32
    # products run without tensor cores and need more registers. A scaled tile never crosses a
    # block of inputs, so one scale per column covers it.
    columns = min(64 if is_float32 else 128, max(16, pl.next_power_of_2(F)))
    inputs = 32 if is_float32 else TILE_BYTES // (128 * weights.dtype.itemsize)
    inputs = inputs if scales is None else min(inputs, block)
    num_tiles, num_columns = pl.cdiv(D, inputs), pl.cdiv(F, columns)
    # Split D into parts where the columns alone give too few programs. They stay float32; `PartialSums` adds them.
    num_parts = _num_parts(num_tiles, num_columns, inputs, padded, is_one_byte=is_one_byte)
    out_dtype = dtype if num_parts == 1 else jnp.float32

    # Grid: (columns of tiles, parts of D). x and the weights are passed whole; the kernel computes its own addresses.
    sums = pl.pallas_call(
        functools.partial(_block_scaled_matmul_kernel, padded=padded, tile=(inputs, columns), block=block, dtype=dtype),
        out_shape=jax.ShapeDtypeStruct((num_parts, n, F), out_dtype),
        grid=(num_columns, num_parts),
        out_specs=pl.BlockSpec((None, n, F), lambda column, part: (part, 0, 0)),
        # Stages prefetch tiles through shared memory. One-byte weights use none: their row order must reach registers
        # unchanged (see the kernel), and other programs hide the wait. 64 rows use 3 stages, the 64 KB of an MI300X.
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1 if is_one_byte else 4 if padded < 64 else 3),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * D * F,
            transcendentals=0,
            bytes_accessed=num_columns * n * D * x.dtype.itemsize  # each column of tiles needs all of x
            + D * F * weights.dtype.itemsize
            + (0 if scales is None else num_tiles * F * scales.dtype.itemsize)
            + num_parts * n * F * jnp.dtype(out_dtype).itemsize,
        ),
        metadata=loads_from_l2((x.nbytes, num_columns)),
        interpret=interpret,
        name="block_scaled_matmul",
    )(x.reshape(n, D), weights, *([] if scales is None else [scales]))
    return sums.reshape(num_parts, *x.shape[:-1], F)


def _num_parts(num_tiles, num_columns, inputs, padded, *, is_one_byte):
    """Returns the number of parts that a column of tiles is split into.

    Full bandwidth of an H100 needs about 25 KB of loads in flight per processor. Each program keeps three tiles of
    16 KB in flight, so two programs per processor suffice; programs with one-byte weights keep half a tile on
    average, so they need three. More programs than run at once would add a second wave that takes as long as the first.

    A part has at least 16 inputs per row. Below that, writing and reading the partial sums moves more than half as many
    bytes as the fp8 weights do. Only the padded number of rows counts, so a row gets the same bits beside 0 or 15
    others.
    """
    max_programs = (3 if is_one_byte else 2) * num_processors()
    return max(1, min(max_programs // num_columns, num_tiles * inputs // (16 * padded)))


def _block_scaled_matmul_kernel(x_ref, weights_ref, *refs, padded, tile, block, dtype):
    """Computes part of a column of tiles: x_ref [n, D], weights_ref [D, F], scales_ref [blocks, F], out_ref [n, F]."""
    *scales_refs, out_ref = refs
    inputs, columns = tile
    (n, D), F = x_ref.shape, weights_ref.shape[1]
    # This program's rows and its output columns.
    row = jnp.arange(padded)
    column = pl.program_id(0) * columns + jnp.arange(columns)
    is_column = column < F if F % columns else None

    def add_tile(index, total):
        x = load_inputs(x_ref, row, index * inputs, inputs).astype(dtype)
        return total + multiply_tile(x, weights_ref, scales_refs, index * inputs, column, is_column, block=block)

    # Sum the tiles of this part in float32. The bounds are int32 because Triton requires both of one type.
    num_tiles, num_parts, part = pl.cdiv(D, inputs), pl.num_programs(1), pl.program_id(1)
    begin, end = (jnp.int32(edge * num_tiles // num_parts) for edge in (part, part + 1))
    total = jax.lax.fori_loop(begin, end, add_tile, jnp.zeros((padded, columns), jnp.float32))
    # Store once, without the padded rows and columns.
    is_inside = (row < n)[:, None] & (column < F)[None, :]
    plt.store(elements(out_ref, row, column), total.astype(out_ref.dtype), mask=is_inside)


def load_inputs(x_ref, row, first, inputs):
    """Loads `inputs` inputs of each row of x_ref [n, D] from `first` on, inside a kernel: [rows, inputs]."""
    inner, D = first + jnp.arange(inputs), x_ref.shape[1]
    return _load(x_ref, row, inner, inner < D if D % inputs else None)


def multiply_tile(x, weights_ref, scales_refs, first, column, is_column, *, block):
    """Multiplies some inputs of each row by one tile of the weights, inside a kernel.

    One-byte weights need two rearrangements to reach the tensor cores without slow byte moves:

    - Row order. A thread loads 16 neighbouring columns of every 16th row, but a tensor core takes neighbouring inputs
      of one column. So the rows are loaded in an order in which each thread's own rows are neighbouring inputs. The
      bytes then move between threads four at a time. Pipeline stages would put the tile into shared memory along F,
      from which single bytes come out, so this form has no stages.
    - Conversion. fp8 goes to float16, float32 and then bfloat16, all at full rate. The direct conversion from float16
      to bfloat16 runs at a quarter of the rate on an H100.

    Args:
        x: [rows, inputs], from `load_inputs`.
        weights_ref: [D, F].
        scales_refs: One ref [blocks, F], or none.
        first: First input of the tile.
        column: Columns of the tile.
        is_column: Mask of the columns inside the matrix; None: all are.
        block: Number of inputs that share a scale.

    Returns:
        [rows, columns] float32.
    """
    inputs, columns = x.shape[1], len(column)
    inner = jnp.arange(inputs)
    is_one_byte = weights_ref.dtype.itemsize == 1
    # Tile row r holds input `r % num_threads * rows_per_thread + r // num_threads`, so the rows r, r + 16, ... of a
    # thread are neighbouring inputs.
    num_threads = min(16, inputs)
    rows_per_thread = inputs // num_threads
    order = inner % num_threads * rows_per_thread + inner // num_threads if is_one_byte else inner
    # Load a tile of weights; for one-byte weights, undo the row order inside registers: [rows_per_thread,
    # num_threads] -> [num_threads, rows_per_thread].
    weights = _load(weights_ref, first + order, column, is_column)
    if is_one_byte:
        weights = weights.reshape(rows_per_thread, num_threads, columns).transpose(1, 0, 2)
        weights = weights.reshape(inputs, columns)
    # Multiply in x's dtype with float32 sums. HIGHEST keeps float32 products exact and changes nothing for
    # bfloat16.
    weights = weights.astype(jnp.float32).astype(x.dtype)
    product = jnp.dot(x, weights, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    # Scale the tile's sum instead of its weights: one multiplication per output instead of one per weight.
    for scales_ref in scales_refs:
        product = product * _load(scales_ref, first // block + jnp.arange(1), column, is_column)
    return product


def _load(ref, row, column, is_column):
    """Loads `ref[row, column]`, zero outside the array; builds a mask only where the last tile exceeds it."""
    masks = [] if is_column is None else [jnp.broadcast_to(is_column[None, :], (len(row), len(column)))]
    if ref.shape[0] % len(row):
        masks.append(jnp.broadcast_to((row < ref.shape[0])[:, None], (len(row), len(column))))
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    return plt.load(elements(ref, row, column), mask=mask, other=jnp.zeros((), ref.dtype) if masks else None)


def elements(ref, row, column):
    """Addresses `ref[row, column]` element by element."""
    shape = (len(row), len(column))
    return ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)]


def _forward(x, weights, scales, block, dtype, interpret):
    return _block_scaled_matmul_triton(x, weights, scales, block, dtype, interpret), (x, weights, scales)


def _backward(block, dtype, interpret, residuals, gradient):
    # Differentiate the XLA form: training has many rows, for which XLA's matmuls are best.
    del interpret

    # The product is the sum of the parts, so each part has the product's gradient: the first one's counts.
    def multiply(x, weights, scales):
        return _block_scaled_matmul_xla(x.astype(dtype), weights, scales, block)

    product, pull = jax.vjp(multiply, *residuals)
    return pull(gradient[0].astype(product.dtype))


_block_scaled_matmul_triton.defvjp(_forward, _backward)
