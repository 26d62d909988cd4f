"""Rows with the same beginning share pages: each decodes as it does alone, from caches as after a cold prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, collect, init_state, insert, run, speculative_generate
from mtpjax.inference.resumable import num_pages_for
from mtpjax.models.pages import gather_pages

SIZE, NUM_PAGES = 4, 64
BEGINNING = np.random.default_rng(1).integers(0, 61, 12).tolist()  # three whole pages
PROMPTS = [[*BEGINNING, 5, 9, 17, 3], [*BEGINNING, 30, 2], [*BEGINNING, 30]]


def layers_of(state, slot, length):
    """What the trunk's and the modules' caches hold of the first `length` tokens, by slot."""
    kept = []
    for index, cache in enumerate([state.trunk, *state.drafter.caches]):
        pages = state.pages.replace(shift=index)
        for entries in cache.layers:
            for name, pool in entries.items():
                slots = gather_pages(pool, pages.num_slots, pages)[slot]
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
    settings = {"model": model, "config": config}
    state = init_state(params, num_slots=3, max_length=64, pool=(NUM_PAGES, SIZE), **settings)
    needed = num_pages_for(params, state, len(PROMPTS[0]) + 12, **settings)
    own = np.arange(3 * needed).reshape(3, needed).tolist()
    # The first row fills its pages, and decodes on while the others enter with its first pages as theirs.
    state = insert(params, state, [0], PROMPTS[:1], pages=own[:1], **settings)
    state = run(params, state, 1, **settings)
    if modules:
        before = first_pages(state)
    pages = [[*own[0][:3], *row[3:]] for row in own[1:]]
    state = insert(params, state, [1, 2], PROMPTS[1:], pages=pages, num_cached=[12, 12], **settings)
    if modules:
        jax.tree.map(np.testing.assert_array_equal, first_pages(state), before)  # bit for bit
        # Cold: nothing shared. The entries that only the beginning decides must be the same, those of modules included.
        cold = init_state(params, num_slots=3, max_length=64, pool=(NUM_PAGES, SIZE), **settings)
        cold = insert(params, cold, [1, 2], PROMPTS[1:], pages=own[1:], **settings)
        for slot, prompt in ((1, PROMPTS[1]), (2, PROMPTS[2])):
            found, wanted = (layers_of(one, slot, len(prompt)) for one in (state, cold))
            for (_, name, one), (_, _, other) in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=name)
    state = run(params, state, 1000, **settings)
    alone = speculative_generate(params, PROMPTS, **settings)
    result = collect(state, [0, 1, 2])
    assert result.rows() == alone.rows()
    if modules:
        assert (result.stats.accepted == alone.stats.accepted).all()


def test_entries_of_another_text_would_be_found(small):
    """The comparison sees a module entry that belongs to another next token, which no text shows."""
    model, params = small("grouped", "mixed", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=4, num_steps=1, prefill_chunk=8)
    settings = {"model": model, "config": config}
    states = []
    for prompt in ([*BEGINNING, 5], [*BEGINNING, 6]):
        state = init_state(params, num_slots=1, max_length=64, pool=(NUM_PAGES, SIZE), **settings)
        states.append(insert(params, state, [0], [prompt], pages=[list(range(20))], **settings))
    kept = [layers_of(state, 0, 13) for state in states]
    module = [next(entry for index, name, entry in layers if index == 1 and name == "key") for layers in kept]
    # Slot 11 of the module read token 12; the slots before are equal.
    np.testing.assert_array_equal(module[0][..., :11, :], module[1][..., :11, :])
    assert not jnp.allclose(module[0][..., 11, :], module[1][..., 11, :])
