"""Caches of another dtype than the weights: speculation still equals plain decoding with the same caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mtpjax.models.view import write_rows

from mtpjax import DecodeConfig, speculative_generate
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.state import StateShape
from mtpjax.inference.requests import make_drafter
from pallas_kernels.fp8 import as_stored

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
CONFIG = DecodeConfig(max_new_tokens=24, num_steps=2, prefill_chunk=8, logprobs=True, kv_cache_dtype="fp8_e4m3")
SHAPES = {"chain": {}, "tree": {"topk": 2, "num_draft_tokens": 6}}


@pytest.mark.parametrize(
    ("attention", "shape"),
    [
        ("grouped", "chain"),
        pytest.param("grouped", "tree", marks=pytest.mark.slow),
        pytest.param("latent", "chain", marks=pytest.mark.slow),
        pytest.param("sparse", "chain", marks=pytest.mark.slow),
        pytest.param("latent", "tree", marks=pytest.mark.slow),
        pytest.param("hybrid", "chain", marks=pytest.mark.slow),
    ],
)
def test_greedy_speculation_equals_plain_decoding_with_fp8_caches(attention, shape, small):
    model, params = small(attention, "mixed", num_mtp_modules=1)
    config = dataclasses.replace(CONFIG, **SHAPES[shape])
    plain = dataclasses.replace(CONFIG, num_steps=0)
    drafted, expected = (speculative_generate(params, PROMPTS, model=model, config=each) for each in (config, plain))
    assert drafted.rows() == expected.rows()
    for one, other in zip(drafted.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    # The caches are in fp8, and it shows in the numbers.
    exact = speculative_generate(params, PROMPTS, model=model, config=dataclasses.replace(plain, kv_cache_dtype="auto"))
    difference = max(np.abs(one[0] - other[0]) for one, other in zip(exact.logprobs, expected.logprobs, strict=True))
    print(f"{attention}: first log-probabilities differ by up to {difference:.4f}")
    assert 1e-4 < difference < 0.5


def test_caches_have_the_dtype_that_was_asked_for(small):
    model, _ = small("hybrid", "mixed", num_mtp_modules=1)
    for name, dtype in (("fp8_e4m3", jnp.float8_e4m3fn), ("bfloat16", jnp.bfloat16), ("auto", jnp.float32)):
        config = dataclasses.replace(CONFIG, kv_cache_dtype=name)
        decoder = Decoder.make(config, make_drafter(config), model, None, batch=2, max_length=64)
        state = jax.eval_shape(lambda decoder=decoder: decoder.empty_state(StateShape(2, 64), jnp.float32))
        keys = {layer["key"].dtype for layer in state.trunk.layers if "key" in layer}
        recurrent = {
            layer[name].dtype for layer in state.trunk.layers if "state" in layer for name in ("state", "conv")
        }
        assert (keys, recurrent) == ({jnp.dtype(dtype)}, {jnp.dtype(jnp.float32)})
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' is not one of auto, bfloat16, fp8_e4m3"):
        DecodeConfig(kv_cache_dtype="fp8")


def test_numbers_beyond_the_range_of_fp8_become_its_largest():
    numbers = jnp.array([500.0, -1e9, 448.0, 3.0, jnp.inf])
    expected = [448.0, -448.0, 448.0, 3.0, 448.0]
    stored = as_stored(numbers, jnp.float8_e4m3fn)
    assert stored.dtype == jnp.float8_e4m3fn and stored.astype(jnp.float32).tolist() == expected
    buffer = jnp.zeros((1, 8, 1), jnp.float8_e4m3fn)
    written = write_rows(buffer, numbers[None, :, None], jnp.array([2]))
    assert written[0, 2:7, 0].astype(jnp.float32).tolist() == expected
