"""The compiled steps of a decoding call on an H100: one CUDA graph, the loop included."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.gpu_thunks import Thunk, compile_thunks, parse
from mtpjax import compat
from mtpjax.decoding.gpu_graph import GRAPH_OPTIONS
from mtpjax.decoding.loop import decode
from tests.decoding.test_compiled import CONFIGS, SINGLE, SPECS, call_of, chain

SEQUENCE = """000: kCommandBuffer [source | next=008 (1)]
    001: kCopy         [source | sink] kCopy
    008: kWhile        [prev=000 (1)  | sink]
    condition:
        009: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        010: kCustomKernel [source | sink] block_scaled_matmul grid: [4, 1, 1] threads: [128, 1, 1]
011: kCustomKernel [source | sink] loop_fusion grid: [1, 1, 1] threads: [1, 1, 1]
"""


def test_a_thunk_sequence_is_read_as_a_tree():
    kernel = functools.partial(Thunk, "kCustomKernel")
    loop = Thunk("kWhile", "", (kernel("wrapped_compare"), kernel("block_scaled_matmul")))
    graph = Thunk("kCommandBuffer", "", (Thunk("kCopy", "kCopy"), loop))
    assert parse(SEQUENCE) == (graph, kernel("loop_fusion"))


@pytest.mark.h100
@pytest.mark.parametrize(
    ("config", "batch", "spec", "implementation"),
    [
        pytest.param(CONFIGS["grouped"], 1, chain(0), "xla", id="plain", marks=pytest.mark.slow),
        pytest.param(CONFIGS["latent"], 4, chain(3), "triton", id="chain-kernels", marks=pytest.mark.slow),
        pytest.param(CONFIGS["experts"], 1, chain(1), "xla", id="experts"),
        pytest.param(CONFIGS["experts"], 1, chain(1), "triton", id="experts-kernels", marks=pytest.mark.slow),
        pytest.param(SINGLE["grouped"], 4, SPECS["tree"], "xla", id="tree", marks=pytest.mark.slow),
        pytest.param(
            SINGLE["latent"], 1, SPECS["adaptive-block"], "triton", id="adaptive-kernels", marks=pytest.mark.slow
        ),
    ],
)
def test_the_whole_call_is_one_graph(config, batch, spec, implementation):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    with use_abstract_mesh(mesh.abstract_mesh):
        call, shapes = call_of(config, batch, spec, platform="cuda", dtype=jnp.bfloat16, implementation=implementation)
        sharding = NamedSharding(mesh, PartitionSpec())
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
        lowered = decode.plain.lower(*shapes, **call.keywords)
        [graph] = compile_thunks(lowered, GRAPH_OPTIONS)
        without_options = compile_thunks(lowered)
    assert graph.kind == "kCommandBuffer"
    assert any(thunk.kind == "kWhile" for thunk in graph.walk())
    # Without the options the loop is outside, and the host reads its condition.
    assert any(thunk.kind == "kWhile" for thunk in without_options)
