"""The decoding loop on a GPU: XLA, kernels, graphs and speculation give the same tokens, twice in a row."""

import dataclasses

import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, generate, speculative_generate

pytestmark = pytest.mark.gpu

PROMPTS = [[7, 8, 9, 10], [1] * 70, [5]]
CHAIN = DecodeConfig(max_new_tokens=24, num_steps=3)
CONFIGS = {
    "chain": CHAIN,
    "tree": dataclasses.replace(CHAIN, topk=2, num_draft_tokens=8),
    "adaptive": dataclasses.replace(CHAIN, depth_policy="adaptive", depth_costs=(1.0, 1.2, 1.4, 1.6)),
}


@pytest.fixture(params=["grouped", "latent", "sparse"])  # latent and sparse have experts
def model_and_params(request, small):
    return small(request.param, "mixed")


@pytest.mark.parametrize("implementation", ["xla", "triton", "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_form_of_the_loop_gives_the_tokens_of_plain_decoding(name, implementation, model_and_params):
    model, params = model_and_params
    config = dataclasses.replace(CONFIGS[name], implementation="xla")
    wanted = generate(params, PROMPTS, model=model, config=config).rows()
    config = dataclasses.replace(config, implementation=implementation)
    # The second call runs the recorded graph with other buffers.
    for _ in range(2):
        assert generate(params, PROMPTS, model=model, config=config).rows() == wanted
        assert speculative_generate(params, PROMPTS, model=model, config=config).rows() == wanted


def test_one_graph_gives_the_tokens_of_many(model_and_params, monkeypatch):
    model, params = model_and_params
    as_graph = speculative_generate(params, PROMPTS, model=model, config=CHAIN)
    monkeypatch.setattr(compat, "is_cuda", lambda: False)
    plain = speculative_generate(params, PROMPTS, model=model, config=CHAIN)
    assert as_graph.rows() == plain.rows()
    assert as_graph.stats.steps.tolist() == plain.stats.steps.tolist()


@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_deterministic_rows_have_the_same_tokens_whatever_rows_are_beside_them(attention, small):
    model, params = small(attention, "mixed")
    config = dataclasses.replace(CHAIN, deterministic=True, logprobs=True)
    alone, *beside = (
        speculative_generate(params, PROMPTS[-1:] + others, model=model, config=config)
        for others in ([], PROMPTS, PROMPTS * 12)
    )
    for found in beside:
        assert found.rows()[0] == alone.rows()[0]
        # XLA sums over the vocabulary in an order that depends on the number of rows.
        np.testing.assert_allclose(found.logprobs[0], alone.logprobs[0], atol=2e-6, rtol=0)
