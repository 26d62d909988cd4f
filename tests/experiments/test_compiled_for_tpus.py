"""Decoding, the engine's calls and an update, compiled for TPUs without any: none returns to the host on the way."""

import math
import re
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.training.train_table import compile_cell
from mtpjax import DecodeConfig, MTPModel, compat
from mtpjax.evaluation.compiled_call import compile_call, find_collectives, stored_shapes
from mtpjax.models.params import init_params, shard_for_decoding
from mtpjax.serving.engine_session import EngineSession
from mtpjax.serving.program_set import ProgramKey
from mtpjax.serving.programs import Programs
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.small_models import small_config

pytestmark = pytest.mark.tpu

FAMILIES = ("grouped", "latent", "sparse", "hybrid")
ONE, FOUR = {"data": 1}, {"data": 2, "tensor": 2}
TO_HOST = re.compile(r" (send|send-done|recv|recv-done|infeed|outfeed)\(|is_host_transfer=true|MoveToHost")
# Sizes that two devices can split.
SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}


def tpu_mesh(sizes):
    return compat.make_mesh(sizes, compat.tpu_devices()[: math.prod(sizes.values())])


def cells(first, *, families=FAMILIES):
    """Every family on one device and on four; all but the first are slow tests."""
    return [
        pytest.param(
            family,
            sizes,
            marks=[] if (family, sizes) == first else [pytest.mark.slow],
            id=f"{family}-{math.prod(sizes.values())}",
        )
        for family in families
        for sizes in (ONE, FOUR)
    ]


def check(text, arguments, temp, seconds):
    print(f"{arguments / 1e6:.1f} + {temp / 1e6:.1f} MB, {seconds:.0f} CPU s")
    assert not TO_HOST.search(text)
    assert arguments > 0 and temp > 0


@pytest.mark.parametrize(("family", "sizes"), cells(("grouped", FOUR)))
def test_a_decoding_call_compiles_for_tpus(family, sizes):
    config = small_config(family, **SIZES)
    params = stored_shapes(config, has_fp8=False)
    compiled = compile_call(config, tpu_mesh(sizes), rows=4, slots=256, params=params, implementation="xla")
    assert " while(" in compiled.text
    assert bool(compiled.collectives) == (sizes == FOUR)
    check(compiled.text, compiled.arguments, compiled.temp, compiled.seconds)


def engine_programs(family, sizes):
    """Makes an engine's programs on CPUs, whose arrays are sharded as they would be on TPUs."""
    model = MTPModel(small_config(family, **SIZES), implementation="xla")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(model, jax.random.key(0)))
    devices = jax.devices("cpu")[: math.prod(sizes.values())]
    model, params = shard_for_decoding(model, params, compat.make_mesh(sizes, devices))
    settings = EngineSettings(num_slots=8, page_size=16, max_length=256, batch_sizes=(8 // sizes["data"],))
    return Programs(EngineSession(params, model=model, config=DecodeConfig(num_steps=2), settings=settings), None)


@pytest.mark.parametrize("kind", ["prefill", "advance"])
@pytest.mark.parametrize(("family", "sizes"), cells(("hybrid", FOUR)))
def test_the_calls_of_an_engine_compile_for_tpus(family, sizes, kind):
    programs, mesh = engine_programs(family, sizes), tpu_mesh(sizes)
    session = programs.session
    width, shard_slots = session.sizes.table_widths[-1], session.sizes.shard_slots
    if kind == "prefill":
        key = ProgramKey("prefill", session.sizes.prefill_sizes[-1], width)
    else:
        key = ProgramKey("advance", shard_slots, width, True, 2)
    call = programs.empty_call(key)

    def on_tpus(leaf):
        spec = leaf.sharding.spec if isinstance(getattr(leaf, "sharding", None), NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    arguments = jax.tree.map(on_tpus, (session.params, session.draft_params, session.state, *call.arrays))
    begin = time.process_time()
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = call.program.plain.lower(*arguments, **session.static_arguments(key)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert bool(find_collectives(text)) == (sizes == FOUR)
    seconds = time.process_time() - begin
    check(text, memory.argument_size_in_bytes, memory.temp_size_in_bytes, seconds)


@pytest.mark.parametrize(("family", "sizes"), cells(("latent", ONE)))
def test_an_update_compiles_for_tpus(family, sizes):
    axes = {"fsdp" if name == "data" else name: size for name, size in sizes.items()}
    compiled = compile_cell(small_config(family, **SIZES), "all", tpu_mesh(axes), num_tokens=256)[0]
    check(compiled.text, compiled.arguments, compiled.temp, compiled.seconds)
