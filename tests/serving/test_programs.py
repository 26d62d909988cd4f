"""What XLA makes of the engine's calls: they update the pool in place, whatever the number of its pages."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax import DecodeConfig, ModelConfig, MTPModel, compat
from mtpjax.models.params import init_params
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.executor import Executor
from mtpjax.serving.program_set import ProgramKey
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.hlo import NO_RESULT, called, parse, updates_in

NUM_PAGES = 977  # no other size here
ON_AN_H100 = ("prefill", "advance plain=True")  # compiling takes long
SIZES = {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 384, "num_mtp_modules": 2, "max_position_embeddings": 512}
CONFIGS = {
    "grouped": ModelConfig(**SIZES, num_key_value_heads=2, head_dim=64),
    "latent": ModelConfig(
        **SIZES, attention="latent", kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64
    ),
}


def make_executor(kind, dtype=jnp.float32, implementation="xla"):
    model = MTPModel(CONFIGS[kind], implementation=implementation)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(model, jax.random.key(0)))
    settings = EngineSettings(num_slots=8, page_size=16, num_pages=NUM_PAGES, max_length=256, batch_sizes=(4, 8))
    return Executor(EngineSession(params, model=model, config=DecodeConfig(num_steps=2), settings=settings))


def calls_of(executor):
    """One call of each kind, by name."""
    width = executor.session.sizes.table_widths[-1]
    for key in (ProgramKey("admit", 4), ProgramKey("prefill", 4, width)):
        yield key.kind, executor.programs.empty_call(key)
    for plain in (True, False):
        yield f"advance plain={plain}", executor.programs.empty_call(ProgramKey("advance", 4, width, plain, 2))


def compiled_text(executor, call, sharding=None):
    arguments = (executor.session.params, executor.session.draft_params, executor.session.state, *call.arrays)
    if sharding is not None:
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
        )
    lowered = call.program.plain.lower(*arguments, **executor.session.static_arguments(call.key))
    return lowered.compile().as_text()


def writes_to_the_pool(text):
    """The instructions, outside of fusions, that make an array with an axis of all pages: in place, and as a copy."""
    computations = parse(text)
    bodies = [one for body in computations.values() for one in body]
    fused = {name for one in bodies if one.opcode == "fusion" for name in called(one.line, "calls")}
    in_place, copies = [], []
    for one in (one for name, body in computations.items() if name not in fused for one in body):
        if one.opcode not in NO_RESULT and any(NUM_PAGES in shape for shape in one.shapes):
            is_update = updates_in(computations, one, lambda shape: NUM_PAGES in shape)
            (in_place if is_update else copies).append(one.line[:300])
    return in_place, copies


def assert_copies_no_pool(name, text):
    in_place, copies = writes_to_the_pool(text)
    assert copies == [], name
    assert bool(in_place) == (name != "admit"), name


@pytest.mark.parametrize("kind", ["grouped", pytest.param("latent", marks=pytest.mark.slow)])
def test_no_call_copies_the_pool(kind):
    executor = make_executor(kind)
    for name, call in calls_of(executor):
        assert_copies_no_pool(name, compiled_text(executor, call))


@pytest.mark.h100
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_on_an_h100_no_call_copies_the_pool(kind):
    executor = make_executor(kind, jnp.bfloat16, "triton")
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    with use_abstract_mesh(mesh.abstract_mesh):
        for name, call in [(name, call) for name, call in calls_of(executor) if name in ON_AN_H100]:
            assert_copies_no_pool(name, compiled_text(executor, call, NamedSharding(mesh, PartitionSpec())))
