"""The kernels over caches in pages compute what they compute over contiguous ones, and touch nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_heads import Heads, append_heads
from pallas_kernels.append_latents import append_latents
from pallas_kernels.paged import NO_PAGE, gather_pages
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.verify_attention import verify_attention, verify_attention_reference
from tests.helpers.lowering import lower_for

SIZE, NUM_PAGES = 16, 24


def page_table(key, num_rows, pages_per_row):
    return jax.random.permutation(key, NUM_PAGES)[: num_rows * pages_per_row].reshape(num_rows, -1).astype(jnp.int32)


def to_pages(cache, table, shift, fill):
    """Scatters a contiguous cache [B, ..., S, H] into a pool that is `fill` elsewhere."""
    cache = np.asarray(cache.astype(jnp.float32))
    pool = np.full((NUM_PAGES, *cache.shape[1:-2], SIZE, cache.shape[-1]), fill, np.float32)
    for row, pages in enumerate(np.asarray(table)):
        for slot in range(cache.shape[-2]):
            column, place = divmod(slot + shift, SIZE)
            pool[pages[column], ..., place, :] = cache[row, ..., slot, :]
    return jnp.asarray(pool)


@pytest.mark.parametrize(
    ("is_latent", "window", "shift", "dtype"),
    [
        (False, None, 0, jnp.float32),
        (False, (20, 3), 2, jnp.float32),
        (True, None, 1, jnp.float32),
        (True, (20, 0), 0, jnp.bfloat16),
        (False, None, 3, jnp.bfloat16),
    ],
)
def test_attention_reads_pages_as_it_reads_rows(is_latent, window, shift, dtype, key):
    B, K, T, G, H, N = 3, 1 if is_latent else 2, 3, 2, 32, 6
    keys = jax.random.split(key, 5)
    S = N * SIZE - shift
    q, k, v = (
        jax.random.normal(one, (B, K, *rest, H), dtype)
        for one, rest in zip(keys[:3], [(T, G), (S,), (S,)], strict=True)
    )
    num_committed = jnp.array([0, 37, S - T])
    ancestor_mask = jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T))
    begin = None if window is None else num_committed[:, None] + jnp.arange(T)[None, :] + 1 - window[0]
    settings = {"scale": 0.2, "sinks": window[1] if window else 0, "value_width": 16 if is_latent else None}
    table = page_table(keys[3], B, N)
    # What no token sees is NaN: all of the other pages, and what is behind the text.
    is_seen = jnp.arange(S)[None, :] < num_committed[:, None] + T
    k, v = (jnp.where(is_seen[:, None, :, None], one, jnp.nan) for one in (k, v))
    pools = [to_pages(one, table, shift, jnp.nan).astype(dtype) for one in (k, v)]
    # A row's last pages are not there at all where it has no text.
    table = jnp.where(jnp.arange(N)[None, :] * SIZE < num_committed[:, None] + T + shift, table, NO_PAGE)
    values, value_pool = (None, None) if is_latent else (v, pools[1])
    contiguous = functools.partial(verify_attention, **settings)
    paged = functools.partial(contiguous, page_table=table, page_shift=shift)
    found = paged(q, pools[0], value_pool, num_committed, ancestor_mask, begin, implementation="interpreted")
    operands = (q, k, values, num_committed, ancestor_mask, begin)
    expected = contiguous(*operands, implementation="interpreted")
    if shift == 0 and dtype == jnp.float32:
        np.testing.assert_array_equal(found, expected)  # the same blocks of 16 slots, in the same order
    else:
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )
    by_xla = paged(q, pools[0], value_pool, num_committed, ancestor_mask, begin, implementation="xla")
    np.testing.assert_array_equal(by_xla, verify_attention_reference(*operands, **settings))


def test_other_pages_than_powers_of_two_are_refused(key):
    q, pool = jnp.zeros((1, 1, 1, 1, 32)), jnp.zeros((4, 1, 24, 32))
    operands = (q, pool, pool, jnp.array([3]), jnp.ones((1, 1, 1), bool))
    call = functools.partial(verify_attention, *operands, page_table=jnp.zeros((1, 2), jnp.int32), scale=1.0)
    with pytest.raises(ValueError, match="24 positions: use a power of two"):
        call(implementation="interpreted")
    with pytest.raises(ValueError, match="does not fit"):
        verify_attention(*operands, page_table=jnp.zeros((2, 2), jnp.int32), scale=1.0)


def places_of(table, start, num_tokens):
    position = np.asarray(start)[:, None] + np.arange(num_tokens)
    page = jnp.take_along_axis(table, jnp.asarray(position // SIZE), axis=1, mode="fill", fill_value=NO_PAGE)
    return page, jnp.asarray(position % SIZE, jnp.int32)


def test_heads_are_appended_to_pages(key):
    B, T, K, G, H, P, N = 3, 4, 2, 3, 48, 24, 4
    keys = jax.random.split(key, 5)
    projected = PartialSums(jax.random.normal(keys[0], (2, B, T, K, G + 2, H)), jnp.float32)
    angle = jax.random.normal(keys[1], (B, T, P))
    angles, heads = (jnp.cos(angle), jnp.sin(angle)), Heads(eps=0.5)
    caches = [jax.random.normal(one, (B, K, N * SIZE, H)) for one in keys[2:4]]
    table, start = page_table(keys[4], B, N), jnp.array([0, 14, 30])
    pools = [to_pages(cache, table, 0, 7.0) for cache in caches]
    table = table.at[2].set(NO_PAGE)  # this row's entries are dropped
    places = places_of(table, start, T)
    expected = append_heads(projected, angles, *caches, start, heads, group_size=G, implementation="xla")
    for implementation in ("xla", "interpreted"):
        call = functools.partial(append_heads, group_size=G, implementation=implementation)
        found = call(projected, angles, *pools, start, heads, places)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
        for pool, old, wanted in zip(found[1:], pools, expected[1:], strict=True):
            rows = gather_pages(pool, table)[:2]
            np.testing.assert_allclose(rows, wanted[:2], rtol=1e-5, atol=1e-5)
            assert (np.asarray(pool) != np.asarray(old)).any(axis=(1, 3)).sum() == 2 * T


def test_latents_are_appended_to_pages(key):
    B, T, heads, C, R, P, N = 3, 4, 3, 24, 80, 12, 4
    keys = jax.random.split(key, 7)
    queries = PartialSums(jax.random.normal(keys[0], (2, B, T, heads, C + P)), jnp.float32)
    latents = PartialSums(jax.random.normal(keys[1], (2, B, T, R + P)), jnp.float32)
    angle = jax.random.normal(keys[2], (B, T, P // 2))
    norm, key_up = jax.random.normal(keys[3], (R,)), jax.random.normal(keys[4], (heads, C, R))
    cache, table, start = jax.random.normal(keys[5], (B, N * SIZE, R + P)), page_table(keys[6], B, N), [0, 14, 30]
    pool, start = to_pages(cache, table, 0, 7.0), jnp.array(start)
    table = table.at[2].set(NO_PAGE)
    operands = (queries, latents, norm, key_up, (jnp.cos(angle), jnp.sin(angle)))
    expected = append_latents(*operands, cache, start, implementation="xla")
    for implementation in ("xla", "interpreted"):
        found = append_latents(*operands, pool, start, places_of(table, start, T), implementation=implementation)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gather_pages(found[1], table)[:2], expected[1][:2], rtol=1e-5, atol=1e-5)
        assert (np.asarray(found[1]) != np.asarray(pool)).any(axis=2).sum() == 2 * T


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernels_over_pages_lower_without_a_gpu(platform):
    def calls(q, pool, table, start, projected, angles):
        places = (table[:, :1], start[:, None])
        heads = Heads()
        q, keys, values = append_heads(
            PartialSums(projected, jnp.bfloat16), angles, pool, pool, start, heads, places, group_size=4,
            implementation="triton",
        )  # fmt: skip
        mask = jnp.ones((2, 1, 1), bool)
        return verify_attention(
            q, keys, values, start, mask, None, table, scale=1.0, page_shift=1, implementation="triton"
        )

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((2, 2, 1, 4, 64), jnp.bfloat16),
            ((50, 2, 64, 64), jnp.bfloat16),
            ((2, 8), jnp.int32),
            ((2,), jnp.int32),
            ((3, 2, 1, 2, 6, 64), jnp.float32),
        ]
    ]
    angle = jax.ShapeDtypeStruct((2, 1, 16), jnp.float32)
    text = lower_for(calls, *shapes, (angle, angle), platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3  # append, attend, combine


def test_a_missing_page_reads_as_zeros():
    """Attention multiplies masked entries by 0, so another row's NaN must not be read in place of a missing page."""
    pool = jnp.full((3, 2, 4, 5), jnp.nan).at[1].set(1.0)
    rows = gather_pages(pool, jnp.array([[1, NO_PAGE]], jnp.int32))
    np.testing.assert_array_equal(rows[0, 0, :, 0], [1, 1, 1, 1, 0, 0, 0, 0])
