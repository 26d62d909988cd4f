"""The process that reads the bodies of requests, run as a script by `readers`. It does not import JAX."""

import contextlib
import json
import os
import pathlib
import pickle
import resource
import signal
import sys
import traceback
from typing import Any


def main() -> None:
    """Answers requests, a line of JSON each, from standard input until it ends."""
    # Ctrl-C reaches every process of the terminal; the server decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever else writes to standard output must not be taken for an answer.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # This package, and not another that may be installed.
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))
    # Import before the limits, so that a low limit cannot fail here.
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    from mtpjax.data.template_worker import WORKER
    from mtpjax.serving.api import reading  # noqa: F401, for `pickle`
    from mtpjax.serving.api.readers import MAX_CPU_SECONDS, MAX_MEMORY

    WORKER.render_here()
    with contextlib.suppress(ValueError, OSError):  # a platform without this limit, or a lower one is in force
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader, source = None, sys.stdin.buffer
    while head := source.readline():
        kind, size = head.split()
        raw = source.read(int(size))
        source.readline()
        # Without a handler the signal ends the process, also inside one long computation.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        if kind == b"start":
            (reader, niceness), answer = pickle.loads(raw), {}
            os.nice(niceness)
        else:
            answer = {"is_new": True} if reader is None else _read(reader, kind.decode(), raw)
        line = memoryview(json.dumps(answer).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        while line:
            line = line[os.write(answers, line) :]
        del raw, answer, line
        if _has_grown(MAX_MEMORY // 2):
            return  # Python rarely gives memory back


def _read(reader: Any, kind: str, raw: bytes) -> dict[str, Any]:
    from mtpjax.serving.api.readers import out_of_memory, to_answer

    try:
        return to_answer(lambda: reader.read(kind, raw))
    except MemoryError:
        error = out_of_memory()
        return {"error": [str(error), error.status, error.param, error.code, error.headers]}
    except Exception:
        return {"fault": traceback.format_exc()}


def _has_grown(num_bytes: int) -> bool:
    """Returns whether the process ever had more memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > num_bytes


if __name__ == "__main__":
    main()
