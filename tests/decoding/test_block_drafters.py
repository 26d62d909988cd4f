"""DFlash and DSpark drafters in the loop: texts of plain decoding, laws, caches, rows that enter, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, speculative_generate
from mtpjax.decoding import rng
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.drafters import scoring
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig, block_states
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view
from mtpjax.models.model import bind, multiply_head
from tests.helpers.drafter_mesh import check_mesh
from tests.helpers.laws import first_token_law, second_token_law, second_tokens
from tests.helpers.running import Running

V, D, R = 11, 32, 7
DRAFT_IDS = jnp.array([0, 2, 3, 5, 7, 8, 10], jnp.int32)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5], [9, 8, 7, 9, 8, 7, 9]]
BLOCK = ModelConfig(
    vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=24, rope_theta=500.0, use_qk_norm=True,
)  # fmt: skip
SIZES = {"block": BLOCK, "layer_ids": (0, 1, 2), "num_target_layers": 2, "mask_token_id": 6}
HEADS = {"markov_rank": 4, "has_confidence": True, "confidence_with_markov": True}


@pytest.fixture(scope="module")
def trunk(small):
    """A model whose small vocabulary makes random drafts right now and then."""
    return small("grouped", "random", vocab_size=V, num_mtp_modules=0)


def init(network, config):
    view = full_view(BLOCK, jnp.ones((1, 2), jnp.int32))
    zeros = jnp.zeros((1, 2, config.features_size))
    params = jax.jit(network(config).init)(jax.random.key(3), zeros, jnp.zeros((1, 2, D)), view)["params"]
    return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)


@functools.cache
def dflash(**switches):
    """A random network with a sliding, causal layer and a full one, and a draft vocabulary of its own."""
    given = {"windows": (4, 0), "is_causal": (True, False), "own_head": True, "draft_vocab_size": R} | switches
    config = DFlashConfig(**SIZES, **{"block_size": 4} | given)
    ids = DRAFT_IDS if config.draft_vocab_size < V else None
    return DFlashDrafter(architecture=config), DraftParams(init(DFlash, config), ids)


@functools.cache
def dspark(threshold=0.0, **switches):
    """A random network that shares the trunk's head and drafts from its anchor."""
    given = {"markov_head": "vanilla", "sample_from_anchor": True} | HEADS | switches
    config = DSparkConfig(**SIZES, **{"block_size": 3} | given)
    drafter = DSparkDrafter(architecture=config, confidence_threshold=threshold)
    ids = DRAFT_IDS if config.draft_vocab_size < V else None
    return drafter, DraftParams(init(DSpark, config), ids)


DRAFTERS = {"dflash": dflash, "dspark": dspark, "confident": functools.partial(dspark, 0.5)}


def decode(trunk, drafter, sampling=None, **settings):
    model, params = trunk
    config = DecodeConfig(
        **{"max_new_tokens": 20, "prefill_chunk": 8, "drafter": drafter[0], "num_steps": 3} | settings
    )
    arguments = {"model": model, "config": config, "sampling": sampling}
    result = speculative_generate(params, PROMPTS, **arguments, draft_params=drafter[1])
    result.stats.check()
    return result, generate(params, PROMPTS, **arguments).rows()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        (dspark, {}),
        *(
            pytest.param(drafter, settings, marks=SLOW)
            for drafter, settings in (
                (dflash, {}),
                (functools.partial(dspark, 0.5), {}),
                (dflash, {"num_steps": 1}),
                (dflash, {"draft_window": 3}),
                (dflash, {"min_rows": 5}),
                (functools.partial(dspark, markov_head="gated"), {}),
                (functools.partial(dspark, markov_head="rnn"), {}),
                (functools.partial(dspark, markov_head="rnn", own_head=True, draft_vocab_size=R), {}),
                (functools.partial(dspark, own_embedding=True, sample_from_anchor=False), {"num_steps": 2}),
                (functools.partial(dflash, window_from_anchor=True), {}),
            )
        ),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(drafter, settings, trunk):
    result, plain = decode(trunk, drafter(), **settings)
    assert result.rows() == plain
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()


@SLOW
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_kernels_draft_as_xla_does(name, trunk):
    found, expected = (
        decode(trunk, DRAFTERS[name](), max_new_tokens=6, implementation=implementation)[0]
        for implementation in ("interpreted", "xla")
    )
    assert found.rows() == expected.rows()
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)


@SLOW
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.5, "presence_penalty": 0.3, "min_new_tokens": 40}])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_rule_sample_draws_the_tokens_of_plain_decoding(name, penalties, trunk):
    sampling = SamplingParams(temperature=[0.3, 0.7, 0.0, 0.5], top_k=[0, 5, 0, 0], seed=[1, 2, 3, 4], **penalties)
    settings = {"acceptance": "sample", "stop_token_ids": (4,), "max_new_tokens": 50}
    result, plain = decode(trunk, DRAFTERS[name](), sampling, **settings)
    assert result.rows() == plain and result.stats.accepted.sum() > 0


@SLOW
@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("costs", [(1.0, 1.02, 1.04, 1.06), (1.0, 1.3, 1.6, 1.9)])
def test_an_adaptive_depth_keeps_the_text(name, costs, trunk):
    """Depths change: rounds without drafts leave a backlog, which the context takes in later."""
    settings = {"max_new_tokens": 60, "depth_policy": "adaptive", "depth_costs": costs}
    result, plain = decode(trunk, DRAFTERS[name](), **settings)
    assert result.rows() == plain and result.stats.proposed.sum() > 0


RULES = ("token", "block", "sample")


@pytest.mark.parametrize(
    ("name", "rule", "batch"),
    [
        ("confident", "block", 1024),
        *(pytest.param(name, rule, 4096, marks=SLOW) for name in DRAFTERS for rule in RULES),
        *(pytest.param(name, "typical", 1024, marks=SLOW) for name in ("confident",)),
    ],
)
def test_sampled_texts_follow_the_targets_law(name, rule, batch, trunk):
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()
    config = DecodeConfig(max_new_tokens=3, num_steps=2, acceptance=rule, prefill_chunk=8, drafter=drafter)
    tokens, result = second_tokens(model, params, config, draft_params, batch)
    result.stats.check()
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()
    if name == "confident":
        assert result.stats.proposed.sum() < 2 * result.stats.rounds.sum()
    if rule != "typical":  # lossy: only its padding behind the end of a draft is tested
        # 4.5 standard errors in 11 tokens and 10 cases: by chance once in 1,000 runs.
        assert first_token_law(tokens, second_token_law(model, params)) < 4.5


@dataclasses.dataclass(frozen=True)
class OwnConfidence(DSparkDrafter):
    """Wrong on purpose: whether a draft is proposed depends on the token that was drawn for it."""

    def _confidence(self, prepared, draft, hidden, *, model):
        shifted = draft.replace(tokens=jnp.pad(draft.tokens[:, 1:], ((0, 0), (0, 1))))
        return super()._confidence(prepared, shifted, hidden, model=model)


class SharedNoise(DSparkDrafter):
    """Wrong on purpose, with `share_noise`: drafts are drawn with the noise of the bonus token."""


def share_noise(monkeypatch):
    gumbel = rng.gumbel

    def shared(seed, position, purpose, node, *sizes):
        return gumbel(seed, position, rng.BONUS, jnp.zeros_like(node), *sizes)

    monkeypatch.setattr(scoring.rng, "gumbel", shared)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        pytest.param(OwnConfidence, "token", marks=SLOW),
        pytest.param(OwnConfidence, "block", marks=SLOW),
        pytest.param(SharedNoise, "token", marks=SLOW),
        pytest.param(SharedNoise, "block", marks=SLOW),
    ],
)
def test_wrong_drafters_break_the_law(wrong, rule, trunk, monkeypatch):
    """The test above can fail: a decision by the drawn token, and noise shared with the residual."""
    model, params = trunk
    # A draft vocabulary: noise of drafts that were not drawn says something about its tokens only.
    drafter, draft_params = dspark(own_head=True, draft_vocab_size=R)
    # The chance of the first draft turns on its token.
    threshold = 0.5 if wrong is OwnConfidence else 0.0
    network = dict(draft_params.network)
    out = network["confidence_out"]
    network["confidence_out"] = 20 * out.at[:D].set(0)
    drafter = wrong(architecture=drafter.architecture, confidence_threshold=threshold)
    if wrong is SharedNoise:
        share_noise(monkeypatch)
        # q is 0.35 for two rare tokens, and 0.3 for the likeliest, which then loses in the residual too often.
        logits = jnp.full(R, -20.0).at[jnp.array([1, 2, 4])].set(jnp.log(jnp.array([0.35, 0.35, 0.3])))
        network["head"] = jnp.zeros_like(network["head"])
        network["markov_in"] = jnp.ones_like(network["markov_in"])
        network["markov_out"] = jnp.broadcast_to(logits[None] / 4, (4, R))
    config = DecodeConfig(max_new_tokens=3, num_steps=2, acceptance=rule, prefill_chunk=8, drafter=drafter)
    tokens, _ = second_tokens(model, params, config, draft_params.replace(network=network), 4096)
    assert first_token_law(tokens, second_token_law(model, params)) > 4.5


def start(trunk, drafter, rows, chunk, capacity=64):
    """The state behind prefill, and the jitted next draft."""
    model, params = trunk
    spec = DecodeSpec(3, num_nodes=4, prefill_chunk=chunk, rule="token")
    tokens = jnp.stack([jnp.pad(jnp.array(row, jnp.int32), (0, capacity - len(row))) for row in rows])
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    sampling = SamplingArrays.greedy(len(rows))
    decoder = Decoder(model, drafter[0], spec)
    new = NewRows.without_stops(tokens, lengths, lengths + 20, sampling)
    state = start_rows(decoder.empty_state(StateShape.of(new), jnp.float32), new, vocab_size=V)

    @jax.jit
    def begin(params, draft_params, state):
        weights = decoder.prepare(params, draft_params)
        state = prefill(decoder, weights, state)
        return state, drafter[0].propose(decoder, weights, state)

    return begin(params, drafter[1], state)


@SLOW
@pytest.mark.parametrize("name", ["dflash", "anchor", "dspark"])
def test_prefill_in_chunks_and_the_uncached_twin_agree(name, trunk):
    """The caches and the first draft do not depend on the chunks, and the draft is that of blocks over whole rows."""
    model, params = trunk
    make = {"dflash": dflash, "dspark": dspark, "anchor": functools.partial(dflash, window_from_anchor=True)}[name]
    drafter, draft_params = make()
    rows = [[1, 2, 3, 1, 2, 9, 4, 4, 1], [4], [5, 6, 5]]
    whole, (draft, _) = start(trunk, (drafter, draft_params), rows, 16)
    parts, (again, _) = start(trunk, (drafter, draft_params), rows, 2)
    np.testing.assert_array_equal(draft.tokens, again.tokens)
    np.testing.assert_allclose(draft.probabilities, again.probabilities, atol=1e-5)
    for row, text in enumerate(rows):
        for found, expected in zip(jax.tree.leaves(parts.drafter.caches[0].layers), jax.tree.leaves(whole.drafter.caches[0].layers), strict=True):  # fmt: skip  # noqa: E501
            np.testing.assert_allclose(found[row, :, : len(text)], expected[row, :, : len(text)], atol=1e-5)
    if name == "dspark":  # its first level alone: later ones depend on drafts
        assert drafter.architecture.sample_from_anchor
    T = max(map(len, rows)) + 1
    tokens, anchors = np.asarray(whole.tokens[:, :T]), np.array([[len(row)] for row in rows])
    view = full_view(model.config, jnp.ones(tokens.shape, jnp.int32))
    output = bind(model, params)(jnp.asarray(tokens), view, layer_ids=drafter.layer_ids, method="run_trunk")
    own = drafter.architecture
    head = draft_params.network["head"] if own.own_head else params["head"]
    features = drafter.select_states(Decoder(model, drafter, DecodeSpec(1)), output)
    blocks = jax.jit(functools.partial(block_states, config=own))
    hidden = blocks(draft_params.network, features, tokens, anchors, params["embedding"])
    logits = multiply_head(hidden, head)
    logits = np.asarray(logits[:, 0, own.block_size - own.num_drafts :])
    if name == "dspark":
        bias, _ = DSpark(own).apply(
            {"params": draft_params.network}, hidden[:, 0, :1], tokens[np.arange(3), anchors[:, 0]][:, None],
            jnp.zeros((3, 1, 0)), method="markov_bias",
        )  # fmt: skip
        assert (draft.tokens[:, 1] == (logits[:, 0] + bias[:, 0]).argmax(axis=-1)).all()
        return
    drafts = np.asarray(draft_params.draft_ids)[logits.argmax(axis=-1)]
    np.testing.assert_array_equal(draft.tokens[:, 1:], drafts)


@SLOW
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_rows_enter_a_running_state(name, trunk):
    """Rows that continue a text in their pages draft as rows that are decoded from the start."""
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()
    config = DecodeConfig(max_new_tokens=9, num_steps=2, drafter=drafter, prefill_chunk=8, acceptance="greedy")
    arguments = {"model": model, "config": config, "draft_params": draft_params}
    pages = [list(range(20)), list(range(20, 40))]
    running, fresh = (Running(params, **arguments) for _ in range(2))
    texts, cached = [list(prompt) for prompt in PROMPTS[:2]], [0, 0]
    for _ in range(2):
        for each, counts in ((running, cached), (fresh, [0, 0])):
            for slot in range(2):
                each.enter(slot, texts[slot], pages[slot], num_cached=counts[slot])
            each.go_on()
        found, plain = running.collect(), speculative_generate(params, texts, **arguments)
        assert found.rows() == plain.rows()
        np.testing.assert_array_equal(found.stats.accepted, plain.stats.accepted)
        # The context of a row that continues is that of a row which is prefilled from its beginning.
        for row in range(2):
            contexts = (context_of(each.state, row, pages[row]) for each in (running, fresh))
            for kept, expected in zip(*contexts, strict=True):
                np.testing.assert_allclose(kept, expected, atol=1e-5)
        # The next turn begins with the text of this one, of which the second row changes the end.
        whole = [[*text, *new] for text, new in zip(texts, found.rows(), strict=True)]
        texts = [[*whole[0], 3, 1], [*whole[1][:-2], 8]]
        extended = np.asarray(drafter.num_extended(running.state.drafter))
        cached = np.minimum([len(whole[0]) - 1, len(whole[1]) - 2], extended).tolist()


def context_of(state, row, pages):
    """Keys and values of a row's context, `[K, length, H]` each."""
    length = int(state.drafter.caches[0].length[row])
    for leaf in jax.tree.leaves(state.drafter.caches[0].layers):
        yield np.concatenate([np.asarray(leaf[page]) for page in pages], axis=1)[:, :length]


@SLOW
def test_a_mesh_splits_rows_and_not_the_trunk(trunk):
    model, params = trunk
    drafter, draft_params = dspark()
    check_mesh(model, params, drafter, draft_params, PROMPTS)


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        (dflash, {"draft_vocabulary": (1, 2)}, "applies only to drafter 'mtp'"),
        (dflash, {"topk": 2, "num_steps": 2}, "DFlash drafts chains only"),
        (dflash, {"num_steps": 4}, "exceeds the 3 drafts of a DFlash block"),
        (dspark, {"num_steps": 4}, "exceeds the 3 drafts of a DSpark block"),
        (
            functools.partial(dspark, 0.5),
            {"num_steps": 1, "depth_policy": "adaptive", "depth_costs": (1, 2)},
            "both choose the depth",
        ),
    ],
)
def test_settings_that_a_drafter_cannot_do_are_refused(drafter, settings, message, trunk):
    model, params = trunk
    drafter, draft_params = drafter()
    config = DecodeConfig(drafter=drafter, **settings)
    with pytest.raises(ValueError, match=message):
        speculative_generate(params, PROMPTS, model=model, config=config, draft_params=draft_params)


def test_another_trunk_or_missing_parameters_are_refused(trunk, small):
    model, params = trunk
    config = DecodeConfig(drafter=dspark()[0])
    with pytest.raises(ValueError, match="DSparkDrafter needs draft_params"):
        speculative_generate(params, PROMPTS, model=model, config=config)
    other, others = small("grouped", "random", vocab_size=V, num_mtp_modules=0, num_hidden_layers=3)
    with pytest.raises(ValueError, match="for a trunk of depth 2; this one has depth 3"):
        speculative_generate(others, PROMPTS, model=other, config=config, draft_params=dspark()[1])


def test_sizes_that_do_not_fit_are_refused():
    for config, changes, message in (
        (dflash()[0].architecture, {"layer_ids": (0, 0)}, "must be distinct"),
        (dflash()[0].architecture, {"layer_ids": (0, 4)}, "within 0..3"),
        (dflash()[0].architecture, {"windows": (1,)}, "1 windows for 2 layers"),
        (dflash()[0].architecture, {"mask_token_id": 11}, "not within the vocabulary of 11"),
        (dflash()[0].architecture, {"own_head": False}, "the trunk's head has columns for all tokens"),
        (dflash()[0].architecture, {"block_size": 1}, "at least 2"),
        (dspark()[0].architecture, {"markov_rank": 0}, "contradicts markov_head"),
        (dspark()[0].architecture, {"has_confidence": False}, "needs a confidence head"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
    without = dataclasses.replace(dspark()[0].architecture, has_confidence=False, confidence_with_markov=False)
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        DSparkDrafter(architecture=without, confidence_threshold=0.5)
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        dspark(1.5)
