"""The benchmarks run: their `--quick` forms, each in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

from mtpjax import TrainConfig, train

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_quick(name, *arguments):
    """Runs a benchmark's quick form, which must print something."""
    command = [sys.executable, "-m", f"experiments.{name}", *arguments, "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert run.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_load", "bench_train", "bench_trained", "bench_gpu", "bench_disturbance"])
def test_a_benchmark_runs(name):
    run_quick(name)


@pytest.mark.slow
def test_the_benchmark_of_the_adaptive_depth_runs(tmp_path):
    train(TrainConfig(preset="tiny", steps=4, batch_size=2, row_length=64, panel_prompts=0, output=str(tmp_path)))
    run_quick("bench_adaptive", "--model", str(tmp_path))
