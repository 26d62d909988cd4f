"""Bytes of a round: what compiled text is counted to move, and that kernels move what they declare."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from experiments.common.decode_checkpoints import SHAPES, bytes_per_round
from experiments.common.hlo_bytes import Counter, parse
from experiments.kernels import bytes_moved
from experiments.kernels.bytes_moved import count_round, least_of_all, round_of, tally
from experiments.kernels.kernel_bytes import declared_calls, run_counted
from experiments.kernels.kernel_cases import cases
from mtpjax.evaluation.roofline import DEVICES, predict_round
from pallas_kernels.append_heads import Heads
from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.range_attention import KeyRanges
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.router import Routing

MODULE = """HloModule example

%sliced (p0: f32[64,256], p1: s32[], p2: f32[1,256]) -> f32[1,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %p2 = f32[1,256]{1,0} parameter(2)
  %slice = f32[1,256]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,256}
  ROOT %add = f32[1,256]{1,0} add(%slice, %p2)
}

%updated (p0.1: bf16[64,256], p1.1: f32[1,256], p2.1: s32[]) -> bf16[64,256] {
  %p0.1 = bf16[64,256]{1,0} parameter(0)
  %p1.1 = f32[1,256]{1,0} parameter(1)
  %update = bf16[1,256]{1,0} convert(%p1.1)
  %p2.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = bf16[64,256]{1,0} dynamic-update-slice(%p0.1, %update, %p2.1, %zero.1)
}

%body (state: (s32[], bf16[64,256], f32[64,256], f32[1,256])) -> (s32[], bf16[64,256], f32[64,256], f32[1,256]) {
  %state = (s32[], bf16[64,256]{1,0}, f32[64,256]{1,0}, /*index=3*/f32[1,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %cache = bf16[64,256]{1,0} get-tuple-element(%state), index=1
  %weight = f32[64,256]{1,0} get-tuple-element(%state), index=2
  %x = f32[1,256]{1,0} get-tuple-element(%state), index=3
  %y = f32[1,256]{1,0} fusion(%weight, %i, %x), calls=%sliced, metadata={op_name="jit(f)/while/body/layer_3/a"}
  %copy = f32[64,256]{1,0} copy(%weight), metadata={op_name="jit(f)/while/body/layer_4/b"}
  %z = f32[1,256]{1,0} custom-call(%copy, %y), custom_call_target="__gpu$xla.gpu.triton", KERNEL
  %cache.1 = bf16[64,256]{1,0} fusion(%cache, %z, %i), kind=kLoop, calls=%updated
  ROOT %next = (s32[], bf16[64,256]{1,0}, f32[64,256]{1,0}, f32[1,256]{1,0}) tuple(%i, %cache.1, %weight, %z)
}

%condition (state.1: (s32[], bf16[64,256], f32[64,256], f32[1,256])) -> pred[] {
  %state.1 = (s32[], bf16[64,256]{1,0}, f32[64,256]{1,0}, f32[1,256]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[64,256], b: f32[64,256], c: f32[1,256]) -> bf16[64,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %b = f32[64,256]{1,0} parameter(1)
  %c = f32[1,256]{1,0} parameter(2)
  %start = s32[] constant(0)
  %init = (s32[], bf16[64,256]{1,0}, f32[64,256]{1,0}, f32[1,256]{1,0}) tuple(%start, %a, %b, %c)
  %loop = (s32[], bf16[64,256]{1,0}, f32[64,256]{1,0}, f32[1,256]{1,0}) while(%init), LOOP
  ROOT %out = bf16[64,256]{1,0} get-tuple-element(%loop), index=1
}
"""
KERNEL = 'backend_config={grid_x = 1 : i32, ir = "ML\\EFR(%", name = "mix", num_stages = 1 : i32, num_warps = 4 : i32}'
LOOP = (
    'condition=%condition, body=%body, metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"5"}}'
)
MODULE = MODULE.replace("KERNEL", KERNEL).replace("LOOP", LOOP)
ROW, WHOLE = 4 * 256, 4 * 64 * 256  # bytes


def count_module(mix_bytes):
    computations, entry = parse(MODULE)

    def declared(instruction, operands):
        assert [operand.shape for operand in operands] == [(64, 256), (1, 256)]
        return mix_bytes

    return list(Counter(computations, declared, turns=lambda loop: 1).moved(entry, [0, 1, 2]))


def test_slices_updates_copies_kernels_and_loops_are_counted_as_they_move():
    moved = {one.instruction.name: one for one in count_module(mix_bytes=3 * ROW)}
    assert moved.keys() == {"y", "copy", "z", "cache.1"} and {one.times for one in moved.values()} == {5}
    assert moved["y"].total == 5 * (3 * ROW + 4)  # a slice, an index, a row; a row
    assert moved["copy"].total == 5 * 2 * WHOLE
    assert moved["z"].total == 5 * 3 * ROW  # as declared
    assert moved["cache.1"].total == 5 * (ROW + 4 + ROW // 2)  # the update alone, and nothing read of the cache
    assert moved["copy"].origins == {"weight": 1} and moved["cache.1"].origins["cache"] == 0
    assert moved["z"].origins["copy"] is None  # a copy is not the weight, and x is replaced in each turn
    assert moved["y"].origins == {"weight": 1, "i": None, "x": None}


def test_tuples_within_tuples_keep_what_is_in_them():
    pair, nested = "(f32[4]{0}, bf16[8]{0})", "((f32[4]{0}, bf16[8]{0}), /*index=1*/f32[2]{0})"
    text = f"""ENTRY %main (a: f32[4], b: bf16[8], c: f32[2]) -> bf16[8] {{
  %a = f32[4]{{0}} parameter(0)
  %b = bf16[8]{{0}} parameter(1)
  %c = f32[2]{{0}} parameter(2)
  %pair = {pair} tuple(%a, %b)
  %nested = {nested} tuple(%pair, %c)
  %first = {pair} get-tuple-element(%nested), index=0
  %second = bf16[8]{{0}} get-tuple-element(%first), index=1
  ROOT %copy = bf16[8]{{0}} copy(%second)
}}
"""
    computations, entry = parse(text)
    [copy] = Counter(computations, lambda *_: 0, lambda _: 1).moved(entry, [0, 1, 2])
    assert copy.origins == {"second": 1} and copy.total == 2 * 16


@pytest.mark.parametrize(
    "branches", ["branch_computations={%small, %large}", "true_computation=%small, false_computation=%large"]
)
def test_of_branches_the_one_that_moves_most_counts(branches):
    text = f"""%small (x: f32[4]) -> f32[4] {{
  ROOT %x = f32[4]{{0}} parameter(0)
}}

%large (y: f32[4]) -> f32[4] {{
  %y = f32[4]{{0}} parameter(0)
  ROOT %twin = f32[4]{{0}} copy(%y)
}}

ENTRY %main (which: s32[], a: f32[4]) -> f32[4] {{
  %which = s32[] parameter(0)
  %a = f32[4]{{0}} parameter(1)
  ROOT %chosen = f32[4]{{0}} conditional(%which, %a, %a), {branches}
}}
"""
    computations, entry = parse(text)
    [copy] = Counter(computations, lambda *_: 0, lambda _: 1).moved(entry, [0, 1])
    assert copy.origins == {"y": 1} and copy.total == 2 * 16


def test_of_a_call_that_depends_on_the_platform_the_one_for_an_h100_counts():
    def norm(rows):
        return lambda x: rms_norm(x[:rows], x[0], implementation="triton")[0]

    function = functools.partial(jax.lax.platform_dependent, rocm=norm(2), default=norm(4))
    assert [call.results for call in declared_calls(function, jnp.ones((8, 64)))] == [(("float32", (4, 64)),)]


def test_excess_is_what_is_beyond_reading_each_array_as_often_as_needed():
    count = tally(count_module(mix_bytes=3 * ROW), least=[0, 5 * ROW + 100, 7])
    assert count.kernels == {"mix": 15 * ROW} and count.outside == 0
    groups = {group.place: group for group in count.groups}
    assert groups["layer_*/a"].excess == groups["layer_*/a"].nbytes - 5 * ROW
    assert groups["layer_*/b"].excess == groups["layer_*/b"].nbytes - 100
    assert count.unread == 7  # x is no input of the second turn


def test_what_a_kernel_declares_is_found_by_its_name_and_arrays(key):
    def function(x, scale):
        return rms_norm(rms_norm(x, scale, implementation="triton")[:4], scale, implementation="triton")

    calls = list(declared_calls(function, jnp.ones((40, 64)), jnp.ones(64)))
    assert [(call.name, call.nbytes) for call in calls] == [("rms_norm", 4 * 64 * 81), ("rms_norm", 4 * 64 * 9)]
    of = bytes_moved._declared_bytes(calls, is_from_l2=False)
    computations, _ = parse(MODULE.replace("mix", "rms_norm").replace("f32[64,256]", "f32[40,64]"))
    call = computations["body"].instructions["z"]
    call = dataclasses.replace(call, results=computations["body"].instructions["copy"].results)
    assert of(call, [*call.results, dataclasses.replace(call.results[0], shape=(64,))]) == 4 * 64 * 81


def normal(number, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(number), shape, dtype)


def experts(dtype=jnp.float32):
    """Two tokens that choose four of five experts, 32 wide within a model of 48."""
    stacks = normal(1, 5, 48, 2, 32).astype(dtype), normal(2, 5, 32, 48).astype(dtype)
    return normal(0, 2, 48), jnp.array([[0, 3], [4, 1]]), jnp.ones((2, 2)), *stacks


def attention(*shapes, tokens):
    """Two rows whose 200 slots are all in use, the tokens' own included."""
    caches = [normal(number, *shape) for number, shape in enumerate(shapes)]
    num_committed, ancestor_mask = jnp.array([200 - tokens] * 2), jnp.tri(tokens, dtype=bool)[None].repeat(2, axis=0)
    return *[*caches, None][:3], num_committed, ancestor_mask


def paged_attention():
    """Two rows whose 13 pages are all in use."""
    q, keys, values = (normal(number, *size) for number, size in enumerate([(2, 2, 3, 2, 64), *[(26, 2, 16, 64)] * 2]))
    mask = jnp.tri(3, dtype=bool)[None].repeat(2, axis=0)
    return q, keys, values, jnp.array([205, 205]), mask, None, jnp.arange(26)[::-1].reshape(2, 13)


def attention_of_all():
    """Forty tokens that attend to all of 70 keys, and a gradient of the output."""
    shapes = (1, 2, 40, 3, 32), (1, 2, 70, 32), (1, 2, 70, 24), (1, 2, 40, 3, 24)
    *arrays, gradient = (normal(number, *shape) for number, shape in enumerate(shapes))
    return *arrays, KeyRanges(*(jnp.full((1, 40, 1), each, jnp.int32) for each in (0, 69))), gradient


def delta(tokens):
    scalars = [-jnp.ones((2, tokens, 2)), jnp.ones((2, tokens, 2)) / 2]
    q, k, v = (normal(number, 2, tokens, heads, 16) / 4 for number, heads in enumerate((1, 1, 2)))
    return q, k, v, *scalars, normal(4, 2, 2, 16, 16)


def heads():
    """Two rows of three tokens, two key heads with three queries each and a gate, of 40 channels, 24 rotated."""
    projected = PartialSums(normal(0, 2, 2, 3, 2, 6, 40), jnp.float32)
    caches = normal(1, 2, 2, 50, 40), normal(2, 2, 2, 50, 40)
    settings = Heads(normal(3, 2, 5, 40), (normal(4, 40), normal(5, 40)))
    return projected, (normal(6, 2, 3, 12), normal(7, 2, 3, 12)), *caches, jnp.array([5, 47]), settings


def latents():
    """Two rows of three tokens, three heads of 24 channels and 12 rotated, a latent of 80."""
    sums = [PartialSums(normal(place, 2, 2, 3, *size), jnp.float32) for place, size in enumerate(((3, 36), (92,)))]
    angles = normal(2, 2, 3, 6), normal(3, 2, 3, 6)
    return *sums, normal(4, 80), normal(5, 3, 24, 80), angles, normal(6, 2, 50, 92), jnp.array([5, 47])


@functools.cache
def small_calls():
    """Small calls of each op that move all that they declare: every length full, experts chosen by one token each.

    Sizes fill no block. They are made at the first use, since each array compiles a program.
    """
    scales = {"gate_up_scales": jnp.ones((5, 3, 2, 32)), "down_scales": jnp.ones((5, 2, 48)), "block": 16}
    return {
        "rms_norm": [({}, (normal(0, 13, 96), normal(1, 96))), ({}, (normal(0, 3, 5000), normal(1, 5000)))],
        "add_rms_norm": [
            ({}, (normal(0, 13, 96), PartialSums(normal(1, 3, 13, 96), jnp.float32), normal(2, 96))),
        ],
        "gated_matmul": [
            ({}, (normal(0, 3, 200), normal(1, 200, 2 * 70))),
            ({}, (normal(0, 5, 200), normal(1, 200, 2 * 70).astype(jnp.float8_e4m3fn), jnp.ones((2, 2 * 70)))),
        ],
        "append_heads": [({"group_size": 3}, heads())],
        "append_latents": [({}, latents())],
        "range_attention": [({"scale": 0.1}, attention_of_all())],
        "prefill_attention": [],  # skips slots, so it declares the most that it can move
        "route_tokens": [
            ({"routing": Routing(k=4)}, (normal(0, 5, 300), normal(1, 300, 60), normal(2, 60))),
            (
                {"routing": Routing(k=2, num_groups=3, num_kept_groups=2)},
                (normal(0, 2, 200), normal(1, 200, 24), None),
            ),
        ],
        "head_top_k": [
            ({"k": 4}, (normal(0, 3, 96), normal(1, 96, 200))),
            ({"k": 1, "is_transposed": True}, (normal(0, 70, 64), normal(1, 150, 64))),
        ],
        "linear_cross_entropy": [({}, (normal(0, 100, 96), normal(1, 96, 200), jnp.arange(100)))],
        "linear_total_variation": [({}, ([normal(0, 2, 70, 96)], [normal(1, 96, 200)], jnp.ones((2, 70), jnp.int32)))],
        "block_scaled_matmul": [
            ({}, (normal(0, 3, 200), normal(1, 200, 150))),
            ({}, (normal(0, 5, 200), normal(1, 200, 150).astype(jnp.float8_e4m3fn), jnp.ones((2, 150)))),
        ],
        "grouped_matmul": [
            ({"inference": True}, experts()),
            ({"inference": True, **scales}, experts(jnp.float8_e4m3fn)),
        ],
        "verify_attention": [
            ({"scale": 0.1}, attention((2, 2, 3, 2, 64), (2, 2, 200, 64), (2, 2, 200, 64), tokens=3)),
            ({"scale": 0.1}, paged_attention()),
            ({"scale": 0.1, "value_width": 128}, attention((2, 1, 2, 4, 160), (2, 1, 200, 160), tokens=2)),
            (
                {"scale": 0.1, "value_width": 128, "value_up": normal(9, 4, 128, 40)},
                attention((2, 1, 2, 4, 160), (2, 1, 200, 160), tokens=2),
            ),
            (
                {"scale": 0.1, "value_width": 16},
                attention((2, 1, 9, 2, 32), (2, 1, 200, 32), tokens=9),
            ),  # the cache twice
        ],
        "gated_delta_steps": [({}, delta(3))],
        "gated_delta_verify": [({}, delta(3))],
        "gated_delta": [({}, delta(100))],
    }


# The operands that their programs share: activations and tables, never weights and caches.
SHARED = {
    "head_top_k": [0],
    "block_scaled_matmul": [0],
    "gated_matmul": [0],
    "append_heads": [0, 1, 2, 4, 5, 6],
    "append_latents": [0, 1, 2, 3, 5],
    "combine_latents": [0, 1],
    "select_experts": [1],
    "grouped_gate_up": [0, 1],
    "grouped_product": [0, 1],
    "verify_attention_cuda": [0, 1, 2],
    # One head's keys and values, or its queries and what belongs to them, which all programs of the head load.
    "range_attention_forward_cuda": [3, 4],
    "range_attention_queries_cuda": [6, 7],
    "range_attention_keys_cuda": [5, 6, 7, 8],
}


SLOW = ("verify_attention", "route_tokens", "gated_delta")


def find_op(op):
    homes = {"route_tokens": "router", "linear_total_variation": "linear_cross_entropy"}
    home = homes.get(op, "gated_delta" if op.startswith("gated_delta") else op)
    name = "with_gradients" if op == "range_attention" else op
    return getattr(importlib.import_module(f"pallas_kernels.{home}"), name)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[pytest.mark.slow] * (op in SLOW)) for op in sorted({case.op for case in cases()})]
)
def test_kernels_move_what_they_declare(op):
    for options, arguments in small_calls()[op]:
        function = functools.partial(find_op(op), **options)
        result, calls = run_counted(functools.partial(function, implementation="triton"), *arguments)
        assert calls
        for call in calls:
            assert call.declared.nbytes, f"{call.declared.name} declares nothing"
            moved = call.read + call.written
            assert 0.95 * call.declared.nbytes <= moved <= 1.01 * call.declared.nbytes, call.declared.name
            again = sum(call.again[place] for place in SHARED.get(call.declared.name, []))
            # A table has a few words that only windows need.
            assert abs(again - call.declared.from_l2) <= max(0.05 * again, 32), call.declared.name
        jax.tree.map(assert_about, result, function(*arguments, implementation="xla"))


def assert_about(result, expected):
    """Near enough to tell that it was this that was run."""
    np.testing.assert_allclose(result, expected, rtol=0, atol=0.01 * np.abs(expected).max())


def gather(x, ids, *, size=32, declared=0):
    """A kernel with what kernels have: x [64, 128], ids [4] -> its rows [4, 128], and twice the first one."""

    def kernel(ids_ref, x_ref, out_ref, twice_ref):
        step = pl.program_id(0)

        def part(index, _):
            columns = index * size + jnp.arange(size)
            is_inside = columns < 120
            row = plt.load(x_ref.at[ids_ref[0], columns], mask=is_inside, other=0)
            plt.store(out_ref.at[pl.ds(index * size, size)], row, mask=is_inside)
            return ()

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(128 // size), part, ())

        @pl.when(step == 0)
        def _():
            twice_ref[...] = 2 * out_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((4, 128), x.dtype), jax.ShapeDtypeStruct((128,), x.dtype)],
        grid=(4,),
        in_specs=[pl.BlockSpec((1,), lambda i: (i,)), pl.BlockSpec(x.shape, lambda i: (0, 0))],
        out_specs=[pl.BlockSpec((None, 128), lambda i: (i, 0)), pl.BlockSpec((128,), lambda i: (0,))],
        compiler_params=plt.CompilerParams(),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=declared),
        name="gather",
    )(ids, x)


def test_loads_and_stores_are_counted_under_their_masks_and_where_they_run(key):
    x, ids = jax.random.normal(key, (64, 128)), jnp.array([3, 60, 3, 0])
    (rows, twice), [call] = run_counted(gather, x, ids)
    np.testing.assert_array_equal(rows[:, :120], x[ids][:, :120])
    np.testing.assert_array_equal(twice[:120], 2 * x[3, :120])
    assert call.read == 4 * (4 * 4 + 4 * 120) + 4 * 128  # the id again in each turn
    assert +call.again == {0: 4 * 3 * 4, 1: 4 * 120}  # and a row that two programs take
    assert call.written == 4 * (4 * 120 + 128)


def test_an_access_outside_of_its_array_is_an_error():
    with pytest.raises(IndexError, match=r"gather, program \(1,\)"):
        run_counted(gather, jnp.ones((64, 128)), jnp.array([3, 64, 3, 0]))


@pytest.mark.slow
def test_block_scaled_matmul_reads_nothing_beyond_an_array_and_fp8_weights_once(key):
    keys = jax.random.split(key, 3)
    x, weights = (jax.random.normal(key, shape) for key, shape in zip(keys, ((3, 300), (300, 200)), strict=False))
    scales = jnp.exp(jax.random.normal(keys[2], (3, 200)))
    arguments = x.astype(jnp.bfloat16), weights.astype(jnp.float8_e4m3fn), scales
    interpreted = functools.partial(block_scaled_matmul, block=128, implementation="interpreted")
    made, (traced,) = run_counted(interpreted, *arguments)  # raises at an access outside of an array
    assert traced.read + traced.written == traced.declared.nbytes
    np.testing.assert_array_equal(made, interpreted(*arguments))


@pytest.mark.parametrize("name", ["S", "M", "D"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_the_minimum_is_that_of_the_decoding_bench(name, num_steps):
    subject = bytes_moved.SUBJECTS[name]
    _, shapes = round_of(subject, 8, num_steps, "xla")
    least = sum(least_of_all(subject.config, 8, num_steps, shapes))
    # There weights are float32, and 8 rows choose experts at random, so not quite all.
    assert least == pytest.approx(bytes_per_round(SHAPES[name], 8, num_steps, subject.slots) / 2, rel=0.06)


@pytest.mark.h100
@pytest.mark.parametrize("name, batch, num_steps, most", [("S", 1, 1, 1.1), ("D", 8, 3, 10)])
def test_every_weight_and_cache_is_seen_to_be_read(name, batch, num_steps, most):
    subject = dataclasses.replace(
        bytes_moved.SUBJECTS[name], config=dataclasses.replace(SHAPES[name], num_hidden_layers=2)
    )
    count, least = count_round(subject, batch, num_steps, "xla")
    assert count.unread < 0.01 * least
    assert least < count.nbytes < most * least
    assert count.nbytes - least + count.unread == pytest.approx(sum(group.excess for group in count.groups))


@pytest.mark.h100
def test_a_kernel_in_a_round_counts_what_it_declares(monkeypatch):
    """The norms of a stream alone, of two rows: the trunk's first and last, and those of the module's two inputs."""

    def norm(x, scale, *, implementation, **how):
        assert implementation == "xla"
        return rms_norm(x, scale, implementation="triton", **how)

    monkeypatch.setattr("mtpjax.models.layers.norm.rms_norm", norm)
    config = dataclasses.replace(SHAPES["S"], num_hidden_layers=2)
    count, _ = count_round(bytes_moved.Subject(config, 2048), 1, 1, "xla")
    assert count.kernels == {"rms_norm": 4 * 2 * (2 + 2 + 1) * 512}
    assert count.unread == 0


@pytest.mark.parametrize(("batch", "num_steps"), [(1, 0), (8, 3)])
@pytest.mark.slow
def test_the_prediction_counts_the_same_bytes(batch, num_steps):
    """Of a model without experts, of which this count assumes the most there can be."""
    subject = bytes_moved.SUBJECTS["S"]
    _, shapes = round_of(subject, batch, num_steps, "xla")
    least = sum(least_of_all(subject.config, batch, num_steps, shapes))
    settings = {"batch": batch, "context": subject.slots, "num_steps": num_steps}
    predicted = predict_round(subject.config, DEVICES["h100"], **settings)
    assert sum(part.nbytes for part in predicted.parts) == pytest.approx(least, rel=1e-3)
