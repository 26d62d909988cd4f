"""The kernel that runs through jax_triton: its numbers in Triton's interpreter, and its lowering for both platforms.

Needs Python 3.12 with jax_triton and triton, and for the lowering JAX's CUDA plug-in; `.ci/run` has all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.batch_invariance import batch_invariant
from pallas_kernels.block_scaled_matmul import block_scaled_matmul, partial_matmul
from pallas_kernels.block_scaled_matmul.reference import block_scaled_matmul_reference
from pallas_kernels.fp8 import FP8_DIVISOR
from tests.helpers.lowering import lower_for

FP8 = jnp.float8_e4m3fn
needs_jax_triton = pytest.mark.skipif(not HAS_JAX_TRITON, reason="jax_triton and triton packages are not installed")


class HostArray:
    """A NumPy array with the methods of a tensor that Triton's interpreter calls."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return HostArray(self.array)

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    storage_offset = size = stride = lambda self: None


def inputs(key, rows, D, F, block, weights_dtype):
    keys = jax.random.split(key, 3)
    x, weights = jax.random.normal(keys[0], (rows, D)), jax.random.normal(keys[1], (D, F)).astype(weights_dtype)
    return x, weights, jnp.exp(jax.random.normal(keys[2], (-(-D // block), F))) if block else None


@needs_jax_triton
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(
    "rows, D, F, block, weights_dtype, is_invariant",
    [
        (1, 300, 200, 128, FP8, False),
        (5, 144, 28, 16, FP8, False),
        (33, 130, 60, 0, jnp.float32, False),
        (33, 130, 60, 64, FP8, True),
    ],
)
def test_numbers_are_those_of_the_reference(rows, D, F, block, weights_dtype, is_invariant, platform, key, monkeypatch):
    import jax_triton
    from triton.runtime.interpreter import InterpretedFunction

    from pallas_kernels.block_scaled_matmul import jax_triton_kernel
    from pallas_kernels.block_scaled_matmul.kernel import choose_tiles

    def interpret(*operands, kernel, out_type, grid, num_warps, num_stages, name, **constants):
        del num_warps, num_stages, name
        out = np.full(out_type.shape, np.nan, out_type.dtype)
        arrays = [HostArray(np.asarray(array)) for array in operands]
        InterpretedFunction(kernel.fn)[grid](*arrays, HostArray(out), **constants)
        return jnp.asarray(out)

    monkeypatch.setattr(jax_triton, "triton_call", interpret)
    x, weights, scales = inputs(key, rows, D, F, block, weights_dtype)
    sizes = {"block": block or 128, "dtype": x.dtype}
    with batch_invariant(is_invariant):
        tiles = choose_tiles(x, [(weights, scales)], **sizes)
        parts = jax_triton_kernel.multiply_few_rows(x, weights, scales, tiles=tiles, platform=platform, **sizes)
        pallas = partial_matmul(x, weights, scales, block=block or 128, implementation="interpreted")
    assert parts.shape == pallas.parts.shape  # the same tiles and parts
    expected = block_scaled_matmul_reference(x, weights, scales, block=block or 128)
    np.testing.assert_allclose(parts.sum(axis=0), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(parts, pallas.parts, rtol=1e-4, atol=1e-3)
    assert FP8_DIVISOR == 256  # the kernel's shift of exponents


@needs_jax_triton
@pytest.mark.h100
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default of its own
@pytest.mark.parametrize("weights_dtype", [FP8, jnp.bfloat16])
def test_the_call_lowers_for_both_platforms(weights_dtype, key, monkeypatch):
    from jax_triton import triton_lib

    # The architecture of an AMD GPU is asked from the GPU, which is not here; the compiler runs all the same.
    monkeypatch.setattr(triton_lib.triton_kernel_call_lib, "get_arch_details", lambda device: "gfx942")
    x, weights, scales = inputs(key, 4, 256, 512, 128 if weights_dtype == FP8 else 0, weights_dtype)
    call = functools.partial(block_scaled_matmul, implementation="jax_triton")
    for lowered in lower_for(call, x.astype(jnp.bfloat16), weights, scales).values():
        assert "triton_kernel_call" in lowered.as_text()


def test_a_request_that_it_cannot_serve_is_an_error(key):
    x, weights, _ = inputs(key, 3, 64, 32, 0, jnp.float8_e5m2)
    said = "does not support float8_e5m2 weights" if HAS_JAX_TRITON else "triton packages are not installed"
    with pytest.raises(ValueError, match=said):
        block_scaled_matmul(x, weights, implementation="jax_triton")
