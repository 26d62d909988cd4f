"""Callbacks hear of updates, evaluations and saves, and may end the run."""

import json
import pathlib

import numpy as np
import pytest

from mtpjax import TrainConfig, load, train
from mtpjax.training import Callback, run_dir
from tests.helpers import training_runs

NARROW = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config(text, tmp_path):
    return TrainConfig(
        data=str(text), output=str(tmp_path / "out"), model=NARROW, **training_runs.SETTINGS, steps=4, save_every=2
    )


class Recorder(Callback):
    """Notes what it hears, and stops or fails at one moment."""

    def __init__(self, moment="", step=0, fails=False):
        self.moment, self.step, self.fails, self.events = moment, step, fails, []

    def note(self, moment, event):
        self.events.append((moment, event.step, event.metrics, event.path))
        if (moment, event.step) != (self.moment, self.step):
            return None
        if self.fails:
            raise RuntimeError("broken callback")
        return True

    def after_update(self, event):
        assert event.state.step == event.step and 0 < event.progress <= 1 and event.seconds > 0
        return self.note("update", event)

    def after_evaluation(self, event):
        return self.note("evaluation", event)

    def after_save(self, event):
        assert event.path is not None and event.path.is_dir()
        return self.note("save", event)

    @property
    def order(self):
        return [f"{moment} {step}" for moment, step, *_ in self.events]


@pytest.mark.slow
def test_callbacks_are_called_in_order_with_the_metrics(config):
    first, second = Recorder(), Recorder()
    result = train(config, callbacks=(first, second), evaluations=2)
    assert first.order == second.order
    # The state and the model of the end are saved before the last evaluation, and told when the model is complete.
    assert first.order == [
        *("update 1", "update 2", "evaluation 2", "save 2", "update 3", "update 4"),
        *("evaluation 4", "save 4", "save 4"),
    ]
    updates = [metrics for moment, _, metrics, _ in first.events if moment == "update"]
    bits = [row["bits"] for row in result.history if "bits" in row]
    np.testing.assert_allclose([metrics["losses"] / np.log(2) for metrics in updates], bits, rtol=1e-6)
    for metrics in updates:
        assert metrics["is_finite"] is True and metrics["mtp_scale"] in (0.3, 0.1)
        assert metrics["loss"] == pytest.approx(metrics["losses"][0] + metrics["mtp_scale"] * metrics["losses"][1])
    panels = [metrics for moment, _, metrics, _ in first.events if moment == "evaluation"]
    assert json.loads(json.dumps(panels)) == [row["eval"] for row in result.history if "eval" in row]
    paths = [path for moment, _, _, path in first.events if moment == "save"]
    output = pathlib.Path(config.output)
    assert paths == [output / "states/00000002", output / "states/00000004", output / "checkpoint"]


@pytest.mark.parametrize("moment", ["update", "evaluation", "save"])
def test_a_callback_ends_the_run_as_if_it_were_complete(moment, config, capsys):
    recorder = Recorder(moment, step=2)
    result = train(config, callbacks=[recorder], evaluations=2)
    assert [row["step"] for row in result.history if "bits" in row] == [1, 2]
    assert result.history[-1]["step"] == 2 and "eval" in result.history[-1]
    assert "a callback stopped the run at update 2" in capsys.readouterr().err
    load(config.output)
    assert recorder.order[-1] == "save 2"


@pytest.mark.slow
def test_a_run_that_a_callback_ended_can_be_continued(config):
    train(config, callbacks=[Recorder("update", step=2)], evaluations=1)
    result = train(config, resume=True, evaluations=1)
    assert [row["step"] for row in result.history if "bits" in row] == [1, 2, 3, 4]


@pytest.mark.parametrize(("moment", "step"), [("update", 3), ("evaluation", 2), ("save", 2), ("evaluation", 4)])
def test_a_failing_callback_costs_no_updates(moment, step, config):
    with pytest.raises(RuntimeError, match="broken callback"):
        train(config, callbacks=[Recorder(moment, step, fails=True)], evaluations=2)
    assert run_dir._state_folders(pathlib.Path(config.output))[0].name == f"{step:08d}"
    if step == 4:
        load(config.output)


@pytest.mark.parametrize(("wrong", "said"), [(print, "function print"), (Recorder, "the class Recorder")])
def test_what_is_not_a_callback_is_refused_before_the_run(wrong, said, config):
    with pytest.raises(ValueError, match=rf"callbacks\[0\] is .*{said}.*, not an instance"):
        train(config, callbacks=[wrong])
    assert not pathlib.Path(config.output).exists()
