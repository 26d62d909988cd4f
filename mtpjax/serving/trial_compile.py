"""Compiles a grammar in a separate process first, because llguidance has no time limit and threads cannot be stopped.

A JSON schema of 2 kB can take minutes, because the patterns in `allOf` and in `patternProperties` are compared with
each other.
The process runs this file as a script, without the package.
"""

import atexit
import contextlib
import json
import os
import resource
import signal
import sys

MAX_WALL_SECONDS = 60.0  # limit for a process that gets little CPU time or is stopped
MAX_MEMORY = 2 << 30  # bytes of address space (not enforced on macOS, where only the time limits apply)


class TrialCompile:
    """Compiles grammars under limits, and discards the results. May be called from any thread."""

    def __init__(self):
        self._workers: list = []
        self._idle: list = []

    def __call__(self, grammar: str, limits: dict[str, int], seconds: float) -> None:
        """Compiles a grammar. Errors in it are reported only when the caller compiles it again.

        Args:
            grammar: from `llguidance.LLMatcher.grammar_from_json_schema` or `grammar_from_regex`.
            limits: arguments of `llguidance.LLParserLimits`.
            seconds: CPU time limit.

        Raises:
            WorkerEnded: the compilation exceeds a limit. The code is -SIGPROF for the CPU time limit, and None for the
                wall-clock limit.
        """
        from mtpjax.worker_process import WorkerProcess

        try:
            worker = self._idle.pop()
        except IndexError:
            worker = WorkerProcess(__file__)
            self._workers.append(worker)
        try:
            request = {"grammar": grammar, "limits": limits, "seconds": seconds}
            worker.ask([json.dumps(request).encode()], MAX_WALL_SECONDS)
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """Ends the processes. Later grammars start new ones."""
        for worker in self._workers:
            worker.close()

    def kill(self) -> None:
        """Ends the processes at once, even if one is compiling a grammar, which then fails."""
        for worker in self._workers:
            worker.kill()


def _serve() -> None:
    """Reads a grammar and its limits from each line of standard input, and answers each with a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import llguidance

    with contextlib.suppress(ValueError, OSError):  # the platform lacks this limit, or a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limits = llguidance.LLParserLimits(**request["limits"])
        # Without a handler, the signal ends the process, even during a long computation.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        llguidance.LLMatcher.validate_grammar(request["grammar"], limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(sys.stdout.fileno(), b"{}\n")


if __name__ == "__main__":
    _serve()
else:
    TRIAL_COMPILE = TrialCompile()
    atexit.register(TRIAL_COMPILE.close)
