import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax import DecodeConfig, ModelConfig, MTPModel, compat, generate, speculative_generate
from mtpjax.models.layers.experts import Experts
from mtpjax.models.quantized import BlockScaled
from pallas_kernels.dequantise import dequantise
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference
from pallas_kernels.grouped_matmul.matmul_kernel import grouped_matmul_kernel
from pallas_kernels.grouped_matmul.reference import grouped_matmul_many_tokens
from pallas_kernels.grouped_matmul.route import route_few_tokens, route_many_tokens

kernel = functools.partial(grouped_matmul, implementation="triton")
interpreted = functools.partial(grouped_matmul, implementation="interpreted")
reference = jax.jit(grouped_matmul_reference)
BLOCK = 16


def problem(n, E, k, D=24, F=20, dtype=jnp.float32):
    """Tokens, ids, weights and two stacks. Ids are drawn with repetition, and some are E: no expert."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.standard_normal((n, D)), dtype),
        jnp.asarray(rng.integers(0, E + 1, (n, k)), jnp.int32),
        jnp.asarray(rng.random((n, k)), jnp.float32),
        jnp.asarray(rng.standard_normal((E, D, 2, F)) * D**-0.5, dtype),
        jnp.asarray(rng.standard_normal((E, F, D)) * F**-0.5, dtype),
    )


def in_fp8(stack, block=BLOCK):
    """A stack of about the same values, its scales, which differ from column to column, and what both stand for."""
    scales = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, stack[:, ::block].shape), jnp.float32)
    values = stack.astype(jnp.float8_e4m3fn)
    return values, scales, dequantise(values, scales, block, axis=1)


def assert_close(actual, expected, tolerance=1e-5):
    """Sums in another order: some roundings of the largest value."""
    actual, expected = (np.asarray(array, np.float32) for array in (actual, expected))
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(np.abs(expected).max(), 1e-3))


# One row. Several. More than a product takes, with few for an expert, or with many and twice the same. More than the
# kernels for few tokens take. No size but the second's fills a tile, and that has two.
SIZES = [(1, 8, 2), (7, 4, 3, 128, 64), (40, 24, 2), (40, 2, 3), (70, 5, 3, 40, 72)]


@pytest.mark.parametrize("size", SIZES)
def test_kernel_matches_reference(size):
    arrays = problem(*size)
    assert_close(interpreted(*arrays), reference(*arrays))


def test_order_of_programs_on_rocm_changes_no_bit():
    x, ids, _, gate_up, _ = problem(*SIZES[4])
    route, _ = route_many_tokens(ids, len(gate_up), max_rows=32)
    run = functools.partial(grouped_matmul_kernel, route, x, gate_up, out_dtype=x.dtype, interpret=True)
    has_expert = ids.reshape(-1) < len(gate_up)  # rows of other pairs are not written
    np.testing.assert_array_equal(run(platform="rocm")[has_expert], run(platform="cuda")[has_expert])


@pytest.mark.parametrize("size", [SIZES[1], SIZES[4]])
def test_kernel_matches_reference_in_bfloat16(size):
    arrays = problem(*size, dtype=jnp.bfloat16)
    out = interpreted(*arrays)
    assert out.dtype == jnp.bfloat16
    # The reference rounds gate, up, their product and the answers, the kernel fewer of these.
    assert_close(out, reference(*arrays), 2e-2)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[3], SIZES[4]])
def test_kernel_matches_reference_in_fp8(size):
    x, ids, weights, *stacks = problem(*size)
    (gate_up, gate_up_scales, gate_up_meant), (down, down_scales, down_meant) = map(in_fp8, stacks)
    scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales, "block": BLOCK}
    expected = reference(x, ids, weights, gate_up_meant, down_meant)
    assert_close(interpreted(x, ids, weights, gate_up, down, **scales), expected)
    assert_close(grouped_matmul(x, ids, weights, gate_up, down, implementation="xla", **scales), expected)


@pytest.mark.parametrize("size", [(40, 6, 2), (70, 6, 2)])
def test_no_weight_of_an_idle_expert_is_read(size):
    x, ids, weights, gate_up, down = problem(*size)
    ids = jnp.where(ids > 3, 6, ids)
    expected = reference(x, ids, weights, gate_up, down)
    assert_close(interpreted(x, ids, weights, gate_up.at[4:].set(jnp.nan), down.at[4:].set(jnp.nan)), expected)
    assert not interpreted(x, jnp.full_like(ids, 6), weights, gate_up, down).any()


@pytest.mark.parametrize(("n", "E"), [(5, 8), (16, 2), (40, 24), (40, 3), (64, 2)])
def test_each_chosen_expert_is_visited_once_and_each_of_its_rows(n, E):
    """One of more than 32 rows is visited again for the others."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(E + 1)[:2] for _ in range(n)]).astype(np.int32)  # E is nobody
    route = route_few_tokens(jnp.asarray(ids), E)

    def kernel(ids_ref, visits_ref, taken_ref):
        block = pl.program_id(0)

        @pl.when(block == 0)
        def _():
            visits_ref[...] = jnp.zeros(visits_ref.shape, jnp.int32)
            taken_ref[...] = jnp.zeros(taken_ref.shape, jnp.int32)

        def body(expert, groups):
            visits_ref[expert] += 1
            for pairs, is_valid in groups:
                before = plt.load(taken_ref.at[pairs], mask=is_valid, other=0)
                plt.store(taken_ref.at[pairs], before + 1 + 1000 * expert, mask=is_valid)

        route.for_each_block((ids_ref,), block, body)

    shapes = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (E, ids.size)]
    call = pl.pallas_call(kernel, out_shape=shapes, grid=(route.num_blocks,), interpret=True)
    visits, taken = call(*route.tables)
    np.testing.assert_array_equal(visits, -(-np.bincount(ids[ids < E], minlength=E) // 32))
    assert (n == 64) == (visits.max() == 2)
    np.testing.assert_array_equal(taken, np.where(ids < E, 1 + 1000 * ids, 0).reshape(-1))


@pytest.mark.parametrize(("n", "E", "k"), [(70, 5, 3), (65, 256, 8), (200, 3, 2)])
def test_many_tokens_are_routed_without_a_loop(n, E, k):
    """A loop would be several launches per turn, in every layer. A block may say all rows that its expert has left."""
    ids = np.random.default_rng(n).integers(0, E + 1, (n, k)).astype(np.int32)  # E is nobody
    routed = lambda ids: (lambda route, starts: (route.tables, starts))(*route_many_tokens(ids, E, max_rows=32))
    for function, arrays in ((routed, (ids,)), (grouped_matmul_many_tokens, problem(n, E, k))):
        assert not {"scan[", "while["} & set(str(jax.make_jaxpr(function)(*arrays)).split())
    rows = route_many_tokens(jnp.asarray(ids), E, max_rows=32)[0].rows_per_product
    counts = np.bincount(ids[ids < E], minlength=E)
    begins = np.cumsum(counts) - counts
    blocks = [(expert, begin) for expert in range(E) for begin in range(0, counts[expert], rows)]
    (order, expert_of_block, first_pair, num_rows), starts = routed(jnp.asarray(ids))
    np.testing.assert_array_equal(order, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(starts, [*begins, counts.sum()])
    used = slice(0, len(blocks))
    np.testing.assert_array_equal(expert_of_block[used], [expert for expert, _ in blocks])
    np.testing.assert_array_equal(first_pair[used], [begins[expert] + begin for expert, begin in blocks])
    np.testing.assert_array_equal(num_rows[used], [counts[expert] - begin for expert, begin in blocks])
    assert not num_rows[len(blocks) :].any()


@pytest.mark.h100
def test_a_layer_of_many_tokens_has_no_loop_on_an_h100():
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    make, params, x = layer_problem(num_tokens=128)
    layer = lambda params, x: make("triton").apply({"params": params}, x, cached=True).total()
    sharding = NamedSharding(mesh, PartitionSpec())
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding)
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(layer).lower(*jax.tree.map(shape, (params, x))).compile().as_text()
    assert "grouped_gate_up" in compiled and " while(" not in compiled


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    x, ids, weights, *stacks = problem(40, 3, 2)
    together = interpreted(x, ids, weights, *stacks)
    for rows in (slice(5, 6), slice(3, 20), slice(8, 39)):
        np.testing.assert_array_equal(interpreted(x[rows], ids[rows], weights[rows], *stacks), together[rows])
    others = jnp.where(jnp.arange(40)[:, None] == 5, ids, 1)  # all with one expert
    np.testing.assert_array_equal(interpreted(x, others, weights, *stacks)[5], together[5])


@pytest.mark.parametrize("size", [(3, 8, 2), (40, 3, 2)])
def test_gradients_match_reference(size):
    x, ids, weights, gate_up, down = problem(*size)
    direction = np.random.default_rng(1).standard_normal(x.shape, np.float32)

    def loss(form, x, weights, gate_up, down):
        return (form(x, ids, weights, gate_up, down) * direction).sum()

    def gradients(form):
        return jax.jit(jax.grad(functools.partial(loss, form), argnums=(0, 1, 2, 3)))(x, weights, gate_up, down)

    for actual, expected in zip(gradients(interpreted), gradients(grouped_matmul_reference), strict=True):
        assert_close(actual, expected)


def test_fp8_has_no_gradient_in_the_kernels():
    x, ids, weights, *stacks = problem(3, 8, 2)
    (gate_up, gate_up_scales, _), (down, down_scales, _) = map(in_fp8, stacks)
    scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales, "block": BLOCK}
    with pytest.raises(ValueError, match="no gradient"):
        jax.grad(lambda x: interpreted(x, ids, weights, gate_up, down, **scales).sum())(x)


def layer_problem(num_tokens=18):
    """A layer of experts, its parameters and tokens [2, n / 2, D]."""
    base = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = ModelConfig(**base, hidden_size=32, n_routed_experts=4, moe_intermediate_size=64, num_experts_per_tok=2)
    x = jax.random.normal(jax.random.key(1), (2, num_tokens // 2, 32))
    make = lambda implementation: Experts(config, implementation)
    return make, make("xla").init(jax.random.key(0), x)["params"], x


def as_block_scaled(params, block):
    """Blocks along the input."""
    made = {name: in_fp8(params[name], block)[:2] for name in ("gate_up", "down")}
    axes = {"gate_up": -3, "down": -2}
    return params | {name: BlockScaled(*parts, axis=axes[name], block=block) for name, parts in made.items()}


@pytest.mark.parametrize("block", [0, 16])
def test_layer_runs_the_kernel(block, monkeypatch):
    """In float32, and in fp8 of such blocks."""
    make, params, x = layer_problem()
    is_fp8 = block > 0
    params = as_block_scaled(params, block) if is_fp8 else params
    expected = make("xla").apply({"params": params}, x, cached=True).total()
    calls = []
    module = sys.modules["pallas_kernels.grouped_matmul"]
    recorded = lambda *a, **k: calls.append(a) or grouped_matmul_kernel(*a, **k)
    monkeypatch.setattr(module, "grouped_matmul_kernel", recorded)
    out = jax.jit(lambda params, x: make("interpreted").apply({"params": params}, x, cached=True).total())(params, x)
    assert_close(out, expected)
    assert [weight.dtype for _, _, weight in calls] == 2 * [jnp.float8_e4m3fn if is_fp8 else jnp.float32]


@pytest.mark.slow
def test_speculation_with_the_kernel_in_the_loop_gives_the_tokens_of_plain_decoding(small):
    model, params = small("latent", "mixed")
    prompts = [[3, 14, 15], [9, 2, 6, 5, 3]]
    expected = generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=10)).rows()
    with_kernel = MTPModel(model.config, implementation="interpreted")
    config = DecodeConfig(max_new_tokens=10, num_steps=2)
    result = speculative_generate(params, prompts, model=with_kernel, config=config)
    assert result.rows() == expected
    assert result.stats.accept_length > 1


def test_what_does_not_fit_is_refused():
    x, ids, weights, gate_up, down = problem(3, 8, 2)
    with pytest.raises(ValueError, match="auto, xla, triton, interpreted"):
        grouped_matmul(x, ids, weights, gate_up, down, implementation="cuda")
    with pytest.raises(ValueError, match=r"\(8, 20, 23\) do not fit"):
        grouped_matmul(x, ids, weights, gate_up, down[..., 1:])
    with pytest.raises(ValueError, match="a row for each of 3 tokens"):
        grouped_matmul(x, ids[:2], weights[:2], gate_up, down)
    with pytest.raises(ValueError, match="gate_up float32 and down bfloat16 must be float32"):
        grouped_matmul(x, ids, weights, gate_up, down.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="not float16"):
        interpreted(*(array.astype(jnp.float16) for array in (x, ids, weights, gate_up, down)))
    (values, scales, _), (down, down_scales, _) = in_fp8(gate_up), in_fp8(down)
    with pytest.raises(ValueError, match=r"blocks of 8 must be \(\(8, 3, 2, 20\), \(8, 3, 24\)\)"):
        grouped_matmul(x, ids, weights, values, down, gate_up_scales=scales, down_scales=down_scales, block=8)
    with pytest.raises(ValueError, match=r"blocks that are a multiple of 16, got .* and 24"):
        scales = {"gate_up_scales": jnp.ones((8, 1, 2, 20)), "down_scales": jnp.ones((8, 1, 24)), "block": 24}
        interpreted(x, ids, weights, values, down, **scales)


@pytest.mark.parametrize("given", ["gate_up_scales", "down_scales"])
def test_scales_of_one_stack_alone_are_rejected(given):
    x, ids, weights, gate_up, down = problem(3, 8, 2)
    scales = {"gate_up_scales": in_fp8(gate_up)[1], "down_scales": in_fp8(down)[1]}
    with pytest.raises(ValueError, match="pass both gate_up_scales and down_scales, or neither"):
        grouped_matmul(x, ids, weights, gate_up, down, block=BLOCK, **{given: scales[given]})


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [*SIZES, (64, 64, 6, 512, 384), (4, 64, 6, 512, 384)])
def test_compiled_kernel_matches_reference_on_a_gpu(size, dtype, is_fp8):
    x, ids, weights, *stacks = problem(*size, dtype=dtype)
    scales, meant = {}, stacks
    if is_fp8:
        (gate_up, gate_up_scales, gate_up_meant), (down, down_scales, down_meant) = map(in_fp8, stacks)
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales, "block": BLOCK}
        stacks, meant = (gate_up, down), (gate_up_meant, down_meant)
    wide = (array.astype(jnp.float32) for array in (x, *meant))
    expected = (lambda x, *meant: reference(x, ids, weights, *meant))(*wide)
    assert_close(kernel(x, ids, weights, *stacks, **scales), expected, 1e-5 if dtype == jnp.float32 else 2e-2)
