"""The process that reads request bodies. `readers` runs it as a script, and it does not import JAX."""

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
    """Reads a line with kind and size, and then a body, for each request on stdin. Answers each with a line of JSON."""
    # Ctrl-C reaches every process of the terminal, but the server decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Other output must not be mistaken for an answer.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Import this package, not an installed one.
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))
    # Import before the limits are set, so that a low limit cannot make an import fail.
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    from mtpjax.data.template_worker import WORKER

    WORKER.render_here()
    reader: Any = None
    limits: Any = None  # ReadLimits, once there is a reader
    source = sys.stdin.buffer
    while head := source.readline():
        kind, size = head.split()
        raw = source.read(int(size))
        source.readline()
        if kind == b"start":
            # Unpickle before memory is limited, because unpickling imports the reader's modules.
            (reader, limits, niceness), answer = pickle.loads(raw), {}
            os.nice(niceness)
            _limit_memory(limits.memory)
        elif limits is None:
            answer = {"is_new": True}
        else:
            # Without a handler, the signal ends the process, even during a long computation.
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
            answer = _read(reader, kind.decode(), raw, limits.memory)
        line = memoryview(json.dumps(answer).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        while line:
            line = line[os.write(answers, line) :]
        del raw, answer, line
        if limits is not None and _memory_in_use() > limits.memory // 2:
            return  # Python rarely returns memory to the system


def _limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the platform lacks this limit, or a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(reader: Any, kind: str, raw: bytes, memory: int) -> dict[str, Any]:
    from mtpjax.serving.api.errors import ApiError, out_of_memory

    try:
        return reader.read(kind, raw).to_json()
    except MemoryError:
        error = out_of_memory(memory)
    except ApiError as rejection:
        error = rejection
    except Exception:
        return {"fault": traceback.format_exc()}
    return {"error": [str(error), error.status, error.param, error.code, error.headers]}


def _memory_in_use() -> int:
    """Returns the resident memory of this process in bytes, or its peak if there is no /proc."""
    with contextlib.suppress(OSError):
        # Do not use `ru_maxrss` on Linux, because children inherit the peak of a large parent.
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
