"""The decoder: the static settings of a compiled call, the sizes of its caches, and its empty state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.decoding.acceptance.rules import RULES
from mtpjax.decoding.capacity import MIN_PREFILL_CHUNK, choose_min_rows, choose_prefill_chunk, round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.depth_policy import can_speed_up, init_policy
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures, TokenHistory
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, RowSettings, start_rows
from mtpjax.models.cache import empty_cache
from mtpjax.models.decoding_layout import constrain_state
from mtpjax.models.model import MTPModel
from mtpjax.models.pages import NO_PAGE
from mtpjax.models.sharding import platform_of
from mtpjax.models.view import Pages


class Weights(flax.struct.PyTreeNode):
    """The arrays that rounds only read."""

    params: dict[str, Any]  # of the model
    drafter: Any  # from `Drafter.prepare`


class StateShape(NamedTuple):
    """The shape of a `DecodeState`."""

    batch: int  # slots, B
    capacity: int  # cache slots per row, L
    stops: tuple[int, ...] = (8, 1)  # largest number and length of a row's stop sequences, (N, Z)
    features: SamplingFeatures = SamplingFeatures()  # sampling options that are compiled in

    @classmethod
    def of(cls, rows: NewRows) -> "StateShape":
        """Returns the shape of a state of exactly these requests."""
        settings = rows.settings
        batch, capacity = rows.tokens.shape
        return cls(batch, capacity, settings.stops.shape[1:], settings.sampling.features)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model, a draft method and the shape of a round. Hashable: the static argument of every compiled call.

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
            drafter: the draft method of these settings.
            model: the model, as `fit_params` returns it.
            mesh: mesh of the parameters; None: one device.
            max_length: maximum tokens of a sequence, prompt included.
            longest_prompt: tokens of the longest prompt; None: any that `max_length` allows.
            is_greedy: every row is at temperature 0.

        Raises:
            ValueError: rule "greedy" with rows at a temperature above 0.
        """
        longest = max_length if longest_prompt is None else longest_prompt
        chunk = choose_prefill_chunk(model, batch, platform_of(mesh), longest_prompt=longest, max_length=max_length)
        min_rows = choose_min_rows(config, model, platform_of(mesh), batch=batch)
        spec = DecodeSpec.from_config(config, is_greedy=is_greedy, min_rows=min_rows, prefill_chunk=chunk)
        # No prompt is longer than the model's positions, and caches hold a whole chunk, so a wider one only wastes
        # memory.
        max_chunk = max(model.config.max_position_embeddings, MIN_PREFILL_CHUNK)
        return cls(model, drafter, dataclasses.replace(spec, prefill_chunk=min(spec.prefill_chunk, max_chunk)))

    def replace(self, **changes: Any) -> "Decoder":
        """Returns the decoder with changed fields of its spec."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    def at_depth(self, num_steps: int) -> "Decoder":
        """Returns the decoder of rounds with `num_steps` draft levels; see `DecodeSpec.at_depth`."""
        return dataclasses.replace(self, spec=self.spec.at_depth(num_steps))

    def for_plain_rows(self) -> "Decoder":
        """Returns the decoder of a session for rows that are all greedy, without options or log-probabilities."""
        return self.replace(rule=RULES["greedy"], logprobs=False)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    # Sizes of the caches.

    @property
    def slots_per_round(self) -> int:
        """Maximum number of cache slots that a round writes after the committed text: its verify pass or drafting."""
        # A state with pages serves any request. If all rows are greedy they draft dynamic trees, which may be wider
        # than those of a sampling rule.
        decoders = (self,) if self.spec.pool is None else (self, self.for_plain_rows())
        return max(max(each.spec.verify_width, each.drafter.num_scratch_slots(each)) for each in decoders)

    def capacity(self, max_length: int, longest_prompt: int | None = None) -> int:
        """Computes the cache slots per row, L.

        Attention reads every slot of a contiguous cache, so the capacity is the smallest that all writes fit into.
        Writes past it would be shifted back over committed entries.

        Args:
            max_length: maximum tokens of a sequence, prompt included.
            longest_prompt: tokens of the longest prompt, whose chunks start at position 0; None: chunks start anywhere.

        Returns:
            Slots per row, rounded up by `round_up_capacity`.
        """
        chunk, num_slots = self.spec.prefill_chunk, self.slots_per_round
        if longest_prompt is None:
            return round_up_capacity(max_length + max(num_slots, chunk) + 1)
        # Prefill writes whole chunks, and the last round may start at the full length.
        return round_up_capacity(max(-(-longest_prompt // chunk) * chunk, max_length) + num_slots + 1)

    def num_pages_of(self, length: int) -> int:
        """Returns the pages of a text of `length` tokens and of the slots after it; needs `spec.pool`."""
        assert self.spec.pool is not None
        return -(-(length + self._paged_slots_after_text) // self.spec.pool[1])

    def max_length_of(self, num_pages: int) -> int:
        """Returns the maximum tokens of a text that has `num_pages` pages; needs `spec.pool`."""
        assert self.spec.pool is not None
        return num_pages * self.spec.pool[1] - self._paged_slots_after_text

    @property
    def _paged_slots_after_text(self) -> int:
        # A module stores an entry up to `max_shift` positions after its own.
        return self.slots_per_round + 1 + self.drafter.max_shift(self.model)

    # Arrays.

    def prepare(self, params: dict, draft_params: Any) -> Weights:
        """Computes the arrays that rounds read. Work that depends only on parameters runs here, once per call."""
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
            shape: slots, capacity and options.
            dtype: dtype of the activations, and of the caches unless the spec names another.
            depth_costs: `[K+1]` durations of rounds, for an adaptive depth; None: fixed depth.
            depth_rates: `[K]` measured acceptance rates, for an adaptive depth; None: unknown.
            drafting_disabled: True if no depth can pay, so every round is a plain decoding step.

        Returns:
            The state. Every slot holds a sequence of one token 0, so that indices such as `length - 1` stay in range.
        """
        # Number and shapes of the arrays depend only on static settings, so later requests do not recompile.
        (batch, capacity, stops, features), config, spec, pages = shape, self.model.config, self.spec, None
        if spec.pool is not None:
            (num_pages, page_size), max_shift = spec.pool, self.drafter.max_shift(self.model)
            table = jnp.full((batch, -(-(capacity + max_shift) // page_size)), NO_PAGE, jnp.int32)
            pages = Pages(table, jnp.zeros(batch, jnp.int32), page_size, num_pages, max_shift)

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
            pages=pages,
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
        """Makes a state on the device: all slots free, or with requests before their prefill.

        Args:
            params: model parameters, for the dtype.
            config: settings, for the costs and rates of an adaptive depth.
            mesh: mesh of the parameters, on which each device makes its shard; None: one device.
            shape: the shape; None: that of `rows`.
            rows: a request for every slot; None: all slots are free.
        """
        if shape is None:
            assert rows is not None
            shape = StateShape.of(rows)
        # If drafting can never pay at these costs, an adaptive call disables it, so that it need not keep the drafter
        # up to date.
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


# Jitted, so that one dispatch transfers the requests and allocates all buffers of a state.
@functools.partial(jax.jit, static_argnames=("decoder", "shape", "dtype", "mesh"))
def _make_state(
    rows: NewRows | None, *, decoder: Decoder, shape: StateShape, dtype: Any, mesh: Mesh | None, **depth: Any
) -> DecodeState:
    state = decoder.empty_state(shape, dtype, **depth)
    state = state if rows is None else start_rows(state, rows, vocab_size=decoder.vocab_size)
    return state if mesh is None else constrain_state(state, decoder.model.config, mesh)
