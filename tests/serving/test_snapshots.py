"""Snapshots of recurrent states: a request that finds its beginning has the caches and states of a cold prefill."""

import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig
from mtpjax.models.cache import pool_arrays, recurrent_entries
from mtpjax.models.view import Pages
from mtpjax.serving.engine import Engine
from mtpjax.serving.page_pool import PagePool, page_digests
from mtpjax.serving.request import Finish, Request
from mtpjax.serving.sizes import EngineSettings
from mtpjax.serving.snapshots import SnapshotRows

SIZE = 8  # of a page
TEXTS = np.random.default_rng(0).integers(0, 60, (4, 31)).tolist()


def make_engine(small, *, num_modules=1, dtype=jnp.float32, change=lambda params: params):
    """An engine whose thread does not run: `run` calls its ticks. Its chunks end M positions before page 2."""
    model, params = small("hybrid", num_mtp_modules=num_modules)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), change(params))
    config = DecodeConfig(num_steps=2, prefill_chunk=(2 * SIZE - num_modules) // (3 if num_modules == 1 else 2))
    settings = EngineSettings(
        num_slots=2, max_length=64, page_size=SIZE, batch_sizes=(2,), prefill_tokens=config.prefill_chunk
    )
    return Engine(params, model=model, config=config, settings=settings)


@pytest.fixture(scope="module")
def engine(small):
    return make_engine(small)


def run(engine, prompt, max_new_tokens=1):
    """Runs a request; returns its end, and what the device holds for it after its first token."""
    events, contents = queue.Queue(), []

    def deliver(event):
        if not contents and not isinstance(event, Finish):
            [sequence] = engine._scheduler.running
            contents.append(read_row(engine, sequence, len(prompt)))
        events.put(event)

    engine.submit(Request(prompt=tuple(prompt), max_new_tokens=max_new_tokens), deliver)
    while True:
        actions, engine._inbox.actions = engine._inbox.actions, []
        for action in actions:
            action()
        engine._ticks.run()
        while not events.empty():
            if isinstance(event := events.get(), Finish):
                return event, contents[0] if contents else None


def read_row(engine, sequence, length):
    """All that a prefill leaves: recurrent states, entries of the trunk and of modules, hidden states, lengths."""
    state, slot = engine._executor.session.state, sequence.slot
    table = jnp.asarray([sequence.lease.pages], jnp.int32)

    def entries(cache, first):
        pages = Pages(table, jnp.zeros(1, jnp.int32), SIZE, engine._executor.session.sizes.shard_pages, max_shift=0)
        # Position 0 .. k of module k has no entry.
        return [pages.first(pool, length)[..., first:, :] for pool in pool_arrays(cache)]

    modules, num_modules = state.drafter.caches, len(state.drafter.caches)
    row = {
        "recurrent": [{name: leaf[slot] for name, leaf in layer.items()} for layer in recurrent_entries(state.trunk)],
        "trunk": entries(state.trunk, 0),
        "modules": [entries(cache, index + 1) for index, cache in enumerate(modules)],
        "hidden": state.drafter.hidden[slot, :num_modules],
        "lengths": [cache.length[slot] for cache in (state.trunk, *modules)],
    }
    return jax.device_get(row)


def flush(engine):
    for pool in engine._scheduler.pools:
        pool.forget()


@pytest.mark.parametrize(
    ("num_modules", "dtype"),
    [
        (1, jnp.float32),
        pytest.param(1, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(2, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_a_shared_beginning_leaves_the_bits_of_a_cold_prefill(small, engine, num_modules, dtype):
    if (num_modules, dtype) != (1, jnp.float32):
        engine = make_engine(small, num_modules=num_modules, dtype=dtype)
    flush(engine)
    first, second = TEXTS[0][:20], [*TEXTS[0][:16], *TEXTS[1][:15]]
    # 1. Cold: the second text, and the first one up to its snapshot.
    end, cold = run(engine, second)
    assert end.num_cached_tokens == 0
    flush(engine)
    _, at_border = run(engine, first[: 16 - num_modules])
    # 2. The second text after the first.
    flush(engine)
    run(engine, first)
    [row] = engine._scheduler.pools[0].snapshots._row_of.values()
    kept = jax.device_get(
        [{name: leaf[row] for name, leaf in layer.items()} for layer in engine._executor.session.snapshots]
    )
    jax.tree.map(np.testing.assert_array_equal, kept, at_border["recurrent"])
    end, warm = run(engine, second)
    assert end.num_cached_tokens == 16
    jax.tree.map(np.testing.assert_array_equal, warm, cold)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(warm))


def test_the_end_of_a_common_text_is_found_by_the_third_request(engine):
    flush(engine)
    common = TEXTS[2][:19]
    cached = [run(engine, [*common, *tail])[0].num_cached_tokens for tail in (TEXTS[0], TEXTS[1], TEXTS[3])]
    # The first one keeps its state at its own last border. The second one keeps it where it leaves the first.
    assert cached == [0, 0, 16]
    assert run(engine, [*common, *TEXTS[0]])[0].num_cached_tokens == 48
    # A beginning of less than a chunk is not kept: finding it would spare no call.
    assert [run(engine, TEXTS[1][:6])[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_a_failed_row_leaves_no_snapshot(small):
    engine = make_engine(small, change=lambda params: {**params, "embedding": params["embedding"].at[60].set(jnp.nan)})
    for _ in range(2):
        end, _ = run(engine, [60, *TEXTS[0][1:]])
        assert (end.reason, end.num_cached_tokens) == ("error", 0)
    [pool] = engine._scheduler.pools
    assert len(pool.snapshots) == 0 and pool.num_in_use == 0
    # Its slot serves the next request.
    assert run(engine, TEXTS[0])[0].reason == "length"
    assert run(engine, TEXTS[0])[0].num_cached_tokens == 24


def test_rows_are_reserved_kept_and_dropped():
    rows = SnapshotRows(3)
    kept = {digest: rows.reserve() for digest in (b"a", b"b", b"c")}
    assert sorted(kept.values()) == [0, 1, 2] and rows.reserve() is None
    for digest, row in kept.items():
        rows.keep(digest, row)
    assert rows.use(b"a") == kept[b"a"]
    # The least recently used one makes room; another copy of a known text does not.
    row = rows.reserve()
    assert row == kept[b"b"] and b"b" not in rows
    rows.keep(b"a", row)
    assert rows.reserve() == row
    rows.free(row)
    rows.drop(b"a")
    rows.drop(b"x")
    assert b"a" not in rows and len(rows) == 1
    rows.clear()
    assert sorted(rows.reserve() for _ in range(3)) == [0, 1, 2]


def test_a_pool_shares_pages_up_to_the_last_snapshot():
    rows, text = SnapshotRows(2), list(range(100, 130))
    pool = PagePool(8, 4, snapshots=rows)
    first = pool.acquire(text, 6)
    row = pool.reserve_snapshot(first, 2)
    lost = pool.reserve_snapshot(first, 5)
    assert pool.reserve_snapshot(first, 6) is None
    pool.store(first, text, 7)
    assert len(rows) == 0
    pool.store(first, text, 16)
    digests = list(page_digests(text, 4))
    assert [digest in rows for digest in digests[:5]] == [False, True, False, False, False]
    second = pool.acquire(text[:16], 4)
    assert (second.num_cached, second.num_found, second.snapshot) == (8, 3, row)
    assert second.pages[:2] == first.pages[:2] and not set(second.pages[2:]) & set(first.pages)
    # A request that ends before its state is known gives its row back.
    pool.release(first)
    assert rows.reserve() == lost
    # Pages that make room take their snapshot with them.
    pool.release(second)
    assert pool.acquire([1], 8) is not None and len(rows) == 0
