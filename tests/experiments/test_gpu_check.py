import json
import os
import subprocess
import sys

import pytest

from experiments.gpu import gpu_check
from experiments.gpu.gpu_check import Step


@pytest.fixture
def steps(monkeypatch):
    """Steps that count how often they ran in a file."""

    def script(code):
        return (sys.executable, "-c", f"open('{{output}}', 'a').write('1'); print('done'); raise SystemExit({code})")

    script_that_waits = (sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)")
    made = (
        Step("good", "?", (), 1, quick=script(0)),
        Step("bad", "?", (), 1, quick=script(3)),
        Step("late", "?", (), 0.02, quick=script_that_waits, quick_minutes=0.02),
        Step("gpu", "?", (), 1),
        Step("program", "?", (), 1, needs=("no-such-program",), quick=script(0)),
    )
    monkeypatch.setattr(gpu_check, "STEPS", made)
    monkeypatch.setattr(gpu_check, "FIRST_STEPS", made)


def test_results_are_kept_and_a_later_call_continues(steps, tmp_path, capsys):
    flags = ["--quick", "--output", str(tmp_path)]
    assert gpu_check.main(flags) == 1
    found = json.loads((tmp_path / "quick.json").read_text())
    assert (found["good"]["exit_code"], found["bad"]["exit_code"], found["late"]["exit_code"]) == (0, 3, None)
    assert found["good"]["last_lines"] == ["done"]
    # The output of a step that was cut off is kept too.
    assert (tmp_path / "late.log").read_text() == "1\n"
    assert found["gpu"]["skipped"] == "needs a GPU"
    assert found["program"]["skipped"] == "no-such-program is not installed"
    assert "failed: bad, late" in capsys.readouterr().err
    # What succeeded is not run again, unless it is asked for.
    gpu_check.main([*flags, "--steps", "good", "bad"])
    assert ((tmp_path / "good.json").read_text(), (tmp_path / "bad.json").read_text()) == ("1", "11")
    gpu_check.main([*flags, "--steps", "good", "--again"])
    assert (tmp_path / "good.json").read_text() == "11"


def test_a_step_starts_only_if_its_planned_time_is_left(steps, tmp_path):
    flags = ["--quick", "--output", str(tmp_path), "--steps", "good", "late"]
    assert gpu_check.main([*flags, "--minutes", "0.5"]) == 1
    found = json.loads((tmp_path / "quick.json").read_text())
    assert found["good"]["skipped"] == "not enough time left"
    assert found["late"]["exit_code"] is None and found["late"]["seconds"] < 5


def test_a_quick_step_has_a_limit_of_its_own(steps):
    step = Step("some", "?", (), 1, quick_minutes=15)
    limits = [gpu_check.time_limit(step, None, is_quick=is_quick) for is_quick in (False, True)]
    assert limits == [60, 900]
    # Within a budget: half as long again as planned, or what is left.
    assert [gpu_check.time_limit(step, left, is_quick=False) for left in (59, 70, 999)] == [None, 70, 90]
    assert [gpu_check.time_limit(step, left, is_quick=True) for left in (59, 70, 999)] == [None, 70, 900]


def test_the_gpu_is_left_to_the_steps():
    code = "from experiments.gpu import gpu_check; gpu_check.main(['--list']); import jax; print(jax.default_backend())"
    # JAX fails where it is told to use CUDA and there is none.
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["cpu"], run.stderr


def test_a_step_gets_its_variables(tmp_path):
    command = (sys.executable, "-c", "import os; print(os.environ['XLA_FLAGS'])")
    step = Step("flags", "?", command, 1, quick=command, environment={"XLA_FLAGS": "--some"})
    found = gpu_check.run_step(step, is_quick=True, folder=tmp_path, seconds=20)
    assert (found["last_lines"], found["environment"]) == (["--some"], {"XLA_FLAGS": "--some"})


def test_measured_times_are_compared_with_the_prediction(tmp_path):
    file = tmp_path / "1B.json"
    rows = [{"model": "1B", "seconds": {"xla": [2e-3, 1e-3, 3e-3], "torch": []}}]
    file.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "context": 1856, "models": rows}))
    [line] = gpu_check.compare_with_prediction(file)
    assert line.startswith("1B, xla: 2000 us a token, predicted ") and line.endswith("times as long")
    file.write_text(json.dumps({"device": "NVIDIA H100 PCIe", "context": 1856, "models": rows}))
    assert gpu_check.compare_with_prediction(file) == []


def test_the_list_names_every_step(capsys):
    assert gpu_check.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [s.name for s in gpu_check.STEPS]
