"""Pages in host memory: a prompt finds its beginning again after the pool gave its place away, bit for bit."""

import dataclasses
import hashlib

import jax
import numpy as np
import pytest

from mtpjax import compat
from mtpjax.models.cache import Cache, pool_arrays
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.engine import Engine
from mtpjax.serving.host_pages import HostPages
from mtpjax.serving.page_pool import PagePool, _extend_hash
from mtpjax.serving.request import Request
from tests.serving.test_engine import CONFIG, ONE_SIZE, Client, alone, check_idle

ENTRIES = [np.ones((2, 4), np.float32)]  # 32 bytes


def test_the_least_recently_used_pages_are_dropped():
    host = HostPages(max_bytes=100)
    for digest in (b"a", b"b", b"c", b"b", b"d"):
        host.put(digest, ENTRIES)
    assert [digest in host for digest in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    assert (len(host), host.num_bytes) == (3, 96)
    assert host.take(b"b") is ENTRIES and b"b" not in host and host.take(b"x") is None
    assert host.clear() == 2 and host.num_bytes == 0


def test_a_pool_sends_known_pages_out_and_brings_them_back():
    host = HostPages(max_bytes=1000)
    pool = PagePool(3, 4, host)
    text = list(range(9))
    lease = pool.acquire(text, 3)
    pool.store(lease, text, 9)
    known = lease.pages[:2]
    pool.release(lease)
    # Another request needs the whole pool.
    other = pool.acquire([50], 3)
    assert sorted(page for _, page in pool.outgoing) == sorted(known)
    for digest, page in pool.outgoing:
        host.put(digest, [np.full((2, 4), page, np.float32)])
    pool.outgoing = []
    pool.release(other)
    again = pool.acquire(text, 3)
    assert again.num_cached == 8 and len(host) == 0
    # In the order of the text, whichever pages they get now.
    assert [(page, int(entries[0][0, 0])) for page, entries in pool.incoming] == list(
        zip(again.pages[:2], known, strict=True)
    )


@pytest.mark.parametrize(
    "attention", ["grouped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latent", "hybrid"))]
)
def test_a_prompt_finds_its_beginning_in_host_memory(small, attention):
    model, params = small(attention)
    settings = dataclasses.replace(ONE_SIZE, num_pages=15, host_bytes=1 << 20)
    engine = Engine(params, model=model, config=CONFIG, settings=settings)
    engine.warm_up()
    engine.start()
    client, rng = Client(engine), np.random.default_rng(0)
    first = Request(prompt=tuple(rng.integers(0, 61, 42).tolist()), max_new_tokens=20)
    expected = alone(params, model, first)[0]
    assert client.run([first])[0][0] == expected
    cold = page_contents(engine, first)
    # Others take all pages, one after the other.
    for _ in range(3):
        other = Request(prompt=tuple(rng.integers(0, 61, 60).tolist()), max_new_tokens=30)
        assert client.run([other])[0][0] == alone(params, model, other)[0]
    assert page_contents(engine, first) is None
    tokens, _, finish = client.run([first])[0]
    assert tokens == expected and finish.num_cached_tokens == 40
    warm = page_contents(engine, first)
    for before, after in zip(cold, warm, strict=True):
        np.testing.assert_array_equal(before, after)
    check_idle(engine)
    assert engine.flush_cache() > 0
    assert client.run([first])[0][2].num_cached_tokens == 0
    assert engine.close(timeout=30)


def page_contents(engine, request):
    """The entries of the prompt's whole pages in the pool; None if the pool does not have all of them."""
    pool, size, digest, pages = engine._scheduler.pools[0], 8, hashlib.sha256(request.salt).digest(), []
    for begin in range(0, len(request.prompt) // size * size, size):
        digest = _extend_hash(digest, request.prompt[begin : begin + size])
        pages.append(pool._page_of.get(digest))
    if None in pages:
        return None
    caches = [node for node in jax.tree.leaves(engine._executor.state, is_leaf=is_cache) if is_cache(node)]
    return [np.asarray(array)[pages] for cache in caches for array in pool_arrays(cache)]


def is_cache(node):
    return isinstance(node, Cache)


def test_a_mesh_has_no_pages_in_host_memory(small):
    model, params = small("grouped", vocab_size=64)
    model, params = shard_for_decoding(model, params, compat.make_mesh({"tensor": 2}))
    with pytest.raises(ValueError, match="need one device"):
        Engine(params, model=model, config=CONFIG, settings=dataclasses.replace(ONE_SIZE, host_bytes=1))
