"""Column slices and an online softmax over blocks of slots, which the attention kernels share.

Triton arrays have power-of-two sizes, so other numbers of columns are cut into slices. The online softmax
(FlashAttention, 2205.14135) processes one block of slots at a time, with sums relative to the highest score so far.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.fp8 import FP8_DIVISOR, convert_fp8

MASKED_SCORE = -1e30  # score of a masked slot; unlike with -inf, differences stay finite


def reference(q, keys, values, mask, scale) -> jax.Array:
    """Computes softmax attention under a mask in plain JAX, with all scores at once.

    Args:
        q: [B, K, T, G, H].
        keys: [B, K, S, H].
        values: [B, K, S, Hv].
        mask: [B, T, S] bool. A token that attends to nothing gets zeros.

    Returns:
        [B, K, T, G, Hv] in q's dtype.
    """
    # Zero the values that no token attends to. Their weight is 0, but 0 times NaN is NaN.
    values = jnp.where(mask.any(axis=1)[:, None, :, None], values.astype(q.dtype), 0)
    scores = jnp.einsum("BKTGH,BKSH->BKTGS", q, keys.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    # A second `where` after the softmax gives zeros to tokens that attend to nothing.
    mask = mask[:, None, :, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1), 0)
    return jnp.einsum("BKTGS,BKSH->BKTGH", weights.astype(q.dtype), values)


def check(q, keys, values, value_width, others: Mapping[str, tuple], *, num_entries: int) -> None:
    """Raises ValueError for arrays whose shapes do not match q [B, K, T, G, H].

    Args:
        keys: [num_entries, K, S, H].
        values: [num_entries, K, S, Hv]; None: the first `value_width` columns of the keys.
        others: Maps names to pairs (array or None, required shape).
        num_entries: Rows in the cache, or pages in a pool.
    """
    if (values is None) == (value_width is None):
        raise ValueError("pass either values or value_width, the number of key columns that hold the values")
    sizes = num_entries, q.shape[1], keys.shape[2]
    expected = {"keys": (keys, (*sizes, q.shape[-1])), "values": (values, (*sizes, *np.shape(values)[-1:])), **others}
    expected = {name: pair for name, pair in expected.items() if pair[0] is not None}
    if any(array.shape != shape for array, shape in expected.values()) or not 0 < (value_width or 1) <= q.shape[-1]:
        found = ", ".join(f"{name} {array.shape}" for name, (array, _) in expected.items())
        raise ValueError(f"q {q.shape} does not fit {found}, {value_width=}")


def describe(q, keys, *, is_windowed: bool) -> dict[str, int | str]:
    """Describes a call over a contiguous cache in the form that `dispatch.choose` expects."""
    B, K, T, G, H = q.shape
    shape = {"batch": B, "heads": K, "queries": T * G, "width": H, "slots": keys.shape[2]}
    return shape | {"dtype": str(q.dtype), "cache": str(keys.dtype), "reads": "a window" if is_windowed else "all"}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A program's query rows and slots per step (both powers of two), warps and stages."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int
    is_column_split: bool = False  # a latent's value columns are split between two programs


@dataclasses.dataclass(frozen=True)
class Program:
    """The settings that all programs of an attention kernel share.

    Attributes:
        tiles: The sizes of each program.
        key_slices: Slices of the keys' columns.
        value_slices: Slices of the values' columns.
        scale: Factor that multiplies the scores.
        is_integer_fp8: Whether integer arithmetic converts fp8 caches (`is_converted_by_integers`).
    """

    tiles: Tiles
    key_slices: list[tuple[int, int, int]]
    value_slices: list[tuple[int, int, int]]
    scale: float
    is_integer_fp8: bool


def column_slices(*ends: int) -> list[tuple[int, int, int]]:
    """Cuts the columns up to each end into slices (start, width, padded), where `padded` is a power of two >= 16."""
    slices, start = [], 0
    for end in ends:
        while start < end:
            padded = min(256, max(16, pl.next_power_of_2(end - start + 1) // 2))
            width = min(padded, end - start)
            slices.append((start, width, padded))
            start += width
    return slices


def slice_mask(row_mask, column_slice):
    """Combines `row_mask` (None: all rows) with the valid columns of a slice; None if everything is valid."""
    _, width, padded = column_slice
    masks = [] if row_mask is None else [row_mask[:, None]]
    if width < padded:
        masks.append((jnp.arange(padded) < width)[None, :])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def load_slice(ref, rows, row_mask, column_slice, dtype, *, is_integer_fp8=False):
    """Loads rows of one column slice as `dtype`, with zeros where the mask is false.

    `rows` is an index for the first axis, or a tuple with one index for each axis before the columns. With
    `is_integer_fp8`, the values are divided by `FP8_DIVISOR`.
    """
    start, _, padded = column_slice
    mask = slice_mask(row_mask, column_slice)
    other = None if mask is None else 0.0
    rows = rows if isinstance(rows, tuple) else (rows,)
    loaded = plt.load(ref.at[*rows, pl.ds(start, padded)], mask=mask, other=other)
    if is_integer_fp8:
        return convert_fp8(jax.lax.bitcast_convert_type(loaded, jnp.uint8), dtype)
    # Convert fp8 to float32 first, because direct conversion to bfloat16 runs at 1/16 of the rate on an H100.
    return (loaded.astype(jnp.float32) if ref.dtype.itemsize == 1 else loaded).astype(dtype)


def dot(one, other):
    """Multiplies with float32 sums. Products of float32 are exact."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    return jnp.dot(one, other, preferred_element_type=jnp.float32, precision=precision)


def attend_blocks(passes, q, cache_refs, program: Program):
    """Attends from a block of query rows to blocks of slots in order, inside a kernel.

    Args:
        passes: Triples of a first block, the end of the range of blocks, and a function that maps a block to the range
            of its slots, the mask of the slots to load (None: all), and the mask [rows, slots] of the slots that each
            query row attends to (None: all). In a pool, the range is a page and a range within the page.
        q: Slices [rows, columns] of the queries.
        cache_refs: Keys [S, H] and values [S, Hv], or only a latent, whose values are the first slices of its keys. In
            a paged cache, these are pools [P, size, H].

    Returns:
        The weighted sum [rows, columns] for each slice of values, the highest score [rows], to which the weights are
        relative, and the sum of the weights [rows]. A row that attends to nothing gets zeros and a sum of 1, and its
        highest score is `MASKED_SCORE`.
    """
    num_rows, is_integer_fp8 = program.tiles.rows, program.is_integer_fp8
    load = functools.partial(load_slice, dtype=q[0].dtype, is_integer_fp8=is_integer_fp8)
    # Use base 2, because exp2 is a single instruction.
    scale = program.scale * math.log2(math.e) * (FP8_DIVISOR if is_integer_fp8 else 1)

    def body(find_slots, index, carry):
        outputs, highest, total = carry
        slots, is_loaded, is_visible = find_slots(index)
        # Compute the scores in float32 and base 2. Slots that are not loaded become 0, because they may hold NaN.
        keys = [load(cache_refs[0], slots, is_loaded, part) for part in program.key_slices]
        scores = scale * sum(dot(one, key.T) for one, key in zip(q, keys, strict=True))
        # When the highest score rises, scale the older sums down by the same factor.
        visible_scores = scores if is_visible is None else jnp.where(is_visible, scores, MASKED_SCORE)
        new_highest = jnp.maximum(highest, jnp.max(visible_scores, axis=1))
        weights = jnp.exp2(scores - new_highest[:, None])
        weights = weights if is_visible is None else jnp.where(is_visible, weights, 0.0)
        rescale = jnp.exp2(highest - new_highest)
        # A latent's values are the first slices of its keys, which are already loaded.
        values = keys
        if len(cache_refs) == 2:
            values = [load(cache_refs[1], slots, is_loaded, part) for part in program.value_slices]
        outputs = [
            rescale[:, None] * output + dot(weights.astype(value.dtype), value)
            for output, value in zip(outputs, values, strict=False)  # a latent has more key slices than value slices
        ]
        return outputs, new_highest, rescale * total + jnp.sum(weights, axis=1)

    # Float32 sums stay in registers over all blocks.
    outputs = [jnp.zeros((num_rows, padded), jnp.float32) for _, _, padded in program.value_slices]
    highest = jnp.full(num_rows, MASKED_SCORE, jnp.float32)
    carry = outputs, highest, jnp.zeros_like(highest)
    for begin, end, find_slots in passes:
        carry = jax.lax.fori_loop(begin, end, functools.partial(body, find_slots), carry)
    outputs, highest, total = carry
    if is_integer_fp8:
        outputs = [output * FP8_DIVISOR for output in outputs]
    # The caller divides as it stores, because all quotients at once would need more registers.
    return outputs, highest, jnp.where(total > 0, total, 1.0)
