import os

import pytest

from experiments.gpu import bench_engine_gpu
from experiments.gpu.trace_host import stderr_lines, summarize_log
from pallas_kernels import dispatch


def test_lines_of_xlas_log_are_counted_by_kind():
    with stderr_lines() as lines:
        os.write(2, b"update 12 of 0xab12\nupdate 7 of 0xff\nskip\n")
    found = summarize_log(lines)
    assert found["kinds"] == [("update N of N", 2), ("skip", 1)]
    assert (found["lines"], found["last"][0]) == (3, "update 12 of 0xab12")


def test_an_op_runs_its_kernel_inside_the_context_only():
    rules = dict(dispatch._process.kernel_by_rule)
    with bench_engine_gpu.kernels_of("verify_attention") as implementation:
        assert implementation == "auto" and dispatch._process.kernel_by_rule["verify_attention"]({})
    assert rules == dispatch._process.kernel_by_rule
    with bench_engine_gpu.kernels_of("triton") as implementation:
        assert implementation == "triton" and rules == dispatch._process.kernel_by_rule


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_engine_gpu.main(["--quick", "--implementation", "verify_atention"])
    assert "verify_atention: neither an implementation nor an op" in capsys.readouterr().err
