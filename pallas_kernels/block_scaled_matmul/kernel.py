"""The kernel of `block_scaled_matmul`, which multiplies a few rows by one matrix, or by several in one launch.

It loads each weight once, 16 bytes per thread, and runs enough programs that tiles are always in flight. The same code
handles 1 to 64 rows and weights of any dtype. Rows are padded to at least 16, the minimum for tensor cores, which also
need fewer instructions per weight than scalar multiplication. Up to 16 rows run the same code in the same order, so a
row gets the same bits alone, in a batch, and among the draft tokens that are verified with it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import ROWS, is_batch_invariant
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import num_processors
from pallas_kernels.fp8 import FP8_DIVISOR, convert_fp8, is_converted_by_integers

TILE_BYTES = 16384  # weights per tile: eight loads of 16 bytes for each of 128 threads


def multiply_few_rows(x, matrices, *, block, dtype, interpret, platform) -> list[jax.Array]:
    """Multiplies a few rows by several matrices. Each program computes all or part of a column of tiles of one matrix.

    Args:
        x: [n, D] floating, with n <= 64, or with any n inside `batch_invariant`.
        matrices: Pairs of weights [D, F], all of one dtype, and scales [ceil(D / block), F], or None in every pair.

    Returns:
        The parts [P, n, F] for each matrix, in float32 or, if there is only one part, in `dtype`.
    """
    (n, D), (first_weights, first_scales) = x.shape, matrices[0]
    is_one_byte = first_weights.dtype.itemsize == 1
    widths = [weights.shape[1] for weights, _ in matrices]
    padded, num_row_blocks, inputs, columns, num_parts = choose_tiles(x, matrices, block=block, dtype=dtype)
    num_tiles, num_columns = pl.cdiv(D, inputs), [pl.cdiv(F, columns) for F in widths]
    out_dtype = dtype if num_parts == 1 else jnp.dtype(jnp.float32)

    # The grid is (row blocks if there are several, tile columns of all matrices in order, parts of D). The arrays are
    # passed whole, and the kernel computes addresses.
    operands = [array for matrix in matrices for array in matrix if array is not None]
    return pl.pallas_call(
        functools.partial(
            _multiply_kernel,
            padded=padded,
            tile=(inputs, columns),
            block=block,
            dtype=dtype,
            num_columns=num_columns,
            has_row_blocks=num_row_blocks > 1,
            has_scales=first_scales is not None,
            is_integer_fp8=is_converted_by_integers(first_weights.dtype, platform),
        ),
        out_shape=[jax.ShapeDtypeStruct((num_parts, n, F), out_dtype) for F in widths],
        grid=(*([num_row_blocks] if num_row_blocks > 1 else []), sum(num_columns), num_parts),
        # Stages prefetch tiles through shared memory. One-byte weights are not prefetched, because their row order must
        # reach registers unchanged (see the kernel), and other programs hide the latency. For 64 rows, 3 stages fill
        # the 64 KB of an MI300X.
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1 if is_one_byte else 4 if padded < 64 else 3),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_row_blocks * padded * D * sum(widths),
            transcendentals=0,
            bytes_accessed=sum(num_columns) * x.nbytes  # each column of tiles needs all of x
            + num_row_blocks * sum(weights.nbytes for weights, _ in matrices)
            + num_row_blocks * sum(num_tiles * scales[:1].nbytes for _, scales in matrices if scales is not None)
            + num_parts * n * sum(widths) * out_dtype.itemsize,
        ),
        metadata=loads_from_l2((x.nbytes, sum(num_columns))),
        interpret=interpret,
        name="block_scaled_matmul",
    )(x, *operands)


def choose_tiles(x, matrices, *, block, dtype) -> tuple[int, int, int, int, int]:
    """Returns the rows per tile, the number of row blocks, the inputs and columns per tile, and the number of parts.

    The arguments are as in `multiply_few_rows`. The parts stay float32; `PartialSums` adds them.
    """
    (n, D), (weights, scales) = x.shape, matrices[0]
    rows, num_row_blocks = tile_rows(n)
    widths = [weights.shape[1] for weights, _ in matrices]
    inputs, columns = choose_tile(max(widths), weights.dtype, dtype, None if scales is None else block)
    # Split D into parts if the columns alone give too few programs.
    num_columns, is_one_byte = sum(pl.cdiv(F, columns) for F in widths), weights.dtype.itemsize == 1
    num_parts = count_parts(pl.cdiv(D, inputs), num_columns, inputs, rows, is_one_byte=is_one_byte)
    return rows, num_row_blocks, inputs, columns, num_parts


def tile_rows(n: int) -> tuple[int, int]:
    """Returns the rows per tile and the number of row blocks, which is 1 except within `batch_invariant`."""
    if is_batch_invariant():
        return ROWS, pl.cdiv(n, ROWS)
    return max(16, pl.next_power_of_2(n)), 1


def choose_tile(F: int, weights_dtype, dtype, block: int | None) -> tuple[int, int]:
    """Chooses the tile of the weights.

    A tile has 16 KB, or less if x is multiplied in float32, because exact float32 products run without tensor cores and
    need more registers. A scaled tile never crosses a block of inputs, so it needs only one scale per column.

    Args:
        F: Columns of the widest matrix.
        weights_dtype: Dtype of the weights.

    Returns:
        Inputs and columns per tile.
    """
    is_float32 = dtype.itemsize == 4
    inputs = 32 if is_float32 else TILE_BYTES // (128 * weights_dtype.itemsize)
    columns = min(64 if is_float32 else 128, max(16, pl.next_power_of_2(F)))
    return inputs if block is None else min(inputs, block), columns


def count_parts(num_tiles, num_columns, inputs, padded, *, is_one_byte):
    """Returns the number of parts that a column of tiles is split into.

    Full bandwidth on an H100 needs about 25 KB of loads in flight per processor. Each program keeps three tiles of
    16 KB in flight, so two programs per processor suffice; a program with one-byte weights keeps half a tile in flight
    on average, so three are needed. Additional programs would form a second wave that takes as long as the first.

    A part has at least 16 inputs per row. With fewer inputs, writing and reading the partial sums would move more than
    half as many bytes as loading the fp8 weights. Only the padded number of rows matters, so a row gets the same bits
    with 0 or 15 other rows.

    The next kernel adds the parts in one program per row. More than four parts cost more time than the split saves,
    unless fewer than half of the processors would have a program (bfloat16 weights on an H100; docs/results/gpu.md).
    """
    max_programs = (3 if is_one_byte else 2) * num_processors()
    num_parts = max(1, min(max_programs // num_columns, num_tiles * inputs // (16 * padded)))
    return num_parts if is_one_byte else min(num_parts, max(4, num_processors() // (2 * num_columns)))


def _multiply_kernel(x_ref, *refs, padded, tile, block, dtype, num_columns, has_row_blocks, has_scales, is_integer_fp8):
    """Computes part of a column of tiles; x is [n, D], weights [D, F], scales [blocks, F], results [parts, n, F]."""
    num_matrices, arrays = len(num_columns), 2 if has_scales else 1
    matrix_refs, out_refs = refs[: num_matrices * arrays], refs[num_matrices * arrays :]
    axis = 1 if has_row_blocks else 0
    program, part, num_parts, begin = pl.program_id(axis), pl.program_id(axis + 1), pl.num_programs(axis + 1), 0
    first_row = pl.program_id(0) * padded if has_row_blocks else 0
    inputs, columns = tile
    n, D = x_ref.shape

    def multiply(weights_ref, *scales_refs, out_ref, column_of_tiles):
        """Computes part of a column of tiles of one matrix."""
        F = weights_ref.shape[1]
        # This program's rows and its output columns.
        row = first_row + jnp.arange(padded)
        column = column_of_tiles * columns + jnp.arange(columns)
        is_column = column < F if F % columns else None

        def add_tile(index, total):
            x, first = load_inputs(x_ref, row, index * inputs, inputs).astype(dtype), index * inputs
            sizes = {"block": block, "is_integer_fp8": is_integer_fp8}
            return total + multiply_tile(x, weights_ref, scales_refs, first, column, is_column, **sizes)

        # Sum the tiles of this part in float32. The bounds are int32 because Triton requires both to have the same
        # type.
        num_tiles = pl.cdiv(D, inputs)
        first, last = (jnp.int32(edge * num_tiles // num_parts) for edge in (part, part + 1))
        total = jax.lax.fori_loop(first, last, add_tile, jnp.zeros((padded, columns), jnp.float32))
        total = total * FP8_DIVISOR if is_integer_fp8 else total
        # Store once, without the padded rows and columns.
        is_inside = (row < n)[:, None] & (column < F)[None, :]
        index = jnp.broadcast_arrays(row[:, None], column[None, :])
        plt.store(out_ref.at[part, *index], total.astype(out_ref.dtype), mask=is_inside)

    # The program's column selects its matrix. A single matrix needs no branch.
    for index, count in enumerate(num_columns):
        of_matrix = matrix_refs[index * arrays : (index + 1) * arrays]
        run = functools.partial(multiply, *of_matrix, out_ref=out_refs[index], column_of_tiles=program - begin)
        if num_matrices == 1:
            run()
        else:
            pl.when((program >= begin) & (program < begin + count))(run)
        begin += count


def load_inputs(x_ref, row, first, inputs):
    """Loads `inputs` inputs from `first` on for each row of x_ref [n, D], inside a kernel; returns [rows, inputs]."""
    inner, D = first + jnp.arange(inputs), x_ref.shape[1]
    return _load(x_ref, row, inner, inner < D if D % inputs else None)


def multiply_tile(x, weights_ref, scales_refs, first, column, is_column, *, block, is_integer_fp8):
    """Multiplies some inputs of each row by one tile of the weights, inside a kernel.

    One-byte weights need two rearrangements to reach the tensor cores without slow byte moves:

    - Row order. A thread loads 16 neighbouring columns of every 16th row, but a tensor core needs neighbouring inputs
      of one column. The rows are therefore loaded in an order in which each thread's own rows are neighbouring inputs.
      The bytes then move between threads four at a time. There are no pipeline stages, because these would store the
      tile along F in shared memory, from which it could be read only byte by byte.
    - Conversion. fp8 is converted to float16, float32 and then bfloat16, all at full rate. The direct conversion from
      float16 to bfloat16 runs at a quarter of the rate on an H100. With `is_integer_fp8`, integer arithmetic converts
      fp8; NaN then becomes 480, and the result is divided by `FP8_DIVISOR`.

    Args:
        x: [rows, inputs], from `load_inputs`.
        weights_ref: [D, F].
        scales_refs: One ref [blocks, F], or no ref.
        first: First input of the tile.
        column: Columns of the tile.
        is_column: Mask of the columns inside the matrix; None: all columns are inside.
        is_integer_fp8: Integer arithmetic converts the weights (`is_converted_by_integers`).

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
    # Multiply in x's dtype with float32 sums. HIGHEST keeps float32 products exact and has no effect on bfloat16.
    if is_integer_fp8:
        weights = convert_fp8(jax.lax.bitcast_convert_type(weights, jnp.uint8), x.dtype)
    else:
        weights = weights.astype(jnp.float32).astype(x.dtype)
    product = jnp.dot(x, weights, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    # Scale the tile's sum instead of its weights, which needs one multiplication per output instead of one per weight.
    for scales_ref in scales_refs:
        product = product * _load(scales_ref, first // block + jnp.arange(1), column, is_column)
    return product


def _load(ref, row, column, is_column):
    """Loads `ref[row, column]`, with zeros outside the array; masks only if the last tile extends beyond the array."""
    masks = [] if is_column is None else [jnp.broadcast_to(is_column[None, :], (len(row), len(column)))]
    if ref.shape[0] % len(row):
        masks.append(jnp.broadcast_to((row < ref.shape[0])[:, None], (len(row), len(column))))
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    return plt.load(elements(ref, row, column), mask=mask, other=jnp.zeros((), ref.dtype) if masks else None)


def elements(ref, row, column):
    """Addresses `ref[row, column]` element by element."""
    shape = (len(row), len(column))
    return ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)]
