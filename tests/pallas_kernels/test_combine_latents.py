import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine_shares import combine_latents, combine_latents_reference


# B, T, Z, N, R, V, parts: one share, sizes that fill no block, halves of the latent, many rows
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2, 64, 16, 1), (3, 4, 5, 3, 80, 40, 1), (2, 16, 3, 2, 192, 24, 2), (1, 2, 33, 2, 32, 48, 1)]
)
def test_kernel_matches_reference(shape, key):
    B, T, Z, N, R, V, parts = shape
    keys = jax.random.split(key, 3)
    outputs = jax.random.normal(keys[0], (B, 1, Z, T, N, R))
    # A share that saw nothing has the least weight that `verify_attention` writes.
    log_sums = 20 * jax.random.normal(keys[1], (parts, B, 1, Z, T * N))
    log_sums = log_sums.at[:, :, :, 1:, 0].set(-1e30)
    value_up = jax.random.normal(keys[2], (N, R, V)) / R**0.5
    found = combine_latents(outputs, log_sums, value_up, dtype=jnp.float32, interpret=True)
    with jax.default_matmul_precision("highest"):
        expected = combine_latents_reference(outputs, log_sums, value_up, dtype=jnp.float32)
    assert found.shape == (B, T, N, V)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
