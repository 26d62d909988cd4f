"""The device's side of an engine: the running state, and the programs that work on it and their compilation."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mtpjax.compat import library_settings
from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.device import fit_params, with_implementation
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.session import Session
from mtpjax.decoding.state import StateShape
from mtpjax.drafters.trained import require_whole_trunk
from mtpjax.inference.requests import check_settings, explain_param_errors, make_drafter, params_to_device
from mtpjax.models.cache import recurrent_entries, replace_recurrent_entries
from mtpjax.models.expert_counts import expert_layers
from mtpjax.models.expert_placement import STACKS, num_expert_devices, placement_tables
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import platform_of
from mtpjax.serving import host_pages
from mtpjax.serving.engine_session import SMALL_VOCABULARY, count_experts, move_experts
from mtpjax.serving.host_pages import Outgoing, copy_in, copy_out
from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.program_set import PendingCall, ProgramKey, ProgramSet
from mtpjax.serving.sizes import EngineSettings, check_changing_depth, engine_decoder, resolve_sizes
from mtpjax.serving.snapshots import States, copy_rows, make_snapshots

STOPS_SHAPE = 32, 8  # largest number and length of a request's stop sequences, in tokens


class EngineSession(Session):
    """The session of an engine, with snapshots of recurrent layers and moving experts. All calls come from one thread.

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
        self.settings = settings
        # A mesh is checked here, not in a request's first call.
        params, model, mesh = fit_params(params_to_device(params), with_implementation(model, config), config)
        if settings.host_bytes and mesh is not None and mesh.size > 1:
            raise ValueError("pages in host memory need one device, not a mesh: set host_bytes to 0")
        # Without drafts, no parameters of a drafter are read.
        self.own_draft_params = draft_params if config.num_steps else None
        if self.own_draft_params is not None and mesh is not None:
            require_whole_trunk(mesh.shape)
            self.own_draft_params = jax.device_put(self.own_draft_params, NamedSharding(mesh, PartitionSpec()))
        drafter = make_drafter(config)
        decoder = engine_decoder(settings, config, drafter, model, mesh)
        check_changing_depth(settings, config, decoder)
        limit = check_settings(model, config, drafter)
        self.sizes = resolve_sizes(settings, config, decoder, limit=limit, mesh=mesh)
        draft_params = self.own_draft_params
        if draft_params is None:
            draft_params = drafter.default_params(params, config, model=model)
        self.num_expert_devices = 1 if mesh is None else num_expert_devices(params, mesh.shape)
        if settings.rebalance_experts_every is not None:
            _check_rebalancing(params, model, self.num_expert_devices)
        self.num_compiled = 0  # programs
        self.compile_seconds = 0.0
        self.programs = ProgramSet()
        self.planned: set[ProgramKey] = set()  # programs whose compilation is never counted
        self._used: set[ProgramKey] = set()  # programs that are compiled
        self._first_uses: set[ProgramKey] = set()  # currently running
        self.compiled_at = 0.0  # end of the last first use, of `time.monotonic`
        # Trees of greedy rows are dynamic, which saves passes, so they need programs of their own.
        has_few_logits = model.config.vocab_size <= SMALL_VOCABULARY and config.topk == 1
        self.has_plain = platform_of(mesh) != "cpu" or not has_few_logits
        shape = StateShape(settings.num_slots, self.sizes.capacity, STOPS_SHAPE, SamplingFeatures.all_enabled())
        super().__init__(params, draft_params, decoder=self.sizes.decoder, config=config, mesh=mesh, shape=shape)
        self.snapshots = self._new_snapshots()

    @property
    def model(self) -> MTPModel:
        """The model, fitted to the mesh."""
        return self.decoder.model

    def reset(self) -> None:
        """Makes a state whose slots are all free, and empty snapshots."""
        for leaf in jax.tree.leaves(self.snapshots):
            if not leaf.is_deleted():
                leaf.delete()
        super().reset()
        self.snapshots = self._new_snapshots()

    def _new_snapshots(self) -> States:
        num_rows = self.sizes.shard_snapshots * self.sizes.num_shards
        if not num_rows:
            return ()
        return make_snapshots(self.state.trunk, num_rows, config=self.model.config, mesh=self.mesh)

    def copy_snapshots(self, slots: np.ndarray, rows: np.ndarray, to_state: bool) -> None:
        """Copies one row of each shard between `slots` and `rows` of the snapshots, both `[P]` int32.

        `to_state`: from the snapshots to the slots. `NO_ROW` copies nothing.
        """
        own, config = recurrent_entries(self.state.trunk), self.model.config
        with self._on_device(copy_rows):
            if to_state:
                self.snapshots, own = copy_rows((self.snapshots, own), rows, slots, config=config)
            else:
                own, self.snapshots = copy_rows((own, self.snapshots), slots, rows, config=config)
        self.state = self.state.replace(trunk=replace_recurrent_entries(self.state.trunk, own))

    def move_pages(self, pool: PagePool) -> list[Outgoing]:
        """Starts copying pages that leave the pool to the host, then copies those that return; returns the former."""
        with self._on_device(*host_pages.PROGRAMS):
            copies = copy_out(self.state, pool.outgoing)
            self.state = copy_in(self.state, pool.incoming)
        pool.outgoing, pool.incoming = [], []
        return copies

    def read_pages(self, pages: list[tuple[bytes, int]]) -> list[Outgoing]:
        """Starts copying cached pages to the host; they stay in the pool."""
        with self._on_device(*host_pages.PROGRAMS):
            return copy_out(self.state, pages)

    def expert_placements(self) -> dict[str, np.ndarray]:
        """Returns the expert in each slot, `[S]` int32, by layer."""
        trunk = self.params["trunk"]
        placements = {layer: trunk[layer]["experts"]["placement"] for layer in expert_layers(self.model.config)}
        # Copies, because `move_experts` deletes these arrays.
        return {layer: np.array(tables["expert_of_slot"]) for layer, tables in placements.items()}

    @property
    def count_shape(self) -> tuple[int, int, int]:
        """Texts `[P, b, T]` of a call that counts: as many tokens as the largest prefill call has."""
        return self.sizes.num_shards, self.sizes.prefill_sizes[-1], self.decoder.spec.prefill_chunk

    def count_experts(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Counts the experts that texts choose: `[L, E]` int32 of each layer with experts, on the device.

        `tokens` are right-padded texts of the shape `count_shape`, `lengths` `[P, b]` their lengths; 0: no text.
        """
        capacity = round_up_capacity(tokens.shape[-1])
        with self._on_device(count_experts):
            return count_experts(self.params, tokens, lengths, model=self.model, capacity=capacity)

    def move_experts(self, layer: str, expert_of_slot: np.ndarray) -> None:
        """Moves the experts of a layer to new slots, `expert_of_slot [S]`. Deletes the old arrays."""
        trunk, config = self.params["trunk"], self.model.config
        experts = trunk[layer]["experts"]
        moving = {name: experts[name] for name in (*STACKS, "placement") if name in experts}
        with self._on_device(move_experts):
            moved = move_experts(moving, placement_tables(expert_of_slot, config.n_routed_experts), config=config)
        self.params = {
            **self.params,
            "trunk": {**trunk, layer: {**trunk[layer], "experts": {**experts, **moved}}},
        }
        # The engine's creator may still reference the old arrays: without this, memory would hold both. Calls
        # dispatched earlier are not affected.
        for leaf in jax.tree.leaves(moving):
            leaf.delete()

    # Programs.

    def _static_arguments(self, key: ProgramKey) -> dict[str, Any]:
        """Returns the static arguments of a program."""
        if key.kind not in ("advance", "draft", "verify"):
            return {"decoder": self.decoder}
        min_rows = self.sizes.min_rows[self.sizes.batch_sizes.index(key.size)]
        decoder = (self.decoder.for_plain_rows() if key.plain else self.decoder).replace(min_rows=min_rows)
        max_rounds = {"max_rounds": self.settings.rounds_per_call} if key.kind == "advance" else {}
        return {"decoder": decoder, "depth": key.depth, **max_rounds}

    def _run(self, call: PendingCall) -> Any:
        """Dispatches a call; returns its report, if it has one."""
        program, key, static = call.program, call.key, self._static_arguments(call.key)
        with self._first_use(key), self._on_device(*self._counted(program, key)):
            return self.call(program, *call.arrays, **static)

    def _counted(self, program: Any, key: ProgramKey) -> tuple[Any, ...]:
        """Returns the program if its compilation is counted."""
        if key.kind in ("draft", "verify"):
            key = key._replace(kind="masked round")
        return () if key in self.planned else (program,)

    @property
    def is_compiling(self) -> bool:
        """True while a call uses a program for the first time and may compile it."""
        return bool(self._first_uses)

    @contextlib.contextmanager
    def _first_use(self, key: ProgramKey) -> Iterator[None]:
        """Marks the first call of a program, which may take minutes without being hung."""
        if key in self._used:
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
        with self.on_device(), explain_param_errors(self.params, self.model):
            before, begin = _num_programs(calls), time.perf_counter()
            yield
            if (num_new := _num_programs(calls) - before) > 0:
                self.num_compiled += num_new
                self.compile_seconds += time.perf_counter() - begin


def _check_rebalancing(params: dict, model: MTPModel, num_devices: int) -> None:
    if not model.config.is_moe:
        raise ValueError("the model has no routed experts that could be rebalanced")
    if num_devices == 1:
        raise ValueError("experts are rebalanced between devices: use a mesh that splits them over data or expert")
    if not all("placement" in params["trunk"][layer]["experts"] for layer in expert_layers(model.config)):
        raise ValueError("experts can be rebalanced only after `place_all_layers`, which gives them slots")


def _num_programs(calls: tuple[Any, ...]) -> int:
    """Returns the number of programs that this process has compiled for calls."""
    return sum(call.num_programs for call in calls)
