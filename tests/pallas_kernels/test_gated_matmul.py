import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import _run_kernel, gated_matmul, gated_matmul_reference
from tests.helpers.lowering import lower_for

FP8 = jnp.float8_e4m3fn
interpreted = functools.partial(gated_matmul, implementation="interpreted")


def problem(key, rows, D, F, block, dtype, weights_dtype):
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (rows, D), dtype)
    weights = (jax.random.normal(keys[1], (D, 2 * F)) / D**0.5).astype(weights_dtype)
    scales = jax.random.uniform(keys[2], (-(-D // block), 2 * F)) if weights_dtype == FP8 else None
    return x, weights, scales


# one row, rows of more than a tile, inputs and columns that fill no tile, a block longer than the inputs
@pytest.mark.parametrize("weights_dtype", [jnp.float32, FP8])
@pytest.mark.parametrize(
    "rows, D, F, block", [(1, 64, 16, 32), (5, 144, 40, 64), (33, 300, 72, 128), (64, 96, 130, 128)]
)
def test_kernel_matches_reference(rows, D, F, block, weights_dtype, key):
    arguments = problem(key, rows, D, F, block, jnp.float32, weights_dtype)
    found = interpreted(*arguments, block=block)
    np.testing.assert_allclose(found, gated_matmul_reference(*arguments, block=block), rtol=1e-4, atol=1e-5)
    # What runs elsewhere: the products, then SwiGLU.
    xla = gated_matmul(*arguments, block=block, implementation="xla")
    np.testing.assert_allclose(xla, gated_matmul_reference(*arguments, block=block), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_integer_conversion_of_rocm_gives_the_same_bits(dtype, key):
    arguments = problem(key, 5, 144, 40, 64, dtype, FP8)
    run = functools.partial(_run_kernel, *arguments, block=64, interpret=True)
    np.testing.assert_array_equal(run(platform="rocm"), run(platform="cuda"))


def test_bfloat16_rounds_once(key):
    arguments = problem(key, 3, 144, 40, 128, jnp.bfloat16, jnp.bfloat16)
    found, expected = interpreted(*arguments), gated_matmul_reference(*arguments)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_gradients_are_those_of_xla(key):
    x, weights, _ = problem(key, 3, 64, 16, 128, jnp.float32, jnp.float32)

    def loss(form, x, weights):
        return jnp.sum(jnp.sin(form(x, weights)))

    gradients = [jax.grad(loss, argnums=(1, 2))(form, x, weights) for form in (interpreted, gated_matmul_reference)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *gradients)


def test_wrong_arguments_are_an_error(key):
    x, weights, scales = problem(key, 3, 144, 20, 128, jnp.float32, FP8)
    with pytest.raises(ValueError, match=r"expected \[..., D\] and \[D, 2 F\]"):
        gated_matmul(x, weights[:, :39])
    with pytest.raises(ValueError, match=r"scales \(1, 40\)"):
        gated_matmul(x, weights, scales[:1])
    with pytest.raises(ValueError, match="not of 12"):
        interpreted(x, weights, jnp.ones((12, 40)), block=12)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("weights_dtype", [jnp.bfloat16, FP8])
def test_kernel_lowers_without_a_gpu(weights_dtype, platform):
    make = functools.partial(problem, rows=4, D=512, F=384, block=128, dtype=jnp.bfloat16, weights_dtype=weights_dtype)
    x, weights, scales = jax.eval_shape(make, jax.random.key(0))
    call = functools.partial(gated_matmul, implementation="triton")
    text = lower_for(call, x, weights, scales, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
