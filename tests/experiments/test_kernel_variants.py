import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from experiments.gpu import kernel_variants
from experiments.gpu.kernel_variants import VARIANTS, Sizes
from mtpjax import compat

SIZES = Sizes(D=512, qkv=640, F=512, num_layers=1)


def arguments(rows, sharding=None):
    """Shapes of the stream, the layers and the counters of `run_layers`."""

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    layer = {name: array(*shape) for name, shape in SIZES.shapes().items()} | {"scale": array(SIZES.D)}
    return array(rows, SIZES.D), [layer] * SIZES.num_layers, array(SIZES.D, dtype=jnp.int32)


@pytest.mark.h100
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_for_an_h100(name):
    mesh, variant = compat.make_mesh({"data": 1}, compat.h100_devices()), VARIANTS[name]
    jax.clear_caches()
    with use_abstract_mesh(mesh.abstract_mesh), contextlib.ExitStack() as stack:
        for patch in variant.patches():
            stack.enter_context(patch)

        def run(*args):
            return kernel_variants.run_layers(*args, variant=variant, implementation="triton")

        args = arguments(variant.rows, NamedSharding(mesh, PartitionSpec()))
        text = jax.jit(run).lower(*args).compile().as_text()
    jax.clear_caches()
    assert text.count("__gpu$xla.gpu.triton") == 6  # qkv, o, norm, gate and up, down, norm
