"""Rows with the same beginning share pages: each decodes as it does alone, from caches as after a cold prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, speculative_generate
from tests.helpers.running import Running

SIZE, NUM_PAGES = 4, 64
BEGINNING = np.random.default_rng(1).integers(0, 61, 12).tolist()  # three whole pages
PROMPTS = [[*BEGINNING, 5, 9, 17, 3], [*BEGINNING, 30, 2], [*BEGINNING, 30]]


def layers_of(running, slot, length):
    """What the trunk's and the modules' caches hold of the first `length` tokens, by slot."""
    kept, state = [], running.state
    table = jnp.asarray(running.batch([slot]).table[0])
    for index, cache in enumerate([state.trunk, *state.drafter.caches]):
        pages = state.storage.replace(table=table, shift=index)
        for entries in cache.layers:
            for name, pool in entries.items():
                slots = pages.first(pool)[0]
                kept.append((index, name, np.asarray(slots[..., : length - index, :])))
    return kept


def first_pages(state):
    caches = state.trunk, *state.drafter.caches
    return [np.asarray(pool[:3]) for cache in caches for pool in jax.tree.leaves(cache.layers)]


@pytest.mark.parametrize(
    ("attention", "modules"),
    [
        ("grouped", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("latent", 2), ("sparse", 2), ("sliding", 2), ("grouped", 0))
        ),
    ],
)
def test_a_shared_beginning_changes_no_row_and_no_entry(attention, modules, small):
    model, params = small(attention, "mixed", num_mtp_modules=modules)
    config = DecodeConfig(max_new_tokens=12, num_steps=3 if modules else 0, prefill_chunk=8)
    settings = {"model": model, "config": config, "num_slots": 3, "pool": (NUM_PAGES, SIZE)}
    warm = Running(params, **settings)
    needed = warm.decoder.num_pages_of(len(PROMPTS[0]) + 12)
    own = np.arange(3 * needed).reshape(3, needed).tolist()
    # The first row fills its pages, and decodes on while the others enter with its first pages as theirs.
    warm.enter(0, PROMPTS[0], own[0])
    warm.go_on(1)
    if modules:
        before = first_pages(warm.state)
    for slot in (1, 2):
        warm.enter(slot, PROMPTS[slot], [*own[0][:3], *own[slot][3:]], num_cached=12)
    if modules:
        jax.tree.map(np.testing.assert_array_equal, first_pages(warm.state), before)  # bit for bit
        # Cold: nothing shared. The entries that only the beginning decides must be the same, those of modules included.
        cold = Running(params, **settings)
        for slot in (1, 2):
            cold.enter(slot, PROMPTS[slot], own[slot])
            found, wanted = (layers_of(one, slot, len(PROMPTS[slot])) for one in (warm, cold))
            for (_, name, one), (_, _, other) in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=name)
    warm.go_on()
    alone = speculative_generate(params, PROMPTS, model=model, config=config)
    result = warm.collect()
    assert result.rows() == alone.rows()
    if modules:
        assert (result.stats.accepted == alone.stats.accepted).all()


def test_entries_of_another_text_would_be_found(small):
    """The comparison sees a module entry that belongs to another next token, which no text shows."""
    model, params = small("grouped", "mixed", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=4, num_steps=1, prefill_chunk=8)
    kept = []
    for prompt in ([*BEGINNING, 5], [*BEGINNING, 6]):
        running = Running(params, model=model, config=config, num_slots=1, pool=(NUM_PAGES, SIZE))
        running.enter(0, prompt, range(20))
        kept.append(layers_of(running, 0, 13))
    module = [next(entry for index, name, entry in layers if index == 1 and name == "key") for layers in kept]
    # Slot 11 of the module read token 12; the slots before are equal.
    np.testing.assert_array_equal(module[0][..., :11, :], module[1][..., :11, :])
    assert not jnp.allclose(module[0][..., 11, :], module[1][..., 11, :])
