import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from mtpjax import DecodeConfig, forward, speculative_generate
from mtpjax.models.quantized import BlockScaled, is_scaled, matrix_product
from pallas_kernels.block_scaled_matmul import block_scaled_matmul, block_scaled_matmul_reference, partial_matmuls
from pallas_kernels.block_scaled_matmul.kernel import multiply_few_rows
from tests.golden import path
from tests.helpers.lowering import lower_for, triton_kernels

FP8 = jnp.float8_e4m3fn
kernel = functools.partial(block_scaled_matmul, implementation="triton")
interpreted = functools.partial(block_scaled_matmul, implementation="interpreted")

# rows, inputs, outputs, block (0: no scales), x, weights. Inputs and outputs that do not fill tiles or blocks, fewer
# outputs than a tile, rows up to 64, one part and several of a column of tiles, blocks below a tile and above.
CASES = [
    (1, 300, 200, 128, jnp.float32, FP8),
    (4, 512, 256, 128, jnp.bfloat16, FP8),
    (16, 144, 28, 16, jnp.float32, FP8),
    (33, 1100, 130, 256, jnp.bfloat16, FP8),
    (64, 128, 320, 32, jnp.float32, jnp.float8_e5m2),
    (1, 700, 96, 0, jnp.bfloat16, jnp.bfloat16),
    (2, 1024, 128, 0, jnp.float32, jnp.bfloat16),
    (7, 20, 5, 0, jnp.float32, jnp.float32),
    (64, 200, 136, 0, jnp.bfloat16, jnp.bfloat16),
]


def inputs(key, rows, D, F, block, dtype, weights_dtype):
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (rows, D)).astype(dtype)
    weights = jax.random.normal(keys[1], (D, F)).astype(weights_dtype)
    if not block:
        return x, weights
    return x, weights, jnp.exp(jax.random.normal(keys[2], (-(-D // block), F)))


def check_against_reference(run, case, key):
    *_, block, dtype, _ = case
    arguments, block = inputs(key, *case), block or 128
    found, expected = run(*arguments, block=block), block_scaled_matmul_reference(*arguments, block=block)
    assert found.shape == expected.shape and found.dtype == dtype
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    # Float32 sums in another order, then both round once: neighbouring numbers at worst.
    x, *rest = (jnp.abs(array.astype(jnp.float32)) for array in arguments)
    terms = np.asarray(block_scaled_matmul_reference(x, *rest, block=block))
    assert (np.abs(found - expected) <= 1e-6 * terms + 2 * float(jnp.finfo(dtype).eps) * np.abs(expected)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_reference(case, key):
    check_against_reference(interpreted, case, key)


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] == FP8], ids=str)
def test_integer_conversion_of_rocm_gives_the_same_bits(case, key):
    *_, block, dtype, _ = case
    x, *matrix = inputs(key, *case)
    matrix = (*matrix, None)[:2]  # no scales without blocks
    run = functools.partial(multiply_few_rows, x, [matrix], block=block or 128, dtype=jnp.dtype(dtype), interpret=True)
    np.testing.assert_array_equal(*run(platform="rocm"), *run(platform="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernel_matches_reference_on_a_gpu(case, key):
    check_against_reference(kernel, case, key)


def test_xla_rounds_the_scaled_weights(key):
    x, weights, scales = inputs(key, 3, 300, 40, 128, jnp.bfloat16, FP8)
    scaled = (weights.astype(jnp.float32) * jnp.repeat(scales, 128, axis=0)[:300]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(block_scaled_matmul(x, weights, scales), x @ scaled)


def test_a_row_gives_the_same_bits_alone_and_in_any_company(key):
    """What makes a drafted token's verification reproduce plain decoding, in bfloat16 too."""
    x, weights, scales = inputs(key, 16, 1300, 136, 128, jnp.bfloat16, FP8)
    together = interpreted(x, weights, scales)
    for first, count in ((0, 1), (5, 4)):
        alone = interpreted(x[first : first + count], weights, scales)
        np.testing.assert_array_equal(alone, together[first : first + count])
    spoilt = interpreted(x.at[0].set(jnp.nan), weights, scales)
    np.testing.assert_array_equal(spoilt[1:], together[1:])


def test_gradients_are_those_of_xla(key):
    x, weights, scales = inputs(key, 3, 160, 40, 32, jnp.float32, jnp.float32)
    direction = jax.random.normal(jax.random.key(1), (3, 40))

    def loss(implementation, x, weights, scales):
        made = block_scaled_matmul(x, weights, scales, block=32, implementation=implementation)
        return jnp.sum(direction * made)

    for last in (scales, None):
        found, expected = (jax.grad(loss, argnums=(1, 2))(name, x, weights, last) for name in ("interpreted", "xla"))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    fp8 = weights.astype(FP8)  # which is not trained: only x has a gradient
    np.testing.assert_array_equal(*(jax.grad(loss, 1)(name, x, fp8, scales) for name in ("interpreted", "xla")))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_kernel_and_its_gradient_lower_without_a_gpu(platform):
    x = jax.ShapeDtypeStruct((2, 3, 300), jnp.bfloat16)
    weights, scales = jax.ShapeDtypeStruct((300, 200), FP8), jax.ShapeDtypeStruct((3, 200), jnp.float32)
    step = jax.value_and_grad(lambda x, weights, scales: jnp.sum(kernel(x, weights, scales).astype(jnp.float32)))
    text = lower_for(step, x, weights, scales, platforms=(platform,))[platform].as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


def test_many_rows_and_none_are_left_to_xla(key):
    x, weights, scales = inputs(key, 65, 144, 28, 128, jnp.float32, FP8)
    assert "triton" not in lower_for(kernel, x, weights, scales)["cuda"].as_text()
    assert interpreted(x[:0], weights, scales).shape == (0, 28)


def test_what_does_not_fit_is_refused(key):
    x, weights, scales = inputs(key, 2, 144, 28, 128, jnp.float32, FP8)
    with pytest.raises(ValueError, match=r"\(2, 100\) does not fit weights \(144, 28\)"):
        interpreted(x[:, :100], weights, scales)
    with pytest.raises(ValueError, match=r"scales \(1, 28\)"):
        interpreted(x, weights, scales[:1])
    with pytest.raises(ValueError, match=r"blocks of 16, 32, 64, ... inputs, not of 12"):
        interpreted(x, weights, jnp.ones((12, 28)), block=12)
    with pytest.raises(ValueError, match=r"auto, xla, triton.*, interpreted"):
        block_scaled_matmul(x, weights, scales, implementation="cuda")
    huge = jax.ShapeDtypeStruct((2**15, 2**16), FP8)
    with pytest.raises(ValueError, match="32-bit offsets"):
        jax.eval_shape(interpreted, jax.ShapeDtypeStruct((1, 2**15), jnp.bfloat16), huge)


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_a_layer_multiplies_by_weights_with_factored_axes_of_either_kind(implementation, key):
    x, values, scales = inputs(key, 6, 144, 2 * 3 * 10, 128, jnp.float32, FP8)
    weight = BlockScaled(values.reshape(144, 2, 3, 10), scales.reshape(2, 2, 3, 10), axis=-4, block=128)
    product = functools.partial(matrix_product, x.reshape(2, 3, 144), implementation=implementation)
    expected = x.reshape(2, 3, 144) @ weight.astype(jnp.float32).reshape(144, -1)
    for one in (weight, weight.astype(jnp.float32)):
        np.testing.assert_allclose(product(one), expected, rtol=1e-5, atol=1e-4 * (implementation != "xla"))


@pytest.mark.parametrize(
    ("attention", "num_products"),
    [
        ("hybrid", 2 * (3 + 2) + (2 + 2) + (1 + 2 + 2)),  # two linear layers, one of full attention, a module
        # Two layers with an indexer, one without, a module.
        pytest.param("sparse", 2 * (4 + 3 + 2) + (4 + 2) + (1 + 4 + 3 + 2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_layer_multiplies_with_the_kernel(attention, num_products, small):
    model, params = small(attention)
    tokens = jnp.arange(10)[None] + 7
    text = str(jax.make_jaxpr(functools.partial(forward, model=model.clone(implementation="triton")))(params, tokens))
    assert text.count("name=block_scaled_matmul") + text.count("name=gated_matmul") == num_products
    found = forward(params, tokens, model=model.clone(implementation="interpreted"))
    expected = forward(params, tokens, model=model)
    np.testing.assert_allclose(found.mtp_logits[0], expected.mtp_logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # each layer's products are compared above
@pytest.mark.parametrize("name", ["deepseek_v3_fp8"])
def test_speculation_with_the_kernel_reproduces_plain_decoding_from_fp8_weights(name):
    """In float32, as the golden tokens are, from the fp8 weights that the checkpoint holds."""
    model, params = mtpjax.load(path(name))
    params = jax.tree.map(lambda leaf: leaf if is_scaled(leaf) else leaf.astype(jnp.float32), params, is_leaf=is_scaled)
    with np.load(path(name) / "expected.npz") as expected:
        prompts, wanted = (
            [expected[f"{prompt}_{what}"] for prompt in ("p0", "p1")] for what in ("input_ids", "greedy_ids")
        )
    model = model.clone(implementation="interpreted")
    config = DecodeConfig(max_new_tokens=12, num_steps=2)
    result = speculative_generate(params, prompts, model=model, config=config)
    assert result.rows() == [row[:12].tolist() for row in wanted]  # which are those of plain decoding


@pytest.mark.parametrize("weights_dtype", [jnp.float32, FP8])
def test_several_matrices_run_in_one_launch(weights_dtype, key):
    x, *_ = inputs(key, 5, 144, 28, 64, jnp.float32, weights_dtype)
    matrices = [inputs(key, 5, 144, width, 64, jnp.float32, weights_dtype)[1:] for width in (28, 200, 130)]
    if weights_dtype != FP8:
        matrices = [(weights, None) for weights, _ in matrices]
    run = functools.partial(partial_matmuls, x, block=64, implementation="interpreted")
    for found, matrix in zip(run(matrices), matrices, strict=True):
        np.testing.assert_allclose(
            found.total(), block_scaled_matmul_reference(x, *matrix, block=64), rtol=1e-4, atol=1e-4
        )
    # Matrices of different kinds run one after the other.
    mixed = [matrices[0], (matrices[1][0].astype(jnp.bfloat16), None)]
    for some, launches in ((matrices, 1), (mixed, 2)):
        compiled = functools.partial(partial_matmuls, matrices=some, block=64, implementation="triton")
        assert len(triton_kernels(lower_for(compiled, x, platforms=("cuda",))["cuda"])) == launches
