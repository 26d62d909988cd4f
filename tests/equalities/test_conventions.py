"""The three conventions that decide acceptance and that no comparison of texts can see, broken one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, ModelConfig, MTPModel, TrainConfig, generate, init_params, speculative_generate
from mtpjax.train import data
from mtpjax.train.panel import acceptance_panel
from mtpjax.train.step import first_state, make_optimizer, train_step
from mtpjax.trunk import unstack_layers

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    num_mtp_modules=1,
)
BROKEN = {
    "hidden before the norm in": {"mtp_hidden_post_norm": False},
    "hidden before the norm on": {"mtp_chain_post_norm": False},
    "hidden before embedding": {"mtp_input": "hidden_embedding"},
}
GROUPS = 8
LEVELS = 6  # the norm on matters from the second level on, and more with each


@pytest.fixture(scope="module")
def trained():
    """A hundred and twenty steps on the standard library: a model whose drafts are often right.

    Returns parameters, held-out prompts and held-out rows.

    The scales of the two norms in question start spread out, as those of large checkpoints are after long training: at
    one, where they start by default, they would hardly move in so few steps, and the norm after them hides the rest.
    """
    training, held_out = data.split_held_out(data.read_documents(data.python_sources()))
    stream = data.batches(data.pack(training, 64, seed=0), 16, seed=0)
    model = MTPModel(CONFIG, scan_layers=True)
    optimizer = make_optimizer(TrainConfig())
    params = init_params(model, jax.random.key(0))
    for number, norm in enumerate((params["norm_final"], params["mtp_0"]["norm_output"])):
        norm["scale"] = jnp.exp(3.0 * jax.random.normal(jax.random.key(number), norm["scale"].shape))
    state = first_state(params, optimizer)
    step = jax.jit(
        functools.partial(train_step, model=model, optimizer=optimizer, num_depths=2, attention_layout="ttt"),
        donate_argnames="state",
    )
    for number in range(120):
        state, _ = step(state, next(stream), jnp.float32(5e-3 * min(1, number / 20)), jnp.float32(0.3))
    prompts = data.held_out_prompts(held_out, count=48, prompt_length=64, continuation_length=0, seed=0)
    rows = next(data.batches(data.pack(held_out, 64, seed=0), 128, seed=0))
    return unstack_layers(state.params, CONFIG), prompts, rows


@pytest.fixture(scope="module")
def sound(trained):
    """What `decode` gives where nothing is broken; its text is the plain one."""
    params, prompts, _ = trained
    text, accept_length, promised = decode(trained)
    assert text == generate(params, prompts, model=MTPModel(CONFIG), config=DecodeConfig(max_new_tokens=24)).rows()
    return text, accept_length, promised


def decode(trained, **changes):
    """The texts, the accept length, and the accept lengths that each of some groups of held-out rows promises."""
    params, prompts, rows = trained
    model = MTPModel(dataclasses.replace(CONFIG, **changes))
    config = DecodeConfig(max_new_tokens=24, num_steps=LEVELS)
    result = speculative_generate(params, prompts, model=model, config=config)
    result.stats.check()
    groups = [jax.tree.map(lambda array, first=first: array[first::GROUPS], rows) for first in range(GROUPS)]
    panels = [acceptance_panel(params, group, model=model, num_depths=LEVELS) for group in groups]
    return result.rows(), result.stats.accept_length, np.array([panel.accept_length for panel in panels])


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_convention_costs_acceptance_and_no_text_shows_it(trained, sound, broken):
    text, accept_length, promised = sound
    broken_text, broken_accept_length, broken_promised = decode(trained, **BROKEN[broken])
    assert broken_text == text
    print(f"{broken}: accept length {accept_length:.2f} -> {broken_accept_length:.2f}", end=", ")
    lost = promised - broken_promised
    error = lost.std(ddof=1) / np.sqrt(len(lost))
    print(f"over all positions {promised.mean():.2f} -> {broken_promised.mean():.2f}: {lost.mean():.3f} +- {error:.3f}")
    assert broken_accept_length < accept_length
    assert lost.mean() > 3 * error, (lost, error)
