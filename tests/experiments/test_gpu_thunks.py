"""The compiled steps of a decoding call on an H100: one CUDA graph, the loop included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.kernels.gpu_thunks import Thunk, compile_and_read, compile_thunks, parse
from mtpjax import compat
from mtpjax.decoding.gpu_graph import GRAPH_OPTIONS, MESH_GRAPH_OPTIONS, graph_options
from mtpjax.decoding.graph_trial import trial_loop
from mtpjax.decoding.loop import decode
from mtpjax.models.decoding_layout import part_specs
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


def lowered_call(mesh):
    """The decoding call over a mesh, with the options that its topology gets."""
    config = dataclasses.replace(SINGLE["grouped"], num_hidden_layers=1)
    call, shapes = call_of(config, 1, chain(1), platform="cuda", dtype=jnp.bfloat16)

    def place(tree, **how):
        at = lambda leaf, part: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part))
        return jax.tree.map(at, tree, part_specs(tree, config, mesh.shape, **how))

    params, own, state = shapes
    jitted = decode.with_options(graph_options(mesh))
    return jitted.lower(place(params), place(own), place(state, is_state=True), **call.keywords)


def lowered_trial(mesh):
    """The loop that decides whether graphs work, likewise."""
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (mesh.axis_names, ()))
    values = jax.ShapeDtypeStruct((mesh.size, 8), jnp.float32, sharding=rows)
    return trial_loop(mesh, graph_options(mesh)).lower(values, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))


@pytest.mark.h100
@pytest.mark.parametrize("lower", [lowered_call, lowered_trial])
@pytest.mark.parametrize("topology", ["1x1x2", "1x2x1"])
def test_loops_and_collectives_are_recorded_on_one_node_only(topology, lower):
    mesh = compat.make_mesh({"tensor": 2}, compat.h100_devices(topology))
    with use_abstract_mesh(mesh.abstract_mesh):
        steps, options = compile_and_read(lower(mesh))
    outside = {step.kind for step in steps}
    recorded = {step.kind for top in steps if top.kind == "kCommandBuffer" for step in top.walk()}
    if topology == "1x1x2":
        for name, value in MESH_GRAPH_OPTIONS.items():
            assert set(options[name]) == set(value.split(","))
        assert outside == {"kCommandBuffer"} and {"kWhile", "kAllReduce", "kAllGather"} <= recorded
    else:
        # XLA's own options, which hold neither: the host reads the condition of the loop.
        assert not MESH_GRAPH_OPTIONS.keys() & options.keys()
        assert "kWhile" in outside and not {"kWhile", "kAllReduce", "kAllGather"} & recorded
