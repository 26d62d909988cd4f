import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models.layers.norm import RMSNorm


@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_fresh_norm_gives_unit_mean_square(zero_centred, key):
    x = 5 * jax.random.normal(key, (3, 7, 32))
    norm = RMSNorm(zero_centred=zero_centred)
    out, params = norm.init_with_output(key, x)
    assert params["params"]["scale"].tolist() == [0.0 if zero_centred else 1.0] * 32
    np.testing.assert_allclose(jnp.mean(out**2, axis=-1), 1.0, rtol=1e-5)  # float32; eps is 1e-6 against 25


def test_zero_centred_multiplies_by_one_plus_scale(key):
    x, scale = jax.random.normal(key, (5, 32)), jax.random.normal(jax.random.key(1), (32,))
    plain = RMSNorm().apply({"params": {"scale": 1 + scale}}, x)
    np.testing.assert_array_equal(RMSNorm(zero_centred=True).apply({"params": {"scale": scale}}, x), plain)


def test_eps_matters_for_small_rows():
    x = jnp.full((1, 4), 1e-3)
    out = RMSNorm(eps=3e-6).apply({"params": {"scale": jnp.ones(4)}}, x)
    np.testing.assert_allclose(out, 0.5, rtol=1e-5)  # 1e-3 / sqrt(1e-6 + 3e-6)


def test_half_precision_is_kept(key):
    x = jax.random.normal(key, (2, 32), jnp.bfloat16)
    assert RMSNorm().apply({"params": {"scale": jnp.ones(32)}}, x).dtype == jnp.bfloat16
