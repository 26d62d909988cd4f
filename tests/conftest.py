"""Eight CPU devices, strict flags, the `key` fixture, and when a marked test is skipped."""

import os

# Before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from mtpjax import compat

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def key():
    return jax.random.key(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    if item.get_closest_marker("h100"):
        try:
            compat.h100_devices()
        except RuntimeError as error:
            pytest.skip(str(error))
