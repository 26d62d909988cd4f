"""Scoring a text needs little memory, whatever the size of the vocabulary and the length of the text."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax import DecodeConfig, MTPModel, compat
from mtpjax.decoding.capacity import choose_prefill_chunk
from mtpjax.decoding.decoder import Decoder, make_spec
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import StateShape
from mtpjax.evaluation.compiled_call import stored_shapes
from mtpjax.inference.requests import make_drafter
from mtpjax.models.presets import presets
from mtpjax.serving.scoring import MAX_LOGITS, pass_width, piece_size, score_chunk

V, T, SLOTS, PAGE = 151_936, 32_768, 4, 64
CONFIG = dataclasses.replace(
    presets["tiny"],
    vocab_size=V,
    num_hidden_layers=2,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_position_embeddings=T,
)


def temporary_bytes(platform, dtype, sharding=None):
    """Compiles the program that scores a chunk from shapes alone; returns its temporary and its new memory."""
    model, settings = MTPModel(CONFIG), DecodeConfig(num_steps=1)
    chunk = choose_prefill_chunk(
        model.config, SLOTS, platform, implementation=model.implementation, longest_prompt=T, max_length=T
    )
    num_pages = SLOTS * T // PAGE
    spec = make_spec(settings, is_greedy=False, prefill_chunk=chunk)
    spec = dataclasses.replace(spec, pool=(num_pages, PAGE), logprobs=True)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), stored_shapes(CONFIG, has_fp8=False))
    decoder = Decoder(model, make_drafter(settings), spec)
    shape = StateShape(SLOTS, T, features=SamplingFeatures.all_enabled())
    state = jax.eval_shape(lambda: decoder.empty_state(shape, dtype))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    arguments = params, params, state, Batch(array(1, 1), array(1, 1, T // PAGE), array(1, 1)), array(1, 1)
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    placed = jax.tree.map(place, (*arguments, array(1, 1, chunk)))
    memory = score_chunk.plain.lower(*placed, decoder=decoder).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes


def test_scores_of_a_long_text_and_a_large_vocabulary_fit():
    temp, new = temporary_bytes("cpu", jnp.float32)  # XLA computes bfloat16 in float32 there
    assert temp < 1e9 and new < 1e6  # all logits of the text would be 20 GB


@pytest.mark.h100
def test_scores_of_a_long_text_and_a_large_vocabulary_fit_on_an_h100():
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    with use_abstract_mesh(mesh.abstract_mesh):
        temp, new = temporary_bytes("cuda", jnp.bfloat16, NamedSharding(mesh, PartitionSpec()))
    print(f"temp {temp / 1e9:.3f} GB")
    assert temp < 1e9 and new < 5e6


@pytest.mark.parametrize(("width", "row_size", "size"), [(64, V, 64), (2048, V, 64), (24, 10**9, 1), (7, 1, 7)])
def test_pieces_divide_a_chunk_and_bound_the_logits(width, row_size, size):
    assert piece_size(width, row_size) == size and (size == 1 or size * row_size <= MAX_LOGITS)


def test_a_pass_of_the_trunk_is_not_narrower_than_the_least_chunk():
    assert pass_width(2048, 16 * T) == 128 and pass_width(2048, 10**9) == 64 and pass_width(24, 10**9) == 24
