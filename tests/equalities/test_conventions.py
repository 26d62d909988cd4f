"""The three conventions that decide acceptance and that no comparison of texts can see, broken one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mtpjax import DecodeConfig, ModelConfig, MTPModel, TrainConfig, generate, init_params, speculative_generate
from mtpjax.train import data
from mtpjax.train.step import TrainState, make_optimizer, train_step
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


@pytest.fixture(scope="module")
def trained():
    """Two hundred steps on the standard library: a model whose drafts are often right. Returns params and prompts.

    The scales of the two norms in question start spread out, as those of large checkpoints are after long training: at
    one, where they start by default, they would hardly move in so few steps, and the norm after them hides the rest.
    """
    training, held_out = data.split_held_out(data.read_documents(data.python_sources()))
    stream = data.batches(data.pack(training, 64, seed=0), 16, seed=0)
    model = MTPModel(CONFIG, scan_layers=True)
    optimizer = make_optimizer(TrainConfig())
    params = init_params(model, jax.random.key(0))
    for number, norm in enumerate((params["norm_final"], params["mtp_0"]["norm_output"])):
        norm["scale"] = jnp.exp(jax.random.normal(jax.random.key(number), norm["scale"].shape))
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    step = jax.jit(
        functools.partial(train_step, model=model, optimizer=optimizer, num_depths=2, attention_layout="ttt"),
        donate_argnames="state",
    )
    for number in range(200):
        state, _ = step(state, next(stream), jnp.float32(5e-3 * min(1, number / 20)), jnp.float32(0.3))
    prompts = data.held_out_prompts(held_out, count=16, prompt_length=64, continuation_length=0, seed=0)
    return unstack_layers(state.params, CONFIG), prompts


def decode(trained, **changes):
    params, prompts = trained
    model = MTPModel(dataclasses.replace(CONFIG, **changes))
    config = DecodeConfig(max_new_tokens=24, num_steps=3)
    result = speculative_generate(params, prompts, model=model, config=config)
    result.stats.check()
    return result


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_convention_costs_acceptance_and_no_text_shows_it(trained, broken):
    params, prompts = trained
    right, wrong = decode(trained), decode(trained, **BROKEN[broken])
    config = DecodeConfig(max_new_tokens=24)
    assert right.rows() == generate(params, prompts, model=MTPModel(CONFIG), config=config).rows()
    assert wrong.rows() == right.rows()
    print(f"{broken}: accept length {right.stats.accept_length:.2f} -> {wrong.stats.accept_length:.2f}")
    assert wrong.stats.accept_length < right.stats.accept_length - 0.05
