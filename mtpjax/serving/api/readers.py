"""Reads request bodies outside the event loop, in a few processes, with limits and fairness between clients.

Parsing, checks, chat templates and tokenizing take time that grows with the size of a body. A thread cannot be stopped,
and it would hold Python's lock during each of these steps, which would block the event loop and the engine. One process
reads only small bodies, so that they never wait for large ones.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import pathlib
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mtpjax.serving.api.errors import ApiError, out_of_memory, server_busy, shutting_down
from mtpjax.serving.api.reading_result import Reading
from mtpjax.serving.api.turns import ReadQueue
from mtpjax.worker_process import WorkerEnded, WorkerProcess

SMALL_BODY_BYTES = 1 << 14
START_SECONDS = 60.0  # time limit for starting a process, including imports and loading a tokenizer
LARGE_NICENESS = 10  # niceness of the processes for large bodies
_SCRIPT = str(pathlib.Path(__file__).with_name("reader_worker.py"))
_MEMORY_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # native code ends this way when memory runs out
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReadLimits:
    """Limits of one body.

    Attributes:
        answer_seconds: time until an answer must arrive; a process that is busy reaches `cpu_seconds` earlier.
        cpu_seconds: CPU time.
        memory: maximum address space of a process, in bytes.
    """

    answer_seconds: float = 40.0
    cpu_seconds: float = 20.0
    memory: int = 2 << 30


class Readers:
    """Reads bodies in other processes, or in threads of this one. All methods are thread-safe.

    Args:
        reader: reads a body as `BodyReader.read` does; must be picklable if there are processes.
        num_workers: number of processes, at least 2; with 0, two threads of this process read the bodies instead.
        limits: limits for one body, in a process.

    Raises:
        ValueError: `num_workers` is negative, or is 1, so that small bodies would wait for large ones.
    """

    def __init__(self, reader: Any, num_workers: int, limits: ReadLimits = ReadLimits()):
        if num_workers < 0 or num_workers == 1:
            raise ValueError(f"num_workers must be 0 or at least 2, got {num_workers}")
        self._lock, self._queue, self._is_closed = threading.Lock(), ReadQueue(), False
        # On a busy machine, the event loop and the engine take precedence over large bodies.
        self._workers: list[Any] = [
            _Process(reader, limits, niceness=LARGE_NICENESS if number else 0) for number in range(num_workers)
        ] or [_Thread(reader), _Thread(reader)]
        self._idle = set(self._workers)
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self._workers), "read")
        # Processes must not outlive their owner.
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def warm(self) -> None:
        """Starts the process for small bodies, without waiting for it."""
        self._threads.submit(self._workers[0].warm)

    async def read(self, kind: str, parts: Sequence[bytes], client: Hashable) -> Reading:
        """Reads a body when it is the client's turn.

        Args:
            kind: kind of the request (a key of `reading.KINDS`).
            parts: the body. They are not joined here, because copying a large body would block the event loop.
            client: the client that sent the request. Clients with many or large requests do not delay other clients.

        Raises:
            ApiError: the body is invalid or exceeds a limit of time or memory, or too many requests wait.
        """
        result: concurrent.futures.Future[Reading] = concurrent.futures.Future()
        item, num_bytes = (lambda worker: worker.read(kind, parts), result), sum(map(len, parts))
        is_small = num_bytes <= SMALL_BODY_BYTES
        with self._lock:
            if self._is_closed:
                raise shutting_down()
            if not self._queue.add(client, num_bytes, item, is_small=is_small):
                raise server_busy()
        self._dispatch()
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            with self._lock:
                self._queue.discard(client, num_bytes, item, is_small=is_small)
            raise

    def close(self) -> None:
        """Ends the processes at once. Waiting requests get 503."""
        with self._lock:
            self._is_closed = True
            waiting = self._queue.clear()
        for _, result in waiting:
            if result.set_running_or_notify_cancel():
                result.set_exception(shutting_down())
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=False)

    def _dispatch(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            # Prefer the worker for small bodies, so that the others are free for large ones.
            for worker in [each for each in self._workers if each in self._idle]:
                taken = self._queue.take(small_only=worker is self._workers[0])
                if taken is not None:
                    self._idle.remove(worker)
                    self._threads.submit(self._run, worker, *taken)

    def _run(self, worker: Any, client: Hashable, item: tuple[Callable, concurrent.futures.Future]) -> None:
        work, result = item
        answer: Reading | BaseException | None = None  # None if the request was cancelled
        if result.set_running_or_notify_cancel():
            try:
                answer = work(worker)
            except BaseException as error:
                answer = error
        # Mark the worker idle before its answer arrives, so that a client that sends bodies in turn needs one worker.
        with self._lock:
            self._queue.finish(client)
            self._idle.add(worker)
        self._dispatch()
        if isinstance(answer, BaseException):
            result.set_exception(answer)
        elif answer is not None:
            result.set_result(answer)


class _Thread:
    """Reads in the calling thread, as a simple reference for `_Process`."""

    def __init__(self, reader: Any):
        self._reader = reader

    def read(self, kind: str, parts: Sequence[bytes]) -> Reading:
        return self._reader.read(kind, b"".join(parts))

    def warm(self) -> None:
        pass

    def close(self) -> None:
        pass

    kill = close


class _Process:
    """Reads in a separate process, one body at a time. Replaces a process that is stopped or ends."""

    def __init__(self, reader: Any, limits: ReadLimits, *, niceness: int):
        self._reader, self._limits, self._niceness = reader, limits, niceness
        self._process, self._is_started, self._is_killed = WorkerProcess(_SCRIPT), False, False

    def warm(self) -> None:
        with contextlib.suppress(WorkerEnded, OSError):
            self._start()

    def read(self, kind: str, parts: Sequence[bytes]) -> Reading:
        try:
            try:
                return self._read(kind, parts)
            except WorkerEnded as ended:
                # These signals come from the limits. Otherwise, something else ended the process, so try again.
                if self._is_killed or (ended.code is not None and -ended.code in (signal.SIGPROF, *_MEMORY_SIGNALS)):
                    raise
                _log.warning("a process that reads requests was replaced: %s", ended)
                return self._read(kind, parts)
        except WorkerEnded as ended:
            raise self._explain(ended) from ended
        except OSError as error:
            _log.warning("a process that reads requests cannot start: %s", error)
            raise server_busy() from error

    def close(self) -> None:
        self._process.close()

    def kill(self) -> None:
        """Ends the process permanently, even while it reads."""
        self._is_killed = True
        self._process.kill()

    def _read(self, kind: str, parts: Sequence[bytes]) -> Reading:
        if not self._is_started:
            self._start()
        answer = self._ask(kind, parts)
        if answer.get("is_new"):  # the process had ended, and was replaced
            self._start()
            answer = self._ask(kind, parts)
        if "error" in answer:
            message, status, param, code, headers = answer["error"]
            raise ApiError(message, status=status, param=param, code=code, headers=headers)
        if "fault" in answer:
            raise RuntimeError(f"a process that reads requests failed:\n{answer['fault']}")
        return Reading.from_json(answer)

    def _ask(self, kind: str, parts: Sequence[bytes], seconds: float | None = None) -> dict[str, Any]:
        seconds = self._limits.answer_seconds if seconds is None else seconds
        if self._is_killed:
            raise WorkerEnded(None)
        try:
            head = b"%s %d\n" % (kind.encode(), sum(map(len, parts)))
            return json.loads(self._process.ask([head, *parts], seconds))
        except WorkerEnded:
            self._is_started = False
            raise

    def _start(self) -> None:
        self._ask("start", [pickle.dumps((self._reader, self._limits, self._niceness))], START_SECONDS)
        self._is_started = True

    def _explain(self, ended: WorkerEnded) -> ApiError:
        if self._is_killed:
            return shutting_down()
        if ended.code == -signal.SIGPROF:
            message = f"the request takes more than {self._limits.cpu_seconds:g} seconds to read: send a shorter one"
            return ApiError(message, code="request_too_slow")
        if ended.code is not None and -ended.code in _MEMORY_SIGNALS:
            return out_of_memory(self._limits.memory)
        return server_busy()


def _close_all(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.kill()
        worker.close()
