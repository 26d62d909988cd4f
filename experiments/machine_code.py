"""What the kernels become on an H100 (sm_90) and an MI300X (gfx942): registers, spills, shared memory, instructions.

    python -m experiments.machine_code --python PATH      # an interpreter that has triton; it needs no jax
    python -m experiments.machine_code --op rms_norm --json result.json

No GPU is needed and nothing runs: every case of `experiments/kernel_cases.py` is lowered here and compiled by the
triton wheel (3.9) in a process of its own. XLA brings its own Triton, close to this one but not the same. The exit
status is 1 if a kernel does not compile, spills registers to memory or wants more shared memory than a block can have.
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

from experiments.kernel_cases import cases
from mtpjax import compat

ARCHITECTURES = {"cuda": "sm_90", "rocm": "gfx942"}
MOST_SHARED = {"cuda": 227 * 1024, "rocm": 64 * 1024}
COMPILER = pathlib.Path(__file__).with_name("triton_compiler.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One kernel on one platform; `error` alone says that it did not compile."""

    case: str
    kernel: str
    platform: str
    num_warps: int
    num_stages: int
    error: str | None = None
    registers: int = 0  # of a thread
    spills: int = 0  # bytes stored and loaded on sm_90, vector registers on gfx942
    scalar_spills: int = 0  # gfx942: scalar registers that moved into vector registers, which is no memory
    shared: int = 0  # bytes of a block
    mma: Mapping[str, int] = dataclasses.field(default_factory=dict)  # instruction -> how often it stands in the code
    loads: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Why this kernel must not stay as it is."""
        faults = [self.error] if self.error else []
        if self.spills:
            faults.append(f"spills {self.spills} {'bytes' if self.platform == 'cuda' else 'vector registers'}")
        if self.shared > MOST_SHARED[self.platform]:
            faults.append(f"{self.shared} bytes of shared memory, {MOST_SHARED[self.platform]} at most")
        return faults


def find_python() -> str | None:
    """An interpreter that has triton: what MTPJAX_TRITON_PYTHON names, else this one, else None."""
    here = sys.executable if importlib.util.find_spec("triton") else None
    return os.environ.get("MTPJAX_TRITON_PYTHON") or here


def compile_calls(calls: Iterable[tuple[str, Callable[..., Any], Sequence]], python: str) -> list[Report]:
    """Reports on the kernels in calls (name, function, arguments), each once per platform; shapes do for arguments."""
    reports = []
    for name, function, arguments in calls:
        for platform, lowered in compat.lower_for(function, *arguments).items():
            for kernel in dict.fromkeys(compat.triton_kernels(lowered)):
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
    """Each job's answer, from one process of `command` for as long as it lives: a job that ends it is an error."""
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
            except (BrokenPipeError, json.JSONDecodeError):  # it is gone, perhaps after half a line
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
                answers.append({"error": f"the compiler ended with status {child.wait()}"})
    return answers


def show(reports: Iterable[Report], console: Console) -> None:
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
    parser.add_argument("--python", default=find_python(), help="an interpreter that has triton; default: this one")
    parser.add_argument("--op", help="only this op's cases")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    options = parser.parse_args()
    if options.python is None:
        parser.error("this interpreter has no triton: name one that has, with --python")
    chosen = [case for case in cases() if options.op in (None, case.op)]
    if not chosen:
        parser.error(f"no case of {options.op!r}: the ops are {sorted({case.op for case in cases()})}")
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
