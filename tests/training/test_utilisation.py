"""The speed, utilisation and waiting time that a run logs."""

import itertools
from typing import Any

import numpy as np
import pytest

from mtpjax import TrainConfig
from mtpjax.data import packing
from mtpjax.evaluation.roofline import DEVICES, find_device
from mtpjax.evaluation.update_flops import Trained, total_flops, update_flops
from mtpjax.models.flops import RowCounts
from mtpjax.training import log, utilisation
from mtpjax.training.log import MetricsLog, UpdateWork, read_metrics
from mtpjax.training.run import Run
from tests.helpers import training_runs

NARROW = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "head_dim": 8}
ROW = {"step": 2, "seconds": 1.0, "bits": [1.0, 2.0]}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    text = training_runs.write_corpus(tmp_path_factory.mktemp("text"))
    output = tmp_path_factory.mktemp("run")
    settings: dict[str, Any] = {**training_runs.SETTINGS, "steps": 3, "model": {**NARROW, "num_key_value_heads": 1}}
    return TrainConfig(data=str(text), output=str(output), **settings)


def test_a_run_logs_its_speed_and_utilisation(config, monkeypatch, capsys):
    monkeypatch.setattr(utilisation, "find_device", lambda kind: DEVICES["h100"])
    run = Run(config, evaluations=1)
    with run.open(resume=False, overwrite=True, allowed_changes=()):
        run.update_until_done()
    rows = read_metrics(run.output / "metrics.jsonl")
    assert run.work.flops is not None
    assert [row["step"] for row in rows] == [1, 2, 3] and run.work.tokens == 2 * 32
    for row in rows:
        assert row["model_flops_per_second"] / row["tokens_per_second"] == pytest.approx(run.work.flops / (2 * 32))
        # float32 products run as TF32, at half of the rate of bfloat16.
        assert row["mfu"] == pytest.approx(row["model_flops_per_second"] / (989e12 / 2))
        assert 0 < row["data_wait"] < 1
    assert " tokens/s=" in (shown := capsys.readouterr().err) and " mfu=0.0% data_wait=" in shown


def test_flops_are_the_mean_over_the_rows(config):
    run = Run(config, evaluations=1)
    (rows,) = run.corpus.source_rows
    batches = list(itertools.islice(packing.shuffled_batches(rows, 1, seed=0), len(rows.tokens)))
    each = []
    for batch in batches:
        counts = RowCounts.of_segments(batch.segment_ids)
        parts = update_flops(run.model.config, run.state.params, counts, Trained("all", 1))
        assert parts is not None
        each.append(total_flops(parts))
    assert len(set(each)) > 1
    assert run.work.flops == pytest.approx(2 * np.mean(each))
    assert run.work.peak_flops is None  # a CPU


def test_waiting_is_a_share_of_the_time_since_the_last_row(monkeypatch, tmp_path):
    now = iter([0.0, 1.0, 1.5, 4.0, 4.0, 5.0, 5.0])
    monkeypatch.setattr(log, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: next(now))}))
    with MetricsLog(tmp_path, step=0) as metrics:
        metrics.show = None
        with metrics.waiting_for_data():
            pass
        metrics.record_step(ROW, work=UpdateWork(8, 100.0, 1e3), progress=0.5)
        metrics.record_step({**ROW, "step": 3}, work=UpdateWork(8, None, 1e3), progress=0.5)
    first, second = metrics.history
    assert first["tokens_per_second"] == 2 * 8 / 4 and first["model_flops_per_second"] == 50.0
    assert first["mfu"] == 0.05 and first["data_wait"] == 0.5 / 4
    assert second["data_wait"] == 0.0 and second["mfu"] is None and second["model_flops_per_second"] is None


def test_devices_are_found_by_their_names():
    assert find_device("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert find_device("NVIDIA H200") is DEVICES["h200"]
    assert find_device("AMD Instinct MI300X") is DEVICES["mi300x"]
    for other in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB"):
        assert find_device(other) is None
    assert DEVICES["h100"].peak_flops("bfloat16") == 989e12
