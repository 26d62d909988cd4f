"""The benchmarks run: their `--quick` forms, each in a process of its own."""

import json
import pathlib
import subprocess
import sys

import pytest

from mtpjax import TrainConfig, train

NAMES = [
    "checkpoints.bench_load",
    "training.bench_train",
    "gpu.bench_gpu",
    "serving.bench_http",
    "serving.bench_disturbance",
    "serving.bench_loop",
    "gpu.trace_host",
]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_quick(name, *arguments):
    """Runs a benchmark's quick form, and returns its exit code and what it printed."""
    command = [sys.executable, "-m", f"experiments.{name}", *arguments, "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return run.returncode, run.stdout.strip(), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs(name):
    code, output, errors = run_quick(name)
    assert code == 0, output[-2000:] + errors[-2000:]
    assert output


@pytest.mark.slow
def test_the_benchmark_of_pytorch_runs(tmp_path):
    pytest.importorskip("torch")
    code, output, errors = run_quick("gpu.bench_torch", "--output", str(tmp_path / "torch.json"))
    assert code == 0, output[-2000:] + errors[-2000:]
    assert json.loads((tmp_path / "torch.json").read_text())["cells"][0]["seconds"][0] > 0


@pytest.mark.slow
def test_the_benchmark_of_the_engine_on_a_gpu_runs_with_its_server():
    code, output, errors = run_quick("gpu.bench_engine_gpu", "--server")
    assert code == 0, output[-2000:] + errors[-2000:]
    assert "4 requests" in output and "run 4 of 4" in output + errors


@pytest.mark.slow
def test_drafters_are_compared_on_a_mesh(tmp_path):
    folder = tmp_path / "model"
    train(TrainConfig(preset="tiny", steps=4, batch_size=2, row_length=64, panel_prompts=0, output=str(folder)))
    arguments = ("--model", str(folder), "--methods", "medusa", "--output", str(tmp_path / "rows.json"))
    code, output, errors = run_quick("training.drafters_on_mesh", *arguments)
    assert code == 0, output[-2000:] + errors[-2000:]
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["largest_relative_difference_of_a_loss"] < 1e-5 and row["difference"]["value"] == 0


@pytest.mark.slow
def test_the_benchmark_of_the_adaptive_depth_runs(tmp_path):
    train(TrainConfig(preset="tiny", steps=4, batch_size=2, row_length=64, panel_prompts=0, output=str(tmp_path)))
    code, output, errors = run_quick("decoding.bench_adaptive", "--model", str(tmp_path))
    assert code == 0, output[-2000:] + errors[-2000:]
    assert output
