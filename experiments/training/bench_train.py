"""Times a training step against PyTorch. Measures the cost of draft depths and the memory that chunked losses save.

    python -m experiments.training.bench_train --quick       # a minute, a toy, mtpjax alone
    python -m experiments.training.bench_train               # everything; needs the extra `bench`

Every engine runs in its own process, once pinned to one core and once on all cores. The engines run in rotation with a
few steps per round, and ratios are computed within rounds. PyTorch runs eagerly and with torch.compile. Before anything
is timed, the engines make their first updates from the same parameters on the same batches; losses that differ by
more than 1e-4 raise an error.

The cost of D depths is compared with their share of the arithmetic, which is the model FLOPs of an update
(`mtpjax.evaluation.update_flops`). Each product and the attention are also timed separately in both libraries. The
limit is the time for this arithmetic at the rate at which XLA multiplies two matrices with the same threads in the same
round. The memory is what XLA's compiled step needs in addition to its arguments, with all logits and with `vocab_chunk`
columns at a time.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import sys
import tempfile

from rich.console import Console
from rich.table import Table

from experiments.common import RESULTS
from experiments.common.child import Child
from experiments.common.results import about, write
from experiments.common.rounds import count, measure_rounds, spread, spread_text
from experiments.training.train_engines import SHAPES, loss_memory, step_flops, write_start

TOLERANCE = 1e-4  # of the losses of the first updates
FIRST_UPDATES = 3


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training step of one engine with a number of draft depths."""

    engine: str
    num_depths: int


def cells_of(engines: list[str], depths: list[int]) -> list[Cell]:
    """Returns the cells: mtpjax with every number of depths, and PyTorch with the trunk alone and with one module."""
    return [Cell(engine, depth) for engine in engines for depth in depths if engine == "mtpjax" or depth <= 1]


def largest_difference(children: dict[str, Child], cells: list[Cell], rows: int, length: int) -> float:
    """Runs every cell's first updates, which also compiles, and compares PyTorch's losses with mtpjax's."""
    losses = {
        cell: children[cell.engine].ask(
            num_depths=cell.num_depths, first=0, steps=FIRST_UPDATES, rows=rows, length=length
        )["losses"]
        for cell in cells
    }
    return max(
        abs(own - other)
        for cell in cells
        for own_row, row in zip(losses[Cell("mtpjax", cell.num_depths)], losses[cell], strict=True)
        for own, other in zip(own_row, row, strict=True)
    )


def measure(children: dict[str, Child], cells: list[Cell], options: argparse.Namespace) -> dict[Cell, list[dict]]:
    """Returns each cell's samples of the `repeats` least disturbed rounds; up to 50 % more rounds are measured."""
    request = {"steps": options.steps, "rows": options.rows, "length": options.length}

    def sample(cell: Cell, number: int) -> dict:
        first = FIRST_UPDATES + 1 + number * (1 + options.steps)
        found = children[cell.engine].ask(num_depths=cell.num_depths, first=first, **request)
        waited = found["waited_seconds"] / found["seconds"]
        return {"seconds": found["seconds"] / options.steps, **children["products"].ask(), "waited": waited}

    return measure_rounds(sample, cells, options.repeats, max_rounds=1.5 * options.repeats)


def report(shape: str, threads: int, samples: dict[Cell, list[dict]], options: argparse.Namespace) -> list[dict]:
    """Returns one result row per cell; every ratio compares two samples of the same round."""
    config, tokens = SHAPES[shape], options.rows * options.length
    flops = {cell: step_flops(config, cell.num_depths, options.rows, options.length) for cell in samples}

    def ratio(cell: Cell, other: Cell) -> dict[str, float] | None:
        if other not in samples or cell == other:
            return None
        return spread([b["seconds"] / a["seconds"] for a, b in zip(samples[cell], samples[other], strict=True)])

    rows = []
    for cell, own in samples.items():
        trunk = Cell(cell.engine, 0)
        cost, share = ratio(trunk, cell), flops[cell] / flops.get(trunk, flops[cell])
        rows.append(
            {
                "shape": shape,
                "threads": threads,
                **dataclasses.asdict(cell),
                "tokens_per_second": spread([tokens / sample["seconds"] for sample in own]),
                "to_torch": ratio(cell, Cell("torch", cell.num_depths)),
                "to_torch_compiled": ratio(cell, Cell("torch compiled", cell.num_depths)),
                "cost_over_trunk": cost,
                "arithmetic_over_trunk": share,
                "cost_over_arithmetic": cost and {name: value / share for name, value in cost.items()},
                "flops": flops[cell],
                "share_of_limit": spread([flops[cell] / sample["rate"] / sample["seconds"] for sample in own]),
                "waited": max(sample["waited"] for sample in own),
            }
        )
    return rows


def part_rows(shape: str, threads: int, options: argparse.Namespace) -> list[dict]:
    """Returns the milliseconds of each matrix product and of attention, in mtpjax and in PyTorch."""
    engines = [name for name in ("mtpjax", "torch") if name in options.engines]
    times: dict[str, list[dict]] = {name: [] for name in engines}
    for _ in range(3):  # the engines take turns
        for name in engines:
            child = Child.of_engine(
                name, threads, shape, options.output.parent, module="experiments.training.train_products"
            )
            times[name].append(child.ask(rows=options.rows, length=options.length))
            child.close()
    setting = {"shape": shape, "threads": threads}
    return [
        {**setting, "part": part, "direction": direction}
        | {name: min(found[part][direction] for found in times[name]) for name in engines}
        for part, directions in times["mtpjax"][0].items()
        for direction in directions
    ]


def memory_rows(options: argparse.Namespace) -> list[dict]:
    """Returns the temporary bytes of steps with two depths, by vocabulary and objective, with and without chunks."""
    shape = options.shapes[0]
    rows = []
    for vocab_size in options.vocabularies:
        for mix in ("cross_entropy", "lk_hybrid"):
            sizes = [
                loss_memory(shape, vocab_size, mix, chunk, num_depths=2, rows=options.rows, length=options.length)
                for chunk in (0, options.vocab_chunk)
            ]
            settings = {"shape": shape, "vocab_size": vocab_size, "objective": mix, "vocab_chunk": options.vocab_chunk}
            rows.append({**settings, "bytes_of_all_logits": sizes[0], "bytes_by_chunks": sizes[1]})
    return rows


def show(content: dict, console: Console) -> None:
    table = Table(title="training steps, float32; median (lowest..highest) of ratios within a round")
    for name in ("shape", "threads", "engine", "depths"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "x torch", "x torch compiled", "cost / trunk", "its arithmetic", "of limit", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["rows"]:
        table.add_row(
            *(str(row[name]) for name in ("shape", "threads", "engine", "num_depths")),
            spread_text(row["tokens_per_second"], "{:.0f}"),
            *(spread_text(row[name], "{:.2f}") for name in ("to_torch", "to_torch_compiled", "cost_over_trunk")),
            f"{row['arithmetic_over_trunk']:.2f}" if row["num_depths"] else "",
            spread_text(row["share_of_limit"], "{:.0%}"),
            f"{row['waited']:.0%}",
        )
    console.print(table)
    for entry in content["parts"]:
        whole = sum(sum(part.values()) for part in entry["seconds"].values())
        shares = ", ".join(
            f"{name} {part['products'] / whole:.0%} + {part['rest'] / whole:.0%}"
            for name, part in sorted(entry["seconds"].items())
        )
        setting = f"{entry['shape']}, {entry['threads']} thread(s), {entry['num_depths']} depth(s)"
        console.print(f"time of a step in products of matrices + the rest, {setting}: {shares}")
    for row in content["products"]:
        other = f", PyTorch {row['torch']:.2f} ms" if "torch" in row else ""
        setting = f"{row['shape']}, {row['threads']} thread(s), {row['part']}, {row['direction']}"
        console.print(f"{setting}: {row['mtpjax']:.2f} ms{other}")
    table = Table(title="memory of a step with two depths, beside parameters and optimiser")
    for name in ("shape", "vocabulary", "objective", "all logits", "by chunks", "ratio"):
        table.add_column(name, justify="right")
    for row in content["memory"]:
        whole, chunked = row["bytes_of_all_logits"], row["bytes_by_chunks"]
        sizes = (f"{whole / 1e6:.0f} MB", f"{chunked / 1e6:.0f} MB", f"{whole / chunked:.1f}")
        table.add_row(row["shape"], str(row["vocab_size"]), row["objective"], *sizes)
    console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "bench_train", description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    engines = ("mtpjax", "torch", "torch compiled")
    parser.add_argument("--quick", action="store_true", help="a toy with mtpjax alone, to check that the script works")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", default=["5M", "30M"])
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 1, 2, 3], choices=range(8), metavar="D")
    parser.add_argument("--engines", nargs="+", choices=engines, metavar="ENGINE", default=list(engines))
    parser.add_argument("--threads", nargs="+", choices=("1", "all"), default=["1", "all"])
    parser.add_argument("--rows", type=count, default=8, help="rows of a batch")
    parser.add_argument("--length", type=count, default=256, help="tokens per row")
    parser.add_argument("--steps", type=count, default=2, help="timed updates of each engine per round")
    parser.add_argument("--repeats", type=count, default=5, help="number of rounds")
    parser.add_argument("--vocabularies", nargs="*", type=count, default=[32768, 131072], help="for memory")
    parser.add_argument("--vocab-chunk", type=count, default=4096)
    results = RESULTS / "bench_train.json"
    parser.add_argument("--output", type=pathlib.Path, help=f"default: {results}; with --quick under runs/")
    options = parser.parse_args(arguments)
    options.output = options.output or (pathlib.Path("runs", results.name) if options.quick else results)
    if options.quick:
        options.shapes, options.engines, options.depths, options.threads = ["tiny"], ["mtpjax"], [0, 1], ["1"]
        options.rows, options.length, options.vocabularies, options.vocab_chunk = 2, 32, [512], 128
    if "mtpjax" not in options.engines:
        parser.error("argument --engines: mtpjax is what the others are compared with")
    return options


def run(options: argparse.Namespace, command: str, console: Console) -> dict:
    """Runs all requested measurements. Adds to the result file after every shape and thread setting."""
    content = about(command=command)
    content |= {"differences": [], "rows": [], "parts": [], "products": [], "memory": []}
    settings = {"1": 1, "all": len(os.sched_getaffinity(0))}
    cells = cells_of(options.engines, options.depths)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            home = pathlib.Path(folder, shape)
            write_start(home, shape)
            for threads in sorted({settings[name] for name in options.threads}):
                with contextlib.ExitStack() as stack:
                    children = {}
                    for name in (*options.engines, "products"):
                        children[name] = Child.of_engine(
                            name, threads, shape, home, module="experiments.training.train_engines"
                        )
                        stack.callback(children[name].close)
                        content["versions"] |= children[name].versions
                    difference = largest_difference(children, cells, options.rows, options.length)
                    samples = measure(children, cells, options)
                    request = {"first": 0, "steps": 3, "rows": options.rows, "length": options.length}
                    traced = children["mtpjax"].ask(num_depths=max(options.depths[:2]), is_traced=True, **request)
                setting = {"shape": shape, "threads": threads}
                content["differences"].append({**setting, "largest_difference_of_losses": difference})
                content["parts"].append({**setting, "num_depths": max(options.depths[:2]), "seconds": traced["parts"]})
                content["products"] += part_rows(shape, threads, options)
                content["rows"] += report(shape, threads, samples, options)
                console.print(f"measured {shape}, {threads} thread(s); losses differ by at most {difference:.1e}")
                write(options.output, content)
    content["memory"] = memory_rows(options)
    write(options.output, content)
    return content


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = 200
    if importlib.util.find_spec("torch") is None and len(options.engines) > 1:
        options.engines = ["mtpjax"]
        console.print("PyTorch is left out: torch is not installed (pip install -e '.[bench]')")
    command = f"python -m experiments.training.bench_train {' '.join(arguments or sys.argv[1:])}".strip()
    content = run(options, command, console)
    show(content, console)
    console.print(f"written to {options.output}")
    wrong = [row for row in content["differences"] if not row["largest_difference_of_losses"] <= TOLERANCE]
    for row in wrong:
        console.print(f"LOSSES DIFFER by {row['largest_difference_of_losses']:.1e}: {row['shape']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
