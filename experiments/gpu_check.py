"""What to run first on a GPU, in order, each step in a process of its own with a time limit.

    python -m experiments.gpu_check                      # every step; results/gpu_check/ keeps what is done
    python -m experiments.gpu_check --steps loop 16B     # some steps
    python -m experiments.gpu_check --list
    python -m experiments.gpu_check --quick              # on any machine: shows that the steps start

A step that has a result is not run again, so a call that was cut off continues where it stopped; `--again` runs it
anew. After each step its exit code, time and last lines are in `summary.json`, and the page of predictions is compared
with what was measured. Compiled programs are kept between steps.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from mtpjax.evaluation.roofline import DEVICES, predict_round

FOLDER = pathlib.Path(__file__).parent / "results" / "gpu_check"
# Devices of the predictions, by the first words of what JAX calls them. Other H100s have less bandwidth.
KINDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "AMD Instinct MI300X": "mi300x"}
KEPT_LINES = 40  # of a step's output


@dataclasses.dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: what `--steps` calls it.
        asks: the question that it answers.
        command: arguments; "{python}" is this interpreter and "{output}" the step's JSON file.
        minutes: time limit.
        needs: programs that must be installed, else the step is skipped.
        quick: the command with `--quick`; None: the step needs a GPU.
    """

    name: str
    asks: str
    command: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None


def _bench(*flags: str) -> tuple[str, ...]:
    return ("{python}", "-m", "experiments.bench_gpu", *flags, "--output", "{output}")


def _kernels(op: str) -> tuple[str, ...]:
    return ("{python}", "-m", "experiments.bench_kernels", "--op", op, "--output", "{output}")


_PYTEST = ("{python}", "-m", "pytest", "-n", "0", "-q")
# Tests spend their time compiling on the host, so many share the GPU.
_GPU_TESTS = ("{python}", "-m", "pytest", "-n", "auto", "--maxprocesses=12", "--dist=load", "-q", "-m", "gpu")
_GROUPED = ("{python}", "-m", "experiments.bench_kernels", "--op", "grouped_matmul", "--rounds", "1")
STEPS = (
    Step(
        "kernels",
        "Do the compiled kernels give the reference's numbers?",
        (*_GPU_TESTS, "tests/pallas_kernels"),
        8,
        quick=(*_PYTEST, "tests/pallas_kernels/test_device.py"),
    ),
    Step(
        "loop",
        "Is plain XLA == plain kernels == speculation, twice each?",
        (*_GPU_TESTS, "tests/decoding/test_on_a_gpu.py"),
        8,
    ),
    Step(
        "16B",
        "How near is 16B-A2.4B to the memory's limit, with kernels and without?",
        _bench("--models", "16B-A2.4B"),
        10,
        quick=("{python}", "-m", "experiments.bench_gpu", "--quick", "--output", "{output}"),
    ),
    Step(
        "16B-loop-outside",
        "What does the CUDA graph of the whole call save?",
        _bench("--models", "16B-A2.4B", "--loop-outside"),
        10,
    ),
    Step("1B", "1B beside PyTorch", _bench("--models", "1B"), 8),
    Step("1B-loop-outside", "The same without the graph", _bench("--models", "1B", "--loop-outside"), 8),
    Step(
        "serving",
        "What does the engine gain from MTP at 1 .. 64 requests?",
        ("{python}", "-m", "experiments.bench_engine_gpu", "--output", "{output}"),
        10,
        quick=("{python}", "-m", "experiments.bench_engine_gpu", "--quick", "--output", "{output}"),
    ),
    Step("grouped_matmul", "How fast are the experts' kernels?", _kernels("grouped_matmul"), 9),
    Step("block_scaled_matmul", "How fast are products of few rows?", _kernels("block_scaled_matmul"), 9),
    Step(
        "ncu",
        "What limits the experts' kernels?",
        ("ncu", "--set", "basic", "--kernel-name", "regex:grouped", *_GROUPED),
        6,
        needs=("ncu",),
    ),
    Step("8B", "8B beside PyTorch", _bench("--models", "8B"), 10),
    Step("verify_attention", "How fast is attention over the cache?", _kernels("verify_attention"), 10),
    Step("prefill_attention", "How fast is attention of a prefill chunk?", _kernels("prefill_attention"), 10),
    Step(
        "sanitizer",
        "Does a kernel access memory out of bounds?",
        ("compute-sanitizer", *_PYTEST, "-m", "gpu", "tests/pallas_kernels/test_grouped_matmul.py"),
        10,
        needs=("compute-sanitizer",),
    ),
)


def run_step(step: Step, *, is_quick: bool, folder: pathlib.Path, platform: str = "cuda") -> dict[str, Any]:
    """Runs one step.

    Args:
        step: the step.
        is_quick: run the quick form.
        folder: where its output goes.
        platform: "cuda" or "rocm".

    Returns:
        The result: "skipped" with a reason, or the exit code, the seconds and the last lines of output.
    """
    command = step.quick if is_quick else step.command
    if command is None:
        return {"skipped": "needs a GPU"}
    missing = [program for program in step.needs if shutil.which(program) is None]
    if missing:
        return {"skipped": f"{missing[0]} is not installed"}
    output = folder / f"{step.name}.json"
    filled = [part.replace("{python}", sys.executable).replace("{output}", str(output)) for part in command]
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }
    if not is_quick:
        environment["JAX_PLATFORMS"] = f"{platform},cpu"
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # A session of its own, so that the time limit ends the command's children too.
        child = subprocess.Popen(filled, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(timeout=60 * step.minutes)
        except BaseException as reason:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            code = None
        log.seek(0)
        text = log.read()
    return {
        "command": " ".join(command),
        "exit_code": code,  # None: it ran into the time limit
        "seconds": round(time.monotonic() - begin, 1),
        "last_lines": text.splitlines()[-KEPT_LINES:],
    }


def compare_with_prediction(file: pathlib.Path) -> list[str]:
    """Compares what `bench_gpu` measured with the prediction for the same device.

    Args:
        file: its JSON file.

    Returns:
        A line for each model and implementation; none for an unknown device.
    """
    from experiments.bench_gpu import MODELS

    found = json.loads(file.read_text())
    name = next((name for kind, name in KINDS.items() if found["device"].startswith(kind)), None)
    if name is None:
        return []
    device = DEVICES[name]
    lines = []
    for row in found["models"]:
        for form, seconds in row["seconds"].items():
            if row["model"] not in MODELS or not seconds:
                continue
            predicted = predict_round(
                MODELS[row["model"]], device, batch=1, context=found["context"], num_steps=0
            ).seconds
            measured = sorted(seconds)[len(seconds) // 2]
            lines.append(
                f"{row['model']}, {form}: {1e6 * measured:.0f} us a token, predicted {1e6 * predicted:.0f}:"
                f" {measured / predicted:.2f} times as long"
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], default=None)
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--again", action="store_true", help="run also steps that have a result")
    parser.add_argument("--quick", action="store_true", help="on any machine: show that the steps start")
    parser.add_argument(
        "--platform", choices=("cuda", "rocm"), default="cuda", help="of the GPU (default: %(default)s)"
    )
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER, help="folder of the results")
    options = parser.parse_args(argv)
    if options.list:
        for step in STEPS:
            print(f"{step.name:20} {step.minutes:3.0f} min  {step.asks}")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    # Quick results do not count for the real run.
    summary = options.output / ("quick.json" if options.quick else "summary.json")
    results: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    for step in STEPS:
        if options.steps and step.name not in options.steps:
            continue
        if step.name in results and not options.again and results[step.name].get("exit_code") == 0:
            print(f"{step.name}: has a result of {results[step.name]['date']}")
            continue
        print(f"{step.name}: {step.asks}", flush=True)
        result = run_step(step, is_quick=options.quick, folder=options.output, platform=options.platform)
        results[step.name] = {"date": datetime.date.today().isoformat(), **result}
        # Keep each result before the next step begins.
        summary.write_text(json.dumps(results, indent=1) + "\n")
        if "skipped" in result:
            print(f"  skipped: {result['skipped']}")
            continue
        print(f"  exit code {result['exit_code']} after {result['seconds']} s")
        print("\n".join(f"  {line}" for line in result["last_lines"][-8:]))
        file = options.output / f"{step.name}.json"
        if file.exists() and "bench_gpu" in result["command"]:
            print("\n".join(f"  {line}" for line in compare_with_prediction(file)))
    failed = [name for name, result in results.items() if "skipped" not in result and result["exit_code"] != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
