"""Times the kernels on this GPU, compared with XLA, other implementations and the memory limit.

    python -m experiments.kernels.bench_kernels                       # all cases
    python -m experiments.kernels.bench_kernels --op verify_attention --rounds 5
    python -m experiments.kernels.bench_kernels --op range_attention --predict h100    # computes limits, without a GPU

Every case in `experiments/kernels/kernel_cases.py` is first compared with the XLA form on random data. Then the kernel,
the XLA form and the peers are timed in rotation. One call runs a case on several copies of its inputs, more than fit
into the cache, so that neither the cache nor the transfer to the device affects the time. The limit of a case is the
larger of the time for its bytes at the bandwidth of a large copy and the time for its operations at the rate of a large
bfloat16 matmul; both rates are measured first.

Rewrites `experiments/results/bench_kernels.json` after every case. With `--use`, also writes the fastest forms of the
cases with correct results to the user's file of measurements (`pallas_kernels/measurements.py`), which
`implementation="auto"` reads. `mtpjax tune` measures the shapes of one model. The exit code is 1 if a kernel is wrong
or did not run, and 3 if there is no GPU.
"""

import argparse
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.kernels.kernel_cases import Case, cases
from mtpjax.console import narrow_table
from mtpjax.evaluation.roofline import DEVICES, Device
from mtpjax.evaluation.tune import seconds_per_call
from pallas_kernels import measurements

RESULT = RESULTS / "bench_kernels.json"
AT_ONCE = 256 * 2**20  # bytes of inputs that one call reads; several times a GPU's cache
MOST_COPIES = 64
seconds = functools.partial(seconds_per_call, least=0.05)  # of one call
TOLERANCE = 2e-2  # relative error of bfloat16 results; with float32 inputs and sums it is around 1e-6


def limits(length: int = 2**30, width: int = 8192) -> tuple[float, float]:
    """Returns the bytes per second of a float32 copy, and the operations per second of a square bfloat16 product."""
    numbers = jax.random.normal(jax.random.key(0), (length,), jnp.float32)
    matrix = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16)
    copy = functools.partial(jax.jit(lambda x: x + 1), numbers)
    product = functools.partial(jax.jit(jnp.matmul), matrix, matrix)
    of_copy, of_product = (min(seconds(call) for _ in range(5)) for call in (copy, product))
    return 2 * numbers.nbytes / of_copy, 2 * width**3 / of_product


def relative_error(found: Any, expected: Any) -> float:
    """Returns the largest `|found - expected| / |expected|` (Euclidean) over two results; NaN is infinite."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            continue
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        error = float(jnp.linalg.norm(one - other) / jnp.maximum(jnp.linalg.norm(other), 1e-30))
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Returns the error relative to the XLA form, and the seconds of every round for each form.

    If a form fails because of its shape, a missing library or memory, "failed" contains the reason; the others
    continue.
    """
    failed: dict[str, str] = {}

    def attempt(name: str, do: Callable[[], Any]) -> Any:
        try:
            return jax.block_until_ready(do())
        except Exception as reason:
            failed[name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            return None

    shapes = jax.tree.leaves(jax.eval_shape(case.make, jax.random.key(0)))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
    copies = int(np.clip(AT_ONCE // max(size, 1), 1, MOST_COPIES))
    make = jax.jit(case.make)
    inputs = attempt("inputs", lambda: [make(jax.random.key(copy)) for copy in range(copies)])
    row: dict[str, Any] = {"copies": copies, "error": None, "seconds": {}, "failed": failed}
    if inputs is None:
        return row
    forms = case.forms()
    expected = attempt("xla", lambda: jax.jit(forms["xla"])(*inputs[0]))
    found = attempt("triton", lambda: jax.jit(forms["triton"])(*inputs[0]))
    if expected is not None and found is not None:
        row["error"] = relative_error(found, expected)
    del expected, found
    calls = {}
    for name, form in forms.items():
        call = repeated(form, inputs, case.carried)
        if name not in failed and attempt(name, call) is not None:
            calls[name] = call
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 else reversed(calls):
            took[name].append(seconds(calls[name]) / copies)
    return {**row, "seconds": took}


def repeated(form: Callable[..., Any], inputs: list[tuple], carried: int | None) -> Callable[[], Any]:
    """Returns a call of `form` on all `inputs`; carried arrays are donated and taken from the results, as in a loop."""
    if carried is None:
        return functools.partial(jax.jit(lambda inputs: [form(*each) for each in inputs]), inputs)
    before, after = ([each[part] for each in inputs] for part in (slice(carried), slice(carried + 1, None)))
    held = [each[carried] + 0 for each in inputs]  # copies, because they are donated

    @functools.partial(jax.jit, donate_argnums=0)
    def call(held, before, after):
        made = [form(*head, one, *tail) for head, one, tail in zip(before, held, after, strict=True)]
        return [results[:-1] for results in made], [results[-1] for results in made]

    def run():
        nonlocal held
        results, held = call(held, before, after)
        return results

    return run


def fastest_table(rows: list[Mapping]) -> dict[str, list]:
    """Returns op -> cells, as `pallas_kernels.dispatch` reads them; cases with one shape are summed into one cell."""
    table: dict[str, list] = {}
    for row in rows:
        times = {name: 1e3 * float(np.median(row["seconds"][name])) for name in ("xla", "triton")}
        cells = table.setdefault(row["op"], [])
        cell = next((cell for cell in cells if cell["shape"] == row["shape"]), None)
        if cell is None:
            cells.append({"shape": row["shape"], "milliseconds": times})
        else:
            cell["milliseconds"] = {name: cell["milliseconds"][name] + time for name, time in times.items()}
    return table


def predicted_table(cases: Sequence[Case], device: Device) -> Table:
    """Returns the limits of cases by a GPU's data sheet, and at the shares of it that kernels are assumed to reach."""
    table = narrow_table(f"{device.name}, from the data sheet")
    for heading in ("case", "GB", "TFLOP", "limit, ms", "expected, ms"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case in cases:
        times = case.bytes / device.bandwidth, case.operations / device.flops
        expected = max(times[0] / device.bandwidth_share, times[1] / device.flops_share)
        figures = case.bytes / 1e9, case.operations / 1e12, 1e3 * max(times), 1e3 * expected
        table.add_row(str(case), *(f"{figure:.3g}" for figure in figures))
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", default=[], help="measure only these ops")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each form (default: %(default)s)")
    parser.add_argument("--use", action="store_true", help="let implementation='auto' use these measurements")
    parser.add_argument("--predict", choices=DEVICES, help="print the limits by this GPU's data sheet and run nothing")
    parser.add_argument("--output", type=pathlib.Path, default=RESULT)
    options = parser.parse_args(argv)
    known = sorted({case.op for case in cases()})
    if not set(options.op) <= set(known):
        parser.error(f"--op {' '.join(options.op)}: the ops are {', '.join(known)}")
    chosen = [case for case in cases() if not options.op or case.op in options.op]
    if options.predict:
        Console(highlight=False).print(predicted_table(chosen, DEVICES[options.predict]))
        return 0
    if jax.default_backend() != "gpu":
        print("the kernels are timed on a GPU, and jax has none here", file=sys.stderr)
        return 3
    console = Console(highlight=False)
    device = jax.devices()[0].device_kind
    bandwidth, rate = limits()
    console.print(f"{device}: {bandwidth / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s")
    description = about(device=device, bytes_a_second=bandwidth, operations_a_second=rate)
    rows, right = [], []
    table = narrow_table()
    for heading in ("case", "us", "of the limit", "XLA / kernel", "best peer / kernel", "error"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for number, case in enumerate(chosen, start=1):
        row = {"op": case.op, "name": case.name, "shape": case.shape(), "bytes": case.bytes}
        row |= {"operations": case.operations, "limit": max(case.bytes / bandwidth, case.operations / rate)}
        row |= measure(case, options.rounds)
        rows.append(row)
        write(options.output, {**description, "cases": rows})
        jax.clear_caches()
        for name, reason in row["failed"].items():
            console.print(f"{number}/{len(chosen)} {case}: {name} failed: {reason}", soft_wrap=True)
        if "triton" not in row["seconds"]:
            continue
        if row["error"] is not None and row["error"] < TOLERANCE:
            right.append(row)
        median = {name: float(np.median(times)) for name, times in row["seconds"].items()}
        peers = [taken for name, taken in median.items() if name not in ("triton", "xla")]
        beside = (f"{median['xla'] / median['triton']:.2f}" if "xla" in median else "-",)
        beside += (f"{min(peers) / median['triton']:.2f}" if peers else "-",)
        beside += ("-" if row["error"] is None else f"{row['error']:.1e}",)
        share = row["limit"] / median["triton"]
        table.add_row(str(case), f"{1e6 * median['triton']:.1f}", f"{share:.0%}", *beside)
        console.print(f"{number}/{len(chosen)} {case}: {share:.0%} of the limit, {beside[0]} x XLA", soft_wrap=True)
    console.print(table)
    if options.use:
        for op, cells in fastest_table([row for row in right if "xla" in row["seconds"]]).items():
            for cell in cells:
                measurements.add(op, cell["shape"], cell["milliseconds"])
    is_right = len(right) == len(rows)
    if not is_right:
        wrong = len(rows) - len(right)
        console.print(f"{wrong} of {len(rows)} cases did not run, were not compared, or err by {TOLERANCE} or more")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
