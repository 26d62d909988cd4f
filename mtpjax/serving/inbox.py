"""The inbox of an engine's thread, which contains functions for it to run between ticks."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from mtpjax.serving.request import EngineClosed

ASK_SECONDS = 1.0  # time after which a caller checks whether the engine's thread is still alive
T = TypeVar("T")


class Inbox:
    """Functions for a thread to run, in order of arrival.

    Attributes:
        changed: guards all attributes; notified when one changes.
        actions: the functions.
        is_closing: true once the thread is about to end.
    """

    def __init__(self, thread: threading.Thread):
        self._thread, self.changed = thread, threading.Condition()
        self.actions: list[Callable[[], None]] = []
        self.is_closing = False

    def close(self) -> None:
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def post(self, action: Callable[[], None]) -> None:
        """Adds a function. Raises `EngineClosed` if the thread has ended."""
        with self.changed:
            if self.is_closing and not self._thread.is_alive():
                raise EngineClosed("the engine is shutting down")
            self.actions.append(action)
            self.changed.notify()

    def require_started(self) -> None:
        """Raises `RuntimeError` if the thread was never started: its answer would never come."""
        if self._thread.ident is None:
            raise RuntimeError("the engine has not been started: call start(), or use it in a with statement")

    def ask(self, compute: Callable[[], T]) -> T:
        """Runs a function in the thread, and waits for its result. Raises `EngineClosed` if the thread has ended."""
        self.require_started()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(compute())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        return self.wait(future)

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Waits for a result from the thread. Raises `EngineClosed` if the thread has ended."""
        while True:
            try:
                return future.result(ASK_SECONDS)
            except TimeoutError:
                if future.done():  # the function's own error
                    raise
                if not self._thread.is_alive():
                    raise EngineClosed("the engine is shutting down") from None
