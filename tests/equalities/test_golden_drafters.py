"""EAGLE-3 and Medusa drafters against their own published code, computed in float64."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from conversion.hf_config import parse_config
from mtpjax import DecodeConfig, MTPModel, speculative_generate
from mtpjax.decoding.acceptance.lossy import typical_tree
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.loop import finish_round
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.drafters.eagle3.network import eagle3_levels
from mtpjax.drafters.medusa.drafting import MedusaState
from mtpjax.drafters.medusa.network import Medusa
from mtpjax.models.masks import full_view
from mtpjax.models.model import bind
from tests.golden import drafter_path, has_trunk

EAGLE = ("eagle3", "eagle3_wide", "eagle31", "eagle31_plain")
NAMES = (*EAGLE, "medusa")
PROMPTS = ("p0", "p1")
CAPACITY = 128


@functools.cache
def load(name):
    """The trunk's model, its parameters if they are there, the drafter, its parameters, and what is expected."""
    folder = drafter_path(name)
    if has_trunk(name):
        model, params = mtpjax.load(folder / "trunk", dtype=jnp.float32)
    else:
        model, params = MTPModel(parse_config(json.loads((folder / "trunk" / "config.json").read_text())).model), None
    with np.load(folder / "expected.npz") as expected:
        return model, params, *mtpjax.load_drafter(folder / "draft", model=model), dict(expected)


@functools.partial(jax.jit, static_argnames=("config", "num_levels"))
def run_levels(params, features, tokens, embedding, *, config, num_levels=3):
    levels = eagle3_levels(params, features, tokens, embedding, config=config, num_levels=num_levels)
    return levels.logits


@functools.partial(jax.jit, static_argnames=("model", "layer_ids"))
def trunk_pass(params, tokens, *, model, layer_ids):
    view = full_view(model.config, jnp.ones_like(tokens))
    return bind(model, params)(tokens, view, layer_ids=layer_ids, method="run_trunk")


def embedding_of(name):
    _, params, _, _, expected = load(name)
    return expected["embedding"] if params is None else params["embedding"]


def assert_logits(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", EAGLE)
def test_the_levels_match(name):
    """Both prompts in rows of one length: rows see nothing of what is behind them."""
    _, _, drafter, params, expected = load(name)
    assert np.array_equal(params.draft_ids, expected["draft_ids_of_columns"])
    rows = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    T = max(map(len, rows))
    tokens = np.stack([np.pad(row, (0, T - len(row))) for row in rows])
    features = [np.pad(expected[f"{prompt}_features"], ((0, T - len(row)), (0, 0))) for prompt, row in zip(PROMPTS, rows, strict=True)]  # fmt: skip  # noqa: E501
    found = run_levels(params.network, np.stack(features), tokens, embedding_of(name), config=drafter.architecture)
    for row, prompt in enumerate(PROMPTS):
        for level in range(1, 4):
            wanted = expected.get(f"{prompt}_draft{level}_logits")
            if wanted is not None:
                assert_logits(found[level - 1][row, : len(rows[row]) - level], wanted)


@pytest.mark.parametrize(
    ("name", "switch", "level"),
    [
        ("eagle31", "norm_before_residual", 1),
        ("eagle31", "norm_output", 2),
        pytest.param("eagle3", "norm_before_residual", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", "norm_output", 2, marks=pytest.mark.slow),
        pytest.param("eagle31_plain", "norm_output", 2, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_switch_is_caught(name, switch, level):
    _, _, drafter, params, expected = load(name)
    config = drafter.architecture
    wrong = dataclasses.replace(config, **{switch: not getattr(config, switch)})
    arguments = expected["p0_features"][None], expected["p0_input_ids"][None], embedding_of(name)
    found = run_levels(params.network, *arguments, config=wrong, num_levels=2)
    wanted = expected[f"p0_draft{level}_logits"]
    assert np.abs(found[level - 1][0, : len(wanted)] - wanted).max() > 0.3


def test_the_states_that_enter_the_layers_are_read():
    """The original's wrong variant reads the layers' outputs: one layer later."""
    model, trunk, drafter, params, expected = load("eagle3")
    tokens = expected["p0_input_ids"][None]
    found = {}
    for shift in (0, 1):
        config = dataclasses.replace(
            drafter.architecture, layer_ids=tuple(layer + shift for layer in drafter.architecture.layer_ids)
        )
        reader = dataclasses.replace(drafter, architecture=config)
        output = trunk_pass(trunk, tokens, model=model, layer_ids=reader.layer_ids)
        features = reader.select_states(Decoder(model, reader, DecodeSpec(1)), output)
        if not shift:
            assert_logits(features[0], expected["p0_features"])
        logits = run_levels(params.network, features, tokens, trunk["embedding"], config=drafter.architecture)
        found[shift] = logits[0][0, :-1]
    assert_logits(found[0], expected["p0_draft1_logits"])
    assert_logits(found[1], expected["p0_alt_features_after_layer_draft1_logits"])
    assert np.abs(found[1] - found[0]).max() > 0.3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "eagle3_wide")) for name in EAGLE]
)
def test_the_chain_of_the_uncached_twin_matches(name):
    """Level k is run again over the text with the drafts so far: no cache, no state."""
    _, _, drafter, params, expected = load(name)
    for prompt in PROMPTS[: 1 if name == "eagle3_wide" else 2]:
        features, K = expected[f"{prompt}_features"], len(expected[f"{prompt}_chain_ids"])
        text = [*expected[f"{prompt}_input_ids"], expected[f"{prompt}_greedy_ids"][0]]
        last = len(text) - 2
        drafts = []
        for level in range(K):
            tokens = np.array([*text, *drafts])
            rows = np.zeros((1, 40, features.shape[1]), np.float32)
            rows[0, : len(features)] = features
            padded = np.pad(tokens, (0, 40 - len(tokens)))[None]
            found = run_levels(
                params.network, rows, padded, embedding_of(name), config=drafter.architecture, num_levels=K
            )
            logits = found[level][0, last]
            if f"{prompt}_chain_logits" in expected:
                assert_logits(logits, expected[f"{prompt}_chain_logits"][level])
            drafts.append(int(params.draft_ids[int(logits.argmax())]))
        assert drafts == expected[f"{prompt}_chain_ids"].tolist()


def start(name, drafter, spec):
    """Prefills both prompts, and returns the state and a jitted function that runs one round."""
    model, params, _, draft_params, expected = load(name)
    rows = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.stack([np.pad(row, (0, CAPACITY - len(row))) for row in rows])
    sampling = SamplingArrays.greedy(len(rows))
    batch = NewRows.without_stops(*map(jnp.asarray, (tokens, lengths, lengths + 32)), sampling)
    decoder = Decoder(model, drafter, spec)
    state = decoder.empty_state(StateShape.of(batch), jnp.float32)

    @jax.jit
    def begin(params, draft_params, state, batch):
        state = start_rows(state, batch, vocab_size=model.config.vocab_size)
        return prefill(decoder, decoder.prepare(params, draft_params), state)

    @jax.jit
    def advance(params, draft_params, state):
        weights = decoder.prepare(params, draft_params)
        draft, state = drafter.propose(decoder, weights, state)
        return draft, finish_round(decoder, weights, state, draft)

    return begin(params, draft_params, state, batch), lambda state: advance(params, draft_params, state)


@pytest.mark.parametrize("name", [name for name in NAMES if has_trunk(name)])
def test_rounds_match(name):
    """Every round drafts and accepts what the original does, until its text is through."""
    _, _, drafter, _, expected = load(name)
    K = expected["p0_rounds_drafts"].shape[1]
    state, advance = start(name, drafter, DecodeSpec(K, num_nodes=K + 1, prefill_chunk=16))
    drafts, accepted = [], []
    while not bool(state.done.all()):
        before = state
        draft, state = advance(state)
        drafts.append(np.asarray(draft.tokens[:, 1:]))
        accepted.append(np.asarray((state.accepted - before.accepted).sum(axis=1)))
    for row, prompt in enumerate(PROMPTS):
        count = len(expected[f"{prompt}_rounds_accepted"])
        assert [int(each[row]) for each in accepted[:count]] == expected[f"{prompt}_rounds_accepted"].tolist()
        assert [each[row].tolist() for each in drafts[:count]] == expected[f"{prompt}_rounds_drafts"].tolist()
        begin = len(expected[f"{prompt}_input_ids"])
        assert state.tokens[row, begin : begin + 32].tolist() == expected[f"{prompt}_greedy_ids"].tolist()


def paths(tokens, parents):
    """The nodes of a tree as their paths of tokens from the root: what does not depend on their order."""
    found = [(int(tokens[0]),)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[int(parent)], int(token)))
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("name", [name for name in ("eagle3", "eagle3_wide") if has_trunk(name)])
def test_the_dynamic_tree_matches(name):
    _, _, drafter, _, expected = load(name)
    state, advance = start(name, drafter, DecodeSpec(4, topk=3, num_nodes=9, prefill_chunk=16))
    draft, state = advance(state)
    for row, prompt in enumerate(PROMPTS):
        mask, depths = expected[f"{prompt}_tree_mask"], expected[f"{prompt}_tree_depths"]
        parents = [-1, *(max(np.flatnonzero(mask[n, :n]), key=lambda m: depths[m]) for n in range(1, len(mask)))]
        assert paths(draft.tokens[row], draft.parents[row]) == paths(expected[f"{prompt}_tree_tokens"], parents)
    # Whole texts through trees are the trunk's own too.
    while not bool(state.done.all()):
        _, state = advance(state)
    for row, prompt in enumerate(PROMPTS):
        begin = len(expected[f"{prompt}_input_ids"])
        assert state.tokens[row, begin : begin + 32].tolist() == expected[f"{prompt}_greedy_ids"].tolist()


def fitted_to_the_text(name):
    """A drafter whose first level is always right on its trunk's greedy text.

    Its layers add nothing, so its draft is a linear function of the features, which is solved for.
    """
    model, trunk, drafter, params, expected = load(name)
    texts = [np.concatenate([expected[f"{prompt}_{part}_ids"] for part in ("input", "greedy")]) for prompt in PROMPTS]
    config = dataclasses.replace(drafter.architecture, norm_before_residual=False)
    rows, targets = [], []
    for text, prompt in zip(texts, PROMPTS, strict=True):
        output = trunk_pass(trunk, text[None], model=model, layer_ids=drafter.layer_ids)
        begin = len(expected[f"{prompt}_input_ids"]) - 1
        rows.append(drafter.select_states(Decoder(model, drafter, DecodeSpec(1)), output)[0, begin:-2])
        targets.append(text[begin + 2 :])
    targets = np.concatenate(targets)
    tokens = np.unique(targets)
    D = config.block.hidden_size
    assert len(tokens) <= D
    fc = np.linalg.pinv(np.concatenate(rows)) @ np.eye(D)[np.searchsorted(tokens, targets)]
    network = jax.tree.map(jnp.asarray, params.network)
    network["fc"] = jnp.asarray(fc, jnp.float32)
    R = config.draft_vocab_size
    others = np.setdiff1d(np.arange(config.block.vocab_size), tokens)[: R - len(tokens)]
    network["head"] = jnp.eye(D, R) * (jnp.arange(R) < len(tokens))[None]
    network["norm_final"] = {"scale": jnp.ones(D)}
    layer = network["layer_0"]
    layer["norm_hidden"] = {"scale": jnp.asarray(np.random.default_rng(0).standard_normal(D), jnp.float32)}
    layer["attention"]["output"] = jnp.zeros_like(layer["attention"]["output"])
    layer["dense"]["down"] = jnp.zeros_like(layer["dense"]["down"])
    return dataclasses.replace(drafter, architecture=config), params.replace(
        network=network, draft_ids=jnp.asarray(np.concatenate([tokens, others]), jnp.int32)
    )


def accepted_share(name, drafter, draft_params):
    model, params, _, _, expected = load(name)
    prompts = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    config = DecodeConfig(max_new_tokens=32, num_steps=1, drafter=drafter)
    result = speculative_generate(params, prompts, model=model, config=config, draft_params=draft_params)
    assert result.rows() == [expected[f"{prompt}_greedy_ids"].tolist() for prompt in PROMPTS]
    return result.stats.accepted.sum() / result.stats.proposed.sum()


def test_acceptance_tells_a_wrong_reading():
    """The share of right drafts along the trunk's own text, with the states that enter the layers and one later."""
    model, trunk, _, _, expected = load("eagle3")
    drafter, params = fitted_to_the_text("eagle3")
    text = np.concatenate([expected[f"p1_{part}_ids"] for part in ("input", "greedy")])
    begin, shares = len(expected["p1_input_ids"]) - 1, []
    for shift in (0, 1):
        ids = tuple(layer + shift for layer in drafter.architecture.layer_ids)
        reader = dataclasses.replace(drafter, architecture=dataclasses.replace(drafter.architecture, layer_ids=ids))
        output = trunk_pass(trunk, text[None], model=model, layer_ids=reader.layer_ids)
        features = reader.select_states(Decoder(model, reader, DecodeSpec(1)), output)
        config = drafter.architecture
        logits = run_levels(params.network, features, text[None], trunk["embedding"], config=config)[0][0]
        drafts = np.asarray(params.draft_ids)[logits[begin:-2].argmax(axis=-1)]
        shares.append((drafts == text[begin + 2 :]).mean())
    assert shares[0] == 1 and shares[1] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nothing", "layers", "residual", "order", "absolute", "shift"])
def test_acceptance_of_whole_texts_tells_mistakes(wrong):
    """Text stays exact whatever is wrong, and drafts are accepted less often."""
    drafter, params = fitted_to_the_text("eagle3")
    config, ids = drafter.architecture, params.draft_ids
    if wrong == "layers":
        config = dataclasses.replace(config, layer_ids=tuple(layer + 1 for layer in config.layer_ids))
    elif wrong == "residual":
        config = dataclasses.replace(config, norm_before_residual=True)
    elif wrong == "order":
        config = dataclasses.replace(config, layer_ids=config.layer_ids[::-1])
    elif wrong == "absolute":  # d2t as ids in the place of offsets
        params = params.replace(draft_ids=jnp.abs(ids - jnp.arange(len(ids))))
    elif wrong == "shift":
        params = params.replace(draft_ids=(ids + 1) % config.block.vocab_size)
    share = accepted_share("eagle3", dataclasses.replace(drafter, architecture=config), params)
    assert share == 1 if wrong == "nothing" else share < 0.7


def test_medusa_heads_match():
    _, _, drafter, params, expected = load("medusa")
    found = Medusa(drafter.architecture).apply({"params": params.network}, expected["p0_hidden_postnorm"])
    assert_logits(found, expected["p0_medusa_logits"])


@pytest.mark.parametrize("is_tree", [False, True])
def test_medusa_drafts_match(is_tree):
    """A chain and the static tree, behind the prompt's last hidden state."""
    model, _, drafter, params, expected = load("medusa")
    choices = [tuple(path[path >= 0].tolist()) for path in expected["choices"]]
    drafter = dataclasses.replace(drafter, choices=tuple(choices) if is_tree else ())
    spec = DecodeSpec(3, topk=3, num_nodes=10) if is_tree else DecodeSpec(3, num_nodes=4)
    decoder = Decoder(model, drafter, spec)
    state = decoder.empty_state(StateShape(2, 64), jnp.float32)
    hidden = jnp.stack([expected[f"{prompt}_hidden_postnorm"][-1:] for prompt in PROMPTS])
    pending = jnp.array([expected[f"{prompt}_greedy_ids"][0] for prompt in PROMPTS], jnp.int32)
    state = state.replace(drafter=MedusaState(hidden), tokens=state.tokens.at[:, 0].set(pending))

    @jax.jit
    def propose(params, state):
        return drafter.propose(decoder, decoder.prepare({"embedding": jnp.zeros(1)}, params), state)[0]

    draft = propose(params, state)
    for row, prompt in enumerate(PROMPTS):
        if not is_tree:
            assert draft.tokens[row, 1:].tolist() == expected[f"{prompt}_chain_ids"].tolist()
            continue
        assert drafter.parents == tuple(expected["tree_parents"].tolist())
        assert draft.tokens[row].tolist() == expected[f"{prompt}_tree_tokens"].tolist()
        assert np.array_equal(draft.ancestor_mask[row], expected["tree_mask"])
        assert draft.depths[row].tolist() == expected["tree_depths"].tolist()


def test_typical_acceptance_matches():
    """Medusa's lossy rule on its own tree: how many drafts, and along which leaf."""
    *_, expected = load("medusa")
    parents, retrieve = jnp.asarray(expected["tree_parents"]), expected["tree_retrieve"]
    rule = jax.jit(functools.partial(typical_tree, epsilon=0.09, delta=0.3, num_steps=3))
    for case in range(len(expected["typical_tokens"])):
        p = jax.nn.softmax(expected["typical_logits"][case] / 0.7)
        found = rule(jnp.asarray(expected["typical_tokens"][case]), parents, p)
        accepted = int(expected["typical_accepted"][case])
        assert int(found.num_accepted) == accepted
        leaf = retrieve[int(expected["typical_best_path"][case])]
        assert found.path[: accepted + 1].tolist() == leaf[: accepted + 1].tolist()
