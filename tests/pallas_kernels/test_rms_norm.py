import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels.rms_norm import rms_norm, rms_norm_reference
from tests.helpers.lowering import lower_for

# 13 rows do not fill the last block, 96 and 5000 are no powers of two, 5000 is longer than a block of several rows
SHAPES = [(8, 64), (13, 256), (5, 96), (2, 3, 128), (64,), (100, 96), (3, 5000)]
kernel = functools.partial(rms_norm, implementation="triton")
interpreted = functools.partial(rms_norm, implementation="interpreted")


def inputs(key, shape, dtype=jnp.float32):
    key_x, key_scale = jax.random.split(key)
    return 3 * jax.random.normal(key_x, shape, dtype), jax.random.normal(key_scale, shape[-1:], dtype)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_reference(shape, dtype, zero_centred, key):
    x, scale = inputs(key, shape, dtype)
    out = interpreted(x, scale, eps=0.5, zero_centred=zero_centred)  # large enough that a wrong epsilon shows
    expected = rms_norm_reference(x, scale, eps=0.5, zero_centred=zero_centred)
    assert out.shape == shape and out.dtype == dtype
    # Both round once, from float32 sums taken in different orders: neighbouring numbers at worst.
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected.astype(jnp.float32), rtol=2 * jnp.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("zero_centred", [False, True])
def test_kernel_gradients_match_reference(zero_centred, key):
    x, scale = inputs(key, (2, 3, 96))
    weights = jax.random.normal(jax.random.key(1), x.shape)

    def loss(function, x, scale):
        return jnp.sum(weights * function(x, scale, zero_centred=zero_centred))

    gradients = jax.grad(loss, argnums=(1, 2))(interpreted, x, scale)
    expected = jax.grad(loss, argnums=(1, 2))(rms_norm_reference, x, scale)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradients, expected)


def test_reference_rows_have_unit_mean_square(key):
    x, _ = inputs(key, (13, 256))
    out = rms_norm_reference(x, jnp.zeros(256), zero_centred=True)
    np.testing.assert_allclose(jnp.mean(out**2, axis=-1), 1.0, rtol=1e-5)


def test_reference_gradient_matches_finite_differences(key):
    check_grads(rms_norm_reference, inputs(key, (2, 8)), order=1, modes=["rev"], rtol=1e-2)


def test_auto_is_the_reference_and_an_empty_batch_is_fine(key):
    x, scale = inputs(key, (5, 96))
    np.testing.assert_array_equal(rms_norm(x, scale), rms_norm_reference(x, scale))
    assert interpreted(x[:0], scale).shape == (0, 96)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("width", [64, 96, 7168])
def test_kernel_and_its_gradient_lower_without_a_gpu(width, platform):
    x = jax.ShapeDtypeStruct((2, 3, width), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((width,), jnp.float32)
    step = jax.value_and_grad(lambda x, scale: jnp.sum(kernel(x, scale, zero_centred=True)), argnums=(0, 1))
    text = lower_for(step, x, scale, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_kernel_matches_reference_on_a_gpu(shape, dtype, key):
    x, scale = inputs(key, shape, dtype)
    out, expected = kernel(x, scale), rms_norm_reference(x, scale)
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected.astype(jnp.float32), rtol=2 * jnp.finfo(dtype).eps, atol=1e-6
    )


def test_an_unknown_implementation_is_refused_with_the_choices(key):
    with pytest.raises(ValueError, match="auto, xla, triton, interpreted"):
        rms_norm(*inputs(key, (8, 64)), implementation="cuda")


def test_a_scale_of_another_width_is_refused(key):
    x, scale = inputs(key, (8, 64))
    with pytest.raises(ValueError, match=r"\(32,\)"):
        rms_norm(x, scale[:32])
