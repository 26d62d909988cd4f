"""Runs of an architecture of one's own: what they train, keep and resume."""

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest

from mtpjax import MTPModel, TrainConfig, init_params, load, presets, save, train
from mtpjax.cli.main import main
from mtpjax.training import run_dir, run_settings
from mtpjax.training.initial_model import init_model
from mtpjax.training.run_dir import RunError
from mtpjax.training.yaml_config import model_to_yaml, read_model_config, read_train_config
from tests.helpers import training_runs

PAIRS = ["model.hidden_size=16", "model.num_hidden_layers=2", "model.intermediate_size=24"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture
def pairs(text, tmp_path):
    settings = {**training_runs.SETTINGS, "steps": 2, "data": text, "output": tmp_path / "out"}
    return [f"{name}={value}" for name, value in settings.items()]


def exit_code(arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    return raised.value.code


@pytest.mark.slow
def test_three_modules_are_made_trained_and_saved(pairs, tmp_path, caplog):
    config = read_train_config(None, [*pairs, *PAIRS, "model.num_mtp_modules=3", "num_depths=3"])
    result = train(config, evaluations=1)
    assert not caplog.records  # every module has a loss
    model, params = load(config.output)
    assert model.config.num_mtp_modules == 3 and model.config.head_dim == 4
    assert {"mtp_0", "mtp_1", "mtp_2"} < set(params) and len(result.panel.survival) == 3
    before = init_params(model, jax.random.key(config.seed))
    for name in ("mtp_0", "mtp_1", "mtp_2"):
        assert not np.array_equal(before[name]["project"], params[name]["project"])
    # The run keeps its architecture as a file that another run takes.
    assert read_model_config(tmp_path / "out" / "model.yaml") == model.config


@pytest.mark.slow
def test_a_run_of_a_yaml_model_resumes_from_what_it_saved(pairs, tmp_path):
    file = tmp_path / "mine.yaml"
    model = dataclasses.replace(presets["tiny"], hidden_size=16, num_hidden_layers=2, intermediate_size=24, head_dim=4)
    file.write_text(model_to_yaml(model))
    train(read_train_config(None, [*pairs, f"model={file}"]), evaluations=1)
    stored = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["model"]
    assert stored["hidden_size"] == 16
    # The file may be gone: the run's own copy says the same, as do a preset and fields. Another architecture is
    # refused with both values.
    file.unlink()
    longer = [*pairs, f"model={tmp_path}/out/model.yaml"]
    assert train(read_train_config(None, longer), resume=True, evaluations=1).model.config == model
    as_fields = [*PAIRS, "model.head_dim=4"]
    assert train(read_train_config(None, [*pairs, *as_fields]), resume=True, evaluations=1).model.config == model
    with pytest.raises(
        RunError, match=r"different settings: model\.head_dim was 4, is 8; model\.hidden_size was 16, is 32$"
    ):
        train(read_train_config(None, [*longer, "model.hidden_size=32"]), resume=True)


def test_a_file_called_model_yaml_of_somebody_else_is_not_replaced(pairs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.yaml").write_text("precious")
    with pytest.raises(RunError, match=r"model\.yaml"):
        train(read_train_config(None, [*pairs, *PAIRS]))
    assert (tmp_path / "out" / "model.yaml").read_text() == "precious"


@pytest.mark.parametrize("depths", [0, 1, 2, 3])
def test_modules_without_a_loss_are_told(depths, caplog):
    config = TrainConfig(model={"num_mtp_modules": 2}, num_depths=depths)
    with caplog.at_level(logging.WARNING):
        init_model(config)
    is_told = "num_depths 1 trains only the first modules: set num_depths=2" in caplog.text
    assert is_told == (depths == 1) and bool(caplog.records) == is_told


@pytest.mark.parametrize("existing", [0, 1])
def test_a_checkpoint_gets_modules_up_to_the_number(existing, tmp_path):
    narrow = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "head_dim": 4}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow, num_mtp_modules=existing))
    save(tmp_path / "start", model, init_params(model, jax.random.key(0)))
    settings = {"init_from": str(tmp_path / "start"), "num_depths": 3}
    made, make_params = init_model(TrainConfig(**settings, model={"num_mtp_modules": 3}))
    assert made.config.num_mtp_modules == 3 and "mtp_2" in make_params()
    # Without the setting a trunk gets one module, as before.
    assert init_model(TrainConfig(**settings))[0].config.num_mtp_modules == 1
    if existing:
        with pytest.raises(ValueError, match="num_mtp_modules 0 is below the 1 MTP modules in"):
            init_model(TrainConfig(**settings, model={"num_mtp_modules": 0}))


def test_modules_alone_cannot_be_trained_where_there_are_none():
    with pytest.raises(ValueError, match="needs a model with MTP modules, and this one has 0"):
        init_model(TrainConfig(model={"num_mtp_modules": 0}, trains="modules"))


def test_the_command_prints_the_architecture_as_a_file_that_it_takes(tmp_path, capsys):
    assert exit_code(["train", "--print-model", "preset=tiny", "model.num_mtp_modules=3"]) == 0
    file = tmp_path / "mine.yaml"
    file.write_text(capsys.readouterr().out)
    assert read_model_config(file) == dataclasses.replace(presets["tiny"], num_mtp_modules=3)
    assert exit_code(["train", "--print-model", "init_from=x"]) == 2
    assert exit_code(["train", "model.hiden_size=96"]) == 2
    assert "did you mean model.hidden_size?" in capsys.readouterr().err


def test_the_help_tells_depths_from_modules(capsys):
    assert exit_code(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "set model.num_mtp_modules and num_depths to the same number: depth k trains module k" in said


def test_sizes_of_a_dry_run_follow_the_model(pairs, capsys):
    sizes = []
    for more in ([], ["model.num_mtp_modules=2"]):
        assert exit_code(["train", "--dry-run", *pairs, *PAIRS, *more]) == 0
        lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
        sizes.append(int(lines["parameters"].replace(",", "")))
    assert sizes[0] < sizes[1]


def test_a_field_of_the_model_may_be_allowed_to_differ(tmp_path):
    settings = {"preset": "tiny", "model": presets["tiny"].to_dict()}
    run_dir.begin(tmp_path, settings, "digest", overwrite=False)
    now = {"preset": "tiny", "model": settings["model"] | {"max_position_embeddings": 4096}}
    with pytest.raises(RunError, match=r"model\.max_position_embeddings was 2048, is 4096$"):
        run_settings.check_settings(tmp_path, now, "digest")
    for allowed in ("model", "model.max_position_embeddings"):
        run_settings.check_settings(tmp_path, now, "digest", [allowed])
