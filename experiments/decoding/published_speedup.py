"""Fits a simple serving model to published MTP speed-ups, and compares them with an engine at the memory roofline.

    python -m experiments.decoding.published_speedup

The published row is DeepSeek-V3 with one MTP module on eight MI300X, by number of concurrent requests. Nothing runs on
a GPU. The bytes and operations per step come from `mtpjax plan`. Writes `experiments/results/published_speedup.json`
and draws `docs/images/published_speedup.png`.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from scipy.optimize import least_squares

from experiments.common import RESULTS, ROOT
from experiments.common.results import about, write
from mtpjax.console import narrow_table
from mtpjax.evaluation.compiled_call import stored_shapes
from mtpjax.evaluation.plan_rounds import estimate_round
from mtpjax.evaluation.plot_style import COLOURS, GREY, picture
from mtpjax.evaluation.roofline import DEVICES
from mtpjax.models.presets import presets
from mtpjax.serving.bench.speedup import PUBLISHED

MODEL, MESH = "deepseek-v3", {"tensor": 8}
# The full bandwidth and rate from the data sheet.
ROOFLINE = dataclasses.replace(DEVICES["mi300x"], bandwidth_share=1.0, fp8_bandwidth_share=1.0, flops_share=1.0)
FIXED_COSTS = (0.0, 2e-3, 5e-3, 10e-3, 20e-3, 40e-3, 80e-3)  # seconds, of the scan
RESULT = RESULTS / "published_speedup.json"
PICTURE = ROOT / "docs" / "images" / "published_speedup.png"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The three free parameters.

    Attributes:
        accept_length: tokens per round with drafts.
        prefill_share: share of prefill in the time of a request that runs alone, without drafts.
        fixed_cost: seconds per step in addition to the roofline, the same with and without drafts.
    """

    accept_length: float
    prefill_share: float
    fixed_cost: float


@dataclasses.dataclass(frozen=True)
class Steps:
    """Seconds of a step at the roofline for each number of concurrent requests, without and with drafts."""

    requests: np.ndarray
    plain: np.ndarray
    drafted: np.ndarray


def roofline_steps(num_steps: int, context: int) -> Steps:
    """Returns the minimum seconds that the bytes and operations of each step take."""
    config = presets[MODEL]
    params = stored_shapes(config, has_fp8=True)

    def seconds(rows: int, steps: int) -> float:
        found = estimate_round(config, params, ROOFLINE, MESH, rows=rows, context=context, num_steps=steps)
        return sum(found.seconds_of_parts)

    plain, drafted = ([seconds(rows, steps) for rows in PUBLISHED] for steps in (0, num_steps))
    return Steps(np.array(list(PUBLISHED)), np.array(plain), np.array(drafted))


def speedups(steps: Steps, fit: Fit) -> np.ndarray:
    """Returns the speed-up of a request's time at each concurrency.

    While a request decodes, each of the others is prefilled once, and decoding waits: per token, a request takes the
    time of a step (or its part of a round) plus the prefill time of all requests, which drafts do not change.
    """
    plain, drafted = steps.plain + fit.fixed_cost, (steps.drafted + fit.fixed_cost) / fit.accept_length
    # Seconds of prefill per generated token of a request.
    prefill = fit.prefill_share / (1 - fit.prefill_share) * (steps.plain[0] + fit.fixed_cost)
    waiting = steps.requests * prefill
    return (plain + waiting) / (drafted + waiting)


def fit_row(
    steps: Steps, published: Sequence[float], num_steps: int, fixed_cost: float | None = None
) -> tuple[Fit, float]:
    """Fits a row of speed-ups by least squares of relative errors.

    Args:
        steps: seconds at the roofline.
        published: the published row.
        num_steps: draft levels, which bound the accept length.
        fixed_cost: value at which to fix this parameter; None: all three are free.

    Returns:
        The fit, and the root of the mean squared relative error.
    """

    def make(values) -> Fit:
        return Fit(values[0], values[1], 1e-3 * values[2] if fixed_cost is None else fixed_cost)

    lower, upper = [1.0, 0.0, 0.0], [num_steps + 1.0, 0.9, 1000.0]
    size = 3 if fixed_cost is None else 2
    found = least_squares(
        lambda values: speedups(steps, make(values)) / np.array(published) - 1,
        [0.5 * (num_steps + 2), 0.02, 10.0][:size],
        bounds=(lower[:size], upper[:size]),
        x_scale=[1.0, 0.02, 10.0][:size],
    )
    return make([float(value) for value in found.x]), math.sqrt(float(np.mean(found.fun**2)))


def measure(num_steps: int, context: int) -> dict[str, Any]:
    """Fits the row and returns the JSON values."""
    steps = roofline_steps(num_steps, context)
    row = list(PUBLISHED.values())
    fit, error = fit_row(steps, row, num_steps)
    fitted = speedups(steps, fit)
    at_roofline = speedups(steps, Fit(fit.accept_length, 0.0, 0.0))
    scan = [fit_row(steps, row, num_steps, cost) for cost in FIXED_COSTS]
    return {
        "num_steps": num_steps,
        "context": context,
        "fit": dataclasses.asdict(fit) | {"rms": error, "plain_step": float(steps.plain[0]) + fit.fixed_cost},
        "points": [
            {
                "requests": requests,
                "published": published,
                "fitted": float(fitted[place]),
                "error": float(fitted[place]) / published - 1,
                "roofline": float(at_roofline[place]),
                "plain_seconds": float(steps.plain[place]),
                "drafted_seconds": float(steps.drafted[place]),
            }
            for place, (requests, published) in enumerate(PUBLISHED.items())
        ],
        "scan": [dataclasses.asdict(each) | {"rms": rms} for each, rms in scan],
    }


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the published row, the fitted row and the roofline row."""
    points = result["points"]
    places = range(len(points))
    with picture(path, (5.5, 3.2)) as figure:
        axis = figure.subplots()
        axis.axhline(1, color=GREY, linewidth=0.8)
        for name, marker, style, colour in (
            ("published", "o", "", "black"),
            ("fitted", "", "-", COLOURS[0]),
            ("roofline", "s", "--", COLOURS[1]),
        ):
            values = [point[name] for point in points]
            axis.plot(places, values, marker=marker, linestyle=style, color=colour, label=name)
        axis.set(xticks=places, xticklabels=[point["requests"] for point in points])
        axis.set(xlabel="concurrent requests", ylabel="speed-up over plain decoding", ylim=(0, None))
        axis.legend()


def tables(result: dict[str, Any]) -> list:
    """Makes a table of the points and a table of the fits with a given fixed cost."""
    fit = result["fit"]
    points = narrow_table(f"DeepSeek-V3, one MTP module, 8 x MI300X; fitted with {result['num_steps']} draft levels")
    points.caption = f"fit: accept length {fit['accept_length']:.2f}, prefill {fit['prefill_share']:.1%} of a lone "
    points.caption += f"request, {1e3 * fit['fixed_cost']:.1f} ms per step besides the roofline (a plain step "
    points.caption += f"{1e3 * fit['plain_step']:.1f} ms); rms error {fit['rms']:.1%}. "
    points.caption += "roofline: the same accept length, no fixed cost, no prefill."
    for heading in ("requests", "published", "fitted", "error", "roofline", "plain ms", "drafted ms"):
        points.add_column(heading, justify="right")
    for point in result["points"]:
        points.add_row(
            str(point["requests"]),
            *(f"{point[name]:.2f}" for name in ("published", "fitted")),
            f"{point['error']:+.1%}",
            f"{point['roofline']:.2f}",
            *(f"{1e3 * point[name]:.2f}" for name in ("plain_seconds", "drafted_seconds")),
        )
    scan = narrow_table("two parameters fitted, with a given fixed cost")
    for heading in ("fixed ms", "accept length", "prefill share", "rms error"):
        scan.add_column(heading, justify="right")
    for each in result["scan"]:
        shares = (f"{each[name]:.1%}" for name in ("prefill_share", "rms"))
        scan.add_row(f"{1e3 * each['fixed_cost']:.0f}", f"{each['accept_length']:.2f}", *shares)
    return [points, scan]


def main(argv: Sequence[str] | None = None) -> int:
    """Fits the row, prints it, and writes the JSON file and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-steps", type=int, default=2, help="draft levels of the published row (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens in each KV cache (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=RESULT)
    parser.add_argument("--picture", type=pathlib.Path, default=PICTURE)
    options = parser.parse_args(argv)
    result = measure(options.num_steps, options.context)
    write(options.output, about(**result))
    draw(result, options.picture)
    console = Console(width=None if sys.stdout.isatty() else 100)
    for table in tables(result):
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
