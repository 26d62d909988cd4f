"""EAGLE-3 and Medusa drafters in the loop: texts of plain decoding, laws, rows that enter, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, speculative_generate
from mtpjax.drafters.architecture import init_layers
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.medusa.drafting import MedusaDrafter
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.config import ModelConfig
from tests.helpers.drafter_mesh import check_mesh
from tests.helpers.laws import first_token_law, second_token_law, second_tokens
from tests.helpers.running import Running

V, D, R = 11, 32, 7
DRAFT_IDS = jnp.array([0, 2, 3, 5, 7, 8, 10], jnp.int32)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5], [9, 8, 7, 9, 8, 7, 9]]
BLOCK = {"vocab_size": V, "hidden_size": D, "num_attention_heads": 2, "intermediate_size": 24, "rope_theta": 500.0}
CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0))


@pytest.fixture(scope="module")
def trunk(small):
    """A model whose small vocabulary makes random drafts right now and then."""
    return small("grouped", "random", vocab_size=V, num_mtp_modules=0)


@functools.cache
def eagle(num_layers=1, **switches):
    """A random network that reads the embedding, a layer's input and the last layer's output."""
    block = ModelConfig(num_hidden_layers=num_layers, **BLOCK)
    config = Eagle3Config(
        block=block, layer_ids=(0, 1, 2), num_target_layers=2, target_hidden_size=D, draft_vocab_size=R, **switches
    )
    return Eagle3Drafter(architecture=config), DraftParams(init_layers(Eagle3, config, jax.random.key(3)), DRAFT_IDS)


@functools.cache
def medusa(choices=()):
    config = MedusaConfig(hidden_size=D, vocab_size=V, num_heads=3, draft_vocab_size=R)
    heads = jax.jit(Medusa(config).init)(jax.random.key(4), jnp.zeros((1, D)))["params"]
    heads = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), heads)
    return MedusaDrafter(architecture=config, choices=choices), DraftParams(heads, DRAFT_IDS)


DRAFTERS = {"eagle3": eagle, "medusa": medusa}
CHAIN, TREE = {"num_steps": 3}, {"num_steps": 2, "topk": 2, "num_draft_tokens": 6}


def decode(trunk, drafter, sampling=None, **settings):
    model, params = trunk
    config = DecodeConfig(**{"max_new_tokens": 20, "prefill_chunk": 8, "drafter": drafter[0]} | settings)
    arguments = {"model": model, "config": config, "sampling": sampling}
    result = speculative_generate(params, PROMPTS, **arguments, draft_params=drafter[1])
    result.stats.check()
    return result, generate(params, PROMPTS, **arguments).rows()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle3", CHAIN),
        pytest.param("eagle3", TREE, marks=pytest.mark.slow),
        ("medusa", TREE),
        pytest.param("medusa", CHAIN, marks=pytest.mark.slow),
        pytest.param("eagle3", {"num_steps": 1}, marks=pytest.mark.slow),
        pytest.param("eagle3", CHAIN | {"draft_window": 4}, marks=pytest.mark.slow),
        pytest.param("eagle3", CHAIN | {"min_rows": 3}, marks=pytest.mark.slow),
        pytest.param("eagle3", TREE | {"min_rows": 3}, marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(name, shape, trunk):
    result, plain = decode(trunk, DRAFTERS[name](), **shape)
    assert result.rows() == plain
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("eagle3", CHAIN), ("eagle3", TREE), ("medusa", CHAIN)])
def test_the_kernels_draft_as_xla_does(name, shape, trunk):
    settings = {"max_new_tokens": 6, **shape}
    found, expected = (
        decode(trunk, DRAFTERS[name](), implementation=implementation, **settings)[0]
        for implementation in ("interpreted", "xla")
    )
    assert found.rows() == expected.rows()
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        {"num_layers": 2, "norm_before_fc": True},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"own_embedding": True},
    ],
)
def test_switches_keep_the_text(switches, trunk):
    for shape in (CHAIN, TREE):
        result, plain = decode(trunk, eagle(**switches), **shape)
        assert result.rows() == plain and result.stats.accepted.sum() > 0


@pytest.mark.slow
def test_the_trunks_own_head_and_all_tokens(trunk):
    drafter, params = eagle()
    config = dataclasses.replace(drafter.architecture, draft_vocab_size=V, own_head=False)
    network = {name: leaf for name, leaf in params.network.items() if name != "head"}
    result, plain = decode(trunk, (Eagle3Drafter(architecture=config), DraftParams(network)), **CHAIN)
    assert result.rows() == plain and result.stats.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.5, "presence_penalty": 0.3, "min_new_tokens": 9}])
@pytest.mark.parametrize(("name", "shape"), [("medusa", "choices"), ("medusa", TREE), ("eagle3", TREE)])
def test_the_rule_sample_draws_the_tokens_of_plain_decoding(name, shape, penalties, trunk):
    sampling = SamplingParams(temperature=[0.3, 0.7, 0.0, 0.5], top_k=[0, 5, 0, 0], seed=[1, 2, 3, 4], **penalties)
    drafter = medusa(CHOICES) if shape == "choices" else DRAFTERS[name]()
    shape = TREE if shape == "choices" else shape
    result, plain = decode(trunk, drafter, sampling, acceptance="sample", stop_token_ids=(4,), **shape)
    assert result.rows() == plain and result.stats.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_an_adaptive_depth_keeps_the_text(name, trunk):
    """Depths change: rounds without drafts leave a backlog to EAGLE-3, which is taken in later."""
    costs = (1.0, 1.02, 1.04, 1.06)
    result, plain = decode(trunk, DRAFTERS[name](), **CHAIN, depth_policy="adaptive", depth_costs=costs)
    assert result.rows() == plain and result.stats.proposed.sum() > 0


RULES = ("token", "block", "sample", "recursive", "traversal")


@pytest.mark.parametrize(
    ("name", "rule", "batch"),
    [
        ("eagle3", "block", 1024),
        ("medusa", "token", 1024),
        *(pytest.param(name, rule, 4096, marks=pytest.mark.slow) for name in DRAFTERS for rule in RULES),
    ],
)
def test_sampled_texts_follow_the_targets_law(name, rule, batch, trunk):
    """q is 0 outside of the draft vocabulary, and the residual still has all of the target's tokens."""
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()
    shape = TREE if rule in ("recursive", "traversal") else {"num_steps": 2}
    config = DecodeConfig(max_new_tokens=3, acceptance=rule, prefill_chunk=8, drafter=drafter, **shape)
    tokens, result = second_tokens(model, params, config, draft_params, batch)
    assert 0 < result.stats.accepted.sum() < result.stats.proposed.sum()
    # 4.5 standard errors in 11 tokens and 12 cases: by chance once in 1,000 runs.
    assert first_token_law(tokens, second_token_law(model, params)) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_wrong_draft_vocabulary_in_q_is_caught(name, trunk):
    """The test above can fail: columns that stand for other tokens than the ones that are drafted."""
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()

    @dataclasses.dataclass(frozen=True)
    class Wrong(type(drafter)):
        def propose(self, decoder, weights, state):
            draft, state = super().propose(decoder, weights, state)
            if draft.probabilities is None:
                return draft, state
            return draft.replace(probabilities=jnp.roll(draft.probabilities, 1, axis=-1)), state

    wrong = Wrong(architecture=drafter.architecture)
    config = DecodeConfig(max_new_tokens=3, num_steps=2, acceptance="token", prefill_chunk=8, drafter=wrong)
    tokens, _ = second_tokens(model, params, config, draft_params)
    assert first_token_law(tokens, second_token_law(model, params)) > 4.5


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_enter_a_running_state(name, trunk):
    """Rows that continue a text in their pages draft as rows that are decoded from the start."""
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()
    config = DecodeConfig(max_new_tokens=9, num_steps=2, drafter=drafter, prefill_chunk=8, acceptance="greedy")
    arguments = {"model": model, "config": config, "draft_params": draft_params}
    running, pages = Running(params, **arguments), [list(range(20)), list(range(20, 40))]
    texts, cached = [list(prompt) for prompt in PROMPTS[:2]], [0, 0]
    for turn in range(2):
        for slot in range(2):
            running.enter(slot, texts[slot], pages[slot], num_cached=cached[slot])
        running.go_on()
        found, fresh = running.collect(), speculative_generate(params, texts, **arguments)
        assert found.rows() == fresh.rows()
        np.testing.assert_array_equal(found.stats.accepted, fresh.stats.accepted)
        # The next turn begins with the text of this one, of which the second row changes the end.
        whole = [[*text, *row] for text, row in zip(texts, found.rows(), strict=True)]
        texts = [[*whole[0], 3, 1], [*whole[1][:-2], 8]]
        cached = [len(whole[0]) - 1, len(whole[1]) - 2]
        if turn:
            assert found.stats.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_mesh_splits_rows_and_not_the_trunk(name, trunk):
    model, params = trunk
    drafter, draft_params = DRAFTERS[name]()
    check_mesh(model, params, drafter, draft_params, PROMPTS)


@pytest.mark.slow
def test_typical_acceptance_is_called_lossy(trunk):
    sampling = SamplingParams(temperature=0.8, seed=1)
    result, _ = decode(trunk, medusa(CHOICES), sampling, acceptance="typical", **TREE)
    assert not result.is_exact and result.stats.accepted.sum() > 0


def test_static_trees_are_checked():
    with pytest.raises(ValueError, match="contain the parent of each path"):
        medusa(((0,), (1, 0)))
    with pytest.raises(ValueError, match="distinct paths"):
        medusa(((0,), (0,)))
    assert medusa(CHOICES)[0].parents == (-1, 0, 0, 1, 1, 2)


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        (eagle, {"draft_vocabulary": (1, 2)}, "applies only to drafter 'mtp'"),
        (eagle, {"topk": 8, "num_steps": 2}, "exceeds the 7 tokens that can be drafted"),
        (medusa, {"draft_vocabulary": (1, 2)}, "applies only to drafter 'mtp'"),
        (medusa, {"topk": 8, "num_steps": 2}, "exceeds the 7 tokens that can be drafted"),
        (medusa, {"draft_window": 4}, "Medusa heads have no cache"),
        (medusa, {"num_steps": 4}, "exceeds the 3 Medusa heads"),
        (functools.partial(medusa, CHOICES), {"num_steps": 2}, "needs num_steps 2, topk 2, num_draft_tokens 6"),
        (functools.partial(medusa, CHOICES), TREE | {"acceptance": "recursive"}, "draws each node's children"),
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
    for make in DRAFTERS.values():
        config = DecodeConfig(drafter=make()[0])
        with pytest.raises(ValueError, match="needs draft_params"):
            speculative_generate(params, PROMPTS, model=model, config=config)
        other, others = small("grouped", "random", vocab_size=13, num_mtp_modules=0)
        with pytest.raises(ValueError, match="vocabulary 11; this one has width 32 and vocabulary 13"):
            speculative_generate(others, PROMPTS, model=other, config=config, draft_params=make()[1])
    with pytest.raises(ValueError, match="for a trunk of depth 2; this one has depth 3"):
        other, others = small("grouped", "random", vocab_size=V, num_mtp_modules=0, num_hidden_layers=3)
        speculative_generate(others, PROMPTS, model=other, config=DecodeConfig(drafter=eagle()[0]))


def test_sizes_that_do_not_fit_are_refused():
    config = eagle()[0].architecture
    for changes, message in (
        ({"layer_ids": (0, 0)}, "must be distinct"),
        ({"layer_ids": (0, 4)}, "within 0..3"),
        ({"draft_vocab_size": 12}, "not within 1..11"),
        ({"own_head": False}, "the trunk's head has columns for all tokens"),
        ({"target_hidden_size": 16}, "needs its own embedding and head"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
    with pytest.raises(ValueError, match="draft_ids has 7"):
        drafter, params = eagle()
        wrong = params.replace(network=params.network | {"head": np.zeros((D, 5), np.float32)})
        drafter.prepare({"embedding": np.zeros(1, np.float32)}, wrong, model=None)
