"""Every kernel, at every shape that it is for, lowers for both GPU platforms on a machine without a GPU."""

import functools

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.kernel_cases import cases
from mtpjax import compat

CASES = cases()
ONE_OF_EACH = list({case.op: case for case in CASES}.values())  # `experiments/machine_code.py` compiles them all


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_lowers_without_a_gpu(case):
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    lowered = compat.lower_for(functools.partial(case.run, implementation="triton"), *shapes)
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
