"""How fast are the kernels on this GPU, beside XLA, beside others' forms, and beside the memory's limit?

    python -m experiments.bench_kernels                       # all cases
    python -m experiments.bench_kernels --op verify_attention --rounds 5

Every case of `experiments/kernel_cases.py` is first compared with its reference on random data, then timed: the kernel,
XLA and peers in turn, round after round. One call runs a case on several copies of its inputs, more than the cache
holds, so that neither the cache nor the way to the device is measured. The limit of a case is the larger of its bytes
over the bandwidth of a large copy and its operations over the rate of a large bfloat16 product, both measured here.

Writes `experiments/results/bench_kernels.json`, and with `--use` what was fastest into `pallas_kernels/measured.json`,
from where `implementation="auto"` takes it. Exit code 1 where a kernel is wrong, 3 where there is no GPU.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.kernel_cases import Case, cases
from mtpjax.tables import narrow_table
from pallas_kernels.dispatch import MEASURED

RESULT = pathlib.Path(__file__).parent / "results" / "bench_kernels.json"
AT_ONCE = 256 * 2**20  # bytes of inputs that one call goes through, several times a GPU's cache
MOST_COPIES = 16
TOLERANCE = 2e-2  # relative error of bfloat16 results; with float32 inputs and sums it is around 1e-6


def seconds(call: Callable[[], Any], least: float = 0.05) -> float:
    """Of one call, among as many in a row as take `least` seconds."""
    jax.block_until_ready(call())
    count = 1
    while True:
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        took = time.perf_counter() - begin
        if took > least:
            return took / count
        count *= 2


def limits() -> tuple[float, float]:
    """Bytes a second of a 4 GB copy, read and written, and operations a second of a bfloat16 product."""
    length, width = 2**30, 8192
    numbers = jax.random.normal(jax.random.key(0), (length,), jnp.float32)
    matrix = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16)
    copy = functools.partial(jax.jit(lambda x: x + 1), numbers)
    product = functools.partial(jax.jit(jnp.matmul), matrix, matrix)
    of_copy, of_product = (min(seconds(call) for _ in range(5)) for call in (copy, product))
    return 2 * numbers.nbytes / of_copy, 2 * width**3 / of_product


def relative_error(found: Any, expected: Any) -> float:
    """The largest `|found - expected| / |expected|` (Euclidean) of two results' arrays; NaN counts as infinite."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            continue
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        error = float(jnp.linalg.norm(one - other) / jnp.maximum(jnp.linalg.norm(other), 1e-30))
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Error against the reference, and seconds by form: all of each round."""
    kernel, plain = (functools.partial(case.run, implementation=name) for name in ("triton", "xla"))
    forms: dict[str, Callable] = {"triton": kernel, "xla": plain, **case.peers}
    first = jax.jit(case.make)(jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    copies = int(np.clip(AT_ONCE // max(size, 1), 1, MOST_COPIES))
    inputs = [first, *(jax.jit(case.make)(jax.random.key(copy)) for copy in range(1, copies))]
    error = relative_error(jax.jit(kernel)(*first), jax.jit(plain)(*first))
    calls, failed = {}, {}
    for name, form in forms.items():
        call = jax.jit(lambda inputs, form=form: [form(*each) for each in inputs])
        try:
            jax.block_until_ready(call(inputs))
            calls[name] = functools.partial(call, inputs)
        except Exception as reason:  # a peer may lack the shape, the library, or the memory
            failed[name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 else reversed(calls):
            took[name].append(seconds(calls[name]) / copies)
    return {"copies": copies, "error": error, "seconds": took, "failed": failed}


def fastest_table(rows: list[Mapping]) -> dict[str, list]:
    """Op -> cells, as `pallas_kernels.dispatch` reads them."""
    table: dict[str, list] = {}
    for row in rows:
        milliseconds = {name: 1e3 * float(np.median(row["seconds"][name])) for name in ("xla", "triton")}
        table.setdefault(row["op"], []).append({"sizes": dict(row["sizes"]), "milliseconds": milliseconds})
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", default=[], help="only these ops")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each form (default: %(default)s)")
    parser.add_argument("--use", action="store_true", help="let implementation='auto' go by these figures")
    parser.add_argument("--output", type=pathlib.Path, default=RESULT)
    options = parser.parse_args(argv)
    known = sorted({case.op for case in cases()})
    if not set(options.op) <= set(known):
        parser.error(f"--op {' '.join(options.op)}: the ops are {', '.join(known)}")
    chosen = [case for case in cases() if not options.op or case.op in options.op]
    if jax.default_backend() != "gpu":
        print("the kernels are timed on a GPU, and jax has none here", file=sys.stderr)
        return 3
    console = Console(highlight=False)
    device = jax.devices()[0].device_kind
    bandwidth, rate = limits()
    console.print(f"{device}: {bandwidth / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s")
    rows, is_right = [], True
    table = narrow_table()
    for heading in ("case", "us", "of the limit", "XLA / kernel", "best peer / kernel", "error"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for number, case in enumerate(chosen, start=1):
        row = {"op": case.op, "name": case.name, "sizes": dict(case.sizes), "bytes": case.bytes}
        row |= {"operations": case.operations, **measure(case, options.rounds)}
        rows.append(row)
        if "triton" not in row["seconds"]:
            is_right = False
            console.print(f"{number}/{len(chosen)} {case}: {row['failed']['triton']}")
            continue
        median = {name: float(np.median(times)) for name, times in row["seconds"].items()}
        row["limit"] = max(case.bytes / bandwidth, case.operations / rate)
        is_right &= row["error"] < TOLERANCE
        peers = [taken for name, taken in median.items() if name not in ("triton", "xla")]
        of_kernel = {name: taken / median["triton"] for name, taken in median.items()}
        beside = (f"{of_kernel['xla']:.2f}" if "xla" in median else "-",)
        beside += (f"{min(peers) / median['triton']:.2f}" if peers else "-", f"{row['error']:.1e}")
        share = row["limit"] / median["triton"]
        table.add_row(str(case), f"{1e6 * median['triton']:.1f}", f"{share:.0%}", *beside)
        console.print(f"{number}/{len(chosen)} {case}: {share:.0%} of the limit, {beside[0]} x XLA", soft_wrap=True)
        jax.clear_caches()
    console.print(table)
    about = {"date": datetime.date.today().isoformat(), "device": device, "jax": jax.__version__}
    about |= {"argv": sys.argv[1:], "bytes_a_second": bandwidth, "operations_a_second": rate, "cases": rows}
    options.output.write_text(json.dumps(about, indent=1) + "\n")
    if options.use:
        timed = [row for row in rows if {"xla", "triton"} <= row["seconds"].keys()]
        measured = json.loads(MEASURED.read_text())
        measured[device] = {**measured.get(device, {}), **fastest_table(timed)}
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    if not is_right:
        console.print(f"a kernel did not run, or its error is above {TOLERANCE}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
