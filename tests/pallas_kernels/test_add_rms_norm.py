import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from pallas_kernels.partial_sums import PartialSums
from tests.helpers.lowering import lower_for

interpreted = functools.partial(add_rms_norm, implementation="interpreted")


def problem(key, shape, num_shards, dtype=jnp.float32):
    keys = jax.random.split(key, 3)
    parts = jax.random.normal(keys[1], (num_shards, *shape), jnp.float32 if num_shards > 1 else dtype)
    scale = jax.random.normal(keys[2], shape[-1:], dtype)
    return 3 * jax.random.normal(keys[0], shape, dtype), PartialSums(parts, dtype), scale


# one row, rows and widths that fill no block, a row longer than a block of several
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape, num_shards", [((1, 64), 1), ((13, 96), 3), ((2, 3, 128), 2), ((3, 5000), 8)])
def test_kernel_matches_reference(shape, num_shards, zero_centred, key):
    for dtype in (jnp.float32, jnp.bfloat16):
        arguments = problem(key, shape, num_shards, dtype)
        settings = {"eps": 0.5, "zero_centred": zero_centred}
        total, normed = interpreted(*arguments, **settings)
        expected = add_rms_norm_reference(*arguments, **settings)
        # The sum is rounded at the same places, so its bits are the same; the norm sums in another order.
        np.testing.assert_array_equal(total, expected[0])
        without_x = interpreted(None, *arguments[1:], **settings)[0]
        np.testing.assert_array_equal(without_x, arguments[1].total())
        np.testing.assert_allclose(
            normed.astype(jnp.float32), expected[1].astype(jnp.float32), rtol=2 * jnp.finfo(dtype).eps, atol=1e-6
        )


def test_gradients_match_reference(key):
    x, update, scale = problem(key, (2, 3, 96), 3)
    weights = jax.random.normal(jax.random.key(1), (2, *x.shape))

    def loss(function, *arguments):
        return sum(jnp.sum(weight * out) for weight, out in zip(weights, function(*arguments), strict=True))

    gradients, expected = (
        jax.grad(loss, argnums=(1, 2, 3))(function, x, update, scale)
        for function in (interpreted, add_rms_norm_reference)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradients, expected)


def test_wrong_shapes_are_an_error(key):
    x, update, scale = problem(key, (2, 64), 2)
    with pytest.raises(ValueError, match=r"an update \(2, 64\)"):
        add_rms_norm(x[:1], update, scale)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernel_lowers_without_a_gpu(platform):
    arguments = jax.eval_shape(lambda key: problem(key, (4, 7168), 4, jnp.bfloat16), jax.random.key(0))
    lowered = lower_for(functools.partial(add_rms_norm, implementation="triton"), *arguments, platforms=(platform,))
    assert lowered[platform].as_text().count("custom_call @__gpu$xla.gpu.triton") == 1
