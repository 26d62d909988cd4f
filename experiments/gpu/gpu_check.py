"""Runs steps on a GPU in order of importance, each in its own process with a time limit.

    python -m experiments.gpu.gpu_check                      # the first steps; results/gpu_check/ keeps what is done
    python -m experiments.gpu.gpu_check --minutes 9          # within this time
    python -m experiments.gpu.gpu_check --steps loop 16B     # some steps, also those that are not among the first
    python -m experiments.gpu.gpu_check --list
    python -m experiments.gpu.gpu_check --quick              # on any machine: shows that the steps start

A step that has a result is not run again, so an interrupted call continues where it stopped; `--again` repeats such
steps. After each step, `summary.json` has its exit code and time, the versions and the device. STEP.json has its
figures and STEP.log its output, even if the step was interrupted. The predictions in the docs are compared with the
measurements. Compiled programs, and the kernels that XLA's autotuning chose, are kept between steps.

With `--minutes`, a step starts only if its planned time is left, and it may take 50 % longer than planned. The steps
are in order of importance, so an early step may use up the time of the last ones.

This process does not use the GPU, because JAX would take three quarters of its memory.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from experiments.common import RESULTS
from mtpjax.atomic import write_text
from mtpjax.evaluation.machine import describe_machine
from mtpjax.evaluation.roofline import DEVICES, predict_round

FOLDER = RESULTS / "gpu_check"
# Devices of the predictions, by the start of JAX's name for them. Other H100s have less bandwidth.
KINDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "AMD Instinct MI300X": "mi300x"}
OVERRUN = 1.5  # a step is ended after this multiple of its planned time
KEPT_LINES = 40  # kept from a step's output
BLOCK_SCALE = "0.0031552670417893266"  # gives constructed 1B weights an accept length near 2.24


@dataclasses.dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: its name for `--steps`.
        question: the question that it answers.
        command: arguments; "{python}" is this interpreter and "{output}" the step's JSON file.
        minutes: planned time, and the time limit without `--minutes`.
        needs: programs that must be installed; otherwise the step is skipped.
        quick: the command with `--quick`; None: the step needs a GPU.
        environment: environment variables of the process.
        quick_minutes: time limit with `--quick`. A busy machine needs much more time than an idle one.
    """

    name: str
    question: str
    command: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quick_minutes: float = 15


def _module(name: str, *flags: str) -> tuple[str, ...]:
    return ("{python}", "-m", f"experiments.{name}", *flags, "--output", "{output}")


def _bench(*flags: str) -> tuple[str, ...]:
    return _module("gpu.bench_gpu", *flags)


def _kernels(op: str) -> tuple[str, ...]:
    return _module("kernels.bench_kernels", "--op", op)


_PYTEST = ("{python}", "-m", "pytest", "-n", "0", "-q")
# Tests spend most of their time compiling on the host, so many processes share the GPU.
_GPU_TESTS = ("{python}", "-m", "pytest", "-n", "auto", "--maxprocesses=12", "--dist=load", "-q", "-m", "gpu")
# If pytest-benchmark is installed, it warns about several processes, and warnings are errors.
_GPU_TESTS += ("-p", "no:benchmark")
_GROUPED = ("{python}", "-m", "experiments.kernels.bench_kernels", "--op", "grouped_matmul", "--rounds", "1")
# Cases for every op, and some for each form of the loop.
_SAMPLE = (
    "reference_on_a_gpu and (block_scaled or size1 or size4-bfloat16 or G9 or G16 or shape2 or linear and bfloat16"
    " or gated_delta and 70)"
    " or every_form and (grouped-chain-auto or grouped-tree-triton or latent-chain-triton or sparse-adaptive-auto)"
    " or one_graph and grouped or deterministic and grouped"
)
_PLAIN = ("--only-plain", "--repeats", "3")
_SERVE = ("--block-scale", BLOCK_SCALE, "--no-single", "--turns", "2")
_KEPT_ADDRESSES = {
    "XLA_FLAGS": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "vmm",
}
# The planned times are for 16 cores. XLA's autotuning of matrix products and compiling take most of them.
FIRST_STEPS = (
    Step(
        "sample",
        "Does each op's compiled kernel give the reference's numbers, and the loop the tokens of plain decoding?",
        (
            *_GPU_TESTS, "--maxschedchunk=1", "-k", _SAMPLE,
            "tests/decoding/test_on_a_gpu.py", "tests/pallas_kernels",
        ),
        1.0,
        quick=(*_PYTEST, "tests/pallas_kernels/test_device.py"),
        environment={"XLA_FLAGS": "--xla_gpu_autotune_level=0"},  # XLA's autotuning takes longer than the tests
    ),
    Step(
        "variants",
        "Which variants of the kernels make a layer faster?",
        _module("gpu.kernel_variants"),
        1.8,
        quick=_module("gpu.kernel_variants", "--quick"),
    ),
    Step(
        "ncu-layer",
        "What limits add_rms_norm and the four products?",
        (
            "ncu", "--set", "basic", "--kernel-name", "regex:norm|matmul", "--launch-count", "6",
            "{python}", "-m", "experiments.gpu.kernel_variants", "--only", "once",
        ),
        0.6,
        needs=("ncu",),
    ),
    Step(
        "http",
        "What do a shorter switch interval and httptools gain over HTTP at 64 requests?",
        _module(
            "gpu.bench_engine_gpu", "--counts", "64", "--new-tokens", "256", *_SERVE, "--server",
            "--server-tokens", "256", "--server-turns", "1", "--http", "h11", "httptools",
            "--switch-interval", "5", "0.5",
        ),
        2.0,
        quick=_module(
            "gpu.bench_engine_gpu", "--quick", "--no-single", "--server", "--http", "h11", "--switch-interval", "0.5"
        ),
    ),
    Step(
        "xla-products",
        "How fast are XLA's products of two rows?",
        _module("gpu.kernel_variants", "--only", "xla"),
        0.4,
        quick=_module("gpu.kernel_variants", "--quick", "--only", "xla"),
    ),
    Step(
        "xla-search",
        "Do XLA's products of two rows gain from the larger search of tiles?",
        _module("gpu.kernel_variants", "--only", "xla"),
        1.2,
        quick=_module("gpu.kernel_variants", "--quick", "--only", "xla"),
        # Use a separate folder; otherwise XLA would reuse the autotuning results of other steps.
        environment={
            "XLA_FLAGS": "--xla_gpu_exhaustive_tiling_search=true", "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    ),
    Step(
        "arrivals",
        "What do the calls of 64 arriving requests wait for?",
        _module("gpu.trace_host", "--requests", "64", "--new-tokens", "256"),
        1.2,
        quick=_module("gpu.trace_host", "--quick", "--requests", "4"),
    ),
)  # fmt: skip
MORE_STEPS = (
    Step(
        "plain",
        "How near to the memory's limit is plain decoding, by XLA and by the kernels?",
        _bench("--models", "8B", "1B", *_PLAIN),
        1.4,
        quick=_bench("--quick", *_PLAIN),
    ),
    Step(
        "plain-no-pdl",
        "What does it cost if no kernel starts before the one before it has ended?",
        _bench("--models", "1B", "8B", *_PLAIN),
        1.3,
        quick=_bench("--quick", *_PLAIN),
        environment={"XLA_FLAGS": "--xla_gpu_enable_pdl=false"},
    ),
    Step(
        "torch",
        "How fast is PyTorch?",
        _module("gpu.bench_torch", "--models", "8B", "1B"),
        1.7,
        quick=_module("gpu.bench_torch", "--quick"),
        environment={"JAX_PLATFORMS": "cpu"},  # the step imports JAX, but must not allocate the GPU's memory
    ),
    Step(
        "host",
        "What does the host do in a call?",
        _module("gpu.trace_host"),
        0.8,
        quick=_module("gpu.trace_host", "--quick"),
    ),
    Step(
        "host-kept-addresses",
        "Does XLA update its graphs less with fixed addresses?",
        _module("gpu.trace_host"),
        0.7,
        environment=_KEPT_ADDRESSES,
    ),
    Step(
        "host-updates",
        "Which addresses make XLA update its graphs?",
        _module("gpu.trace_host", "--new-tokens", "24"),
        0.4,
        quick=_module("gpu.trace_host", "--quick"),
        environment={"TF_CPP_VMODULE": "command_buffer_thunk=3", "TF_CPP_MIN_LOG_LEVEL": "0"},
    ),
    Step(
        "rounds-per-call",
        "How many rounds per call hide the host at one request?",
        _module(
            "gpu.bench_engine_gpu",
            "--models",
            "quickstart",
            "SmolLM2",
            "1B",
            "--counts",
            "1",
            "--rounds-per-call",
            "2",
            "4",
            "8",
            "16",
            "--new-tokens",
            "256",
            *_SERVE,
        ),
        1.6,
        quick=_module("gpu.bench_engine_gpu", "--quick", "--no-single"),
    ),
    Step(
        "pages",
        "Does attention over pages in place pay at 64 requests?",
        _module(
            "gpu.bench_engine_gpu",
            "--counts",
            "64",
            "--implementation",
            "auto",
            "verify_attention",
            "--new-tokens",
            "512",
            *_SERVE,
        ),
        1.3,
        quick=_module("gpu.bench_engine_gpu", "--quick", "--no-single"),
    ),
    Step(
        "verify",
        "What does verifying four tokens cost?",
        _bench("--models", "8B", "1B", "--only-parts", "--implementation", "xla", "--repeats", "5"),
        1.2,
        quick=_bench("--quick", "--only-parts"),
    ),
    Step(
        "draft-heads",
        "What does a smaller head for drafts save, at 1 and 64 requests?",
        _module(
            "gpu.bench_engine_gpu",
            "--counts",
            "1",
            "64",
            "--draft-vocabulary",
            "32768",
            "0",
            "--new-tokens",
            "512",
            *_SERVE,
        ),
        2.6,
        quick=_module("gpu.bench_engine_gpu", "--quick", "--no-single", "--draft-vocabulary", "0", "32"),
    ),
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
        quick=_bench("--quick"),
    ),
    Step(
        "16B-loop-outside",
        "What does the CUDA graph of the whole call save?",
        _bench("--models", "16B-A2.4B", "--loop-outside"),
        10,
    ),
    Step("1B-loop-outside", "1B without the graph", _bench("--models", "1B", "--loop-outside"), 8),
    Step(
        "serving",
        "What does the engine gain from MTP at 1 .. 64 requests?",
        _module("gpu.bench_engine_gpu"),
        10,
        quick=_module("gpu.bench_engine_gpu", "--quick"),
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
    Step("verify_attention", "How fast is attention over the cache?", _kernels("verify_attention"), 10),
    Step("prefill_attention", "How fast is attention of a prefill chunk?", _kernels("prefill_attention"), 10),
    Step("range_attention", "How fast is attention in training?", _kernels("range_attention"), 10),
    Step(
        "sanitizer",
        "Does a kernel access memory out of bounds?",
        ("compute-sanitizer", *_PYTEST, "-m", "gpu", "tests/pallas_kernels/test_grouped_matmul.py"),
        10,
        needs=("compute-sanitizer",),
    ),
)
STEPS = (*FIRST_STEPS, *MORE_STEPS)


def run_step(
    step: Step, *, is_quick: bool, folder: pathlib.Path, seconds: float, platform: str = "cuda"
) -> dict[str, Any]:
    """Runs one step.

    Args:
        step: the step.
        is_quick: run the quick form.
        folder: folder for its output.
        seconds: time limit.
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
    output, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
    filled = [part.replace("{python}", sys.executable).replace("{output}", str(output)) for part in command]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    if not is_quick:
        environment["JAX_PLATFORMS"] = f"{platform},cpu"
    environment |= step.environment
    begin = time.monotonic()
    with log.open("w") as written:
        # Start a new session, so that the time limit ends the command's children too.
        child = subprocess.Popen(filled, env=environment, stdout=written, stderr=written, start_new_session=True)
        try:
            code = child.wait(timeout=seconds)
        except BaseException as reason:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            code = None
    return {
        "command": " ".join(command),
        "environment": dict(step.environment),
        "exit_code": code,  # None: it exceeded the time limit
        "seconds": round(time.monotonic() - begin, 1),
        "last_lines": log.read_text(errors="replace").splitlines()[-KEPT_LINES:],
    }


def time_limit(step: Step, seconds_left: float | None, *, is_quick: bool) -> float | None:
    """Returns a step's time limit in seconds; None: too little time is left.

    Args:
        step: the step.
        seconds_left: seconds left of `--minutes`; None: no limit.
        is_quick: run the quick form.
    """
    planned = 60 * step.minutes
    if seconds_left is None:
        return 60 * step.quick_minutes if is_quick else planned
    longest = 60 * step.quick_minutes if is_quick else OVERRUN * planned
    return min(longest, seconds_left) if seconds_left >= planned else None


def describe_device() -> dict[str, Any]:
    """Returns the machine, its GPU and the versions, without allocating the GPU's memory."""
    names = ("jax", "jaxlib", "flax", "torch", "triton")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
    return {
        **describe_machine(),
        "gpu": None if found is None else found.stdout.strip(),
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name) is not None},
    }


def compare_with_prediction(file: pathlib.Path) -> list[str]:
    """Compares the measurements of `bench_gpu` with the predictions for the same device.

    Args:
        file: its JSON file.

    Returns:
        A line for each model and implementation; none for an unknown device.
    """
    from experiments.gpu.bench_gpu import MODELS

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
    jax.config.update("jax_platforms", "cpu")  # predictions only compute shapes; each step chooses its own platform
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], default=None)
    parser.add_argument("--minutes", type=float, default=None, help="time for all steps (default: no limit)")
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--again", action="store_true", help="also run steps that have a result")
    parser.add_argument("--quick", action="store_true", help="check on any machine that the steps start")
    parser.add_argument(
        "--platform", choices=("cuda", "rocm"), default="cuda", help="platform of the GPU (default: %(default)s)"
    )
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER, help="folder of the results")
    options = parser.parse_args(argv)
    if options.list:
        for step in STEPS:
            print(f"{step.name:20} {step.minutes:4.1f} min  {step.question}")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    # Quick results do not count for the real run.
    summary = options.output / ("quick.json" if options.quick else "summary.json")
    results: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    write_text(options.output / "machine.json", json.dumps(describe_device(), indent=1) + "\n")
    begin = time.monotonic()
    for step in [step for step in STEPS if step.name in options.steps] if options.steps else FIRST_STEPS:
        if step.name in results and not options.again and results[step.name].get("exit_code") == 0:
            print(f"{step.name}: has a result of {results[step.name]['date']}")
            continue
        left = None if options.minutes is None else 60 * options.minutes - (time.monotonic() - begin)
        seconds = time_limit(step, left, is_quick=options.quick)
        print(f"{step.name}: {step.question}", flush=True)
        if seconds is None:
            result: dict[str, Any] = {"skipped": "not enough time left"}
        else:
            result = run_step(
                step, is_quick=options.quick, folder=options.output, seconds=seconds, platform=options.platform
            )
        results[step.name] = {"date": datetime.date.today().isoformat(), **result}
        # Write each result before the next step begins.
        write_text(summary, json.dumps(results, indent=1) + "\n")
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
