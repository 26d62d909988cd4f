"""Pages are handed out once, shared by content, and none is lost."""

import collections

import numpy as np
import pytest

from mtpjax.serving.page_pool import PagePool

TEXT = list(range(100, 140))


def test_a_known_beginning_is_shared_and_the_rest_is_not():
    pool = PagePool(20, 4)
    first = pool.acquire(TEXT, 5)
    assert first.num_cached == 0 and pool.num_in_use == 5
    pool.store(first, TEXT, 11)  # two whole pages
    second = pool.acquire([*TEXT[:10], 1, 2, 3], 6)
    assert second.num_cached == 8 and second.pages[:2] == first.pages[:2]
    assert not set(second.pages[2:]) & set(first.pages)
    assert pool.num_in_use == 9
    # Another text, or another salt, shares nothing.
    assert pool.acquire([7, *TEXT[1:10]], 1).num_cached == 0
    assert pool.acquire(TEXT, 1, salt=b"other").num_cached == 0


def test_the_last_token_of_a_prompt_is_never_in_a_shared_page():
    pool = PagePool(20, 4)
    lease = pool.acquire(TEXT, 4)
    pool.store(lease, TEXT, 16)
    assert pool.acquire(TEXT[:8], 4).num_cached == 4
    assert pool.acquire(TEXT[:9], 4).num_cached == 8


def test_pages_stay_known_until_their_place_is_needed():
    pool = PagePool(6, 4)
    for begin in (0, 12):
        lease = pool.acquire(TEXT[begin:], 3)
        pool.store(lease, TEXT[begin:], 12)
        pool.release(lease)
    assert pool.num_in_use == 0 and pool.num_available == 6
    third = pool.acquire([9] * 9, 2)
    # The oldest text lost its last two pages; what is before them can still be found.
    assert pool.acquire(TEXT[:12], 1).num_cached == 4
    assert pool.acquire(TEXT[12:24], 2).num_cached == 8
    pool.release(third)


def test_too_few_pages_change_nothing():
    pool = PagePool(4, 4)
    lease = pool.acquire(TEXT, 3)
    pool.store(lease, TEXT, 12)
    pool.release(lease)
    assert pool.acquire(TEXT, 5) is None and pool.num_available == 4
    held = pool.acquire(TEXT, 4)
    assert held.num_cached == 12
    assert not pool.extend(held, 1) and len(held.pages) == 4
    assert pool.acquire([1, 2], 1) is None
    pool.release(held)
    assert pool.forget() == 3 and pool.acquire(TEXT, 3).num_cached == 0
    with pytest.raises(ValueError, match="got 0 and 4"):
        PagePool(0, 4)


def test_random_requests_lose_no_page_and_share_none_by_mistake():
    random, pool, leases = np.random.default_rng(0), PagePool(30, 4), []
    shared = 0
    for _ in range(3000):
        if leases and random.integers(2):
            text, lease = leases.pop(random.integers(len(leases)))
            pool.store(lease, text, int(random.integers(len(text) + 1)))
            pool.release(lease)
        else:
            # Few texts, so that beginnings repeat.
            text = [int(random.integers(2)), *[5] * int(random.integers(4, 20)), int(random.integers(3)), 8, 8]
            lease = pool.acquire(text, -(-len(text) // 4))
            if lease is not None:
                shared += lease.num_cached
                leases.append((text, lease))
        # A page of several requests holds the same text in each of them, at the same place.
        texts = collections.defaultdict(set)
        for text, lease in leases:
            for number, page in enumerate(lease.pages):
                texts[page].add((number, tuple(text[: (number + 1) * 4])))
        assert all(len(owners) == 1 for page, owners in texts.items())
        assert pool.num_in_use == len(texts)
    assert shared > 1000
    for _, lease in leases:
        pool.release(lease)
    assert pool.num_in_use == 0 and pool.num_available == 30
