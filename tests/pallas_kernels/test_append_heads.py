import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_heads import Heads, append_heads, append_heads_reference
from pallas_kernels.partial_sums import PartialSums
from tests.helpers.lowering import lower_for

# B, T, K, G, H, P: a single row, groups and widths that fill no block, a part of the channels rotated, all of them
SHAPES = [(1, 1, 2, 2, 64, 32), (3, 4, 2, 3, 48, 24), (2, 5, 3, 1, 80, 16), (2, 16, 1, 7, 32, 12)]


def problem(key, shape, *, num_shards=3, dtype=jnp.float32, cache_dtype=None, slots=37, gates=0, has_all=True, **heads):
    B, T, K, G, H, P = shape
    keys = iter(jax.random.split(key, 10))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    projected = PartialSums(normal(num_shards, B, T, K, G + 2 + gates, H), dtype)
    if num_shards == 1:
        projected = PartialSums(projected.parts.astype(dtype), dtype)
    angle = normal(B, T, P)
    caches = [normal(B, K, slots, H).astype(cache_dtype or dtype) for _ in range(2)]
    start = jnp.arange(B, dtype=jnp.int32) * (slots - T) // max(B - 1, 1)  # the last row fills its cache
    if has_all:
        heads |= {"bias": normal(K, G + 2, H), "norms": (normal(H), normal(H))}
    return projected, (jnp.cos(angle), jnp.sin(angle)), *caches, start, Heads(eps=0.5, **heads)


def check(key, shape, *, rtol, **settings):
    arguments = problem(key, shape, **settings)
    found = append_heads(*arguments, group_size=shape[3], implementation="interpreted")
    expected = append_heads_reference(*arguments, group_size=shape[3])
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        one, other = (np.asarray(each.astype(jnp.float32)) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())
    # Slots that are not new keep their bits.
    _, _, keys, values, start, _ = arguments
    slot = np.arange(keys.shape[2])
    is_old = (slot < np.asarray(start)[:, None]) | (slot >= np.asarray(start)[:, None] + shape[1])
    for one, other in zip(found[1:], (keys, values), strict=True):
        kept = np.broadcast_to(is_old[:, None], one.shape[:3])
        np.testing.assert_array_equal(np.asarray(one)[kept], np.asarray(other)[kept])


@pytest.mark.parametrize(("shape", "interleaved"), [*((shape, False) for shape in SHAPES), (SHAPES[1], True)])
def test_kernel_matches_reference(shape, interleaved, key):
    check(key, shape, rtol=1e-5, interleaved=interleaved, gates=shape[3] % 2, zero_centred=interleaved)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_kernel_matches_reference_in_bfloat16_with_another_dtype_of_the_cache(num_shards, key):
    # Sums of parts are rounded alike; the norm and rotation may round to the neighbouring number.
    check(key, SHAPES[1], rtol=2**-7, num_shards=num_shards, dtype=jnp.bfloat16)
    check(key, SHAPES[1], rtol=2**-3, num_shards=num_shards, dtype=jnp.bfloat16, cache_dtype=jnp.float8_e4m3fn)


def test_kernel_needs_neither_bias_nor_norms(key):
    check(key, SHAPES[0], rtol=1e-5, has_all=False)


def test_many_rows_run_the_reference_and_wrong_shapes_are_an_error(key):
    arguments = problem(key, (5, 13, 1, 1, 16, 4))
    found = append_heads(*arguments, group_size=1, implementation="interpreted")
    jax.tree.map(np.testing.assert_array_equal, found, append_heads_reference(*arguments, group_size=1))
    with pytest.raises(ValueError, match=r"start \(4,\)"):
        append_heads(*arguments[:4], arguments[4][:4], arguments[5], group_size=1)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernel_lowers_without_a_gpu_and_updates_the_cache_in_place(platform):
    *arrays, heads = jax.eval_shape(functools.partial(problem, shape=SHAPES[0], dtype=jnp.bfloat16), jax.random.key(0))

    def call(arrays, bias, norms):
        return append_heads(*arrays, Heads(bias, norms), group_size=2, implementation="triton")

    text = lower_for(call, arrays, heads.bias, heads.norms, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 2
