"""Measured parts of an update of a tiny model."""

import json
from typing import Any

import jax
import pytest

from mtpjax import TrainConfig
from mtpjax.cli.main import main
from mtpjax.evaluation.update_report import mfu_of
from mtpjax.training import update_profile
from mtpjax.training.run import Run
from mtpjax.training.step import prepare_rows
from tests.helpers import training_runs

NARROW = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "head_dim": 8}
SETTINGS: dict[str, Any] = {**training_runs.SETTINGS, "model": {**NARROW, "num_key_value_heads": 1}}
PARTS = ["data", "trunk", "modules", "losses", "backward", "optimizer"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(training_runs.write_corpus(tmp_path_factory.mktemp("text")))


def test_profile_of_an_update(text, tmp_path, capsys):
    output = tmp_path / "update.json"
    pairs = {**training_runs.SETTINGS, "data": text, **{f"model.{name}": value for name, value in NARROW.items()}}
    pairs["model.num_key_value_heads"] = 1
    file = tmp_path / "run.yaml"
    file.write_text("trains: all\naccumulation: 2\n")
    settings = [str(file), *(f"{name}={value}" for name, value in pairs.items())]
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--repeats", "2", "--output", str(output), "--plot-formats", "png", "--train", *settings])
    assert ended.value.code == 0
    (profile,) = json.loads(output.read_text())
    assert [part["name"] for part in profile["parts"]] == PARTS and profile["repeats"] == 2
    flops = {part["name"]: part["flops"] for part in profile["parts"]}
    assert flops["data"] == flops["optimizer"] == 0
    # Everything is trained, so the backward pass needs twice as many operations.
    assert flops["backward"] == 2 * (flops["trunk"] + flops["modules"] + flops["losses"])
    assert all(part["seconds"] >= 0 for part in profile["parts"]) and profile["update_seconds"] > 0
    assert profile["is_peak_measured"] and profile["mfu"] == mfu_of(profile) and profile["mfu"] > 0
    assert (tmp_path / "update.png").read_bytes()[1:4] == b"PNG"
    printed = capsys.readouterr().out
    assert "trust in the timings" in printed and "the rate of a large matrix product here" in " ".join(printed.split())
    first_words = [line.split()[0] for line in printed.splitlines() if line.strip()]
    assert [word for word in first_words if word in PARTS][: len(PARTS)] == PARTS
    # Nothing else is written: a profile is not a run.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "update.json", "update.png"]


def test_programs_do_more_and_more_of_an_update(text, tmp_path):
    # One layer and no microbatches: XLA counts the body of a loop once.
    config = TrainConfig(data=text, output=str(tmp_path), **SETTINGS)
    run = Run(config)
    batch = next(run.corpus.batches(config.batch_size))
    rows, totals = jax.eval_shape(lambda state: prepare_rows(state, batch, None, spec=run.spec), run.state)
    flops = {}
    for name, call in update_profile._prefixes(run.spec).items():
        cost: Any = jax.jit(call).lower(run.state.params, rows, totals, 0.3, 1.0).compile().cost_analysis()
        flops[name] = cost["flops"]
    heads = 2 * 2 * 256 * 16 * batch.tokens.size  # of the trunk and one depth
    assert flops["trunk"] < flops["modules"] < flops["losses"]
    # The losses run no backward pass, which is twice the forward pass.
    assert flops["backward"] > 2.2 * flops["losses"]
    assert flops["losses"] - flops["modules"] > 0.9 * heads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": {"data": 2}}, "only updates on one device can be profiled"),
        ({"trunk_states": "states", "trains": "modules"}, "leave out trunk_states"),
    ],
)
def test_unsupported_settings(settings, message, text):
    with pytest.raises(ValueError, match=message):
        update_profile.measure_update(TrainConfig(data=text, **settings), repeats=1)
