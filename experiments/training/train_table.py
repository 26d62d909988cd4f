"""Lists what an update needs on meshes of H100s: memory per device (compiled, not run).

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m experiments.training.train_table [--long | --context | --largest 10] [--remat none]

A 16B-A2.4B model is trained as a whole, in float32 with AdamW. For DeepSeek-V3, only the MTP module is trained, on its
frozen fp8 trunk. Layers compute in bfloat16 and are recomputed for the backward pass. Each device has one row, and the
losses are computed over 8192 columns of the vocabulary at a time. The bytes that a device receives in collectives are
counted in the compiled module.

`--long` compiles updates of a dense 1B with one module on one H100 instead, for rows of up to 131,072 tokens.
`--largest` lists the largest temporary arrays and the largest memory traffics of those with 4,096 and 32,768 tokens.
`--context` compiles updates of long rows on meshes that split them by tokens.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jax.sharding import Mesh
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.hlo_bytes import Computation, parse
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from experiments.kernels.bytes_moved import LITE
from experiments.training.largest import Module, largest_temporaries
from mtpjax import ModelConfig, presets
from mtpjax.console import narrow_table
from mtpjax.evaluation.compiled_call import h100_mesh, stored_shapes
from mtpjax.models.config import Implementation, Remat
from mtpjax.models.sharding import mesh_text
from mtpjax.training.compiled_update import CompiledUpdate, compile_update
from mtpjax.training.update_memory import UpdateMemory, UpdateShape, estimate_update

RESULT = RESULTS / "train_table.json"
TOKENS, VOCAB_CHUNK = 4096, 8192
Trained = Literal["all", "modules"]
# name, config, trained part, mesh
CELLS: tuple[tuple[str, ModelConfig, Trained, dict[str, int]], ...] = (
    ("16B-A2.4B", LITE, "all", {"fsdp": 8}),
    ("16B-A2.4B", LITE, "all", {"fsdp": 64}),
    ("16B-A2.4B", LITE, "all", {"fsdp": 8, "expert": 8}),
    ("DeepSeek-V3, MTP module", presets["deepseek-v3"], "modules", {"fsdp": 8, "expert": 8}),
)


LONG_1B = dataclasses.replace(MODELS["1B"], max_position_embeddings=131072)
LONG_RESULT, LARGEST_RESULT = RESULTS / "train_long.json", RESULTS / "train_largest.json"
LONG: tuple[tuple[Trained, int], ...] = (
    *(("modules", tokens) for tokens in (4096, 16384, 32768, 131072)),
    *(("all", tokens) for tokens in (4096, 16384, 32768)),
)


CONTEXT_RESULT = RESULTS / "train_context.json"
CONTEXT: tuple[tuple[str, ModelConfig, Trained, dict[str, int], int], ...] = (
    ("1B", LONG_1B, "modules", {"context": 4}, 131072),
    ("1B", LONG_1B, "all", {"context": 4}, 131072),
    ("16B-A2.4B", LITE, "all", {"fsdp": 8, "context": 8}, 32768),
    ("DeepSeek-V3, MTP module", presets["deepseek-v3"], "modules", {"expert": 8, "context": 8}, 32768),
)
FACTORS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # of the whole array's bytes
Cell = tuple[str, ModelConfig, Trained, dict[str, int], int]


def compile_cell(
    config: ModelConfig,
    trains: Trained,
    mesh: Mesh,
    *,
    num_tokens: int = TOKENS,
    remat: Remat = "layers",
    implementation: Implementation = "xla",
    compiler_options: dict[str, str | bool] | None = None,
) -> tuple[CompiledUpdate, UpdateMemory]:
    """Compiles an update of one row on each device, or one for each `context`, and estimates its memory.

    Args:
        config: the model's config.
        trains: "all", or "modules" on a frozen trunk in fp8.
        mesh: of devices to compile for, such as `h100_mesh`.
        num_tokens: tokens of a row.
        remat: as in `TrainConfig`.
        implementation: how kernels run.
        compiler_options: options for XLA.
    """
    tokens = num_tokens // mesh.shape.get("context", 1)
    shape = UpdateShape(tokens=tokens, row_length=num_tokens, trains=trains, remat=remat, vocab_chunk=VOCAB_CHUNK)
    params = stored_shapes(config, has_fp8=trains == "modules")
    found = compile_update(
        config, params, mesh, shape, implementation=implementation, compiler_options=compiler_options
    )
    return found, estimate_update(config, params, dict(mesh.shape), shape)


def _largest(update: CompiledUpdate, dumped: pathlib.Path, count: int) -> dict[str, list[dict[str, Any]]]:
    """Lists the largest temporary arrays and traffics of an update that was compiled with `xla_dump_to`."""
    module = Module(update.text)
    found = {"temporaries": largest_temporaries(module, dumped, count), "traffics": module.largest_traffics(count)}
    return {name: [item._asdict() for item in items] for name, items in found.items()}


def _largest_table(title: str, items: Sequence[Mapping[str, Any]]):
    table = narrow_table(title)
    for heading in ("GB", "times", "array", "pass", "part", "code"):
        table.add_column(heading, justify="right" if heading in ("GB", "times") else "left")
    for item in items:
        size = ("at least " if item["is_bound"] else "") + f"{item['nbytes'] / 1e9:.2f}"
        table.add_row(size, str(item["times"]), item["shape"], item["run"], item["part"], item["line"])
    return table


def collective_bytes(text: str) -> int:
    """Returns the bytes that a device receives in the collectives of a compiled module.

    A device of a group of n receives (n - 1) / n of an array that is gathered or scattered, and twice as much of one
    that is summed.
    """
    computations, entry = parse(text)

    def total(computation: Computation) -> float:
        nbytes = 0.0
        for one in computation.instructions.values():
            opcode = one.opcode.removesuffix("-start")
            if opcode == "while":
                # Loops over blocks of keys have no known number of turns, and no collectives.
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.attributes)
                nbytes += total(computations[one.called("body")]) * int(turns[1] if turns else 1)
            elif opcode in ("call", "async"):
                nbytes += total(computations[one.called("to_apply" if opcode == "call" else "calls")])
            elif opcode in FACTORS and (groups := re.search(r"replica_groups=\{\{([\d,]*)\}", one.attributes)):
                size = groups[1].count(",") + 1
                whole = sum(array.nbytes for array in one.results)
                # The start of an asynchronous gather or scatter lists the operands too.
                if opcode != one.opcode and opcode != "all-reduce":
                    whole *= size / (size + 1)
                elif opcode == "reduce-scatter":
                    whole *= size
                nbytes += FACTORS[opcode] * whole * (size - 1) / size
        return nbytes

    return round(total(computations[entry]))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the cells and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="the dense 1B with rows of different lengths")
    parser.add_argument("--remat", choices=get_args(Remat), default="layers", help="(default: %(default)s)")
    parser.add_argument("--largest", type=int, default=0, metavar="N", help="list the N largest arrays and traffics")
    implementations = ("xla", "triton")
    parser.add_argument("--implementation", choices=implementations, default="xla", help="(default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write (default: in experiments/results)")
    parser.add_argument("--context", action="store_true", help="rows that the mesh splits by tokens")
    options = parser.parse_args(argv)
    default = LARGEST_RESULT if options.largest else LONG_RESULT if options.long else RESULT
    cells: list[Cell] = [(*cell, TOKENS) for cell in CELLS]
    if options.long or options.largest:
        lengths = [cell for cell in LONG if not options.largest or cell[1] in (4096, 32768)]
        cells = [("1B", LONG_1B, trains, {"fsdp": 1}, tokens) for trains, tokens in lengths]
    if options.context:
        cells, default = list(CONTEXT), CONTEXT_RESULT
    description = about(argv)
    rows: list[dict[str, Any]] = []
    table = narrow_table("an update on H100s: compiled, not run; GB per device")
    numbers = ("arguments", "planned", "temp", "planned", "error", "received")
    for heading in ("model", "trains", "mesh", "tokens", *numbers, "CPU s"):
        table.add_column(heading, justify="right")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for number, (name, config, trains, sizes, tokens) in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {name}, {sizes}, {tokens} tokens", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as dumped:
            dump = {"xla_dump_to": dumped, "xla_dump_hlo_as_text": True} if options.largest else None
            form = {"num_tokens": tokens, "remat": options.remat, "compiler_options": dump}
            form |= {"implementation": options.implementation}
            found, planned = compile_cell(config, trains, h100_mesh(sizes), **form)
            largest = _largest(found, pathlib.Path(dumped), options.largest) if options.largest else {}
        row = {"model": name, "trains": trains, "mesh": sizes, "remat": options.remat}
        row |= {"tokens_per_device": tokens // sizes.get("context", 1), "implementation": options.implementation}
        row |= {"arguments": found.arguments, "planned": planned.arguments, "temp": found.temp}
        row |= {"received": (received := collective_bytes(found.text))}
        rows.append({**row, "planned_temp": planned.temp, "cpu_seconds": round(found.seconds), **largest})
        # Write each cell before the next one begins.
        write(options.output or default, {**description, "rows": rows})
        sizes_in_gb = (found.arguments, planned.arguments, found.temp, planned.temp)
        error = planned.total / (found.arguments + found.temp) - 1
        numbers = (*(f"{nbytes / 1e9:.2f}" for nbytes in sizes_in_gb), f"{error:+.1%}", f"{received / 1e9:.1f}")
        table.add_row(name, trains, mesh_text(sizes), str(tokens), *numbers, str(round(found.seconds)))
        for what, items in largest.items():
            console.print(_largest_table(f"{trains}, {tokens} tokens: {what}", items))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
