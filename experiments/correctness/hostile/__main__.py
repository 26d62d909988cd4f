"""Attacks mtpjax with hostile and malformed input generated from a seed, and reports wrong answers.

    python -m experiments.correctness.hostile [--cases 300] [--kinds config header command] [--output FILE]

Each case changes one thing in a valid request: a value in a configuration, a safetensors header, a tokenizer file or
chat template, a record, a command line, or a Python argument. Full-disk cases run in a small tmpfs, if one can be
mounted. Signals arrive at random moments of a conversion and a short training run.

A case passes if it succeeds, or fails with one printable line and a documented exit code. It must take at most 20 s (60
s for training, loading and signals), not counting the time during which other programs used the core, and at most 256
MB of additional memory (512 MB for training, which compiles). It must change nothing outside its output folder, and
after full disks and signals, all earlier files must still be complete. Cases of the kinds "rewritten", "rendered" and
"streamed" have a known answer; a different answer without an error fails. A seed always gives the same cases.
"""

import argparse
import collections
import multiprocessing
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from rich.console import Console

from experiments.common.results import write
from experiments.correctness.hostile import cases as hostile_cases
from experiments.correctness.hostile import cpu_time, worker

LIMIT_SECONDS, LIMIT_BYTES = 20, 256 << 20
SLOW_LIMIT_SECONDS, SLOW_LIMIT_BYTES = 60, 512 << 20  # for cases that train or start processes


class Attacker:
    """Runs cases in a child process, which is replaced when it hangs or dies.

    Args:
        sandbox: the folder that all cases share, from `hostile_cases.make_sandbox`.
    """

    def __init__(self, sandbox: pathlib.Path):
        self._sandbox = sandbox
        self._process: Any = None  # a process from multiprocessing's "spawn" context
        self._pipe: Any = None

    def run(self, case: dict[str, Any]) -> str | None:
        """Runs a case.

        Args:
            case: as `hostile_cases.draw` makes it.

        Returns:
            None if the answer was right, and otherwise a description of the problem.
        """
        limit = SLOW_LIMIT_SECONDS if case.get("is_slow") else LIMIT_SECONDS
        before = worker.fingerprint(self._sandbox, without=hostile_cases.OUTPUT)
        try:
            self._start()
            self._pipe.send(case)
            # Wait twice as long, because the process checks its own time more exactly.
            watch = cpu_time.Stopwatch(self._process.pid)
            while not self._pipe.poll(1):
                if watch.seconds() > 2 * limit:
                    self.close()
                    return f"hangs: no answer within {2 * limit} s"
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            return "the process died"
        changed = worker.fingerprint(self._sandbox, without=hostile_cases.OUTPUT) != before
        return self._judge(answer, limit, changed)

    def _judge(self, answer: dict[str, Any], limit: float, changed: bool) -> str | None:
        if answer["problem"]:
            return answer["problem"]
        if changed:
            return "a file outside of the output folder was changed"
        if answer["seconds"] > limit:
            return f"took {answer['seconds']:.0f} s; the limit is {limit} s"
        limit_bytes = SLOW_LIMIT_BYTES if limit == SLOW_LIMIT_SECONDS else LIMIT_BYTES
        if answer["bytes"] > limit_bytes:
            return f"took {answer['bytes'] >> 20} MB more memory; the limit is {limit_bytes >> 20} MB"
        return None

    def _start(self) -> None:
        """Starts the process if it is not running, and waits until it has imported what the cases use."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(other, str(self._sandbox)), daemon=True)
        self._process.start()
        other.close()  # so that the pipe closes when the process ends
        self._pipe.recv()

    def close(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default: 0)")
    parser.add_argument("--cases", type=int, default=300, help="number of cases (default: 300)")
    parser.add_argument("--kinds", nargs="+", default=list(hostile_cases.KINDS), choices=list(hostile_cases.KINDS))
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write, with every case that failed")
    options = parser.parse_args()
    console, rng = Console(), random.Random(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    failed: list[dict[str, Any]] = []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        sandbox = hostile_cases.make_sandbox(pathlib.Path(scratch))
        attacker = Attacker(sandbox)
        for number in range(options.cases):
            kind = options.kinds[number % len(options.kinds)]
            case = hostile_cases.draw(kind, rng, sandbox)
            problem = attacker.run(case)
            counts[kind] += 1
            if problem is not None:
                failed.append({"number": number, "problem": problem, **case})
                console.print(f"case {number}, {case['what']}: {problem}", markup=False, highlight=False)
        attacker.close()
    seconds = time.perf_counter() - begin
    console.print(f"{options.cases} cases ({dict(counts)}), {len(failed)} answered wrongly, {seconds:.0f} s")
    if options.output is not None:
        write(options.output, failed)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
