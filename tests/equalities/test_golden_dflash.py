"""DFlash and DSpark drafters against their own published code, computed in float64."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from conversion.hf_config import parse_config
from mtpjax import DecodeConfig, MTPModel, generate, speculative_generate
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Acceptance, StateShape
from mtpjax.drafters.dflash.network import block_states
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSpark
from mtpjax.models.masks import full_view
from mtpjax.models.model import bind, multiply_head
from tests.golden import drafter_path, has_trunk

NAMES = ("dflash", "dflash_full", "dspark")
CAPACITY = 128


@functools.cache
def load(name):
    """The trunk's model, the parameters of it that are there, the drafter, its parameters, and what is expected."""
    folder = drafter_path(name)
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    if has_trunk(name):
        model, params = mtpjax.load(folder / "trunk", dtype=jnp.float32)
    else:
        model = MTPModel(parse_config(json.loads((folder / "trunk" / "config.json").read_text())).model)
        params = {part: expected[part] for part in ("embedding", "head") if part in expected}
    return model, params, *mtpjax.load_drafter(folder / "draft", model=model), expected


@functools.cache
def prompts(name):
    return tuple(prompt for prompt in ("p0", "p1") if f"{prompt}_input_ids" in load(name)[-1])


def shared(name):
    """The embedding and the head that the drafter uses."""
    _, trunk, drafter, params, _ = load(name)
    own = drafter.architecture
    return (params.network if own.own_embedding else trunk)["embedding"], (params.network if own.own_head else trunk)["head"]  # fmt: skip  # noqa: E501


def text(name, prompt):
    expected = load(name)[-1]
    return np.concatenate([expected[f"{prompt}_input_ids"], expected[f"{prompt}_greedy_ids"]])


@functools.cache
def text_features(name, prompt):
    """The trunk states of prompt and continuation, from the trunk if it is there."""
    model, params, drafter, _, expected = load(name)
    if not has_trunk(name):
        return expected[f"{prompt}_text_features"]
    return trunk_features(params, text(name, prompt)[None], model=model, drafter=drafter)[0]


@functools.partial(jax.jit, static_argnames=("model", "drafter"))
def trunk_features(params, tokens, *, model, drafter):
    view = full_view(model.config, jnp.ones_like(tokens))
    output = bind(model, params)(tokens, view, layer_ids=drafter.layer_ids, method="run_trunk")
    return drafter.select_states(Decoder(model, drafter, DecodeSpec(1)), output)


@functools.partial(jax.jit, static_argnames=("config",))
def run_blocks(network, features, tokens, anchors, embedding, head, *, config):
    hidden = block_states(network, features, tokens, anchors, embedding, config=config)
    return hidden, multiply_head(hidden, head)


def blocks(name, prompt, config=None, features=None, tokens=None):
    """Hidden states and logits of the blocks behind the true anchors, and behind the prompt and its first token."""
    _, _, drafter, params, expected = load(name)
    anchors = np.append(expected[f"{prompt}_anchors"], len(expected[f"{prompt}_input_ids"]))
    features = text_features(name, prompt) if features is None else features
    arguments = features[None], (text(name, prompt) if tokens is None else tokens)[None], anchors[None], *shared(name)
    hidden, logits = run_blocks(params.network, *arguments, config=config or drafter.architecture)
    first = drafter.architecture.block_size - drafter.architecture.num_drafts
    return hidden[0], logits[0, :, first:]


def assert_logits(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_match(name):
    """Behind the prompt and its first token, and behind true anchors within the prompt: the layout of training."""
    expected = load(name)[-1]
    for prompt in prompts(name):
        hidden, logits = blocks(name, prompt)
        assert_logits(hidden[-1], expected[f"{prompt}_block_hidden"])
        assert_logits(logits[-1], expected[f"{prompt}_block_logits"])
        if name != "dspark":  # its anchors' logits come after the Markov head
            assert_logits(logits[:-1], expected[f"{prompt}_anchor_logits"])


@functools.partial(jax.jit, static_argnames=("config",))
def run_heads(network, hidden, previous, *, config):
    apply = functools.partial(DSpark(config).apply, {"params": network})
    bias, _ = apply(hidden, previous, jnp.zeros((len(hidden), 1, 0)), method="markov_bias")
    return bias, apply(hidden, previous, method="confidence_logits")


def test_the_heads_of_dspark_match():
    """The Markov and confidence heads behind true tokens, where every slot follows the true token before it."""
    _, _, drafter, params, expected = load("dspark")
    for prompt in prompts("dspark"):
        hidden, logits = blocks("dspark", prompt)
        anchors, X = expected[f"{prompt}_anchors"], drafter.architecture.block_size
        previous = text("dspark", prompt)[anchors[:, None] + np.arange(X)[None]]
        bias, confidence = run_heads(params.network, hidden[:-1], previous, config=drafter.architecture)
        assert_logits(logits[:-1] + bias, expected[f"{prompt}_anchor_logits"])
        assert_logits(confidence, expected[f"{prompt}_anchor_confidence_logits"])
        chain = np.append(expected[f"{prompt}_greedy_ids"][0], expected[f"{prompt}_chain_ids"][:-1])
        bias, confidence = run_heads(params.network, hidden[-1:], chain[None], config=drafter.architecture)
        assert_logits(logits[-1] + bias[0], expected[f"{prompt}_chain_logits"])
        assert_logits(confidence[0], expected[f"{prompt}_chain_confidence_logits"])


def test_the_outputs_of_the_layers_are_read():
    """The original's wrong variant reads the states that enter the layers: one layer earlier."""
    model, trunk, drafter, _, expected = load("dflash")
    ids = tuple(layer - 1 for layer in drafter.architecture.layer_ids)
    wrong = dataclasses.replace(drafter, architecture=dataclasses.replace(drafter.architecture, layer_ids=ids))
    for prompt in prompts("dflash"):
        T = len(expected[f"{prompt}_input_ids"])
        assert_logits(text_features("dflash", prompt)[:T], expected[f"{prompt}_features"])
        features = trunk_features(trunk, text("dflash", prompt)[None], model=model, drafter=wrong)[0]
        found = blocks("dflash", prompt, features=features)[1][-1]
        assert_logits(found, expected[f"{prompt}_alt_hidden_states_index_not_shifted_block_logits"])
        assert np.abs(found - expected[f"{prompt}_block_logits"]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dflash", {"is_causal": (False, False)}),
        ("dflash", {"windows": (13, 0)}),
        pytest.param("dflash", {"is_causal": (True, True)}, marks=pytest.mark.slow),
        pytest.param("dflash", {"windows": (11, 0)}, marks=pytest.mark.slow),
        pytest.param("dflash", {"windows": (0, 0)}, marks=pytest.mark.slow),
        pytest.param("dflash", {"window_from_anchor": True}, marks=pytest.mark.slow),
        pytest.param("dflash", {"mask_token_id": 318}, marks=pytest.mark.slow),
        pytest.param("dflash", {"block_size": 5}, marks=pytest.mark.slow),
        pytest.param("dflash_full", {"is_causal": (True, False)}, marks=pytest.mark.slow),
        pytest.param("dspark", {"is_causal": (True, True)}, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_switch_is_caught(name, changes):
    _, _, drafter, _, expected = load(name)
    logits = blocks(name, "p0", dataclasses.replace(drafter.architecture, **changes))[1][-1]
    wanted = expected["p0_block_logits"][: len(logits)]
    # One slot less in the block changes the others by 0.03, 150 times the tolerance. The other mistakes change more.
    assert np.abs(logits - wanted).max() > (0.02 if "block_size" in changes else 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_is_shifted_is_caught(name):
    """The other kind of anchor, and a context that includes the anchor's own state, which is not known yet."""
    expected, drafter = load(name)[-1], load(name)[2]
    own = drafter.architecture
    hidden, _ = blocks(name, "p0")
    other = np.asarray(hidden[-1] @ shared(name)[1])[: own.num_drafts]
    if not own.sample_from_anchor:
        assert np.abs(other - expected["p0_block_logits"]).max() > 0.3
    T = len(expected["p0_input_ids"])
    _, logits = blocks(name, "p0", features=np.roll(text_features(name, "p0"), 1, axis=0), tokens=text(name, "p0"))
    assert np.abs(logits[-1] - expected["p0_block_logits"]).max() > 0.3
    assert len(text_features(name, "p0")) > T


@pytest.mark.slow
def test_a_norm_of_the_context_is_caught():
    """The layers' input norm is for the block only."""
    _, _, _, params, expected = load("dflash")
    network = jax.tree.map(lambda leaf: leaf, params.network)
    scale = network["layer_0"]["norm_attention"]["scale"]
    network["norm_context"] = {"scale": network["norm_context"]["scale"] * scale}
    _, _, drafter, _, _ = load("dflash")
    anchors = np.array([[len(expected["p0_input_ids"])]])
    arguments = text_features("dflash", "p0")[None], text("dflash", "p0")[None], anchors, *shared("dflash")
    _, logits = run_blocks(network, *arguments, config=drafter.architecture)
    assert np.abs(logits[0, 0, 1:] - expected["p0_block_logits"]).max() > 0.1


def rounds(name, prompt, num_steps, drafter=None):
    """Greedy rounds along the known text: drafts, accepted counts, and the drafter's confidences.

    The trunk's states are those of the text, so that the trunk itself is not needed.
    """
    model, trunk, own, draft_params, expected = load(name)
    drafter = drafter or own
    whole, begin = text(name, prompt), len(expected[f"{prompt}_input_ids"])
    features = jnp.pad(jnp.asarray(text_features(name, prompt)), ((0, CAPACITY - len(whole)), (0, 0)))[None]
    spec, sampling = DecodeSpec(num_steps, num_nodes=num_steps + 1), SamplingArrays.greedy(1)
    decoder = Decoder(model, drafter, spec)
    trunk = {"embedding": jnp.zeros(1)} | trunk  # for the dtype
    state = decoder.empty_state(StateShape(1, CAPACITY), jnp.float32)
    tokens = jnp.pad(jnp.asarray(whole), (0, CAPACITY - len(whole)))[None]
    # Prefill: the context of the prompt. The drafter never sees tokens or states behind its own round.
    state = state.replace(
        tokens=tokens, length=jnp.array([begin], jnp.int32), done=jnp.zeros(1, bool), settings=state.settings.replace(
            prompt_length=jnp.array([begin], jnp.int32), sampling=sampling)
    )  # fmt: skip

    @jax.jit
    def begin_text(trunk, draft_params, state):
        weights = decoder.prepare(trunk, draft_params)
        start = jnp.zeros(1, jnp.int32)
        return state.replace(
            drafter=drafter.extend(decoder, weights, state, features[:, :32], start),
            length=state.length + 1,
        )

    @jax.jit
    def advance(trunk, draft_params, state):
        draft, state = drafter.propose(decoder, decoder.prepare(trunk, draft_params), state)
        target = jax.lax.dynamic_slice_in_dim(tokens, state.length[0], num_steps + 1, axis=1)
        accepted = jnp.cumprod(draft.tokens[:, 1:] == target[:, :-1], axis=1).sum(axis=1).astype(jnp.int32)
        if draft.num_drafted is not None:
            accepted = jnp.minimum(accepted, draft.num_drafted)
        # Rows behind the accepted ones have states of other tokens, which must never be read.
        states = jax.lax.dynamic_slice_in_dim(features, state.length[0] - 1, num_steps + 1, axis=1)
        states = jnp.where((jnp.arange(num_steps + 1)[None] > accepted[:, None])[:, :, None], 7.0, states)
        kept = drafter.commit(decoder, state, states, Acceptance(None, accepted, target))
        return draft, accepted, state.replace(drafter=kept, length=state.length + accepted + 1)

    state = begin_text(trunk, draft_params, state)
    drafts, accepted, positions = [], [], []
    while int(state.length[0]) < len(whole) - num_steps - 1:
        positions.append(int(state.length[0]) - begin)
        draft, count, state = advance(trunk, draft_params, state)
        drafts.append(draft.tokens[0, 1:].tolist())
        accepted.append(int(count[0]))
    return drafts, accepted, positions


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2]), "dspark"])
def test_rounds_match(name):
    """The cached path drafts and accepts what the original does, round by round."""
    _, _, drafter, _, expected = load(name)
    K = drafter.architecture.num_drafts
    for prompt in prompts(name):
        drafts, accepted, _ = rounds(name, prompt, K)
        assert drafts[0] == expected[f"{prompt}_chain_ids"].tolist()
        if name == "dspark":
            # The original stops at 28 new tokens, and these rounds at the end of the known text.
            wanted = expected[f"{prompt}_rounds_accepted"].tolist()
            count = min(len(accepted), len(wanted))
            assert count >= len(wanted) - 3 and accepted[:count] == wanted[:count]
            assert drafts[:count] == expected[f"{prompt}_rounds_drafts"].tolist()[:count]
        else:
            # The original's last round is cut at its limit of 28 new tokens.
            lengths = (np.array(accepted) + 1).tolist()
            wanted = expected[f"{prompt}_rounds_lengths"].tolist()
            count = min(len(lengths), len(wanted) - 1)
            assert count >= len(wanted) - 3 and lengths[:count] == wanted[:count]


@pytest.mark.slow
def test_a_threshold_ends_drafts_where_the_confidence_falls():
    """A round accepts the drafts before the first slot whose confidence is below the threshold, at most."""
    _, _, drafter, _, expected = load("dspark")
    assert isinstance(drafter, DSparkDrafter)
    confidence = jax.nn.sigmoid(expected["p0_rounds_confidence_logits"])
    threshold = float(np.quantile(confidence, 0.4))
    drafts, accepted, positions = rounds("dspark", "p0", 5, dataclasses.replace(drafter, confidence_threshold=threshold))  # fmt: skip  # noqa: E501
    begins = np.cumsum([1, *(expected["p0_rounds_accepted"] + 1)])[:-1].tolist()
    compared = 0
    for draft, count, position in zip(drafts, accepted, positions, strict=True):
        if position in begins:  # the original has a round that begins here
            row = begins.index(position)
            assert draft == expected["p0_rounds_drafts"][row].tolist()
            kept = int(np.cumprod(confidence[row] >= threshold).sum())
            assert count == min(kept, expected["p0_rounds_accepted"][row])
            compared += 1
    assert compared >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if has_trunk(name)])
def test_texts_are_those_of_plain_decoding(name):
    """Whole rounds with the trunk: the original's text, prompts of two lengths in chunks, and its rounds."""
    model, params, drafter, draft_params, expected = load(name)
    K = drafter.architecture.num_drafts
    rows = [expected[f"{prompt}_input_ids"] for prompt in prompts(name)]
    config = DecodeConfig(max_new_tokens=32, num_steps=K, drafter=drafter, prefill_chunk=16)
    result = speculative_generate(params, rows, model=model, config=config, draft_params=draft_params)
    assert result.rows() == [expected[f"{prompt}_greedy_ids"][:32].tolist() for prompt in prompts(name)]
    for row, prompt in enumerate(prompts(name)):
        if f"{prompt}_rounds_lengths" in expected:
            # After n rounds the text has 1 + sum(lengths) tokens; a draft level per token tells where rounds begin.
            begins = np.flatnonzero(np.asarray(result.origins[row]) == 0)
            lengths = np.diff(begins)
            wanted = expected[f"{prompt}_rounds_lengths"][:-1]
            assert lengths[: len(wanted)].tolist() == wanted.tolist()[: len(lengths)]


@pytest.mark.slow
def test_plain_text_is_the_same():
    model, params, drafter, draft_params, expected = load("dflash")
    rows = [expected[f"{prompt}_input_ids"] for prompt in prompts("dflash")]
    config = DecodeConfig(max_new_tokens=32, num_steps=3, drafter=drafter)
    plain = generate(params, rows, model=model, config=config)
    for settings in ({"draft_window": 6}, {"min_rows": 3}, {"num_steps": 1}, {"prefill_chunk": 3}):
        changed = dataclasses.replace(config, **settings)
        result = speculative_generate(params, rows, model=model, config=changed, draft_params=draft_params)
        assert result.rows() == plain.rows()
