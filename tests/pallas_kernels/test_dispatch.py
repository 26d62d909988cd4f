import functools
import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mtpjax.compat import make_mesh
from pallas_kernels import dispatch, measurements
from pallas_kernels.dispatch import choose
from pallas_kernels.op_cases import difference_from_xla, make_call
from pallas_kernels.verify_attention import choose_implementation as choose_attention

OFFERED = ("xla", "triton")
experts = importlib.import_module("pallas_kernels.grouped_matmul.op")
add_rms_norm_module = importlib.import_module("pallas_kernels.add_rms_norm")
matrices = importlib.import_module("pallas_kernels.block_scaled_matmul.op")


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
    monkeypatch.setattr(dispatch, "_agreed", {})
    monkeypatch.setattr(dispatch, "_compare", lambda op, shape, implementation: 0.0)
    dispatch._read_measurements.cache_clear()
    yield
    dispatch._read_measurements.cache_clear()


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


def test_a_time_of_contiguous_rows_says_nothing_about_pages(gpu):
    with dispatch.record_choices() as asked:
        assert chosen_attention(8, 4) == chosen_attention(8, None) == "xla"
    (op, paged), (_, contiguous) = asked
    assert {name for name in paged if paged[name] != contiguous[name]} == {"layout"}
    measurements.add(op, contiguous, {"xla": 2.0, "triton": 1.0})
    dispatch._read_measurements.cache_clear()
    assert (chosen_attention(8, 4), chosen_attention(8, None)) == ("xla", "triton")


@pytest.mark.parametrize("implementation", ["interpreted", pytest.param("triton", marks=pytest.mark.gpu)])
def test_the_comparison_of_attention_reads_pages(implementation):
    shape = {"batch": 64, "heads": 2, "queries": 4, "width": 32, "slots": 64}
    shape |= {"dtype": "float32", "cache": "float32", "reads": "all", "layout": "pages"}
    made = make_call("verify_attention", shape)
    assert made is not None
    run, arrays = made
    with dispatch.record_choices() as asked:
        jax.eval_shape(functools.partial(run, implementation="xla"), *arrays)
    assert asked == [("verify_attention", shape)]
    assert difference_from_xla("verify_attention", shape, implementation) <= 1


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
        with pytest.warns(UserWarning, match="kernel of op .bfloat16. gives other numbers than its reference"):
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


def test_an_op_without_a_comparison_of_its_own_is_compared_by_its_shape(gpu, monkeypatch):
    shape = {"rows": 4, "width": 24, "parts": 2, "dtype": "float32"}
    monkeypatch.setattr(dispatch, "_compare", difference_from_xla)
    monkeypatch.setattr(dispatch, "_fastest", lambda _, shape: "interpreted")
    offered = [*OFFERED, "interpreted"]
    assert choose("add_rms_norm", "auto", offered, shape) == "interpreted"
    # The same while the caller is traced.
    monkeypatch.setattr(dispatch, "_agreed", {})
    assert jax.jit(lambda: choose("add_rms_norm", "auto", offered, shape) == "interpreted")()
    # A kernel with other numbers: of another epsilon.
    monkeypatch.setattr(dispatch, "_agreed", {})
    right = add_rms_norm_module._add_rms_norm_triton
    wrong = lambda x, update, scale, eps, *rest: right(x, update, scale, eps + 1.0, *rest)
    monkeypatch.setattr(add_rms_norm_module, "_add_rms_norm_triton", wrong)
    with pytest.warns(UserWarning, match="interpreted kernel of add_rms_norm .float32. gives other numbers"):
        assert choose("add_rms_norm", "auto", offered, shape) == "xla"


CHECKS = {
    "experts": functools.partial(experts.difference_from_reference, is_fp8=False, inference=True),
    "experts' gradients": functools.partial(experts.difference_from_reference, is_fp8=False, inference=False),
    "fp8 experts": functools.partial(experts.difference_from_reference, is_fp8=True, inference=True),
    "matrix": functools.partial(matrices.difference_from_reference, weights_dtype=jnp.bfloat16, has_scales=False),
    "fp8 matrix": functools.partial(
        matrices.difference_from_reference, weights_dtype=jnp.float8_e4m3fn, has_scales=True
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("gradients")) for name in CHECKS]
)
def test_the_comparisons_accept_right_kernels_and_not_wrong_ones(name, monkeypatch):
    for dtype in (jnp.float32, jnp.bfloat16):
        for implementation in ("xla", "interpreted"):
            assert CHECKS[name](implementation, dtype=dtype) < 1
    # A reference with other weights stands for a kernel that reads the wrong ones.
    for module, reference in ((experts, "grouped_matmul_reference"), (matrices, "block_scaled_matmul_reference")):
        right = getattr(module, reference)
        monkeypatch.setattr(module, reference, lambda *args, right=right, **options: 1.1 * right(*args, **options))
    assert CHECKS[name]("xla", dtype=jnp.bfloat16) > 1


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
    with pytest.raises(ValueError, match="op has no implementation 'cudnn': it is one of auto, xla, triton"):
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
    with pytest.raises(ValueError, match="no Triton backend of Pallas"):
        choose("block_scaled_matmul", "triton", offered, {"rows": 4})


def test_without_the_triton_backend_everything_runs_by_xla():
    """In a process of its own, from which the backend's module is hidden."""
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp
import mtpjax
from pallas_kernels import add_rms_norm, rms_norm
print(rms_norm(jnp.ones((2, 8)), jnp.ones(8)).shape)
try:
    rms_norm(jnp.ones((2, 8)), jnp.ones(8), implementation="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "(2, 8)", done.stderr
    assert "has no Triton backend of Pallas, which the kernels need: use xla" in done.stdout
