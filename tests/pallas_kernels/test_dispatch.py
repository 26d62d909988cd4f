import functools
import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mtpjax.compat import make_mesh
from mtpjax.evaluation.op_cases import CASES
from pallas_kernels import dispatch, measurements
from pallas_kernels.case import difference_from_xla
from pallas_kernels.dispatch import choose
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.verify_attention import choose_implementation as choose_attention

OFFERED = ("xla", "triton")
experts = importlib.import_module("pallas_kernels.grouped_matmul")
add_rms_norm_module = importlib.import_module("pallas_kernels.add_rms_norm")


def forget(monkeypatch):
    """Gives the test a process that has read and compared nothing yet."""
    monkeypatch.setattr(dispatch, "_process", dispatch._Process())


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which an op was measured at two shapes."""

    class Device:
        device_kind = "a GPU"

    def cell(rows, **milliseconds):
        return {"shape": {"rows": rows, "dtype": "bfloat16"}, "milliseconds": milliseconds}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measurements.path()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"op": [cell(4, xla=2.0, triton=1.0), cell(64, xla=1.0, triton=2.0)]}))
    forget(monkeypatch)
    monkeypatch.setattr("pallas_kernels.dispatch.difference_from_xla", lambda *_: 0.0)  # not run here


@pytest.mark.parametrize("rows, expected", [(4, "triton"), (8, "triton"), (64, "xla"), (33, "xla")])
def test_auto_is_what_the_nearest_measurement_says(gpu, rows, expected):
    assert choose("op", "auto", OFFERED, {"rows": rows, "dtype": "bfloat16"}) == expected


def test_auto_is_the_reference_where_nothing_near_was_measured(gpu):
    assert choose("op", "auto", OFFERED, {"rows": 1, "dtype": "bfloat16"}) == "xla"
    assert choose("op", "auto", OFFERED, {"rows": 4, "dtype": "float32"}) == "xla"
    assert choose("another", "auto", OFFERED, {"rows": 4, "dtype": "bfloat16"}) == "xla"
    assert choose("op", "auto", OFFERED, {"rows": 4, "dtype": "bfloat16", "width": 8}) == "xla"


def test_without_measurements_experts_and_fp8_weights_run_their_kernels(gpu):
    assert choose("grouped_matmul", "auto", OFFERED, {"tokens": 4, "dtype": "bfloat16"}) == "triton"
    for weights, expected in (("float8_e4m3fn", "triton"), ("bfloat16", "xla")):
        assert choose("block_scaled_matmul", "auto", OFFERED, {"rows": 4, "weights": weights}) == expected


def chosen_attention(rows, pages_per_row, *, is_windowed=False, size=16):
    """The implementation that "auto" chooses for a draft of two tokens, over pages or contiguous rows of 64 slots."""
    entries, slots = (rows, 64) if pages_per_row is None else (rows * pages_per_row, size)
    q, keys = jnp.zeros((rows, 2, 2, 2, 32), jnp.bfloat16), jnp.zeros((entries, 2, slots, 32), jnp.bfloat16)
    mask = jnp.ones((rows, 2, 2), bool)
    return choose_attention(q, keys, mask, "auto", is_windowed=is_windowed, pages_per_row=pages_per_row)


def test_attention_over_the_pages_of_many_rows_runs_its_kernel(gpu):
    rows = dispatch.MIN_PAGED_ROWS
    assert [chosen_attention(count, 4) for count in (1, rows - 1, rows, 64)] == ["xla", "xla", "triton", "triton"]
    # Not where XLA copies nothing, where windows were not measured, or where the kernel does not take the pages.
    assert chosen_attention(64, None) == chosen_attention(64, 4, is_windowed=True) == "xla"
    assert chosen_attention(64, 4, size=8) == "xla"


def test_a_time_of_contiguous_rows_says_nothing_about_pages(gpu, monkeypatch):
    with dispatch.record_choices() as asked:
        assert chosen_attention(8, 4) == chosen_attention(8, None) == "xla"
    (op, paged), (_, contiguous) = asked
    assert {name for name in paged if paged[name] != contiguous[name]} == {"layout"}
    measurements.add(op, contiguous, {"xla": 2.0, "triton": 1.0})
    forget(monkeypatch)
    assert (chosen_attention(8, 4), chosen_attention(8, None)) == ("xla", "triton")


@pytest.mark.parametrize("implementation", ["interpreted", pytest.param("triton", marks=pytest.mark.gpu)])
def test_the_comparison_of_attention_reads_pages(implementation):
    shape = {"batch": 64, "heads": 2, "queries": 4, "width": 32, "slots": 64}
    shape |= {"dtype": "float32", "cache": "float32", "reads": "all", "layout": "pages"}
    run, arrays = CASES["verify_attention"](shape)
    with dispatch.record_choices() as asked:
        jax.eval_shape(functools.partial(run, implementation="xla"), *arrays)
    assert asked == [("verify_attention", shape)]
    assert difference_from_xla(CASES["verify_attention"], shape, implementation) <= 1


@pytest.mark.parametrize("difference", [0.5, 2.0, float("nan")])
def test_auto_compares_a_kernel_once_and_leaves_it_if_it_is_wrong(gpu, difference):
    compared = []

    def check(implementation):
        compared.append(implementation)
        return difference

    def ask():
        return choose("op", "auto", OFFERED, {"rows": 4, "dtype": "bfloat16"}, check=check)

    if difference < 1:
        assert [ask(), ask()] == ["triton", "triton"]
    else:
        with pytest.warns(UserWarning, match="kernel of op .bfloat16. differs from its reference"):
            assert ask() == "xla"
        assert ask() == "xla"
    assert compared == ["triton"]


def test_auto_leaves_a_kernel_that_fails_also_while_it_is_traced(gpu):
    def check(implementation):
        raise RuntimeError("no such instruction\nand more")

    def traced(x):
        return x + (choose("op", "auto", OFFERED, {"rows": 4, "dtype": "bfloat16"}, check=check) == "xla")

    with pytest.warns(UserWarning, match="fails: no such instruction; 'auto' uses xla"):
        assert jax.eval_shape(traced, 1).shape == ()


def test_auto_compares_a_kernel_with_xla_at_the_widths_of_the_call(gpu, monkeypatch):
    x, scale = jnp.ones((4, 24)), jnp.ones(24)
    update = PartialSums(jnp.ones((2, 4, 24)), jnp.dtype("float32"))
    monkeypatch.setattr(dispatch, "difference_from_xla", difference_from_xla)
    monkeypatch.setattr(dispatch, "_fastest", lambda _, shape: "xla" if shape["rows"] != 4 else "triton")
    # Off a GPU the interpreter stands for the kernel.
    right, ran = add_rms_norm_module._add_rms_norm_triton, []

    def run(x, update, scale, eps, zero_centred, interpret):
        ran.append(x.shape)
        return right(x, update, scale, eps + shift, zero_centred, True)

    monkeypatch.setattr(add_rms_norm_module, "_add_rms_norm_triton", run)
    shift = 0.0
    add_rms_norm_module.add_rms_norm(x, update, scale)
    # The same while the caller is traced.
    forget(monkeypatch)
    jax.jit(add_rms_norm_module.add_rms_norm)(x, update, scale)
    assert ran == [(3, 24), (4, 24)] * 2
    # A kernel with other numbers: of another epsilon.
    forget(monkeypatch)
    shift = 1.0
    with pytest.warns(UserWarning, match="triton kernel of add_rms_norm .float32. differs from"):
        add_rms_norm_module.add_rms_norm(x, update, scale)
    assert ran[4:] == [(3, 24)]


CHECKS = {
    "experts": {"is_fp8": False, "inference": True},
    "experts' gradients": {"is_fp8": False, "inference": False},
    "fp8 experts": {"is_fp8": True, "inference": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("gradients")) for name in CHECKS]
)
def test_the_comparison_of_experts_accepts_right_kernels_and_not_wrong_ones(name, monkeypatch):
    check = functools.partial(experts.difference_from_reference, **CHECKS[name])
    for dtype in (jnp.float32, jnp.bfloat16):
        for implementation in ("xla", "interpreted"):
            assert check(implementation, dtype=dtype) < 1
    # A reference with other weights stands for a kernel that reads the wrong ones.
    right = experts.grouped_matmul_reference
    monkeypatch.setattr(experts, "grouped_matmul_reference", lambda *args, **options: 1.1 * right(*args, **options))
    assert check("xla", dtype=jnp.bfloat16) > 1


SHAPES = {
    "block_scaled_matmul": {"rows": 4, "inputs": 256, "outputs": 256, "weights": "float8_e4m3fn"},
    "gated_matmul": {"rows": 4, "inputs": 256, "outputs": 256, "weights": "float8_e4m3fn"},
    "prefill_attention": {"batch": 1, "heads": 2, "queries": 40, "width": 32, "slots": 64, "reads": "a window"},
    # Also compares gradients, for two ranges per query.
    "range_attention": {"batch": 1, "heads": 1, "group": 2, "queries": 40, "keys": 50, "width": 16, "values": 16}
    | {"ranges": 2},
}


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_comparison_of_an_op_accepts_its_kernel_and_not_other_numbers(op, dtype):
    shape = SHAPES[op] | {"dtype": dtype, "cache": dtype}
    assert difference_from_xla(CASES[op], shape, "interpreted") <= 1

    def make_wrong(shape):
        run, arrays = CASES[op](shape)
        factor = {"xla": 1.0, "interpreted": 1.1}

        def wrong(*arrays, implementation):
            return jax.tree.map(lambda out: out * factor[implementation], run(*arrays, implementation="xla"))

        return wrong, arrays

    assert difference_from_xla(make_wrong, shape, "interpreted") > 1


def test_auto_avoids_a_kernel_that_does_not_support_the_arguments_and_naming_it_raises(gpu):
    shape = {"rows": 4, "dtype": "bfloat16"}
    chosen = [choose("op", name, OFFERED, shape, unsupported_reason="too wide") for name in ("auto", "xla")]
    assert chosen == ["xla", "xla"]
    for name in ("triton", "interpreted"):
        with pytest.raises(ValueError, match="too wide"):
            choose("op", name, OFFERED, shape, unsupported_reason="too wide")


def test_auto_is_the_reference_on_a_cpu():
    assert choose("op", "auto", OFFERED, {"rows": 4}) == "xla"


def test_what_is_asked_for_is_taken(gpu):
    assert [choose("op", name, OFFERED, {"rows": 4}) for name in ("xla", "triton", "interpreted")] == [
        "xla",
        "triton",
        "interpreted",
    ]


def test_an_implementation_that_an_op_does_not_have_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="op has no implementation 'cudnn'; supported: auto, xla, triton"):
        choose("op", "cudnn", OFFERED, {"rows": 4})


def test_a_mesh_that_is_partitioned_automatically_takes_the_reference():
    def inside(x):
        found.append(choose("op", "triton", OFFERED, {"rows": 4}))
        return x

    found = []
    mesh = make_mesh({"expert": 2})
    with jax.set_mesh(mesh):
        jax.jit(inside)(1)
        everywhere = jax.sharding.PartitionSpec()
        jax.jit(jax.shard_map(inside, in_specs=everywhere, out_specs=everywhere))(jax.numpy.ones(2))
    assert found == ["xla", "triton"]


def test_without_the_triton_backend_fp8_weights_run_by_jax_triton_where_it_is_offered(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "triton", None)
    offered = [*OFFERED, "jax_triton"]
    for weights, expected in (("float8_e4m3fn", "jax_triton"), ("bfloat16", "xla")):
        shape = {"rows": 4, "weights": weights}
        assert choose("block_scaled_matmul", "auto", offered, shape) == expected
        assert choose("block_scaled_matmul", "auto", OFFERED, shape) == "xla"
    with pytest.raises(ValueError, match="Triton backend, which the kernels need"):
        choose("block_scaled_matmul", "triton", offered, {"rows": 4})


def test_without_the_triton_backend_everything_runs_by_xla():
    """In a process of its own, from which the backend's module is hidden."""
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp
import mtpjax
from pallas_kernels.rms_norm import rms_norm
print(rms_norm(jnp.ones((2, 8)), jnp.ones(8)).shape)
try:
    rms_norm(jnp.ones((2, 8)), jnp.ones(8), implementation="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "(2, 8)", done.stderr
    assert "lacks Pallas's Triton backend, which the kernels need: use xla" in done.stdout
