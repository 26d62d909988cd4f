"""Compiled programs are dropped before the process runs out of memory mappings."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from mtpjax import program_memory
from mtpjax.program_memory import free_programs_if_full

pytestmark = pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="needs Linux's /proc")


def count() -> int:
    return len(program_memory.MAPS_FILE.read_bytes().splitlines())


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """`limit(number)` makes the system allow that many mappings."""
    monkeypatch.setattr(program_memory, "LIMIT_FILE", tmp_path / "max_map_count")
    return lambda number: (tmp_path / "max_map_count").write_text(f"{number}\n")


@pytest.mark.slow
def test_programs_beyond_the_limit_give_their_mappings_back(limit):
    function = jax.jit(lambda x: jnp.tanh(x) @ jnp.sin(x).T + jnp.sort(x, axis=0).sum())

    def compile_programs(sizes, *, frees):
        for size in sizes:
            function(jnp.ones((size, size)))
            if frees:
                assert free_programs_if_full() and function._cache_size() == 0

    compile_programs([40], frees=False)  # threads and arenas that stay
    limit(2)
    assert free_programs_if_full()
    start = count()
    compile_programs(range(1, 11), frees=True)
    with_freeing = count() - start
    compile_programs(range(1, 11), frees=False)
    assert function._cache_size() == 10
    assert count() - start > 4 * max(with_freeing, 5)
    # What was dropped is compiled again.
    assert float(function(jnp.ones((1, 1)))[0, 0]) == pytest.approx(float(jnp.tanh(1.0) * jnp.sin(1.0) + 1))


def test_few_mappings_and_unknown_limits_free_nothing(limit, tmp_path):
    limit(10**9)
    assert not free_programs_if_full()
    (tmp_path / "max_map_count").unlink()
    assert not free_programs_if_full(0.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"max_share must be within 0\.\.1"):
        free_programs_if_full(share)
