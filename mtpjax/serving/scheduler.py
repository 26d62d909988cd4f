"""Decides what the engine does next: which requests to admit, which prompts to process, and which rows to decode.

This is host code without arrays. Requests wait in order of arrival. A request is admitted when a slot is free and the
pool has pages for its text; it gets further pages as the text grows. When the pool is full, the newest request gives up
its pages and waits again (preemption, as in vLLM). It keeps its text so far, and later continues at the same position.
"""

import collections
import dataclasses
from collections.abc import Callable

from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.request import Sequence


@dataclasses.dataclass
class Plan:
    """The calls of one tick.

    Attributes:
        admitted: requests that get a slot.
        restored: admitted requests that start with a snapshot, each with the snapshot's row.
        prefills: rows whose next chunk is processed, each with the start and end of the chunk.
        saved: rows whose recurrent state is kept when their chunk is processed, each with the snapshot's row.
        advances: the rows that decode, by number of draft levels.
        constrained: the same as `advances`, for rows with a grammar, which decode only one round per call.
        num_rounds: rounds in each call of `advances`.
    """

    admitted: list[Sequence] = dataclasses.field(default_factory=list)
    restored: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    prefills: list[tuple[Sequence, int, int]] = dataclasses.field(default_factory=list)
    saved: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    advances: dict[int, list[Sequence]] = dataclasses.field(default_factory=dict)
    constrained: dict[int, list[Sequence]] = dataclasses.field(default_factory=dict)
    num_rounds: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Sizes for the scheduler.

    Attributes:
        num_slots: rows per shard.
        prefill_chunk: tokens per row in a prefill call.
        prefill_rows: rows per prefill call.
        rounds_per_call: maximum rounds per decoding call.
        overlap: positions at the end of a shared prefix that prefill processes again (`Drafter.max_shift`).
        num_pages_of: returns the number of pages for a text of this length.
        max_depth: maximum draft levels in a round.
        depth_of: returns the draft levels for this number of decoding rows.
        shares_prefixes: whether requests with a common prefix share pages.
    """

    num_slots: int
    prefill_chunk: int
    prefill_rows: int
    rounds_per_call: int
    overlap: int
    num_pages_of: Callable[[int], int]
    max_depth: int
    depth_of: Callable[[int], int]
    shares_prefixes: bool = True


def scheduler_settings(session: EngineSession, depth_of: Callable[[int], int]) -> SchedulerSettings:
    """Returns the settings for an engine with this session."""
    sizes, decoder, settings = session.sizes, session.decoder, session.settings
    is_recurrent = has_recurrent_layers(decoder.model.config)
    return SchedulerSettings(
        num_slots=sizes.shard_slots,
        prefill_chunk=decoder.spec.prefill_chunk,
        prefill_rows=sizes.prefill_sizes[-1],
        rounds_per_call=settings.rounds_per_call,
        overlap=decoder.drafter.max_shift(decoder.model),
        num_pages_of=decoder.num_pages_of,
        max_depth=decoder.spec.num_steps,
        depth_of=depth_of,
        # A recurrent layer keeps only its newest state, which is stored in snapshots, not in pages.
        shares_prefixes=settings.shares_prefixes and (not is_recurrent or sizes.shard_snapshots > 0),
    )


class Scheduler:
    """Manages the queue, the slots and the pages, with one pool per shard.

    Attributes:
        holds_new: admit only requests that have been admitted before.
    """

    def __init__(self, settings: SchedulerSettings, pools: list[PagePool]):
        self.settings = settings
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in the order in which they entered
        self._preempted: list[Sequence] = []  # preempted requests, until all their reports have been read
        self.num_preempted = 0
        self.holds_new = False
        self.restart(pools)

    def restart(self, pools: list[PagePool]) -> list[Sequence]:
        """Frees all slots and replaces the pools after the state was lost. Returns the requests that had slots."""
        lost = [*self.running, *self._preempted]
        for sequence in lost:
            sequence.slot = sequence.lease = None
        self.pools, self.running, self._preempted = pools, [], []
        self._free_slots = [list(range(self.settings.num_slots))[::-1] for _ in pools]
        return lost

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._preempted)

    def status(self) -> dict[str, int]:
        """Returns the fields of `EngineStatus` for the queue, the slots and the pages."""
        return {
            "num_running": len(self.running),
            "num_slots": self.settings.num_slots * len(self.pools),
            "num_pages": sum(pool.num_pages for pool in self.pools),
            "num_used_pages": sum(pool.num_in_use for pool in self.pools),
            "page_size": self.pools[0].page_size,
            "num_preempted": self.num_preempted,
        }

    @property
    def has_started(self) -> bool:
        """True if a request is running, or was preempted."""
        return bool(self.running or self._preempted or any(each.times.started is not None for each in self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Queues a request. A text to score is put first, because its request has already waited."""
        if sequence.scored is None:
            self.waiting.append(sequence)
        else:
            self.waiting.appendleft(sequence)

    def plan(self) -> Plan:
        """Chooses the calls of the next tick. The caller dispatches all of them."""
        plan = Plan()
        # 1. Rows that decode get the pages that this tick may fill, the oldest first.
        for sequence in list(self.running):
            if sequence.is_prefilled and sequence.slot is not None and self._may_go_on(sequence):
                self._grow(sequence)
        # 2. Admit new requests.
        self._requeue_preempted()
        while (sequence := self._next_waiting()) is not None and self._admit(sequence):
            self.waiting.remove(sequence)
            plan.admitted.append(sequence)
            if sequence.lease is not None and sequence.lease.snapshot is not None:
                plan.restored.append((sequence, sequence.lease.snapshot))
        # 3. The oldest prompts get their next chunk. A row whose prompt ends there decodes in this tick.
        num_prefills: collections.Counter[int] = collections.Counter()
        for sequence in self.running:
            if not sequence.is_prefilled and num_prefills[sequence.shard] < self.settings.prefill_rows:
                num_prefills[sequence.shard] += 1
                self._plan_chunk(plan, sequence)
                sequence.num_unread += 1
                if sequence.is_prefilled:
                    sequence.max_length = sequence.min_length = sequence.num_to_prefill + 1
        # 4. The other rows decode. All rows with drafts have the same depth. A row with a grammar starts
        #    decoding one tick after its prompt ends, because its masks depend on its first new token.
        just_prefilled = {sequence.id for sequence, *_ in plan.prefills if sequence.matcher is not None}
        decoding = [
            row for row in self.running if row.is_prefilled and self._may_go_on(row) and row.id not in just_prefilled
        ]
        depth = self.settings.depth_of(len(decoding)) if decoding else 0
        # A request that waits for a slot or for its next chunk should wait for only one round.
        is_awaited = self.num_waiting or any(not row.is_prefilled for row in self.running)
        plan.num_rounds = 1 if is_awaited else self.settings.rounds_per_call
        for sequence in decoding:
            own_depth = depth if sequence.request.speculative else 0
            calls, num_rounds = plan.advances, plan.num_rounds
            if sequence.matcher is not None:
                calls, num_rounds = plan.constrained, 1
            calls.setdefault(own_depth, []).append(sequence)
            sequence.max_length = min(sequence.max_length + num_rounds * (own_depth + 1), sequence.limit)
            sequence.min_length += num_rounds
            sequence.num_unread += 1
        return plan

    def end(self, sequence: Sequence, *, forget: bool = False) -> list[int]:
        """Removes a waiting or running request; returns its freed pages. `forget` is as in `PagePool.release`."""
        sequence.has_ended = True
        pages = []
        if sequence.slot is not None:
            pages = self._vacate(sequence, forget=forget)
        elif sequence in self._preempted:
            self._preempted.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        return pages

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Returns whether the row may have tokens to decode after the dispatched calls."""
        return sequence.scored is None and sequence.min_length < sequence.limit

    def _num_pages(self, length: int, limit: int) -> int:
        """Returns how many pages a text of `length` tokens needs, including its growth during the next tick."""
        max_growth = self.settings.rounds_per_call * (self.settings.max_depth + 1)
        return self.settings.num_pages_of(min(length + max_growth, limit))

    def _grow(self, sequence: Sequence) -> None:
        """Adds the pages that the next call may fill. If there are too few, preempts the newest rows first."""
        assert sequence.lease is not None
        needed = self._num_pages(sequence.max_length, sequence.limit) - len(sequence.lease.pages)
        while needed > 0 and not self.pools[sequence.shard].extend(sequence.lease, needed):
            victim = next(row for row in reversed(self.running) if row.shard == sequence.shard)
            self._vacate(victim)
            self._preempted.append(victim)
            self.num_preempted += 1
            if victim is sequence:
                return

    def _requeue_preempted(self) -> None:
        """Requeues preempted requests whose reports have all been read, in order of arrival."""
        ready = [sequence for sequence in self._preempted if not sequence.num_unread]
        for sequence in sorted(ready, key=lambda each: each.id, reverse=True):
            self._preempted.remove(sequence)
            self.waiting.appendleft(sequence)

    def _next_waiting(self) -> Sequence | None:
        """Returns the request to admit next; None if there is none."""
        allowed = (each for each in self.waiting if each.times.started is not None or not self.holds_new)
        return next(allowed, None)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a request a slot and pages. Returns False if there are not enough."""
        # Choose the shard with the most free slots.
        shard = max(range(len(self.pools)), key=lambda shard: len(self._free_slots[shard]))
        if not self._free_slots[shard]:
            return False
        is_resumed = sequence.num_new > 0
        # The newest token of a resumed text is pending, because the trunk has not processed it.
        num_to_prefill = len(sequence.text) - is_resumed
        # Without sharing, a preempted request must not find even its own pages, because a recurrent state may be lost.
        # Scoring must process every position, so it shares no pages.
        can_share = self.settings.shares_prefixes and sequence.scored is None
        known_text = sequence.text[:num_to_prefill] if can_share else []
        num_pages = self._num_pages(num_to_prefill + 1, sequence.limit)
        lease = self.pools[shard].acquire(known_text, num_pages, salt=sequence.request.salt)
        if lease is None:
            return False
        sequence.shard, sequence.slot, sequence.lease = shard, self._free_slots[shard].pop(), lease
        sequence.is_resumed, sequence.num_to_prefill, sequence.counts = is_resumed, num_to_prefill, []
        sequence.position = min(max(lease.num_cached - self.settings.overlap, 0), num_to_prefill - 1)
        sequence.snapshot_stops = self._snapshot_stops(sequence)
        if sequence.num_cached is None:
            sequence.num_cached = lease.num_cached
        self.running.append(sequence)
        return True

    def _snapshot_stops(self, sequence: Sequence) -> list[int]:
        """Chooses where to keep the recurrent state of a request that was just admitted."""
        pool, lease, position = self.pools[sequence.shard], sequence.lease, sequence.position
        assert lease is not None
        if pool.snapshots is None or sequence.scored is not None:
            return []
        # Keep the boundaries that later requests may well continue from: where this prompt diverges from an earlier
        # text (Marconi, 2411.19379), and the last one of the prompt. Each costs an additional call for the rest of a
        # chunk, which pays off only if a request that continues there saves a whole chunk.
        stops, size = [], pool.page_size
        for num_pages in (lease.num_found, (sequence.num_to_prefill - 1) // size):
            stop = num_pages * size - self.settings.overlap
            if stop - position >= self.settings.prefill_chunk:
                stops.append(stop)
                position = stop
        return stops

    def _plan_chunk(self, plan: Plan, sequence: Sequence) -> None:
        """Plans the next chunk of a prompt, up to the next position whose recurrent state is kept."""
        assert sequence.lease is not None
        start, pool = sequence.position, self.pools[sequence.shard]
        end = min(start + self.settings.prefill_chunk, sequence.num_to_prefill)
        if sequence.snapshot_stops and sequence.snapshot_stops[0] <= end:
            end = sequence.snapshot_stops.pop(0)
            row = pool.reserve_snapshot(sequence.lease, (end + self.settings.overlap) // pool.page_size)
            if row is not None:
                plan.saved.append((sequence, row))
        plan.prefills.append((sequence, start, end))
        sequence.position = end

    def _vacate(self, sequence: Sequence, *, forget: bool = False) -> list[int]:
        """Frees a row's slot and pages. Earlier calls may still write there, but they end before later calls start."""
        assert sequence.slot is not None and sequence.lease is not None
        pages = self.pools[sequence.shard].release(sequence.lease, forget=forget)
        self._free_slots[sequence.shard].append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot = sequence.lease = None
        sequence.position = sequence.num_to_prefill = 0
        return pages
