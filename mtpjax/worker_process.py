"""A child process that answers requests one at a time, and is killed if it does not answer in time.

Python cannot stop a thread, so work that may never end or may use all memory runs in such a process.
"""

import collections
import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_READ_BYTES = 1 << 20
_EXIT_SECONDS = 1.0  # a process that has closed its output has this long to exit by itself


class WorkerEnded(Exception):
    """The process did not answer.

    Attributes:
        code: the process's exit code, negative for a signal; None if it was killed at the time limit.
    """

    def __init__(self, code: int | None):
        super().__init__(
            "the process did not answer in time" if code is None else f"the process ended with code {code}"
        )
        self.code = code


class WorkerProcess:
    """Runs a script that answers each line of its input with a line. All methods may be called from any thread.

    The process starts with the first request. If it has ended, the next request starts it again.

    Args:
        script: path of the script. It runs with this interpreter, and cannot import modules from its folder.
    """

    def __init__(self, script: str):
        self._script = script
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0  # pid; a forked process must not share its parent's pipes

    def ask(self, line: Sequence[bytes], seconds: float) -> bytes:
        """Sends a request and returns its answer. Requests from several threads run one at a time.

        Args:
            line: the request without a line end, in parts that are written one by one to avoid a copy.
            seconds: time limit from the start of this request to the end of its answer.

        Raises:
            WorkerEnded: the process did not answer. The next request starts a new process.
        """
        # Allow one request at a time, because answers arrive in the order of the requests.
        with self._lock:
            process = self._start()
            try:
                answer = _exchange(process, [*line, b"\n"], time.monotonic() + seconds)
            except TimeoutError:
                self._stop(kill=True)
                raise WorkerEnded(None) from None
            except BaseException:
                # Ctrl-C here would leave an unread answer, so kill the process.
                self._stop(kill=True)
                raise
            if not answer.endswith(b"\n"):
                raise WorkerEnded(self._stop())
            return answer

    def close(self) -> None:
        """Ends the process. A later request starts a new one."""
        with self._lock:
            if self._owner == os.getpid():
                self._stop()

    def kill(self) -> None:
        """Kills the process at once. A request in progress fails."""
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()

    def _start(self) -> subprocess.Popen:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._stop()
        # Use -P, because modules in the script's folder may have common names and must not shadow other modules.
        command, pipe = [sys.executable, "-P", os.path.abspath(self._script)], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        for stream in (process.stdin, process.stdout):
            os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
        self._process, self._owner = process, os.getpid()
        return process

    def _stop(self, *, kill: bool = False) -> int | None:
        """Ends the process and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        if kill:
            process.kill()
        # A process that has closed its output may still be exiting. Wait, because its exit code gives the reason.
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return code


def _exchange(process: subprocess.Popen, line: Sequence[bytes], end: float) -> bytes:
    """Writes a line in parts, and reads a line, or only its start if the process ends. Raises TimeoutError at `end`."""
    source, target = process.stdout, process.stdin
    assert source is not None and target is not None
    unsent, parts = collections.deque(memoryview(part) for part in line if part), [b""]
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        selector.register(target, selectors.EVENT_WRITE)
        # An answer contains only one line end, which is its last byte.
        while not parts[-1].endswith(b"\n"):
            ready = selector.select(max(end - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if key.fileobj is target:
                    part = unsent.popleft()
                    try:
                        if rest := part[os.write(key.fd, part) :]:
                            unsent.appendleft(rest)
                    except OSError:  # the process has ended; the end of its output shows this too
                        unsent.clear()
                    if not unsent:
                        selector.unregister(target)
                else:
                    parts.append(os.read(key.fd, _READ_BYTES))
                    if not parts[-1]:
                        return b"".join(parts)
    return b"".join(parts)
