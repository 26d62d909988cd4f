"""Defines the decoder, which stores a call's static settings, computes its cache sizes, and makes its empty state."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.decoding.acceptance.rules import RULES, find_rule
from mtpjax.decoding.capacity import MIN_PREFILL_CHUNK, choose_prefill_chunk, min_rows_per_pass, round_up_capacity
from mtpjax.decoding.config import KV_CACHE_DTYPES, DecodeConfig
from mtpjax.decoding.depth_policy import can_speed_up, init_policy
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.sampling import SamplingArrays, TokenHistory
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Acceptance, DecodeState, Draft, NewRows, RowSettings, StateShape, start_rows
from mtpjax.models.cache import empty_cache
from mtpjax.models.decoding_layout import constrain_state
from mtpjax.models.model import MTPModel, TrunkOutput
from mtpjax.models.sharding import platform_of
from mtpjax.models.view import CONTIGUOUS, Pages, read_rows


class Weights(flax.struct.PyTreeNode):
    """The arrays that rounds read but do not change."""

    params: dict[str, Any]  # the model's parameters
    drafter: Any  # from `Drafter.prepare`


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A draft method. This base class drafts nothing, which makes every round a plain decoding step.

    A drafter is a frozen dataclass, so it is hashable and static under `jax.jit`. Its arrays live in its parameters (a
    separate tree) and in its state, whose leaves all have the batch as their first axis. A round calls `propose`, then
    `select_states` on the verification pass, then `commit`. Prefill calls `select_states` and `extend` once per chunk.
    An adaptive call keeps its depth while `backlog_fits` is True, and calls `drain_backlog` before it continues at any
    depth.

    Methods receive the round's `Decoder` (its `spec.num_steps` is the depth of this round), the `Weights` (their
    `drafter` is the result of `prepare`), and the rows' `DecodeState` (its `tokens` from `length` on are scratch
    space). All methods run inside a trace, except `check`, `default_params`, `num_scratch_slots` and `max_shift`.

    The text stays exact with any drafter if `Draft.probabilities` is the distribution that the tokens were actually
    drawn from. It is the drafter's distribution for sampled tokens, and one-hot for all others.

    Attributes:
        layer_ids: trunk layers whose input states the drafter reads (`TrunkOutput.states`).
        limits: unsupported features of this class. Calls that need one of them are rejected before `check` runs.
    """

    layer_ids: tuple[int, ...] = ()
    limits: ClassVar[DraftLimits] = DraftLimits()

    # Before the loop.

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the drafter does not support the model or settings; not called for plain decoding."""

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> Any:
        """Returns the drafter's parameters for calls without `draft_params`, as arguments of the compiled call."""
        return None

    def prepare(self, params: dict, draft_params: Any, *, model: MTPModel) -> Any:
        """Converts the model's and the drafter's parameters, once per call, to the arrays that every round reads."""
        return draft_params

    def num_scratch_slots(self, decoder: "Decoder") -> int:
        """Returns the maximum number of cache slots that drafting writes after the committed text."""
        return 0

    def max_shift(self, model: MTPModel) -> int:
        """Returns the maximum distance from a cache entry's position to a token that it depends on."""
        return 0

    def init(self, decoder: "Decoder", batch: int, capacity: int, dtype: Any) -> Any:
        """Makes the drafter's state for free slots, as a tree of arrays `[B, ...]`.

        Args:
            batch: number of slots, B.
            capacity: cache slots per row, L.
            dtype: dtype of the activations, and of the caches unless `spec.kv_cache_dtype` sets a different one.
        """
        return ()

    # Prefill calls these methods once per chunk. `select_states` also runs on every verification pass.

    def select_states(self, decoder: "Decoder", output: TrunkOutput) -> Any:
        """Returns the trunk states to keep from a pass, as a tree of arrays `[B, T, ...]`."""
        return ()

    def extend(self, decoder: "Decoder", weights: Weights, state: DecodeState, states: Any, start: jax.Array) -> Any:
        """Processes one prefill chunk, so that the drafter's cache covers the prompt; returns the drafter's new state.

        Args:
            state: the rows, whose `tokens` and `length` are the prompts.
            states: from `select_states`, `[B, T, ...]` for the chunk's T tokens.
            start: `[B]` position of the chunk's first token.
        """
        return state.drafter

    def num_extended(self, draft_state: Any) -> jax.Array | None:
        """Returns the number of leading positions whose entries are final, `[B]`; None: no limit."""
        return None

    # In every round, `propose` runs before verification, and `commit` runs after acceptance.

    def propose(self, decoder: "Decoder", weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Drafts `spec.num_nodes` nodes in `spec.num_steps` levels; returns them and a state with a new `drafter`."""
        return Draft(read_rows(state.tokens, state.length - 1, 1)), state

    def commit(self, decoder: "Decoder", state: DecodeState, states: Any, accepted: Acceptance) -> Any:
        """Keeps the trunk states of a verification pass that the next round needs; returns the drafter's new state.

        Args:
            state: the rows before the accepted tokens are appended.
            states: from `select_states`, `[B, K+1, ...]` along the accepted path, which starts with the pending token.
            accepted: the acceptance rule's decision.
        """
        return state.drafter

    # For rounds of varying depth (`depth_policy="adaptive"`). `decoder` is the decoder for the deepest round.

    def backlog_fits(self, decoder: "Decoder", state: DecodeState, depth: jax.Array | int) -> jax.Array:
        """Returns whether a round of this depth can follow, `[]` bool. If not, the loop calls `drain_backlog`."""
        return jnp.ones((), bool)

    def drain_backlog(self, decoder: "Decoder", weights: Weights, state: DecodeState, depth: jax.Array) -> DecodeState:
        """Processes the backlog from rounds of depth 0 until `backlog_fits` is True."""
        return state


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model, a draft method and the shape of a round. Hashable, because compiled calls take it as a static argument.

    Its methods compute all cache sizes and make empty states.

    Attributes:
        model: trunk and MTP modules.
        drafter: the draft method.
        spec: the shape of a round.
    """

    model: MTPModel
    drafter: Drafter
    spec: DecodeSpec

    @classmethod
    def make(
        cls,
        config: DecodeConfig,
        drafter: Drafter,
        model: MTPModel,
        mesh: Mesh | None,
        *,
        batch: int,
        max_length: int,
        longest_prompt: int | None = None,
        is_greedy: bool = False,
    ) -> "Decoder":
        """Resolves the static settings of a call for its platform and batch size.

        Args:
            drafter: the draft method that `config` selects.
            model: the model, as `fit_params` returns it.
            mesh: mesh of the parameters; None: one device.
            max_length: maximum number of tokens in a sequence, prompt included.
            longest_prompt: number of tokens in the longest prompt; None: any length that `max_length` allows.
            is_greedy: whether every row is at temperature 0.

        Raises:
            ValueError: the rule is "greedy", but a row has a temperature above 0.
        """
        sizes = {"longest_prompt": longest_prompt or max_length, "max_length": max_length}
        implementation, platform = model.implementation, platform_of(mesh)
        chunk = choose_prefill_chunk(model.config, batch, platform, implementation=implementation, **sizes)
        min_rows = config.min_rows or min_rows_per_pass(model.config, batch, platform)
        spec = make_spec(config, is_greedy=is_greedy, min_rows=min_rows, prefill_chunk=chunk)
        # No prompt exceeds the model's maximum length, and the caches have room for a whole chunk, so a chunk wider
        # than this length would only waste memory.
        max_chunk = max(model.config.max_position_embeddings, MIN_PREFILL_CHUNK)
        return cls(model, drafter, dataclasses.replace(spec, prefill_chunk=min(spec.prefill_chunk, max_chunk)))

    def replace(self, **changes: Any) -> "Decoder":
        """Returns the decoder with some fields of its spec changed."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    def at_depth(self, num_steps: int) -> "Decoder":
        """Returns the decoder for rounds with `num_steps` draft levels; see `DecodeSpec.at_depth`."""
        return dataclasses.replace(self, spec=self.spec.at_depth(num_steps))

    def for_plain_rows(self) -> "Decoder":
        """Returns a session's decoder for greedy rows without sampling options or log-probabilities."""
        return self.replace(rule=RULES["greedy"], logprobs=False)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, V."""
        return self.model.config.vocab_size

    # Sizes of the caches.

    @property
    def slots_per_round(self) -> int:
        """Maximum number of cache slots that a round's verify pass or drafting writes after the committed text."""
        # A paged state serves any request, so it also needs room for calls whose rows are all greedy. They draft
        # dynamic trees, which may be wider than the trees of a sampling rule.
        decoders = (self,) if self.spec.pool is None else (self, self.for_plain_rows())
        return max(max(each.spec.verify_width, each.drafter.num_scratch_slots(each)) for each in decoders)

    def capacity(self, max_length: int, longest_prompt: int | None = None) -> int:
        """Computes the cache slots per row, L.

        Attention reads every slot of a contiguous cache, so the capacity is the smallest that all writes fit into.
        Writes past the end would be shifted back over committed entries.

        Args:
            max_length: maximum number of tokens in a sequence, prompt included.
            longest_prompt: tokens in the longest prompt, if prefill starts at position 0; None: it may start anywhere.

        Returns:
            Slots per row, rounded up by `round_up_capacity`.
        """
        chunk, num_slots = self.spec.prefill_chunk, self.slots_per_round
        if longest_prompt is None:
            return round_up_capacity(max_length + max(num_slots, chunk) + 1)
        # Prefill writes whole chunks, and the last round may start at the full length.
        return round_up_capacity(max(-(-longest_prompt // chunk) * chunk, max_length) + num_slots + 1)

    def num_pages_of(self, length: int) -> int:
        """Returns the number of pages for a text of `length` tokens plus scratch slots; needs `spec.pool`."""
        assert self.spec.pool is not None
        return -(-(length + self._paged_slots_after_text) // self.spec.pool[1])

    def max_length_of(self, num_pages: int) -> int:
        """Returns the maximum length, in tokens, of a text with `num_pages` pages; needs `spec.pool`."""
        assert self.spec.pool is not None
        return num_pages * self.spec.pool[1] - self._paged_slots_after_text

    @property
    def _paged_slots_after_text(self) -> int:
        # A module stores an entry up to `max_shift` positions after the position that the entry belongs to.
        return self.slots_per_round + 1 + self.drafter.max_shift(self.model)

    # Arrays.

    def prepare(self, params: dict, draft_params: Any) -> Weights:
        """Computes the arrays that rounds read. Work that depends only on parameters is done here, once per call."""
        return Weights(params, self.drafter.prepare(params, draft_params, model=self.model))

    def empty_state(
        self,
        shape: StateShape,
        dtype: Any,
        *,
        depth_costs: jax.Array | None = None,
        depth_rates: jax.Array | None = None,
        drafting_disabled: jax.Array | bool = False,
    ) -> DecodeState:
        """Makes a state whose slots are all free.

        Args:
            shape: slots, capacity and sampling options.
            dtype: dtype of the activations, and of the caches unless the spec sets a different one.
            depth_costs: `[K+1]` durations of rounds, for an adaptive depth; None: fixed depth.
            depth_rates: `[K]` measured acceptance rates, for an adaptive depth; None: unknown.
            drafting_disabled: True if drafting never pays off, so that every round is a plain decoding step.
        """
        # Every slot contains a sequence of one token 0, so that indices such as `length - 1` stay in range. The number
        # and shapes of the arrays depend only on static settings, so later requests do not recompile.
        (batch, capacity, stops, features), config, spec, storage = shape, self.model.config, self.spec, CONTIGUOUS
        if spec.pool is not None:
            storage = Pages.empty(batch, capacity, spec.pool, self.drafter.max_shift(self.model))

        def zeros(*sizes: int, dtype: Any = jnp.int32) -> jax.Array:
            return jnp.zeros((batch, *sizes), dtype)

        sampling = SamplingArrays.greedy(batch, config.vocab_size, features)
        settings = RowSettings(
            prompt_length=jnp.ones(batch, jnp.int32),
            limit=jnp.ones(batch, jnp.int32),
            stops=jnp.full((batch, *stops), -1, jnp.int32),
            rule_params=zeros(2, dtype=jnp.float32),
            sampling=sampling,
        )
        return DecodeState(
            settings=settings,
            tokens=zeros(capacity),
            origin=zeros(capacity, dtype=jnp.int8),
            logprobs=zeros(capacity if spec.logprobs else 0, dtype=jnp.float32),
            length=jnp.ones(batch, jnp.int32),
            done=jnp.ones(batch, bool),
            stopped=zeros(dtype=bool),
            failed=zeros(dtype=bool),
            history=TokenHistory.empty(batch, config.vocab_size, sampling),
            trunk=empty_cache(config, config.trunk_kinds, batch, capacity, dtype, spec.kv_cache_dtype, spec.pool),
            drafter=self.drafter.init(self, batch, capacity, dtype),
            storage=storage,
            policy=None if depth_costs is None else init_policy(depth_costs, batch, prior=depth_rates),
            drafting_disabled=jnp.asarray(drafting_disabled),
            rounds=zeros(),
            proposed=zeros(spec.num_steps),
            accepted=zeros(spec.num_steps),
            discarded=zeros(),
        )

    def make_state(
        self,
        params: dict,
        config: DecodeConfig,
        mesh: Mesh | None,
        *,
        shape: StateShape | None = None,
        rows: NewRows | None = None,
    ) -> DecodeState:
        """Makes a state on the device, either with all slots free or with requests that still need prefill.

        Args:
            params: model parameters, which determine the dtype.
            config: settings, which include the costs and rates of an adaptive depth.
            mesh: mesh of the parameters, on which each device makes its shard; None: one device.
            shape: the state's shape; None: the shape that `rows` need.
            rows: a request for every slot; None: all slots are free.
        """
        if shape is None:
            assert rows is not None
            shape = StateShape.of(rows)
        # If drafting cannot be faster than plain decoding at these costs, an adaptive call disables it and need not
        # keep the drafter up to date.
        costs, rates, is_disabled = None, None, False
        if self.spec.is_adaptive and config.depth_costs is not None:
            costs = np.asarray(config.depth_costs, np.float32)
            rates = None if config.depth_rates is None else np.asarray(config.depth_rates, np.float32)
            is_disabled = not can_speed_up(costs)
        return _make_state(
            rows,
            decoder=self,
            shape=shape,
            dtype=params["embedding"].dtype,
            mesh=mesh,
            depth_costs=costs,
            depth_rates=rates,
            drafting_disabled=np.bool_(is_disabled),
        )


def make_spec(config: DecodeConfig, *, is_greedy: bool, min_rows: int = 1, prefill_chunk: int = 64) -> DecodeSpec:
    """Resolves the settings of one call to a spec, with `acceptance="auto"` replaced by a rule.

    Args:
        is_greedy: whether every row is at temperature 0.
        min_rows: minimum number of token rows per pass (`mtpjax.decoding.capacity.min_rows_per_pass`).
        prefill_chunk: tokens per row in one prefill pass, unless the config sets it.

    Raises:
        ValueError: the rule is "greedy", but a row has a temperature above 0.
    """
    # 1. "auto" picks an exact rule: it compares drafts with the arg-max for greedy rows, and uses block verification
    #    for sampled chains and recursive rejection for sampled trees.
    is_tree = config.topk > 1 and config.num_steps > 0
    rule = config.rule or RULES["greedy" if is_greedy else "recursive" if is_tree else "block"]
    # 2. On a chain the rules for fixed trees reduce to chain rules, which cost less.
    if not is_tree and rule.on_chain is not None:
        rule = find_rule(rule.on_chain)
    if rule.follows == "arg-max" and not is_greedy:
        raise ValueError(
            "acceptance 'greedy' supports only temperature 0; use 'auto' or an exact sampling rule for sampled rows"
        )
    # 3. Without drafts, the rule only chooses the next token, which is the arg-max or a sample from the target.
    if not config.num_steps:
        rule = RULES["greedy" if is_greedy else "sample"]
    return DecodeSpec(
        num_steps=config.num_steps,
        topk=config.topk if config.num_steps else 1,
        num_nodes=config.num_nodes,
        rule=rule,
        is_adaptive=config.depth_policy == "adaptive" and config.num_steps > 0,
        window=None if config.draft_window is None else (config.draft_window, config.draft_sinks),
        min_rows=min_rows,
        prefill_chunk=config.prefill_chunk or prefill_chunk,
        logprobs=config.logprobs,
        kv_cache_dtype=KV_CACHE_DTYPES[config.kv_cache_dtype],
    )


# This function is jitted so that one dispatch transfers the requests and allocates all of a state's buffers.
@functools.partial(jax.jit, static_argnames=("decoder", "shape", "dtype", "mesh"))
def _make_state(
    rows: NewRows | None, *, decoder: Decoder, shape: StateShape, dtype: Any, mesh: Mesh | None, **depth: Any
) -> DecodeState:
    state = decoder.empty_state(shape, dtype, **depth)
    state = state if rows is None else start_rows(state, rows, vocab_size=decoder.vocab_size)
    return state if mesh is None else constrain_state(state, decoder.model.config, mesh)
