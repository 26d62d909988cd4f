"""After every round each cache holds what a teacher-forced pass over the text gives, and nothing reads the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.loop import decode, run_round
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.drafters.modules import extend_backlog, num_pending
from mtpjax.drafters.mtp.drafting import MTPDrafter
from mtpjax.models.cache import empty_cache
from mtpjax.models.forward import shift_left
from mtpjax.models.masks import cached_view, full_view
from mtpjax.models.model import bind
from pallas_kernels.gated_delta import gated_delta_replay

CAPACITY = 64
LENGTHS = np.array([1, 2, 3, 9, 16, 21], np.int32)  # shorter than the modules reach, and over several chunks
LIMITS = LENGTHS + np.array([25, 28, 9, 30, 18, 27], np.int32)
replay = jax.jit(gated_delta_replay)
LARGE = 1e30  # finite, so that zero weight times it is zero; any weight above 1e-30 shows

TREE = {"topk": 3, "num_nodes": 9}
CASES = [  # attention, modules, chaining, steps, and what differs from a greedy chain
    ("grouped", 1, "chain", 2),
    ("grouped", 2, "trunk", 2),
    ("grouped", 3, "chain", 4),
    pytest.param(("grouped", 3, "chain", 2), marks=pytest.mark.slow),  # the third module is left out
    pytest.param(("latent", 2, "chain", 4), marks=pytest.mark.slow),
    pytest.param(("latent", 3, "trunk", 3), marks=pytest.mark.slow),
    pytest.param(("sparse", 2, "chain", 3), marks=pytest.mark.slow),
    ("hybrid", 1, "chain", 3),
    pytest.param(("hybrid", 2, "trunk", 2), marks=pytest.mark.slow),
    pytest.param(("grouped", 1, "chain", 3, TREE), marks=pytest.mark.slow),
    pytest.param(("grouped", 1, "chain", 3, {**TREE, "rule": "recursive"}), marks=pytest.mark.slow),
    ("latent", 1, "chain", 3, {**TREE, "rule": "sample"}),
    pytest.param(("sparse", 1, "chain", 2, TREE), marks=pytest.mark.slow),
    ("grouped", 1, "chain", 3, {"rule": "block"}),
    pytest.param(("sliding", 3, "trunk", 4), marks=pytest.mark.slow),
    pytest.param(("sliding", 1, "chain", 3, TREE), marks=pytest.mark.slow),
    pytest.param(("sliding", 1, "chain", 4, {**TREE, "rule": "recursive"}), marks=pytest.mark.slow),
    pytest.param(("sliding", 1, "chain", 3, {"window": (3, 1)}), marks=pytest.mark.slow),
    pytest.param(("clamped", 2, "chain", 3), marks=pytest.mark.slow),
    pytest.param(("clamped", 1, "chain", 4, TREE), marks=pytest.mark.slow),
]


DRAFTER = MTPDrafter()


def make_spec(num_steps, topk=1, num_nodes=None, rule="greedy", **changes):
    return DecodeSpec(num_steps, topk, num_nodes or num_steps + 1, rule, prefill_chunk=8, **changes)


def new_rows(spec):
    """Prompts of different lengths, with random tokens after them."""
    tokens = np.random.default_rng(1).integers(0, 61, (len(LENGTHS), CAPACITY)).astype(np.int32)
    temperature = jnp.full(len(LENGTHS), 0.0 if spec.is_greedy else 0.7)
    seed = jnp.arange(2 * len(LENGTHS), dtype=jnp.uint32).reshape(-1, 2)
    sampling = SamplingArrays.greedy(len(LENGTHS)).replace(temperature=temperature, seed=seed)
    return NewRows.without_stops(*map(jnp.asarray, (tokens, LENGTHS, LIMITS)), sampling)


def decoder_of(model, spec):
    return Decoder(model, DRAFTER, spec)


def free_state(model, spec, depth_costs=None):
    return decoder_of(model, spec).empty_state(StateShape(len(LENGTHS), CAPACITY), jnp.float32, depth_costs=depth_costs)


def weights_of(decoder, params):
    return decoder.prepare(params, DRAFTER.default_params(params, DecodeConfig(), model=decoder.model))


def prefilled(params, state, rows, *, model, spec):
    decoder = decoder_of(model, spec)
    state = start_rows(spoil(state), rows, vocab_size=model.config.vocab_size)
    return prefill(decoder, weights_of(decoder, params), state)


def advanced(params, state, *, model, spec):
    decoder = decoder_of(model, spec)
    return run_round(decoder, weights_of(decoder, params), state)


def spoil(state):
    """Every place whose content has no meaning, filled with what would show."""

    def from_length_on(cache):
        is_beyond = jnp.arange(CAPACITY)[None, :] >= cache.length[:, None]

        def fill(entries):
            shape = (entries.shape[0], *[1] * (entries.ndim - 3), CAPACITY, 1)
            return jnp.where(is_beyond.reshape(shape), LARGE, entries)

        layers = (layer if "state" in layer else jax.tree.map(fill, layer) for layer in cache.layers)
        return cache.replace(layers=tuple(layers))

    is_text = jnp.arange(CAPACITY)[None, :] < state.length[:, None]
    kept = state.drafter
    position = kept.hidden_start[:, None] + jnp.arange(kept.hidden.shape[1])[None, :]
    is_known = position < state.length[:, None] - 1
    return state.replace(
        tokens=jnp.where(is_text, state.tokens, 60),
        origin=jnp.where(is_text, state.origin, 99),
        trunk=from_length_on(state.trunk),
        drafter=kept.replace(
            caches=tuple(from_length_on(cache) for cache in kept.caches),
            hidden=jnp.where(is_known[:, :, None], kept.hidden, 1e4),  # whose square is finite
        ),
    )


def teacher_forced(params, tokens, *, model, num_modules):
    """What follows each token, and entries of the trunk's layers and of each module: one pass over whole rows."""
    apply = bind(model, params)
    cache = empty_cache(model.config, model.config.trunk_kinds, *tokens.shape)
    view = cached_view(model.config, cache.length, CAPACITY, CAPACITY)
    output = apply(tokens, view, cache, method="run_trunk")
    choices = jnp.argmax(apply(output.hidden, method="logits"), axis=-1)
    mtp_hidden = chained = model.mtp_input_hidden(output)
    view, modules = full_view(model.config, jnp.ones_like(tokens)), []
    for index in range(num_modules):
        source = mtp_hidden if model.config.mtp_chaining == "trunk" else chained
        _, chained, entries = apply(source, shift_left(tokens, index + 1), view, index=index, method="run_module")
        modules.append((entries,))
    return choices, output.cache.layers, modules


def assert_same_entries(found, wanted, lengths):
    """The first `lengths` slots, or a recurrent layer's state after them.

    Within 1e-5 of the largest: float32 sums in another order.
    """
    for layer, expected in zip(found, wanted, strict=True):
        for row, length in enumerate(lengths):
            for name, kept, true in slots(layer, expected, row, length):
                np.testing.assert_allclose(kept, true, rtol=1e-5, atol=1e-5 * np.abs(true).max(initial=0), err_msg=name)


def slots(layer, expected, row, length):
    if "state" in layer:
        made = (expected[name][row : row + 1] for name in ("keys", "log_decay", "corrections", "state"))
        yield "state", layer["state"][row], replay(*made, jnp.array([length]))[0]
        yield "conv", layer["conv"][row], expected["inputs"][row, length : length + layer["conv"].shape[1]]
        return
    for name, entries in layer.items():
        yield name, entries[row, ..., :length, :], expected[name][row, ..., :length, :]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:4]) + str(*case[4:]))
def test_every_cache_equals_a_teacher_forced_prefill(case, small):
    attention, num_modules, chaining, num_steps, *changes = case
    model, params = small(attention, "mixed", num_mtp_modules=num_modules, mtp_chaining=chaining)
    spec = make_spec(num_steps, **dict(*changes))
    begin = jax.jit(functools.partial(prefilled, model=model, spec=spec))
    advance = jax.jit(lambda params, state: advanced(params, spoil(state), model=model, spec=spec))
    in_use = min(num_modules, num_steps)
    truth = jax.jit(functools.partial(teacher_forced, model=model, num_modules=in_use))

    state = jax.device_get(begin(params, free_state(model, spec), new_rows(spec)))
    counts, choices = set(), state.tokens
    while not state.done.all():
        before = state
        state = jax.device_get(advance(params, state))
        counts |= set((state.accepted - before.accepted).sum(axis=1)[~before.done].tolist())
        choices, trunk, modules = jax.device_get(truth(params, state.tokens))
        assert (state.trunk.length == state.length - 1).all()
        assert_same_entries(state.trunk.layers, trunk, state.trunk.length)
        for index, (cache, expected) in enumerate(zip(state.drafter.caches, modules, strict=True)):
            # The text as it was when the modules took it in: its last token had no hidden yet. Later rounds leave a row
            # that is done as it is.
            extended = np.maximum(before.length - 1 - index, 0)
            assert (cache.length == np.where(before.done, before.drafter.caches[index].length, extended)).all()
            assert_same_entries(cache.layers, expected, cache.length)
    assert counts == set(range(num_steps + 1))  # rejections at every level, and none
    assert (state.length == LIMITS).all()
    if spec.is_greedy:
        for row, (length, limit) in enumerate(zip(LENGTHS, LIMITS, strict=True)):
            assert (state.tokens[row, length:limit] == choices[row, length - 1 : limit - 1]).all()


@pytest.mark.parametrize(
    "attention", ["grouped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latent", "sparse")), "hybrid"]
)
def test_a_call_reads_nothing_that_it_did_not_write(attention, small):
    model, params = small(attention, "mixed", num_mtp_modules=2)
    assert_reads_nothing_else(model, params, make_spec(3))


@pytest.mark.parametrize(
    "changes", [TREE, {**TREE, "rule": "recursive"}, {"window": (4, 1)}, {**TREE, "window": (4, 1)}]
)
def test_a_tree_or_a_window_reads_nothing_else(changes, small):
    assert_reads_nothing_else(*small("grouped", "mixed"), make_spec(3, **changes))


def assert_reads_nothing_else(model, params, spec):
    own = DRAFTER.default_params(params, DecodeConfig(), model=model)
    decoder = decoder_of(model, spec)

    def started(state):
        return start_rows(state, new_rows(spec), vocab_size=model.config.vocab_size)

    clean = decode(params, own, started(free_state(model, spec)), decoder=decoder)
    spoiled = decode(params, own, started(spoil(free_state(model, spec))), decoder=decoder)
    for name in ("length", "rounds", "accepted", "discarded", "stopped"):
        assert (getattr(clean, name) == getattr(spoiled, name)).all()
    for row, limit in enumerate(LIMITS):
        assert clean.tokens[row, :limit].tolist() == spoiled.tokens[row, :limit].tolist()


@pytest.mark.parametrize(
    ("attention", "num_modules", "costs"),
    [
        ("grouped", 2, (1.0, 1.1, 1.2, 1.3)),
        pytest.param("hybrid", 1, (1.0, 1.4, 1.9, 2.6), marks=pytest.mark.slow),
    ],
)
def test_depths_that_change_leave_every_cache_true(attention, num_modules, costs, small):
    """Rounds of depths 0 to 3 in any order, by hand: what waits at depth 0 is taken in when drafting resumes."""
    model, params = small(attention, "mixed", num_mtp_modules=num_modules)
    spec = make_spec(3, is_adaptive=True)
    begin = jax.jit(functools.partial(prefilled, model=model, spec=spec))
    decoder = decoder_of(model, spec)
    rounds = [jax.jit(functools.partial(advanced, model=model, spec=spec.at_depth(depth))) for depth in range(4)]
    follow_up = jax.jit(
        lambda params, state, rows: extend_backlog(
            decoder, DRAFTER.network(decoder, weights_of(decoder, params)), state, rows
        ),
        static_argnums=2,
    )
    truth = jax.jit(functools.partial(teacher_forced, model=model, num_modules=num_modules))
    state = begin(params, free_state(model, spec, jnp.array(costs)), new_rows(spec))
    order = np.random.default_rng(0)
    while not bool(state.done.all()):
        num_steps = int(order.choice([0, 0, 0, 1, 2, 3]))
        if num_steps:
            while int(num_pending(state).max()) > num_steps + num_modules:
                is_long = int(num_pending(state).max()) >= 6 + num_modules
                state = follow_up(params, state, 6 if is_long else 3 + num_modules)
        before = state
        state = rounds[num_steps](params, state)
        _, trunk, modules = jax.device_get(truth(params, state.tokens))
        assert_same_entries(jax.device_get(state.trunk.layers), trunk, np.array(state.trunk.length))
        if num_steps:
            for index, (cache, expected) in enumerate(zip(state.drafter.caches, modules, strict=True)):
                # A row that is done may have left rows behind that a shallower round does not reach.
                lengths = np.where(before.done, 0, np.maximum(np.array(before.length) - 1 - index, 0))
                assert_same_entries(jax.device_get(cache.layers), expected, lengths)
    choices, *_ = jax.device_get(truth(params, state.tokens))
    for row, (length, limit) in enumerate(zip(LENGTHS, LIMITS, strict=True)):
        assert (np.array(state.tokens)[row, length:limit] == choices[row, length - 1 : limit - 1]).all()
