import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_latents import append_latents, append_latents_reference
from pallas_kernels.partial_sums import PartialSums
from tests.helpers.lowering import lower_for

# B, T, N, C, R, P: sizes that fill no block, several slices of the latent, many rows
SHAPES = [(1, 1, 2, 16, 32, 8), (3, 4, 3, 24, 80, 12), (2, 16, 2, 40, 144, 16)]


def problem(key, shape, *, num_shards=3, dtype=jnp.float32, cache_dtype=None, slots=37):
    B, T, N, C, R, P = shape
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    queries, latents = (
        PartialSums(normal(num_shards, *sizes).astype(jnp.float32 if num_shards > 1 else dtype), dtype)
        for sizes in ((B, T, N, C + P), (B, T, R + P))
    )
    angle = normal(B, T, P // 2)
    cache = normal(B, slots, R + P).astype(cache_dtype or dtype)
    start = jnp.arange(B, dtype=jnp.int32) * (slots - T) // max(B - 1, 1)  # the last row fills its cache
    key_up = (normal(N, C, R) / C**0.5).astype(dtype)
    return queries, latents, normal(R), key_up, (jnp.cos(angle), jnp.sin(angle)), cache, start


def check(key, shape, *, rtol, interleaved=False, **settings):
    arguments = problem(key, shape, **settings)
    options = {"eps": 0.5, "interleaved": interleaved}
    found = append_latents(*arguments, **options, implementation="interpreted")
    with jax.default_matmul_precision("highest"):
        expected = append_latents_reference(*arguments, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        one, other = (np.asarray(each.astype(jnp.float32)) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())
    # Slots that are not new keep their bits.
    cache, start = arguments[-2:]
    slot = np.arange(cache.shape[1])
    is_old = (slot < np.asarray(start)[:, None]) | (slot >= np.asarray(start)[:, None] + shape[1])
    np.testing.assert_array_equal(np.asarray(found[1])[is_old], np.asarray(cache)[is_old])


@pytest.mark.parametrize(("shape", "interleaved"), [*((shape, False) for shape in SHAPES), (SHAPES[1], True)])
def test_kernel_matches_reference(shape, interleaved, key):
    check(key, shape, rtol=1e-5, interleaved=interleaved)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_kernel_matches_reference_in_bfloat16_with_another_dtype_of_the_cache(num_shards, key):
    # Sums of parts are rounded alike; the norm, the rotation and the product may round to the neighbouring number.
    check(key, SHAPES[1], rtol=2**-7, num_shards=num_shards, dtype=jnp.bfloat16)
    check(key, SHAPES[1], rtol=2**-3, num_shards=num_shards, dtype=jnp.bfloat16, cache_dtype=jnp.float8_e4m3fn)


def test_many_rows_run_the_reference_and_wrong_shapes_are_an_error(key):
    arguments = problem(key, (5, 13, 1, 16, 16, 4))
    found = append_latents(*arguments, implementation="interpreted")
    jax.tree.map(np.testing.assert_array_equal, found, append_latents_reference(*arguments))
    with pytest.raises(ValueError, match=r"start \(4,\)"):
        append_latents(*arguments[:-1], arguments[-1][:4])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernel_lowers_without_a_gpu_and_updates_the_cache_in_place(platform):
    make = functools.partial(problem, shape=(4, 4, 16, 128, 512, 64), dtype=jnp.bfloat16)
    arrays = jax.eval_shape(make, jax.random.key(0))
    call = functools.partial(append_latents, implementation="triton")
    text = lower_for(call, *arrays, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 1
