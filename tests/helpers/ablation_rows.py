"""Settings of an ablation, and lines of `cells.jsonl` as they might be."""

import dataclasses

from mtpjax.ablation.cells import Cell, Settings

from mtpjax.ablation.workload import Workload
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.trust import speed_up_problem

SETTINGS = Settings(depths=(1, 2), topk=(1,), temperatures=(0.0,), batch_sizes=(1, 2), max_new_tokens=12, repeats=2)
WORKLOAD = Workload([[1, 2, 3], [4, 5], [6, 7, 8]], "three prompts")
ENVIRONMENT = {"model": "m", "device": "d", "processor": "p", "jax": "j"}


def cell_row(
    ratio,
    spread=0.05,
    *,
    batch_size=1,
    temperature=0.0,
    num_steps=1,
    topk=1,
    lossless="identical",
    rule="greedy",
    drafter="mtp",
    waited=0.0,
):
    """A line of `cells.jsonl` as it might be."""
    measured = Estimate(ratio, ratio - spread, ratio + spread)
    nodes = DecodeConfig(num_steps=num_steps, topk=topk).num_nodes
    length = 1 + 0.8 * num_steps
    around = lambda value, by: {"value": value, "low": value - by, "high": value + by}
    return {
        "cell": dataclasses.asdict(Cell(batch_size, num_steps, topk, nodes, rule, temperature, drafter)),
        "accept_length": around(length, 0.1),
        "accept_length_macro": around(length, 0.1),
        "conditional": [around(0.8, 0.02)] * num_steps,
        "survival": [around(0.8, 0.02)] * num_steps,
        "ratio": measured.to_dict(),
        "tokens_per_second": 100 * ratio,
        "plain_tokens_per_second": 100.0,
        "costs": {"plain": 1e-3, "verify": 1e-3, "parts": 1.2e-3},
        "ideal_ratio": length / 1.2,
        "categories": {},
        "lossless": lossless,
        "differing_rows": int(lossless == "DIFFERS"),
        "compared_rows": 10,
        "waited": waited,
        "problem": speed_up_problem(measured, length, waited=waited),
    }
