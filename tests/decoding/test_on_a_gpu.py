"""The decoding loop on a GPU: XLA, kernels, graphs and speculation give the same tokens, twice in a row."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, generate, speculative_generate
from mtpjax.decoding import gpu_graph

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
    if compat.is_cuda():
        assert gpu_graph.GRAPHS.options(jax.sharding.get_mesh()) is gpu_graph.GRAPH_OPTIONS  # no graph has failed
    monkeypatch.setattr(compat, "is_cuda", lambda: False)
    plain = speculative_generate(params, PROMPTS, model=model, config=CHAIN)
    assert as_graph.rows() == plain.rows()
    assert as_graph.stats.rounds.tolist() == plain.stats.rounds.tolist()


def test_a_mesh_in_one_node_records_its_collectives(small):
    if not compat.is_cuda() or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    model, params = small("grouped", "mixed")
    wanted, mesh = generate(params, PROMPTS, model=model, config=CHAIN).rows(), compat.make_mesh({"tensor": 2})
    for _ in range(3):
        assert speculative_generate(params, PROMPTS, model=model, config=CHAIN, mesh=mesh).rows() == wanted
    assert gpu_graph.GRAPHS.options(mesh) is gpu_graph.MESH_GRAPH_OPTIONS


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
