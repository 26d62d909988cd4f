"""Lists what a decoding call needs on meshes of H100s (compiled, not run): memory per device, collectives and kernels.

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m experiments.decoding.mesh_table
    python -m experiments.decoding.mesh_table --layers 4 --mesh data=8 --rows 64 --output result.json
    python -m experiments.decoding.mesh_table --layers 4 --prefill-chunk 0 --output FILE

The whole call, prefill and loop, is compiled ahead of time from shapes (`compat.h100_devices` says what that needs).
The arguments are the weights, the caches and the rest of the state. Weights are bfloat16, or fp8 with block scales as
in DeepSeek-V3's checkpoint.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from mtpjax.cli.mesh_flags import parse_mesh
from mtpjax.console import narrow_table
from mtpjax.evaluation import plan
from mtpjax.evaluation.compiled_call import compile_call, h100_mesh, stored_shapes
from mtpjax.models.presets import presets
from mtpjax.models.sharding import mesh_text

RESULT = RESULTS / "mesh_table.json"
SLOTS = 4096
CHUNK = 64  # tokens per prefill pass; 0: as many as `speculative_generate` uses
# model, fp8, mesh, rows
CELLS = (
    ("deepseek-v3", True, {"tensor": 8}, 8),
    ("deepseek-v3", True, {"data": 8}, 64),
    ("deepseek-v3", True, {"data": 2, "tensor": 8}, 16),
    ("deepseek-v3", True, {"data": 8, "tensor": 8}, 64),
    ("deepseek-v3", False, {"data": 8, "tensor": 8}, 64),
    ("deepseek-v3", True, {"data": 32, "tensor": 8}, 256),
    ("glm-4.5", True, {"tensor": 8}, 8),
    ("glm-4.5", True, {"data": 8, "tensor": 8}, 64),
    ("qwen3.5-35b-a3b", False, {"tensor": 8}, 8),
    ("qwen3.5-35b-a3b", False, {"data": 8}, 64),
)


def measure(
    name: str, has_fp8: bool, sizes: Mapping[str, int], rows: int, *, layers: int | None, slots: int, prefill_chunk: int
) -> dict[str, Any]:
    """Compiles one cell and returns its JSON values."""
    config = presets[name]
    if layers is not None:
        config = dataclasses.replace(
            config,
            num_hidden_layers=layers,
            first_k_dense_replace=min(config.first_k_dense_replace, 1),
            layer_types=config.layer_types[:layers],
        )
    params = stored_shapes(config, has_fp8=has_fp8)
    settings = {"rows": rows, "slots": slots, "num_steps": 1, "prefill_chunk": prefill_chunk or None}
    found = compile_call(config, h100_mesh(sizes), params=params, **settings)
    guess = plan.plan_layout(config, params, sizes, **settings)
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "weights": "fp8" if has_fp8 else "bfloat16",
        "mesh": dict(sizes),
        "rows": rows,
        "slots": slots,
        "prefill_chunk": guess.prefill_chunk,
        "arguments": found.arguments,
        "temp": found.temp,
        "planned_arguments": guess.arguments,
        "planned_temp": guess.temp,
        "kernels": found.kernels,
        "collectives": [[*key, count] for key, count in sorted(found.collectives.items(), key=lambda item: -item[1])],
        "cpu_seconds": round(found.seconds),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_alone(*cell, **settings) -> dict[str, Any]:
    """Runs `measure` in a separate process, so that the process's memory is that of this cell alone."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *cell, **settings).result()


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the cells and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=None, help="number of trunk layers, at most one of them dense (default: all)"
    )
    parser.add_argument(
        "--model", default="deepseek-v3", choices=sorted(presets), help="the model with --mesh (default: %(default)s)"
    )
    parser.add_argument(
        "--mesh", type=parse_mesh, default=None, help="one mesh, such as data=8,tensor=8 (default: all cells)"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows with --mesh (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="with --mesh: weights in bfloat16")
    parser.add_argument("--slots", type=int, default=SLOTS, help="cache slots of each row (default: %(default)s)")
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        default=CHUNK,
        help="tokens of a prefill pass; 0: as many as decoding takes for prompts of half the slots (%(default)s)",
    )
    parser.add_argument("--output", type=pathlib.Path, default=RESULT)
    options = parser.parse_args(argv)
    cells = CELLS if options.mesh is None else ((options.model, not options.bf16, options.mesh, options.rows),)
    description = about()
    rows: list[dict[str, Any]] = []
    for number, cell in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {cell[0]}, {cell[2]}, {cell[3]} rows", file=sys.stderr, flush=True)
        settings = {"layers": options.layers, "slots": options.slots, "prefill_chunk": options.prefill_chunk}
        rows.append(measure_alone(*cell, **settings))
        # Write each cell before the next one begins.
        write(options.output, {**description, "rows": rows})
    table = narrow_table("a decoding call on H100s: compiled, not run; GB per device")
    for heading in (
        "model",
        "mesh",
        "weights",
        "rows",
        "chunk",
        "arguments",
        "temp",
        "planned temp",
        "collectives",
        "CPU s",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            mesh_text(row["mesh"]),
            row["weights"],
            str(row["rows"]),
            str(row["prefill_chunk"]),
            f"{row['arguments'] / 1e9:.2f}",
            f"{row['temp'] / 1e9:.2f}",
            f"{row['planned_temp'] / 1e9:.2f}",
            str(sum(count for *_, count in row["collectives"])),
            str(row["cpu_seconds"]),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
