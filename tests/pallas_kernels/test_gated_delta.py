"""Kernels of the gated delta rule against the references, those against each other, and the kernels inside decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, MTPModel, generate, speculative_generate
from pallas_kernels.gated_delta import gated_delta, gated_delta_replay, gated_delta_steps, gated_delta_verify
from pallas_kernels.gated_delta.reference import CHUNK, gated_delta_reference, gated_delta_steps_reference
from tests.helpers import small_models
from tests.helpers.lowering import lower_for

# rows, tokens, key heads, value heads, and the widths of keys and values
FEW = [
    ((2, 1, 2, 4, 8, 6), jnp.float32),
    ((1, 4, 1, 2, 96, 40), jnp.bfloat16),  # both widths are padded, that of the values is split too
    ((1, 16, 1, 1, 128, 64), jnp.float32),
]


def run(form, rule, **options):
    return jax.jit(functools.partial(form, **options))(*rule)


interpreted = functools.partial(run, implementation="interpreted")


def make_rule(key, shape, dtype=jnp.float32):
    """Arguments of the ops. Some tokens forget all at once, some nothing; few keys are at right angles."""
    B, T, K, J, P, Q = shape
    keys = jax.random.split(key, 6)
    q, k = (jax.random.normal(key, (B, T, K, P)) + 1 for key in keys[:2])
    q, k = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in (q, k))
    v = jax.random.normal(keys[2], (B, T, J, Q), dtype)
    log_decay = -jnp.exp(3 * jax.random.normal(keys[3], (B, T, J)) - 2)
    beta = jax.nn.sigmoid(2 * jax.random.normal(keys[4], (B, T, J)))
    return q, k, v, log_decay, beta, jax.random.normal(keys[5], (B, J, P, Q))


def make_segments(shape, cut):
    return jnp.broadcast_to(jnp.where(jnp.arange(shape[1]) < cut, 1, 2)[None], shape[:2])


def assert_close(found, expected, tolerance=1e-5):
    """Within so much of the largest: float32 sums in another order, or factors rounded to bfloat16."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("shape, dtype", FEW, ids=str)
def test_kernels_for_few_tokens_match_the_reference(shape, dtype, key):
    rule = make_rule(key, shape, dtype)
    output, corrections, state = run(gated_delta_steps_reference, rule)
    for found, expected in (
        (interpreted(gated_delta_verify, rule), (output, corrections)),
        (interpreted(gated_delta_steps, rule), (output, state)),
    ):
        for array, twin in zip(found, expected, strict=True):
            assert array.shape == twin.shape and array.dtype == jnp.float32
            assert_close(array, twin)


def test_a_replay_gives_the_state_after_each_token(key):
    rule = make_rule(key, (7, 6, 1, 2, 8, 6))
    _, corrections = interpreted(gated_delta_verify, rule)
    _, k, _, log_decay, _, state = rule
    replayed = run(gated_delta_replay, (k, log_decay, corrections, state, jnp.arange(7)))
    np.testing.assert_array_equal(replayed[0], state[0])
    step = jax.jit(gated_delta_steps_reference)
    for t in range(6):
        *_, state = step(*(x[:, t : t + 1] for x in rule[:5]), state)
        assert_close(replayed[t + 1], state[t + 1])


def test_a_token_knows_neither_those_behind_it_nor_its_neighbours(key):
    rule = make_rule(key, (2, 5, 1, 2, 8, 6))
    whole = interpreted(gated_delta_verify, rule)
    alone = interpreted(gated_delta_verify, (*(x[1:, :3] for x in rule[:5]), rule[5][1:]))
    for array, part in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(array[1:, :3], part)


@pytest.mark.parametrize(
    "shape, dtype, cut",
    [
        ((2, 5, 2, 4, 8, 6), jnp.float32, 2),
        ((1, CHUNK + 6, 1, 2, 96, 40), jnp.float32, None),
        ((1, CHUNK + 6, 1, 2, 8, 6), jnp.bfloat16, 40),
        ((1, 2 * CHUNK, 1, 1, 16, 16), jnp.bfloat16, CHUNK),  # the second document begins a chunk
    ],
    ids=str,
)
def test_chunked_kernel_matches_the_reference(shape, dtype, cut, key):
    rule, segment_ids = make_rule(key, shape, dtype), None if cut is None else make_segments(shape, cut)
    found = interpreted(gated_delta, rule, segment_ids=segment_ids)
    expected = run(gated_delta_reference, rule, segment_ids=segment_ids)
    for array, twin in zip(found, expected, strict=True):
        assert array.shape == twin.shape and array.dtype == jnp.float32
        assert_close(array, twin, 1e-5 if dtype == jnp.float32 else 2e-2)


def test_equal_keys_that_nothing_forgets_are_solved(key):
    """The powers of the system then grow to 1e8 in 32 tokens, and a sum of them would be noise."""
    q, k, v, log_decay, beta, state = make_rule(key, (1, 2 * CHUNK, 1, 1, 16, 16))
    rule = (q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * log_decay, jnp.ones_like(beta), state)
    output, _, last = run(gated_delta_steps_reference, rule)
    for found, found_last in (run(gated_delta_reference, rule), interpreted(gated_delta, rule)):
        assert_close(found, output)
        assert_close(found_last, last)


def test_kernel_gradients_match_the_reference(key):
    shape = (1, 37, 1, 2, 8, 6)
    rule, segment_ids = make_rule(key, shape), make_segments(shape, 20)

    def loss(rule, form):
        output, state = form(*rule, segment_ids=segment_ids)
        return jnp.sum(jnp.sin(output)) + jnp.sum(state)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found = gradient(rule, functools.partial(gated_delta, implementation="interpreted"))
    for mine, twin in zip(found, gradient(rule, gated_delta_reference), strict=True):
        assert_close(mine, twin, 1e-4)  # the losses' gradients too come from sums in another order


@pytest.mark.parametrize("T", [1, 7, 2 * CHUNK + 9])
def test_reference_by_chunks_equals_steps(T, key):
    rule = make_rule(key, (2, T, 3, 3, 8, 5))
    output, state = run(gated_delta_reference, rule)
    expected, _, last = run(gated_delta_steps_reference, rule)
    assert_close(output, expected)
    assert_close(state, last)


def test_gradients_of_the_reference_by_chunks_equal_those_of_steps(key):
    def loss(rule, form):
        output, *_, state = form(*rule)
        return jnp.sum(jnp.sin(output)) + jnp.sum(state)

    rule, gradient = make_rule(key, (2, CHUNK + 1, 1, 3, 8, 5)), jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(rule, gated_delta_steps_reference)
    for mine, twin in zip(gradient(rule, gated_delta_reference), expected, strict=True):
        assert_close(mine, twin, 1e-4)  # longer sums


def test_each_document_starts_from_an_empty_state(key):
    shape, cut = (1, 100, 1, 1, 4, 3), 41
    *inputs, state = make_rule(key, shape)
    packed, last = run(gated_delta_reference, (*inputs, state), segment_ids=make_segments(shape, cut))
    first, *_ = run(gated_delta_steps_reference, (*(x[:, :cut] for x in inputs), state))
    second, _, expected = run(gated_delta_steps_reference, (*(x[:, cut:] for x in inputs), 0 * state))
    assert_close(packed, jnp.concatenate([first, second], axis=1))
    assert_close(last, expected)


@pytest.mark.slow  # every kernel of three passes is interpreted
def test_decoding_with_the_kernels_reproduces_decoding_without():
    """The longest prompt is taken in by chunks, the other rounds of plain decoding in steps, drafts are verified."""
    types = ("linear_attention", "full_attention")
    config = small_models.small_config("hybrid", num_hidden_layers=2, layer_types=types)
    params = small_models.constructed_params(MTPModel(config), "hybrid", "mixed")
    model = MTPModel(config, implementation="interpreted")
    prompts = [np.random.default_rng(size).integers(0, 61, size).tolist() for size in (1, 7, 40)]
    wanted = generate(params, prompts, model=MTPModel(config), config=DecodeConfig(max_new_tokens=9)).rows()
    assert generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=9)).rows() == wanted
    found = speculative_generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=9, num_steps=3))
    assert found.rows() == wanted
    assert found.stats.accept_length > 1.2  # some are accepted


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_and_the_gradient_lower_without_a_gpu(dtype, platform, key):
    shape = (2, 3 * CHUNK + 5, 2, 4, 96, 40)
    rule = jax.eval_shape(functools.partial(make_rule, shape=shape, dtype=dtype), key)
    segment_ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)

    def step(segment_ids, *rule):
        output, state = gated_delta(*rule, segment_ids=segment_ids, implementation="triton")
        return jnp.sum(output) + jnp.sum(state)

    def count(function, *arguments):
        lowered = lower_for(function, *arguments, platforms=(platform,))
        return lowered[platform].as_text().count("custom_call @__gpu$xla.gpu.triton")

    assert count(jax.value_and_grad(step, argnums=tuple(range(1, 7))), segment_ids, *rule) == 3
    for op in (gated_delta_verify, gated_delta_steps):
        assert count(functools.partial(op, implementation="triton"), *rule) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16, 1, 1, 128, 64), (1, 70, 1, 2, 96, 40), (1, 1000, 2, 4, 128, 128)], ids=str)
def test_compiled_kernels_match_the_reference_on_a_gpu(shape, dtype, key):
    rule = make_rule(key, shape, dtype)
    output, corrections, state = run(gated_delta_steps_reference, rule)
    for op, expected in (
        (gated_delta_verify, (output, corrections)),
        (gated_delta_steps, (output, state)),
        (gated_delta, (output, state)),
    ):
        tolerance = 2e-2 if op is gated_delta and dtype == jnp.bfloat16 else 1e-5
        for array, twin in zip(run(op, rule, implementation="triton"), expected, strict=True):
            assert_close(array, twin, tolerance)


def test_auto_is_the_reference(key):
    rule = make_rule(key, (1, 1, 1, 2, 8, 6))
    for op, form in ((gated_delta, gated_delta_reference), (gated_delta_steps, gated_delta_steps_reference)):
        np.testing.assert_array_equal(run(op, rule)[0], run(form, rule)[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"implementation": "cuda"}, "auto, xla, triton, interpreted"),
        ({"k": (1, 3, 2, 4)}, r"k \(1, 3, 2, 4\) does not fit"),
        ({"state": (1, 3, 8, 5)}, "state"),
        ({"v": (1, 3, 3, 6), "log_decay": (1, 3, 3), "beta": (1, 3, 3), "state": (1, 3, 8, 6)}, "3 value heads"),
        ({"segment_ids": (1, 4)}, "segment_ids"),
        ({"v": jnp.zeros((1, 3, 2, 6), jnp.bfloat16)}, "bfloat16"),
        ({"state": jnp.zeros((1, 2, 8, 6), jnp.bfloat16)}, "state is bfloat16"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(changes, message, key):
    names = ("q", "k", "v", "log_decay", "beta", "state")
    rule = dict(zip(names, make_rule(key, (1, 3, 2, 2, 8, 6)), strict=True))
    changes = {name: jnp.zeros(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        gated_delta(**{**rule, **changes})


@pytest.mark.parametrize("shape", [(1, 0, 1, 1, 8, 6), (0, 3, 1, 1, 8, 6)])
def test_no_tokens_are_refused(shape, key):
    with pytest.raises(ValueError, match="no tokens"):
        gated_delta(*make_rule(key, shape))
