"""The loops that `round_costs` times: the passes of a round, a drafter alone, and whole rounds."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import rng
from mtpjax.decoding.commit import cond_as_while_loop
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafter import Drafter
from mtpjax.decoding.loop import run_round
from mtpjax.decoding.sampling import SamplingArrays, distribution, draw
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, empty_state, start_rows
from mtpjax.decoding.verify import Acceptance, verify
from mtpjax.drafters.methods import uses_mtp_modules
from mtpjax.drafters.mtp.drafting import MTPDrafter
from mtpjax.inference.requests import make_drafter
from mtpjax.models.cache import commit, empty_cache
from mtpjax.models.layers.entries import read_rows, write_rows
from mtpjax.models.masks import cached_view
from mtpjax.models.model import MTPModel, bind


class RoundShape(NamedTuple):
    """Depth, width and verified nodes of a round; `chain_shape` makes that of a chain, `PLAIN_STEP` has no drafts."""

    num_steps: int  # draft levels, K
    topk: int  # children per tree node; 1 for a chain
    num_nodes: int  # nodes verified, W, including the pending token


def chain_shape(num_steps: int) -> RoundShape:
    """Returns the shape of a chain of `num_steps` drafts; 0 is a plain step."""
    return RoundShape(num_steps, 1, num_steps + 1)


PLAIN_STEP = chain_shape(0)


class TimingConditions(NamedTuple):
    """The conditions that all rounds share; see `round_costs.CostMeter`."""

    batch: int
    context: int
    capacity: int
    min_rows: int
    temperature: float

    @property
    def sampling(self) -> SamplingArrays:
        """Sampling parameters of all rows."""
        return SamplingArrays.greedy(self.batch).replace(temperature=jnp.full(self.batch, self.temperature))


class RoundLoop(NamedTuple):
    """A loop to time, with the parameters of the model and of the drafter as its arguments."""

    prepare: Callable[[Any, Any], Any]  # prepared = prepare(params, draft_params), before the loop
    body: Callable[[Any, jax.Array, Any], Any]  # inputs = body(prepared, number of the round, inputs)
    inputs: Any  # of the first round


def max_slots_written(model: MTPModel, shape: RoundShape, drafter: Drafter | None = None) -> int:
    """Returns an upper bound on the cache slots that a round of this shape writes behind the committed text.

    Args:
        model: the model.
        shape: the round.
        drafter: the draft method; None: the MTP modules.
    """
    if drafter is None or uses_mtp_modules(drafter):
        num_extended = MTPDrafter().num_extend_positions(model, shape.num_steps)
        return max(shape.num_nodes, num_extended + shape.topk * shape.num_steps)
    # Trees of a fixed shape and those of the best nodes differ in the nodes that are expanded.
    rules = ("greedy", "recursive") if shape.topk > 1 else ("greedy",)
    specs = [DecodeSpec(*shape, rule=rule, min_rows=2) for rule in rules]
    return max(max(spec.verify_width, drafter.num_scratch_slots(model, spec)) for spec in specs)


def passes_loop(dtype, model: MTPModel, shape: RoundShape, conditions: TimingConditions, *, drafts: bool) -> RoundLoop:
    """Makes a loop over the passes of a round, with `drafts` or verification alone.

    The trunk's head reads all nodes. Each module extends over the committed positions, and its head reads one of them.
    Recycled levels are passes over `topk` rows, and the head reads all of these.

    Args:
        dtype: dtype of the activations.
        model: the model.
        shape: the round.
        conditions: batch, context and caches.
        drafts: run the MTP modules too.

    Returns:
        The loop.
    """
    config, (batch, context, capacity, min_rows, temperature) = model.config, conditions
    num_modules = min(config.num_mtp_modules, shape.num_steps) if drafts else 0
    num_extended = MTPDrafter().num_extend_positions(model, shape.num_steps)
    width, level_rows = max(shape.num_nodes, min_rows), max(shape.topk, min_rows)
    num_starts = _num_start_positions(model, shape, conditions, MTPDrafter())
    # A plain step commits its token within the pass.
    num_valid = None if shape.num_steps else jnp.ones(batch, jnp.int32)

    def varied_tokens(token, count: int):
        """Makes tokens `[B, count]` that depend on the last pass and differ, so that they choose different experts."""
        steps = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return (token + 31 * steps) % config.vocab_size

    def body(params, index, inputs):
        token, hidden, trunk, modules = inputs
        apply, modules = bind(model, params), list(modules)

        def choose(output, module_index=None):
            """Picks the last row's arg-max, or samples a token from a mixture of all rows' distributions."""
            # The mixture makes the token depend on every row, so that XLA cannot leave out any of them.
            if not temperature:
                return apply(output, k=1, index=module_index, method="top_tokens")[1][:, -1:, 0]
            probabilities = distribution(apply(output, index=module_index, method="logits"), conditions.sampling)
            node = jnp.zeros(1, jnp.int32)
            gumbel = rng.gumbel(conditions.sampling.seed, start[:, None], rng.DRAFT, node, config.vocab_size)
            return draw(probabilities.mean(axis=1, keepdims=True), gumbel)

        # 1. Verify: the trunk over all nodes. The position moves with the round, so nothing is constant in the loop.
        start = trunk.length + index % num_starts
        view = cached_view(config, start, width, capacity, num_valid=num_valid)
        output = apply(varied_tokens(token, width), view, trunk, method="run_trunk")
        trunk = commit(output.cache, trunk.length)
        token = choose(output.hidden)
        # 2. Draft. Levels within the number of modules extend module after module over the committed positions; later
        # levels run the last module on its own output.
        module_input = hidden
        for level in range(1, shape.num_steps + 1 if drafts else 1):
            module_index, rows = min(level, num_modules) - 1, num_extended if level <= num_modules else level_rows
            view = cached_view(config, start, rows, capacity)
            tokens, layer_cache = varied_tokens(token, rows), modules[module_index].layers[0]
            output, module_output, entries = apply(
                module_input[:, -rows:], tokens, view, layer_cache, index=module_index, method="run_module"
            )
            modules[module_index] = modules[module_index].replace(layers=(entries,))
            # The next module reads these outputs. After the last module, recycled levels continue in further slots.
            if level < num_modules:
                module_input = module_output
            elif level == num_modules:
                hidden, start = module_output, start + num_extended
                module_input = jnp.pad(module_output, ((0, 0), (level_rows, 0), (0, 0)))
            else:
                module_input, start = module_output, start + level_rows
            # Only the newest output of an extended module is scored. The row varies, so all rows must be computed.
            if level <= num_modules:
                output = read_rows(output, index % rows + jnp.zeros(batch, jnp.int32), 1)
            token = choose(output, module_index)
        return token, hidden, trunk, tuple(modules)

    # Caches with `context` committed slots. The time of a pass does not depend on the entries' values.
    def filled(kinds):
        return commit(empty_cache(config, kinds, batch, capacity, dtype), jnp.full(batch, context, jnp.int32))

    inputs = (
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, num_extended, config.hidden_size), dtype),
        filled(config.trunk_kinds),
        tuple(filled((config.mtp_kind,)) for _ in range(num_modules)),
    )
    return RoundLoop(lambda params, draft_params: params, body, inputs)


def drafter_loop(
    dtype, model: MTPModel, config: DecodeConfig, conditions: TimingConditions, *, verifies: bool
) -> RoundLoop:
    """Makes a loop over the drafter's part of a round, alone or with verification.

    The drafter runs as in decoding: it extends over what the last round committed and drafts. With verification, the
    trunk's pass follows, and the drafter keeps its states. Nothing is accepted: every round begins at a different
    length.

    Args:
        dtype: dtype of the activations.
        model: the model.
        config: the drafter and the shape of the round, with at least one level.
        conditions: batch, context and caches.
        verifies: run the trunk's pass, too.

    Returns:
        The loop.
    """
    shape = RoundShape(config.num_steps, config.topk, config.num_nodes)
    spec, drafter, inputs = _running_rows(dtype, model, config, conditions)
    num_starts = _num_start_positions(model, shape, conditions, drafter)

    def body(prepared, index, state):
        params, prepared = prepared
        state = _at_length(state, conditions.context + 1 + index % num_starts)
        # 1. Draft.
        draft, state = drafter.propose(prepared, state, model=model, spec=spec)
        tokens = draft.tokens
        # 2. Verify, and hand the trunk's states to the drafter.
        if verifies:
            verified = verify(params, state, draft, model=model, drafter=drafter, spec=spec)
            tokens = verified.target_tokens
            if tokens is None:
                assert verified.logits is not None  # one of both is set
                tokens = jnp.argmax(verified.logits, axis=-1).astype(jnp.int32)
            # The drafter keeps the states of a path; their number varies, so that all of them must be computed.
            num_accepted = jnp.full_like(state.length, index % (shape.num_steps + 1))
            path = slice(shape.num_steps + 1)
            accepted = Acceptance(None, num_accepted, tokens[:, path])
            states = jax.tree.map(lambda kept: kept[:, path], verified.states)
            state = state.replace(
                trunk=commit(verified.trunk, state.trunk.length),
                drafter=drafter.commit(state, states, accepted, model=model, spec=spec),
            )
        # 3. The results become the text of the next round, so XLA cannot leave out their computation.
        return state.replace(tokens=write_rows(state.tokens, tokens, state.length - 1))

    return RoundLoop(_prepare(dtype, model, drafter, config), body, inputs)


def full_round_loop(
    dtype, model: MTPModel, configs: tuple[DecodeConfig, ...], conditions: TimingConditions
) -> RoundLoop:
    """Makes a loop over whole decoding rounds, one of each config, under the default rule.

    Lengths change from round to round: XLA would move the work that depends on constant lengths out of the loop.

    Args:
        dtype: dtype of the activations.
        model: the model.
        configs: the drafter and the shapes of the rounds; several must be chains.
        conditions: batch, context and caches.

    Returns:
        The loop.
    """
    # 1. The rows of the deepest shape; shallower chains are the same call at another depth.
    config = max(configs, key=lambda config: config.num_steps)
    shape = RoundShape(config.num_steps, config.topk, config.num_nodes)
    spec, drafter, inputs = _running_rows(dtype, model, config, conditions)
    specs = [spec.at_depth(each.num_steps) for each in configs] if len(configs) > 1 else [spec]
    num_starts = _num_start_positions(model, shape, conditions, drafter)

    # 2. Every round starts from a length within the room.
    def body(prepared, index, state):
        params, prepared = prepared
        for spec in specs:
            state = _at_length(state, conditions.context + 1 + index % num_starts)
            # An adaptive call runs each depth in its own loop, so a cycle does the same.
            run_one_round = functools.partial(
                run_round, params, model=model, drafter=drafter, spec=spec, prepared=prepared
            )
            state = cond_as_while_loop(run_one_round, index >= 0, state) if len(specs) > 1 else run_one_round(state)
        return state

    return RoundLoop(_prepare(dtype, model, drafter, config), body, inputs)


def _prepare(dtype, model: MTPModel, drafter: Drafter, config: DecodeConfig) -> Callable[[Any, Any], Any]:
    """Makes the function that prepares a drafter's parameters, beside those of the model."""

    def prepare(params, draft_params):
        if draft_params is None or not config.num_steps:
            draft_params = drafter.default_params(params, config, model=model)
        return params, drafter.prepare(params, draft_params, model=model, dtype=dtype)

    return prepare


def _running_rows(
    dtype, model: MTPModel, config: DecodeConfig, conditions: TimingConditions
) -> tuple[DecodeSpec, Drafter, DecodeState]:
    """Makes a state of running rows with random text, which end only at the capacity."""
    batch, context, capacity, min_rows, temperature = conditions
    spec = DecodeSpec.from_config(config, is_greedy=not temperature, min_rows=min_rows)
    drafter = make_drafter(config)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(batch, capacity))
    rows = NewRows.without_stops(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(batch, context + 1, jnp.int32),
        jnp.full(batch, capacity, jnp.int32),
        conditions.sampling,
    )
    _, max_stops, max_stop_length = rows.settings.stops.shape
    state = empty_state(
        model=model,
        drafter=drafter,
        spec=spec,
        batch=batch,
        capacity=capacity,
        stops_shape=(max_stops, max_stop_length),
        features=conditions.sampling.features,
        dtype=dtype,
    )
    return spec, drafter, start_rows(state, rows, vocab_size=model.config.vocab_size)


def _at_length(state: DecodeState, length: jax.Array) -> DecodeState:
    """Moves all rows to a length `[]`, as if the round before had accepted no draft."""
    length = jnp.full_like(state.length, length)
    draft_state = state.drafter
    if hasattr(draft_state, "hidden_start"):
        # The drafter's buffer begins at the oldest position that it has to extend over: one, or one per MTP module.
        num_caches = len(getattr(draft_state, "caches", (None,)))
        start = jnp.maximum(length - 1 - max(num_caches, 1), 0)
        draft_state = draft_state.replace(hidden_start=start)
    return state.replace(
        length=length,
        done=jnp.zeros_like(state.done),
        trunk=state.trunk.replace(length=length - 1),
        drafter=draft_state,
    )


def _num_start_positions(model: MTPModel, shape: RoundShape, conditions: TimingConditions, drafter: Drafter) -> int:
    """Returns how many slots behind the context a round may begin at, at least 1, so that its writes fit."""
    num_written = max_slots_written(model, shape, drafter) + conditions.min_rows
    return max(1, conditions.capacity - conditions.context - num_written)
