"""When a test that compiles kernels with Triton is skipped."""

import pytest

from experiments.kernels import machine_code


def pytest_runtest_setup(item):
    if item.get_closest_marker("triton") and machine_code.find_python() is None:
        pytest.skip("no triton here, and MTPJAX_TRITON_PYTHON names no interpreter that has it")
