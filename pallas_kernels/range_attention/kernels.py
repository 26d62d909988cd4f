"""The kernels of `range_attention`: forward, gradient of the queries, and gradients of keys and values.

Row t * G + g is query head g of token t, so a block of rows shares its loads of keys, and the gradient of a key is a
sum over rows. A program loops over the blocks that its rows (or its keys) need, first over those that the ranges cover
in part, with a mask, then over those that they cover completely, without one. All sums have a fixed order and there are
no atomic additions, so the gradients are the same in every run.

Both kernels of the backward pass compute scores and weights, so together they take seven products. A single kernel
would take five, but would have to add up the gradient of the queries in memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import attention_blocks as blocks
from pallas_kernels.attention_blocks import dot
from pallas_kernels.backend import triton as plt
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform
from pallas_kernels.range_attention.blocks import NO_SCORE
from pallas_kernels.range_attention.ranges import KeyRanges

LOG2_E = math.log2(math.e)


def forward(
    q, key, value, ranges: KeyRanges, *, scale: float, dtype, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes `range_attention.blocks.forward`."""

    def run(q, key, value, ranges, platform):
        rows = _flatten(q)
        out_shape = [(*rows.shape[:3], value.shape[3]), dtype], [rows.shape[:3], jnp.float32]
        call = _Call.of(q, value, scale, "forward", platform)
        output, log_sum = call.run(_forward_kernel, ranges, [rows], [key, value], out_shape, interpret)
        return output.reshape(*q.shape[:4], -1), log_sum.reshape(q.shape[:4])

    return call_by_platform(run, q, key, value, ranges.within(key.shape[2]), interpret=interpret)


def backward(
    q, key, value, ranges: KeyRanges, gradient, log_sum, delta, *, scale: float, dtype, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `range_attention.blocks.backward`, but the gradients of keys and values have q's dtype."""

    def run(key, value, ranges, *rows, platform):
        rows, caches = [_flatten(each) for each in rows], [key, value]
        out_shape = [[rows[0].shape, dtype]], [[each.shape, each.dtype] for each in caches]
        of = functools.partial(_Call.of, q, value, scale, platform=platform)
        [of_q] = of("queries").run(_query_gradient_kernel, ranges, rows, caches, out_shape[0], interpret)
        of_key, of_value = of("keys").run(_key_gradients_kernel, ranges, caches, rows, out_shape[1], interpret)
        return of_q.reshape(q.shape), of_key, of_value

    operands = key, value, ranges.within(key.shape[2]), q, gradient, log_sum, delta
    return call_by_platform(run, *operands, interpret=interpret)


def unsupported_reason(q, value) -> str | None:
    """Returns why the kernels do not support arrays, or None if they do."""
    width = _padded_width(q, value)
    if width > max(_TILES["cuda"]["keys"]):
        return f"keys and values of {q.shape[-1]} and {value.shape[-1]} columns do not fit into a program's registers"
    return None


def _padded_width(q, value) -> int:
    """Returns the number of columns of one key and one value in registers."""
    return sum(padded for array in (q, value) for _, _, padded in blocks.column_slices(array.shape[-1]))


# Rows, keys, warps and stages for 2-byte numbers, by the largest `_padded_width`. They are the largest tiles that do
# not spill registers, which were found by compiling for sm_90 and gfx942. With 128 rows per program, the tensor cores
# of an H100 need 32 bytes per clock from the L2 cache for their full rate; with 128 keys, 16 bytes.
_TILES = {
    "cuda": {
        "forward": {320: (128, 128, 8, 2), 512: (128, 64, 8, 2)},
        "queries": {256: (128, 128, 8, 2), 320: (128, 64, 8, 2), 512: (128, 32, 8, 2)},
        "keys": {128: (64, 128, 8, 2), 256: (32, 128, 8, 2), 320: (16, 128, 8, 2), 512: (16, 64, 8, 2)},
    },
    # The shared memory of an MI300X holds one stage.
    "rocm": {
        "forward": {256: (128, 64, 8, 1), 320: (128, 32, 8, 1), 512: (64, 32, 4, 1)},
        "queries": {128: (128, 64, 8, 1), 256: (128, 32, 8, 1), 320: (64, 32, 4, 1), 512: (64, 16, 4, 1)},
        "keys": {128: (32, 128, 8, 1), 256: (32, 64, 4, 1), 320: (16, 64, 4, 1), 512: (16, 64, 8, 1)},
    },
}


def _choose_tiles(kernel: str, width: int, itemsize: int, platform: str) -> blocks.Tiles:
    """Chooses the tiles of a kernel, "forward", "queries" or "keys"."""
    # float32 is for comparisons. NVIDIA GPUs have no float32 matrix instructions, so both operands are in registers.
    if itemsize == 4:
        size = 32 if width <= 128 else 16
        return blocks.Tiles(size, size, 4, 2 if platform == "cuda" else 1)
    table = _TILES[platform][kernel]
    return blocks.Tiles(*table[min(most for most in table if width <= most)])


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static numbers of a kernel's call."""

    kernel: str  # "forward", "queries" or "keys"
    program: blocks.Program
    group_size: int  # query heads per key head, G
    num_rows: int  # T * G
    num_keys: int  # S
    num_columns: int  # in the products of one row and one key
    platform: str  # "cuda" or "rocm"

    @staticmethod
    def of(q, value, scale: float, kernel: str, platform: str) -> "_Call":
        (T, G, H), (S, V) = q.shape[2:], value.shape[2:]
        tiles = _choose_tiles(kernel, _padded_width(q, value), q.dtype.itemsize, platform)
        program = blocks.Program(tiles, blocks.column_slices(H), blocks.column_slices(V), scale, is_integer_fp8=False)
        num_columns = {"forward": H + V, "queries": 2 * H + V, "keys": 2 * H + 2 * V}[kernel]
        return _Call(kernel, program, G, T * G, S, num_columns, platform)

    def run(self, function, ranges: KeyRanges, tiled, whole, out_shape, interpret: bool) -> list[jax.Array]:
        """Runs a kernel with one program per block of `tiled`, key head and batch row.

        Args:
            function: gets the bounds of its blocks of rows (the gradients of keys only), the limits of the ranges [T],
                its blocks of `tiled`, all of `whole`, and its blocks of the outputs.
            ranges: within the keys.
            tiled: arrays `[B, K, rows, ...]` or `[B, K, keys, ...]`.
            whole: the other arrays.
            out_shape: shapes and dtypes of arrays like `tiled`.
            interpret: as in `pallas_kernels`.
        """
        (B, K, length), tiles = tiled[0].shape[:3], self.program.tiles
        out_shape = [jax.ShapeDtypeStruct(*each) for each in out_shape]
        limits = [each[:, :, which] for which in range(ranges.first.shape[2]) for each in ranges[:2]]
        small = [(each, pl.BlockSpec((None, each.shape[1]), lambda i, k, b: (b, 0))) for each in limits]
        # If the mask is causal, late rows and early keys need the most blocks. They start first, so short programs run
        # last.
        size, num_blocks = tiles.rows, pl.cdiv(length, tiles.rows)
        order = lambda i: num_blocks - 1 - i
        if self.kernel == "keys":
            size, num_blocks, order = tiles.slots, pl.cdiv(length, tiles.slots), lambda i: i
            bounds = self._bounds(limits)
            small.insert(0, (bounds, pl.BlockSpec((None, None, bounds.shape[2]), lambda i, k, b: (b, i, 0))))
        tile = lambda each: _spec(each, size, order)
        again = [math.prod(each.shape[2:]) * each.dtype.itemsize for each in whole]  # of one head
        moved = sum(each.size * each.dtype.itemsize for each in (*tiled, *out_shape))
        moved += B * K * num_blocks * sum(again) + K * sum(each.nbytes for each, _ in small)
        return pl.pallas_call(
            functools.partial(function, call=self),
            out_shape=out_shape,
            grid=(num_blocks, K, B),
            in_specs=[*(spec for _, spec in small), *map(tile, tiled), *map(_spec, whole)],
            out_specs=list(map(tile, out_shape)),
            compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
            # The ranges are unknown here, so this is the cost if every query attends to all keys.
            cost_estimate=pl.CostEstimate(
                flops=2 * B * K * self.num_rows * self.num_keys * self.num_columns,
                transcendentals=B * K * self.num_rows * self.num_keys,
                bytes_accessed=moved,
            ),
            metadata=loads_from_l2(*[(each, num_blocks) for each in again] * (B * K)),
            interpret=interpret,
            name=f"range_attention_{self.kernel}_{self.platform}",
        )(*(each for each, _ in small), *tiled, *whole)

    def _bounds(self, limits: Sequence[jax.Array]) -> jax.Array:
        """Returns the bounds of the blocks of rows for each block of keys, `[B, blocks, 4]` per range, joined.

        The bounds are the first block of rows that attend to these keys, the first block of rows that attend to all of
        these keys, the end of the sequence of such blocks, and the end.
        """
        tiles = self.program.tiles
        num_blocks = pl.cdiv(self.num_rows, tiles.rows)
        begin_key = jnp.arange(0, self.num_keys, tiles.slots)[None, :, None]
        last_key = jnp.minimum(begin_key + tiles.slots, self.num_keys) - 1
        index = jnp.arange(num_blocks)[None, None, :]
        bounds: list[jax.Array] = []
        for first, last in zip(limits[::2], limits[1::2], strict=True):

            def of_blocks(limit, fill):
                rows = jnp.repeat(limit, self.group_size, axis=1)
                missing = num_blocks * tiles.rows - self.num_rows
                padded = jnp.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
                return padded.reshape(len(limit), 1, num_blocks, tiles.rows)

            first, last = of_blocks(first, self.num_keys), of_blocks(last, -1)  # padded rows attend to nothing
            is_needed = (first.min(-1) <= last_key) & (last.max(-1) >= begin_key)
            is_whole = (first.max(-1) <= begin_key) & (last.min(-1) >= last_key)
            begin = jnp.where(is_needed, index, num_blocks).min(-1)
            end = jnp.where(is_needed, index + 1, 0).max(-1)
            whole_begin = jnp.where(is_whole, index, num_blocks).min(-1)
            is_after = ~is_whole & (index > whole_begin[..., None])
            whole_end = jnp.where(is_after, index, num_blocks).min(-1)
            bounds += _ordered(begin, whole_begin, whole_end, end)
        return jnp.stack(bounds, axis=-1).astype(jnp.int32)

    def rows_mask(self, row: jax.Array) -> jax.Array | None:
        """Returns which rows exist, or None if all blocks are full."""
        return row < self.num_rows if self.num_rows % self.program.tiles.rows else None

    def keys_mask(self, slot: jax.Array) -> jax.Array | None:
        """Returns which keys exist, or None if all blocks are full."""
        return slot < self.num_keys if self.num_keys % self.program.tiles.slots else None

    def load_limits(self, refs, row: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Loads the first and last key of each range of some rows. Rows after the last are like the last row."""
        token = jax.lax.div(jnp.minimum(row, self.num_rows - 1), jnp.int32(self.group_size))
        loaded = [plt.load(ref.at[token]) for ref in refs]
        return list(zip(loaded[::2], loaded[1::2], strict=True))

    def key_passes(self, limit_refs, row: jax.Array) -> Iterator[tuple]:
        """Yields the passes of a block of rows over blocks of keys, for `attention_blocks.attend_blocks`."""
        size = self.program.tiles.slots
        limits = self.load_limits(limit_refs, row)

        def find(block, which, is_whole):
            if is_whole:
                return pl.ds(block * size, size), None, None
            slot = block * size + jnp.arange(size)
            first, last = _select(limits, which)
            is_visible = (slot[None, :] >= first[:, None]) & (slot[None, :] <= last[:, None])
            return pl.ds(block * size, size), self.keys_mask(slot), is_visible

        bounds = []
        for first, last in limits:
            begin = jax.lax.div(jnp.min(first, axis=0), jnp.int32(size))
            end = jax.lax.div(jnp.max(last, axis=0) + size, jnp.int32(size))
            whole_begin = jax.lax.div(jnp.max(first, axis=0) + (size - 1), jnp.int32(size))
            whole_end = jax.lax.div(jnp.min(last, axis=0) + 1, jnp.int32(size))
            bounds.append(_ordered(begin, whole_begin, whole_end, end))
        return _passes(bounds, find)

    def row_passes(self, bounds_ref, limit_refs, slot: jax.Array) -> Iterator[tuple]:
        """Yields the passes of a block of keys over blocks of rows, with masks `[keys, rows]`."""
        size = self.program.tiles.rows

        def find(block, which, is_whole):
            if is_whole:
                return pl.ds(block * size, size), None, None
            row = block * size + jnp.arange(size)
            first, last = _select(self.load_limits(limit_refs, row), which)
            is_visible = (slot[:, None] >= first[None, :]) & (slot[:, None] <= last[None, :])
            is_row = self.rows_mask(row)
            is_visible = is_visible if is_row is None else is_visible & is_row[None, :]
            return pl.ds(block * size, size), is_row, is_visible

        load = lambda place: plt.load(bounds_ref.at[jnp.int32(place)])
        return _passes([[load(4 * which + n) for n in range(4)] for which in range(len(limit_refs) // 2)], find)


def _flatten(array: jax.Array) -> jax.Array:
    """Joins the axes T and G of `[B, K, T, G, ...]`."""
    return array.reshape(*array.shape[:2], -1, *array.shape[4:])


def _spec(array, size: int | None = None, order: Callable = lambda i: i) -> pl.BlockSpec:
    """Returns the spec of an array `[B, K, N, ...]`, in blocks of `size` (None: all) of N, with padded columns."""
    slices = [blocks.column_slices(width) for width in array.shape[3:]]
    columns = [max(begin + padded for begin, _, padded in each) for each in slices]
    place = (lambda i: 0) if size is None else order
    block = (None, None, array.shape[2] if size is None else size, *columns)
    return pl.BlockSpec(block, lambda i, k, b: (b, k, place(i), *[0] * len(columns)))


def _ordered(begin, whole_begin, whole_end, end) -> tuple:
    """Returns bounds that increase, so that no range of blocks has a negative length."""
    end = jnp.maximum(begin, end)
    whole_begin = jnp.clip(whole_begin, begin, end)
    return begin, whole_begin, jnp.clip(whole_end, whole_begin, end), end


def _passes(bounds: Sequence[Sequence], find: Callable) -> Iterator[tuple]:
    """Yields a pass over the blocks at the ends of all ranges, which need masks, and a pass over the whole blocks.

    `find` maps a block, its range and whether it is whole to what `attention_blocks.attend_blocks` needs.
    """
    ends, whole = [], []
    for which, (begin, whole_begin, whole_end, end) in enumerate(bounds):
        ends += [(begin, whole_begin, which), (whole_end, end, which)]
        whole.append((whole_begin, whole_end, which))
    for sequences, is_whole in ((ends, False), (whole, True)):

        def locate(index, sequences=sequences, is_whole=is_whole):
            # The sequences of blocks follow one another.
            block, which, offset = index, 0, 0
            for begin, end, own in sequences:
                block = jnp.where(index >= offset, begin + index - offset, block)
                which = jnp.where(index >= offset, jnp.int32(own), jnp.int32(which)) if own else which
                offset += end - begin
            return find(block, which, is_whole)

        yield jnp.int32(0), sum(end - begin for begin, end, _ in sequences), locate


def _select(limits: Sequence[tuple[jax.Array, jax.Array]], which) -> tuple[jax.Array, jax.Array]:
    """Returns the limits of one range."""
    first, last = limits[0]
    for own, (other_first, other_last) in enumerate(limits[1:], start=1):
        first, last = jnp.where(which == own, other_first, first), jnp.where(which == own, other_last, last)
    return first, last


def _load_columns(ref, rows, is_row, slices) -> list[jax.Array]:
    return [blocks.load_slice(ref, rows, is_row, part, ref.dtype) for part in slices]


def _load_numbers(refs, rows, is_row) -> list[jax.Array]:
    """Loads one number per row, with zeros after the last row."""
    return [plt.load(ref.at[rows], mask=is_row, other=None if is_row is None else 0.0) for ref in refs]


def _store(ref, parts, is_row, slices) -> None:
    """Stores the columns of a block, without padded rows and columns."""
    for part, one in zip(slices, parts, strict=True):
        target = ref.at[:, pl.ds(part[0], one.shape[1])]
        plt.store(target, one.astype(ref.dtype), mask=blocks.slice_mask(is_row, part))


def _forward_kernel(*refs, call: _Call):
    """Attends from one block of rows to all their keys."""
    *limit_refs, q_ref, key_ref, value_ref, output_ref, log_sum_ref = refs
    program = call.program
    row = (pl.num_programs(0) - 1 - pl.program_id(0)) * program.tiles.rows + jnp.arange(program.tiles.rows)
    is_row = call.rows_mask(row)
    q = _load_columns(q_ref, slice(None), is_row, program.key_slices)
    passes = call.key_passes(limit_refs, row)
    outputs, highest, total = blocks.attend_blocks(passes, q, (key_ref, value_ref), program)
    _store(output_ref, [output / total[:, None] for output in outputs], is_row, program.value_slices)
    # The scores have base 2.
    log_sum = jnp.where(highest > blocks.MASKED_SCORE, (highest + jnp.log2(total)) / LOG2_E, NO_SCORE)
    plt.store(log_sum_ref, log_sum, mask=is_row)


def _query_gradient_kernel(*refs, call: _Call):
    """Computes the gradient of one block of rows, in a loop over all their keys."""
    *limit_refs, q_ref, outer_ref, log_sum_ref, delta_ref, key_ref, value_ref, gradient_ref = refs
    program = call.program
    row = (pl.num_programs(0) - 1 - pl.program_id(0)) * program.tiles.rows + jnp.arange(program.tiles.rows)
    is_row = call.rows_mask(row)
    q = _load_columns(q_ref, slice(None), is_row, program.key_slices)
    outer = _load_columns(outer_ref, slice(None), is_row, program.value_slices)
    log_sum, delta = (each[:, None] for each in _load_numbers((log_sum_ref, delta_ref), slice(None), is_row))

    def add_block(find, index, gradients):
        slots, is_loaded, is_visible = find(index)
        keys = _load_columns(key_ref, slots, is_loaded, program.key_slices)
        values = _load_columns(value_ref, slots, is_loaded, program.value_slices)
        weights = _weights(q, keys, log_sum, is_visible, program.scale)
        products = sum(dot(one, value.T) for one, value in zip(outer, values, strict=True))
        slopes = (weights * (products - delta)).astype(q_ref.dtype)
        return [gradient + dot(slopes, key) for gradient, key in zip(gradients, keys, strict=True)]

    gradients = [jnp.zeros(one.shape, jnp.float32) for one in q]
    for begin, end, find in call.key_passes(limit_refs, row):
        gradients = jax.lax.fori_loop(begin, end, functools.partial(add_block, find), gradients)
    _store(gradient_ref, [program.scale * each for each in gradients], is_row, program.key_slices)


def _key_gradients_kernel(bounds_ref, *refs, call: _Call):
    """Computes the gradients of one block of keys and values, in a loop over all rows that attend to them."""
    *limit_refs, key_ref, value_ref, q_ref, outer_ref, log_sum_ref, delta_ref, of_key_ref, of_value_ref = refs
    program = call.program
    slot = pl.program_id(0) * program.tiles.slots + jnp.arange(program.tiles.slots)
    is_key = call.keys_mask(slot)
    # Keys after the last become 0. Their gradients are not stored.
    keys = _load_columns(key_ref, slice(None), is_key, program.key_slices)
    values = _load_columns(value_ref, slice(None), is_key, program.value_slices)

    def add_block(find, index, gradients):
        of_keys, of_values = gradients
        rows, is_row, is_visible = find(index)
        q = _load_columns(q_ref, rows, is_row, program.key_slices)
        outer = _load_columns(outer_ref, rows, is_row, program.value_slices)
        log_sum, delta = (each[None, :] for each in _load_numbers((log_sum_ref, delta_ref), rows, is_row))
        # Weights and slopes are [keys, rows].
        weights = _weights(keys, q, log_sum, is_visible, program.scale)
        products = sum(dot(value, one.T) for value, one in zip(values, outer, strict=True))
        slopes = (weights * (products - delta)).astype(q_ref.dtype)
        weights = weights.astype(q_ref.dtype)
        of_values = [gradient + dot(weights, one) for gradient, one in zip(of_values, outer, strict=True)]
        return [gradient + dot(slopes, one) for gradient, one in zip(of_keys, q, strict=True)], of_values

    gradients = tuple([jnp.zeros(one.shape, jnp.float32) for one in parts] for parts in (keys, values))
    for begin, end, find in call.row_passes(bounds_ref, limit_refs, slot):
        gradients = jax.lax.fori_loop(begin, end, functools.partial(add_block, find), gradients)
    of_keys, of_values = gradients
    _store(of_key_ref, [program.scale * each for each in of_keys], is_key, program.key_slices)
    _store(of_value_ref, of_values, is_key, program.value_slices)


def _weights(left, right, log_sum: jax.Array, is_visible: jax.Array | None, scale: float) -> jax.Array:
    """Computes the softmax weights of the products of some column slices, in base 2, which is one instruction."""
    scores = sum(dot(one, other.T) for one, other in zip(left, right, strict=True))
    weights = jnp.exp2((scale * LOG2_E) * scores - LOG2_E * log_sum)
    return weights if is_visible is None else jnp.where(is_visible, weights, 0.0)
