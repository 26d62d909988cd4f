"""Compares decoding in this checkout with decoding in another one, such as the commit before a change.

    git worktree add ../other COMMIT
    python -m experiments.decoding.bench_versions --other ../other [--model runs/quickstart] [--starts 8] [--quick]

Each checkout decodes in its own process. The two processes alternate, and the ratio is computed within each pair of
calls, so slow drifts of the machine cancel. The same program can be 10 % slower in one process than in the next,
because its buffers are at different addresses, so both processes are started several times. The process that is
started first is about 2 % slower (seen with the same commit in both), so each start is done twice, once in each order,
and its ratio is the geometric mean of both. The result is the median over starts of the median of (seconds of the other
checkout / seconds of this one), with a 95 % bootstrap interval that resamples starts. If it is above 1, this checkout
is faster. The texts must be identical. The script also counts instructions, copies, and bytes per round in the
optimized HLO of the decoding loop.
"""

import argparse
import itertools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.common import ROOT
from experiments.common.child import Child
from experiments.common.decode_checkpoints import SHAPES, write_checkpoint
from experiments.common.hlo_bytes import Computation, Counter, Instruction, parse
from experiments.common.results import about, write
from mtpjax.evaluation.intervals import estimate_from, resample

CASES = {  # draft levels, and other fields of DecodeConfig
    "plain": (0, {}),
    "1 draft": (1, {}),
    "3 drafts": (3, {}),
    "tree of 8": (3, {"topk": 2, "num_draft_tokens": 8}),
}


def start(checkout: pathlib.Path, dump: pathlib.Path) -> Child:
    """Starts the worker of one checkout, which writes its compiled modules to `dump`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PJRT_NPROC": "1",  # one XLA thread, as the commands use for small models
        "MTPJAX_HLO_DUMP": str(dump),
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*decode.*",
    }
    command = [sys.executable, str(pathlib.Path(__file__).with_name("version_worker.py"))]
    child = Child(str(checkout), command=command, environment=environment)
    if pathlib.Path(child.versions["mtpjax"]).resolve() != checkout.resolve():
        raise SystemExit(f"{checkout} was asked for, but its process imports mtpjax from {child.versions['mtpjax']}")
    return child


def count_loop(files: list[str]) -> dict[str, int]:
    """Counts the instructions, copies and bytes of one round, which is the body of the last loop."""
    text = max((pathlib.Path(file).read_text() for file in files), key=len)
    computations, entry = parse(text)
    loop = [one for one in computations[entry].instructions.values() if one.opcode == "while"][-1]
    body = loop.called("body")
    within = _reachable(computations, body)
    counter = Counter(computations, declared=lambda *_: 0, turns=lambda _: 1)
    return {
        "instructions": len(within),
        "copies": sum(one.opcode in ("copy", "copy-start") for one in within),
        "bytes": sum(one.total for one in counter.moved(body, [None] * len(loop.results))),
    }


def _reachable(computations: Mapping[str, Computation], name: str) -> list[Instruction]:
    """Lists the instructions of a computation and of everything that it calls."""
    found, waiting = set(), [name]
    while waiting:
        if (name := waiting.pop()) not in found and name in computations:
            found.add(name)
            text = " ".join(one.attributes for one in computations[name].instructions.values())
            waiting += re.findall(r"[=({, ]%?([\w.$-]+)", text)
    return [one for name in found for one in computations[name].instructions.values()]


def compare(
    children: Mapping[int, Child], folder: pathlib.Path, case: str, batch: int, repeats: int, tokens: int, vocab: int
) -> dict[str, Any]:
    """Measures one case alternately in both processes, in the order of their start. Process 0 has this checkout.

    Returns:
        The median ratio, whether the texts are identical, and the counts of both loops.
    """
    num_steps, options = CASES[case]
    prompts = np.random.default_rng(0).integers(1, vocab, (batch, 32)).tolist()
    request = {"folder": str(folder), "prompts": prompts, "num_steps": num_steps, "new_tokens": tokens}
    # The first call of each process compiles; its module and its text are kept.
    first = {which: child.ask(**request, options=options) for which, child in children.items()}
    pairs = []
    for number in range(repeats):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {which: children[which].ask(**request, options=options)["seconds"] for which in order}
        pairs.append(seconds[1] / seconds[0])
    return {
        "ratio": float(np.median(pairs)),
        "identical": first[0]["tokens"] == first[1]["tokens"],
        "own": count_loop(first[0]["modules"]),
        "other": count_loop(first[1]["modules"]),
    }


def summarise(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins one case's measurements over all starts. Neighbours differ in the order in which the processes started."""
    ratios = np.exp(np.log([start["ratio"] for start in starts]).reshape(-1, 2).mean(axis=1))
    (drawn,) = resample(len(ratios))
    ratio = estimate_from(float(np.median(ratios)), np.median(ratios[drawn], axis=1))
    return {
        "ratio": ratio.value,
        "interval": [ratio.low, ratio.high],
        "starts": ratios.tolist(),
        "identical": all(start["identical"] for start in starts),
        "own": starts[0]["own"],
        "other": starts[0]["other"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=pathlib.Path, required=True, help="the other checkout of mtpjax")
    parser.add_argument("--model", type=pathlib.Path, help="a checkpoint to decode too, such as runs/quickstart")
    parser.add_argument(
        "--shapes", nargs="*", default=["S", "D"], choices=list(SHAPES), help="shapes from bench_decode"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4], help="batch sizes (default: 1 and 4)")
    parser.add_argument(
        "--starts", type=int, default=4, help="how often both processes are started in both orders (default: 4)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="pairs of calls per case and start (default: 10)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per row (default: 64)")
    parser.add_argument("--quick", action="store_true", help="the smallest case twice, to check that the script works")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.cases, options.batch_size = ["S"], ["1 draft"], [1]
        options.starts, options.repeats = 2, 1
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folders: dict[str, pathlib.Path] = {}
        for shape in options.shapes:
            folders[shape] = pathlib.Path(scratch) / shape
            write_checkpoint(folders[shape], SHAPES[shape], rigged=False)
        if options.model is not None:
            folders[str(options.model)] = options.model.resolve()
        cases = list(itertools.product(folders, options.batch_size, options.cases))
        found: dict[tuple[str, int, str], list[dict[str, Any]]] = {case: [] for case in cases}
        checkouts = (ROOT, options.other.resolve())
        for number, order in itertools.product(range(options.starts), ((0, 1), (1, 0))):
            children = {}
            for which in order:
                dump = pathlib.Path(scratch) / f"hlo{number}-{order[0]}-{which}"
                dump.mkdir()
                children[which] = start(checkouts[which], dump)
            for name, batch, case in cases:
                vocab = SHAPES[name].vocab_size if name in SHAPES else 128
                measured = compare(children, folders[name], case, batch, options.repeats, options.tokens, vocab)
                found[name, batch, case].append(measured)
                place = f"start {number + 1}, {('own', 'other')[order[0]]} first: {name}, batch {batch}, {case}"
                console.print(f"{place}: {measured['ratio']:.3f}", highlight=False)
            for child in children.values():
                child.close()
    rows = [{"model": case[0], "batch": case[1], "case": case[2], **summarise(found[case])} for case in cases]
    table = Table(title="other's time / own time, with 95 % interval; counts: own (other)")
    for heading in ("model", "batch", "case", "ratio", "texts", "instructions", "copies", "MB"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        counts = [f"{row['own'][name]} ({row['other'][name]})" for name in ("instructions", "copies")]
        counts.append(f"{row['own']['bytes'] / 1e6:.2f} ({row['other']['bytes'] / 1e6:.2f})")
        low, high = row["interval"]
        ratio = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})"
        texts = "identical" if row["identical"] else "DIFFER"
        table.add_row(row["model"], str(row["batch"]), row["case"], ratio, texts, *counts)
    console.print(table)
    write(options.output, about(rows=rows))
    if not all(row["identical"] for row in rows):
        raise SystemExit("the two checkouts give different texts")


if __name__ == "__main__":
    main()
