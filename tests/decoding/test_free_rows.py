"""Rows that are free or have ended cost no experts, and change nothing for the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig
from mtpjax.models.layers import experts
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings
from tests.decoding.test_rounds import advanced, free_state, make_spec, new_rows, prefilled
from tests.helpers.engine_client import Client

BUSY = 3  # the row that goes on


@pytest.fixture
def chosen(monkeypatch):
    """Pairs of a token and an expert of each layer that ran; for programs that are traced from here on."""
    pairs = []

    def counted(x, ids, weights, gate_up, down, **settings):
        jax.debug.callback(lambda ids: pairs.append(int((ids < len(down)).sum())), ids)
        return mix_experts(x, ids, weights, gate_up, down, **settings)

    mix_experts = experts.mix_experts
    monkeypatch.setattr(experts, "mix_experts", counted)
    return pairs


def test_rows_that_have_ended_choose_no_experts(small, chosen):
    model, params = small("latent", "mixed")
    spec = make_spec(2)
    state = jax.jit(functools.partial(prefilled, model=model, spec=spec))(
        params, free_state(model, spec), new_rows(spec)
    )
    advance = jax.jit(functools.partial(advanced, model=model, spec=spec))
    state = advance(params, state)
    num_new = int(state.length[BUSY] - 1 - state.drafter.hidden_start[BUSY])
    jax.effects_barrier()
    chosen.clear()
    beside_all = advance(params, state)
    jax.effects_barrier()
    all_chosen = sum(chosen)
    chosen.clear()
    alone = advance(params, state.replace(done=state.done | (jnp.arange(len(state.done)) != BUSY)))
    jax.effects_barrier()
    # Two experts of each token: those that the module is extended over, the first draft, and the trunk's three nodes.
    assert sorted(chosen) == sorted([2 * num_new, 2 * 1, 2 * 3])
    assert all_chosen > 5 * sum(chosen)
    # The same bits, in the text and in what the next round reads.
    length = int(alone.length[BUSY])
    assert length > state.length[BUSY]
    for found, expected in zip(
        jax.tree.leaves(alone.trunk.layers), jax.tree.leaves(beside_all.trunk.layers), strict=True
    ):
        np.testing.assert_array_equal(found[BUSY, ..., : length - 1, :], expected[BUSY, ..., : length - 1, :])
    for name in ("tokens", "length", "accepted"):
        np.testing.assert_array_equal(getattr(alone, name)[BUSY], getattr(beside_all, name)[BUSY])
    num_kept = length - 1 - int(alone.drafter.hidden_start[BUSY])
    np.testing.assert_array_equal(alone.drafter.hidden[BUSY, :num_kept], beside_all.drafter.hidden[BUSY, :num_kept])


@pytest.mark.slow
def test_padding_of_a_batch_chooses_no_experts(small, chosen):
    model, params = small("latent", "mixed", vocab_size=59)  # a model of its own, whose programs are traced here
    config = DecodeConfig(num_steps=2, prefill_chunk=8)
    counts = {}
    for size in (1, 4):
        settings = EngineSettings(num_slots=4, max_length=64, page_size=8, batch_sizes=(size,) if size == 4 else (1, 4))
        engine = Engine(params, model=model, config=config, settings=settings)
        engine.start()
        chosen.clear()
        text, _, _ = Client(engine).run([Request(prompt=(1, 2, 3, 4, 5), max_new_tokens=12)])[0]
        assert engine.close(timeout=60)
        jax.effects_barrier()
        counts[size] = text, sum(chosen)
    assert counts[1] == counts[4]
