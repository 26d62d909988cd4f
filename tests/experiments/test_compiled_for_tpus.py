"""Decoding, the engine's calls and an update, compiled for TPUs without any: none returns to the host on the way."""

import math
import re

import pytest

from experiments.training.train_table import compile_update
from mtpjax import compat
from mtpjax.evaluation.compiled_call import compile_call, stored_shapes
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


@pytest.mark.parametrize(("family", "sizes"), cells(("latent", ONE)))
def test_an_update_compiles_for_tpus(family, sizes):
    axes = {"fsdp" if name == "data" else name: size for name, size in sizes.items()}
    compiled = compile_update(small_config(family, **SIZES), "all", tpu_mesh(axes), num_tokens=256)
    check(compiled.text, compiled.arguments, compiled.temp, compiled.seconds)
