"""Rows reach TensorBoard and Weights & Biases, and no fault there reaches the run."""

import contextlib
import dataclasses
import json
import sys
import time
import types

import pytest

from mtpjax import TrainConfig, train
from mtpjax.training import trackers
from mtpjax.training.log import MetricsLog, trace_window
from mtpjax.training.trackers import flatten, open_trackers, require_trackers
from tests.helpers import training_runs

pytest.importorskip("tensorboardX")
SETTINGS = {"steps": 6, "batch_size": 2, "row_length": 32, "log_every": 2, "num_depths": 1}
ROW = {"step": 4, "seconds": 1.5, "bits": [5.0, 6.0, 7.0]}


def test_every_number_of_a_row_has_a_name():
    panel = {"bits_per_token": [4, 5], "agreement": [0.5, 0.25], "by_category": {"chat": [1.0], "code": {"n": 3}}}
    row = {"eval": {**panel, "note": "text", "nothing": None, "empty": [], "matrix": [[1, 2], [3, 4]], "yes": True}}
    assert flatten(row) == {
        "eval/bits_per_token/main": 4.0,
        "eval/bits_per_token/mtp1": 5.0,
        "eval/agreement/1": 0.5,
        "eval/agreement/2": 0.25,
        "eval/by_category/chat/1": 1.0,
        "eval/by_category/code/n": 3.0,
        "eval/matrix/1/1": 1.0,
        "eval/matrix/1/2": 2.0,
        "eval/matrix/2/1": 3.0,
        "eval/matrix/2/2": 4.0,
        "eval/yes": 1.0,
    }
    assert flatten(ROW)["bits/mtp2"] == 7.0


def read_events(folder):
    """`{tag: {step: value}}` of all files in their order, without what a later one begins again before."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        content = file.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.session_log.status == SessionLog.START:
                for steps in points.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                assert event.step not in points.setdefault(value.tag, {})
                points[value.tag][event.step] = value.simple_value
    return points


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(training_runs.write_corpus(tmp_path_factory.mktemp("text")))


@pytest.mark.slow
def test_a_run_writes_its_rows_for_tensorboard_and_a_trace(text, tmp_path):
    more = {"tensorboard": True, "profile_start": 2, "profile_steps": 2}
    config = TrainConfig(data=text, output=str(tmp_path / "run"), **SETTINGS, **more)
    history = train(config, evaluations=1).history
    points = read_events(tmp_path / "run" / "tensorboard")
    assert points["bits/mtp1"] == pytest.approx({row["step"]: row["bits"][1] for row in history if "bits" in row})
    assert points["eval/agreement/1"] == pytest.approx({6: history[-1]["eval"]["agreement"][0]})
    traces = [file for file in (tmp_path / "run" / "profile").rglob("*.xplane.pb") if file.stat().st_size]
    assert len(traces) == 1


def test_steps_that_are_logged_again_replace_those_before(tmp_path):
    config = TrainConfig(tensorboard=True)
    for last, after in ((6, 0), (8, 4)):  # goes on after step 4
        with open_trackers(tmp_path, after, config, {}) as send:
            for step in range(after + 1, last + 1):
                send({"step": step, "loss": step + after})
    expected = {step: step + (4 if step > 4 else 0) for step in range(1, 9)}
    assert read_events(tmp_path / "tensorboard") == {"loss": expected}


class FakeRun:
    id = "abc"

    def __init__(self, fails=False):
        self.rows, self.fails, self.is_finished = [], fails, False

    def log(self, numbers, *, step):
        if self.fails:
            raise ConnectionError("no network")
        self.rows.append((step, numbers))

    def finish(self):
        self.is_finished = True


def fake_wandb(monkeypatch, run):
    asked = []
    module = types.SimpleNamespace(init=lambda **options: asked.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return asked


def test_wandb_gets_the_rows_and_the_same_run_again(tmp_path, monkeypatch):
    run, config = FakeRun(), TrainConfig(wandb="drafts")
    asked = fake_wandb(monkeypatch, run)
    for _ in range(2):
        with open_trackers(tmp_path, 0, config, {"steps": 3}) as send:
            send(ROW)
    assert [options["id"] for options in asked] == [None, "abc"]
    assert asked[0]["project"] == "drafts" and asked[0]["config"] == {"steps": 3} and asked[0]["resume"] == "allow"
    assert run.rows[0] == (4, {"bits/main": 5.0, "bits/mtp1": 6.0, "bits/mtp2": 7.0})
    assert run.is_finished


def test_a_tracker_that_fails_is_told_once_and_left_out(tmp_path, monkeypatch, caplog):
    """T19: no network, at the start or later; a folder that cannot be written to; a disk that is full."""
    run = FakeRun(fails=True)
    fake_wandb(monkeypatch, run)
    (tmp_path / "tensorboard").write_text("a file, where a folder is wanted")
    config = TrainConfig(tensorboard=True, wandb="drafts")
    with open_trackers(tmp_path, 0, config, {}) as send:
        for _ in range(3):
            send(ROW)
    assert caplog.text.count("is disabled for the rest of this run") == 2
    assert "TensorBoard is disabled for the rest of this run: " in caplog.text
    assert "Weights & Biases is disabled for the rest of this run: ConnectionError: no network" in caplog.text
    caplog.clear()
    (tmp_path / "tensorboard").unlink()
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **options: 1 / 0)
    with open_trackers(tmp_path, 0, config, {}) as send, open("/dev/full", "wb", buffering=0) as full:
        send(ROW)
        monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", lambda self, event: full.write(event))
        for _ in range(30):
            send(ROW)
    assert caplog.text.count("is disabled for the rest of this run") == 2
    assert "ZeroDivisionError" in caplog.text and "No space left" in caplog.text


def test_a_package_that_is_missing_is_told_before_anything_begins(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="wandb is not installed: run pip install wandb, or leave out wandb=drafts"):
        train(TrainConfig(wandb="drafts", output=str(tmp_path / "run")))
    with pytest.raises(ValueError, match=r"tensorboardX is not installed: run pip install -e '\.\[train\]'"):
        require_trackers(TrainConfig(tensorboard=True))
    require_trackers(TrainConfig())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(text, tmp_path, monkeypatch, capsys):
    """T19: an hour back at every look."""
    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    config = TrainConfig(data=text, output=str(tmp_path), tensorboard=True, **SETTINGS, seconds=600.0)
    rows = [row for row in train(config, evaluations=1).history if "bits" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["tokens_per_second"] > 0 and 0 < row["seconds"] < 600 for row in rows)
    assert "left=-" not in capsys.readouterr().err


def test_rows_go_to_a_tracker_as_they_are_written(tmp_path):
    sent = []
    with MetricsLog(tmp_path, step=0, send=sent.append) as log:
        log.record(ROW)
    assert sent == [json.loads((tmp_path / "metrics.jsonl").read_text())]


def test_a_trace_ends_with_the_run(tmp_path, monkeypatch):
    calls = []

    @contextlib.contextmanager
    def fake_trace(folder):
        calls.append("start")
        yield
        calls.append("stop")

    monkeypatch.setattr("jax.profiler.trace", fake_trace)
    for start, steps, stop, expected in ((2, 2, 9, 1), (2, 5, 4, 1), (2, 0, 9, 0), (7, 1, 4, 0)):
        calls.clear()
        with trace_window(tmp_path, start=start, steps=steps) as at:
            for number in range(stop):
                at(number)
        assert calls == ["start", "stop"] * expected


def test_the_settings_are_off_unless_asked_for():
    config = TrainConfig()
    assert not config.tensorboard and config.wandb is None and config.profile_steps == 0
    assert trackers.open_trackers and dataclasses.asdict(config)["mesh"] == ()
