"""Drafters beside MTP: prompt lookup against vLLM's drafts, a model without modules, and drafters of one's own."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, speculative_generate
from mtpjax.decoding.acceptance.rules import AcceptanceRule
from mtpjax.decoding.acceptance.walk import AcceptedPath
from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.reference import plain_generate
from mtpjax.decoding.state import Draft
from mtpjax.drafters.lookup.drafting import find_ngram
from mtpjax.drafters.method import DraftMethod
from mtpjax.inference.requests import check_settings
from mtpjax.models.view import read_rows
from tests.helpers.laws import first_token_law, second_token_law, second_tokens

CASES = json.loads((Path(__file__).parents[1] / "golden" / "lookup" / "cases.json").read_text())
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5], [9, 8, 7, 9, 8, 7, 9]]
LOOKUP = DecodeConfig(max_new_tokens=24, num_steps=3, drafter="lookup", prefill_chunk=8, stop_sequences=((3, 4),))


@pytest.fixture(scope="module")
def without_modules(small):
    """A model whose small vocabulary makes its text repeat itself, so that lookups succeed and fail."""
    return small("grouped", "random", vocab_size=11, num_mtp_modules=0)


@pytest.mark.slow
def test_every_drafted_text_equals_vllms():
    """All 200 cases, padded to one length and run with each case's own settings."""
    L = max(len(case["tokens"]) for case in CASES) + 8
    find = jax.jit(find_ngram, static_argnums=(2, 3, 4))
    assert len(CASES) == 200
    for case in CASES:
        tokens = np.full(L, 2, np.int32)  # the rest of the buffer is garbage that occurs in the texts too
        tokens[: len(case["tokens"])] = case["tokens"]
        drafts, count = find(tokens, len(case["tokens"]), case["min_n"], case["max_n"], case["k"])
        assert drafts[: int(count)].tolist() == case["vllm"], case


def test_lookup_keeps_the_greedy_text_of_a_model_without_modules(without_modules):
    model, params = without_modules
    result = speculative_generate(params, PROMPTS, model=model, config=LOOKUP)
    result.stats.check()
    stops = {"stop_sequences": LOOKUP.stop_sequences}
    for prompt, row in zip(PROMPTS, result.rows(), strict=True):
        assert row == plain_generate(params, prompt, model=model, max_new_tokens=24, **stops)
    # Drafts were accepted and rejected.
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()


@pytest.mark.slow
def test_lookup_draws_the_tokens_of_plain_decoding(without_modules):
    """Rule "sample" uses the same noise as plain decoding, so the texts are equal and not only alike in law."""
    model, params = without_modules
    sampling = SamplingParams(temperature=[0.3, 0.7, 0.0, 0.5], top_k=[0, 5, 0, 0], seed=[1, 2, 3, 4])
    config = dataclasses.replace(LOOKUP, acceptance="sample")
    plain = generate(params, PROMPTS, model=model, config=config, sampling=sampling)
    result = speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling)
    assert result.rows() == plain.rows() and result.stats.accepted.sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 2}, "supports only chains"),
        ({"draft_vocabulary": (1, 2)}, "draft_vocabulary applies only to drafter 'mtp'"),
        ({"draft_window": 4}, "draft_window applies only to drafters with a cache"),
    ],
)
def test_settings_of_modules_are_refused(changes, message, without_modules):
    model, params = without_modules
    with pytest.raises(ValueError, match=message):
        speculative_generate(params, PROMPTS, model=model, config=dataclasses.replace(LOOKUP, **changes))


@dataclasses.dataclass(frozen=True)
class ChainsOnly(Drafter):
    limits = DraftLimits(trees="ChainsOnly drafts chains only", draft_window="ChainsOnly has no cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 2}, "^ChainsOnly drafts chains only; set topk to 1, got 2$"),
        ({"draft_window": 4}, "^ChainsOnly has no cache$"),
    ],
)
def test_a_drafters_limits_are_data_with_their_reason(changes, message, without_modules):
    model, _ = without_modules
    config = DecodeConfig(num_steps=2, drafter=ChainsOnly(), **changes)
    with pytest.raises(ValueError, match=message):
        check_settings(model, config, ChainsOnly())
    assert DraftMethod(name="chains", title="Chains", drafter=ChainsOnly).limits is ChainsOnly.limits


def test_ranges_of_the_ngrams_are_checked():
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        DecodeConfig(drafter="lookup", prompt_lookup_min=4, prompt_lookup_max=2)


def test_an_unknown_name_gets_a_suggestion(without_modules):
    model, params = without_modules
    with pytest.raises(ValueError, match=r"must be one of mtp, lookup, .*, got lokup: did you mean lookup\?"):
        speculative_generate(params, PROMPTS, model=model, config=DecodeConfig(drafter="lokup"))
    with pytest.raises(ValueError, match="drafter 'eagle3' needs files"):
        speculative_generate(params, PROMPTS, model=model, config=DecodeConfig(drafter="eagle3"))


@dataclasses.dataclass(frozen=True)
class UnigramDrafter(Drafter):
    """Draws every draft from one distribution over the vocabulary, its parameters: `[V]` log-probabilities."""

    def propose(self, decoder, weights, state):
        pending = read_rows(state.tokens, state.length - 1, 1)
        B, K, scores = pending.shape[0], decoder.spec.num_steps, weights.drafter
        if not K:
            return Draft(pending), state
        # The draw may depend on the seed and on the round's position alone, never on noise that verification uses.
        seed, length = state.settings.sampling.seed[:, 0], state.length
        keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.fold_in(jax.random.key(123), s), n))(seed, length)
        drafts = jax.vmap(lambda key: jax.random.categorical(key, scores, shape=(K,)))(keys).astype(jnp.int32)
        q = jnp.broadcast_to(jax.nn.softmax(scores)[None, None], (B, K, len(scores)))
        return Draft(jnp.concatenate([pending, drafts], axis=1), q), state


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        pytest.param("lookup", "token", marks=pytest.mark.slow),
        ("lookup", "sample"),
        ("own", "block"),
        pytest.param("lookup", "block", marks=pytest.mark.slow),
        pytest.param("own", "token", marks=pytest.mark.slow),
        pytest.param("own", "sample", marks=pytest.mark.slow),
    ],
)
def test_sampled_texts_follow_the_targets_law(drafter, rule, without_modules):
    model, params = without_modules
    V = model.config.vocab_size
    own = drafter == "own"
    config = DecodeConfig(
        max_new_tokens=3,
        num_steps=2,
        acceptance=rule,
        prefill_chunk=8,
        drafter=UnigramDrafter() if own else "lookup",
    )
    unigram = jax.random.normal(jax.random.key(9), (V,)) if own else None
    tokens, result = second_tokens(model, params, config, unigram)
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()
    # 4.5 standard errors in 11 tokens and 6 cases: by chance once in 2,000 runs.
    assert first_token_law(tokens, second_token_law(model, params)) < 4.5


def test_a_wrong_q_is_caught(without_modules):
    """The test above can fail: a drafter that states another distribution than it draws from breaks the law."""

    @dataclasses.dataclass(frozen=True)
    class WrongDrafter(UnigramDrafter):
        def propose(self, decoder, weights, state):
            draft, state = super().propose(decoder, weights, state)
            return draft.replace(probabilities=jnp.roll(draft.probabilities, 1, axis=-1)), state

    model, params = without_modules
    config = DecodeConfig(max_new_tokens=3, num_steps=2, acceptance="token", prefill_chunk=8, drafter=WrongDrafter())
    unigram = 2 * jax.random.normal(jax.random.key(9), (model.config.vocab_size,))
    tokens, _ = second_tokens(model, params, config, unigram)
    assert first_token_law(tokens, second_token_law(model, params)) > 4.5


def accept_every_draft(tokens, parents, p, u, *, num_steps):
    """Accepts the whole chain, whatever the target says; the bonus token follows the target."""
    path = jnp.arange(num_steps + 1)
    return AcceptedPath(path, jnp.int32(num_steps), p[num_steps])


def test_an_acceptance_rule_of_ones_own_is_followed(without_modules):
    model, params = without_modules
    config = dataclasses.replace(
        LOOKUP, acceptance=AcceptanceRule("every draft", accept_every_draft), stop_sequences=()
    )
    result = speculative_generate(
        params, PROMPTS, model=model, config=config, sampling=SamplingParams(temperature=0.5, seed=1)
    )
    assert (result.stats.accepted == result.stats.proposed).all() and not result.is_exact
