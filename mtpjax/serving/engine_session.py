"""The device side of an engine, which keeps the running state and dispatches the calls that update it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax.compat import library_settings
from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.device import fit_params, with_implementation
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.session import Session, in_every_process
from mtpjax.decoding.state import DecodeState, StateShape
from mtpjax.drafters.trained import require_whole_trunk
from mtpjax.inference.requests import (
    check_argument_types,
    check_settings,
    explain_param_errors,
    make_drafter,
    params_to_device,
)
from mtpjax.messages import require
from mtpjax.models import expert_moves
from mtpjax.models.cache import recurrent_entries, replace_recurrent_entries
from mtpjax.models.config import ModelConfig
from mtpjax.models.expert_counts import count_on_shards, expert_layers
from mtpjax.models.expert_placement import STACKS, num_expert_devices, placement_tables
from mtpjax.models.model import MTPModel
from mtpjax.models.params import check_params
from mtpjax.models.sharding import path_name, platform_of
from mtpjax.serving import host_pages
from mtpjax.serving.host_pages import Entries, Outgoing, copy_in, copy_out
from mtpjax.serving.program_set import PendingCall, ProgramKey
from mtpjax.serving.sizes import EngineSettings, resolve_sizes
from mtpjax.serving.snapshots import NO_ROW, States, copy_rows, make_snapshots

STOPS_SHAPE = 32, 8  # maximum number of a request's stop sequences, and their maximum length in tokens
# With this few logits, sampling options have no measurable cost on a CPU, so greedy rows need no separate programs.
SMALL_VOCABULARY = 1024


class EngineSession(Session):
    """An engine's session, with snapshots of recurrent states and movable experts. One thread makes all calls.

    Args:
        params: model parameters, with unrolled layers; the engine uses their mesh.
        model: the model.
        config: settings that all requests share; limits and stop tokens come from each request.
        settings: sizes.
        draft_params: the drafter's own parameters; None if it has no parameters or uses the model's MTP modules.
        announce: sends the name, arguments and key of each call to the other processes of the mesh, before the call is
            dispatched here; None if this is the only process.

    Raises:
        ValueError: settings contradict each other or the model.
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
        announce: Callable[..., None] | None = None,
    ):
        if config.depth_policy != "fixed":
            raise ValueError("an engine chooses the depth itself, based on its load: set depth_policy to 'fixed'")
        self.settings, self.announce = settings, announce
        # Check the mesh now, so that an error does not first appear during a request.
        self._given_model = model = with_implementation(model, config)
        params, model, mesh = fit_params(params_to_device(params), model, config)
        if settings.host_bytes and mesh is not None and mesh.size > 1:
            raise ValueError("pages in host memory need one device, not a mesh: set host_bytes to 0")
        # Without drafts, the drafter's parameters are not read.
        self.own_draft_params = self._placed(draft_params, mesh) if config.num_steps else None
        drafter = make_drafter(config)
        limit = check_settings(model, config, drafter)
        self.sizes = resolve_sizes(settings, config, drafter, model, mesh, limit=limit)
        draft_params = self.own_draft_params
        if draft_params is None:
            draft_params = drafter.default_params(params, config, model=model)
        self.num_expert_devices = 1 if mesh is None else num_expert_devices(params, mesh.shape)
        if settings.rebalance_experts_every is not None:
            _check_rebalancing(params, model, self.num_expert_devices)
        self.num_compiled = 0  # programs
        self.compile_seconds = 0.0
        self.planned: set[ProgramKey] = set()  # programs whose compilation is never counted
        self._used: set[ProgramKey] = set()  # programs that are compiled
        self._first_uses: set[ProgramKey] = set()  # currently running
        self.compiled_at = 0.0  # end of the most recent first call of a program, by `time.monotonic`
        # With `topk` above 1, greedy rows draft dynamic trees, which save passes, so they need separate programs.
        has_few_logits = model.config.vocab_size <= SMALL_VOCABULARY and config.topk == 1
        self.has_plain = platform_of(mesh) != "cpu" or not has_few_logits
        shape = StateShape(settings.num_slots, self.sizes.capacity, STOPS_SHAPE, SamplingFeatures.all_enabled())
        # JAX compiles a program again if an array is committed to its device and was not before, as a new parameter
        # may be.
        params, draft_params = _committed((params, draft_params))
        super().__init__(params, draft_params, decoder=self.sizes.decoder, config=config, mesh=mesh, shape=shape)
        self.snapshots = self._new_snapshots()

    @staticmethod
    def _placed(draft_params: Any, mesh: Mesh | None) -> Any:
        """Copies the drafter's own parameters to every device of the mesh."""
        if draft_params is None or mesh is None:
            return draft_params
        require_whole_trunk(mesh.shape)
        return jax.device_put(draft_params, NamedSharding(mesh, PartitionSpec()))

    def fit_params(self, params: dict, draft_params: Any = None) -> tuple[dict, Any]:
        """Checks new parameters and moves them to the session's devices; callable from any thread.

        Args:
            params: parameters of the model that the session was made with.
            draft_params: the drafter's own parameters; None keeps the current ones.

        Returns:
            The parameters of the model, and the drafter's own ones or None, for `set_params`.

        Raises:
            ValueError: a name, shape or dtype differs from the current parameters.
        """
        require(self.settings.rebalance_experts_every is None, "parameters cannot be replaced while experts move")
        check_argument_types(params, model=self._given_model)
        params = params_to_device(params)
        if _types(params) != _types(self.params):
            check_params(params, self._given_model)
            params, _, _ = fit_params(params, self._given_model, self.config, self.mesh)
        if draft_params is not None:
            require(self.own_draft_params is not None, "the drafter has no parameters of its own")
            own = self._placed(params_to_device(draft_params), self.mesh)
            draft_params = _like(own, self.own_draft_params, "draft_params")
        return _like(params, self.params, "params"), draft_params

    def set_params(self, params: dict, draft_params: Any) -> None:
        """Replaces the parameters by those that `fit_params` returned. The caches must not be used any more."""
        self.params = params
        if draft_params is not None:
            self.own_draft_params = draft_params
        if self.own_draft_params is not None:
            self.draft_params = self.own_draft_params
        else:
            own = self.decoder.drafter.default_params(params, self.config, model=self.decoder.model)
            self.draft_params = _like(own, self.draft_params, "draft_params")

    def reset(self) -> None:
        """Makes a state with all slots free, and empty snapshots."""
        self.tell_others("reset")
        for leaf in jax.tree.leaves(self.snapshots):
            if not leaf.is_deleted():
                leaf.delete()
        super().reset()
        self.snapshots = self._new_snapshots()

    def _new_state(self) -> DecodeState:
        return _committed(super()._new_state())

    def _new_snapshots(self) -> States:
        num_rows = self.sizes.shard_snapshots * self.sizes.num_shards
        if not num_rows:
            return ()
        config = self.decoder.model.config
        return _committed(make_snapshots(self.state.trunk, num_rows, config=config, mesh=self.mesh))

    def copy_snapshots(self, slots: np.ndarray, rows: np.ndarray, to_state: bool) -> None:
        """Copies one row per shard between `slots` and snapshot `rows`, both `[P]` int32.

        If `to_state`, copies from snapshots to slots, otherwise from slots to snapshots. `NO_ROW` copies nothing.
        """
        self.tell_others("copy_snapshots", slots, rows, to_state)
        own, config = recurrent_entries(self.state.trunk), self.decoder.model.config
        with self._on_device(copy_rows):
            if to_state:
                self.snapshots, own = copy_rows((self.snapshots, own), rows, slots, config=config)
            else:
                own, self.snapshots = copy_rows((own, self.snapshots), slots, rows, config=config)
        self.state = self.state.replace(trunk=replace_recurrent_entries(self.state.trunk, own))

    def move_pages(
        self, outgoing: list[tuple[bytes, int]], incoming: Sequence[tuple[int, Entries]] = ()
    ) -> list[Outgoing]:
        """Starts copying `outgoing` pages to the host, then writes `incoming` pages. Returns the outgoing copies."""
        with self._on_device(*host_pages.PROGRAMS):
            copies = copy_out(self.state, outgoing)
            self.state = copy_in(self.state, incoming)
        return copies

    def expert_placements(self) -> dict[str, np.ndarray]:
        """Returns the expert in each slot, `[S]` int32, by layer."""
        trunk = self.params["trunk"]
        placements = {layer: trunk[layer]["experts"]["placement"] for layer in expert_layers(self.decoder.model.config)}
        # Copies, because `move_experts` deletes these arrays.
        return {layer: np.array(tables["expert_of_slot"]) for layer, tables in placements.items()}

    @property
    def count_shape(self) -> tuple[int, int, int]:
        """Shape `[P, b, T]` of the texts in one `count_experts` call: as many tokens as in the largest prefill call."""
        return self.sizes.num_shards, self.sizes.prefill_sizes[-1], self.decoder.spec.prefill_chunk

    def count_experts(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Counts the tokens routed to each expert in the L layers with experts. Returns `[L, E]` int32 on the device.

        `tokens` are right-padded texts of shape `count_shape`, and `lengths` `[P, b]` are their lengths, 0 for no text.
        """
        self.tell_others("count_experts", tokens, lengths)
        capacity = round_up_capacity(tokens.shape[-1])
        with self._on_device(count_experts):
            return count_experts(self.params, tokens, lengths, model=self.decoder.model, capacity=capacity)

    def move_experts(self, layer: str, expert_of_slot: np.ndarray) -> None:
        """Moves a layer's experts to the slots that `expert_of_slot` `[S]` assigns. Deletes the old arrays."""
        self.tell_others("move_experts", layer, expert_of_slot)
        trunk, config = self.params["trunk"], self.decoder.model.config
        experts = trunk[layer]["experts"]
        moving = {name: experts[name] for name in (*STACKS, "placement") if name in experts}
        with self._on_device(move_experts):
            moved = move_experts(moving, placement_tables(expert_of_slot, config.n_routed_experts), config=config)
        trunk = {**trunk, layer: {**trunk[layer], "experts": {**experts, **moved}}}
        self.params = {**self.params, "trunk": trunk}
        # Delete the old arrays, because the engine's creator may still reference them and both copies would stay in
        # memory. Calls dispatched earlier are not affected.
        for leaf in jax.tree.leaves(moving):
            leaf.delete()

    # Programs.

    def tell_others(self, name: str, *arguments: Any, key: ProgramKey | None = None) -> None:
        """Sends a call to the other processes, so that all start it at about the same time."""
        if self.announce is not None:
            self.announce(name, *arguments, key=key)

    def static_arguments(self, key: ProgramKey) -> dict[str, Any]:
        """Returns the static arguments of a program."""
        if key.kind not in ("advance", "draft", "verify"):
            return {"decoder": self.decoder}
        min_rows = self.sizes.min_rows[self.sizes.batch_sizes.index(key.size)]
        decoder = (self.decoder.for_plain_rows() if key.plain else self.decoder).replace(min_rows=min_rows)
        max_rounds = {"max_rounds": self.settings.rounds_per_call} if key.kind == "advance" else {}
        return {"decoder": decoder, "depth": key.depth, **max_rounds}

    def run(self, call: PendingCall) -> Any:
        """Dispatches a call; returns its report, if it has one."""
        program, key, static = call.program, call.key, self.static_arguments(call.key)
        self.tell_others(program.plain.__name__, *call.arrays, key=key)
        with self.first_use(key), self._on_device(*self._counted(program, key)):
            return self.call(program, *call.arrays, **static)

    def compile_call(self, call: PendingCall) -> None:
        """Compiles the program of a call in the caller's thread."""
        with self._on_device():
            self.compile(call.program, *call.arrays, **self.static_arguments(call.key))
        # From now on, a call that does not return is hung, not compiling.
        self._used.add(call.key)

    def warm_up_copies(self, num_calls: int) -> None:
        """Compiles the programs that move pages and snapshots, and waits for all dispatched calls."""
        for _ in range(num_calls):
            if self.settings.host_bytes:
                with self._on_device(*host_pages.PROGRAMS):
                    self.state = host_pages.warm_up(self.state)
            if self.snapshots:
                nowhere = np.full(self.sizes.num_shards, NO_ROW, np.int32)
                for to_state in (False, True):
                    self.copy_snapshots(nowhere, nowhere, to_state=to_state)
        jax.block_until_ready(self.state)

    def _counted(self, program: Any, key: ProgramKey) -> tuple[Any, ...]:
        """Returns a tuple of the program if its compilation is counted, otherwise an empty tuple."""
        if key.kind in ("draft", "verify"):
            key = key._replace(kind="masked round")
        return () if key in self.planned else (program,)

    @property
    def is_compiling(self) -> bool:
        """True while a call uses a program for the first time and may compile it."""
        return bool(self._first_uses)

    @contextlib.contextmanager
    def first_use(self, key: ProgramKey) -> Iterator[None]:
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
        """Sets up the context for calls on the device, and counts the programs that `calls` compile."""
        with self.on_device(), explain_param_errors(self.params, self.decoder.model):
            before, begin = _num_programs(calls), time.perf_counter()
            yield
            if (num_new := _num_programs(calls) - before) > 0:
                self.num_compiled += num_new
                self.compile_seconds += time.perf_counter() - begin


@one_graph(static_argnames=("model", "capacity"))
def count_experts(params: dict, tokens: jax.Array, lengths: jax.Array, *, model: MTPModel, capacity: int) -> jax.Array:
    """Returns how many tokens chose each expert, `[L, E]` int32; see `count_on_shards`."""
    return in_every_process(count_on_shards(params, tokens, lengths, model=model, capacity=capacity))


@one_graph(static_argnames=("config",))
def move_experts(experts: dict[str, Any], placement: dict[str, jax.Array], *, config: ModelConfig) -> dict[str, Any]:
    """Moves the experts of a layer to new slots; see `mtpjax.models.expert_moves.move_experts`."""
    return expert_moves.move_experts(experts, placement, config=config)


def _committed(tree: Any) -> Any:
    """Commits arrays to the devices that they are on, and makes weak types strong. Copies nothing else."""
    return jax.tree.map(lambda leaf: _put(leaf, leaf.sharding), tree)


def _put(leaf: jax.Array, sharding: Any) -> jax.Array:
    # A weakly typed array, such as `jnp.full(shape, 1.0)`, is a different type for JAX's cache of programs.
    return jax.device_put(jax.lax.convert_element_type(leaf, leaf.dtype) if leaf.weak_type else leaf, sharding)


def _types(tree: Any) -> dict[str, str]:
    """Returns the dtype and shape of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _like(new: Any, old: Any, name: str) -> Any:
    """Returns the arrays of `new` on the devices of `old`. Raises `ValueError` unless their types are the same."""
    found, wanted = _types(new), _types(old)
    for path in [*wanted, *found]:
        types = [of.get(path, "missing") for of in (found, wanted)]
        require(types[0] == types[1], f"{name}: {path} is {types[0]}; in the engine it is {types[1]}")
    return jax.tree.map(lambda leaf, like: _put(leaf, like.sharding), new, old)


def _check_rebalancing(params: dict, model: MTPModel, num_devices: int) -> None:
    require(model.config.is_moe, "the model has no routed experts to rebalance")
    require(num_devices > 1, "experts are rebalanced between devices: use a mesh that splits them over data or expert")
    if not all("placement" in params["trunk"][layer]["experts"] for layer in expert_layers(model.config)):
        raise ValueError("experts can be rebalanced only after `place_all_layers`, which gives them slots")


def _num_programs(calls: tuple[Any, ...]) -> int:
    """Returns the number of programs that this process has compiled for `calls`."""
    return sum(call.num_programs for call in calls)
