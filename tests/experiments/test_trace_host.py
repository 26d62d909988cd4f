import os
import sys
import types

import pytest

from experiments.gpu import bench_engine_gpu
from experiments.gpu.trace_host import ramp_times, stderr_lines, summarize_log
from experiments.serving.bench_engine import TracedCall
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


def test_the_calls_of_arrivals_are_separated_from_the_decoding_after_them():
    times = [
        (True, 0.0, 0.003, 0.010),
        (False, 0.004, 0.005, 0.012),
        (True, 0.010, 0.013, 0.02),
        (False, 0.02, 0.021, 0.03),
    ]
    calls = [
        TracedCall(types.SimpleNamespace(is_prefill=is_prefill, rows=()), 0, began, dispatched, completed)
        for is_prefill, began, dispatched, completed in times
    ]
    found = ramp_times(calls)
    assert found["prefills"] == 2
    assert found["ramp_ms"] == pytest.approx(20) and found["steady_ms"] == pytest.approx(10)
    assert found["prefill"]["dispatch_ms"] == pytest.approx(3) and found["prefill"]["to_next_ms"] == pytest.approx(7)
    assert found["advance"]["device_ms"] == pytest.approx(7) and found["steady"]["device_ms"] == pytest.approx(9)


def test_http_runs_by_the_chosen_parser_and_switch_interval_inside_the_context_only():
    h11_impl = pytest.importorskip("uvicorn.protocols.http.h11_impl")
    from mtpjax.serving import http_server

    before, interval = http_server.limited_protocol(1.0), sys.getswitchinterval()
    with bench_engine_gpu.http_form("h11", 0.5):
        assert issubclass(http_server.limited_protocol(1.0), h11_impl.H11Protocol)
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert http_server.limited_protocol(1.0).__mro__[2] is before.__mro__[2]
    assert sys.getswitchinterval() == interval
