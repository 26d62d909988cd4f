"""Drafters that a run continues to train: they begin as their files are, and settings cannot contradict these."""

import dataclasses
import json
import types
from typing import Any

import jax
import numpy as np
import pytest

from mtpjax import TrainConfig, load_drafter, train
from mtpjax.drafters.methods import find_method
from mtpjax.drafters.trained import DraftParams
from mtpjax.errors import CheckpointError, UsageError
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.cost import read_training_cost
from mtpjax.training.initial_drafter import add_drafter, initial_drafter, save_trained_drafter
from mtpjax.training.run_sizes import compute_run_sizes
from mtpjax.training.yaml_config import read_train_config
from tests.helpers import training_runs
from tests.helpers.new_drafters import LEVELS, new_drafter, packed_batch, run_steps, settings

KINDS = ("eagle3", "medusa", "dflash", "dspark")
NO_CORPUS: Any = types.SimpleNamespace()  # vocabulary and mask token are those of the files, and not of the data


def saved(small, kind, path, is_reduced=True):
    """A drafter in the folder of a run."""
    model, params, drafter = new_drafter(small, kind, is_reduced)
    save_trained_drafter(path, params, drafter, find_method(kind))
    return model, params, drafter


def continued(model, params, config):
    initial = initial_drafter(config, model)
    assert initial is not None
    trunk = {name: leaf for name, leaf in params.items() if name not in (DRAFTER, DRAFT_IDS)}
    return add_drafter(trunk, initial, config=config, corpus=NO_CORPUS, model=model)


def bare(kind, path, **changes):
    """Settings that name the files alone."""
    return TrainConfig(drafter=kind, init_from="unused", draft_init_from=str(path), num_depths=LEVELS, **changes)


@pytest.mark.parametrize("is_reduced", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_the_parameters_of_the_files(kind, is_reduced, small, tmp_path):
    model, params, drafter = saved(small, kind, tmp_path, is_reduced)
    found, again = continued(model, params, bare(kind, tmp_path))
    assert again == drafter and found.keys() == params.keys()
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found[DRAFTER]))


def test_the_first_loss_is_that_of_the_loaded_drafter(small, tmp_path):
    model, params, drafter = saved(small, "medusa", tmp_path)
    found, again = continued(model, params, bare("medusa", tmp_path))
    _, wanted = run_steps(model, params, drafter, packed_batch())
    _, metrics = run_steps(model, found, again, packed_batch())
    for name in ("loss", "losses"):
        np.testing.assert_array_equal(metrics[name], wanted[name])


def test_what_was_continued_loads_again(small, tmp_path):
    model, params, drafter = saved(small, "dspark", tmp_path / "before")
    found, again = continued(model, params, bare("dspark", tmp_path / "before"))
    found = found | {DRAFTER: jax.tree.map(lambda leaf: leaf + 1, found[DRAFTER])}
    save_trained_drafter(tmp_path / "after", found, again, find_method("dspark"))
    loaded, draft_params = load_drafter(tmp_path / "after", model=model)
    assert loaded == drafter
    jax.tree.map(np.testing.assert_array_equal, draft_params, DraftParams.of(found))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle3", {"draft_vocab_size": 8}, "whose draft_vocab_size is 31, not 8"),
        ("eagle3", {"draft_layers": (0, 1)}, r"draft_layers is \(0, 1, 2\), not \(0, 1\)"),
        ("eagle3", {"drafter": "medusa"}, "holds a drafter of method 'eagle3': set drafter=eagle3, not medusa"),
        ("medusa", {"num_depths": 2}, "num_depths is 3, not 2: set"),
        ("dflash", {"num_depths": 4}, "num_depths is 3, not 4"),
        (
            "dflash",
            {"draft_num_layers": 1, "draft_mask_token": 5},
            "num_layers is 2, not 1; .*_token is 1, not 5",
        ),
        ("dspark", {"draft_markov_rank": 4}, "draft_markov_rank is 8, not 4"),
        ("dflash", {"drafter": "dspark"}, "holds a drafter of method 'dflash'"),
    ],
)
def test_settings_that_contradict_the_files_are_refused(kind, changes, message, small, tmp_path):
    model, _, _ = saved(small, kind, tmp_path)
    with pytest.raises(UsageError, match=message):
        initial_drafter(dataclasses.replace(bare(kind, tmp_path), **changes), model)


def test_equal_settings_are_accepted(small, tmp_path):
    for kind in KINDS:
        model, params, drafter = saved(small, kind, tmp_path / kind)
        config = dataclasses.replace(settings(kind, draft_vocab_size=31), draft_init_from=str(tmp_path / kind))
        assert continued(model, params, config)[1] == drafter


def test_a_drafter_of_another_trunk_is_refused(small, tmp_path):
    saved(small, "eagle3", tmp_path)
    model, _ = small(num_mtp_modules=0, vocab_size=256)
    with pytest.raises(ValueError, match="is for a trunk of vocabulary 61 and width 32; this one has vocabulary 256"):
        initial_drafter(bare("eagle3", tmp_path), model)


def test_a_drafter_in_the_folder_of_the_run_is_refused(small, tmp_path):
    model, _, _ = saved(small, "eagle3", tmp_path)
    for path in (tmp_path, tmp_path / "drafter"):
        with pytest.raises(UsageError, match="choose a different output"):
            initial_drafter(bare("eagle3", path, output=str(tmp_path)), model)


def test_a_file_with_two_readings_needs_one_in_the_settings(small, tmp_path):
    model, _, _ = saved(small, "eagle3", tmp_path)
    file = tmp_path / "drafter" / "config.json"
    values = json.loads(file.read_text())
    del values["norm_before_residual"]
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="lacks norm_before_residual"):
        initial_drafter(bare("eagle3", tmp_path), model)
    initial = initial_drafter(bare("eagle3", tmp_path, draft_reading={"norm_before_residual": True}), model)
    assert initial is not None and initial.drafter.architecture.norm_before_residual
    with pytest.raises(UsageError, match="norm_before_residual must be True or False, got 'yes'"):
        initial_drafter(bare("eagle3", tmp_path, draft_reading={"norm_before_residual": "yes"}), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "mtp"}, "draft_init_from needs drafter 'eagle3', 'medusa'"),
        ({"draft_init_from": None, "draft_reading": {"aux_layers": "output"}}, "is unused: it needs draft_init_from"),
        ({"draft_reading": {"aux": "output"}}, "draft_reading 'aux'"),
    ],
)
def test_settings_that_need_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"drafter": "eagle3", "init_from": "x", "draft_init_from": "y"} | changes)


def test_the_command_line_names_the_reading():
    pairs = ["drafter=eagle3", "init_from=x", "draft_init_from=y", "draft_reading.aux_layers=output"]
    config = read_train_config(overrides=[*pairs, "draft_reading.sample_from_anchor=true"])
    assert config.draft_init_from == "y"
    assert dict(config.draft_reading) == {"aux_layers": "output", "sample_from_anchor": True}
    with pytest.raises(ValueError, match=r"unknown setting drafter.init_from: did you mean draft_init_from"):
        read_train_config(overrides=["drafter.init_from=y"])


class Stop(Exception):
    """Ends a run as a kill would, after its state is saved."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_continue_a_drafter_and_resume(kind, tmp_path):
    """A run without a real update has the panel of the run before; a resumed one the bits of an unbroken one."""
    from tests.training.test_train_drafters import drafter_settings, run_settings

    corpus = training_runs.write_corpus(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    train(TrainConfig(model=sizes | {"num_key_value_heads": 1}, **run_settings(corpus, tmp_path / "trunk", steps=20)))
    first = train(drafter_settings(kind, tmp_path / "trunk", corpus, tmp_path / "first"))

    def settings_of(name, **changes):
        more = {"draft_init_from": str(tmp_path / "first"), "save_every": 1} | changes
        return drafter_settings(kind, tmp_path / "trunk", corpus, tmp_path / name, **more)

    still = train(settings_of("still", steps=1, learning_rate=1e-30))
    assert still.panel == first.panel
    jax.tree.map(np.testing.assert_array_equal, still.draft_params, first.draft_params)
    assert compute_run_sizes(settings_of("sizes"))["parameters"] > 0
    assert read_training_cost(tmp_path / "still") is None
    # Resuming reads the files again, and then the saved state.
    whole = train(settings_of("whole", steps=3))

    def stop(event):
        if event.step == 2:
            raise Stop

    from mtpjax.training import Callback

    class Interrupt(Callback):
        def after_update(self, event):
            stop(event)

    with pytest.raises(Stop):
        train(settings_of("broken", steps=3), callbacks=[Interrupt()])
    resumed = train(settings_of("broken", steps=3), resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.draft_params, whole.draft_params)
    # What was continued loads again.
    drafter, draft_params = load_drafter(tmp_path / "whole", model=whole.model)
    assert drafter.architecture == whole.drafter.architecture
    jax.tree.map(np.testing.assert_array_equal, draft_params, whole.draft_params)
