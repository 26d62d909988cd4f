"""Published checkpoint layouts against transformers' own outputs, computed in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from mtpjax import DecodeConfig, ModelConfig, MTPModel, forward, generate, speculative_generate
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingArrays
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.drafters.mtp.drafting import MTPDrafter
from mtpjax.models.params import param_shapes
from tests.golden import MTP_SETS, RECYCLING, RENAMED, SETS, SEVERAL, WINDOWS, path

SIMILAR = (
    "deepseek_v32",
    "deepseek_v3_fp8",
    "deepseek_v3_mtp2_bf16",
    "glm_moe_dsa",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_tied_bf16",
    *RENAMED,
    *WINDOWS,
)  # to others in how they decode
LIKE_DEEPSEEK = ("glm4_moe_lite", "kimi_k25")  # under other names
PROMPTS = ("p0", "p1")
PASSED = (*PROMPTS, "long")  # through a teacher-forced pass


def slow_if_like_deepseek(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_DEEPSEEK)) for name in names]


def assert_close(name, found, expected):
    """Golden's own recommendation for float32: its numbers are float64, and float32 torch differs by up to 2e-4.

    The gated norm of the hybrids amplifies rounding.
    """
    atol = 1e-3 if name.startswith(("qwen3_next", "qwen3_5")) else 2e-4
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


def assert_logits(name, found, expected):
    assert_close(name, found, expected)
    assert (np.argmax(found, axis=-1) == np.argmax(expected, axis=-1)).all()


@pytest.fixture(scope="module")
def load():
    @functools.cache
    def load(name):
        model, params = mtpjax.load(path(name), dtype=jnp.float32)
        with np.load(path(name) / "expected.npz") as expected:
            return model, params, dict(expected)

    return load


@pytest.fixture(scope="module")
def run(load):
    """The teacher-forced pass over all prompts, padded to one length."""

    @functools.cache
    def run(name, layout="ttt", num_depths=None):
        model, params, expected = load(name)
        rows = [expected[f"{prompt}_input_ids"] for prompt in PASSED]
        lengths = np.array([len(row) for row in rows])
        tokens = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows])
        return forward(params, tokens, model=model, lengths=lengths, attention_layout=layout, num_depths=num_depths)

    return run


@pytest.mark.parametrize("name", SETS)
def test_parameters_have_the_shapes_that_init_gives(name, load):
    model, params, _ = load(name)
    shapes = param_shapes(model.config, model.scan_layers)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)


@pytest.mark.parametrize("name", slow_if_like_deepseek(SETS))
def test_the_trunk_matches(name, load, run):
    _, _, expected = load(name)
    output = run(name, num_depths=2 if name in MTP_SETS else 0)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_logits(name, output.logits[row, :T], expected[f"{prompt}_logits"])
        assert_close(name, output.hidden[row, :T], expected[f"{prompt}_hidden_postnorm"])
        assert_close(name, output.hidden_prenorm[row, :T], expected[f"{prompt}_hidden_prenorm"])


@pytest.mark.parametrize("name", slow_if_like_deepseek(SETS))
def test_a_longer_prompt_matches(name, load, run):
    _, _, expected = load(name)
    output = run(name, num_depths=2 if name in MTP_SETS else 0)
    long = output.logits[PASSED.index("long")]
    assert_logits(name, long[expected["long_positions"]], expected["long_logits"])


@pytest.mark.parametrize("name", slow_if_like_deepseek(MTP_SETS))
def test_the_first_depth_matches(name, load, run):
    _, _, expected = load(name)
    output = run(name, num_depths=2)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_logits(name, output.mtp_logits[0][row, : T - 1], expected[f"{prompt}_mtp1_logits"])
        assert_close(name, output.mtp_hidden[0][row, : T - 1], expected[f"{prompt}_mtp1_hidden_postnorm"])


@pytest.mark.parametrize(
    ("name", "layout", "meant"),
    [
        *(
            pytest.param(*each.values, "ttt", "rec_eagle", marks=each.marks)
            for each in slow_if_like_deepseek(RECYCLING)
        ),
        *((name, "stream", "rec_fresh") for name in ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next")),
        *((name, "ttt", "layer") for name in SEVERAL),
    ],
)
def test_the_second_depth_matches(name, layout, meant, load, run):
    _, _, expected = load(name)
    output = run(name, layout, num_depths=2)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_logits(name, output.mtp_logits[1][row, : T - 2], expected[f"{prompt}_mtp2_{meant}_logits"])


@pytest.mark.parametrize("name", ["deepseek_v3_mtp2_bf16"])
def test_the_first_of_two_modules_can_be_recycled(name, load):
    """`mtp2_rec_eagle` of the set with two modules: its first module alone, recycled."""
    model, params, expected = load(name)
    model = MTPModel(ModelConfig.from_dict({**model.config.to_dict(), "num_mtp_modules": 1}))
    params = {name: value for name, value in params.items() if name != "mtp_1"}
    output = forward(params, expected["p0_input_ids"][None], model=model, num_depths=2)
    assert_logits("deepseek_v3", output.mtp_logits[1][0, :-2], expected["p0_mtp2_rec_eagle_logits"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in SETS])
def test_greedy_tokens_match(name, load):
    model, params, expected = load(name)
    prompts = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    config = DecodeConfig(max_new_tokens=24, num_steps=2)
    decoder = speculative_generate if name in MTP_SETS else generate
    wanted = [expected[f"{prompt}_greedy_ids"].tolist() for prompt in PROMPTS]
    assert decoder(params, prompts, model=model, config=config).rows() == wanted


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in MTP_SETS]
)
def test_drafted_tokens_match(name, load):
    model, params, expected = load(name)
    num_steps = len(expected["p0_draft_ids"])
    rows = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.stack([np.pad(row, (0, 128 - len(row))) for row in rows])
    sampling = SamplingArrays.greedy(len(rows))
    batch = NewRows.without_stops(*map(jnp.asarray, (tokens, lengths, lengths + 24)), sampling)
    drafter, spec = MTPDrafter(), DecodeSpec(num_steps, num_nodes=num_steps + 1, prefill_chunk=16)
    decoder = Decoder(model, drafter, spec)
    state = decoder.empty_state(StateShape.of(batch), jnp.float32)

    @jax.jit
    def draft(params, state, batch):
        weights = decoder.prepare(params, drafter.default_params(params, DecodeConfig(), model=model))
        state = prefill(decoder, weights, start_rows(state, batch, vocab_size=model.config.vocab_size))
        return drafter.propose(decoder, weights, state)[1].tokens

    tokens = np.asarray(draft(params, state, batch))
    for row, prompt in enumerate(PROMPTS):
        behind = tokens[row, lengths[row] :]
        assert behind[0] == expected[f"{prompt}_greedy_ids"][0]
        assert behind[1 : num_steps + 1].tolist() == expected[f"{prompt}_draft_ids"].tolist()
