"""Traces what the host does in a call of the engine, and which addresses make XLA update its CUDA graph.

    python -m experiments.gpu.trace_host [--model 1B] [--output FILE]
    XLA_FLAGS=--xla_gpu_command_buffer_update_mode=SKIP_PROFILED XLA_PYTHON_CLIENT_ALLOCATOR=vmm \\
        python -m experiments.gpu.trace_host                     # addresses that XLA keeps
    TF_CPP_VMODULE=command_buffer_thunk=3 TF_CPP_MIN_LOG_LEVEL=0 \\
        python -m experiments.gpu.trace_host --new-tokens 16     # XLA names what it updates
    python -m experiments.gpu.trace_host --quick                 # a toy, on any machine

    python -m experiments.gpu.trace_host --requests 64           # what the calls of arriving requests wait for

A model with constructed weights processes one request, or several at once, with and without drafts. The calls are
measured in two forms: unchanged, and with host arrays replaced by arrays that stay on the device, so that a call
transfers nothing and these addresses never change. Each form runs three times: first to compile and record graphs,
then to measure the times as in `experiments.serving.bench_engine`, and then under `jax.profiler`, whose events are
summed by name. A profile slows the calls down, so its sums show shares, not times. Results are written after every
form.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.gpu import gpu_models
from experiments.gpu.bench_engine_gpu import compile_plain, make_engine, make_requests
from experiments.serving.bench_engine import Trace, TracedCall, host_times, run_load
from mtpjax.serving.engine import Engine
from mtpjax.serving.program_set import PendingCall
from mtpjax.serving.request import Request

RESULT = RESULTS / "trace_host.json"
KEPT_NAMES = 60  # maximum number of events, and of lines of XLA's log
KEPT_CALLS = 60  # number of a load's first calls to keep
KEPT_LINES = 40  # lines of XLA's log that are kept unchanged
MAX_LINE = 400  # characters


@contextlib.contextmanager
def inputs_on_device(engine: Engine) -> Iterator[None]:
    """Passes equal host arrays to decoding calls as the same array on the device."""
    session = engine._executor.session
    kept: dict[Any, jax.Array] = {}
    run = session.run

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, (np.ndarray, np.generic)):
            return leaf
        key = (leaf.tobytes(), leaf.shape, leaf.dtype.str)
        if key not in kept:
            kept[key] = jax.device_put(leaf)
        return kept[key]

    def placed_run(call: PendingCall) -> Any:
        return run(call._replace(arrays=jax.tree.map(place, call.arrays)) if call.key.kind == "advance" else call)

    session.run = placed_run
    try:
        yield
    finally:
        del session.run  # restores the class's own method


@contextlib.contextmanager
def stderr_lines() -> Iterator[list[str]]:
    """Collects what the process writes to stderr, XLA included. The list is filled when the context ends."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def summarize_log(lines: list[str]) -> dict[str, Any]:
    """Counts lines that differ only in numbers and addresses, and keeps the last ones unchanged."""
    kinds = collections.Counter(re.sub(r"0x[0-9a-f]+|\d+", "N", line)[:MAX_LINE] for line in lines)
    return {
        "lines": len(lines),
        "kinds": kinds.most_common(KEPT_NAMES),
        "last": [line[:MAX_LINE] for line in lines[-KEPT_LINES:]],
    }


def describe_calls(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """Returns the kind and rows of the first calls of a load, and their milliseconds since the first call began."""
    begin = calls[0].began
    return [
        {
            "kind": "prefill" if traced.call.is_prefill else "advance",
            "rows": sum(sequence is not None for sequence in traced.call.rows),
            "waiting": traced.num_waiting,
            **{name: round(1e3 * (getattr(traced, name) - begin), 3) for name in ("began", "dispatched", "completed")},
            "read": round(1e3 * traced.read_seconds, 3),
        }
        for traced in calls[:KEPT_CALLS]
    ]


def ramp_times(calls: Sequence[TracedCall]) -> dict[str, Any]:
    """Summarizes the calls while requests arrive, up to the last prefill, and the decoding calls after it."""
    last = max(index for index, traced in enumerate(calls) if traced.call.is_prefill)
    ramp, steady = calls[: last + 1], calls[last + 1 :]

    def medians(some: Sequence[TracedCall]) -> dict[str, float]:
        following = {id(one): other for one, other in itertools.pairwise(calls)}
        values = {
            "dispatch_ms": [one.dispatched - one.began for one in some],
            "to_next_ms": [following[id(one)].began - one.began for one in some if id(one) in following],
            "device_ms": [one.completed - one.dispatched for one in some],
        }
        return {name: 1e3 * float(np.median(each)) for name, each in values.items() if each}

    return {
        "ramp_ms": 1e3 * (ramp[-1].completed - ramp[0].began),
        "steady_ms": 1e3 * (steady[-1].completed - ramp[-1].completed) if steady else 0.0,
        "prefills": sum(traced.call.is_prefill for traced in ramp),
        "prefill": medians([traced for traced in ramp if traced.call.is_prefill]),
        "advance": medians([traced for traced in ramp if not traced.call.is_prefill]),
        "steady": medians(steady),
    }


def profile(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """Runs requests under the profiler.

    Args:
        engine: the engine.
        requests: the requests, all at once.

    Returns:
        For each kind of thread ("host" or the device's stream), the number and the total milliseconds of events by
        name.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run_load(engine, requests)
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    times: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for plane in data.planes:
        on_device = plane.name.startswith("/device")
        for line in plane.lines:
            where = line.name if on_device else "host"
            for event in line.events:
                counts[where][event.name] += 1
                times[where][event.name] += event.duration_ns / 1e6
    return {
        where: {
            "events": counts[where].total(),
            "ms": times[where].total(),
            "names": [(name, counts[where][name], round(ms, 4)) for name, ms in times[where].most_common(KEPT_NAMES)],
        }
        for where in counts
    }


def measure(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """Measures the calls of requests that arrive at once."""
    run_load(engine, requests)
    with Trace(engine) as trace:
        run_load(engine, requests)
    found: dict[str, Any] = {"host": host_times(trace.calls), "ramp": ramp_times(trace.calls)}
    found["calls"] = describe_calls(trace.calls)
    if "TF_CPP_VMODULE" in os.environ:
        with stderr_lines() as lines:
            run_load(engine, requests)
        return {**found, "log": summarize_log(lines)}
    try:
        return {**found, "profile": profile(engine, requests)}
    except Exception as reason:  # without the profiler's library, the times are still measured
        return {**found, "profile_failed": f"{type(reason).__name__}: {reason}"}


def main(argv: list[str] | None = None) -> int:
    """Measures one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=gpu_models.SHAPES, default="1B", help="(default: %(default)s)")
    parser.add_argument("--num-steps", type=int, default=2, help="draft levels (default: %(default)s)")
    parser.add_argument("--block-scale", type=float, default=0.0031552670417893266, help="as in `bench_engine_gpu`")
    parser.add_argument("--rounds-per-call", type=int, default=2, help="rounds per call (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=192, help="new tokens per request (default: %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=1, help="number of simultaneous requests (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a toy, on any machine: shows that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    if options.quick:
        options.model, options.new_tokens = "toy", 32
    output = options.output or (None if options.quick else RESULT)
    subject = gpu_models.constructed(
        options.model, num_steps=options.num_steps, accept_length=1, scale=options.block_scale
    )
    counts = [options.requests]
    engine = make_engine(subject, counts, options.new_tokens, rounds_per_call=options.rounds_per_call)
    begin = time.perf_counter()
    compile_plain(engine, counts)
    found: dict[str, Any] = about(
        argv,
        device=jax.devices()[0].device_kind,
        environment={name: value for name, value in os.environ.items() if name.startswith(("XLA_", "TF_CPP_"))},
        model=subject.name,
        requests=options.requests,
        rounds_per_call=options.rounds_per_call,
        compile_seconds=time.perf_counter() - begin,
        cells=[],
    )
    engine.start()
    requests = make_requests(subject, options.requests, options.new_tokens)
    console = Console(highlight=False)
    for form, context in {"unchanged": contextlib.nullcontext, "inputs on the device": inputs_on_device}.items():
        for speculative in (True, False):
            with context(engine):
                cell = measure(engine, [dataclasses.replace(each, speculative=speculative) for each in requests])
            found["cells"].append({"form": form, "drafts": speculative, **cell})
            write(output, found)
            host = {name: round(value, 3) for name, value in cell["host"].items() if name.endswith("_ms")}
            console.print(f"{form}, {'drafts' if speculative else 'plain'}: {json.dumps(host)}", soft_wrap=True)
            console.print(f"  arrival: {json.dumps(cell['ramp'])}", soft_wrap=True)
    assert engine.close(timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
