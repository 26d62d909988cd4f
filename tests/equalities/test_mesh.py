"""A mesh changes no token. Eight virtual devices; float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import (
    DecodeConfig,
    SamplingParams,
    compat,
    generate,
    load,
    shard_for_decoding,
    speculative_generate,
)
from mtpjax.decoding.acceptance.rules import AcceptanceRule
from mtpjax.decoding.acceptance.walk import AcceptedPath, descend
from mtpjax.models.layers import attend
from mtpjax.models.quantized import is_scaled
from tests.golden import path

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
CONFIG = DecodeConfig(max_new_tokens=12, num_steps=3, prefill_chunk=8)
ALL = {"data": 2, "expert": 2, "tensor": 2}
slow = pytest.mark.slow


def sizes(attention):
    """Sizes that meshes divide. The last three ids of the vocabulary only pad the tables."""
    shared = {"shared_expert_intermediate_size": 12} if attention == "hybrid" else {}
    return {"vocab_size": 64, "num_tokens": 61, **shared}


@pytest.fixture(scope="module")
def expected(small):
    def decode(attention):
        model, params = small(attention, "mixed", num_mtp_modules=2, **sizes(attention))
        return generate(params, PROMPTS, model=model, config=CONFIG).rows()

    return {
        attention: decode(attention) for attention in ("grouped", "latent", "sparse", "hybrid", "sliding", "clamped")
    }


@pytest.mark.parametrize(
    ("attention", "axes", "decoder"),
    [
        ("grouped", {"data": 2, "tensor": 2}, speculative_generate),
        ("grouped", {"tensor": 4}, speculative_generate),  # more than there are key/value heads
        pytest.param("grouped", {"fsdp": 2, "tensor": 2}, generate, marks=slow),
        pytest.param("latent", {"data": 1, "expert": 2, "tensor": 2}, speculative_generate, marks=slow),
        ("latent", {"data": 8}, speculative_generate),  # more than there are rows; each device has an expert of its own
        pytest.param("latent", {"data": 4, "expert": 2}, speculative_generate, marks=slow),
        ("latent", ALL, generate),
        pytest.param("latent", {"expert": 8}, speculative_generate, marks=slow),
        pytest.param("sparse", ALL, speculative_generate, marks=slow),
        pytest.param("sparse", {"data": 4, "tensor": 2}, speculative_generate, marks=slow),
        ("hybrid", ALL, speculative_generate),
        pytest.param("hybrid", {"data": 4, "tensor": 2}, speculative_generate, marks=slow),
        pytest.param("sliding", {"data": 2, "tensor": 2}, speculative_generate, marks=slow),
        pytest.param("clamped", {"data": 2, "tensor": 2}, speculative_generate, marks=slow),
        pytest.param("clamped", ALL, speculative_generate, marks=slow),
    ],
)
def test_a_mesh_gives_the_tokens_of_a_single_device(attention, axes, decoder, small, expected):
    model, params = small(attention, "mixed", num_mtp_modules=2, **sizes(attention))
    result = decoder(params, PROMPTS, model=model, config=CONFIG, mesh=compat.make_mesh(axes))
    assert result.rows() == expected[attention]
    result.stats.check()
    assert len(jax.devices()) == 8 and np.prod(list(axes.values())) > 1


SHAPES = {
    "greedy tree": {"topk": 2, "num_draft_tokens": 6},
    "recursive tree": {"topk": 2, "num_draft_tokens": 6, "acceptance": "recursive"},
    "sampled tree": {"topk": 2, "num_draft_tokens": 6, "acceptance": "sample"},
    "block": {"acceptance": "block"},
    "adaptive": {"acceptance": "sample", "depth_policy": "adaptive", "depth_costs": (1.0, 1.1, 1.3)},
    "adaptive block": {"acceptance": "block", "depth_policy": "adaptive", "depth_costs": (1.0, 1.1, 1.3)},
    "reduced": {"draft_vocabulary": tuple(range(0, 60, 2))},
    "window": {"draft_window": 4, "draft_sinks": 1},
}


@slow
@pytest.mark.parametrize(
    ("attention", "name"),
    [
        (attention, name)
        for attention in ("grouped", "latent", "sparse", "hybrid")
        for name in SHAPES
        if attention != "hybrid" or "tree" not in name
    ],
)
def test_every_way_to_decode_gives_the_same_on_a_mesh(attention, name, small):
    model, params = small(attention, "mixed", num_mtp_modules=1, **sizes(attention))
    config = DecodeConfig(max_new_tokens=12, num_steps=2, prefill_chunk=8, logprobs=True, **SHAPES[name])
    sampling = None
    if config.acceptance != "auto":
        asked = {"temperature": [0.0, 0.8, 1.0, 1.0], "top_k": 20, "frequency_penalty": 0.3, "logit_bias": {7: 1.0}}
        sampling = SamplingParams(**asked, seed=[1, 2, 3, 4])
    single, meshed = (
        speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling, mesh=mesh)
        for mesh in (None, compat.make_mesh(ALL))
    )
    assert meshed.rows() == single.rows()
    np.testing.assert_array_equal(meshed.stats.accepted, single.stats.accepted)
    for one, other in zip(meshed.logprobs, single.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def accept_likely(tokens, parents, p, u, *, num_steps):
    """A rule of a user, which sees the probabilities of all tokens."""
    assert p.shape[1] == 64
    path, num_accepted = descend(p[parents, tokens] > 0.1 * p.max(axis=-1)[parents], parents, num_steps)
    return AcceptedPath(path, num_accepted, p[path[-1]])


TREE = {"topk": 2, "num_draft_tokens": 6}
RULES = {
    "sample": {"acceptance": "sample"},
    "plain": {"num_steps": 0},
    "token": {"acceptance": "token"},
    "lookup": {"acceptance": "block", "drafter": "lookup"},
    "reduced": {"acceptance": "block", "draft_vocabulary": tuple(range(0, 60, 2))},
    "traversal": {"acceptance": "traversal", **TREE},
    "threshold": {"acceptance": "threshold", "threshold_single": 0.5, "threshold_acc": 0.8, **TREE},
    "typical": {"acceptance": "typical", **TREE},
    "relaxed": {"acceptance": "relaxed", **TREE},
    "custom": {"acceptance": AcceptanceRule("likely", accept_likely)},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "sample" else slow) for name in RULES])
@pytest.mark.slow
def test_a_seed_gives_the_same_text_on_a_mesh_with_every_option(name, small):
    """Each of four devices has a quarter of the vocabulary, and draws from its part of the distribution."""
    model, params = small("grouped", "mixed", num_mtp_modules=1, **sizes("grouped"))
    shape = {"max_new_tokens": 12, "num_steps": 2, "prefill_chunk": 8, "logprobs": True, "stop_token_ids": (9, 40)}
    config = DecodeConfig(**{**shape, **RULES[name]})
    sampling = SamplingParams(
        temperature=[0.0, 0.8, 1.0, 1.3],
        top_k=[20, 0, 20, 40],
        top_p=[1.0, 0.9, 1.0, 0.95],
        min_p=[0.0, 0.02, 0.05, 0.0],
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.1,
        logit_bias={7: 1.0, 50: 1.0},
        banned_tokens=[3, 33],
        min_new_tokens=4,
        seed=[1, 2, 3, 4],
    )
    single, meshed = (
        speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling, mesh=mesh)
        for mesh in (None, compat.make_mesh({"tensor": 4}))
    )
    assert meshed.rows() == single.rows()
    np.testing.assert_array_equal(meshed.stats.accepted, single.stats.accepted)
    for one, other in zip(meshed.logprobs, single.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
def test_fp8_weights_are_split_with_their_scales():
    model, params = load(path("deepseek_v3_fp8"))
    # bfloat16 would round the sums of the parts, so that near-tied logits can flip.
    widen = lambda leaf: leaf if is_scaled(leaf) else leaf.astype(jnp.float32)
    params = jax.tree.map(widen, params, is_leaf=is_scaled)
    config = dataclasses.replace(CONFIG, num_steps=2)
    single, meshed = (
        speculative_generate(params, PROMPTS, model=model, config=config, mesh=mesh).rows()
        for mesh in (None, compat.make_mesh(ALL))
    )
    assert meshed == single


@pytest.mark.parametrize("attention", ["grouped", pytest.param("latent", marks=slow)])
@pytest.mark.slow
def test_every_kernel_runs_on_each_device(attention, small, expected):
    model, params = small(attention, "mixed", num_mtp_modules=2, **sizes(attention))
    model, params = shard_for_decoding(model, params, compat.make_mesh({"data": 2, "tensor": 2}))
    config = dataclasses.replace(CONFIG, implementation="interpreted")
    assert speculative_generate(params, PROMPTS, model=model, config=config).rows() == expected[attention]
    with pytest.raises(ValueError, match="interpret"):  # the compiled kernels need a GPU, so they were asked for
        config = dataclasses.replace(CONFIG, implementation="triton")
        speculative_generate(params, PROMPTS, model=model, config=config)


@slow
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_flash_prefill_and_fp8_caches_are_those_of_a_single_device(attention, small, monkeypatch):
    model, params = small(attention, "mixed", num_mtp_modules=1, **sizes(attention))
    # A chunk of more than 16 tokens is attended to by `prefill_attention`.
    config = DecodeConfig(max_new_tokens=8, num_steps=2, prefill_chunk=32, kv_cache_dtype="fp8_e4m3")
    prompts = [[(7 * place + row) % 61 for place in range(20 + row)] for row in range(4)]
    single = speculative_generate(params, prompts, model=model, config=config)
    model, params = shard_for_decoding(model, params, compat.make_mesh({"data": 2, "tensor": 2}))
    config, caches = dataclasses.replace(config, implementation="interpreted"), []
    flash = attend.prefill_attention
    monkeypatch.setattr(
        attend,
        "prefill_attention",
        lambda q, keys, *rest, **more: caches.append(keys.dtype) or flash(q, keys, *rest, **more),
    )
    meshed = speculative_generate(params, prompts, model=model, config=config)
    assert meshed.rows() == single.rows()
    # Latents are expanded to keys and values, in the dtype of the queries.
    assert set(caches) == {jnp.dtype(jnp.float8_e4m3fn if attention == "grouped" else jnp.float32)}


@pytest.mark.parametrize("allow_copies", [False, True])
def test_sizes_that_do_not_divide_are_copied_only_if_asked_for(allow_copies, small):
    model, params = small("grouped", "mixed", num_mtp_modules=1)  # 61 tokens
    config = dataclasses.replace(CONFIG, allow_copies=allow_copies)
    mesh = compat.make_mesh({"tensor": 2})
    if allow_copies:
        meshed = speculative_generate(params, PROMPTS, model=model, config=config, mesh=mesh).rows()
        assert meshed == speculative_generate(params, PROMPTS, model=model, config=config).rows()
        return
    with pytest.raises(ValueError, match="tensor=2 of the mesh does not divide vocab_size 61"):
        speculative_generate(params, PROMPTS, model=model, config=config, mesh=mesh)
