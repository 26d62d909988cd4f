"""The ticks of an engine: each plans calls, dispatches them, and reads the reports of the previous tick's calls.

The device runs the calls of this tick while the host reads those reports. Rows with a grammar draft in these calls;
their verification is dispatched last, with masks that the host computes from the drafts and the text so far.
"""

import concurrent.futures
import logging
import time
from typing import Any

from mtpjax.distributed import is_runtime_error
from mtpjax.errors import LostProcess, printable
from mtpjax.serving.calls import InFlightCall, ScoreCall
from mtpjax.serving.compilation import Compilation
from mtpjax.serving.delivery import Delivery
from mtpjax.serving.executor import Executor
from mtpjax.serving.inbox import Inbox
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.page_pool import make_pools
from mtpjax.serving.scheduler import Scheduler

HELD_SECONDS = 0.5  # interval at which the time limits of requests that wait for a program are checked
RETRY_SECONDS = 1.0  # time between two attempts to rebuild the state

_log = logging.getLogger(__name__)


class Ticks:
    """Runs an engine's ticks, and recovers from a call that failed. All methods are called in the engine's thread.

    Attributes:
        in_flight: dispatched calls whose reports have not been read.
        began: time (`time.monotonic`) at which the running tick began; None while the engine waits.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, delivery: Delivery, compilation: Compilation, inbox: Inbox
    ):
        self._executor, self._scheduler, self._delivery = executor, scheduler, delivery
        self._compilation, self._inbox = compilation, inbox
        self.began: float | None = None
        self.in_flight: list[InFlightCall | ScoreCall] = []
        self._updates: list[tuple[tuple[dict, Any], concurrent.futures.Future[None]]] = []

    def loop(self, followers: Followers | None) -> None:
        """Runs ticks until the inbox is closed and all requests have ended. `followers` are the other processes."""
        held, sequences, inbox = self._compilation.held, self._delivery.sequences, self._inbox
        while True:
            with inbox.changed:
                self.began = None
                # While a request waits for a program, the engine only checks its time limits.
                while not (inbox.actions or self.in_flight or self._updates or len(sequences) > len(held)):
                    if inbox.is_closing and not held:
                        return
                    is_notified = inbox.changed.wait(HELD_SECONDS if held else None)
                    self._delivery.progress_at = time.monotonic()
                    if not is_notified:
                        break
                actions, inbox.actions = inbox.actions, []
                self.began = time.monotonic()
            # An error in one request must never end the thread.
            try:
                for action in actions:
                    action()
                self.run()
            except Exception as error:
                # The other processes may not have failed in the same call, so the states may now differ.
                if followers is not None and (isinstance(error, LostProcess) or is_runtime_error(error)):
                    problem = printable(error, 200)
                    return followers.end_process(f"another process has ended, or a call failed: {problem}")
                self._recover(error)

    def run(self) -> None:
        """Runs one tick."""
        self._delivery.end_late()
        self.apply_update()
        # 1. Dispatch this tick's calls. The device runs them in this order.
        plan, split = self._scheduler.plan(), self._compilation.split
        calls: list[InFlightCall | ScoreCall] = []
        leaving = self._executor.move_pages(self._scheduler.pools)
        for rows in split("admit", plan.admitted):
            self._executor.admit(rows)
        if plan.admitted:
            # Restore snapshots first, because the copies for `plan.saved` below may overwrite their rows.
            self._executor.copy_snapshots(plan.restored, to_state=True)
            self._delivery.count_admitted(plan.admitted)
        prompts = [chunk for chunk in plan.prefills if chunk[0].scored is None]
        if prompts:
            chunks = {sequence.id: chunk for chunk in prompts for sequence in chunk[:1]}
            for rows in split("prefill", [sequence for sequence, *_ in prompts]):
                calls.append(self._executor.prefill([chunks[sequence.id] for sequence in rows]))
            self._executor.copy_snapshots(plan.saved, to_state=False)
        calls += [self._executor.score(chunk) for chunk in plan.prefills if chunk[0].scored is not None]
        drafts = []
        for depth, sequences in plan.constrained.items():
            for rows in split("masked round", sequences, depth):
                drafts.append(self._executor.draft(rows, depth))
        for depth, sequences in plan.advances.items():
            for rows in split("advance", sequences, depth):
                calls.append(self._executor.advance(rows, depth, plan.num_rounds))
        if calls or drafts:
            self._delivery.totals["ticks"] += 1
            if self._delivery.rebalancer is not None:
                self._delivery.rebalancer.tick()
        # 2. Read the reports of the previous tick.
        for call in self.in_flight:
            self._delivery.take(call)
        # 3. The text of rows with a grammar is now known, so their drafts can be masked and verified.
        calls += [self._executor.verify(draft, self._delivery.allowed(draft)) for draft in drafts]
        self.in_flight = calls
        # 4. Wait for the copies of evicted pages, and store them on the host. `move_pages` started these copies before
        # this tick's calls.
        for host, copies in leaving:
            copies.arrive(host)

    def add_update(self, weights: tuple[dict, Any], done: concurrent.futures.Future[None]) -> None:
        """Replaces the parameters once the started requests have ended; until then, no other request starts."""
        self._updates.append((weights, done))
        self._scheduler.holds_new = True

    def remove_update(self, done: concurrent.futures.Future[None]) -> None:
        """Withdraws an update that has not been applied."""
        self._updates = [update for update in self._updates if update[1] is not done]
        self._scheduler.holds_new = bool(self._updates)

    def apply_update(self) -> None:
        """Applies the oldest update unless a started request is left."""
        if not self._updates or self.in_flight or self._scheduler.has_started:
            return
        (params, draft_params), done = self._updates.pop(0)
        # Cached entries and snapshots come from the old parameters.
        for pool in self._scheduler.pools:
            pool.forget()
        self._executor.session.set_params(params, draft_params)
        self._scheduler.holds_new = bool(self._updates)
        done.set_result(None)

    def _recover(self, error: Exception) -> None:
        """Ends the admitted requests, whose state may be lost, and continues with the waiting requests.

        Raises:
            Exception: `error`, if the engine closes before its state could be rebuilt.
        """
        _log.error("a call of the engine failed; ending its requests", exc_info=error)
        # 1. End the requests. Their slots and pages are lost.
        self.in_flight = []
        session = self._executor.session
        for sequence in self._scheduler.restart(make_pools(session.sizes, session.settings)):
            message = f"request {sequence.id} failed: the engine was restarted"
            self._delivery.end(sequence, "error", message, is_retryable=True)
        # 2. Rebuild the state. Memory may become free later; the watchdog ends a server that fails for too long.
        while not self._inbox.is_closing:
            try:
                return session.reset()
            except Exception:
                _log.exception("the engine cannot be restarted; trying again in %.0f s", RETRY_SECONDS)
                time.sleep(RETRY_SECONDS)
        # 3. The thread ends, so nothing else would end the waiting requests.
        self._delivery.fail_all("the engine was closed after a call had failed")
        self._delivery.sequences.clear()
        raise error
