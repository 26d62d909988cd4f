"""Noise of a row: the generator's numbers, and what they depend on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from scipy import stats

from mtpjax.decoding import rng

SEED = jnp.array([[7, 9], [0, 2**32 - 1]], jnp.uint32)
PLACES = jnp.array([[5, 6, 7], [5, 6, 7]])
NODES = jnp.arange(3)


def test_the_generator_gives_the_numbers_of_jax():
    numbers = np.random.default_rng(0)
    for key in numbers.integers(0, 2**32, (4, 2), np.uint32):
        counters = numbers.integers(0, 2**32, (2, 8), np.uint32)
        found = jnp.concatenate(rng.threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.array, counters))))
        np.testing.assert_array_equal(found, threefry_2x32(jnp.array(key), jnp.array(counters).reshape(-1)))


def test_every_part_of_what_a_draw_is_for_changes_it():
    draws = [
        rng.gumbel(seed, places, purpose, nodes, 4)
        for seed in (SEED, SEED + 1)
        for places in (PLACES, PLACES + 100)
        for purpose in (rng.DRAFT, rng.ACCEPT, rng.BONUS, rng.TARGET)
        for nodes in (NODES, NODES + 10)
    ]
    assert len(np.unique(np.stack(draws))) == len(draws) * 2 * 3 * 4


def test_a_row_knows_no_neighbour():
    both = rng.gumbel(SEED, PLACES, rng.DRAFT, NODES, 8)
    alone = rng.gumbel(SEED[1:], PLACES[1:, 1:2], rng.DRAFT, NODES[1:2], 8)
    np.testing.assert_array_equal(both[1:, 1:2], alone)


def test_the_noise_has_its_law():
    seeds = rng.seeds_from_key(jax.random.key(0), 50)
    places = jnp.broadcast_to(jnp.arange(40)[None], (50, 40))
    uniforms = rng.uniform(seeds, places, rng.ACCEPT, jnp.arange(40))
    assert stats.kstest(np.ravel(uniforms), "uniform").pvalue > 1e-4
    assert float(uniforms.min()) > 0 and float(uniforms.max()) < 1
    gumbels = rng.gumbel(seeds, places, rng.DRAFT, jnp.arange(40), 20)
    assert stats.kstest(np.ravel(gumbels), "gumbel_r").pvalue > 1e-4
