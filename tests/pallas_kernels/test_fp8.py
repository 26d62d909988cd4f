import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import FP8_DIVISOR, convert_fp8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_fp8_number_is_converted_exactly_and_nan_is_480(dtype):
    bits = jnp.arange(256, dtype=jnp.uint8)
    expected = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32))
    assert list(np.flatnonzero(np.isnan(expected))) == [0x7F, 0xFF]
    expected = np.where(np.isnan(expected), np.where(bits < 128, 480, -480), expected)
    found = convert_fp8(bits, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32) * FP8_DIVISOR, expected)
