"""Decoding calls compiled for meshes of H100s. The bars are those of DeepSeek-V3 with 4 layers, one of them dense."""

import collections
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mtpjax import compat
from mtpjax.cli.mesh_flags import parse_mesh
from mtpjax.evaluation.compiled_call import Compiled, compile_call, find_collectives, h100_mesh, stored_shapes
from mtpjax.evaluation.plan import plan_layout
from mtpjax.models.presets import presets

V3 = dataclasses.replace(presets["deepseek-v3"], num_hidden_layers=4, first_k_dense_replace=1)
SLOTS = 4096
# DeepSeek-V3's structure in small, for meshes of CPU devices. Scales are those of blocks of 128.
SMALL = dataclasses.replace(
    V3,
    vocab_size=1024,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=1024,
    moe_intermediate_size=1024,
    n_routed_experts=16,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
)
# DeepSeek-V3.2's in small: an indexer picks 64 of the keys in the slots.
SMALL_SPARSE = dataclasses.replace(SMALL, index_topk=64, index_n_heads=4, index_head_dim=32)
# Sizes of the vocabulary and of weights, doubled together. Hidden states travel, so their size stays.
WIDTHS = ("vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts")
# With these doubled a kernel exceeds the shared memory of an H100, so they are doubled on CPU devices alone.
ATTENTION_WIDTHS = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank")
INDEXER_WIDTHS = ("index_n_heads", "index_head_dim")


def elements(shapes: str) -> int:
    """Numbers in the largest array of a collective."""
    return max(
        (int(np.prod([int(size) for size in dims.split(",") if size])) for dims in re.findall(r"\[([\d,]*)\]", shapes)),
        default=0,
    )


def per_layer(compiled, loop: str) -> dict[str, int]:
    """Collectives of the layers in the loop of rounds, by the kind of sublayer: attention, dense, experts."""
    counts: collections.Counter[str] = collections.Counter()
    for (_, _, place), count in compiled.collectives.items():
        found = re.search(rf"{loop}.*layer_\*/(attention|dense|experts)", place)
        if found:
            counts[found[1]] += count
    return dict(counts)


def twice(config, names):
    """The config with these sizes doubled."""
    return dataclasses.replace(config, **{name: 2 * getattr(config, name) for name in names})


def sizes_of_collectives(compiled) -> collections.Counter[tuple[str, str]]:
    """How often each (operation, shapes) stands in a module."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for (name, shapes, _), count in compiled.collectives.items():
        counts[name, shapes] += count
    return counts


def assert_few_collectives(compiled, *, num_dense: int, num_moe: int):
    """At most two collectives in a dense layer and four in one of experts, and one scalar in a loop's condition."""
    # Two passes, of prefill and of the loop: one sum of attention, one of a dense layer, at most three of experts.
    counts = per_layer(compiled, "while/body")
    assert sum(counts.values()) > 0
    assert counts.get("attention", 0) <= 2 * (num_dense + num_moe)
    assert counts.get("dense", 0) <= 2 * num_dense and counts.get("experts", 0) <= 2 * 3 * num_moe
    in_condition = [key for key in compiled.collectives if "/cond/" in key[2]]
    assert all(elements(shapes) <= 8 for _, shapes, _ in in_condition) and len(in_condition) <= 1


@functools.cache
def on_h100s(config, slots: int, rows: int, *axes: tuple[str, int]):
    """The fp8 model's call for a mesh of H100s."""
    params = stored_shapes(config, has_fp8=True)
    return compile_call(config, h100_mesh(dict(axes)), rows=rows, slots=slots, params=params, prefill_chunk=64)


H100_MESHES = [
    pytest.param({"tensor": 8}, 8, marks=pytest.mark.slow, id="tensor"),
    pytest.param({"data": 8}, 64, id="data"),
]


@pytest.mark.h100
@pytest.mark.parametrize(("sizes", "rows"), H100_MESHES)
def test_no_weight_travels_and_every_kernel_runs(sizes, rows):
    most_temp = 1.8e9 if "data" in sizes else 0.35e9
    params = stored_shapes(V3, has_fp8=True)
    compiled = on_h100s(V3, SLOTS, rows, *sizes.items())
    print(f"temp {compiled.temp / 1e9:.2f} GB, {compiled.kernels} kernels, {compiled.seconds:.0f} s")
    # Every collective is one that the modules ask for; XLA's partitioner would add its own for weights. Two that XLA
    # joins have no place, or both places in brackets. The largest is that of the hidden states of a prefill chunk.
    assert all(re.search(r"(psum|all_gather|reduce_scatter)\)?$|^$", place) for _, _, place in compiled.collectives)
    largest = max(elements(shapes) for _, shapes, _ in compiled.collectives)
    assert largest <= 2 * rows * 64 * V3.hidden_size
    assert compiled.temp <= most_temp
    planned = plan_layout(V3, params, sizes, rows=rows, slots=4096, num_steps=1, prefill_chunk=64)
    print(f"planned {planned.arguments / 1e9:.3f} + {planned.temp / 1e9:.3f} GB of {compiled.arguments / 1e9:.3f}")
    assert abs(planned.arguments / compiled.arguments - 1) < 1e-3
    assert abs(planned.total / (compiled.arguments + compiled.temp) - 1) < 0.05
    assert_few_collectives(compiled, num_dense=1, num_moe=3)
    assert compiled.kernels >= 80


@pytest.mark.h100
@pytest.mark.slow  # the test below does it with small models
@pytest.mark.parametrize(("sizes", "rows"), H100_MESHES)
def test_on_h100s_no_collective_grows_with_vocabulary_slots_or_weights(sizes, rows):
    base = on_h100s(V3, SLOTS, rows, *sizes.items())
    double = on_h100s(twice(V3, WIDTHS), 2 * SLOTS, rows, *sizes.items())
    assert sizes_of_collectives(double) == sizes_of_collectives(base)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        {"data": 2, "tensor": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "config", [pytest.param(SMALL, marks=pytest.mark.slow), SMALL_SPARSE], ids=["latent", "sparse"]
)
@pytest.mark.slow
def test_no_collective_grows_with_vocabulary_slots_or_weights(config, sizes):
    def compile_for(config, slots):
        params = stored_shapes(config, has_fp8=True)
        settings, mesh = {"implementation": "xla", "prefill_chunk": 4}, compat.make_mesh(sizes, jax.devices()[:8])
        return compile_call(config, mesh, rows=16, slots=slots, params=params, **settings)

    # In both the indexer has more slots than it picks, so it scores all of them.
    base = compile_for(config, 384)
    double = compile_for(twice(config, WIDTHS + ATTENTION_WIDTHS + INDEXER_WIDTHS * bool(config.index_topk)), 768)
    assert sizes_of_collectives(double) == sizes_of_collectives(base)
    # The side of the hidden states is not doubled. A weight with this side twice is larger than what travels.
    assert max(elements(shapes) for _, shapes, _ in base.collectives) < config.hidden_size**2
    assert_few_collectives(base, num_dense=1, num_moe=1)


def test_the_sizes_show_a_weight_that_travels():
    def compiled(width):
        mesh = compat.make_mesh({"tensor": 8}, jax.devices()[:8])
        split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("tensor",), ()))
        weight = jax.ShapeDtypeStruct((64, width), np.float32, sharding=split)
        text = jax.jit(lambda weight: 2 * weight, out_shardings=whole).lower(weight).compile().as_text()
        return Compiled(0, 0, find_collectives(text), 0, 0.0, text)

    assert sizes_of_collectives(compiled(32)) != sizes_of_collectives(compiled(64))


def test_collectives_are_found_in_a_module():
    text = """
  %all-reduce.1 = bf16[8,64,7168]{2,1,0} all-reduce(%x), metadata={op_name="while/body/layer_3/attention/psum"}
  %all-gather-start = (f32[8,1]{1,0}, f32[8,8]{1,0}) all-gather-start(%y), metadata={op_name="jit(decode)/top"}
  %fusion = f32[8]{0} fusion(%z), calls=%all-reduce-like
"""
    assert find_collectives(text) == {
        ("all-reduce", "bf16[8,64,7168]", "while/body/layer_*/attention/psum"): 1,
        ("all-gather", "(f32[8,1], f32[8,8])", "jit(decode)/top"): 1,
    }
    assert parse_mesh("data=8,tensor=2") == {"data": 8, "tensor": 2}
