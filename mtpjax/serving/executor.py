"""Runs the calls of a tick: turns requests and page tables into arrays, and dispatches calls on the session."""

import itertools
from collections.abc import Iterator

import jax
import numpy as np

from mtpjax.decoding import session
from mtpjax.serving.batches import admitted_rows, all_allowed, cells, make_batch, make_grid, no_chunk, no_targets
from mtpjax.serving.calls import DraftCall, InFlightCall, ScoreCall
from mtpjax.serving.engine_programs import EnginePrograms
from mtpjax.serving.executor import Grid
from mtpjax.serving.program_set import PendingCall
from mtpjax.serving.programs import NUM_CLEARED, draft_call, verify_call
from mtpjax.serving.request import Sequence
from mtpjax.serving.scoring import score_chunk
from mtpjax.serving.snapshots import NO_ROW


class Executor(EnginePrograms):
    """The device's side of the engine, as the engine calls it; see `EngineSession`."""

    def admit(self, sequences: list[Sequence]) -> None:
        """Puts requests into their slots."""
        key = self.choose_program("admit", sequences)
        grid = make_grid(self.sizes, sequences, key.size)
        self._run(
            PendingCall(session.admit, (admitted_rows(grid, sequences[0]), make_batch(self.sizes, grid, 1).slots), key)
        )

    def prefill(self, prefills: list[tuple[Sequence, int, int]]) -> InFlightCall:
        """Processes a chunk of each row's prompt, between the given positions."""
        chunks = {sequence.id: (start, end) for sequence, start, end in prefills}
        key = self.choose_program("prefill", [sequence for sequence, *_ in prefills])
        grid = make_grid(self.sizes, [sequence for sequence, *_ in prefills], key.size)
        batch = make_batch(self.sizes, grid, key.width)
        allowed = all_allowed(self.sizes, batch.slots.shape) if key.kind == "masked prefill" else None
        chunk = no_chunk(self.sizes, batch, allowed)
        for shard, column, sequence in cells(grid):
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
        key = self.choose_program("score", [sequence])
        grid = make_grid(self.sizes, [sequence], key.size)
        batch = make_batch(self.sizes, grid, key.width)
        start, targets = no_targets(self.sizes, batch)
        assert sequence.scored is not None
        start[sequence.shard, 0] = begin
        targets[sequence.shard, 0, : end - begin] = sequence.scored.tokens[begin + 1 : end + 1]
        scores = self._run(PendingCall(score_chunk, (batch, start, targets), key))
        for leaf in jax.tree.leaves(scores):
            leaf.copy_to_host_async()
        return ScoreCall([None if row is None else chunk for row in itertools.chain(*grid)], scores)

    def advance(self, sequences: list[Sequence], depth: int, rounds: int) -> InFlightCall:
        """Runs rounds of `depth` draft levels on rows."""
        key = self.choose_program("advance", sequences, depth)
        grid = make_grid(self.sizes, sequences, key.size)
        return self._call(
            grid, PendingCall(session.advance, (make_batch(self.sizes, grid, key.width), np.int32(rounds)), key)
        )

    def draft(self, sequences: list[Sequence], depth: int) -> DraftCall:
        """Starts a round of `depth` draft levels on rows with a grammar."""
        key = self.choose_program("masked round", sequences, depth)
        grid = make_grid(self.sizes, sequences, key.size)
        batch = make_batch(self.sizes, grid, key.width)
        return DraftCall(list(itertools.chain(*grid)), batch, key, self._run(draft_call(batch, key)))

    def verify(self, call: DraftCall, allowed: np.ndarray) -> InFlightCall:
        """Ends a round, with the tokens `[R, W, ceil(V/32)]` that may follow each node."""
        return self._call([call.rows], verify_call(call, allowed))

    def clear_pages(self, shard: int, pages: list[int]) -> None:
        """Zeroes pages of a shard."""
        for begin in range(0, len(pages), NUM_CLEARED):
            self._run(self._clearing(shard, pages[begin : begin + NUM_CLEARED]))

    def save_snapshots(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copies the recurrent states of requests to rows of the snapshots."""
        for slots, kept in self._of_parts(rows):
            self.copy_snapshots(slots, kept, to_state=False)

    def restore_snapshots(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copies rows of the snapshots to the slots of requests."""
        for slots, kept in self._of_parts(rows):
            self.copy_snapshots(slots, kept, to_state=True)

    def _of_parts(self, rows: list[tuple[Sequence, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields slots and rows of the snapshots, both `[P]` int32: one of each shard."""
        shards = [[row for row in rows if row[0].shard == shard] for shard in range(self.sizes.num_shards)]
        for some in itertools.zip_longest(*shards):
            pairs = [(NO_ROW, NO_ROW) if row is None else (row[0].slot, row[1]) for row in some]
            slots, kept = np.array(pairs, np.int32).T
            yield slots, kept

    def _call(self, grid: Grid, call: PendingCall, *, is_prefill: bool = False) -> InFlightCall:
        """Dispatches a call that has a report."""
        report = self._run(call)
        # The next tick reads it: start the copy as soon as the call ends, not when it is read.
        report.values.copy_to_host_async()
        return InFlightCall(list(itertools.chain(*grid)), report, is_prefill)
