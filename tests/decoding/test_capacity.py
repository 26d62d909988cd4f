"""Sizes that a call is compiled for."""

import dataclasses

import pytest

from mtpjax import ModelConfig, presets
from mtpjax.decoding.capacity import choose_prefill_chunk, min_rows_per_pass

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
DENSE = ModelConfig(**SIZES, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
EXPERTS = dataclasses.replace(DENSE, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)


@pytest.mark.parametrize(
    ("platform", "batch", "longest_prompt", "max_length", "chunk"),
    [
        ("cpu", 1, 4000, 8000, 64),
        ("cuda", 1, 10, 300, 64),
        ("cuda", 1, 300, 600, 512),
        ("rocm", 1, 4000, 4096, 2048),  # scores of 1 GiB
        ("cuda", 4, 4000, 4096, 512),
        ("cuda", 64, 30000, 32768, 64),
    ],
)
def test_a_prefill_chunk_grows_with_the_prompts_up_to_the_memory_of_scores(
    platform, batch, longest_prompt, max_length, chunk
):
    sizes = {"longest_prompt": longest_prompt, "max_length": max_length}
    assert choose_prefill_chunk(DENSE, batch, platform, implementation="xla", **sizes) == chunk


def test_without_scores_in_memory_a_prefill_chunk_does_not_shrink_with_the_context():
    sizes = {"longest_prompt": 30000, "max_length": 32768}
    assert choose_prefill_chunk(DENSE, 4, "cuda", implementation="auto", **sizes) == 2048
    # The feed-forward layer's widest array is 1 GiB.
    wide = dataclasses.replace(DENSE, intermediate_size=2**15)
    assert choose_prefill_chunk(wide, 4, "cuda", implementation="auto", **sizes) == 1024
    # An indexer keeps scores of its own.
    sparse = dataclasses.replace(presets["deepseek-v3.2"], num_hidden_layers=4)
    assert choose_prefill_chunk(sparse, 4, "cuda", implementation="auto", **sizes) == 64


def test_only_a_dense_model_on_a_gpu_takes_two_rows():
    for platform, config, batch, rows in (
        ("cpu", DENSE, 1, 1),
        ("cuda", DENSE, 1, 2),
        ("cuda", DENSE, 4, 1),
        ("cuda", EXPERTS, 1, 1),
    ):
        assert min_rows_per_pass(config, batch, platform) == rows
