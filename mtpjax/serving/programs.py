"""Determines which programs an engine's requests and calls need, and compiles them."""

import collections
import concurrent.futures
import dataclasses
import itertools
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
from mtpjax.decoding.state import Draft, NewRows
from mtpjax.inference.requests import check_request, make_new_rows
from mtpjax.models.view import NO_PAGE
from mtpjax.serving.batches import all_allowed, empty_batch, no_chunk, no_targets
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.program_set import PendingCall, ProgramKey, ProgramSet
from mtpjax.serving.request import Request, Sequence
from mtpjax.serving.scoring import score_chunk
from mtpjax.serving.sizes import bucket

NUM_CLEARED = 64  # pages per call that clears pages


class Programs:
    """Checks requests, chooses the programs of calls, and compiles them.

    Calls may use the programs in `available`.
    """

    def __init__(self, session: EngineSession, grammars: Grammars | None):
        self.session, self.grammars, self.available = session, grammars, ProgramSet()

    def make_rows(self, request: Request) -> NewRows:
        """Checks a request and converts it to arrays `[1, ...]` on the host; callable from any thread.

        Raises:
            ValueError: the prompt or an option is out of range; the message is one line.
        """
        engine, decoder = self.session, self.session.decoder
        config = dataclasses.replace(
            engine.config,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            stop_sequences=request.stop_sequences,
            max_length=engine.sizes.max_length,
        )
        if decoder.spec.is_greedy and temperatures(request.sampling, 1).any():
            raise ValueError(
                f"acceptance 'greedy' supports only temperature 0, got {request.sampling.temperature}; "
                "start the engine with 'auto' or an exact sampling rule"
            )
        self._check_grammar(request)
        prompt = np.asarray(request.prompt)
        limit = check_request([prompt], decoder.model, config, decoder.drafter)
        rows = make_new_rows(
            [prompt.astype(np.int32)],
            model=decoder.model,
            config=config,
            limit=limit,
            capacity=engine.sizes.capacity,
            sampling=request.sampling,
            shape=engine.shape,
        )
        length, num_pages = int(rows.settings.limit[0]), engine.sizes.shard_pages
        if decoder.num_pages_of(length) > num_pages:
            raise ValueError(
                f"a text of {length} tokens does not fit in the pool, which has {num_pages} pages of "
                f"{engine.settings.page_size} tokens"
            )
        return rows.replace(first_token=np.full(1, -1, np.int32))

    def _check_grammar(self, request: Request) -> None:
        """Checks that the grammar's masks alone decide which tokens are allowed, and that a complete text ends."""
        if request.grammar is None:
            return
        grammars, sampling, rule = self.grammars, request.sampling, self.session.decoder.spec.rule
        if grammars is None:
            raise ValueError("the engine was started without grammars")
        if not rule.is_exact:
            raise ValueError(f"acceptance '{rule}' may accept tokens that the grammar forbids")
        if not set(grammars.eos_token_ids) <= set(request.stop_token_ids):
            raise ValueError("a text with a grammar ends with the end token, which cannot be ignored")
        if sampling.min_new_tokens or sampling.allowed_tokens is not None or sampling.banned_tokens is not None:
            raise ValueError("a grammar cannot be combined with min_new_tokens, allowed_tokens or banned_tokens")

    def choose(self, kind: str, sequences: Rows[Sequence], depth: int = 0) -> ProgramKey:
        """Chooses the program for a call on these rows. Rows with a grammar turn "prefill" into "masked prefill"."""
        sizes, width = self.session.sizes, 0
        is_masked = kind == "masked round" or any(sequence.request.grammar is not None for sequence in sequences)
        if kind == "prefill" and is_masked:
            kind = "masked prefill"
        if kind != "admit":
            widest = max(len(sequence.lease.pages) for sequence in sequences if sequence.lease is not None)
            # Rows with a grammar have programs for the widest table only.
            widths = sizes.table_widths[-1:] if kind.startswith("masked") else sizes.table_widths
            width = bucket(min(widest, sizes.max_pages), widths)
        is_plain = kind == "advance" and self.session.has_plain and all(sequence.is_plain for sequence in sequences)
        num_rows = max(collections.Counter(sequence.shard for sequence in sequences).values())
        # Texts are scored one by one.
        choices = (1,) if kind == "score" else sizes.prefill_sizes if kind.endswith("prefill") else sizes.batch_sizes
        size = bucket(num_rows, choices)
        return self.available.choose(ProgramKey(kind, size, width, is_plain, depth))

    def needed(self, sequence: Sequence) -> list[ProgramKey]:
        """Returns the programs that a request needs to run alone."""
        sizes = self.session.sizes
        depth = sizes.depths[0] if sequence.request.speculative else 0
        width = bucket(min(self.session.decoder.num_pages_of(sequence.limit), sizes.max_pages), sizes.table_widths)
        admission, prefill = ProgramKey("admit", sizes.batch_sizes[0]), sizes.prefill_sizes[0]
        if sequence.scored is not None:
            return [admission, ProgramKey("score", 1, width)]
        if sequence.request.grammar is not None:
            width = sizes.table_widths[-1]
            rounds = ProgramKey("masked round", sizes.batch_sizes[0], width, False, depth)
            return [admission, ProgramKey("masked prefill", prefill, width), rounds]
        is_plain = self.session.has_plain and sequence.is_plain
        rounds = ProgramKey("advance", sizes.batch_sizes[0], width, is_plain, depth)
        return [admission, ProgramKey("prefill", prefill, width), rounds]

    def first(self) -> list[ProgramKey]:
        """Returns the programs that serve every request without a grammar, row by row."""
        sizes = self.session.sizes
        size, width = sizes.batch_sizes[0], sizes.table_widths[-1]
        return [
            ProgramKey("admit", size),
            ProgramKey("prefill", sizes.prefill_sizes[0], width),
            ProgramKey("advance", size, width, False, sizes.depths[0]),
        ]

    def all(self) -> list[ProgramKey]:
        """Returns all programs that requests may need, in the order in which they are compiled."""
        sizes = self.session.sizes
        widest = sizes.table_widths[-1]
        # Start with the sizes that gain the most (one row, many rows), and end with rare rows (no drafts, a grammar).
        rows = [sizes.batch_sizes[0], *reversed(sizes.batch_sizes[1:])]
        kinds = (True, False) if self.session.has_plain else (False,)
        keys = [*self.first(), *(ProgramKey("admit", size) for size in sizes.batch_sizes)]
        keys += [ProgramKey("prefill", *each) for each in itertools.product(sizes.prefill_sizes, sizes.table_widths)]
        for depth, size, width, plain in itertools.product(sizes.depths, rows, sizes.table_widths, kinds):
            keys.append(ProgramKey("advance", size, width, plain, depth))
        keys.append(ProgramKey("clear"))
        # Rows with a grammar have programs for the widest table only.
        if self.grammars is not None:
            keys += [ProgramKey("masked prefill", size, widest) for size in sizes.prefill_sizes]
            rounds = itertools.product(sizes.depths, rows)
            keys += [ProgramKey("masked round", size, widest, False, depth) for depth, size in rounds]
        keys += [ProgramKey("score", 1, width) for width in sizes.table_widths]
        return list(dict.fromkeys(keys))

    def warm_up(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        keys: Rows[ProgramKey] | None = None,
    ) -> None:
        """Compiles programs on all cores, including the small ones that move pages and experts.

        If programs run as CUDA graphs, these are recorded too. If that fails, the programs are compiled without graphs.

        Args:
            progress: called with the number of compiled programs and the total.
            keys: the programs to compile; None means all that requests may need.
        """
        keys = self.all() if keys is None else keys
        begin, graphs, engine = time.perf_counter(), gpu_graph.GRAPHS, self.session
        # The other processes run the warm-up calls themselves.
        engine.tell_others("warm_up")
        announce, engine.announce = engine.announce, None
        with engine.on_device():
            mesh = jax.sharding.get_mesh()
            has_graphs = compat.is_cuda() and graphs.options(mesh) is not None
        # XLA records a program's graph during its second call. No request has been admitted, so losing the state is
        # harmless.
        if not has_graphs or not graphs.attempt(mesh, lambda: self._warm_up(progress, keys, num_calls=2)):
            if has_graphs:
                engine.reset()
            self._warm_up(progress, keys, num_calls=1)
        # The threads compiled at the same time, so use the elapsed time instead of the sum of their times.
        engine.compile_seconds = time.perf_counter() - begin
        engine.announce = announce

    def _warm_up(self, progress: Callable[[int, int], None], keys: Rows[ProgramKey], *, num_calls: int) -> None:
        """Compiles programs, calls each `num_calls` times, and waits for the calls."""
        lock, engine = threading.Lock(), self.session
        progress(0, len(keys))
        # Move the experts first, because all later calls use the moved arrays.
        for _ in range(0 if engine.settings.rebalance_experts_every is None else num_calls):
            for layer, slots in engine.expert_placements().items():
                engine.move_experts(layer, slots)
            engine.count_experts(np.zeros(engine.count_shape, np.int32), np.zeros(engine.count_shape[:-1], np.int32))

        def run_alone(call: Callable[[], Any]) -> Any:
            with lock:
                return [jax.block_until_ready(call()) for _ in range(num_calls)][-1]

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(lambda key: self.compile(key, run_alone), keys)
            for done, _ in enumerate(compiled, 1):
                progress(done, len(keys))
        engine.warm_up_copies(num_calls)

    def compile(self, key: ProgramKey, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Compiles a program in the caller's thread, and runs it once, because the first call prepares its dispatch.

        `run` calls a function that runs programs on the state, at a time when no other thread does.
        """
        begin, sizes = time.perf_counter(), self.session.sizes

        def compile_and_run(call: PendingCall) -> Any:
            self.session.compile_call(call)
            return run(lambda: self.session.run(call))

        if key.kind == "masked round":
            batch = empty_batch(sizes, key.size, key.width)
            draft = compile_and_run(draft_call(batch, key))
            compile_and_run(verify_call(batch, draft, all_allowed(sizes, draft.tokens.shape), key))
        else:
            compile_and_run(self.empty_call(key))
        self.session.compile_seconds += time.perf_counter() - begin

    def empty_call(self, key: ProgramKey) -> PendingCall:
        """Returns a call to a program in which every row is padding, so that it changes nothing."""
        sizes = self.session.sizes
        if key.kind == "admit":
            shape = (sizes.num_shards, key.size)
            row = self.make_rows(Request(prompt=(0,), max_new_tokens=1))
            rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf[0], (*shape, *leaf.shape[1:])), row)
            return PendingCall(session.admit, (rows, empty_batch(sizes, key.size, 1).slots), key)
        if key.kind == "clear":
            return self.clearing(0, [NO_PAGE])
        batch = empty_batch(sizes, key.size, key.width)
        if key.kind == "score":
            return PendingCall(score_chunk, (batch, *no_targets(sizes, batch)), key)
        if key.kind == "advance":
            return PendingCall(session.advance, (batch, np.int32(0)), key)
        allowed = all_allowed(sizes, batch.slots.shape) if key.kind == "masked prefill" else None
        return PendingCall(session.prefill_chunk, (batch, no_chunk(sizes, batch, allowed)), key)

    def clearing(self, shard: int, pages: list[int]) -> PendingCall:
        ids = np.full((self.session.sizes.num_shards, NUM_CLEARED), NO_PAGE, np.int32)
        ids[shard, : len(pages)] = pages
        return PendingCall(session.clear_pages, (ids,), ProgramKey("clear"))


def draft_call(batch: Batch, key: ProgramKey) -> PendingCall:
    return PendingCall(session.draft_round, (batch,), key._replace(kind="draft"))


def verify_call(batch: Batch, draft: Draft, allowed: np.ndarray, key: ProgramKey) -> PendingCall:
    return PendingCall(session.verify_round, (batch, draft, allowed), key._replace(kind="verify"))
