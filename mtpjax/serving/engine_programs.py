"""The programs of an engine: what requests and calls need, and their compilation."""

import collections
import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import jax
import numpy as np

from mtpjax import compat
from mtpjax.decoding import gpu_graph, session
from mtpjax.decoding.sampling_params import temperatures
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import NewRows
from mtpjax.inference.requests import check_request, make_new_rows
from mtpjax.models.pages import NO_PAGE
from mtpjax.serving import host_pages
from mtpjax.serving.batches import all_allowed, empty_batch, no_chunk, no_targets
from mtpjax.serving.calls import DraftCall
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.program_set import PendingCall, ProgramKey, all_programs, first_programs
from mtpjax.serving.request import Request, Sequence
from mtpjax.serving.scoring import score_chunk
from mtpjax.serving.sizes import bucket
from mtpjax.serving.snapshots import NO_ROW

NUM_CLEARED = 64  # pages per call that clears pages


class EnginePrograms(EngineSession):
    """An engine's session that checks requests, chooses the programs of calls, and compiles them."""

    def make_rows(self, request: Request) -> NewRows:
        """Checks a request and converts it to arrays `[1, ...]` on the host; callable from any thread.

        Raises:
            ValueError: for a prompt or an option out of range, in one line.
        """
        config = dataclasses.replace(
            self.config,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            stop_sequences=request.stop_sequences,
            max_length=self.sizes.max_length,
        )
        if self.decoder.spec.is_greedy and temperatures(request.sampling, 1).any():
            raise ValueError(
                f"acceptance 'greedy' supports only temperature 0, got {request.sampling.temperature}; "
                "start the engine with 'auto' or an exact sampling rule"
            )
        self._check_grammar(request)
        prompt = np.asarray(request.prompt)
        limit = check_request([prompt], self.model, config, self.decoder.drafter)
        rows = make_new_rows(
            [prompt.astype(np.int32)],
            model=self.model,
            config=config,
            limit=limit,
            capacity=self.sizes.capacity,
            sampling=request.sampling,
            shape=self.shape,
        )
        if self.decoder.num_pages_of(int(rows.settings.limit[0])) > self.sizes.shard_pages:
            raise ValueError(
                f"a text of {int(rows.settings.limit[0])} tokens does not fit in the pool, which has "
                f"{self.sizes.shard_pages} pages of {self.settings.page_size} tokens"
            )
        return rows.replace(first_token=np.full(1, -1, np.int32))

    def _check_grammar(self, request: Request) -> None:
        """Checks that masks alone determine the possible tokens of a text, and that a complete text ends."""
        if request.grammar is None:
            return
        grammars, sampling = self.settings.grammars, request.sampling
        if grammars is None:
            raise ValueError("the engine was started without grammars")
        if not self.decoder.spec.rule.is_exact:
            raise ValueError(f"acceptance '{self.decoder.spec.rule}' may accept tokens that the grammar forbids")
        if not set(grammars.eos_token_ids) <= set(request.stop_token_ids):
            raise ValueError("a text with a grammar ends with the end token, which cannot be ignored")
        if sampling.min_new_tokens or sampling.allowed_tokens is not None or sampling.banned_tokens is not None:
            raise ValueError("a grammar excludes min_new_tokens, allowed_tokens and banned_tokens")

    def choose_program(self, kind: str, sequences: Rows[Sequence], depth: int = 0) -> ProgramKey:
        """Chooses the program of a call on these rows; see `ProgramSet.choose`. "prefill" may be "masked prefill"."""
        sizes, width = self.sizes, 0
        is_masked = kind == "masked round" or any(sequence.request.grammar is not None for sequence in sequences)
        if kind == "prefill" and is_masked:
            kind = "masked prefill"
        if kind != "admit":
            widest = max(len(sequence.lease.pages) for sequence in sequences if sequence.lease is not None)
            # Rows with a grammar have programs for the widest table only.
            widths = sizes.table_widths[-1:] if kind.startswith("masked") else sizes.table_widths
            width = bucket(min(widest, sizes.max_pages), widths)
        is_plain = kind == "advance" and self.has_plain and all(sequence.is_plain for sequence in sequences)
        num_rows = max(collections.Counter(sequence.shard for sequence in sequences).values())
        # Texts are scored one by one.
        choices = (1,) if kind == "score" else sizes.prefill_sizes if kind.endswith("prefill") else sizes.batch_sizes
        size = bucket(num_rows, choices)
        return self.programs.choose(ProgramKey(kind, size, width, is_plain, depth))

    def needed_programs(self, sequence: Sequence) -> list[ProgramKey]:
        """Returns the programs with which a request of any length can run alone."""
        sizes = self.sizes
        depth = self.sizes.depths[0] if sequence.request.speculative else 0
        width = bucket(min(self.decoder.num_pages_of(sequence.limit), sizes.max_pages), sizes.table_widths)
        admission, prefill = ProgramKey("admit", sizes.batch_sizes[0]), sizes.prefill_sizes[0]
        if sequence.scored is not None:
            return [admission, ProgramKey("score", 1, width)]
        if sequence.request.grammar is not None:
            width = sizes.table_widths[-1]
            rounds = ProgramKey("masked round", sizes.batch_sizes[0], width, False, depth)
            return [admission, ProgramKey("masked prefill", prefill, width), rounds]
        is_plain = self.has_plain and sequence.is_plain
        rounds = ProgramKey("advance", sizes.batch_sizes[0], width, is_plain, depth)
        return [admission, ProgramKey("prefill", prefill, width), rounds]

    def first_programs(self) -> list[ProgramKey]:
        """Returns the programs that serve every request without a grammar, row by row."""
        return first_programs(self.sizes)

    def all_programs(self) -> list[ProgramKey]:
        """Returns all programs that requests may need, in the order in which they are compiled."""
        has_grammars = self.settings.grammars is not None
        return all_programs(self.sizes, has_grammars=has_grammars, has_plain=self.has_plain)

    def warm_up(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        keys: Rows[ProgramKey] | None = None,
    ) -> None:
        """Compiles programs on all cores, and the small ones that move pages and experts.

        Where programs run as CUDA graphs, they are recorded too. If that fails, they are compiled without graphs.

        Args:
            progress: called with the number of programs done and of all programs.
            keys: the programs; None: all that requests may need.
        """
        keys = self.all_programs() if keys is None else keys
        begin, graphs = time.perf_counter(), gpu_graph.GRAPHS
        with self._on_device():
            mesh = jax.sharding.get_mesh()
            has_graphs = compat.is_cuda() and graphs.options(mesh) is not None
        # XLA records a program's graph in its second call. No request has been admitted, so the state may be lost.
        if not has_graphs or not graphs.attempt(mesh, lambda: self._warm_up(progress, keys, num_calls=2)):
            if has_graphs:
                self.reset()
            self._warm_up(progress, keys, num_calls=1)
        # The threads compiled at the same time.
        self.compile_seconds = time.perf_counter() - begin

    def _warm_up(self, progress: Callable[[int, int], None], keys: Rows[ProgramKey], *, num_calls: int) -> None:
        """Compiles programs, calls each `num_calls` times, and waits for the calls."""
        lock = threading.Lock()
        progress(0, len(keys))
        # Moves come first: all later calls use their results.
        for _ in range(0 if self.settings.rebalance_experts_every is None else num_calls):
            for layer, slots in self.expert_placements().items():
                self.move_experts(layer, slots)
            self.count_experts(np.zeros(self.count_shape, np.int32), np.zeros(self.count_shape[:-1], np.int32))

        def run_alone(call: Callable[[], Any]) -> Any:
            with lock:
                return [jax.block_until_ready(call()) for _ in range(num_calls)][-1]

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(lambda key: self.compile_program(key, run_alone), keys)
            for done, _ in enumerate(compiled, 1):
                progress(done, len(keys))
        for _ in range(num_calls):
            if self.settings.host_bytes:
                with self._on_device(*host_pages.PROGRAMS):
                    self.state = host_pages.warm_up(self.state)
            if self.snapshots:
                nowhere = np.full(self.sizes.num_shards, NO_ROW, np.int32)
                for to_state in (False, True):
                    self.copy_snapshots(nowhere, nowhere, to_state=to_state)
        jax.block_until_ready(self.state)

    def compile_program(self, key: ProgramKey, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Compiles a program in the caller's thread, and runs it once: its first call also prepares its dispatch.

        `run` runs a function that calls programs on the state, while no other thread does.
        """
        begin = time.perf_counter()
        if key.kind == "masked round":
            batch = empty_batch(self.sizes, key.size, key.width)
            draft = self._compile_and_run(draft_call(batch, key), run)
            call = DraftCall([], batch, key, draft)
            self._compile_and_run(verify_call(call, all_allowed(self.sizes, draft.tokens.shape)), run)
        else:
            self._compile_and_run(self.empty_call(key), run)
        self.compile_seconds += time.perf_counter() - begin

    def _compile_and_run(self, call: PendingCall, run: Callable[[Callable[[], Any]], Any]) -> Any:
        with self._on_device():
            self.compile(call.program, *call.arrays, **self._static_arguments(call.key))
        # From now on, a call that does not return hangs and is not compiling.
        self._used.add(call.key)
        return run(lambda: self._run(call))

    def empty_call(self, key: ProgramKey) -> PendingCall:
        """Returns a call of a program. Every row is padding, so the call changes nothing."""
        if key.kind == "admit":
            shape = (self.sizes.num_shards, key.size)
            row = self.make_rows(Request(prompt=(0,), max_new_tokens=1))
            rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf[0], (*shape, *leaf.shape[1:])), row)
            return PendingCall(session.admit, (rows, empty_batch(self.sizes, key.size, 1).slots), key)
        if key.kind == "clear":
            return self._clearing(0, [NO_PAGE])
        batch = empty_batch(self.sizes, key.size, key.width)
        if key.kind == "score":
            return PendingCall(score_chunk, (batch, *no_targets(self.sizes, batch)), key)
        if key.kind == "advance":
            return PendingCall(session.advance, (batch, np.int32(0)), key)
        allowed = all_allowed(self.sizes, batch.slots.shape) if key.kind == "masked prefill" else None
        return PendingCall(session.prefill_chunk, (batch, no_chunk(self.sizes, batch, allowed)), key)

    def _clearing(self, shard: int, pages: list[int]) -> PendingCall:
        ids = np.full((self.sizes.num_shards, NUM_CLEARED), NO_PAGE, np.int32)
        ids[shard, : len(pages)] = pages
        return PendingCall(session.clear_pages, (ids,), ProgramKey("clear"))


def draft_call(batch: Batch, key: ProgramKey) -> PendingCall:
    return PendingCall(session.draft_round, (batch,), key._replace(kind="draft"))


def verify_call(call: DraftCall, allowed: np.ndarray) -> PendingCall:
    return PendingCall(session.verify_round, (call.batch, call.draft, allowed), call.key._replace(kind="verify"))
