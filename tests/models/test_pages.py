"""Entries in pages are those of contiguous rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mtpjax.models.view import Pages, read_rows, write_rows

from mtpjax.models.pages import NO_PAGE, gather_pages, read_pages, write_pages

B, SIZE, NUM_PAGES = 3, 4, 20


def random_pages(shift):
    table = np.random.default_rng(shift).permutation(NUM_PAGES)[: B * 6].reshape(B, 6)
    return Pages(jnp.asarray(table, jnp.int32), jnp.zeros(B, jnp.int32), SIZE, NUM_PAGES, max_shift=2, shift=shift)


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["latents", "heads"])
def test_writes_and_reads_are_those_of_rows(heads, shift, key):
    pages = random_pages(shift)
    pool, rows = jnp.full((NUM_PAGES, *heads, SIZE, 5), 7.0), jnp.zeros((B, *heads, pages.num_slots, 5))
    axis = rows.ndim - 2
    for step, start in enumerate([[0, 3, 9], [5, 4, 11], [2, 19, 0]]):
        new = jax.random.normal(jax.random.fold_in(key, step), (B, *heads, 3, 5))
        pool = jax.jit(write_pages)(pool, new, jnp.array(start), pages)
        rows = write_rows(rows, new, jnp.array(start), axis=axis)
        np.testing.assert_array_equal(
            read_pages(pool, jnp.array(start), 3, pages), read_rows(rows, jnp.array(start), 3, axis=axis)
        )
    gathered = gather_pages(pool, pages.num_slots, pages)
    np.testing.assert_array_equal(jnp.where(rows == 0, 0, gathered), rows)
    assert (gathered[rows == 0] == 7).all()  # nothing else was written


def test_writes_without_a_page_are_dropped():
    pages = random_pages(0)
    pages = pages.replace(table=pages.table.at[1].set(NO_PAGE))
    pool = jnp.zeros((NUM_PAGES, SIZE, 5))
    written = write_pages(pool, jnp.ones((B, 3, 5)), jnp.array([22, 0, 4]), pages)
    # Row 0 has two slots before the end of its table, row 1 has no page, row 2 has all three.
    assert written.sum() == 5 * (2 + 0 + 3)


def test_shared_positions_are_read_and_not_written():
    pages = random_pages(1).replace(num_shared=jnp.array([0, 3, 8]))
    pool = write_pages(jnp.zeros((NUM_PAGES, SIZE, 5)), jnp.ones((B, 6, 5)), jnp.zeros(B, jnp.int32), pages)
    # Slot i is at position i + 1, so rows of 0, 3 and 8 shared positions keep 6, 4 and none of 6 slots.
    written = read_pages(pool, jnp.zeros(B, jnp.int32), 6, pages)[..., 0]
    np.testing.assert_array_equal(written, [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])


def test_nan_of_a_drafter_is_not_written():
    rows, start = jnp.ones((B, 6, 5)).at[1, 2].set(jnp.nan), jnp.zeros(B, jnp.int32)
    for pages in (random_pages(0), random_pages(0).replace(is_of_drafter=True)):
        pool = write_pages(jnp.zeros((NUM_PAGES, SIZE, 5)), rows, start, pages)
        expected = jnp.nan_to_num(rows) if pages.is_of_drafter else rows
        np.testing.assert_array_equal(read_pages(pool, start, 6, pages), expected)
