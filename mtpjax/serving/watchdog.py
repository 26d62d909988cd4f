"""Ends a server whose device call never returns, so that a supervisor can restart it."""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
EXIT_CODE = 1


class Watchdog:
    """Watches the duration of ticks from a separate thread.

    Args:
        busy_since: returns the time (`time.monotonic`) at which the engine's current tick started; None while it waits.
        timeout: seconds after which `on_timeout` is called, once. After half that time, the stacks of all threads are
            written to stderr.
        on_timeout: called with the tick's duration in seconds; None logs an error and ends the process with code 1.

    Attributes:
        num_slow: ticks that took longer than half the timeout.
    """

    def __init__(
        self, busy_since: Callable[[], float | None], timeout: float, on_timeout: Callable[[float], None] | None = None
    ):
        self._busy_since, self._timeout, self._on_timeout = busy_since, timeout, on_timeout or _exit
        self.num_slow = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mtpjax-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        shown = None  # the tick whose stacks were written
        while not self._stopped.wait(min(self._timeout / 8, 1.0)):
            begin = self._busy_since()
            seconds = 0.0 if begin is None else time.monotonic() - begin
            if seconds > self._timeout / 2 and shown != begin:
                shown = begin
                self.num_slow += 1
                _log.warning("a call of the engine has not returned for %.0f s; stacks of all threads:", seconds)
                with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                    faulthandler.dump_traceback(sys.stderr)
            if seconds > self._timeout:
                self._on_timeout(seconds)
                return


def _exit(seconds: float) -> None:
    _log.error("a call of the engine has not returned for %.0f s (--watchdog-timeout): the server ends", seconds)
    logging.shutdown()
    os._exit(EXIT_CODE)
