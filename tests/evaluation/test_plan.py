import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console

from mtpjax import DecodeConfig, compat, load, shard_for_decoding
from mtpjax.cli.main import main
from mtpjax.cli.mesh_flags import parse_mesh
from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.state import StateShape
from mtpjax.evaluation.compiled_call import stored_shapes
from mtpjax.evaluation.plan import Plan, Temp, list_meshes, plan_layout
from mtpjax.evaluation.plan_report import Candidate, Comparison, Load, compare_meshes, describe
from mtpjax.evaluation.plan_rounds import estimate_round
from mtpjax.evaluation.roofline import DEVICES, Part, Round
from mtpjax.inference.requests import make_drafter
from mtpjax.io.inspect import stored_params
from mtpjax.models.presets import presets
from mtpjax.models.sharding import mesh_text
from tests.golden import path

H100, V3 = DEVICES["h100"], presets["deepseek-v3"]


@pytest.fixture(scope="module")
def stored():
    return stored_shapes(V3, has_fp8=True)


def run(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def held_by_one_device(tree):
    device = jax.devices()[0]
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek_v3_fp8", {"data": 2, "tensor": 2}),
        ("glm4_moe", {"data": 4, "tensor": 2}),
        ("qwen3_5_moe", {"data": 2, "expert": 2, "tensor": 2}),
    ],
)
def test_the_bytes_are_those_that_a_device_holds(name, sizes):
    config, params = stored_params(path(name))
    found = plan_layout(config, params, sizes, rows=8, slots=256, num_steps=2)
    mesh = compat.make_mesh(sizes)
    model, placed = shard_for_decoding(*load(path(name), mesh=mesh), mesh)
    assert found.weights == held_by_one_device(placed)
    config = DecodeConfig(num_steps=2, acceptance="greedy", prefill_chunk=8)
    decoder = Decoder.make(config, make_drafter(config), model, mesh, batch=8, max_length=200, is_greedy=True)
    shape = StateShape(8, decoder.capacity(200), features=SamplingFeatures.all_enabled())
    state = decoder.make_state(placed, config, mesh, shape=shape)
    # Of the state the caches are compared: this one is for every kind of request.
    caches = held_by_one_device((state.trunk, state.drafter))
    scale = 2 / jnp.dtype(placed["embedding"].dtype).itemsize  # the plan's caches are bfloat16
    slots = state.tokens.shape[1]
    assert 0.9 < caches * scale * 256 / slots / found.state <= 1


def test_a_plan_knows_what_fits(stored):
    meshes = list_meshes(64)
    assert {"data": 8, "tensor": 8} in meshes and len(meshes) == 7
    plans = {mesh["tensor"]: plan_layout(V3, stored, mesh, rows=64, slots=4096, num_steps=1) for mesh in meshes}
    # Compiled: 16.9 GB of arguments (experiments/results/mesh_table.json).
    assert 16.5e9 < plans[8].arguments < 17.1e9
    # `tensor` copies the latents, `data` copies attention.
    assert plans[64].state > 60 * plans[1].state and plans[1].weights > 2 * plans[64].weights
    for found in plans.values():
        assert found.free(H100) > 0
        batch, context = found.largest_batch(H100), found.largest_slots(H100)
        larger = plan_layout(V3, stored, found.mesh, rows=batch, slots=4096, num_steps=1, prefill_chunk=64)
        assert larger.rows == batch and abs(larger.free(H100)) < 0.1 * H100.memory
        longer = plan_layout(V3, stored, found.mesh, rows=64, slots=context, num_steps=1, prefill_chunk=64)
        assert abs(longer.free(H100)) < 0.02 * H100.memory


@pytest.mark.parametrize(
    ("name", "sizes", "rows", "slots", "chunk", "temp"),
    [  # as compiled for H100s with 4 layers: docs/results/meshes.md
        ("deepseek-v3", {"tensor": 8}, 8, 4096, 512, 0.710e9),
        ("deepseek-v3", {"data": 2, "tensor": 8}, 16, 4096, 256, 0.618e9),
        ("deepseek-v3", {"tensor": 8}, 8, 32768, 512, 3.935e9),  # keys and values of all slots
        ("deepseek-v3.2", {"tensor": 8}, 8, 4096, 64, 1.119e9),  # scores of an indexer
        ("glm-4.5", {"tensor": 8}, 8, 4096, 1024, 1.014e9),
        ("qwen3.5-35b-a3b", {"data": 8}, 64, 4096, 512, 1.598e9),  # inputs of convolutions
    ],
)
def test_the_temp_of_the_default_chunk_is_that_of_the_compiled_call(name, sizes, rows, slots, chunk, temp):
    config = presets[name]
    changes = {"num_hidden_layers": 4, "layer_types": config.layer_types[:4]}
    config = dataclasses.replace(config, first_k_dense_replace=min(config.first_k_dense_replace, 1), **changes)
    params = stored_shapes(config, has_fp8="qwen" not in name)
    found = plan_layout(config, params, sizes, rows=rows, slots=slots, num_steps=1)
    assert found.prefill_chunk == chunk
    assert found.temp == pytest.approx(temp, rel=0.05)


def test_the_longest_context_has_room_for_the_keys_of_a_prefill_pass(stored):
    settings = {"rows": 64, "num_steps": 1, "prefill_chunk": 512}
    found = plan_layout(V3, stored, {"data": 8, "tensor": 8}, slots=4096, **settings)
    longest = plan_layout(V3, stored, found.mesh, slots=found.largest_slots(H100), **settings)
    assert longest.temp > 2 * found.temp
    assert abs(longest.free(H100)) < 1e-3 * H100.memory


def test_more_devices_and_fewer_bytes_take_less_time(stored):
    def seconds(sizes, params=stored, rows=64, steps=1):
        return estimate_round(V3, params, H100, sizes, rows=rows, context=4096, num_steps=steps).seconds

    assert seconds({"data": 8, "tensor": 8}) < seconds({"data": 8, "tensor": 2})
    assert seconds({"tensor": 8}, rows=8) < seconds({"tensor": 8}, stored_shapes(V3, has_fp8=False), rows=8)
    # A sum that leaves the node is slower than one inside.
    inside, outside = (
        estimate_round(V3, stored, H100, {"data": 1, "tensor": tensor}, rows=8, context=64, num_steps=0)
        for tensor in (8, 16)
    )
    assert inside.collectives[0].seconds < outside.collectives[0].seconds


@pytest.mark.slow
def test_the_fastest_that_fits_is_chosen(stored):
    load = Load(64, 4000, num_steps=1, accept_length=1.8)
    result = compare_meshes(V3, stored, H100, list_meshes(16), load)
    assert result.best is min(result.candidates, key=lambda each: each.drafted.seconds)
    assert 1 < result.speedup(result.best) < 1.8
    assert not compare_meshes(V3, stored, H100, list_meshes(4), load).best
    glm = presets["glm-4.5"]
    result = compare_meshes(glm, stored_shapes(glm, has_fp8=True), H100, list_meshes(64), load)
    assert [mesh for mesh, _ in result.excluded] == [{"data": 1, "tensor": 64}, {"data": 64, "tensor": 1}]


def test_the_command(tmp_path, capsys):
    output = tmp_path / "plan.json"
    flags = ["plan", str(path("deepseek_v3_fp8")), "--count", "4", "--context", "200"]
    assert run([*flags, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "fastest that fits" in printed and max(map(len, printed.splitlines())) <= 80
    content = json.loads(output.read_text())
    assert sum(row["is_best"] for row in content["candidates"]) == 1
    assert (tmp_path / "plan.png").stat().st_size
    # The context is the one that was asked for, and the slots on top of it are told apart.
    assert "8 rows of 200 tokens" in printed and content["context"] == 200
    assert "256 cache slots" in " ".join(printed.split()) and {
        row["plan"]["slots"] for row in content["candidates"]
    } == {256}
    # The gain is assumed, and meshes are named as `--mesh` takes them.
    assert "if a round yields 1.80 tokens (assumed)" in printed
    assert parse_mesh(re.findall("fastest that fits: ([^ ]*), ", printed)[0]).keys() <= {"data", "tensor"}
    assert "data=2,tensor=2" in printed and not re.search("(data|tensor) [0-9]", printed)
    assert run(["plan", "deepseek-v3", "--count", "8"]) == 1
    assert "no mesh of 8 H100 SXM fits" in " ".join(capsys.readouterr().out.split())
    for mesh in ([], ["--mesh", "expert=8,context=8"]):
        flags = ["--train", "modules", "--count", "64", "--batch-size", "64", *mesh]
        run(["plan", "deepseek-v3", "--weights", "fp8", *flags])
        assert "20.37" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("sizes", [{"data": 128, "tensor": 16}, {"data": 16, "expert": 8, "tensor": 16}])
def test_tables_show_all_headers_and_numbers(sizes, width):
    """Also of long names of meshes and large numbers, of which none is cut."""
    layout = Plan(sizes, 2048, 163_840, 123_450_000_000, 9_870_000_000, (Temp("matrices", 4.56e9),), 1e3, 1e3, 512)
    names = ("weights", "experts", "head", "cache", "MTP modules")
    drafted = Round(3, tuple(Part(name, 1.0, 1.0) for name in names), (0.1234,) * 5, 9, 0.1234, ())
    candidate = Candidate(layout, dataclasses.replace(drafted, num_steps=0), drafted)
    result = Comparison(Load(2048, 131_072, 3, 2.95), [candidate], [], candidate)
    file = io.StringIO()
    console = rich.console.Console(file=file, width=width)
    for line in describe(result, H100, 2048):
        console.print(line)
    printed = file.getvalue()
    assert max(map(len, printed.splitlines())) <= width and "…" not in printed
    for word in ("experts", "launches", "context", "speed-up", "assumed", "123.45", "123.4", mesh_text(sizes)):
        assert word in printed, word


def test_the_longest_context_leaves_room_for_the_drafts():
    layout = Plan({}, 8, 5120, 40 * 10**9, 8 * 10**9, (Temp("matrices", 1e9),), 1e9, 200_000.0, 512)
    result = Comparison(Load(8, 4096, 1, 1.8), [], [], None)
    longest = result.longest_context(Candidate(layout, *[Round(0, (), (), 0, 0.0, ())] * 2), H100)
    # A call of this context needs at most the slots that fit, and one token more needs more of them.
    assert round_up_capacity(longest + 3) <= layout.largest_slots(H100) < round_up_capacity(longest + 4)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--device", "a100"], "--device must be one of h100, h200, mi300x, got a100"),
        (["--count", "0"], "count must be at least 1, got 0"),
        (["--batch-size", "0"], "batch must be at least 1, got 0"),
        (["--num-steps", "-1"], "--num-steps must be at least 0, got -1"),
        (["--accept-length", "5"], "accept_length must be within 1..2 with 1 draft levels, got 5.0"),
        (["--mesh", "tensor=3", "--count", "3"], "tensor=3 of the mesh does not divide vocab_size 256"),
        (["--mesh", "tensor=4"], "--mesh tensor=4: data * expert * tensor must be 8"),
        (["--compile", "--device", "h200"], "--compile compiles for H100s, not for h200"),
    ],
)
def test_wrong_settings_are_one_line(flags, named, capsys):
    assert run(["plan", "tiny", *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_model_without_modules_drafts_nothing(capsys):
    flags = ["plan", str(path("qwen3")), "--count", "1"]
    assert run([*flags, "--num-steps", "1"]) == 2
    assert "num_steps must be 0 for a model without MTP modules, got 1" in capsys.readouterr().err
    assert run(flags) == 0 and "mtpjax plan" not in capsys.readouterr().err


def test_a_context_beyond_the_model_is_told(capsys):
    assert run(["plan", str(path("qwen3")), "--count", "1", "--context", "1000000"]) in (0, 1)
    assert "--context 1000000 exceeds the model's " in capsys.readouterr().err
