import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import Routing, difference_from_reference, route_tokens
from tests.helpers.lowering import lower_for

# experts; numbers of experts and of groups that are no powers of two, all experts chosen, groups of one expert
CASES = {
    "plain": (60, Routing(k=4)),
    "all": (6, Routing(k=6, scoring="softmax")),
    "groups": (160, Routing(k=6, num_groups=8, num_kept_groups=3, factor=2.5)),
    "odd-groups": (36, Routing(k=3, num_groups=3, num_kept_groups=2)),
    "groups-of-one": (12, Routing(k=2, num_groups=12, num_kept_groups=3)),
    "unnormalised": (64, Routing(k=6, scoring="softmax", normalises=False)),
}


def problem(key, rows, width, experts, dtype=jnp.float32):
    keys = jax.random.split(key, 3)
    x, router = jax.random.normal(keys[0], (rows, width), dtype), jax.random.normal(keys[1], (width, experts))
    # Mostly below minus the largest score, so that a group masked with 0 instead of -inf would win.
    return x, router / width**0.5, jax.random.uniform(keys[2], (experts,), minval=-1.6, maxval=0.1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_reference(name, has_bias, key):
    experts, routing = CASES[name]
    # Rows that fill no tile, and inputs that fill none and are split into parts; or a single row.
    x, router, bias = problem(key, *((17, 1100) if has_bias else (1, 96)), experts)
    arguments = x, router, bias if has_bias else None, routing
    ids, weights = route_tokens(*arguments, implementation="interpreted")
    with jax.default_matmul_precision("highest"):
        expected_ids, expected_weights = route_tokens(*arguments, implementation="xla")
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_that_are_not_used_choose_no_experts(implementation, has_bias, key):
    x, router, bias = problem(key, 3, 96, 12)
    call = functools.partial(
        route_tokens, x, router, bias if has_bias else None, Routing(k=2), implementation=implementation
    )
    (all_ids, all_weights), (ids, weights) = call(), call(is_used=jnp.array([True, False, True]))
    np.testing.assert_array_equal(ids, all_ids.at[1].set(12))
    np.testing.assert_array_equal(weights, all_weights)


def test_equal_scores_go_to_the_lowest_expert(key):
    x, router, _ = problem(key, 2, 64, 12)
    routing = Routing(k=5, num_groups=3, num_kept_groups=2)
    ids, _ = route_tokens(x, 0 * router, None, routing, implementation="interpreted")
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]] * 2)


def test_the_product_is_float32_whatever_x_is(key):
    x, router, bias = problem(key, 3, 256, 64, jnp.bfloat16)
    arguments = router, bias, CASES["plain"][1]
    found = route_tokens(x, *arguments, implementation="interpreted")
    expected = route_tokens(x.astype(jnp.float32), *arguments, implementation="interpreted")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["groups", "unnormalised"])
def test_the_comparison_at_first_use_accepts_the_kernel(name):
    check = functools.partial(difference_from_reference, dtype=jnp.bfloat16, routing=CASES[name][1], has_bias=True)
    assert check("interpreted") <= 1


def test_wrong_arguments_are_an_error(key):
    x, router, bias = problem(key, 2, 64, 12)
    with pytest.raises(ValueError, match=r"does not fit the router \(64, 12\)"):
        route_tokens(x[:, :5], router, bias, Routing(k=2))
    with pytest.raises(ValueError, match="does not fit 12 experts"):
        route_tokens(x, router, bias, Routing(k=13))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernels_lower_without_a_gpu(platform):
    make = functools.partial(problem, rows=4, width=2048, experts=64, dtype=jnp.bfloat16)
    arrays = jax.eval_shape(make, jax.random.key(0))
    is_used = np.array([True, True, False, True])
    call = functools.partial(route_tokens, routing=CASES["groups"][1], is_used=is_used, implementation="triton")
    text = lower_for(call, *arrays, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2
