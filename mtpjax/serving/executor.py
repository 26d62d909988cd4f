"""Makes the arrays of a tick's calls from requests and page tables, and dispatches the calls through the session.

`measure_costs` uses it to time rounds; the engine chooses its depth from these times.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mtpjax.decoding import session
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import NewRows
from mtpjax.serving.batches import all_allowed, empty_batch, no_chunk, no_targets
from mtpjax.serving.calls import DraftCall, InFlightCall, ScoreCall
from mtpjax.serving.depth import Costs
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.host_pages import HostPages, Outgoing
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.program_set import PendingCall, ProgramKey
from mtpjax.serving.programs import NUM_CLEARED, Programs, draft_call, verify_call
from mtpjax.serving.request import Lease, Request, Sequence
from mtpjax.serving.scoring import score_chunk
from mtpjax.serving.snapshots import NO_ROW

NUM_MEASURED = 5  # timed rounds per batch size and depth
PROMPT_LENGTH = 16  # maximum number of prompt tokens in the rows whose rounds are timed

Grid = list[list[Sequence | None]]  # the rows of each shard; None for padding


class Executor:
    """Dispatches an engine's calls on its `session`, with the compiled `programs`."""

    def __init__(self, session: EngineSession, grammars: Grammars | None = None):
        self.session, self.programs, self._sizes = session, Programs(session, grammars), session.sizes

    def admit(self, sequences: list[Sequence]) -> None:
        """Puts requests into their slots."""
        key, grid, batch = self._prepare("admit", sequences)
        self.session.run(PendingCall(session.admit, (_admitted_rows(grid, sequences[0]), batch.slots), key))

    def prefill(self, prefills: list[tuple[Sequence, int, int]]) -> InFlightCall:
        """Processes a chunk of each row's prompt, between the given positions."""
        chunks = {sequence.id: (start, end) for sequence, start, end in prefills}
        key, grid, batch = self._prepare("prefill", [sequence for sequence, *_ in prefills])
        allowed = all_allowed(self._sizes, batch.slots.shape) if key.kind == "masked prefill" else None
        chunk = no_chunk(self._sizes, batch, allowed)
        for shard, column, sequence in _cells(grid):
            chunk.start[shard, column], end = chunks[sequence.id]
            if chunk.end is not None:
                chunk.end[shard, column] = end
            if sequence.is_resumed:
                chunk.first_token[shard, column] = sequence.text[-1]
            elif allowed is not None and sequence.request.grammar is not None:
                allowed[shard, column] = sequence.request.grammar.first_mask
        return self._call(grid, PendingCall(session.prefill_chunk, (batch, chunk), key), is_prefill=True)

    def score(self, chunk: tuple[Sequence, int, int]) -> ScoreCall:
        """Processes a chunk of a text to score, between the given positions."""
        sequence, begin, end = chunk
        key, grid, batch = self._prepare("score", [sequence])
        start, targets = no_targets(self._sizes, batch)
        assert sequence.scored is not None
        start[sequence.shard, 0] = begin
        targets[sequence.shard, 0, : end - begin] = sequence.scored.tokens[begin + 1 : end + 1]
        scores = self.session.run(PendingCall(score_chunk, (batch, start, targets), key))
        for leaf in jax.tree.leaves(scores):
            leaf.copy_to_host_async()
        return ScoreCall([None if row is None else chunk for row in itertools.chain(*grid)], scores)

    def advance(self, sequences: list[Sequence], depth: int, rounds: int) -> InFlightCall:
        """Runs rounds with `depth` draft levels on rows."""
        key, grid, batch = self._prepare("advance", sequences, depth)
        return self._call(grid, PendingCall(session.advance, (batch, np.int32(rounds)), key))

    def draft(self, sequences: list[Sequence], depth: int) -> DraftCall:
        """Starts a round with `depth` draft levels on rows with a grammar."""
        key, grid, batch = self._prepare("masked round", sequences, depth)
        return DraftCall(list(itertools.chain(*grid)), batch, key, self.session.run(draft_call(batch, key)))

    def verify(self, call: DraftCall, allowed: np.ndarray) -> InFlightCall:
        """Ends a round, given masks `[R, W, ceil(V/32)]` of the tokens that may follow each node."""
        return self._call([call.rows], verify_call(call.batch, call.draft, allowed, call.key))

    def clear_pages(self, shard: int, pages: list[int]) -> None:
        """Zeroes pages of a shard."""
        for begin in range(0, len(pages), NUM_CLEARED):
            self.session.run(self.programs.clearing(shard, pages[begin : begin + NUM_CLEARED]))

    def move_pages(self, pools: list[PagePool]) -> list[tuple[HostPages, Outgoing]]:
        """Starts copying pages out of the pools, then copies returning pages into them. Returns the outgoing copies."""
        leaving = []
        for pool in pools:
            if pool.host is not None and (pool.outgoing or pool.incoming):
                leaving += [(pool.host, each) for each in self.session.move_pages(pool.outgoing, pool.incoming)]
                pool.outgoing, pool.incoming = [], []
        return leaving

    def copy_snapshots(self, rows: list[tuple[Sequence, int]], *, to_state: bool) -> None:
        """Copies the recurrent states of requests to snapshot rows, or back to the requests' slots if `to_state`."""
        shards = [[row for row in rows if row[0].shard == shard] for shard in range(self._sizes.num_shards)]
        for some in itertools.zip_longest(*shards):
            pairs = [(NO_ROW, NO_ROW) if row is None else (row[0].slot, row[1]) for row in some]
            slots, kept = np.array(pairs, np.int32).T
            self.session.copy_snapshots(slots, kept, to_state=to_state)

    def _prepare(self, kind: str, sequences: list[Sequence], depth: int = 0) -> tuple[ProgramKey, Grid, Batch]:
        """Chooses the program for a call, and arranges its rows."""
        sizes, key = self._sizes, self.programs.choose(kind, sequences, depth)
        # 1. The requests of each shard, padded to the program's size.
        grid: Grid = [[] for _ in range(sizes.num_shards)]
        for sequence in sequences:
            grid[sequence.shard].append(sequence)
        grid = [row + [None] * (key.size - len(row)) for row in grid]
        # 2. Their slots and pages. For a call that does not read pages, the table has a width of 1.
        width = key.width or 1
        batch = empty_batch(sizes, key.size, width)
        for shard, column, sequence in _cells(grid):
            assert sequence.lease is not None and sequence.slot is not None
            pages = sequence.lease.pages[: min(sizes.max_pages, width)]
            batch.slots[shard, column] = sequence.slot
            batch.table[shard, column, : len(pages)] = pages
            batch.num_shared[shard, column] = sequence.lease.num_cached
        return key, grid, batch

    def _call(self, grid: Grid, call: PendingCall, *, is_prefill: bool = False) -> InFlightCall:
        """Dispatches a call that has a report."""
        report = self.session.run(call)
        # The next tick reads the report, so copy it as soon as the call ends, not only when it is read.
        report.values.copy_to_host_async()
        return InFlightCall(list(itertools.chain(*grid)), report, is_prefill)


def _cells(grid: Grid) -> Iterator[tuple[int, int, Sequence]]:
    """Yields the shard, column and request of each row that is not padding."""
    for shard, row in enumerate(grid):
        for column, sequence in enumerate(row):
            if sequence is not None:
                yield shard, column, sequence


def _admitted_rows(grid: Grid, padding: Sequence) -> Any:
    """Returns the requests' arrays `[P, r, ...]`. A padding row repeats a request, but its slot does not exist."""
    rows = [[_text_rows(sequence or padding) for sequence in row] for row in grid]
    shards = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *row) for row in rows]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *shards)


def _text_rows(sequence: Sequence) -> NewRows:
    """Returns a request's arrays, with its text at the time of admission."""
    rows, size = sequence.rows, sequence.num_to_prefill
    tokens = np.zeros_like(rows.tokens)
    tokens[0, :size] = sequence.text[:size]
    first_token = sequence.text[-1] if sequence.is_resumed else -1
    return rows.replace(tokens=tokens, length=np.full(1, size, np.int32), first_token=np.full(1, first_token, np.int32))


def measure_costs(executor: Executor) -> Costs:
    """Returns the duration in seconds of a round of the engine's programs, for each batch size and depth.

    All slots must be free; the state is reset afterwards. A deeper round never counts as faster than a shallower one.
    """
    depths = range(executor.session.decoder.spec.num_steps + 1)
    costs = [[_measure(executor, size, depth) for depth in depths] for size in executor.session.sizes.batch_sizes]
    executor.session.reset()
    return tuple(tuple(np.maximum.accumulate(durations).tolist()) for durations in costs)


def _measure(executor: Executor, size: int, depth: int) -> float:
    """Returns the duration of a round with `depth` draft levels on `size` rows per shard, in seconds."""
    sizes, decoder = executor.session.sizes, executor.session.decoder
    # 1. Make rows with a short text and, if the maximum length allows it, room for the timed rounds. Rows may share
    #    pages, because their results are not used.
    num_tokens = min(sizes.max_length, decoder.max_length_of(sizes.shard_pages))
    prompt_length = max(min(PROMPT_LENGTH, decoder.spec.prefill_chunk, num_tokens - depth - 1), 1)
    num_rounds = max(min((num_tokens - prompt_length - 1) // (depth + 1), NUM_MEASURED + 1), 1)
    num_new = min(1 + num_rounds * (depth + 1), num_tokens - prompt_length)
    request = Request(prompt=(0,) * prompt_length, max_new_tokens=max(num_new, 1))
    rows = executor.programs.make_rows(request)
    num_pages = decoder.num_pages_of(int(rows.settings.limit[0]))
    sequences = []
    for shard, slot in itertools.product(range(sizes.num_shards), range(size)):
        sequence = Sequence.new(-1, request, rows, lambda event: None)
        sequence.shard, sequence.slot, sequence.num_to_prefill = shard, slot, prompt_length
        pages = [(slot * num_pages + page) % sizes.shard_pages for page in range(num_pages)]
        sequence.lease = Lease(pages, 0, 0, b"")
        sequences.append(sequence)
    executor.admit(sequences)
    max_rows = sizes.prefill_sizes[-1]
    for begin in range(0, size, max_rows):
        some = [sequence for sequence in sequences if begin <= (sequence.slot or 0) < begin + max_rows]
        executor.prefill([(sequence, 0, prompt_length) for sequence in some]).read()
    # 2. Time the rounds. The first one also prepares the dispatch of later ones, so ignore its time if there are more.
    durations = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        executor.advance(sequences, depth, 1).read()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:] or durations)
