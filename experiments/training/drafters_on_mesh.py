"""Trains five drafters of one trunk on one device and on a mesh of virtual devices, and compares their acceptance.

    python -m experiments.training.drafters_on_mesh --model runs/quickstart --steps 100

The trunk is that of a model of bytes, such as the quickstart's, without its modules. Every drafter is new, and both
runs have the same settings and batches. Each drafter then drafts chains for held-out prompts on one device, at
temperature 0. The differences of a prompt's counts give the interval of the difference in accept length.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.console

from experiments.common import RESULTS
from experiments.common.results import about, write
from mtpjax import DecodeConfig, MTPModel, Objective, TrainConfig, load, train
from mtpjax.cli.mesh_flags import parse_mesh
from mtpjax.console import narrow_table
from mtpjax.data.packing import held_out_prompts
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.counts import AcceptanceCounts
from mtpjax.evaluation.intervals import Estimate, estimate_from, resampled_weights
from mtpjax.evaluation.metrics import decoded_rates
from mtpjax.io.checkpoint import save_model
from mtpjax.models.params import is_of_modules
from mtpjax.training.cost import seconds_per_update
from mtpjax.training.trainer import TrainResult

RESULT = RESULTS / "drafters_on_mesh.json"
NUM_DRAFTS, PROMPT_TOKENS, NEW_TOKENS = 4, 64, 64
BLOCKS = {"draft_num_layers": 2, "draft_anchors": 32}
METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"trains": "modules"},
    "eagle3": {},
    "medusa": {},
    "dflash": BLOCKS,
    "dspark": {**BLOCKS, "draft_markov_rank": 32},
}


def save_trunk(model: str, folder: pathlib.Path) -> None:
    """Saves the trunk of a checkpoint."""
    whole, params = load(model)
    bare = dataclasses.replace(whole.config, num_mtp_modules=0)
    save_model(folder, MTPModel(bare), {name: leaf for name, leaf in params.items() if not is_of_modules(name)})


def train_drafter(method: str, mesh: dict[str, int], folder: pathlib.Path, options: argparse.Namespace) -> TrainResult:
    """Trains a new drafter for the trunk in `folder`."""
    config = TrainConfig(
        drafter=method,
        init_from=str(folder / "trunk"),
        data=options.data,
        output=str(folder / f"{method}-{'mesh' if mesh else 'one'}"),
        steps=options.steps,
        batch_size=8,
        row_length=options.row_length,
        num_depths=NUM_DRAFTS,
        objective=Objective(depth_weights="decayed", depth_decay=0.8),
        mesh=mesh,
        log_every=1,
        save_every=0,
        panel_prompts=0,
        plot_formats=(),
        **METHODS[method],
    )
    return train(config, evaluations=1)


def measure(result: TrainResult, num_prompts: int) -> AcceptanceCounts:
    """Measures a drafter's acceptance on one device."""
    prompts = held_out_prompts(
        result.held_out, count=num_prompts, prompt_length=PROMPT_TOKENS, continuation_length=NEW_TOKENS, seed=0
    )
    # Move everything to one device, so that both drafters are measured by the same program.
    params, draft_params = jax.device_put(jax.device_get((result.params, result.draft_params)), jax.devices()[0])
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=NUM_DRAFTS, drafter=result.drafter or "mtp")
    return measure_acceptance(
        params, prompts, model=result.model, config=config, draft_params=draft_params, batch_size=16
    )


def difference(one: AcceptanceCounts, mesh: AcceptanceCounts) -> Estimate:
    """Estimates the accept length on the mesh minus that on one device, over the same bootstrap samples of prompts."""
    weights = resampled_weights(len(one.rounds))

    def lengths(counts: AcceptanceCounts, weights: np.ndarray) -> np.ndarray:
        return (weights @ counts.accepted.sum(axis=1)) / (weights @ counts.rounds)

    whole = np.ones(len(one.rounds))
    return estimate_from(
        float(lengths(mesh, whole) - lengths(one, whole)), lengths(mesh, weights) - lengths(one, weights)
    )


def compare(method: str, folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures a drafter both ways."""
    results = [train_drafter(method, mesh, folder, options) for mesh in ({}, options.mesh)]
    one, mesh = (measure(result, options.prompts) for result in results)
    losses = [np.array([row["bits"] for row in result.history if "bits" in row]) for result in results]
    return {
        "method": method,
        "one": decoded_rates(one.rounds, one.accepted)["accept_length"].to_dict(),
        "mesh": decoded_rates(mesh.rounds, mesh.accepted)["accept_length"].to_dict(),
        "difference": difference(one, mesh).to_dict(),
        "largest_relative_difference_of_a_loss": float(np.abs(losses[1] / losses[0] - 1).max()),
        "seconds_per_update": [seconds_per_update(result.history) for result in results],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the methods and prints the results. Returns 1 if an interval of a difference does not contain 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart", help="checkpoint of a model of bytes")
    parser.add_argument("--data", help="text to train on (default: the standard library)")
    parser.add_argument("--mesh", type=parse_mesh, default={"data": 2, "fsdp": 4}, help="mesh of virtual devices")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--row-length", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that it works")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write (default: in experiments/results)")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.prompts, options.row_length = 2, 4, 32
    output = options.output or (None if options.quick else RESULT)
    jax.config.update("jax_num_cpu_devices", int(np.prod(list(options.mesh.values()))))
    table = narrow_table(f"accept length after {options.steps} updates, 95 % intervals")
    for heading in ("drafter", "one device", "mesh", "difference", "losses differ by"):
        table.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        save_trunk(options.model, folder / "trunk")
        for method in options.methods:
            rows.append(row := compare(method, folder, options))
            write(output, {**about(argv), "mesh": options.mesh, "steps": options.steps, "rows": rows})
            cells = (
                "{value:.3f} ({low:.3f} to {high:.3f})".format(**row[name]) for name in ("one", "mesh", "difference")
            )
            table.add_row(method, *cells, f"{row['largest_relative_difference_of_a_loss']:.1e}")
    rich.console.Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(any(not row["difference"]["low"] <= 0 <= row["difference"]["high"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
