"""Delays Ctrl-C until the end of an import or callback, so that it is neither harmful nor lost."""

import os
import signal
import threading
import time
from types import FrameType

RETRY_SECONDS = 0.05  # delay before an interrupt at an unsafe moment is delivered again
MAX_SECONDS = 10.0  # maximum delay of an interrupt


def defer_interrupts() -> None:
    """Defers Ctrl-C until a running import ends.

    An exception in the middle of an import leaves modules half initialized, and extension modules such as NumPy's then
    crash the process. Python discards exceptions raised inside garbage collector callbacks, and JAX registers such a
    callback, so an interrupt there would be lost. A handler that the caller has set, or an ignored signal, stays
    unchanged.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _InterruptHandler())


class _InterruptHandler:
    """Raises `KeyboardInterrupt`, now or after the running import or callback."""

    waiting_since: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.waiting_since = now if self.waiting_since is None else self.waiting_since
        # A program that runs the command while it is itself being imported must still be interruptible.
        if not _is_unsafe(frame) or now - self.waiting_since > MAX_SECONDS:
            self.waiting_since = None
            raise KeyboardInterrupt
        timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def _is_unsafe(frame: FrameType | None) -> bool:
    """Returns whether an import, a finaliser or a callback of the garbage collector is running."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name.endswith(("__del__", "gc_callback")):
            return True
        frame = frame.f_back
    return False
