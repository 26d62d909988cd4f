"""Eight CPU devices, quick compiling, strict flags, shared fixtures, and when a marked test is skipped."""

import functools
import gc
import importlib.metadata
import importlib.util
import os

# Before jax is imported, and for processes that tests start. Nearly all of a test's time is compiling small programs:
# LLVM leaves out its optimisations, in one thread, for the other cores have tests of their own. What XLA itself does
# stays the same. Flags in the environment come last, so they win.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # a missing path may be the name of a repository: no test asks for it over a network
# Commands that tests start must not write compiled programs into the user's folders.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1",
        *["--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"]
        * (os.environ["JAX_PLATFORMS"] == "cpu"),
        # Later ones have no other emitters. libtpu reads these flags too, and ends the process at one it does not know.
        *["--xla_cpu_use_fusion_emitters=false"]
        * (importlib.metadata.version("jaxlib").startswith("0.10.") and not importlib.util.find_spec("libtpu")),
        os.environ.get("XLA_FLAGS", ""),
    ]
)

import jax
import pytest

from mtpjax import MTPModel, compat
from mtpjax.io.checkpoint import save_model
from tests.helpers import small_models

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Lets go of a module's programs. Each takes tens of memory mappings, and Linux gives a process 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def small():
    """`small(attention, draft_quality, **changes)` -> model and parameters; see `tests.helpers.small_models`."""

    @functools.cache
    def make(attention="grouped", draft_quality="random", **changes):
        model = MTPModel(small_models.small_config(attention, **changes))
        return model, small_models.constructed_params(model, attention, draft_quality)

    return make


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory):
    """A model of bytes on disk, whose drafts are right now and then."""
    model, params = small("grouped", "mixed", vocab_size=256)
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    save_model(path, model, params)
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report):
    """A test file that cannot be imported is an error: pytest's search for doctests would skip it without a word."""
    if report.skipped and report.nodeid.startswith("tests/") and "unable to import module" in str(report.longrepr):
        report.outcome = "failed"


def pytest_collection_finish(session):
    """What was imported lives on: to look through it for garbage again and again takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU here")
    for marker, devices in (("h100", compat.h100_devices), ("tpu", compat.tpu_devices)):
        if item.get_closest_marker(marker):
            try:
                devices()
            except RuntimeError as error:
                pytest.skip(str(error))
