"""Runs the calls of a tick: turns requests and page tables into arrays, and keeps the decoding state on the device."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mtpjax import compat
from mtpjax.compat import library_settings
from mtpjax.decoding import gpu_graph
from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.sampling_params import temperatures
from mtpjax.decoding.state import DecodeState, NewRows
from mtpjax.drafters.trained import require_whole_trunk
from mtpjax.inference.generate import choose_min_rows, device_settings, make_state, platform_of
from mtpjax.inference.requests import (
    check_request,
    check_settings,
    explain_param_errors,
    make_new_rows,
    make_stop_table,
    params_to_device,
)
from mtpjax.inference.resumable import fit_stops, resolve_statics
from mtpjax.models.cache import recurrent_entries, replace_recurrent_entries
from mtpjax.models.expert_counts import expert_layers
from mtpjax.models.expert_placement import STACKS, num_expert_devices, placement_tables
from mtpjax.models.model import MTPModel
from mtpjax.models.pages import NO_PAGE
from mtpjax.serving import host_pages, programs
from mtpjax.serving.calls import Call, DraftCall, ScoreCall, Work
from mtpjax.serving.expert_programs import count_experts, move_experts
from mtpjax.serving.grammar import num_words
from mtpjax.serving.host_pages import Outgoing, copy_in, copy_out
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.program_set import SMALL_VOCABULARY, ProgramKey, ProgramSet, all_programs, first_programs
from mtpjax.serving.programs import NO_START, Batch, Features
from mtpjax.serving.request import Request
from mtpjax.serving.scheduler import Sequence
from mtpjax.serving.scoring import score_chunk
from mtpjax.serving.sizes import EngineSettings, bucket, resolve_sizes
from mtpjax.serving.snapshots import NO_ROW, States, copy_rows, make_snapshots

STOPS_SHAPE = 32, 8  # largest number and length of a request's stop sequences, in tokens
NUM_CLEARED = 64  # pages per call that clears pages


class Executor:
    """The device's side of the engine. All calls come from one thread.

    Args:
        params: model parameters, with unrolled layers; their mesh is that of the engine.
        model: the model.
        config: settings of every request. Limits and stop tokens are the requests' own.
        settings: sizes.
        draft_params: parameters of a drafter that has its own; None: it has none, or the model's MTP modules.

    Raises:
        ValueError: for settings that contradict each other or the model.
    """

    @library_settings()
    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        config: DecodeConfig,
        settings: EngineSettings,
        draft_params: Any = None,
    ):
        if config.depth_policy != "fixed":
            raise ValueError("an engine chooses the depth by its load: set depth_policy to 'fixed'")
        self.settings, self.config = settings, config
        params = params_to_device(params)
        # The whole vocabulary and every option may be asked for, so the spec is that of sampled rows.
        model, params, drafter, spec, mesh = resolve_statics(params, model, config, settings.num_slots)
        self.model, self.params, self.drafter, self.mesh = model, params, drafter, mesh
        if settings.host_bytes and mesh is not None and mesh.size > 1:
            raise ValueError("pages in host memory need one device, not a mesh: set host_bytes to 0")
        # Without drafts, no parameters of a drafter are read. A mesh is checked here, not in a request's first call.
        self.own_draft_params = draft_params if config.num_steps else None
        if self.own_draft_params is not None and mesh is not None:
            require_whole_trunk(mesh.shape)
            self.own_draft_params = jax.device_put(self.own_draft_params, NamedSharding(mesh, PartitionSpec()))
        # A chain may change its depth from call to call, so the drafter keeps the states of rounds without drafts.
        is_adaptive = config.num_steps > 0 and config.topk == 1
        changes_depth = settings.disable_drafts_at is not None or settings.adapts_depth
        if changes_depth and config.topk > 1:
            raise ValueError("the number of draft levels can follow load or acceptance only for chains: set topk to 1")
        if changes_depth and spec.is_ratio_rule:
            raise ValueError(
                f"under acceptance '{spec.rule}' the text of a seed depends on the number of drafts, which would "
                "depend on other requests: set acceptance to 'sample' or 'greedy'"
            )
        if settings.adapts_depth and config.num_steps:
            # A drafter that cannot follow the policy "adaptive" cannot follow the counts of the engine either.
            costs = (1.0,) * (config.num_steps + 1)
            drafter.check(model, dataclasses.replace(config, depth_policy="adaptive", depth_costs=costs))
        spec = dataclasses.replace(spec, is_adaptive=is_adaptive, check_nan=True, logprobs=True)
        num_parts = 1 if mesh is None else mesh.shape.get("data", 1)
        limit = check_settings(model, config, drafter)
        self.sizes, self.spec = resolve_sizes(
            settings,
            spec,
            model=model,
            drafter=drafter,
            limit=limit,
            num_parts=num_parts,
            min_rows_of=lambda num_rows: choose_min_rows(config, model, mesh, batch=num_rows),
        )
        self.draft_params = self.own_draft_params
        if self.draft_params is None:
            self.draft_params = drafter.default_params(params, config, model=model)
        self.num_expert_devices = 1 if mesh is None else num_expert_devices(params, mesh.shape)
        if settings.rebalance_experts_every is not None:
            self._check_rebalancing()
        self.num_compiled = 0  # programs
        self.compile_seconds = 0.0
        self.programs = ProgramSet()
        self.planned: set[ProgramKey] = set()  # programs that do not count as compiled, whenever that happens
        self._used: set[ProgramKey] = set()  # programs that are compiled
        self._first_uses: set[ProgramKey] = set()  # that run now
        self.compiled_at = 0.0  # end of the last first use, of `time.monotonic`
        # Trees of greedy rows are dynamic, which saves passes, so they need programs of their own.
        has_few_logits = model.config.vocab_size <= SMALL_VOCABULARY and config.topk == 1
        self.has_plain = platform_of(mesh) != "cpu" or not has_few_logits
        self.state = self._new_state()
        self.snapshots = self._new_snapshots()

    def _check_rebalancing(self) -> None:
        if not self.model.config.is_moe:
            raise ValueError("the model has no routed experts that could be rebalanced")
        if self.num_expert_devices == 1:
            raise ValueError("experts are rebalanced between devices: use a mesh that splits them over data or expert")
        if not all("placement" in self.params["trunk"][layer]["experts"] for layer in expert_layers(self.model.config)):
            raise ValueError("experts can be rebalanced only after `place_all_layers`, which gives them slots")

    def reset(self) -> None:
        """Makes a state whose slots are all free. The old one is freed first: memory may not have room for two."""
        for leaf in jax.tree.leaves((self.state, self.snapshots)):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = self._new_state()
        self.snapshots = self._new_snapshots()

    def _new_state(self) -> DecodeState:
        return make_state(
            self.params,
            model=self.model,
            config=self.config,
            drafter=self.drafter,
            spec=self.spec,
            batch=self.settings.num_slots,
            capacity=self.sizes.capacity,
            stops_shape=STOPS_SHAPE,
            features=SamplingFeatures.all_enabled(),
            mesh=self.mesh,
        )

    def _new_snapshots(self) -> States:
        num_rows = self.sizes.part_snapshots * self.sizes.num_parts
        if not num_rows:
            return ()
        return make_snapshots(self.state.trunk, num_rows, config=self.model.config, mesh=self.mesh)

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
        if self.spec.rule == "greedy" and temperatures(request.sampling, 1).any():
            raise ValueError(
                f"acceptance 'greedy' supports only temperature 0, got {request.sampling.temperature}; "
                "start the engine with 'auto' or an exact sampling rule"
            )
        self._check_grammar(request)
        prompt = np.asarray(request.prompt)
        limit = check_request([prompt], self.model, config, self.drafter)
        rows = make_new_rows(
            [prompt.astype(np.int32)],
            model=self.model,
            config=config,
            limit=limit,
            capacity=self.sizes.capacity,
            sampling=request.sampling,
            features=SamplingFeatures.all_enabled(),
            stops=fit_stops(make_stop_table(config), STOPS_SHAPE),
        )
        if self.sizes.num_pages_of(int(rows.settings.limit[0])) > self.sizes.part_pages:
            raise ValueError(
                f"a text of {int(rows.settings.limit[0])} tokens needs more than the {self.sizes.part_pages} pages of "
                f"{self.settings.page_size} that the pool has"
            )
        return rows.replace(first_token=np.full(1, -1, np.int32))

    def _check_grammar(self, request: Request) -> None:
        """Checks that masks alone decide which tokens a text can have, and that a complete text ends."""
        if request.grammar is None:
            return
        grammars, sampling = self.settings.grammars, request.sampling
        if grammars is None:
            raise ValueError("the engine was started without grammars")
        if not self.spec.is_exact:
            raise ValueError(f"acceptance '{self.spec.rule}' may accept tokens that the grammar forbids")
        if not set(grammars.eos_token_ids) <= set(request.stop_token_ids):
            raise ValueError("a text with a grammar ends with the end token, which cannot be ignored")
        if sampling.min_new_tokens or sampling.allowed_tokens is not None or sampling.banned_tokens is not None:
            raise ValueError("a grammar excludes min_new_tokens, allowed_tokens and banned_tokens")

    def admit(self, sequences: list[Sequence]) -> None:
        """Puts requests into their slots."""
        key = self.choose_program("admit", sequences)
        grid = self._grid(sequences, key.size)
        # Padding repeats a request; its slot does not exist.
        rows = [[_text_rows(sequence or sequences[0]) for sequence in row] for row in grid]
        parts = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *row) for row in rows]
        rows = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
        self._run(self._admission(rows, self._batch(grid, 1).slots))

    def prefill(self, prefills: list[tuple[Sequence, int, int]]) -> Call:
        """Processes a chunk of each row's prompt, between the given positions."""
        chunks = {sequence.id: (start, end) for sequence, start, end in prefills}
        key = self.choose_program("prefill", [sequence for sequence, *_ in prefills])
        grid = self._grid([sequence for sequence, *_ in prefills], key.size)
        batch = self._batch(grid, key.width)
        allowed = self.all_allowed(batch.slots.shape) if key.kind == "masked prefill" else None
        start = np.full(batch.slots.shape, NO_START, np.int32)
        end, first_token = start.copy(), np.full_like(start, -1)
        for part, column, sequence in _cells(grid):
            start[part, column], end[part, column] = chunks[sequence.id]
            if sequence.is_resumed:
                first_token[part, column] = sequence.text[-1]
            elif allowed is not None and sequence.request.grammar is not None:
                allowed[part, column] = sequence.request.grammar.first_mask
        work = self._prefill(batch, start, first_token, allowed, end)
        return self._call(list(itertools.chain(*grid)), work, is_prefill=True)

    def score(self, chunk: tuple[Sequence, int, int]) -> ScoreCall:
        """Processes a chunk of a text to score, between the given positions."""
        sequence, begin, end = chunk
        key = self.choose_program("score", [sequence])
        grid = self._grid([sequence], key.size)
        batch = self._batch(grid, key.width)
        start, targets = self._no_targets(batch)
        assert sequence.scored is not None
        start[sequence.part, 0] = begin
        targets[sequence.part, 0, : end - begin] = sequence.scored.tokens[begin + 1 : end + 1]
        scores = self._run(self._score(batch, start, targets))
        for leaf in jax.tree.leaves(scores):
            leaf.copy_to_host_async()
        return ScoreCall([None if row is None else chunk for row in itertools.chain(*grid)], scores)

    def _no_targets(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns start and targets of a batch whose rows are all padding."""
        shape = batch.slots.shape
        return np.full(shape, NO_START, np.int32), np.zeros((*shape, self.spec.prefill_chunk), np.int32)

    def advance(self, sequences: list[Sequence], depth: int, rounds: int) -> Call:
        """Runs rounds of `depth` draft levels on rows."""
        key = self.choose_program("advance", sequences, depth)
        grid = self._grid(sequences, key.size)
        work = self._advance(self._batch(grid, key.width), Features(plain=key.plain), depth, rounds)
        return self._call(list(itertools.chain(*grid)), work)

    def draft(self, sequences: list[Sequence], depth: int) -> DraftCall:
        """Begins a round of `depth` draft levels on rows with a grammar."""
        key = self.choose_program("masked round", sequences, depth)
        grid = self._grid(sequences, key.size)
        batch = self._batch(grid, key.width)
        return DraftCall(list(itertools.chain(*grid)), batch, depth, self._run(self._draft(batch, depth)))

    def verify(self, call: DraftCall, allowed: np.ndarray) -> Call:
        """Ends a round, with the tokens `[R, W, ceil(V/32)]` that may follow each node."""
        return self._call(call.rows, self._verify(call, allowed))

    def clear_pages(self, part: int, pages: list[int]) -> None:
        """Zeroes pages of a part."""
        for begin in range(0, len(pages), NUM_CLEARED):
            self._run(self._clearing(part, pages[begin : begin + NUM_CLEARED]))

    def move_pages(self, pool: PagePool) -> list[Outgoing]:
        """Copies what leaves the pool towards the host, and then what comes back into its pages.

        Returns:
            The copies on their way out.
        """
        with self._on_device(*host_pages.PROGRAMS):
            copies = copy_out(self.state, pool.outgoing)
            self.state = copy_in(self.state, pool.incoming)
        pool.outgoing, pool.incoming = [], []
        return copies

    def read_pages(self, pages: list[tuple[bytes, int]]) -> list[Outgoing]:
        """Copies known pages towards the host; they stay in the pool."""
        with self._on_device(*host_pages.PROGRAMS):
            return copy_out(self.state, pages)

    def save_snapshots(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copies the recurrent states of requests to rows of the snapshots."""
        for slots, kept in self._of_parts(rows):
            self.copy_snapshots(slots, kept, to_state=False)

    def restore_snapshots(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copies rows of the snapshots to the slots of requests."""
        for slots, kept in self._of_parts(rows):
            self.copy_snapshots(slots, kept, to_state=True)

    def _of_parts(self, rows: list[tuple[Sequence, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields slots and rows of the snapshots, both `[P]` int32: one of each part, as long as there are any."""
        parts = [[row for row in rows if row[0].part == part] for part in range(self.sizes.num_parts)]
        for some in itertools.zip_longest(*parts):
            pairs = [(NO_ROW, NO_ROW) if row is None else (row[0].slot, row[1]) for row in some]
            slots, kept = np.array(pairs, np.int32).T
            yield slots, kept

    def copy_snapshots(self, slots: np.ndarray, rows: np.ndarray, *, to_state: bool) -> None:
        """Copies one row of each part.

        Args:
            slots: `[P]` int32 slots; `NO_ROW`: no copy.
            rows: `[P]` int32 rows of the snapshots.
            to_state: from the snapshots to the slots; False: back.
        """
        own, config = recurrent_entries(self.state.trunk), self.model.config
        with self._on_device(copy_rows):
            if to_state:
                self.snapshots, own = copy_rows((self.snapshots, own), rows, slots, config=config)
            else:
                own, self.snapshots = copy_rows((own, self.snapshots), slots, rows, config=config)
        self.state = self.state.replace(trunk=replace_recurrent_entries(self.state.trunk, own))

    def expert_placements(self) -> dict[str, np.ndarray]:
        """Returns the expert in each slot, `[S]` int32, by layer."""
        trunk = self.params["trunk"]
        placements = {layer: trunk[layer]["experts"]["placement"] for layer in expert_layers(self.model.config)}
        # Copies, because `move_experts` deletes these arrays.
        return {layer: np.array(tables["expert_of_slot"]) for layer, tables in placements.items()}

    @property
    def count_shape(self) -> tuple[int, int, int]:
        """Texts `[P, b, T]` of a call that counts: as many tokens as the largest prefill call has."""
        return self.sizes.num_parts, self.sizes.prefill_sizes[-1], self.spec.prefill_chunk

    def count_experts(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Counts the experts that texts choose.

        Args:
            tokens: `[P, b, T]` int32 right-padded texts, of the shape `count_shape`.
            lengths: `[P, b]` int32; 0: no text.

        Returns:
            `[L, E]` int32 counts of each layer with experts, on the device.
        """
        capacity = round_up_capacity(tokens.shape[-1])
        with self._on_device(count_experts):
            return count_experts(self.params, tokens, lengths, model=self.model, capacity=capacity)

    def move_experts(self, layer: str, expert_of_slot: np.ndarray) -> None:
        """Gives the experts of a layer other slots. The arrays that had them before are deleted.

        Args:
            layer: name of a layer of the trunk.
            expert_of_slot: `[S]` the expert in each slot.
        """
        trunk, config = self.params["trunk"], self.model.config
        experts = trunk[layer]["experts"]
        moving = {name: experts[name] for name in (*STACKS, "placement") if name in experts}
        with self._on_device(move_experts):
            moved = move_experts(moving, placement_tables(expert_of_slot, config.n_routed_experts), config=config)
        self.params = {
            **self.params,
            "trunk": {**trunk, layer: {**trunk[layer], "experts": {**experts, **moved}}},
        }
        # Whoever made the engine may still hold the old ones: without this, the memory would hold both. A call that
        # was dispatched before ends as it should.
        for leaf in jax.tree.leaves(moving):
            leaf.delete()

    def choose_program(self, kind: str, sequences: Rows[Sequence], depth: int = 0) -> ProgramKey:
        """Chooses the program of a call on these rows; see `ProgramSet.choose`.

        Args:
            kind: of the program; "prefill" becomes "masked prefill" where a row has a grammar.
            sequences: the rows.
            depth: draft levels.
        """
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
        num_rows = max(collections.Counter(sequence.part for sequence in sequences).values())
        # Texts are scored one by one.
        choices = (1,) if kind == "score" else sizes.prefill_sizes if kind.endswith("prefill") else sizes.batch_sizes
        size = bucket(num_rows, choices)
        return self.programs.choose(ProgramKey(kind, size, width, is_plain, depth))

    def needed_programs(self, sequence: Sequence) -> list[ProgramKey]:
        """Returns the programs with which a request can run alone, whatever the length of its text."""
        sizes = self.sizes
        depth = self.sizes.depths[0] if sequence.request.speculative else 0
        width = bucket(min(sizes.num_pages_of(sequence.limit), sizes.max_pages), sizes.table_widths)
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
        # XLA records a program's graph in its second call. No request has entered yet, so the state may get lost.
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
        # Moves come first: all later calls take what they return.
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
                nowhere = np.full(self.sizes.num_parts, NO_ROW, np.int32)
                for to_state in (False, True):
                    self.copy_snapshots(nowhere, nowhere, to_state=to_state)
        jax.block_until_ready(self.state)

    def compile_program(self, key: ProgramKey, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Compiles a program, and runs it once: the first call of a program also prepares its dispatch.

        Args:
            key: the program. Compiling happens in the caller's thread, while other calls may run.
            run: runs a function that calls programs on the state, while no other thread does.
        """
        begin = time.perf_counter()
        if key.kind == "masked round":
            batch = self._empty_batch(key.size, key.width)
            draft = self._compile_and_run(self._draft(batch, key.depth), run)
            call = DraftCall([], batch, key.depth, draft)
            self._compile_and_run(self._verify(call, self.all_allowed(draft.tokens.shape)), run)
        else:
            self._compile_and_run(self._empty_work(key), run)
        self.compile_seconds += time.perf_counter() - begin

    def _compile_and_run(self, work: Work, run: Callable[[Callable[[], Any]], Any]) -> Any:
        with self._on_device():
            work.program.compile(
                self.params, self.draft_params, self.state, *work.arrays, model=self.model, **work.settings
            )
        # From now on a call that does not return is hung, not compiling.
        if work.key is not None:
            self._used.add(work.key)
        return run(lambda: self._run(work))

    def _empty_work(self, key: ProgramKey) -> Work:
        """Returns a call of a program. Every row is padding, so the call changes nothing."""
        if key.kind == "admit":
            shape = (self.sizes.num_parts, key.size)
            row = self.make_rows(Request(prompt=(0,), max_new_tokens=1))
            rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf[0], (*shape, *leaf.shape[1:])), row)
            return self._admission(rows, self._empty_batch(key.size, 1).slots)
        if key.kind == "clear":
            return self._clearing(0, [NO_PAGE])
        batch = self._empty_batch(key.size, key.width)
        if key.kind == "score":
            return self._score(batch, *self._no_targets(batch))
        if key.kind == "advance":
            return self._advance(batch, Features(plain=key.plain), key.depth, 0)
        is_masked = key.kind == "masked prefill"
        return self._empty_prefill(batch, self.all_allowed(batch.slots.shape) if is_masked else None)

    # Calls on arrays.

    def _admission(self, rows: NewRows, slots: Any) -> Work:
        return Work(programs.admit, (rows, slots), {}, ProgramKey("admit", slots.shape[1]))

    def _prefill(
        self,
        batch: Batch,
        start: np.ndarray,
        first_token: np.ndarray,
        allowed: np.ndarray | None,
        end: np.ndarray | None = None,
    ) -> Work:
        settings = {"drafter": self.drafter, "spec": self.spec, "features": Features(plain=False)}
        # Only for snapshots do chunks end before their width.
        arrays = (batch, start, first_token, allowed, end if self.sizes.part_snapshots else None)
        key = _key("prefill" if allowed is None else "masked prefill", batch)
        return Work(programs.prefill_chunk, arrays, settings, key)

    def _empty_prefill(self, batch: Batch, allowed: np.ndarray | None = None) -> Work:
        nowhere = np.full_like(batch.slots, NO_START)
        return self._prefill(batch, nowhere, np.full_like(batch.slots, -1), allowed, nowhere)

    def _advance(self, batch: Batch, features: Features, depth: int, rounds: int) -> Work:
        settings = self._round_settings(batch, depth) | {"features": features}
        arrays, key = (batch, np.int32(rounds)), _key("advance", batch, depth, plain=features.plain)
        return Work(programs.advance, arrays, settings | {"max_rounds": self.settings.rounds_per_call}, key)

    def _draft(self, batch: Batch, depth: int) -> Work:
        settings = self._round_settings(batch, depth)
        return Work(programs.draft_round, (batch,), settings, _key("draft", batch, depth))

    def _verify(self, call: DraftCall, allowed: np.ndarray) -> Work:
        arrays, settings = (call.batch, call.draft, allowed), self._round_settings(call.batch, call.depth)
        return Work(programs.verify_round, arrays, settings, _key("verify", call.batch, call.depth))

    def _round_settings(self, batch: Batch, depth: int) -> dict[str, Any]:
        """Returns the static settings of a round."""
        min_rows = self.sizes.min_rows[self.sizes.batch_sizes.index(batch.slots.shape[1])]
        return {"drafter": self.drafter, "spec": self.spec, "depth": depth, "min_rows": min_rows}

    def _score(self, batch: Batch, start: np.ndarray, targets: np.ndarray) -> Work:
        return Work(score_chunk, (batch, start, targets), {}, _key("score", batch))

    def _clearing(self, part: int, pages: list[int]) -> Work:
        ids = np.full((self.sizes.num_parts, NUM_CLEARED), NO_PAGE, np.int32)
        ids[part, : len(pages)] = pages
        return Work(programs.clear_pages, (ids,), {}, ProgramKey("clear"))

    def _call(self, rows: list[Sequence | None], work: Work, *, is_prefill: bool = False) -> Call:
        """Dispatches a call that has a report."""
        report = self._run(work)
        # The next tick reads it: let the copy start as soon as the call has ended, not when it is asked for.
        report.values.copy_to_host_async()
        return Call(rows, report, is_prefill)

    def _run(self, work: Work) -> Any:
        """Dispatches a call; returns its report, if it has one."""
        with self._first_use(work.key), self._on_device(*self._counted(work.program, work.key)):
            self.state, report = work.program(
                self.params, self.draft_params, self.state, *work.arrays, model=self.model, **work.settings
            )
        return report

    def _counted(self, program: Any, key: ProgramKey | None) -> tuple[Any, ...]:
        """Returns the program if compiling it counts."""
        if key is not None and key.kind in ("draft", "verify"):
            key = key._replace(kind="masked round")
        return () if key in self.planned else (program,)

    @property
    def is_compiling(self) -> bool:
        """True while a call uses a program for the first time, and so may compile it."""
        return bool(self._first_uses)

    @contextlib.contextmanager
    def _first_use(self, key: ProgramKey | None) -> Iterator[None]:
        """Marks the first call of a program, which may take minutes without being hung."""
        if key is None or key in self._used:
            yield
            return
        self._first_uses.add(key)
        try:
            yield
            self._used.add(key)
        finally:
            self.compiled_at = time.monotonic()
            self._first_uses.discard(key)

    @contextlib.contextmanager
    def _on_device(self, *calls: Any) -> Iterator[None]:
        """Sets what calls on the device need, and counts the programs that `calls` compile."""
        with (
            library_settings(),
            device_settings(self.params, self.mesh, self.config),
            explain_param_errors(self.params, self.model),
        ):
            before, begin = _num_programs(calls), time.perf_counter()
            yield
            if (num_new := _num_programs(calls) - before) > 0:
                self.num_compiled += num_new
                self.compile_seconds += time.perf_counter() - begin

    # Batches.

    def _grid(self, sequences: list[Sequence], size: int) -> list[list[Sequence | None]]:
        """Returns the requests of each part, padded to `size`."""
        grid: list[list[Sequence | None]] = [[] for _ in range(self.sizes.num_parts)]
        for sequence in sequences:
            grid[sequence.part].append(sequence)
        return [row + [None] * (size - len(row)) for row in grid]

    def _empty_batch(self, size: int, width: int) -> Batch:
        shape = (self.sizes.num_parts, size)
        return Batch(
            slots=np.full(shape, self.sizes.part_slots, np.int32),
            table=np.full((*shape, width), NO_PAGE, np.int32),
            num_shared=np.zeros(shape, np.int32),
        )

    def all_allowed(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns masks `[..., ceil(V/32)]` that allow every token."""
        return np.full((*shape, num_words(self.model.config.vocab_size)), -1, np.int32)

    def _batch(self, grid: list[list[Sequence | None]], width: int) -> Batch:
        """Makes the arrays of rows in slots, with `width` pages of each; a call that reads no pages needs none."""
        batch = self._empty_batch(len(grid[0]), width)
        for part, column, sequence in _cells(grid):
            assert sequence.lease is not None and sequence.slot is not None
            pages = sequence.lease.pages[: min(self.sizes.max_pages, width)]
            batch.slots[part, column] = sequence.slot
            batch.table[part, column, : len(pages)] = pages
            batch.num_shared[part, column] = sequence.lease.num_cached
        return batch


def _key(kind: str, batch: Batch, depth: int = 0, *, plain: bool = False) -> ProgramKey:
    """Returns the key of a program for a batch."""
    _, size, width = batch.table.shape
    return ProgramKey(kind, size, width, plain, depth)


def _num_programs(calls: tuple[Any, ...]) -> int:
    """Returns the number of programs that this process has compiled for calls."""
    return sum(call.num_programs for call in calls)


def _cells(grid: list[list[Sequence | None]]) -> Iterator[tuple[int, int, Sequence]]:
    """Yields part, column and request of each row that is not padding."""
    for part, row in enumerate(grid):
        for column, sequence in enumerate(row):
            if sequence is not None:
                yield part, column, sequence


def _text_rows(sequence: Sequence) -> NewRows:
    """Returns the arrays of a request, with the text that it has when it enters."""
    rows, size = sequence.rows, sequence.num_to_prefill
    tokens = np.zeros_like(rows.tokens)
    tokens[0, :size] = sequence.text[:size]
    first_token = sequence.text[-1] if sequence.is_resumed else -1
    return rows.replace(tokens=tokens, length=np.full(1, size, np.int32), first_token=np.full(1, first_token, np.int32))
