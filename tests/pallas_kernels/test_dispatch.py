import json

import jax
import pytest

from mtpjax.compat import make_mesh
from pallas_kernels import dispatch
from pallas_kernels.dispatch import choose

OFFERED = ("xla", "triton")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which an op was measured at two shapes."""

    class Device:
        device_kind = "a GPU"

    def cell(rows, **milliseconds):
        return {"shape": {"rows": rows, "dtype": "bfloat16"}, "milliseconds": milliseconds}

    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"a GPU": {"op": [cell(4, xla=2.0, triton=1.0), cell(64, xla=1.0, triton=2.0)]}}))
    monkeypatch.setattr(dispatch, "MEASUREMENTS_FILE", path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
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
