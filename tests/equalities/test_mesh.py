"""A mesh changes no token."""

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, compat, generate, speculative_generate
from mtpjax.models.sharding import shard_params

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
CONFIG = DecodeConfig(max_new_tokens=12, num_steps=3, prefill_chunk=8)


@pytest.fixture(scope="module")
def expected(small):
    def decode(attention):
        model, params = small(attention, "mixed", num_mtp_modules=2)
        return generate(params, PROMPTS, model=model, config=CONFIG).rows()

    return {attention: decode(attention) for attention in ("grouped", "latent", "sparse", "hybrid")}


@pytest.mark.parametrize(
    ("attention", "axes", "decoder"),
    [
        ("grouped", {"data": 2, "tensor": 2}, speculative_generate),
        ("grouped", {"tensor": 4}, speculative_generate),  # more than there are key/value heads
        ("grouped", {"fsdp": 2, "tensor": 2}, generate),
        ("latent", {"data": 1, "expert": 2, "tensor": 2}, speculative_generate),
        ("latent", {"data": 2, "expert": 4}, speculative_generate),
        pytest.param("latent", {"data": 1, "expert": 2, "tensor": 2}, generate, marks=pytest.mark.slow),
        ("sparse", {"data": 2, "tensor": 2}, speculative_generate),
        ("hybrid", {"data": 2, "expert": 2, "tensor": 2}, speculative_generate),
    ],
)
def test_a_mesh_gives_the_tokens_of_a_single_device(attention, axes, decoder, small, expected):
    model, params = small(attention, "mixed", num_mtp_modules=2)
    result = decoder(params, PROMPTS, model=model, config=CONFIG, mesh=compat.make_mesh(axes))
    assert result.rows() == expected[attention]
    result.stats.check()
    assert len(jax.devices()) == 8 and np.prod(list(axes.values())) > 1


def test_parameters_on_a_mesh_are_decoded_there_without_kernels_that_it_cannot_split(small, expected):
    model, params = small("grouped", "mixed", num_mtp_modules=2)
    params = shard_params(params, compat.make_mesh({"tensor": 2}))
    model = model.clone(implementation="triton")  # which does not run on a CPU
    assert speculative_generate(params, PROMPTS, model=model, config=CONFIG).rows() == expected["grouped"]


@pytest.mark.parametrize(
    "shape",
    [
        {"topk": 2, "num_draft_tokens": 6, "acceptance": "sample"},
        {"acceptance": "sample", "depth_policy": "adaptive", "depth_costs": (1.0, 1.1, 1.3)},
    ],
    ids=lambda shape: "-".join(str(value) for value in shape.values()),
)
def test_sampled_trees_and_adaptive_depth_are_the_same_on_a_mesh(shape, small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(max_new_tokens=12, num_steps=2, prefill_chunk=8, logprobs=True, **shape)
    asked = {"temperature": [0.0, 0.8, 1.0, 1.0], "top_k": 20, "frequency_penalty": 0.3, "logit_bias": {7: 1.0}}
    sampling = SamplingParams(**asked, seed=[1, 2, 3, 4])
    single, meshed = (
        speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling, mesh=mesh)
        for mesh in (None, compat.make_mesh({"data": 2, "tensor": 2}))
    )
    assert meshed.rows() == single.rows()
    np.testing.assert_allclose(meshed.logprobs, single.logprobs, atol=1e-4)
