"""Compiles the kernels for an H100 (sm_90) and an MI300X (gfx942) and reports registers, spills and shared memory.

    python -m experiments.kernels.machine_code --python PATH      # an interpreter that has triton; it needs no jax
    python -m experiments.kernels.machine_code --op rms_norm --json result.json

No GPU is needed and nothing runs. This process lowers every case in `experiments/kernels/kernel_cases.py`, and a second
process compiles it with the triton wheel (3.9). XLA contains its own Triton, which is similar but not identical. The
exit code is 1 if a kernel does not compile, spills registers, or needs more shared memory than a block has.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.kernels.kernel_cases import cases
from tests.helpers.lowering import lower_for, triton_kernels

ARCHITECTURES = {"cuda": "sm_90", "rocm": "gfx942"}
MOST_SHARED = {"cuda": 227 * 1024, "rocm": 64 * 1024}
COMPILER = pathlib.Path(__file__).with_name("triton_compiler.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Resources of one kernel on one platform. A kernel that did not compile has only `error`."""

    case: str
    kernel: str
    platform: str
    num_warps: int
    num_stages: int
    error: str | None = None
    registers: int = 0  # per thread
    spills: int = 0  # bytes stored and loaded (sm_90), or vector registers (gfx942)
    scalar_spills: int = 0  # gfx942: scalar registers moved into vector registers, without memory traffic
    shared: int = 0  # bytes per block
    mma: Mapping[str, int] = dataclasses.field(default_factory=dict)  # number of occurrences by instruction
    loads: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """The reasons why this kernel fails the check."""
        faults = [self.error] if self.error else []
        if self.spills:
            faults.append(f"spills {self.spills} {'bytes' if self.platform == 'cuda' else 'vector registers'}")
        if self.shared > MOST_SHARED[self.platform]:
            faults.append(f"{self.shared} bytes of shared memory, {MOST_SHARED[self.platform]} at most")
        return faults


def find_python() -> str | None:
    """Returns an interpreter that has triton: the one in MTPJAX_TRITON_PYTHON, else this one, else None."""
    here = sys.executable if importlib.util.find_spec("triton") else None
    return os.environ.get("MTPJAX_TRITON_PYTHON") or here


def compile_calls(calls: Iterable[tuple[str, Callable[..., Any], Sequence]], python: str) -> list[Report]:
    """Compiles the kernels in some calls, each once per platform.

    Args:
        calls: triples of name, function and arguments; shapes suffice as arguments.
        python: an interpreter that has triton.

    Returns:
        One report per kernel and platform.
    """
    # Collect the kernels of each call by lowering it for each platform.
    reports = []
    for name, function, arguments in calls:
        for platform, lowered in lower_for(function, *arguments).items():
            for kernel in dict.fromkeys(triton_kernels(lowered)):
                reports.append((name, platform, kernel))
    jobs = [{"platform": platform, **dataclasses.asdict(kernel)} for _, platform, kernel in reports]
    answers = run_jobs(jobs, [python, str(COMPILER)])
    return [
        Report(
            case=name,
            kernel=kernel.name,
            platform=platform,
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
            **answer,
        )
        for (name, platform, kernel), answer in zip(reports, answers, strict=True)
    ]


def run_jobs(jobs: Sequence[Mapping], command: Sequence[str]) -> list[dict]:
    """Sends jobs to a process of `command` and returns the answers in order.

    A job that ends the process counts as an error, and a new process takes the next job.
    """
    answers: list[dict] = []
    while len(answers) < len(jobs):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin and child.stdout
            try:
                while len(answers) < len(jobs):
                    if len(answers) % 20 == 0:
                        print(f"{len(answers)}/{len(jobs)} kernels compiled", file=sys.stderr)
                    child.stdin.write(json.dumps(jobs[len(answers)]).encode() + b"\n")
                    child.stdin.flush()
                    answers.append(json.loads(child.stdout.readline()))
            except (BrokenPipeError, json.JSONDecodeError):  # the process ended, perhaps after an incomplete line
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
                answers.append({"error": f"the compiler ended with status {child.wait()}"})
    return answers


def show(reports: Iterable[Report], console: Console) -> None:
    """Prints a table of the reports."""
    table = Table()
    for name in ("case", "kernel", "for", "warps, stages"):
        table.add_column(name)
    for name in ("registers", "spills", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("products", "loads", "faults"):
        table.add_column(name)
    for report in reports:
        scalar = f" ({report.scalar_spills} scalar)" if report.scalar_spills else ""
        table.add_row(
            report.case,
            report.kernel,
            ARCHITECTURES[report.platform],
            f"{report.num_warps}, {report.num_stages}",
            str(report.registers),
            f"{report.spills}{scalar}",
            f"{report.shared / 1024:.1f} KB",
            *("\n".join(f"{count} {kind}" for kind, count in kinds.items()) for kinds in (report.mma, report.loads)),
            "\n".join(report.faults),
            end_section=report.platform == "rocm",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=find_python(), help="interpreter that has triton (default: this one)")
    parser.add_argument("--op", help="compile only the cases of this op")
    parser.add_argument("--json", type=pathlib.Path, help="JSON file to write")
    options = parser.parse_args()
    if options.python is None:
        parser.error("this interpreter has no triton: pass one that has it as --python")
    chosen = [case for case in cases() if options.op in (None, case.op)]
    if not chosen:
        parser.error(f"unknown op {options.op!r}; the ops are {sorted({case.op for case in cases()})}")
    calls = [
        (str(case), functools.partial(case.run, implementation="triton"), jax.eval_shape(case.make, jax.random.key(0)))
        for case in chosen
    ]
    reports = compile_calls(calls, options.python)
    show(reports, Console(width=None if sys.stdout.isatty() else 200))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    sys.exit(any(report.faults for report in reports))


if __name__ == "__main__":
    main()
