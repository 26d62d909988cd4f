"""Every kernel, at every shape that it is for, lowers for both GPU platforms on a machine without a GPU."""

import functools

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.bench_kernels import fastest_table
from experiments.kernel_cases import cases
from mtpjax import compat
from pallas_kernels import dispatch

CASES = cases()
ONE_OF_EACH = list({case.op: case for case in reversed(CASES)}.values())  # `experiments/machine_code.py` has all


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_lowers_without_a_gpu_where_it_was_measured_to_be_fastest(case, monkeypatch):
    """As "auto", so that what a case says of its shape is what the op asks for."""
    cells = fastest_table([{"op": case.op, "shape": case.shape(), "seconds": {"xla": [2.0], "triton": [1.0]}}])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_measured", lambda: {jax.devices()[0].device_kind: cells})
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    lowered = compat.lower_for(functools.partial(case.run, implementation="auto"), *shapes)
    for platform in ("cuda", "rocm"):
        assert "custom_call @__gpu$xla.gpu.triton" in lowered[platform].as_text()


@pytest.mark.h100
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_kernel_compiles_for_an_h100(case):
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(functools.partial(case.run, implementation="triton")).lower(*shapes).compile()
    assert "custom-call" in compiled.as_text()
