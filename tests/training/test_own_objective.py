"""An objective of one's own replaces the loss or adds to it, on one device, in parts and on a mesh."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtpjax import MTPModel, Objective, TrainConfig, compat, init_params, presets, train
from mtpjax.training import Batch, LossInputs, TrainSpec, init_train_state, train_step
from mtpjax.training.data_parallel import shard_batch, shard_train_state
from mtpjax.training.run_dir import RunError
from tests.helpers import training_runs

NARROW = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2}
CONFIG = dataclasses.replace(presets["tiny"], **NARROW, num_key_value_heads=2, head_dim=8)
MODEL = MTPModel(CONFIG, scan_layers=True)


@pytest.fixture(scope="module")
def batch():
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (4, 16), 1, CONFIG.vocab_size))
    # Rows with different numbers of targets, so that means of parts are not the mean of the batch.
    segment_ids = np.array([[1] * 16, [1] * 5 + [0] * 11, [1] * 7 + [2] * 9, [1] * 16])
    return Batch(tokens, segment_ids, (tokens % 7 > 0) & (segment_ids > 0))


def gradients(batch, objective_function=None, *, mesh=None, **settings):
    """Loss and gradients of an update, which `optax.trace` keeps as its state."""
    keep = optax.trace(0.0)
    state = init_train_state(init_params(MODEL, jax.random.key(0)), keep, settings.get("trains", "all"))
    if mesh is not None:
        state = shard_train_state(state, mesh, optimizer=keep, trains="all")
        batch = shard_batch(batch, mesh)
    settings = {"num_depths": 2, "mesh": mesh} | settings
    spec = TrainSpec(model=MODEL, objective_function=objective_function, **settings)
    step = functools.partial(train_step, spec=spec, optimizer=keep)
    after, metrics = jax.jit(step)(state, batch, 0.0, 0.3, 0.25)
    return metrics, after.optimizer.trace


def assert_close(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def cross_entropy_by_hand(inputs: LossInputs):
    """The default loss from its parts."""
    terms = inputs.terms.cross_entropy
    drafts = [inputs.mean(terms[depth], depth=depth) for depth in (1, 2)]
    return inputs.mean(terms[0], depth=0) + inputs.mtp_scale * sum(drafts) / 2


def z_loss(inputs: LossInputs):
    return inputs.loss + 0.1 * inputs.mean(jax.nn.logsumexp(inputs.output.logits, axis=-1) ** 2, depth=0)


@pytest.mark.parametrize("vocab_chunk", [0, 100])
def test_an_objective_that_is_the_default_gives_its_gradients(vocab_chunk, batch):
    objective = Objective(vocab_chunk=vocab_chunk)
    metrics, expected = gradients(batch, objective=objective)
    own, got = gradients(batch, cross_entropy_by_hand, objective=objective)
    assert own["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert_close(got, expected)


def test_an_objective_adds_to_the_loss_of_the_settings(batch):
    plain, before = gradients(batch)
    metrics, after = gradients(batch, z_loss)
    assert metrics["loss"] > plain["loss"]
    np.testing.assert_array_equal(metrics["losses"], plain["losses"])
    assert not np.allclose(before["head"], after["head"])


def test_an_objective_sees_kl_and_overlap_with_chunks_of_the_vocabulary(batch):
    def overlap_of_drafts(inputs):
        return -inputs.mean(inputs.terms.overlap[0], depth=1)

    whole, expected = gradients(batch, overlap_of_drafts)
    metrics, got = gradients(batch, overlap_of_drafts, objective=Objective(vocab_chunk=100))
    assert metrics["loss"] == pytest.approx(float(whole["loss"]), rel=1e-5) and metrics["loss"] < 0
    assert_close(got, expected)


@pytest.mark.slow
def test_parts_of_a_batch_and_a_mesh_give_the_batch_s_loss(batch):
    whole, expected = gradients(batch, z_loss)
    mesh = compat.make_mesh({"data": 2, "fsdp": 2})
    for settings in ({"accumulation": 2}, {"mesh": mesh}):
        metrics, got = gradients(batch, z_loss, **settings)
        assert metrics["loss"] == pytest.approx(float(whole["loss"]), rel=1e-5)
        assert_close(got, expected)


def test_a_frozen_trunk_gets_no_gradient(batch):
    _, got = gradients(batch, z_loss, trains="modules")
    assert list(got) == ["mtp_0"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda inputs: inputs.terms.overlap, r"returned float32\[2, 4, 16\], not one floating-point number"),
        (lambda inputs: jnp.zeros((), jnp.int32), r"returned int32\[\]"),
    ],
)
def test_a_result_that_is_not_one_number_is_refused(wrong, said, batch):
    with pytest.raises(ValueError, match=said):
        gradients(batch, wrong)


def test_a_faulty_objective_is_found_before_a_run_is_replaced(tmp_path):
    text = training_runs.write_corpus(tmp_path / "text")
    config = TrainConfig(data=str(text), output=str(tmp_path / "out"), model=NARROW, **training_runs.SETTINGS, steps=2)
    with pytest.raises(ValueError, match="not one floating-point number"):
        train(config, objective=lambda inputs: inputs.terms.overlap, overwrite=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_uses_the_objective_and_resumes_only_with_it(tmp_path):
    text = training_runs.write_corpus(tmp_path / "text")
    config = TrainConfig(
        data=str(text), output=str(tmp_path / "out"), model=NARROW, **training_runs.SETTINGS, steps=2, warmup=0.0
    )
    plain = train(dataclasses.replace(config, output=str(tmp_path / "plain")), evaluations=1)
    result = train(config, objective=z_loss, evaluations=1)
    first, second = ([row["bits"] for row in of.history if "bits" in row] for of in (plain, result))
    assert first[0] == second[0] and first[1] != second[1]  # the first losses come before any update
    stored = json.loads((pathlib.Path(config.output) / "run.json").read_text())["settings"]
    assert stored["objective_function"].endswith("test_own_objective.z_loss")
    for other in (None, cross_entropy_by_hand):
        with pytest.raises(RunError, match="objective_function was"):
            train(config, objective=other, resume=True)
    assert train(config, objective=z_loss, resume=True, evaluations=1).panel.survival
