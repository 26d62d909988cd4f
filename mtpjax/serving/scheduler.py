"""Decides what the engine does next: which requests to admit, which prompts to process, and which rows to decode.

This is host code without arrays. Requests wait in order of arrival. One is admitted when a slot is free and the pool
has pages for its text; it gets further pages as the text grows. When the pool is full, the newest request gives up its
pages and waits again (preemption, as in vLLM). It keeps its text so far, and later continues at the same position.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from mtpjax.serving.matcher import Matcher
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.request import Deliver, Lease, Request, RequestTimes, ScoredText


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in the engine.

    Attributes:
        deliver: receives its deltas and its end.
        text: the prompt and the new tokens that were read from the device.
        limit: maximum tokens of the text.
        rows: the request as arrays, for the executor.
        is_plain: greedy, without sampling options and log-probabilities.
        scored: collects the log-probabilities of a text that is not continued; None for all other requests.
        matcher: follows the text through the request's grammar, up to the end of `text`; None: no grammar.
        times: in `time.monotonic`.
        shard: shard of the mesh's `data` axis that holds its slot and pages.
        slot: its slot in that shard; None while it waits.
        lease: its pages; None while it waits.
        position: next prompt position to process.
        snapshot_stops: prompt positions where a chunk ends, so that the recurrent state there can be kept.
        num_to_prefill: positions to process before it decodes.
        max_length: maximum tokens of its text after the dispatched calls.
        min_length: minimum tokens then, unless it ends.
        num_unread: calls whose report was not read yet.
        is_resumed: it decoded before, so prefill ends with a token that was delivered already.
        has_ended: its end was delivered.
        num_cached: tokens of its prompt that the prefix cache held when it was first admitted.
        num_kept: tokens of its text that `ExpertRebalancer` has kept.
        counts: verification passes since it was last admitted, then per draft level proposed and accepted drafts; empty
            before its first report.
        totals: the same since it arrived.
    """

    id: int
    request: Request
    deliver: Deliver
    text: list[int]
    limit: int
    rows: Any
    is_plain: bool
    matcher: Matcher | None
    times: RequestTimes
    scored: ScoredText | None = None
    shard: int = 0
    slot: int | None = None
    lease: Lease | None = None
    position: int = 0
    snapshot_stops: list[int] = dataclasses.field(default_factory=list)
    num_to_prefill: int = 0
    max_length: int = 0
    min_length: int = 0
    num_unread: int = 0
    is_resumed: bool = False
    has_ended: bool = False
    num_cached: int | None = None
    num_kept: int = 0
    counts: list[int] = dataclasses.field(default_factory=list)
    totals: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_new(self) -> int:
        return len(self.text) - len(self.request.prompt)

    @property
    def is_prefilled(self) -> bool:
        """True if the dispatched calls process its whole prompt."""
        return self.position >= self.num_to_prefill


@dataclasses.dataclass
class Plan:
    """The calls of one tick.

    Attributes:
        admitted: requests that get a slot.
        restored: admitted requests that start with a snapshot, and its row.
        prefills: rows whose next chunk is processed, and the start and end of the chunk.
        saved: rows whose recurrent state is kept when their chunk is processed, and the row of the snapshot.
        advances: by number of draft levels, the rows that decode.
        constrained: the same for rows with a grammar, which take one round.
        num_rounds: rounds of each call of `advances`.
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
        prefill_chunk: tokens of a row per prefill call.
        prefill_rows: rows per prefill call.
        rounds_per_call: maximum rounds per decoding call.
        overlap: positions at the end of a shared prefix that prefill processes again: `Drafter.max_shift`.
        num_pages_of: pages that a text of this length needs.
        max_depth: maximum draft levels of a round.
        depth_of: draft levels for this number of decoding rows.
        shares_prefixes: requests with a common prefix share pages.
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


class Scheduler:
    """Keeps the queue, the slots and the pages, with one pool per shard."""

    def __init__(self, settings: SchedulerSettings, pools: list[PagePool]):
        self.settings, self.pools = settings, pools
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in the order in which they entered
        self._preempted: list[Sequence] = []  # some of their reports are not read yet
        self._free_slots = [list(range(settings.num_slots))[::-1] for _ in pools]
        self.num_preempted = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._preempted)

    def add(self, sequence: Sequence) -> None:
        """Queues a request; a text to score goes first, because its request has already waited."""
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
        while self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
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
        # 4. The others decode. All rows with drafts have the same depth. A row with a grammar waits for the
        #    next tick after its prompt: its masks follow from its first new token.
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
        """Removes a waiting or running request; with `forget`, returns those of its pages that become unknown."""
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
        """Returns the pages for a text of `length` tokens and the tick after it."""
        max_growth = self.settings.rounds_per_call * (self.settings.max_depth + 1)
        return self.settings.num_pages_of(min(length + max_growth, limit))

    def _grow(self, sequence: Sequence) -> None:
        """Adds the pages that the next call may fill; preempts younger rows, or the row itself, if there are none."""
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
        """Requeues preempted requests whose reports were all read, in order of arrival."""
        ready = [sequence for sequence in self._preempted if not sequence.num_unread]
        for sequence in sorted(ready, key=lambda each: each.id, reverse=True):
            self._preempted.remove(sequence)
            self.waiting.appendleft(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a request a slot and pages; False if there are none."""
        # The shard with the most free slots.
        shard = max(range(len(self.pools)), key=lambda shard: len(self._free_slots[shard]))
        if not self._free_slots[shard]:
            return False
        is_resumed = sequence.num_new > 0
        # The newest token of a text is pending: the trunk has not processed it.
        num_to_prefill = len(sequence.text) - is_resumed
        # Without sharing, a preempted request must not find its own pages either: a recurrent state may be lost.
        # Scores need every position.
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
        # The boundaries that later requests are likely to continue from: where this prompt diverges from an earlier
        # text (Marconi, 2411.19379), and the last one of the prompt. Each costs a call for the rest of a chunk, which
        # pays only if a request that continues there needs one chunk less.
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
        """Frees slot and pages. Calls dispatched before still write there, and end before later calls."""
        assert sequence.slot is not None and sequence.lease is not None
        pages = self.pools[sequence.shard].release(sequence.lease, forget=forget)
        self._free_slots[sequence.shard].append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot = sequence.lease = None
        sequence.position = sequence.num_to_prefill = 0
        return pages
