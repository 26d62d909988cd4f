"""An op that finds an output head's largest logits without writing all logits to memory, with kernel and reference.

Bottleneck: reading the head, which the kernel does once for up to 16 rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform, die_order
from pallas_kernels.dispatch import choose
from pallas_kernels.top_k import top_k


def head_top_k(
    hidden, head, *, k=1, num_tokens=None, is_transposed=False, implementation="auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the `k` largest of the logits `hidden @ head`, their columns, and the log-sum-exp of all logits.

    Values are in descending order; among equal logits the lower column comes first, as in `jnp.argmax` and
    `jax.lax.top_k`. The head is cast to hidden's dtype and sums are float32. The kernel multiplies float32 at full
    precision, and XLA at JAX's default precision. For up to 16 rows, the kernel sums in a fixed order; for more rows,
    the order may differ. The kernel does not support logits that are -inf or NaN. Not differentiable.

    Args:
        hidden: [..., D] float32, bfloat16 or float16.
        head: [D, V], or [V, D] if `is_transposed`, of the same dtypes.
        k: Number of logits, 1..num_tokens.
        num_tokens: Number of real columns; later columns are padding and are ignored. None: V.
        is_transposed: The head is a tied embedding [V, D], read in that layout.

    Returns:
        Values [..., k] float32, indices [..., k] int32 and logsumexp [...] float32, in nats.

    Raises:
        ValueError: `k` or `num_tokens` is out of range.
    """
    width, num_columns = head.shape[::-1] if is_transposed and head.ndim == 2 else head.shape
    if head.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != width:
        layout = "[V, D]" if is_transposed else "[D, V]"
        raise ValueError(f"hidden {hidden.shape} does not fit head {head.shape}: expected [..., D] and {layout}")
    num_tokens = num_columns if num_tokens is None else num_tokens
    if not 1 <= num_tokens <= num_columns:
        raise ValueError(f"num_tokens {num_tokens} is outside 1..{num_columns}, the number of columns of the head")
    if not 1 <= k <= num_tokens:
        raise ValueError(f"k {k} is outside 1..{num_tokens}")
    for array in (hidden, head):
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"hidden and head must be float32, bfloat16 or float16, not {array.dtype}")
    # Leading dimensions become rows, because the kernel supports only [R, D].
    rows = hidden.size // width
    shape = {"rows": rows, "width": width, "vocabulary": num_tokens, "k": k, "dtype": str(hidden.dtype)}
    chosen = choose("head_top_k", implementation, ("xla", "triton"), shape, make_case=make_case)
    if chosen == "xla" or rows == 0:
        return head_top_k_reference(hidden, head, k=k, num_tokens=num_tokens, is_transposed=is_transposed)
    interpret, has_several_blocks = chosen == "interpreted", _num_block_rows(rows) < rows
    options = {"k": k, "num_tokens": num_tokens, "is_transposed": is_transposed, "interpret": interpret}
    run, flat = functools.partial(_run_kernel, **options), hidden.reshape(rows, width)
    values, indices, logsumexp = call_by_platform(run, flat, head, interpret=interpret, differs=has_several_blocks)
    leading = hidden.shape[:-1]
    return values.reshape(*leading, k), indices.reshape(*leading, k), logsumexp.reshape(leading)


def make_case(shape: Shape) -> Case:
    keys, sizes = random_keys(), ((shape["rows"], shape["width"]), (shape["width"], shape["vocabulary"]))
    hidden, head = (random_normal(keys, size, shape["dtype"]) for size in sizes)
    return functools.partial(head_top_k, k=shape["k"]), (hidden, head)


def head_top_k_reference(hidden, head, *, k=1, num_tokens=None, is_transposed=False):
    """Computes `head_top_k` in plain JAX, which defines its meaning."""
    head = head.astype(hidden.dtype)
    logits = jnp.matmul(hidden, head.T if is_transposed else head, preferred_element_type=jnp.float32)
    if num_tokens is not None and num_tokens < logits.shape[-1]:
        is_token = jnp.arange(logits.shape[-1]) < num_tokens
        logits = jnp.where(is_token.reshape((1,) * (logits.ndim - 1) + is_token.shape), logits, -jnp.inf)
    if k == 1:
        values, indices = logits.max(axis=-1, keepdims=True), jnp.argmax(logits, axis=-1, keepdims=True)
    else:
        values, indices = top_k(logits, k)
    return values, indices.astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1)


def _num_block_rows(num_rows: int) -> int:
    """Returns the rows per block, 16 (the minimum for tensor cores) or 64 (enough to fill an H100's tensor cores)."""
    return 16 if num_rows <= 16 or is_batch_invariant() else 64


def _run_kernel(hidden, head, *, k, num_tokens, is_transposed, interpret, platform):
    """Runs the kernel over hidden [R, D] and merges the results of the column blocks.

    Each program processes a block of columns over all of D, and writes the block's k best logits and its sum of
    exponentials. Each byte of the head is read once; if there is a second block of rows, its program runs next to the
    first program and finds the head in the cache.
    """
    (num_rows, width), num_columns = hidden.shape, head.shape[0 if is_transposed else 1]
    block_rows = _num_block_rows(num_rows)
    # An H100 needs about 25 KB of loads in flight per SM (bandwidth times latency). With three or more programs per SM,
    # (stages - 1) tiles of 8 or 16 KB each exceed that, and the stages fit into an MI300X's 64 KB of shared memory.
    if jnp.float32 in (hidden.dtype, head.dtype):
        block_columns, block_depth, num_stages = 64, 32, 4
    elif block_rows == 16:
        block_columns, block_depth, num_stages = 64, 64, 6
    else:
        block_columns, block_depth, num_stages = 128, 64, 3
    # The grid is (blocks of rows, blocks of columns). Blocks of padding columns have no program and are not read.
    grid = (pl.cdiv(num_rows, block_rows), pl.cdiv(num_tokens, block_columns))
    # On ROCm, if a block of columns has several programs, they run on one die.
    place = functools.partial(die_order, grid=grid, is_reordered=platform == "rocm" and grid[0] > 1)
    placed = lambda index_map: lambda *ids: index_map(*place(*ids))
    if is_transposed:
        head_spec = pl.BlockSpec((block_columns, width), placed(lambda i, j: (j, 0)))
    else:
        head_spec = pl.BlockSpec((width, block_columns), placed(lambda i, j: (0, j)))
    output_dtypes = (jnp.float32, jnp.int32)
    columns_read = min(grid[1] * block_columns, num_columns)
    values, indices, sums = pl.pallas_call(
        functools.partial(
            _head_top_k_kernel,
            num_rows=num_rows,
            width=width,
            num_columns=num_columns,
            num_tokens=num_tokens,
            k=k,
            block_depth=block_depth,
            is_transposed=is_transposed,
            place=place,
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct((num_rows, grid[1], k), dtype) for dtype in output_dtypes),
            jax.ShapeDtypeStruct((num_rows, grid[1]), jnp.float32),
        ],
        grid=grid,
        in_specs=[pl.BlockSpec((block_rows, width), placed(lambda i, j: (i, 0))), head_spec],
        out_specs=[
            *(pl.BlockSpec((block_rows, None, k), placed(lambda i, j: (i, j, 0))) for _ in output_dtypes),
            pl.BlockSpec((block_rows, None), placed(lambda i, j: (i, j))),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=num_stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * width * columns_read,
            transcendentals=num_rows * num_tokens,
            bytes_accessed=grid[0] * columns_read * width * head.dtype.itemsize
            + grid[1] * num_rows * width * hidden.dtype.itemsize
            + grid[1] * num_rows * 4 * (2 * k + 1),
        ),
        metadata=loads_from_l2((hidden.nbytes, grid[1])),
        interpret=interpret,
        name="head_top_k",
    )(hidden, head)
    # Merge the blocks of columns by rescaling each block's sum of exponentials to the largest logit of the row.
    highest = values[:, :, 0].max(axis=1, keepdims=True)
    logsumexp = highest[:, 0] + jnp.log((sums * jnp.exp(values[:, :, 0] - highest)).sum(axis=1))
    # Equal candidates are in column order, so the first of them has the lowest column.
    values, indices = values.reshape(num_rows, -1), indices.reshape(num_rows, -1)
    # One logit needs no sort.
    if k == 1:
        position = jnp.argmax(values, axis=1, keepdims=True)
        values = highest
    else:
        values, position = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(indices, position, axis=1), logsumexp


def _head_top_k_kernel(
    hidden_ref,
    head_ref,
    values_ref,
    indices_ref,
    sums_ref,
    *,
    num_rows,
    width,
    num_columns,
    num_tokens,
    k,
    block_depth,
    is_transposed,
    place,
):
    """Finds the k best logits in a block of columns for hidden_ref [block_rows, D].

    values_ref and indices_ref are [block_rows, k]; sums_ref [block_rows] gets the float32 sums of exp(logit - largest).
    """
    block_rows = hidden_ref.shape[0]
    block_columns = head_ref.shape[0 if is_transposed else 1]
    row_block, column_block = place(pl.program_id(0), pl.program_id(1))
    row = row_block * block_rows + jnp.arange(block_rows)
    column = column_block * block_columns + jnp.arange(block_columns)
    is_row = row < num_rows
    # A mask that is always true would cost registers.
    is_column = column < num_columns if num_columns % block_columns else None

    def add(step, logits):
        # Load `block_depth` inputs of the rows and of the columns, and add their product in float32. A tied embedding
        # is read in rows of its own layout and transposed in registers.
        depth = pl.ds(step * block_depth, block_depth)
        is_depth = step * block_depth + jnp.arange(block_depth) < width if width % block_depth else None
        hidden = _load(hidden_ref.at[:, depth], is_row, is_depth)
        if is_transposed:
            tile = _load(head_ref.at[:, depth], is_column, is_depth).T
        else:
            tile = _load(head_ref.at[depth], is_depth, is_column)
        return logits + jnp.dot(
            hidden,
            tile.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
        )

    # The block's float32 logits stay in registers; padding columns become -inf.
    steps = jnp.int32(pl.cdiv(width, block_depth))
    logits = jnp.zeros((block_rows, block_columns), jnp.float32)
    logits = jax.lax.fori_loop(jnp.int32(0), steps, add, logits)
    logits = jnp.where((column < num_tokens)[None, :], logits, -jnp.inf)
    # Find and store the largest logit k times, and mask its column. The first also scales the sum of exponentials.
    for rank in range(k):
        value = jnp.max(logits, axis=1)
        if rank == 0:
            plt.store(sums_ref, jnp.sum(jnp.exp(logits - value[:, None]), axis=1), mask=is_row)
        # Choose the lowest column among equal logits.
        index = jnp.min(jnp.where(logits == value[:, None], column[None, :], num_tokens - 1), axis=1)
        plt.store(values_ref.at[:, jnp.int32(rank)], value, mask=is_row)
        plt.store(indices_ref.at[:, jnp.int32(rank)], index, mask=is_row)
        logits = jnp.where(column[None, :] == index[:, None], -jnp.inf, logits)


def _load(ref, is_row, is_column):
    """Loads a block, with zeros where its rows or columns are masked; None masks nothing."""
    if is_row is None and is_column is None:
        return plt.load(ref)
    rows = True if is_row is None else is_row[:, None]
    columns = True if is_column is None else is_column[None, :]
    return plt.load(ref, mask=jnp.broadcast_to(rows & columns, ref.shape), other=0.0)
