"""Lists what an update needs on meshes of H100s: memory per device (compiled, not run).

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \\
        python -m experiments.training.train_table [--long]

A 16B-A2.4B model is trained as a whole, in float32 with AdamW. For DeepSeek-V3, only the MTP module is trained, on its
frozen fp8 trunk. Layers compute in bfloat16 and are recomputed for the backward pass. Each device has one row, and the
losses are computed over 8192 columns of the vocabulary at a time.

`--long` compiles updates of a dense 1B with one module on one H100 instead, for rows of up to 131,072 tokens.
"""

import argparse
import dataclasses
import functools
import pathlib
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
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from experiments.kernels.bytes_moved import LITE
from mtpjax import ModelConfig, MTPModel, TrainConfig, presets
from mtpjax.console import narrow_table
from mtpjax.data.packing import Batch
from mtpjax.evaluation import plan
from mtpjax.evaluation.compiled_call import h100_mesh, stored_shapes
from mtpjax.models.config import Implementation
from mtpjax.models.params import is_of_modules, param_shapes
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import mesh_text, param_shardings
from mtpjax.models.trunk import stack_layers
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


LONG_RESULT = RESULTS / "train_long.json"
LONG: tuple[tuple[Trained, int], ...] = (
    *(("modules", tokens) for tokens in (4096, 16384, 32768, 131072)),
    *(("all", tokens) for tokens in (4096, 16384, 32768)),
)


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


def compile_update(
    config: ModelConfig,
    trains: Trained,
    mesh: Mesh,
    *,
    num_tokens: int = TOKENS,
    implementation: Implementation = "xla",
) -> CompiledUpdate:
    """Compiles an update.

    Args:
        config: the model's config.
        trains: "all", or "modules" on a frozen trunk in fp8.
        mesh: of devices to compile for, such as `h100_mesh`; each has one row.
        num_tokens: tokens of a row.
        implementation: how kernels run.
    """
    model = MTPModel(config, scan_layers=True, implementation=implementation, remat=True, dtype=jnp.bfloat16)
    settings = TrainConfig(trains=trains)
    objective, optimizer = dataclasses.replace(settings.objective, vocab_chunk=VOCAB_CHUNK), make_optimizer(settings)

    def widen(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree, is_leaf=is_scaled)

    def make(params):
        params = {name: widen(leaf) if is_of_modules(name) else leaf for name, leaf in params.items()}
        return init_train_state(stack_layers(params, config), optimizer, trains)

    state = jax.eval_shape(make, param_shapes(config) if trains == "all" else stored_shapes(config, has_fp8=True))
    # Moments have the layout of their parameters.
    replicated, rows = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), (mesh.axis_names,)))
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
    shape = mesh.size, num_tokens
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


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the cells and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="the dense 1B with rows of different lengths")
    implementations = ("xla", "triton")
    parser.add_argument("--implementation", choices=implementations, default="xla", help="(default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write (default: in experiments/results)")
    options = parser.parse_args(argv)
    output = options.output or (LONG_RESULT if options.long else RESULT)
    cells: list[tuple[str, ModelConfig, Trained, dict[str, int], int]] = [(*cell, TOKENS) for cell in CELLS]
    if options.long:
        config = dataclasses.replace(MODELS["1B"], max_position_embeddings=131072)
        cells = [("1B", config, trains, {"fsdp": 1}, tokens) for trains, tokens in LONG]
    description = about(argv)
    rows: list[dict[str, Any]] = []
    table = narrow_table("an update on H100s: compiled, not run; GB per device")
    for heading in ("model", "trains", "mesh", "tokens", "arguments", "planned", "temp", "CPU s"):
        table.add_column(heading, justify="right")
    for number, (name, config, trains, sizes, tokens) in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {name}, {sizes}, {tokens} tokens", file=sys.stderr, flush=True)
        settings = {"num_tokens": tokens, "implementation": options.implementation}
        arguments, temp, seconds, _ = compile_update(config, trains, h100_mesh(sizes), **settings)
        planned = plan.train_bytes(stored_shapes(config, has_fp8=trains == "modules"), sizes, trains=trains)
        row = {"model": name, "trains": trains, "mesh": sizes, "tokens_per_device": tokens, "arguments": arguments}
        row |= {"implementation": options.implementation}
        rows.append({**row, "planned": planned, "temp": temp, "cpu_seconds": round(seconds)})
        # Write each cell before the next one begins.
        write(output, {**description, "rows": rows})
        sizes_in_gb = (f"{nbytes / 1e9:.2f}" for nbytes in (arguments, planned, temp))
        table.add_row(name, trains, mesh_text(sizes), str(tokens), *sizes_in_gb, str(round(seconds)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
