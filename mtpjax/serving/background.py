"""Compiles the engine's programs in a thread while requests run."""

import collections
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from mtpjax.serving.program_set import ProgramKey

THREAD_NAME = "mtpjax-compile"
ENGINE_THREAD = "mtpjax-engine"  # compiles in its calls, unless the engine has been warmed up
LINE_SECONDS = 10.0  # time between two log lines
SWITCH_SECONDS = 0.0005  # how long the compiling thread keeps the interpreter lock; Python's default is 5 ms

_log = logging.getLogger(__name__)


class BackgroundCompiler:
    """A thread that compiles programs, starting with those that requests wait for.

    Args:
        keys: programs to compile, in this order; programs passed to `want` are compiled before them.
        compile_program: compiles one program.
        on_end: called after each program with its key, and with its error or None.
    """

    def __init__(
        self,
        keys: Iterable[ProgramKey],
        compile_program: Callable[[ProgramKey], None],
        on_end: Callable[[ProgramKey, Exception | None], None],
    ):
        self._compile, self._on_end = compile_program, on_end
        self._queue: collections.deque[ProgramKey] = collections.deque(keys)
        self._wanted: collections.deque[ProgramKey] = collections.deque()
        self._known: set[ProgramKey] = set()  # started or wanted
        self._changed, self._is_stopped = threading.Condition(), False
        self._num_left = self._num_planned = len(self._queue)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def num_left(self) -> int:
        """Number of programs that are not compiled yet, including the one being compiled."""
        return self._num_left

    def want(self, key: ProgramKey) -> None:
        """Moves a program to the front of the queue, or adds it there."""
        with self._changed:
            if key in self._known:
                return
            self._known.add(key)
            self._wanted.append(key)
            if key in self._queue:
                self._queue.remove(key)
            else:
                self._num_left += 1
                self._num_planned += bool(self._num_planned)
            self._changed.notify()

    def stop(self) -> None:
        """Stops the thread before its next program. A compilation in progress cannot be interrupted and continues."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _next(self) -> ProgramKey | None:
        """Waits for the next program and returns it; returns None after `stop`."""
        with self._changed:
            while not (self._wanted or self._queue or self._is_stopped):
                self._changed.wait()
            if self._is_stopped:
                return None
            key = (self._wanted or self._queue).popleft()
            self._known.add(key)
            return key

    def _run(self) -> None:
        next_line = begin = time.monotonic()
        while (key := self._next()) is not None:
            error: Exception | None = None
            try:
                with _short_turns():
                    self._compile(key)
            # Other programs may still compile. Requests that need this one get the error.
            except Exception as caught:
                error = caught
                _log.error("a program failed to compile: %s", key, exc_info=caught)
            with self._changed:
                self._num_left -= 1
            if self._is_stopped:
                return
            self._on_end(key, error)
            # A server that compiles on demand has no planned programs, so it reports no progress.
            now, num_done = time.monotonic(), self._num_planned - self._num_left
            if self._num_planned and (now >= next_line or not self._num_left):
                next_line = now + LINE_SECONDS
                _log.info("compiling %d/%d while requests run (%.0f s)", num_done, self._num_planned, now - begin)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets other threads take the interpreter lock sooner than usual, because tracing holds it for seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def is_compiling() -> bool:
    """Returns whether a thread of this process may still be compiling. If so, a normal exit could crash."""
    return any(thread.name in (THREAD_NAME, ENGINE_THREAD) for thread in threading.enumerate())
