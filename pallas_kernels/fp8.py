"""Converts float8_e4m3fn with integer arithmetic, inside kernels."""

import jax
import jax.numpy as jnp
import numpy as np

FP8_DIVISOR = 256  # `convert_fp8` returns values divided by this number


def is_converted_by_integers(dtype, platform: str) -> bool:
    """Returns whether kernels convert a stored dtype with `convert_fp8`.

    An MI300X has a different native fp8 format and converts float8_e4m3fn slowly. An H100 converts it in hardware.
    """
    return platform == "rocm" and dtype == jnp.float8_e4m3fn


def as_stored(x, dtype):
    """Converts numbers to the dtype of a cache.

    Clamps values to the range of fp8, because float8_e4m3fn has no infinity and larger values would become NaN.
    """
    if jnp.dtype(dtype).itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype)


def convert_fp8(bits, dtype):
    """Converts the bits (uint8) of float8_e4m3fn numbers to float32, bfloat16 or float16, divided by `FP8_DIVISOR`.

    The conversion is exact, except that NaN becomes 480. The sign, exponent and fraction bits move to their positions
    in float16, whose exponent bias is larger by 8; bfloat16 represents every result exactly. This needs no fp8
    hardware. On an H100, only kernels that load two numbers as one use this function.
    """
    # s eeee fff -> s 0 eeee fff 0000000: the arithmetic shift repeats the sign, and the mask clears the copy.
    half = (((bits.astype(jnp.int32) << 24) >> 1) >> 16).astype(jnp.int16) & np.int16(0xBF80 - 2**16)
    half = jax.lax.bitcast_convert_type(half, jnp.float16)
    if dtype == jnp.float16:
        return half
    number = half.astype(jnp.float32)
    if dtype == jnp.float32:
        return number
    # bfloat16 is the upper half of float32; the lower half is zero here.
    upper = (jax.lax.bitcast_convert_type(number, jnp.int32) >> 16).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
