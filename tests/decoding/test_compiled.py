"""What XLA makes of a decoding call: one program, whose loop rewrites no cache and no weight."""

import collections
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax import DecodeConfig, ModelConfig, MTPModel, compat, generate, speculative_generate
from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.decoder import Decoder, Drafter
from mtpjax.decoding.loop import decode
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import NewRows, StateShape, start_rows
from mtpjax.drafters.mtp.drafting import MTPDrafter
from mtpjax.evaluation.compiled_call import find_collectives
from mtpjax.models.decoding_layout import part_specs
from mtpjax.models.params import param_shapes
from mtpjax.models.presets import presets
from mtpjax.models.quantized import BlockScaled
from mtpjax.models.vocabulary import Vocabulary
from tests.helpers.hlo import NO_RESULT, loop_instructions, parse, updates_in
from tests.helpers.lowering import lower_for, triton_kernels

NUM_PAGES = 977  # of a pool; likewise no other size here
SLOTS = 1536  # what `round_up_capacity` gives, and no other size here
SIZES = {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 384, "num_mtp_modules": 2, "max_position_embeddings": SLOTS}
GROUPED = ModelConfig(**SIZES, num_key_value_heads=2, head_dim=64)
LATENT = ModelConfig(
    **SIZES, attention="latent", kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64
)
EXPERTS = dataclasses.replace(LATENT, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64)
CONFIGS = {"grouped": GROUPED, "latent": LATENT, "experts": EXPERTS}
SINGLE = {name: dataclasses.replace(CONFIGS[name], num_mtp_modules=1) for name in ("grouped", "latent")}

SPECS = {  # beyond greedy chains; trees of few nodes, so that the scores of attention are smaller than a cache
    "tree": DecodeSpec(3, 2, 6, "greedy"),
    "sample-tree": DecodeSpec(3, 2, 6, "sample"),
    "recursive": DecodeSpec(3, 2, 6, "recursive"),
    "traversal": DecodeSpec(3, 2, 6, "traversal"),
    "block": DecodeSpec(3, 1, 4, "block"),
    "token": DecodeSpec(3, 1, 4, "token"),
    "threshold": DecodeSpec(2, 1, 3, "threshold"),
    "window": DecodeSpec(3, 1, 4, "greedy", window=(64, 4)),
    "adaptive": DecodeSpec(3, 1, 4, "greedy", is_adaptive=True),
    "adaptive-block": DecodeSpec(3, 1, 4, "block", is_adaptive=True),
}

SLOW_SPECS = (
    "sample-tree",
    "token",
    "threshold",
    "adaptive",
    "adaptive-block",
)  # like others, so not compiled for an H100 by default


def broken_rules(compiled, config, batch, spec, itemsize, *, may_write_experts=False):
    """Lines of the loop that break a rule, and pairs of what was found and its bound: updates of caches, and memory."""
    computations = parse(compiled.as_text())
    entries = {"key": 2 * 64, "value": 2 * 64} if config.attention == "grouped" else {"latent": 128}
    cache_size = min(entries.values()) * SLOTS * batch
    shapes = param_shapes(config)
    weights = {proper(leaf.shape) for leaf in jax.tree.leaves(shapes) if leaf.ndim > 1}
    weights |= {proper((shape[0], math.prod(shape[1:]))) for shape in weights}

    def is_cache(shape):  # or a part of its columns, or a padded one
        return any(size >= SLOTS for size in shape) and math.prod(shape) >= cache_size

    def is_weight(shape):
        return proper(shape) in weights or proper(shape[1:]) in weights

    broken, updates = [], 0
    for one in loop_instructions(computations):
        if one.opcode in NO_RESULT:
            continue
        if any(map(is_cache, one.shapes)):
            count = updates_in(computations, one, is_cache)
            updates += count or 0
            if count is None:
                broken.append(one.line)
        if any(map(is_weight, one.shapes)) and not may_write_experts:
            broken.append(one.line)
    wanted = len(entries) * passes_over_caches(spec, config)
    layer = sum(entries.values()) * SLOTS * batch * itemsize
    return broken, (updates, wanted), (compiled.memory_analysis().temp_size_in_bytes, layer)


def passes_over_caches(spec, config):
    """How often the program updates a layer's cache, each of them in its place."""
    layers, in_use = config.num_hidden_layers, min(config.num_mtp_modules, spec.num_steps)
    if spec.is_adaptive:
        rounds = sum(layers + (max(depth, in_use) if depth else 0) for depth in range(spec.num_steps + 1))
        rounds += 2 * in_use  # catching up, in wide passes and in narrow ones
    elif spec.topk > 1:
        levels = len(spec.tree_shape.inner_levels()) if spec.tree_shape else spec.num_steps
        rounds = 2 * layers + levels  # accepted entries of a tree are gathered
    else:
        rounds = layers + spec.num_steps
    return layers + in_use + rounds  # prefill, and what follows


def proper(shape):
    """The sizes in any order, without ones."""
    return tuple(sorted(size for size in shape if size > 1))


def chain(num_steps):
    return DecodeSpec(num_steps, num_nodes=num_steps + 1)


def as_stored(path, leaf, *, dtype, has_fp8_experts):
    """A parameter as a checkpoint holds it: experts in fp8 blocks if asked for, all else in `dtype`."""
    axis = {"experts/gate_up": -3, "experts/down": -2}.get("/".join(key.key for key in path[-2:]))  # of the input
    if axis is None or not has_fp8_experts:
        return leaf.astype(dtype)
    shape = list(leaf.shape)
    shape[axis] = -(-shape[axis] // 128)
    return BlockScaled(leaf.astype(jnp.float8_e4m3fn), jnp.ones(shape, jnp.float32), axis=axis, block=128)


def call_of(
    config,
    batch,
    spec,
    *,
    platform="cpu",
    dtype=jnp.float32,
    has_fp8_experts=False,
    implementation="auto",
    features=None,
):
    """`decode` of everything but the arrays, and their shapes."""
    model = MTPModel(config, implementation=implementation)
    spec = dataclasses.replace(spec, min_rows=min_rows_per_pass(model.config, batch, platform), prefill_chunk=4)
    drafter = MTPDrafter() if spec.num_steps else Drafter()
    decoder = Decoder(model, drafter, spec)

    def make():
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        keep = functools.partial(as_stored, dtype=dtype, has_fp8_experts=has_fp8_experts)
        params = jax.tree_util.tree_map_with_path(keep, params)
        sampling = SamplingArrays.greedy(batch, config.vocab_size, features)
        one = jnp.ones(batch, jnp.int32)
        costs = jnp.ones(spec.num_steps + 1) if spec.is_adaptive else None
        shape = StateShape(batch, SLOTS, features=sampling.features)
        state = decoder.empty_state(shape, dtype, depth_costs=costs)
        own = drafter.default_params(params, DecodeConfig(), model=model)
        rows = NewRows.without_stops(jnp.zeros((batch, SLOTS), jnp.int32), one, one, sampling)
        return params, own, start_rows(state, rows, vocab_size=config.vocab_size)

    return functools.partial(decode, decoder=decoder), jax.eval_shape(make)


def compile_call(*what, sharding=None, options=None, **how):
    call, shapes = call_of(*what, **how)
    if sharding is not None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    return decode.plain.lower(*shapes, **call.keywords).compile(options)


def assert_keeps_to_the_rules(config, batch, spec, dtype=jnp.float32, may_write_experts=False, **how):
    compiled = compile_call(config, batch, spec, dtype=dtype, **how)
    itemsize = jnp.dtype(dtype).itemsize
    broken, (updates, wanted), (temp, layer) = broken_rules(
        compiled, config, batch, spec, itemsize, may_write_experts=may_write_experts
    )
    assert not broken, "\n".join(line[:300] for line in broken)
    assert updates == wanted
    assert temp < layer


def assert_keeps_to_the_rules_on_an_h100(config, batch, spec, dtype, **how):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    with use_abstract_mesh(mesh.abstract_mesh):
        sharding = NamedSharding(mesh, PartitionSpec())
        assert_keeps_to_the_rules(config, batch, spec, dtype, platform="cuda", sharding=sharding, **how)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_the_loop_updates_caches_in_place_and_copies_no_weight(kind, batch, num_steps):
    assert_keeps_to_the_rules(CONFIGS[kind], batch, chain(num_steps))


def test_the_loop_updates_caches_in_place_with_experts():
    assert_keeps_to_the_rules(EXPERTS, 1, chain(1), may_write_experts=True)


@pytest.mark.parametrize(("name", "kind"), [("chain", "grouped"), ("tree", "latent")])
def test_the_loop_updates_pages_in_place(name, kind):
    """No round copies the pool, whose pages may be far more than the rows of a batch have."""
    spec = dataclasses.replace(SPECS[name] if name in SPECS else chain(2), pool=(NUM_PAGES, 16))
    assert_updates_pages_in_place(parse(compile_call(CONFIGS[kind], 4, spec).as_text()), spec, kind)


def assert_updates_pages_in_place(computations, spec, kind):
    updates = 0
    for one in loop_instructions(computations):
        if one.opcode not in NO_RESULT and any(NUM_PAGES in shape for shape in one.shapes):
            made = updates_in(computations, one, lambda shape: NUM_PAGES in shape)
            assert made, one.line[:300]
            updates += made
    assert updates == (2 if kind == "grouped" else 1) * passes_over_caches(spec, CONFIGS[kind])


@pytest.mark.h100
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_on_an_h100_rounds_with_kernels_copy_no_page(kind):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    spec, how = dataclasses.replace(chain(2), pool=(NUM_PAGES, 64)), {"dtype": jnp.bfloat16, "platform": "cuda"}
    with use_abstract_mesh(mesh.abstract_mesh):
        sharding = NamedSharding(mesh, PartitionSpec())
        compiled = compile_call(CONFIGS[kind], 4, spec, sharding=sharding, implementation="triton", **how)
    computations = parse(compiled.as_text())
    assert_updates_pages_in_place(computations, spec, kind)
    # Nor the pages of a row: nothing in a round is as large as the entries of all rows.
    width = 2 * 64 if kind == "grouped" else 128
    for one in loop_instructions(computations):
        if one.opcode not in NO_RESULT and not any(NUM_PAGES in shape for shape in one.shapes):
            assert all(math.prod(shape) < 4 * SLOTS * width for shape in one.shapes), one.line[:300]


@pytest.mark.parametrize(
    ("name", "kind", "batch"),
    [
        ("tree", "latent", 1),
        ("recursive", "grouped", 4),
        ("block", "latent", 4),
        pytest.param("adaptive-block", "latent", 4, marks=pytest.mark.slow),
        pytest.param("window", "grouped", 1, marks=pytest.mark.slow),
        pytest.param("adaptive", "grouped", 1, marks=pytest.mark.slow),
    ],
)
def test_every_rule_and_policy_keeps_to_that(name, kind, batch):
    assert_keeps_to_the_rules(SINGLE[kind], batch, SPECS[name])


@pytest.mark.h100
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize("num_steps", [0, pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_on_an_h100_the_loop_updates_caches_in_place_and_copies_no_weight(kind, batch, num_steps, dtype):
    assert_keeps_to_the_rules_on_an_h100(CONFIGS[kind], batch, chain(num_steps), dtype)


@pytest.mark.h100
@pytest.mark.parametrize(
    ("name", "kind", "batch"),
    [
        pytest.param(name, *where, marks=[pytest.mark.slow] * (name in SLOW_SPECS))
        for name, where in zip(SPECS, itertools.cycle([("grouped", 4), ("latent", 1)]), strict=False)
    ],
)
def test_on_an_h100_every_rule_and_policy_keeps_to_that(name, kind, batch):
    assert_keeps_to_the_rules_on_an_h100(SINGLE[kind], batch, SPECS[name], jnp.bfloat16)


@pytest.mark.h100
@pytest.mark.parametrize(("batch", "num_steps"), [(1, 0), (1, 3), pytest.param(4, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_on_an_h100_the_loop_with_kernels_copies_no_weight_not_even_of_experts(kind, batch, num_steps):
    spec = chain(num_steps)
    assert_keeps_to_the_rules_on_an_h100(CONFIGS[kind], batch, spec, jnp.bfloat16, implementation="triton")


@pytest.mark.h100
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_on_an_h100_only_kernels_meet_fp8_caches(kind):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    how = {"dtype": jnp.bfloat16, "platform": "cuda", "implementation": "triton"}
    texts = []
    with use_abstract_mesh(mesh.abstract_mesh):
        for dtype in ("float8_e4m3fn", None):
            spec = dataclasses.replace(chain(1), kv_cache_dtype=dtype)
            compiled = compile_call(CONFIGS[kind], 4, spec, sharding=NamedSharding(mesh, PartitionSpec()), **how)
            texts.append(compiled.as_text())
    # No array of the caches' slots has a wider dtype, as a converted copy would.
    wide = rf"(bf16|f32)\[[\d,]*{SLOTS}[\d,]*\]"
    assert not re.search(wide, texts[0]) and re.search(wide, texts[1])


@pytest.mark.parametrize(
    ("config", "how"),
    [
        pytest.param(dataclasses.replace(presets["tiny-moe"], num_hidden_layers=2), {}, marks=pytest.mark.slow),
        (
            dataclasses.replace(presets["deepseek-v3"], num_hidden_layers=2, first_k_dense_replace=1),
            {"dtype": jnp.bfloat16, "has_fp8_experts": True},
        ),
    ],
    ids=["2 layers of tiny-moe", "2 layers of DeepSeek-V3"],
)
def test_the_call_with_its_kernels_lowers_for_both_platforms(config, how):
    call, shapes = call_of(config, 4, chain(1), platform="cuda", implementation="triton", **how)
    for platform, lowered in lower_for(call, *shapes).items():
        names = {kernel.name for kernel in triton_kernels(lowered)}
        assert names >= {"block_scaled_matmul", "grouped_gate_up", "grouped_product", "head_top_k"}
        assert f"verify_attention_{platform}" in names


def test_the_rules_see_a_rewritten_cache_and_weight():
    """The checker itself, on a loop that does what must not be."""

    def wrong(cache, weight, x):
        def body(_, carry):
            cache, x = carry
            cache = jax.lax.dynamic_update_slice(cache, x[:, None, None, :64], (0, 0, 3, 0))
            return cache[:, ::-1], x + ((weight * x.sum()) @ jnp.ones((320, 1)))[:, 0][None]

        return jax.lax.fori_loop(0, 3, body, (cache, x))

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 2, SLOTS, 64), (256, 320), (1, 256)))
    broken, _, (temp, layer) = broken_rules(jax.jit(wrong).lower(*shapes).compile(), GROUPED, 1, chain(0), 4)
    assert any("256,320" in line for line in broken) and any(str(SLOTS) in line for line in broken)
    assert temp and layer


def collectives_of(compiled):
    """Operation and shapes of every collective, and how often it stands in the program."""
    found = collections.Counter()
    for (name, shapes, _), count in find_collectives(compiled.as_text()).items():
        found[name, shapes] += count
    return found


def collectives_on_a_mesh(config, spec):
    """Those of a sampled call with every option, with rows and vocabulary split over four devices."""
    mesh = compat.make_mesh({"data": 2, "tensor": 2})
    call, shapes = call_of(config, 4, spec, features=SamplingFeatures.all_enabled())

    def place(tree, **how):
        def at(leaf, part):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part))

        return jax.tree.map(at, tree, part_specs(tree, config, mesh.shape, **how))

    params, own, state = shapes
    with use_abstract_mesh(mesh.abstract_mesh):
        return collectives_of(
            decode.plain.lower(place(params), place(own), place(state, is_state=True), **call.keywords).compile()
        )


SAMPLED = {
    "block": DecodeSpec(2, 1, 3, "block", logprobs=True),
    "plain": DecodeSpec(0, 1, 1, "sample", logprobs=True),
    "greedy": DecodeSpec(2, 1, 3, "greedy", logprobs=True),
    "sample-tree": DecodeSpec(2, 2, 5, "sample", logprobs=True),
    "recursive": DecodeSpec(2, 2, 5, "recursive"),
    "traversal": DecodeSpec(2, 2, 5, "traversal"),
    "threshold": DecodeSpec(2, 2, 5, "threshold"),
    "typical": DecodeSpec(2, 2, 5, "typical"),
    "relaxed": DecodeSpec(2, 2, 5, "relaxed"),
}


@pytest.mark.parametrize(
    "name", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLED if name != "block")]
)
@pytest.mark.slow
def test_no_collective_grows_with_the_vocabulary(name):
    config = dataclasses.replace(SINGLE["grouped"], num_hidden_layers=1)
    small, large = (
        collectives_on_a_mesh(dataclasses.replace(config, vocab_size=size, num_tokens=size - 3), SAMPLED[name])
        for size in (320, 640)
    )
    assert small == large and sum(small.values()) > 10


def test_that_test_sees_logits_that_are_gathered():
    mesh = compat.make_mesh({"tensor": 2})

    def gathering(logits):
        return Vocabulary.of(2 * logits.shape[-1]).gather(logits).sum(axis=-1)

    def compiled(size):
        parts = PartitionSpec(None, "tensor")
        call = jax.shard_map(gathering, mesh=mesh, in_specs=parts, out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(call).lower(jax.ShapeDtypeStruct((4, size), jnp.float32)).compile()

    assert collectives_of(compiled(320)) != collectives_of(compiled(640))


def test_a_call_is_one_program_with_its_loop_inside(small):
    model, params = small("grouped", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=5, num_steps=1)
    compiled_before = decode.plain._cache_size()
    speculative_generate(params, [[1, 2, 3], [4]], model=model, config=config)
    assert decode.plain._cache_size() == compiled_before + 1
    for call in (  # other lengths, limits, stop tokens, and tokens
        ([[5] * 40, [6, 7]], {"max_new_tokens": 9}),
        ([[1], [2]], {"stop_token_ids": (3,)}),
        ([[1], [2]], {"stop_token_ids": (3, 5, 60, 8), "max_length": 17}),
        (np.array([[1, 2], [3, 4]]), {}),
    ):
        speculative_generate(params, call[0], model=model, config=dataclasses.replace(config, **call[1]))
    assert decode.plain._cache_size() == compiled_before + 1


def test_the_program_has_a_while_and_no_way_to_the_host():
    text = compile_call(GROUPED, 1, chain(1)).as_text()
    opcodes = {one.opcode for body in parse(text).values() for one in body}
    assert "while" in opcodes
    assert not opcodes & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in "".join(re.findall(r'custom_call_target="[^"]*"', text))


def test_generate_ignores_the_number_of_draft_steps(small):
    model, params = small("grouped", num_mtp_modules=1)
    result = generate(params, [[1, 2, 3]], model=model, config=DecodeConfig(max_new_tokens=5, num_steps=1))
    assert result.stats.proposed.shape == (1, 0) and result.stats.rounds.tolist() == [4]
