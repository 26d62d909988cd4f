"""The benchmarks run: their `--quick` forms, each in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_load", "bench_train", "bench_trained", "bench_gpu", "bench_disturbance"])
def test_a_benchmark_runs(name):
    command = [sys.executable, "-m", f"experiments.{name}", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert run.stdout.strip()
