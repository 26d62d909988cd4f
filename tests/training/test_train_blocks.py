"""Training of DFlash and DSpark: losses of the cached drafter, anchors, masks of the blocks."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import Objective, TrainConfig
from mtpjax.data.packing import Batch
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Draft, NewRows, StateShape, start_rows
from mtpjax.drafters.dflash import network as dflash_network
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models import masks
from mtpjax.models.masks import segment_positions
from mtpjax.models.params import DRAFTER
from mtpjax.training.anchors import draw_anchors
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.losses import all_targets, binary_cross_entropy
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state
from pallas_kernels.range_attention import blocks, range_attention_reference
from tests.helpers.new_drafters import (
    DRAFT_IDS_OF_TESTS,
    LEVELS,
    V,
    log_softmax,
    new_drafter,
    packed_batch,
    run_steps,
    trunk_logs,
)

DOCUMENTS = ((0, 0, 7), (0, 7, 12), (1, 0, 10))  # row, first column, end
SEED, NUM_ANCHORS = 5, 4
WEIGHTS = 0.7 ** np.arange(LEVELS) / (0.7 ** np.arange(LEVELS)).sum()
COLUMN = {int(token): column for column, token in enumerate(DRAFT_IDS_OF_TESTS)}


@pytest.fixture(scope="module")
def batch():
    return packed_batch()


class _ShowsStates:
    """Returns the states of the slots in the place of a distribution."""

    def _draft(self, decoder, weights, state, hidden):
        return Draft(jnp.zeros((len(hidden), decoder.spec.num_steps + 1), jnp.int32), hidden)


class ShownDFlash(_ShowsStates, DFlashDrafter):
    pass


class ShownDSpark(_ShowsStates, DSparkDrafter):
    pass


def drafted_states(model, params, architecture, prefixes, pending):
    """The states `[prefixes, LEVELS, D]` that the cached drafter drafts from, behind a prefill of every prefix."""
    kind = ShownDSpark if isinstance(architecture, DSparkConfig) else ShownDFlash
    drafter, spec = kind(architecture=architecture), DecodeSpec(LEVELS, num_nodes=LEVELS + 1, prefill_chunk=4)
    tokens = jnp.stack([jnp.pad(prefix, (0, 32 - len(prefix))) for prefix in prefixes])
    lengths = jnp.array([len(prefix) for prefix in prefixes], jnp.int32)
    sampling = SamplingArrays.greedy(len(prefixes))
    rows, decoder = NewRows.without_stops(tokens, lengths, lengths + 9, sampling), Decoder(model, drafter, spec)
    state = start_rows(decoder.empty_state(StateShape.of(rows), jnp.float32), rows, vocab_size=V)

    @jax.jit
    def propose(params, state):
        own = DraftParams(params[DRAFTER], DRAFT_IDS_OF_TESTS)
        weights = decoder.prepare(params, own)
        state = prefill(decoder, weights, state, first_token=jnp.array(pending, jnp.int32))
        return drafter.propose(decoder, weights, state)[0].probabilities

    return np.asarray(propose(params, state), np.float64)


def all_anchors(batch, is_kept):
    """(row, first column of its document, column, end) of the anchors that are kept."""
    places = [(row, begin, a, end) for row, begin, end in DOCUMENTS for a in range(begin + 1, end)]
    return [place for place in places if is_kept(place[0], place[2])]


@pytest.mark.parametrize("kind", ["dspark", pytest.param("dflash", marks=pytest.mark.slow)])
def test_losses_are_those_of_the_cached_drafter_behind_each_anchor(kind, small, batch):
    """A loop over anchors: prefill of the document before it, one block, and the losses of its slots."""
    model, params, drafter = new_drafter(small, kind)
    draftable = batch.loss_mask & np.isin(batch.tokens, DRAFT_IDS_OF_TESTS)
    _, is_valid = all_targets(*map(jnp.asarray, (batch.tokens, batch.segment_ids, draftable)), LEVELS)
    drawn = draw_anchors(jax.random.fold_in(jax.random.key(SEED), 0), is_valid[1], NUM_ANCHORS)
    chosen = all_anchors(batch, lambda row, column: column in np.asarray(drawn[row]))
    assert len(chosen) == (np.asarray(drawn) > 0).sum() > 4
    prefixes = [batch.tokens[row, begin:a] for row, begin, a, _ in chosen]
    pending = [batch.tokens[row, a] for row, _, a, _ in chosen]
    states = drafted_states(model, params, drafter.architecture, prefixes, pending)
    network, log_p = jax.tree.map(np.float64, params[DRAFTER]), trunk_logs(model, params, batch)[1]
    losses = {name: [[] for _ in range(LEVELS)] for name in ("cross_entropy", "kl", "tv", "confidence")}
    for (row, _, a, end), hidden in zip(chosen, states, strict=True):
        for level in range(1, min(LEVELS, end - 1 - a) + 1):
            if not draftable[row, a + level]:
                continue
            h, logits = hidden[level - 1], hidden[level - 1] @ network["head"]
            if kind == "dspark":
                before = network["markov_in"][batch.tokens[row, a + level - 1]]
                logits = logits + before @ network["markov_out"]
                (logit,) = np.concatenate([h, before]) @ network["confidence_out"] + network["confidence_bias"]
            log_q, log_t = log_softmax(logits), log_p[row, a + level - 1]
            tv = 0.5 * abs(np.exp(log_q) - np.exp(log_t)).sum()
            losses["cross_entropy"][level - 1].append(-log_q[COLUMN[int(batch.tokens[row, a + level])]])
            losses["kl"][level - 1].append((np.exp(log_t) * (log_t - log_q)).sum())
            losses["tv"][level - 1].append(tv)
            if kind == "dspark":
                chance = 1 / (1 + np.exp(-logit))
                losses["confidence"][level - 1].append(-(1 - tv) * np.log(chance) - tv * np.log(1 - chance))
    mean = {name: np.array([np.mean(each) if each else 0 for each in losses[name]]) for name in losses}
    mix = {"cross_entropy": 0.1, "kl": 0.5, "total_variation": 1.8}
    objective = Objective(mix=mix, depth_weights="decayed", depth_decay=0.7)
    sizes = {"num_anchors": NUM_ANCHORS, "seed": SEED}
    _, metrics = run_steps(model, params, drafter, batch, objective=objective, **sizes)
    np.testing.assert_allclose(metrics["losses"][1:], mean["cross_entropy"], rtol=1e-5)
    wanted = 0.1 * mean["cross_entropy"] + 0.5 * mean["kl"] + 1.8 * mean["tv"] + mean["confidence"]
    np.testing.assert_allclose(metrics["loss"] - metrics["losses"][0], WEIGHTS @ wanted, rtol=1e-5)


@pytest.mark.slow
def test_the_confidence_learns_the_overlap_without_changing_it(small, batch):
    """The target has no gradient: with the confidence head alone, the states still move, and q's head does not."""
    model, params, drafter = new_drafter(small, "dspark")
    objective = Objective(mix={"kl": 0.0})
    after, metrics = run_steps(model, params, drafter, batch, objective=objective, steps=1)
    assert metrics["gradient_norm"] > 0
    moved = jax.tree.map(lambda new, old: np.abs(np.asarray(new - old)).max(), after[DRAFTER], params[DRAFTER])
    decay = 1e-2 * 0.1 * 1.01  # of the weights, which an update has without a gradient
    for name in ("head", "markov_out"):
        assert moved[name] <= decay * np.abs(np.asarray(params[DRAFTER][name])).max()
    assert moved["confidence_out"] > 5e-3 and moved["fc"] > 5e-3


def test_a_binary_cross_entropy_is_finite_and_right():
    logits, chances = jnp.array([-100.0, -1.5, 0.0, 2.0, 100.0]), jnp.array([0.0, 0.3, 0.5, 0.9, 1.0])
    s = 1 / (1 + np.exp(-np.float64(logits[1:4])))
    c = np.float64(chances[1:4])
    found = binary_cross_entropy(logits, chances)
    np.testing.assert_allclose(found[1:4], -c * np.log(s) - (1 - c) * np.log(1 - s), rtol=1e-6)
    np.testing.assert_allclose(found[jnp.array([0, 4])], 0, atol=1e-6)


def test_anchors_are_drawn_anew_among_valid_rows(batch):
    _, is_valid = all_targets(*map(jnp.asarray, batch), 1)
    key = jax.random.key(0)
    drawn = {}
    for step in range(60):
        anchors = np.asarray(draw_anchors(jax.random.fold_in(key, step), is_valid[1], 3))
        again = draw_anchors(jax.random.fold_in(key, step), is_valid[1], 3)
        np.testing.assert_array_equal(anchors, again)
        for row, columns in enumerate(anchors):
            assert len(set(columns)) == 3 and (np.sort(columns) == columns).all()
            drawn.setdefault(row, []).extend(columns.tolist())
    for row, columns in drawn.items():
        valid = np.flatnonzero(is_valid[1, row]) + 1
        assert set(columns) == set(valid)
        # 180 draws: each column has its share, within 4 standard errors of sampling without replacement.
        share = 180 / len(valid)
        assert (abs(np.bincount(columns, minlength=12)[valid] - share) < 4 * np.sqrt(share)).all()
    whole = np.asarray(draw_anchors(key, is_valid[1], 99))
    assert whole.shape == (2, 11)
    for row in range(2):
        assert whole[row][whole[row] > 0].tolist() == (np.flatnonzero(is_valid[1, row]) + 1).tolist()


@pytest.mark.slow
def test_updates_draw_other_anchors(small, batch):
    model, params, drafter = new_drafter(small, "dflash")
    run = lambda **sizes: run_steps(model, params, drafter, batch, **sizes)[1]["losses"]
    one, again, other = run(num_anchors=2, seed=0), run(num_anchors=2, seed=0), run(num_anchors=2, seed=1)
    np.testing.assert_array_equal(one, again)
    assert one[1] != other[1] and one[0] == other[0]


SEGMENTS = np.array([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2], np.int32)
ANCHORS = np.array([[1, 3, 7, 8, 11], [0, 2, 5, 6, 9]], np.int32)  # at the start of a row and of a document too


def dense_masks(config, layer, anchors, segment_ids):
    """The positions `[B, A, X, T]` and slots `[X, X]` that each slot attends to, by the definition, one by one."""
    (B, A), X, T = anchors.shape, config.block_size, segment_ids.shape[1]
    window, from_anchor = config.windows[layer], config.window_from_anchor
    context, block = np.zeros((B, A, X, T), bool), np.zeros((X, X), bool)
    for b, a, x, t in np.ndindex(context.shape):
        anchor = anchors[b, a]
        oldest = anchor - window if from_anchor else anchor + x - window + 1
        context[b, a, x, t] = t < anchor and segment_ids[b, t] == segment_ids[b, anchor] and (not window or t >= oldest)
    for x, y in np.ndindex(X, X):
        is_near = from_anchor or not window or abs(x - y) < window
        block[x, y] = is_near and (y <= x or not config.is_causal[layer])
    return context, block


@pytest.mark.parametrize("from_anchor", [False, True])
def test_ranges_of_blocks_are_those_of_the_definition(from_anchor, small):
    config = new_drafter(small, "dflash")[2].architecture
    for window, is_causal in itertools.product((0, 1, 3, 99), (False, True)):
        changes = {"windows": (window,) * 2, "is_causal": (is_causal,) * 2, "window_from_anchor": from_anchor}
        changed = dataclasses.replace(config, **changes)
        for anchors, segment_ids in ((ANCHORS, SEGMENTS), (np.zeros((2, 1), np.int32), SEGMENTS[:, :1])):
            position = np.take_along_axis(np.asarray(segment_positions(jnp.asarray(segment_ids))), anchors, 1)
            ranges, own = dflash_network._visible_keys(changed, 0, jnp.asarray(anchors), jnp.asarray(position))
            context, block = dense_masks(changed, 0, anchors, segment_ids)
            found = np.asarray(ranges.dense(segment_ids.shape[1])).reshape(context.shape)
            np.testing.assert_array_equal(found, context)
            own = np.asarray(own).reshape(*context.shape[:3], -1)
            np.testing.assert_array_equal(own, np.broadcast_to(block, own.shape))


@pytest.mark.parametrize("from_anchor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_have_the_states_and_gradients_of_dense_attention(from_anchor, small, batch, monkeypatch):
    """States and gradients, with a window and a causal layer, documents, and last blocks and groups not full."""
    _, params, drafter = new_drafter(small, "dflash")
    changes = {"windows": (2, 0), "is_causal": (True, False), "window_from_anchor": from_anchor}
    config = dataclasses.replace(drafter.architecture, **changes)
    features = jax.random.normal(jax.random.key(0), (2, 12, config.features_size))
    given, layers = (jnp.asarray(batch.tokens), ANCHORS, params["embedding"]), itertools.cycle(range(2))

    def dense(q, key, value, ranges, *, scale, own, implementation):
        product = functools.partial(jnp.einsum, precision="highest")
        context, block = dense_masks(config, next(layers), ANCHORS, SEGMENTS)
        queries = q.reshape(*q.shape[:2], *context.shape[1:3], *q.shape[3:])
        scores = product("BKAXGH,BKTH->BKAXGT", queries, key), product("BKAXGH,BKAYH->BKAXGY", queries, own.key)
        mask = np.concatenate([context, np.broadcast_to(block, (*context.shape[:3], len(block)))], axis=-1)
        joined = jnp.where(mask[:, None, :, :, None], jnp.concatenate(scores, axis=-1) * scale, -jnp.inf)
        weights, T = jax.nn.softmax(joined, axis=-1), key.shape[2]
        output = product("BKAXGT,BKTH->BKAXGH", weights[..., :T], value)
        return (output + product("BKAXGY,BKAYH->BKAXGH", weights[..., T:], own.value)).reshape(q.shape)

    def total(network, features):
        shape = {"config": config, "segment_ids": jnp.asarray(SEGMENTS)}
        states = dflash_network.block_states(network, features, *given, **shape)
        return jnp.sin(states).sum(), states

    results = []
    monkeypatch.setattr(blocks, "BLOCK", 5)
    two = 2 * 2 * config.block_size * config.block.intermediate_size  # two anchors at once, of five
    for attention, most in ((dflash_network.range_attention, two), (dense, 1 << 24)):
        monkeypatch.setattr(dflash_network, "range_attention", attention)
        monkeypatch.setattr(dflash_network, "MAX_ACTIVATIONS", most)
        compute = jax.jit(lambda *given: jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(*given))
        results.append(compute(params[DRAFTER], features))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


@pytest.mark.parametrize("kind", ["dflash", pytest.param("dspark", marks=pytest.mark.slow)])
def test_no_scores_of_all_slots_and_positions_are_compiled(kind, small, monkeypatch):
    model, params, drafter = new_drafter(small, kind)
    T, A = 88, 7  # no other sizes here
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(masks, "MAX_DENSE", 8)
    tokens, optimizer = jnp.ones((1, T), jnp.int32), make_optimizer(TrainConfig())
    state = init_train_state(params, optimizer, "modules")
    spec = TrainSpec(model=model, num_depths=LEVELS, trains="modules", drafter=drafter, num_anchors=A)
    axes = f"({T},|{A},|{A * drafter.architecture.block_size},)"

    def has_scores(text):
        return re.search(rf"\b{axes}(\d+,)*{T}\b", text.replace("x", ",")) is not None

    jax.clear_caches()
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
    compiled = step.lower(state, Batch(tokens, tokens, tokens > 0), 1.0, 1.0).compile()
    assert not has_scores(str(compiled.as_text()))
    # The dense form has them.
    dense = lambda *arrays, implementation, **settings: range_attention_reference(*arrays, **settings)
    monkeypatch.setattr(dflash_network, "range_attention", dense)
    features = jnp.ones((1, T, drafter.architecture.features_size))
    run = functools.partial(dflash_network.block_states, config=drafter.architecture)
    lowered = jax.jit(run).lower(params[DRAFTER], features, tokens, jnp.zeros((1, A), jnp.int32), params["embedding"])
    assert has_scores(lowered.as_text())


def test_nothing_of_another_document_or_behind_the_anchor_is_read(small, batch):
    _, params, drafter = new_drafter(small, "dflash")
    config = drafter.architecture
    features = jax.random.normal(jax.random.key(0), (2, 12, config.features_size))
    anchors = jnp.array([[10], [4]])

    @jax.jit
    def states(features, tokens):
        shape = {"config": config, "segment_ids": jnp.asarray(batch.segment_ids)}
        return dflash_network.block_states(params[DRAFTER], features, tokens, anchors, params["embedding"], **shape)

    tokens = jnp.asarray(batch.tokens)
    columns = jnp.arange(12)[None, :]
    is_read = (columns < anchors) & (jnp.asarray(batch.segment_ids) == jnp.array([[2], [1]]))
    others = jnp.where(columns == anchors, tokens, (tokens + 1) % V)
    found = states(jnp.where(is_read[:, :, None], features, 7.0), others)
    np.testing.assert_array_equal(found, states(features, tokens))
    changed = states(features.at[0, 7].add(1.0).at[1, 3].add(1.0), tokens)
    assert (np.abs(np.asarray(changed - found)).max(axis=(1, 2, 3)) > 1e-3).all()
