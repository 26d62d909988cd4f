import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine_shares import combine_shares, combine_shares_reference


# B, K, Z, T, G, width, parts: one share, shares and widths that fill no block, halves, blocks of columns
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1, 2, 64, 1), (3, 2, 5, 4, 3, 48, 1), (2, 1, 33, 2, 3, 96, 2), (1, 1, 64, 1, 2, 200, 1)]
)
def test_kernel_matches_reference(shape, key):
    *sizes, parts = shape
    B, K, Z, T, G, _ = sizes
    keys = jax.random.split(key)
    outputs = jax.random.normal(keys[0], sizes)
    # A share that saw nothing has the least weight that `verify_attention` writes.
    log_sums = 20 * jax.random.normal(keys[1], (parts, B, K, Z, T * G))
    log_sums = log_sums.at[:, :, :, 1:, 0].set(-1e30)
    found = combine_shares(outputs, log_sums, dtype=jnp.float32, interpret=True)
    expected = combine_shares_reference(outputs, log_sums, dtype=jnp.float32)
    assert found.shape == (B, T, K, G, sizes[-1])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
