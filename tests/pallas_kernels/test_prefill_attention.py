import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.prefill_attention import prefill_attention, prefill_attention_reference
from tests.helpers.lowering import lower_for

# B, K, T, G, H, S: tokens, slots and widths that fill no block; a latent's width; one token
SHAPES = [(2, 2, 19, 2, 40, 70), (3, 1, 33, 3, 16, 53), (1, 2, 1, 4, 64, 20)]


def problem(key, shape, *, dtype=jnp.float32, cache_dtype=None, latent=0, window=0, sinks=0, has_mask=False):
    B, K, T, G, H, S = shape
    keys = jax.random.split(key, 4)
    start = jnp.arange(B, dtype=jnp.int32) * (S - T) // max(B - 1, 1)  # the last row fills its cache
    q = jax.random.normal(keys[0], (B, K, T, G, H), dtype)
    # NaN behind the row's tokens.
    is_text = (jnp.arange(S)[None, :] < start[:, None] + T)[:, None, :, None]
    caches = [jax.random.normal(one, (B, K, S, H), dtype) for one in keys[1:3]]
    caches = [jnp.where(is_text, cache, jnp.nan).astype(cache_dtype or dtype) for cache in caches]
    window_start = start[:, None] + jnp.arange(T)[None, :] - window + 1 if window else None
    mask = jax.random.bernoulli(keys[3], 0.3, (B, T, S)) if has_mask else None
    settings = {"scale": H**-0.5, "sinks": sinks}
    if latent:
        settings["value_width"] = latent
    return (q, caches[0], None if latent else caches[1], start, window_start, mask), settings


def check(key, shape, *, tolerance=1e-5, **options):
    arguments, settings = problem(key, shape, **options)
    found = prefill_attention(*arguments, **settings, implementation="interpreted")
    with jax.default_matmul_precision("highest"):
        expected = prefill_attention_reference(*arguments, **settings)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance)
    assert np.isfinite(np.asarray(found, np.float32)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"window": 5, "sinks": 3}, {"has_mask": True}], ids=str)
def test_kernel_matches_reference(shape, options, key):
    check(key, shape, **options)


def test_a_latents_values_are_columns_of_its_keys(key):
    check(key, (2, 1, 18, 5, 44, 50), latent=36)
    check(key, (2, 1, 18, 5, 44, 50), latent=36, has_mask=True)


def test_bfloat16_and_a_cache_in_fp8(key):
    # The reference rounds weights after the softmax, the kernel before: neighbouring numbers.
    check(key, SHAPES[0], dtype=jnp.bfloat16, tolerance=3e-2)
    check(key, SHAPES[0], dtype=jnp.bfloat16, cache_dtype=jnp.float8_e4m3fn, tolerance=3e-2)


def test_wrong_shapes_are_an_error(key):
    arguments, settings = problem(key, SHAPES[0])
    with pytest.raises(ValueError, match=r"q .* does not fit keys .*, values .*, start \(1,\)"):
        prefill_attention(*arguments[:3], arguments[3][:1], **settings)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("latent", [0, 512])
def test_kernel_lowers_without_a_gpu(latent, platform):
    H = 576 if latent else 128
    make = lambda key: problem(key, (2, 1, 256, 4, H, 1024), dtype=jnp.bfloat16, latent=latent)[0]
    shapes = jax.eval_shape(make, jax.random.key(0))
    call = functools.partial(prefill_attention, scale=0.1, value_width=latent or None, implementation="triton")
    text = lower_for(call, *shapes, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
