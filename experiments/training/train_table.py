"""Lists what an update needs on meshes of H100s: memory per device (compiled, not run).

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m experiments.training.train_table [--long | --context]

A 16B-A2.4B model is trained as a whole, in float32 with AdamW. For DeepSeek-V3, only the MTP module is trained, on its
frozen fp8 trunk. Layers compute in bfloat16 and are recomputed for the backward pass. Each device has one row, and the
losses are computed over 8192 columns of the vocabulary at a time. All kernels are XLA's. The bytes that a device
receives in collectives are counted in the compiled module.

`--long` compiles updates of a dense 1B with one module on one H100 instead, for rows of up to 131,072 tokens.
`--context` compiles updates of long rows on meshes that split them by tokens, and counts the bytes that the collectives
of a device exchange.
"""

import argparse
import dataclasses
import functools
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.hlo_bytes import Computation, parse
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from experiments.kernels.bytes_moved import LITE
from mtpjax import ModelConfig, MTPModel, TrainConfig, presets
from mtpjax.console import narrow_table
from mtpjax.data.packing import Batch
from mtpjax.evaluation import plan
from mtpjax.evaluation.compiled_call import h100_mesh, stored_shapes
from mtpjax.models.params import is_of_modules, param_shapes
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import mesh_text, param_shardings
from mtpjax.models.trunk import stack_layers
from mtpjax.training.data_parallel import row_spec
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state, trainable_params

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
LONG_RESULT = RESULTS / "train_long.json"
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


class CompiledUpdate(NamedTuple):
    """A compiled update.

    Attributes:
        arguments: bytes per device of parameters, optimizer and batch.
        temp: bytes per device of temporary memory.
        seconds: CPU seconds of the compilation.
        text: the compiled module.
    """

    arguments: int
    temp: int
    seconds: float
    text: str


def compile_update(config: ModelConfig, trains: Trained, mesh: Mesh, *, num_tokens: int = TOKENS) -> CompiledUpdate:
    """Compiles an update.

    Args:
        config: the model's config.
        trains: "all", or "modules" on a frozen trunk in fp8.
        mesh: of devices to compile for, such as `h100_mesh`; each has one row, or shares it over `context`.
        num_tokens: tokens of a row.
    """
    model = MTPModel(config, scan_layers=True, implementation="xla", remat=True, dtype=jnp.bfloat16)
    settings = TrainConfig(trains=trains)
    objective, optimizer = dataclasses.replace(settings.objective, vocab_chunk=VOCAB_CHUNK), make_optimizer(settings)

    def widen(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree, is_leaf=is_scaled)

    def make(params):
        params = {name: widen(leaf) if is_of_modules(name) else leaf for name, leaf in params.items()}
        return init_train_state(stack_layers(params, config), optimizer, trains)

    state = jax.eval_shape(make, param_shapes(config) if trains == "all" else stored_shapes(config, has_fp8=True))
    # Moments have the layout of their parameters.
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, row_spec(mesh))
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    params = jax.tree.map(place, state.params, param_shardings(state.params, mesh))
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: place(leaf, param.sharding),
        state.optimizer,
        trainable_params(params, trains),
        transform_non_params=lambda leaf: place(leaf, replicated),
    )
    state = state.replace(params=params, optimizer=moments, step=place(state.step, replicated))
    shape = mesh.size // mesh.shape.get("context", 1), num_tokens
    arrays: list[Any] = [jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in (jnp.int32, jnp.int32, bool)]
    batch = Batch(*arrays)
    numbers = [jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)] * 3
    spec = TrainSpec(model=model, num_depths=1, objective=objective, trains=trains, mesh=mesh)
    step = functools.partial(train_step, spec=spec, optimizer=optimizer)
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), replicated)
    begin = time.process_time()
    with use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(step, donate_argnames="state", out_shardings=shardings)
        compiled = jitted.lower(state, batch, *numbers).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    seconds = time.process_time() - begin
    return CompiledUpdate(memory.argument_size_in_bytes, memory.temp_size_in_bytes, seconds, str(compiled.as_text()))


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
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write (default: in experiments/results)")
    parser.add_argument("--context", action="store_true", help="rows that the mesh splits by tokens")
    options = parser.parse_args(argv)
    cells: list[Cell] = [(*cell, TOKENS) for cell in CELLS]
    output = options.output or RESULT
    if options.long:
        cells = [("1B", LONG_1B, trains, {"fsdp": 1}, tokens) for trains, tokens in LONG]
        output = options.output or LONG_RESULT
    if options.context:
        cells, output = list(CONTEXT), options.output or CONTEXT_RESULT
    description = about(argv)
    rows: list[dict[str, Any]] = []
    table = narrow_table("an update on H100s: compiled, not run; GB per device")
    for heading in ("model", "trains", "mesh", "tokens", "arguments", "planned", "temp", "received", "CPU s"):
        table.add_column(heading, justify="right")
    for number, (name, config, trains, sizes, tokens) in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {name}, {sizes}, {tokens} tokens", file=sys.stderr, flush=True)
        arguments, temp, seconds, text = compile_update(config, trains, h100_mesh(sizes), num_tokens=tokens)
        planned = plan.train_bytes(stored_shapes(config, has_fp8=trains == "modules"), sizes, trains=trains)
        row = {"model": name, "trains": trains, "mesh": sizes, "arguments": arguments}
        row["tokens_per_device"] = tokens // sizes.get("context", 1)
        received = collective_bytes(text)
        rows.append({**row, "planned": planned, "temp": temp, "received": received, "cpu_seconds": round(seconds)})
        # Write each cell before the next one begins.
        write(output, {**description, "rows": rows})
        sizes_in_gb = (f"{nbytes / 1e9:.2f}" for nbytes in (arguments, planned, temp, received))
        table.add_row(name, trains, mesh_text(sizes), str(tokens), *sizes_in_gb, str(round(seconds)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
