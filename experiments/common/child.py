"""Runs an engine in a process that answers one JSON request per line. Contains both ends of the connection."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any


class Child:
    """The parent's handle for an engine's process. `ask` sends a request and waits for the answer."""

    def __init__(self, name: str, *, command: list[str], environment: dict[str, str] | None = None):
        """Starts the process.

        Args:
            name: the name to use in errors.
            command: the program and its arguments.
            environment: its environment variables; None: those of this process.
        """
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the child)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.versions = self._reply()

    @classmethod
    def of_engine(cls, name: str, threads: int, shape: str, folder: pathlib.Path, module: str) -> "Child":
        """Starts the process of an engine. `module` must call `serve`."""
        return cls(name, command=[sys.executable, "-m", module, name, str(threads), shape, str(folder)])

    def ask(self, **request) -> dict:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        self.process.communicate()
        self.log.close()

    def _reply(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended without an answer: {self.log.read().strip()[-2000:]}")
        return json.loads(line)


def version_of(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def serve(make: Callable[[str, int, str, pathlib.Path], Any]) -> None:
    """Runs an engine's process: makes the engine that the command line selects, and answers requests with its `run`.

    Args:
        make: makes the engine from name, threads, shape and folder, which are the command-line arguments.
    """
    name, threads, shape, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    if threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Libraries may print to stdout, so replies go to a copy of it and stdout itself becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make(name, threads, shape, folder)
    print(json.dumps(engine.versions), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), file=replies, flush=True)
