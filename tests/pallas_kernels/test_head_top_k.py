import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, generate, speculative_generate
from pallas_kernels.head_top_k import _run_kernel, head_top_k, head_top_k_reference
from pallas_kernels.top_k import top_k

interpreted = functools.partial(head_top_k, implementation="interpreted")
# hidden.shape, V, num_tokens, k, is_transposed, dtype. Blocks are of 16 to 64 rows, 64 or 128 columns, 32 or 64 deep:
# 13 or 70 rows, 80 or 20 of D, 300 columns leave one unfilled; 258 leaves it two tokens, fewer than k.
SHAPES = [
    ((1, 64), 128, None, 1, False, jnp.bfloat16),
    ((13, 80), 300, 258, 4, False, jnp.float32),
    ((13, 80), 300, 258, 4, False, jnp.bfloat16),
    ((2, 3, 80), 300, 258, 4, True, jnp.float32),
    ((2, 3, 80), 300, 258, 4, True, jnp.bfloat16),
    ((70, 20), 300, 201, 1, True, jnp.float32),
    ((20, 128), 50, 9, 8, False, jnp.float32),
    ((64,), 150, None, 3, True, jnp.float16),
]


def inputs(key, shape, size, is_transposed=False, dtype=jnp.float32):
    """Each column of the head twice, so that every best one has an equal."""
    hidden, head = jax.random.split(key)
    head = jax.random.normal(head, (shape[-1], size), dtype)
    head = head.at[:, size // 2 :].set(head[:, : size - size // 2])
    return jax.random.normal(hidden, shape, dtype), head.T if is_transposed else head


def assert_same(found, expected):
    """Float32 sums in other orders; the same products. So the same tokens, with ties in the same order."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "size", "num_tokens", "k", "is_transposed", "dtype"), SHAPES)
def test_kernel_matches_reference(shape, size, num_tokens, k, is_transposed, dtype, key):
    hidden, head = inputs(key, shape, size, is_transposed, dtype)
    options = {"k": k, "num_tokens": num_tokens, "is_transposed": is_transposed}
    assert_same(interpreted(hidden, head, **options), head_top_k_reference(hidden, head, **options))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_order_of_programs_on_rocm_changes_no_bit(is_transposed, key):
    hidden, head = inputs(key, (70, 20), 300, is_transposed)
    options = {"k": 2, "num_tokens": 258, "is_transposed": is_transposed, "interpret": True}
    both = [_run_kernel(hidden, head, platform=platform, **options) for platform in ("rocm", "cuda")]
    for rocm, cuda in zip(*both, strict=True):
        np.testing.assert_array_equal(rocm, cuda)


@pytest.mark.parametrize("k", [1, 4, 26, 27, 70])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_k_is_what_jax_gives(k, dtype, key):
    values = jax.random.normal(key, (3, 2, 70), dtype)
    values = values.at[0].set(jnp.round(values[0]) + 0.0)  # equal ones, no -0
    values = values.at[1, 0, 2:].set(-jnp.inf).at[1, 1].set(-jnp.inf)
    for found, expected in zip(jax.jit(top_k, static_argnums=1)(values, k), jax.lax.top_k(values, k), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_reference_is_what_jax_says_of_the_logits(key):
    hidden, head = inputs(key, (5, 96), 300)
    logits = hidden @ head
    values, indices, logsumexp = head_top_k_reference(hidden, head, k=4)
    for found, expected in zip((values, indices), jax.lax.top_k(logits, 4), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(head_top_k_reference(hidden, head)[1][:, 0], jnp.argmax(logits, axis=-1))
    np.testing.assert_allclose(jnp.exp(logits - logsumexp[:, None]).sum(axis=-1), 1.0, rtol=1e-5)


def test_of_equal_logits_the_lower_column_is_first():
    head = jnp.zeros((32, 200)).at[:, jnp.array([7, 130, 131, 190])].set(1.0)  # in three blocks
    values, indices, logsumexp = interpreted(jnp.ones((2, 32)), head, k=6)
    assert indices.tolist() == [[7, 130, 131, 190, 0, 1]] * 2
    assert values.tolist() == [[32.0] * 4 + [0.0] * 2] * 2
    np.testing.assert_allclose(logsumexp, np.log(4 * np.exp(32) + 196), rtol=1e-6)


def test_columns_that_are_no_tokens_count_nowhere(key):
    hidden, head = inputs(key, (3, 64), 300)
    found = interpreted(hidden, head.at[:, 200:].set(jnp.nan), k=4, num_tokens=200)
    assert_same(found, head_top_k_reference(hidden, head[:, :200], k=4))


def test_a_row_knows_no_neighbour(key):
    hidden, head = inputs(key, (13, 96), 300)
    alone = interpreted(hidden[4:5], head, k=2)
    for found, expected in zip(interpreted(hidden.at[5].set(jnp.nan), head, k=2), alone, strict=True):
        np.testing.assert_array_equal(found[4], expected[0])


def test_float32_is_multiplied_in_float32(key):
    """A CPU multiplies so in any case."""
    with jax.default_matmul_precision("default"):
        jaxpr = str(jax.make_jaxpr(interpreted)(*inputs(key, (2, 32), 64)))
    assert "Precision.HIGHEST" in jaxpr


def test_no_rows_are_fine(key):
    hidden, head = inputs(key, (3, 64), 100)
    assert [part.shape for part in interpreted(hidden[:0], head, k=2)] == [(0, 2), (0, 2), (0,)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "cuda"}, "auto, xla, triton, interpreted"),
        ({"is_transposed": True}, r"does not fit head \(64, 100\): expected \[..., D\] and \[V, D\]"),
        ({"num_tokens": 101}, "num_tokens 101 is outside 1..100"),
        ({"k": 4, "num_tokens": 3}, "k 4 is outside 1..3"),
        ({"k": 0}, "k 0 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, key):
    with pytest.raises(ValueError, match=message):
        head_top_k(*inputs(key, (3, 64), 100), **changes)


def test_a_head_of_one_byte_is_refused(key):
    hidden, head = inputs(key, (3, 64), 100)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        head_top_k(hidden, head.astype(jnp.float8_e4m3fn))


@pytest.fixture
def calls(monkeypatch):
    """The `k` of each kernel that is traced."""
    module, found = sys.modules["pallas_kernels.head_top_k"], []
    kernel = module._run_kernel
    monkeypatch.setattr(module, "_run_kernel", lambda *arrays, k, **how: found.append(k) or kernel(*arrays, k=k, **how))
    return found


PROMPTS = [[3, 250, 17], [40], [9, 8, 7, 6, 5, 4, 3], [288, 0]]
WIDE = {"vocab_size": 300, "num_tokens": 290}  # three blocks of columns, the last in part, of which a part is padding
DECODED = {
    "chain": ("mixed", {}, {"num_steps": 3}, [1] * 5),
    "tree": ("mixed", {}, {"num_steps": 2, "topk": 4, "num_draft_tokens": 8}, [1, 4, 4, 1]),
    "reduced": ("mixed", {}, {"num_steps": 2, "draft_vocabulary": tuple(range(1, 300, 2))}, [1] * 4),
    "tied": ("random", {"tie_word_embeddings": True}, {"num_steps": 1}, [1] * 3),
    "plain": ("mixed", {}, {"num_steps": 0}, [1] * 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("chain", "tree", "reduced", "tied", "plain")]
)
def test_decoding_with_the_kernel_gives_the_tokens_of_plain_decoding(name, small, calls):
    draft_quality, changes, shape, traced = DECODED[name]
    model, params = small("grouped", draft_quality, **WIDE, **changes)
    config = DecodeConfig(max_new_tokens=16, prefill_chunk=8, **shape)
    plain = generate(params, PROMPTS, model=model, config=config)
    expected = speculative_generate(params, PROMPTS, model=model, config=config)
    assert not calls
    found = speculative_generate(params, PROMPTS, model=model.clone(implementation="interpreted"), config=config)
    assert calls == traced
    assert found.rows() == plain.rows()
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)  # the drafts are the same, too
    if draft_quality == "mixed" and config.num_steps:
        assert found.stats.accept_length > 1.2


@pytest.mark.slow  # every kernel of two passes is interpreted
def test_logits_that_somebody_wants_changed_are_made(small, calls):
    model, params = small("grouped", "mixed", **WIDE)
    config = DecodeConfig(max_new_tokens=8, num_steps=2, prefill_chunk=8)
    sampling = SamplingParams(repetition_penalty=1.3)
    model = model.clone(implementation="interpreted")
    changed = speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling)
    assert changed.rows() == generate(params, PROMPTS, model=model, config=config, sampling=sampling).rows()
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "size", "num_tokens", "k", "is_transposed", "dtype"), SHAPES)
def test_compiled_kernel_matches_reference_on_a_gpu(shape, size, num_tokens, k, is_transposed, dtype, key):
    hidden, head = inputs(key, shape, size, is_transposed, dtype)
    options = {"k": k, "num_tokens": num_tokens, "is_transposed": is_transposed}
    found = head_top_k(hidden, head, implementation="triton", **options)
    assert_same(found, head_top_k_reference(hidden, head, **options))
