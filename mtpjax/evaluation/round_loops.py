"""Makes the loops that `round_costs` times, over only the passes of a round or over whole rounds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.acceptance.rules import RULES
from mtpjax.decoding.commit import cond_as_while_loop
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Drafter, Weights, make_spec
from mtpjax.decoding.draft_tree import choose_tree_shape, depths_and_ancestor_mask
from mtpjax.decoding.loop import run_round
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Acceptance, DecodeState, Draft, NewRows, StateShape, start_rows
from mtpjax.decoding.verify import verify
from mtpjax.evaluation.round_shapes import RoundShape
from mtpjax.inference.requests import make_drafter
from mtpjax.models.cache import commit
from mtpjax.models.model import MTPModel
from mtpjax.models.view import read_rows, write_rows


class TimingConditions(NamedTuple):
    """The conditions under which all rounds are timed."""

    batch: int  # rows, B
    context: int  # tokens per row in the caches
    capacity: int  # cache slots per row
    min_rows: int = 1  # minimum number of token rows per pass; narrower passes are padded, as in decoding
    temperature: float = 0.0  # above 0, tokens are sampled, and whole rounds use the default acceptance rules

    @property
    def sampling(self) -> SamplingArrays:
        """The sampling parameters of all rows."""
        return SamplingArrays.greedy(self.batch).replace(temperature=jnp.full(self.batch, self.temperature))


class RoundLoop(NamedTuple):
    """A loop to time, which takes the parameters of the model and of the drafter as arguments."""

    prepare: Callable[[Any, Any], Any]  # prepared = prepare(params, draft_params), before the loop
    body: Callable[[Any, jax.Array, Any], Any]  # inputs = body(prepared, index of the round, inputs)
    inputs: Any  # inputs of the first round


def max_slots_written(model: MTPModel, shape: RoundShape, drafter: Drafter) -> int:
    """Returns an upper bound on the cache slots that a round of this shape writes after the committed text."""
    # Trees with a fixed shape and trees of the best nodes expand different nodes.
    rules = ("greedy", "recursive") if shape.topk > 1 else ("greedy",)
    specs = [DecodeSpec(*shape, rule=RULES[rule], min_rows=2) for rule in rules]
    return max(Decoder(model, drafter, spec).slots_per_round for spec in specs)


def passes_loop(
    dtype: Any, model: MTPModel, config: DecodeConfig, conditions: TimingConditions, *, drafts: bool, verifies: bool
) -> RoundLoop:
    """Makes a loop over the passes of a round: drafting, verification, or both.

    As in decoding, the drafter extends over the last round's tokens and drafts, and then a trunk pass verifies the
    nodes. No acceptance rule runs. Every round starts at a different length, because XLA would move work that depends
    on a constant length out of the loop.

    Args:
        config: the drafter and the shape of the round.
        drafts: run the drafter; otherwise the nodes to verify are tokens of the text.
        verifies: run the trunk, and pass its states to the drafter.
    """
    decoder, inputs = _running_rows(dtype, model, config, conditions)
    spec, drafter = decoder.spec, decoder.drafter
    num_starts = _num_start_positions(decoder, conditions)

    def body(weights: Weights, index: jax.Array, state: DecodeState) -> DecodeState:
        state = _at_length(state, conditions.context + 1 + index % num_starts)
        # 1. Draft.
        if drafts:
            draft, state = drafter.propose(decoder, weights, state)
        else:
            draft = _nodes_of_text(state, spec)
        tokens = draft.tokens
        # 2. Verify, and pass the trunk's states to the drafter.
        if verifies:
            verified = verify(decoder, weights, state, draft)
            tokens, trunk = verified.target_tokens, commit(verified.trunk, state.trunk.length)
            if tokens is None:
                assert verified.logits is not None  # one of the two is set
                tokens = jnp.argmax(verified.logits, axis=-1).astype(jnp.int32)
            state = state.replace(trunk=trunk)
        if drafts and verifies:
            # The drafter keeps the states of a path. Vary how many it keeps, so that XLA must compute all of them.
            path, num_accepted = slice(spec.num_steps + 1), jnp.full_like(state.length, index % (spec.num_steps + 1))
            accepted = Acceptance(None, num_accepted, tokens[:, path])
            states = jax.tree.map(lambda kept: kept[:, path], verified.states)
            state = state.replace(drafter=drafter.commit(decoder, state, states, accepted))
        # 3. The results become the text of the next round, so XLA cannot remove their computation.
        return state.replace(tokens=write_rows(state.tokens, tokens, state.length - 1))

    return RoundLoop(_prepare(decoder, config), body, inputs)


def full_round_loop(
    dtype: Any, model: MTPModel, configs: tuple[DecodeConfig, ...], conditions: TimingConditions
) -> RoundLoop:
    """Makes a loop whose body runs one whole decoding round per config, under the default rule.

    If there are several configs, all must be chains.
    """
    # 1. Make the rows for the deepest shape. Shallower chains are the same call at a different depth.
    config = max(configs, key=lambda config: config.num_steps)
    deepest, inputs = _running_rows(dtype, model, config, conditions)
    decoders = [deepest.at_depth(each.num_steps) for each in configs] if len(configs) > 1 else [deepest]
    num_starts = _num_start_positions(deepest, conditions)

    # 2. Start every round at a length that leaves room for its writes.
    def body(weights: Weights, index: jax.Array, state: DecodeState) -> DecodeState:
        for decoder in decoders:
            state = _at_length(state, conditions.context + 1 + index % num_starts)
            # An adaptive call runs each depth in a separate loop, so a cycle does the same.
            run = lambda state, decoder=decoder: run_round(decoder, weights, state)
            state = cond_as_while_loop(run, index >= 0, state) if len(decoders) > 1 else run(state)
        return state

    return RoundLoop(_prepare(deepest, config), body, inputs)


def _prepare(decoder: Decoder, config: DecodeConfig) -> Callable[[Any, Any], Weights]:
    """Makes the function that prepares the parameters of the model and of the drafter."""

    def prepare(params: dict, draft_params: Any) -> Weights:
        if draft_params is None or not config.num_steps:
            draft_params = decoder.drafter.default_params(params, config, model=decoder.model)
        return decoder.prepare(params, draft_params)

    return prepare


def _nodes_of_text(state: DecodeState, spec: DecodeSpec) -> Draft:
    """Makes a draft from tokens of the text, with the shape of the tree in `spec`."""
    tokens = read_rows(state.tokens, state.length - 1, spec.num_nodes)
    if spec.topk == 1:
        return Draft(tokens)
    shape = choose_tree_shape(spec.topk, spec.num_steps, spec.num_nodes)
    parents = jnp.broadcast_to(jnp.array(shape.parents, jnp.int32), tokens.shape)
    return Draft(tokens, None, parents, *depths_and_ancestor_mask(parents, spec.num_steps))


def _running_rows(
    dtype: Any, model: MTPModel, config: DecodeConfig, conditions: TimingConditions
) -> tuple[Decoder, DecodeState]:
    """Makes a state of running rows with random texts that fill the caches, so that no row ends during a timing."""
    batch, context, capacity, min_rows, temperature = conditions
    spec = make_spec(config, is_greedy=not temperature, min_rows=min_rows)
    decoder = Decoder(model, make_drafter(config), spec)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(batch, capacity))
    rows = NewRows.without_stops(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(batch, context + 1, jnp.int32),
        jnp.full(batch, capacity, jnp.int32),
        conditions.sampling,
    )
    state = decoder.empty_state(StateShape.of(rows), dtype)
    return decoder, start_rows(state, rows, vocab_size=model.config.vocab_size)


def _at_length(state: DecodeState, length: jax.Array) -> DecodeState:
    """Sets all rows to the same `length`, `[]`, as if the previous round had accepted no draft."""
    length = jnp.full_like(state.length, length)
    draft_state = state.drafter
    if hasattr(draft_state, "hidden_start"):
        # The drafter's buffer starts at the oldest position that the drafter must still process, which is one position
        # back, or one per MTP module.
        num_caches = len(getattr(draft_state, "caches", (None,)))
        start = jnp.maximum(length - 1 - max(num_caches, 1), 0)
        draft_state = draft_state.replace(hidden_start=start)
    return state.replace(
        length=length,
        done=jnp.zeros_like(state.done),
        trunk=state.trunk.replace(length=length - 1),
        drafter=draft_state,
    )


def _num_start_positions(decoder: Decoder, conditions: TimingConditions) -> int:
    """Returns the number of slots after the context where a round can start and its writes still fit, at least 1."""
    return max(1, conditions.capacity - conditions.context - decoder.slots_per_round - conditions.min_rows)
