"""Drafters that train on a frozen trunk: losses of plain twins, frozen bits, acceptance, resuming, refusals."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, Objective, TrainConfig, load_drafter, speculative_generate, train
from mtpjax.data.packing import Batch
from mtpjax.drafters.dflash.method import default_block_layers
from mtpjax.drafters.eagle3.method import default_draft_layers
from mtpjax.drafters.trained import DraftParams
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.io.checkpoint import save_model
from mtpjax.models.forward import trunk_states
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training import Callback, hidden_state_cache
from mtpjax.training.initial_drafter import fit_to_data
from mtpjax.training.initial_drafter import new_drafter as make_drafter
from mtpjax.training.run_sizes import compute_run_sizes
from mtpjax.training.step import make_optimizer
from mtpjax.training.train_state import init_train_state
from tests.helpers import training_runs
from tests.helpers.new_drafters import (
    DRAFT_IDS_OF_TESTS,
    KIND_SETTINGS,
    LEVELS,
    D,
    V,
    log_softmax,
    new_drafter,
    packed_batch,
    run_steps,
    settings,
    trunk_logs,
)

KINDS = ("eagle3", "medusa", "dflash", "dspark")


@pytest.fixture(scope="module")
def batch():
    return packed_batch()


def rms(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def eagle3_plain_levels(network, states, tokens, embedding, config):
    """The levels over one document `[T, D]` in numpy, row by row: logits `[LEVELS, T, R]`."""
    block, layer, T = config.block, network["layer_0"], len(states)
    H, half, keys_values = block.head_dim, block.head_dim // 2, {}
    hidden, logits = states @ network["fc"], []
    for level in range(1, LEVELS + 1):
        outputs = []
        for i in range(T):
            token = tokens[i + level] if i + level < T else 0
            parts = [
                rms(embedding[token], layer["norm_embedding"]["scale"]),
                rms(hidden[i], layer["norm_hidden"]["scale"]),
            ]
            # qkv [2D, K, G + 2, H]: the queries of each key head, its key and its value; at the position of the slot.
            projected = np.einsum("d,dkgh->kgh", np.concatenate(parts), layer["attention"]["qkv"])
            angle = (i + level - 1) * block.rope_theta ** (-np.arange(half) / half)
            low, high = projected[:, :-1, :half], projected[:, :-1, half:]
            turned = [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)]
            queries_key = np.concatenate(turned, axis=-1)
            keys_values[level, i] = queries_key[:, -1], projected[:, -1]
            # Entries of level 1 up to its own row, and those of its own row in later levels.
            seen = [keys_values[1, j] for j in range(i + 1)] + [keys_values[k, i] for k in range(2, level + 1)]
            keys, values = map(np.stack, zip(*seen, strict=True))
            scores = np.einsum("kgh,skh->kgs", queries_key[:, :-1], keys) / np.sqrt(H)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), values).reshape(-1)
            x = hidden[i] + attended @ layer["attention"]["output"].reshape(len(attended), -1)
            normed = rms(x, layer["norm_feed_forward"]["scale"])
            gate, up = np.einsum("d,dcf->cf", normed, layer["dense"]["gate_up"])
            outputs.append(x + (gate / (1 + np.exp(-gate)) * up) @ layer["dense"]["down"])
        hidden = np.stack(outputs)
        logits.append(rms(hidden, network["norm_final"]["scale"]) @ network["head"])
    return np.stack(logits)


def plain_losses(log_p, log_q, batch, ids, level):
    """Cross-entropy and KL of a level in a loop over positions; p is the trunk's, restricted to the draft ids."""
    column = {int(token): number for number, token in enumerate(ids)}
    entropy, kl = [], []
    for row in range(len(batch.tokens)):
        for i in range(batch.tokens.shape[1] - level - 1):
            j, segments = i + level + 1, batch.segment_ids[row]
            if segments[i] == 0 or segments[i] != segments[j] or not batch.loss_mask[row, j]:
                continue
            if (target := int(batch.tokens[row, j])) not in column:
                continue
            p, q = log_p[row, i + level], log_q[row, i]
            entropy.append(-q[column[target]])
            kl.append((np.exp(p) * (p - q)).sum())
    return np.mean(entropy), np.mean(kl)


def test_medusa_losses_are_those_of_a_plain_loop(small, batch):
    model, params, drafter = new_drafter(small, "medusa")
    objective = Objective(mix={"kl": 1.0, "cross_entropy": 0.5}, depth_weights="decayed", depth_decay=0.8)
    _, metrics = run_steps(model, params, drafter, batch, objective=objective)
    hidden, log_p = trunk_logs(model, params, batch)
    network, wanted = jax.tree.map(np.float64, params[DRAFTER]), 0.0
    for level in range(1, LEVELS + 1):
        block = network[f"block_{level - 1}"]
        projected = hidden @ block["kernel_0"] + block["bias_0"]
        head_input = hidden + projected / (1 + np.exp(-projected))
        log_q = log_softmax(head_input @ network[f"output_{level - 1}"])
        entropy, kl = plain_losses(log_p, log_q, batch, DRAFT_IDS_OF_TESTS, level)
        np.testing.assert_allclose(metrics["losses"][level], entropy, rtol=1e-5)
        wanted += 0.8 ** (level - 1) / (1 + 0.8 + 0.64) * (kl + 0.5 * entropy)
    np.testing.assert_allclose(metrics["loss"] - metrics["losses"][0], wanted, rtol=1e-5)


def test_eagle3_losses_are_those_of_a_plain_loop(small, batch):
    model, params, drafter = new_drafter(small, "eagle3")
    states = np.asarray(
        trunk_states(params, batch.tokens, batch.segment_ids, model=model, layer_ids=drafter.architecture.layer_ids),
        np.float64,
    )
    network, embedding = jax.tree.map(np.float64, params[DRAFTER]), np.float64(params["embedding"])
    log_q = np.zeros((LEVELS, *batch.tokens.shape, len(DRAFT_IDS_OF_TESTS)))
    for row, start, end in ((0, 0, 7), (0, 7, 12), (1, 0, 10)):
        document = states[row, start:end, :-D], batch.tokens[row, start:end]
        log_q[:, row, start:end] = log_softmax(eagle3_plain_levels(network, *document, embedding, drafter.architecture))
    objective = Objective(mix={"kl": 1.0}, depth_weights="decayed", depth_decay=0.8)
    _, metrics = run_steps(model, params, drafter, batch, objective=objective)
    log_p, wanted = trunk_logs(model, params, batch)[1], 0.0
    for level in range(1, LEVELS + 1):
        entropy, kl = plain_losses(log_p, log_q[level - 1], batch, DRAFT_IDS_OF_TESTS, level)
        np.testing.assert_allclose(metrics["losses"][level], entropy, rtol=1e-5)
        wanted += 0.8 ** (level - 1) / (1 + 0.8 + 0.64) * kl
    np.testing.assert_allclose(metrics["loss"] - metrics["losses"][0], wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", ["kl", "lk_hybrid", "end_to_end_tv"])
def test_losses_are_the_same_in_parts_and_chunks_and_from_cached_states(kind, mix, small, batch):
    model, params, drafter = new_drafter(small, kind)
    objective = Objective(mix={mix: 1.0})
    _, wanted = run_steps(model, params, drafter, batch, objective=objective)
    layers = drafter.architecture.layer_ids
    states = trunk_states(params, batch.tokens, batch.segment_ids, model=model, layer_ids=layers)
    chunked = dataclasses.replace(objective, vocab_chunk=7)
    for changes in ({"states": states}, {"objective": chunked}, {"accumulation": 2}):
        _, metrics = run_steps(model, params, drafter, batch, **{"objective": objective} | changes)
        for name in ("loss", "losses", "gradient_norm"):
            np.testing.assert_allclose(metrics[name], wanted[name], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_may_compute_in_bfloat16(kind, small, batch):
    model, params, drafter = new_drafter(small, kind)
    _, wanted = run_steps(model, params, drafter, batch)
    after, metrics = run_steps(model.clone(dtype="bfloat16"), params, drafter, batch)
    np.testing.assert_allclose(metrics["losses"], wanted["losses"], rtol=0.03)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(after[DRAFTER]))


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_only_the_drafter_changes(kind, small, batch):
    model, params, drafter = new_drafter(small, kind)
    after, metrics = run_steps(model, params, drafter, batch, steps=2)
    assert metrics["is_finite"] and after.keys() == params.keys()
    for name, before in params.items():
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after[name]), strict=True)
        same = [bool((old == new).all()) for old, new in pairs]
        assert not any(same) if name == DRAFTER else all(same), name


def test_the_draft_vocabulary_stays_out_of_the_gradient(small):
    params = new_drafter(small, "medusa")[1]
    optimizer = make_optimizer(TrainConfig())
    moments = jax.tree.leaves(init_train_state(params, optimizer, "modules").optimizer)
    assert DRAFT_IDS in params and all(leaf.dtype != jnp.int32 or leaf.ndim == 0 for leaf in moments)


def test_the_mask_token_is_the_rarest_of_the_training_rows(small):
    drafter, tokenizer = new_drafter(small, "dflash", is_reduced=False)[2], types.SimpleNamespace(eos_token_ids=(58,))
    tokens = np.delete(np.arange(V, dtype=np.int32), [2, 56, 58, 60])
    rows = [Batch(tokens[None], np.ones((1, len(tokens)), np.int32), (tokens != 60)[None])]
    corpus: Any = types.SimpleNamespace(source_rows=[*rows, *rows], tokenizer=tokenizer)
    chosen = fit_to_data(drafter, settings("dflash", draft_mask_token=None), corpus)[0].architecture
    assert chosen == dataclasses.replace(drafter.architecture, mask_token_id=60)
    rows.append(Batch(np.array([[60, 60, 56]], np.int32), np.array([[1, 1, 0]], np.int32), np.ones((1, 3), bool)))
    corpus.source_rows = rows
    chosen = fit_to_data(drafter, settings("dflash", draft_mask_token=None), corpus)[0].architecture
    assert chosen.mask_token_id == 56  # of padding, and 58 ends a text
    assert fit_to_data(drafter, settings("dflash"), corpus)[0].architecture.mask_token_id == 1


def test_default_layers_fit_every_trunk():
    assert default_draft_layers(32) == (2, 16, 29) and default_draft_layers(7) == (2, 3, 4)
    assert [default_draft_layers(layers) for layers in (1, 2, 3, 6)] == [(0, 1), (0, 1, 2), (1, 2, 3), (2, 4, 6)]
    assert default_block_layers(36) == (2, 10, 18, 26, 34) and default_block_layers(8) == (2, 3, 4, 5, 6)
    assert [default_block_layers(layers) for layers in (1, 2, 4, 6)] == [(1,), (1, 2), (1, 2, 3, 4), (1, 2, 4, 5, 6)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": None}, "set init_from"),
        ({"trains": "detached"}, "must be 'modules', not 'detached'"),
        ({"drafter": "dflash2"}, "got dflash2: did you mean dflash"),
        ({"drafter": "mtp", "draft_vocab_size": 8}, "draft_vocab_size needs drafter 'eagle3', 'medusa', 'dflash'"),
        ({"drafter": "medusa", "draft_layers": (1,)}, "draft_layers needs drafter 'eagle3', 'dflash', 'dspark', not"),
        ({"draft_anchors": 3}, "draft_anchors needs drafter 'dflash', 'dspark', not 'eagle3'"),
        ({"drafter": "dflash", "draft_markov_rank": 3}, "draft_markov_rank needs drafter 'dspark', not 'dflash'"),
        ({"drafter": "dflash", "draft_num_layers": 0}, "draft_num_layers must be at least 1, not 0"),
        ({"drafter": "dspark", "num_depths": 1}, "needs num_depths of at least 2"),
        ({"model": {"num_mtp_modules": 2}}, "do not set model.num_mtp_modules"),
        ({"attention_layout": "stream"}, "must be 'ttt'"),
        ({"remat": "layers"}, "has a frozen trunk"),
        ({"num_depths": 0}, "num_depths of at least 1"),
        ({"draft_vocab_size": -1}, "must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"drafter": "eagle3", "init_from": "unused"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 99}, "exceeds the vocabulary size 61"),
        ({"draft_layers": (0, 9)}, "within 0..3"),
        ({"draft_mask_token": 61}, "not within the vocabulary of 61"),
    ],
)
def test_settings_that_do_not_fit_the_trunk_are_refused(changes, message, small):
    with pytest.raises(ValueError, match=message):
        make_drafter(settings("dflash", **changes), small()[0].config)


# Runs: a trunk of bytes that was trained on repeating text, in a few seconds.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trunk(corpus, tmp_path_factory):
    """The folder of a run of 150 updates."""
    output = tmp_path_factory.mktemp("trunk")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    train(TrainConfig(model=sizes | {"num_key_value_heads": 1}, **run_settings(corpus, output, steps=150)))
    return output


def run_settings(corpus, output, **changes):
    shared = {"data": str(corpus), "output": str(output), "learning_rate": 1e-2, "plot_formats": (), "save_every": 0}
    return training_runs.SETTINGS | shared | {"batch_size": 8} | changes


def drafter_settings(kind, trunk, corpus, output, **changes):
    objective = Objective(depth_weights="decayed", depth_decay=0.8)
    own = {"num_depths": LEVELS, "steps": 6, "draft_vocab_size": 40, "objective": objective, **KIND_SETTINGS[kind]}
    return TrainConfig(drafter=kind, init_from=str(trunk), **run_settings(corpus, output, **own | changes))


def measured(result, drafter, draft_params, levels=LEVELS, temperature=0.0):
    prompts = [list(document.tokens[:20]) for document in result.held_out] * 4
    config = DecodeConfig(max_new_tokens=40, num_steps=levels, drafter=drafter, acceptance="block")
    arguments = {"model": result.model, "config": config, "draft_params": draft_params, "temperature": temperature}
    return measure_acceptance(result.params, prompts, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_acceptance_to_what_the_trainer_predicts(kind, trunk, corpus, tmp_path):
    untrained = train(drafter_settings(kind, trunk, corpus, tmp_path / "one", steps=1, learning_rate=1e-9))
    settings = drafter_settings(kind, trunk, corpus, tmp_path / "many", steps=150, panel_prompts=8)
    result = train(settings)
    before = measured(untrained, untrained.drafter, untrained.draft_params)
    after = measured(result, result.drafter, result.draft_params)
    assert after.is_identical.all() and before.is_identical.all()
    rates = [counts.accepted.sum() / counts.rounds.sum() / LEVELS for counts in (before, after)]
    assert rates[1] > 0.5 and rates[1] > rates[0] + 0.3
    # At temperature 0 the prediction along the trunk's own text is exact.
    np.testing.assert_allclose(after.predicted.accepted, after.accepted)
    np.testing.assert_allclose(after.predicted.rounds, after.rounds)
    # Above it, it is the expectation; the panel's interval is over prompts.
    row = result.panel.decoded["overall"]["sampled"]
    assert abs(row.predicted - row.accept_length) < 0.6
    # The files hold the same drafter.
    drafter, draft_params = load_drafter(tmp_path / "many", model=result.model)
    assert drafter.architecture == result.drafter.architecture
    again = measured(result, drafter, draft_params)
    np.testing.assert_array_equal(again.accepted, after.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_the_expectation_of_sampled_decoding(kind, small):
    """Over many seeds; untrained drafters with a reduced vocabulary."""
    model, params, drafter = new_drafter(small, kind)
    draft_params = DraftParams.of(params)
    config = DecodeConfig(max_new_tokens=24, num_steps=LEVELS, drafter=drafter, acceptance="block")
    arguments = {"model": model, "config": config, "draft_params": draft_params, "batch_size": 128}
    found = measure_acceptance(params, [[1, 2, 3]] * 256, temperature=1.0, **arguments)
    difference = found.accepted - found.predicted.accepted
    error = difference.std(axis=0) / np.sqrt(len(difference))
    assert found.accepted.sum() > 50
    assert (abs(difference.mean(axis=0)) < 4 * error + 1e-6).all()


class Stop(Exception):
    """Ends a run as a kill would, after its state is saved."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(kind, trunk, corpus, tmp_path):
    states = {"trunk_states": str(tmp_path / f"states-{kind}"), "save_every": 3}
    whole = train(drafter_settings(kind, trunk, corpus, tmp_path / "whole", **states))

    class Interrupt(Callback):
        def after_update(self, event):
            if event.step == 4:
                raise Stop

    config = drafter_settings(kind, trunk, corpus, tmp_path / "broken", **states)
    with pytest.raises(Stop):
        train(config, callbacks=[Interrupt()])
    resumed = train(config, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.draft_params, resumed.draft_params)
    assert training_runs.read_losses(tmp_path / "broken")[6] == training_runs.read_losses(tmp_path / "whole")[6]
    names = sorted(file.name for file in (tmp_path / "whole" / "drafter").iterdir())
    for name in names:
        pair = [(tmp_path / run / "drafter" / name).read_bytes() for run in ("whole", "broken")]
        assert pair[0] == pair[1], name
    # With the states of the cache, the bits are those of a run without it.
    direct = train(drafter_settings(kind, trunk, corpus, tmp_path / "direct"))
    jax.tree.map(np.testing.assert_array_equal, whole.draft_params, direct.draft_params)


@pytest.mark.slow
def test_all_drafters_share_one_folder_of_states(trunk, corpus, tmp_path, monkeypatch):
    """EAGLE-3 adds the layers that it reads; Medusa and an MTP module read the final states."""
    folder = str(tmp_path / "states")
    train(drafter_settings("medusa", trunk, corpus, tmp_path / "medusa", trunk_states=folder, steps=1))
    config = drafter_settings("eagle3", trunk, corpus, tmp_path / "eagle3", trunk_states=folder, steps=1)
    train(config)
    assert compute_run_sizes(config)["bytes of the trunk's states, each token"] == 4 * D * 4
    monkeypatch.setattr(hidden_state_cache, "_compute_blocks", None)
    for kind in KINDS:
        train(drafter_settings(kind, trunk, corpus, tmp_path / f"{kind}-again", trunk_states=folder, steps=1))
    modules = run_settings(corpus, tmp_path / "mtp", num_depths=LEVELS, steps=1)
    train(TrainConfig(init_from=str(trunk), trains="modules", trunk_states=folder, **modules))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_command_trains_and_decodes(kind, trunk, corpus, tmp_path, capsys):
    from mtpjax.cli.main import main

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    output = tmp_path / "run"
    pairs = {"drafter": kind, "init_from": trunk, **run_settings(corpus, output, steps=2, num_depths=2)}
    pairs["plot_formats"] = "[]"
    assert "drafter/" in command("train", *(f"{name}={value}" for name, value in pairs.items()))
    flags = ["--prompt", "def f", "--max-new-tokens", "12", "--check", "--speculative-draft-model-path", str(output)]
    command("generate", "--model", str(trunk), *flags)


def test_a_trained_drafter_drafts_for_a_saved_trunk(small, tmp_path):
    """The files of a run, without the run."""
    from mtpjax.training.initial_drafter import save_trained_drafter

    model, params, drafter = new_drafter(small, "medusa")
    save_model(tmp_path / "trunk", model, {n: leaf for n, leaf in params.items() if not n.startswith("draft")})
    for _ in range(2):  # the second one replaces the first
        save_trained_drafter(tmp_path, params, drafter, settings("medusa").draft_method)
    loaded, draft_params = load_drafter(tmp_path, model=model)
    assert loaded == drafter
    jax.tree.map(np.testing.assert_array_equal, draft_params, DraftParams.of(params))
    config = DecodeConfig(max_new_tokens=2, num_steps=1, drafter=drafter)
    assert speculative_generate(params, [[1, 2]], model=model, config=config, draft_params=draft_params).rows()
