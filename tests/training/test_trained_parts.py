"""What a run leaves alone: the trunk of frozen modules, and the trunk's gradient where they are detached."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mtpjax.training.train_state import init_train_state
from safetensors.numpy import load_file

from mtpjax import DecodeConfig, Objective, TrainConfig, forward, generate, load, speculative_generate, train
from mtpjax.data.packing import Batch
from mtpjax.models.params import is_of_modules
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.losses import multi_depth_loss
from mtpjax.training.step import make_optimizer, train_step
from tests import golden
from tests.helpers import training_runs


def batch_of(config, seed=0):
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=(2, 12)).astype(np.int32)
    return Batch(tokens, np.ones_like(tokens), np.ones(tokens.shape, bool))


def update(model, params, *, trains, steps=1, optimizer=None, **settings):
    optimizer = optimizer or make_optimizer(TrainConfig(trains=trains))
    state = init_train_state(params, optimizer, trains)
    spec = TrainSpec(model=model, num_depths=2, trains=trains, **settings)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
    for number in range(steps):
        state, metrics = step(state, batch_of(model.config, number), 1e-2, 1.0)
        assert metrics["is_finite"]
    return state.params, step.lower(state, batch_of(model.config), 1e-2, 1.0)


@pytest.mark.parametrize("changes", [{}, {"mtp_own_head": True}])
def test_frozen_parts_keep_every_bit(changes, small):
    """T15: 100 updates."""
    model, params = small(**changes)
    after, _ = update(model, params, trains="modules", steps=100)
    for name, before in params.items():
        same = [bool((old == new).all()) for old, new in zip(*map(jax.tree.leaves, (before, after[name])), strict=True)]
        assert not any(same) if is_of_modules(name) else all(same), name


def test_drafts_learn_from_the_trunk_unless_their_losses_reach_it():
    """Without a mix, as docs/guides/training.md says."""
    mixes = {trains: dict(TrainConfig(trains=trains).objective.mix) for trains in ("all", "modules", "detached")}
    assert mixes == {"all": {"cross_entropy": 1.0}, "modules": {"kl": 1.0}, "detached": {"kl": 1.0}}


@pytest.mark.slow
def test_frozen_trunks_have_no_backward_pass(small):
    model, params = small(num_hidden_layers=6)
    flops = {
        trains: update(model, params, trains=trains, steps=0)[1].compile().cost_analysis()["flops"]
        for trains in ("all", "modules")
    }
    assert flops["modules"] < 0.7 * flops["all"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_own_head": True},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({}, {"tie_word_embeddings": True})),
    ],
)
def test_detached_depths_leave_the_trunks_gradient_alone(changes, small):
    """Plainly and by chunks: the trunk's is that of its own loss, the modules' that of joint training."""
    model, params = small(**changes)
    tokens, segment_ids, loss_mask = map(jnp.asarray, batch_of(model.config))

    def gradients(mtp_scale, is_detached):
        def loss(params):
            output = forward(params, tokens, model=model, num_depths=2, is_detached=is_detached)
            return multi_depth_loss(output, tokens, segment_ids, loss_mask, mtp_scale=mtp_scale)[0]

        return jax.jit(jax.grad(loss))(params)

    alone, joint, detached = gradients(0.0, False), gradients(1.0, False), gradients(1.0, True)
    chunked = update(model, params, trains="detached", optimizer=optax.sgd(1.0), objective=Objective(vocab_chunk=50))[0]
    for name, found in detached.items():
        wanted = joint[name] if is_of_modules(name) else alone[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
        stepped = jax.tree.map(lambda before, change: before - 1e-2 * change, params[name], wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), chunked[name], stepped)
    assert not np.allclose(joint["embedding"], alone["embedding"], atol=1e-6)


@pytest.mark.slow
def test_modules_of_a_published_checkpoint_are_tuned_merged_and_decoded(tmp_path):
    """The README's sequence of commands, on golden weights."""
    origin = golden.path("qwen3_5_tied_bf16")
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"words to be read {number} times again\n" * 8)
    config = TrainConfig(
        init_from=str(origin), trains="modules", data=str(tmp_path), pattern="*.txt", output=str(tmp_path / "run"),
        steps=3, batch_size=2, row_length=16, num_depths=1, held_out_fraction=0.2, panel_prompts=0,
    )  # fmt: skip
    result = train(config, evaluations=1)
    merge = ["merge-mtp", "--input-dir", origin, "--mtp-dir", tmp_path / "run", "--output-dir", tmp_path / "merged"]
    subprocess.run([sys.executable, "-m", "mtpjax.cli.main", *map(str, merge)], check=True, capture_output=True)

    changed = set()
    for file in sorted(origin.glob("*.safetensors")):
        before, after = load_file(file), load_file(tmp_path / "merged" / file.name)
        changed |= {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed and all(name.startswith("mtp.") for name in changed)
    model, params = load(tmp_path / "merged", dtype=jnp.float32)
    prompts = [[1, 2, 3], [7, 8]]
    decode = DecodeConfig(max_new_tokens=8, num_steps=2)
    texts = speculative_generate(params, prompts, model=model, config=decode).rows()
    assert texts == generate(result.params, prompts, model=result.model, config=decode).rows()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "deepseek_v3_mtp2_bf16"])
def test_a_frozen_trunk_keeps_its_weights_and_is_split(name, tmp_path):
    """As stored, over layers and experts: the losses are those of a trunk in float32 on one device."""
    corpus = training_runs.write_corpus(tmp_path / "data")
    settings = training_runs.SETTINGS | {"batch_size": 4, "steps": 3, "trains": "modules", "data": str(corpus)}
    settings |= {"init_from": str(golden.path(name)), "attention_layout": "stream", "learning_rate": 1e-3}
    results = {
        form["output"]: train(TrainConfig(**settings, **form), evaluations=1)
        for form in (
            {"output": str(tmp_path / "whole")},
            {"output": str(tmp_path / "split"), "mesh": {"fsdp": 2, "expert": 2}, "trunk_dtype": "stored"},
        )
    }
    whole, split = results.values()
    np.testing.assert_allclose(
        list(training_runs.losses(split.history).values()),
        list(training_runs.losses(whole.history).values()),
        rtol=1e-5,
    )
    layer = f"layer_{split.model.config.num_hidden_layers - 1}"
    experts = split.params["trunk"][layer]["experts"]["gate_up"]
    _, stored = load(golden.path(name))
    jax.tree.map(np.testing.assert_array_equal, experts, stored["trunk"][layer]["experts"]["gate_up"])
    [values, *_] = jax.tree.leaves(experts)
    assert values.addressable_shards[0].data.size == values.size // 4
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(split.params["mtp_0"]))
    # What was saved loads and decodes.
    model, params = load(split.path)
    config = DecodeConfig(max_new_tokens=8, num_steps=2)
    decoded = speculative_generate(params, [[1, 2, 3]], model=model, config=config)
    assert decoded.lengths[0] == 8


def test_a_trunk_of_another_dtype_must_be_frozen():
    with pytest.raises(ValueError, match="trunk_dtype 'stored' needs the frozen trunk of a checkpoint"):
        TrainConfig(trunk_dtype="stored")
