"""Sampled speculation follows exactly the target's distribution: whole texts, through the whole loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mtpjax import DecodeConfig, SamplingParams, forward, generate, speculative_generate
from mtpjax.decoding import rng
from mtpjax.decoding.acceptance import chain
from mtpjax.decoding.loop import decode
from mtpjax.decoding.reference import plain_generate
from mtpjax.decoding.sampling import TokenHistory, apply_penalties_and_bias, distribution, draw
from mtpjax.decoding.sampling_params import make_sampling_arrays

V, LENGTH, PROMPT = 5, 3, [1, 2, 4]
BATCH = 8192
FEW, MANY = 2, 25  # calls: 16,384 texts, and with `pytest -m slow` 204,800
LEAST = 1e-4  # p-value, before the number of cases is counted in

RULES = {
    "token-1": {"num_steps": 1, "acceptance": "token"},
    "token-3": {"num_steps": 3, "acceptance": "token"},
    "block-2": {"num_steps": 2, "acceptance": "block"},
    "block-4": {"num_steps": 4, "acceptance": "block"},
    "sample-chain": {"num_steps": 2, "acceptance": "sample"},
    "sample-tree": {"num_steps": 2, "topk": 2, "num_draft_tokens": 5, "acceptance": "sample"},
    "recursive": {"num_steps": 2, "topk": 3, "num_draft_tokens": 8, "acceptance": "recursive"},
    "threshold-1": {"num_steps": 2, "topk": 2, "num_draft_tokens": 5, "acceptance": "threshold"},
    "block-subset": {"num_steps": 2, "acceptance": "block", "draft_vocabulary": (0, 2, 3)},
    "recursive-subset": {"num_steps": 2, "topk": 2, "acceptance": "recursive", "draft_vocabulary": (0, 2, 3)},
    "block-window": {"num_steps": 3, "acceptance": "block", "draft_window": 2, "draft_sinks": 1},
    "block-adaptive": {
        "num_steps": 2,
        "acceptance": "block",
        "depth_policy": "adaptive",
        "depth_costs": (1.0, 1.25, 1.5),
    },
}
WARM = {"temperature": 1.0}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
FILTERS = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
FAST = [
    ({**PENALTIES, **WARM}, "block-4"),
    ({**PENALTIES, "temperature": 0.8, "logit_bias": {3: 1.0}}, "sample-tree"),
    ({**PENALTIES, **FILTERS, "logit_bias": {3: 1.0}, "banned_tokens": [0]}, "recursive"),
]
SLOW = [*((WARM, name) for name in RULES), *FAST, (FILTERS, "block-2"), (FILTERS, "recursive")]


@pytest.fixture(scope="module")
def tiny(small):
    """Caches are no longer than the texts: of so many rows, 256 slots are what the time goes into."""
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpjax.decoding.capacity.round_up_capacity", lambda size: -(-size // 32) * 32)
        yield small("grouped", "random", **sizes, num_attention_heads=2)


def exact_law(model, params, request):
    """`[V^LENGTH]`: the probability of every text after PROMPT, by the full pass over each."""
    texts = np.array(list(itertools.product(range(V), repeat=LENGTH)))
    rows = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    logits = forward(params, rows, model=model, num_depths=0).logits
    sampling = make_sampling_arrays(SamplingParams(**request, seed=0), len(texts), model.config, None)
    prompt = jnp.zeros((len(texts), V), bool).at[:, np.array(PROMPT)].set(True)
    law = np.ones(len(texts))
    for place in range(LENGTH):
        counts = jnp.asarray((texts[:, :place, None] == np.arange(V)).sum(axis=1), jnp.int32)
        adjusted = apply_penalties_and_bias(
            logits[:, len(PROMPT) + place - 1, None],
            sampling,
            TokenHistory(prompt, counts),
            path=None,
            num_new=jnp.full((len(texts), 1), place),
            stop_ids=jnp.full((len(texts), 1), -1),
            num_tokens=V,
        )
        law *= np.take_along_axis(np.asarray(distribution(adjusted, sampling))[:, 0], texts[:, place, None], 1)[:, 0]
    return law


def drawn_counts(model, params, request, rule, calls):
    """How often each text came, over BATCH rows of `calls` calls, each row with a seed of its own; and drafts' luck."""
    config = DecodeConfig(max_new_tokens=LENGTH, prefill_chunk=4, **rule)
    prompts = np.tile(PROMPT, (BATCH, 1))
    counts, accepted, proposed = np.zeros(V**LENGTH), 0, 0
    for call in range(calls):
        sampling = SamplingParams(**request)
        key = jax.random.key(call)
        result = speculative_generate(params, prompts, model=model, config=config, sampling=sampling, key=key)
        result.stats.check()
        np.add.at(counts, result.tokens @ V ** np.arange(LENGTH - 1, -1, -1), 1)
        accepted, proposed = accepted + result.stats.accepted.sum(0), proposed + result.stats.proposed.sum(0)
    return counts, accepted / proposed


def p_value(counts, law):
    """Of the chi-square test; texts that are expected fewer than 5 times count as one."""
    expected = law * counts.sum()
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0, "a text that cannot be has come"
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def assert_follows_the_law(tiny, request, name, calls, cases):
    counts, rates = drawn_counts(*tiny, request, RULES[name], calls)
    assert p_value(counts, exact_law(*tiny, request)) > LEAST / cases
    assert (rates > 0.005).all() and (rates < 0.98).all()  # drafts were accepted and rejected


def name_of(part):
    return part if isinstance(part, str) else "+".join(part)


@pytest.mark.parametrize(("asked", "name"), FAST, ids=name_of)
def test_texts_follow_the_targets_law(asked, name, tiny):
    assert_follows_the_law(tiny, asked, name, FEW, len(FAST))


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "name"), SLOW, ids=name_of)
def test_many_texts_follow_the_targets_law(asked, name, tiny):
    assert_follows_the_law(tiny, asked, name, MANY, len(SLOW))


def by_absolute_position(monkeypatch):
    """Noise that the next round uses again: each draft's keyed by its own position in place of the round's."""
    gumbel, uniform = rng.gumbel, rng.uniform

    def absolute(position, purpose, node):
        own = (node - 1)[None, :] if purpose in (rng.DRAFT, rng.ACCEPT) else 0
        return position + own, jnp.zeros_like(node)

    def mutant_gumbel(seed, position, purpose, node, *columns):
        return gumbel(seed, *insert(absolute(position, purpose, node), purpose), *columns)

    def insert(pair, purpose):
        return pair[0], purpose, pair[1]

    monkeypatch.setattr(rng, "gumbel", mutant_gumbel)
    monkeypatch.setattr(
        rng,
        "uniform",
        lambda seed, position, purpose, node: uniform(seed, *insert(absolute(position, purpose, node), purpose)),
    )


def with_the_bonus_from_p(monkeypatch):
    rule = chain.block_chain

    def mutant(drafts, p, q, u, num_drafted=None, *, vocabulary):
        count, _ = rule(drafts, p, q, u)
        return count, p[count]

    monkeypatch.setattr(chain, "block_chain", mutant)


def with_q_at_another_temperature(monkeypatch):
    rule = chain.block_chain

    def mutant(drafts, p, q, u, num_drafted=None, *, vocabulary):
        colder = q**2
        return rule(drafts, p, colder / colder.sum(axis=-1, keepdims=True), u)

    monkeypatch.setattr(chain, "block_chain", mutant)


@pytest.mark.parametrize(
    ("mutate", "calls"),
    [
        pytest.param(by_absolute_position, 12, marks=pytest.mark.slow),
        (with_the_bonus_from_p, 3),
        (with_q_at_another_temperature, 3),
    ],
)
def test_mutants_are_caught(mutate, calls, tiny, monkeypatch):
    mutate(monkeypatch)
    decode.plain.clear_cache()
    try:
        counts, _ = drawn_counts(*tiny, WARM, RULES["block-2"], calls)
    finally:
        decode.plain.clear_cache()
    assert p_value(counts, exact_law(*tiny, WARM)) < LEAST


def test_token_accepts_as_often_as_the_distributions_overlap(tiny):
    """At depth 1: 1 - TV(p, q), averaged over the token before, within 4 standard errors."""
    model, params = tiny
    rows = np.concatenate([np.tile(PROMPT, (V, 1)), np.arange(V)[:, None]], axis=1)
    output = forward(params, rows, model=model, num_depths=1)
    first = jax.nn.softmax(output.logits[0, len(PROMPT) - 1])
    p = jax.nn.softmax(output.logits[:, len(PROMPT)])
    q = jax.nn.softmax(output.mtp_logits[0][:, len(PROMPT) - 1])
    wanted = float((first * jnp.minimum(p, q).sum(axis=-1)).sum())
    config = DecodeConfig(max_new_tokens=2, num_steps=1, acceptance="token", prefill_chunk=4)
    sampling, key = SamplingParams(**WARM), jax.random.key(7)
    prompts = np.tile(PROMPT, (BATCH, 1))
    result = speculative_generate(params, prompts, model=model, config=config, sampling=sampling, key=key)
    found = result.stats.survival_rates[0]
    assert abs(found - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / BATCH)
    assert 0.1 < wanted < 0.9


# Greedy and sampled rows, with and without penalties and filters, side by side.
MIXED = SamplingParams(
    temperature=[0.0, 0.7, 1.0, 1.3, 0.9],
    top_k=[0, 20, 0, 5, 0],
    top_p=[1, 1, 0.9, 0.95, 1],
    min_p=[0, 0.02, 0, 0, 0],
    repetition_penalty=[1, 1.2, 1, 1, 1.5],
    frequency_penalty=[0, 0, 0.7, 0, 0],
    min_new_tokens=[0, 0, 12, 0, 3],
    logit_bias=[None, {7: 2.0}, None, {3: -1.0}, None],
    banned_tokens=[None, [5], None, None, [1, 2]],
    seed=[3, 1, 4, 1, 2**63 + 5],
)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [4], [11, 12]]
PLAIN = DecodeConfig(
    max_new_tokens=20, stop_token_ids=(9, 33), stop_sequences=((46, 58, 41), (20, 21)), prefill_chunk=8, logprobs=True
)


@functools.cache
def mixed_plain(make):
    model, params = make("grouped", "mixed")
    return generate(params, PROMPTS, model=model, config=PLAIN, sampling=MIXED)


@pytest.mark.slow
def test_plain_decoding_draws_what_the_python_loop_draws(small):
    model, params = small("grouped", "mixed")
    arrays = make_sampling_arrays(MIXED, len(PROMPTS), model.config, None)
    for number, (prompt, row) in enumerate(zip(PROMPTS, mixed_plain(small).rows(), strict=True)):
        own = jax.tree.map(lambda leaf, number=number: leaf[number : number + 1], arrays)
        wanted = plain_generate(
            params,
            prompt,
            model=model,
            max_new_tokens=20,
            sampling=own,
            stop_token_ids=PLAIN.stop_token_ids,
            stop_sequences=PLAIN.stop_sequences,
        )
        assert row == wanted


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 12)], ids=str)
def test_sample_draws_the_tokens_of_plain_decoding(shape, small):
    """Penalties count drafts before they are accepted, stop sequences end a row within a run, as in plain decoding."""
    model, params = small("grouped", "mixed")
    num_steps, topk, num_nodes = shape
    config = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_nodes, "acceptance": "sample"}
    config = DecodeConfig(**{**vars(PLAIN), **config})
    result = speculative_generate(params, PROMPTS, model=model, config=config, sampling=MIXED)
    result.stats.check()
    plain = mixed_plain(small)
    assert result.rows() == plain.rows() and result.finish_reasons == plain.finish_reasons
    assert result.is_exact and result.stats.accept_length > 1.2
    assert "stop" in plain.finish_reasons
    np.testing.assert_allclose(result.logprobs, plain.logprobs, atol=1e-4)


def test_log_probabilities_are_those_of_a_teacher_forced_pass(small):
    model, params = small("grouped", "mixed")
    plain = mixed_plain(small)
    for prompt, row, found in zip(PROMPTS, plain.rows(), plain.logprobs, strict=True):
        logits = forward(params, np.array([prompt + row]), model=model, num_depths=0).logits[0, len(prompt) - 1 : -1]
        wanted = jax.nn.log_softmax(logits)[np.arange(len(row)), np.array(row)]
        np.testing.assert_allclose(found[: len(row)], wanted, atol=1e-4)
        assert not found[len(row) :].any()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"acceptance": "block"}, marks=pytest.mark.slow),
        pytest.param({"topk": 3, "num_draft_tokens": 9, "acceptance": "recursive"}, marks=pytest.mark.slow),
        pytest.param(
            {"acceptance": "sample", "depth_policy": "adaptive", "depth_costs": (1.0, 1.2, 1.4)}, marks=pytest.mark.slow
        ),
        {"acceptance": "token"},
    ],
    ids=lambda changes: changes["acceptance"],
)
@pytest.mark.slow
def test_a_row_is_the_same_alone_and_in_any_batch(changes, small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(max_new_tokens=16, num_steps=2, prefill_chunk=8, **changes)

    def rows(numbers, **more):
        asked = SamplingParams(
            temperature=[(0.0, 0.7, 1.0)[number % 3] for number in numbers], seed=[10 + number for number in numbers]
        )
        prompts = [PROMPTS[number] for number in numbers]
        return speculative_generate(
            params, prompts, model=model, config=DecodeConfig(**{**vars(config), **more}), sampling=asked
        ).rows()

    together = rows([0, 1, 2, 3, 4])
    assert rows([4, 2, 0, 1, 3]) == [together[number] for number in (4, 2, 0, 1, 3)]
    assert [rows([number])[0] for number in (1, 2)] == together[1:3]
    assert [row[:16] for row in rows([0, 1, 2, 3, 4], max_new_tokens=120)] == together  # another bucket
    jax.clear_caches()  # as after a restart
    assert rows([0, 1, 2, 3, 4]) == together


def test_drawing_follows_weights_that_are_not_normalised():
    weights = jnp.array([[[0.0, 2.0, 6.0]]])
    seeds = rng.seeds_from_key(jax.random.key(0), 4000)
    gumbel = rng.gumbel(seeds, jnp.zeros((4000, 1), jnp.int32), rng.BONUS, jnp.zeros(1, jnp.int32), 3)
    drawn = np.asarray(draw(jnp.broadcast_to(weights, gumbel.shape), gumbel))
    assert not (drawn == 0).any() and abs((drawn == 2).mean() - 0.75) < 0.03
