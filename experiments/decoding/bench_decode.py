"""Times plain and speculative decoding, compared with Hugging Face transformers on the same weights.

    python -m experiments.decoding.bench_decode --quick                 # a minute, a toy, mtpjax alone
    python -m experiments.decoding.bench_decode                         # everything; needs the extra `bench`

Every engine runs in its own process, once pinned to one core and once on all cores. The engines run in rotation, one at
a time. In each round, every engine generates 1 new token and then all tokens, and its time per token is (time for all -
time for 1) / (all - 1). Ratios are computed within rounds. The measured calls are the public `generate()` functions of
the libraries. The rigged checkpoint, whose drafts are always right, is timed; on the random checkpoint, the engines
must give the same tokens (`decode_checkpoints`).

The memory limit is the time that it takes to read once the weights of every layer and expert that a token passes
through, and the caches of the rows, at the bandwidth that the same threads reach during the other measurements.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.common import RESULTS
from experiments.common.child import Child
from experiments.common.decode_checkpoints import SHAPES, bytes_per_round, write_checkpoint
from experiments.common.results import about, write
from experiments.common.rounds import count, measure_rounds, spread, spread_text

ENGINES = "experiments.decoding.decode_engines"


@dataclasses.dataclass(frozen=True)
class Cell:
    """An engine with a number of draft levels; 0 is plain decoding."""

    engine: str
    num_steps: int


def cells_of(shape: str, batch: int, engines: list[str], depths: list[int]) -> list[Cell]:
    """Returns all cells that are measured side by side for one shape and batch size."""
    cells = [Cell(engine, 0) for engine in engines]
    if "transformers" in engines and SHAPES[shape].attention == "latent" and batch == 1:
        cells.append(Cell("transformers", 1))  # `use_mtp` needs DeepSeek's classes and one row; a draft per module
    return cells + [Cell("mtpjax", depth) for depth in depths if "mtpjax" in engines]


def differing(children: dict[str, Child], cells: list[Cell], prompts: list, weights: str, new_tokens: int) -> set[Cell]:
    """Returns the cells whose tokens differ from the first cell's tokens. This also warms up, because it compiles."""
    request = {"weights": weights, "prompts": prompts, "new_tokens": new_tokens}
    tokens = {cell: children[cell.engine].ask(num_steps=cell.num_steps, **request)["tokens"] for cell in cells}
    return {cell for cell in cells if tokens[cell] != tokens[cells[0]]}


def _sample(children: dict[str, Child], cell: Cell, prompts: list, new_tokens: int) -> dict:
    request = {"weights": "rigged", "prompts": prompts, "num_steps": cell.num_steps}
    short = children[cell.engine].ask(new_tokens=1, **request)
    whole = children[cell.engine].ask(new_tokens=new_tokens, **request)
    times = ("seconds", "cpu_seconds", "waited_seconds")
    sample = {name: (whole[name] - short[name]) / (new_tokens - 1) for name in times}
    sample["waited"] = whole["waited_seconds"] / whole["seconds"]
    return {**sample, "accept_length": whole.get("accept_length"), **children["memory"].ask()}


def report(
    shape: str, batch: int, threads: int, samples: dict[Cell, list[dict]], wrong: set[Cell], length: float
) -> list[dict]:
    """Returns one result row per cell; every ratio compares two samples of the same round."""
    config = SHAPES[shape]

    def ratio(cell: Cell, other: Cell, clock: str = "seconds") -> dict[str, float] | None:
        if other not in samples or cell == other:
            return None
        return spread([b[clock] / a[clock] for a, b in zip(samples[cell], samples[other], strict=True)])

    rows = []
    plain_bytes = bytes_per_round(config, batch, 0, length)
    for cell, own in samples.items():
        accepted = own[0]["accept_length"] or cell.num_steps + 1.0
        read = bytes_per_round(config, batch, cell.num_steps, length)
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "threads": threads,
                **dataclasses.asdict(cell),
                "tokens_per_second": spread([batch / sample["seconds"] for sample in own]),
                "cpu_ms_per_token": spread([1e3 * sample["cpu_seconds"] for sample in own]),
                "to_transformers": ratio(cell, Cell("transformers", 0)),
                "to_transformers_cpu_time": ratio(cell, Cell("transformers", 0), "cpu_seconds"),
                "to_transformers_mtp": ratio(cell, Cell("transformers", 1)),
                "to_transformers_mtp_cpu_time": ratio(cell, Cell("transformers", 1), "cpu_seconds"),
                "to_plain": ratio(cell, Cell(cell.engine, 0)),
                "to_plain_cpu_time": ratio(cell, Cell(cell.engine, 0), "cpu_seconds"),
                "accept_length": accepted,
                "ideal_to_plain": accepted * plain_bytes / read,
                "share_of_memory_limit": spread(
                    [read / sample["bandwidth"] / accepted / sample["seconds"] for sample in own]
                ),
                "waited": max(sample["waited"] for sample in own),
                "tokens_agree": cell not in wrong,
            }
        )
    return rows


def show(rows: list[dict], console: Console) -> None:
    table = Table(title="decoding, float32; median (lowest..highest) of ratios within a round")
    for name in ("shape", "batch", "threads", "engine", "drafts"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "x transformers", "x its use_mtp", "x own plain", "ideal", "accept", "of limit", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens")
    for row in rows:
        ratios = [spread_text(row[name], "{:.2f}") for name in ("to_transformers", "to_transformers_mtp", "to_plain")]
        table.add_row(
            row["shape"],
            str(row["batch"]),
            str(row["threads"]),
            row["engine"],
            str(row["num_steps"] or "plain"),
            spread_text(row["tokens_per_second"], "{:.1f}"),
            *ratios,
            f"{row['ideal_to_plain']:.2f}" if row["num_steps"] else "",
            f"{row['accept_length']:.2f}",
            spread_text(row["share_of_memory_limit"], "{:.0%}"),
            f"{row['waited']:.0%}",
            "agree" if row["tokens_agree"] else "DIFFER",
        )
    console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "bench_decode", description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    engines = ("mtpjax", "transformers")
    parser.add_argument(
        "--quick", action="store_true", help="a toy at batch 1 with mtpjax alone, to check that the script works"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", default=["S", "M", "D"], help="some of S, M, D, tiny"
    )
    parser.add_argument("--batch-size", nargs="+", type=count, default=[1, 4, 16])
    parser.add_argument("--num-steps", nargs="+", type=count, default=[1, 2, 3], help="draft levels")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=engines,
        metavar="ENGINE",
        default=list(engines),
        help="some of mtpjax, transformers",
    )
    parser.add_argument("--threads", nargs="+", choices=("1", "all"), default=["1", "all"])
    parser.add_argument("--prompt-length", type=count, default=128)
    parser.add_argument(
        "--new-tokens",
        type=count,
        default=97,
        help="new tokens per row, at least 2; 12n + 1 fills the rounds of 1 to 3 drafts",
    )
    parser.add_argument("--repeats", type=count, default=5)
    results = RESULTS / "bench_decode.json"
    parser.add_argument("--output", type=pathlib.Path, help=f"default: {results}; with --quick under runs/")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error("argument --new-tokens: 1 is not at least 2")
    options.output = options.output or (pathlib.Path("runs", results.name) if options.quick else results)
    if options.quick:
        options.shapes, options.batch_size, options.engines = ["tiny"], [1], ["mtpjax"]
        options.num_steps, options.threads, options.repeats = [1], ["1"], 3
    return options


def run(options: argparse.Namespace, command: str, console: Console) -> list[dict]:
    """Measures all requested cells. The results file grows with every batch size."""
    rows: list[dict] = []
    content = about(command=command, rows=rows)
    settings = {"1": 1, "all": len(os.sched_getaffinity(0))}
    threads_of = sorted({settings[name] for name in options.threads})
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            home = pathlib.Path(folder, shape)
            for name in ("random", "rigged"):
                write_checkpoint(home / name, SHAPES[shape], rigged=name == "rigged")
            for threads in threads_of:
                with contextlib.ExitStack() as stack:
                    children = {
                        name: Child.of_engine(name, threads, shape, home, ENGINES)
                        for name in (*options.engines, "memory")
                    }
                    for child in children.values():
                        stack.callback(child.close)
                        content["versions"] |= child.versions
                    for batch in options.batch_size:
                        rows += run_batch(shape, batch, threads, children, options)
                        console.print(f"measured {shape}, batch {batch}, {threads} thread(s)")
                        write(options.output, content)
            shutil.rmtree(home)
    return rows


def run_batch(
    shape: str, batch: int, threads: int, children: dict[str, Child], options: argparse.Namespace
) -> list[dict]:
    """Checks, warms up and measures all cells of one shape, batch and thread setting."""
    size = (batch, options.prompt_length)
    prompts = np.random.default_rng(batch).integers(0, SHAPES[shape].vocab_size, size).tolist()
    cells = cells_of(shape, batch, options.engines, options.num_steps)
    wrong = differing(children, cells, prompts, "random", min(33, options.new_tokens))
    for new_tokens in (options.new_tokens, 1):
        wrong |= differing(children, cells, prompts, "rigged", new_tokens)
    # Disturbed rounds are measured again, up to three times as many rounds as `repeats` in total.
    samples = measure_rounds(
        lambda cell, _: _sample(children, cell, prompts, options.new_tokens),
        cells,
        options.repeats,
        max_rounds=3 * options.repeats,
    )
    return report(shape, batch, threads, samples, wrong, options.prompt_length + options.new_tokens / 2)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = 200
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if "transformers" in options.engines and missing:
        options.engines = [name for name in options.engines if name != "transformers"]
        console.print(f"transformers is left out: {' and '.join(missing)} not installed (pip install -e '.[bench]')")
        if not options.engines:
            return 1
    command = f"python -m experiments.decoding.bench_decode {' '.join(arguments or sys.argv[1:])}".strip()
    rows = run(options, command, console)
    show(rows, console)
    agree = all(row["tokens_agree"] for row in rows)
    console.print("every engine and depth gave the same tokens" if agree else "TOKENS DIFFER: see the last column")
    console.print(f"written to {options.output}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
