"""Cuts columns into slices of power-of-two width, the only sizes that Triton arrays have; inside attention kernels."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt


def column_slices(*ends: int) -> list[tuple[int, int, int]]:
    """Cuts the columns up to each end into slices (start, width, padded): `padded` is a power of two of 16 or more."""
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


def load_slice(ref, rows, row_mask, column_slice, dtype):
    """Loads rows of one slice of the columns as `dtype`, zero where the mask is false."""
    start, _, padded = column_slice
    mask = slice_mask(row_mask, column_slice)
    other = None if mask is None else 0.0
    loaded = plt.load(ref.at[rows, pl.ds(start, padded)], mask=mask, other=other)
    # fp8 goes through float32: its direct conversion to bfloat16 runs at 1/16 of the rate on an H100.
    return (loaded.astype(jnp.float32) if ref.dtype.itemsize == 1 else loaded).astype(dtype)
