"""Eight CPU devices, strict flags, the `key` fixture, and when a marked test is skipped."""

import os

# Before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools

import jax
import pytest

from experiments import check_equality, machine_code
from mtpjax import MTPModel, compat

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module")
def quick_compile():
    """Leaves out LLVM's optimisations, most of a small program's compile time. What XLA itself does stays the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Lets go of a module's programs. Each takes tens of memory mappings, and Linux gives a process 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def small():
    """`small(attention, rig, **config changes)` -> model and parameters, see `experiments/check_equality.py`."""

    @functools.cache
    def make(attention="grouped", rig="random", **changes):
        model = MTPModel(check_equality.small_config(attention, **changes))
        return model, check_equality.rigged_params(model, attention, rig)

    return make


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    if item.get_closest_marker("triton") and machine_code.find_python() is None:
        pytest.skip("no triton here, and MTPJAX_TRITON_PYTHON names no interpreter that has it")
    if item.get_closest_marker("h100"):
        try:
            compat.h100_devices()
        except RuntimeError as error:
            pytest.skip(str(error))
