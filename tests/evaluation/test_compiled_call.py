"""Decoding calls compiled for meshes of H100s. The bars are those of DeepSeek-V3 with 4 layers, one of them dense."""

import collections
import dataclasses
import re

import numpy as np
import pytest

from mtpjax.cli.mesh_flags import parse_mesh
from mtpjax.evaluation.compiled_call import compile_call, find_collectives, stored_shapes
from mtpjax.evaluation.plan import plan_layout
from mtpjax.models.presets import presets

V3 = dataclasses.replace(presets["deepseek-v3"], num_hidden_layers=4, first_k_dense_replace=1)


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


@pytest.mark.h100
@pytest.mark.parametrize(
    ("sizes", "rows", "most_temp"),
    [pytest.param({"tensor": 8}, 8, 0.35e9, marks=pytest.mark.slow), ({"data": 8}, 64, 1.8e9)],
    ids=["tensor", "data"],
)
def test_no_weight_travels_and_every_kernel_runs(sizes, rows, most_temp):
    params = stored_shapes(V3, has_fp8=True)
    compiled = compile_call(V3, sizes, rows=rows, slots=4096, params=params, prefill_chunk=64)
    print(f"temp {compiled.temp / 1e9:.2f} GB, {compiled.kernels} kernels, {compiled.seconds:.0f} s")
    # Every collective is one that the modules ask for; XLA's partitioner would add its own for weights. Two that XLA
    # joins have no place. The largest is that of the hidden states of a prefill chunk.
    assert all(re.search("(psum|all_gather|reduce_scatter)$|^$", place) for _, _, place in compiled.collectives)
    largest = max(elements(shapes) for _, shapes, _ in compiled.collectives)
    assert largest <= 2 * rows * 64 * V3.hidden_size
    assert compiled.temp <= most_temp
    planned = plan_layout(V3, params, sizes, rows=rows, slots=4096, num_steps=1, prefill_chunk=64)
    print(f"planned {planned.arguments / 1e9:.3f} + {planned.temp / 1e9:.3f} GB of {compiled.arguments / 1e9:.3f}")
    assert abs(planned.arguments / compiled.arguments - 1) < 1e-3
    assert abs(planned.total / (compiled.arguments + compiled.temp) - 1) < 0.05
    # Two passes, of prefill and of the loop, through four layers: one sum of attention, at most three of experts.
    counts = per_layer(compiled, "while/body")
    assert counts.get("attention", 0) + counts.get("dense", 0) + counts.get("experts", 0) > 0
    assert counts.get("attention", 0) <= 2 * 4 and counts.get("dense", 0) <= 2 and counts.get("experts", 0) <= 2 * 3 * 3
    in_condition = [key for key in compiled.collectives if "/cond/" in key[2]]
    assert all(elements(shapes) <= 8 for _, shapes, _ in in_condition) and len(in_condition) <= 1
    assert compiled.kernels >= 80


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
