"""What a decoding call needs on meshes of H100s: memory per device, collectives and kernels, compiled and not run.

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m experiments.mesh_table
    python -m experiments.mesh_table --layers 4 --mesh data=8 --rows 64 --output result.json

The whole call, prefill and loop, is compiled ahead of time from shapes (`compat.h100_devices` says what that needs).
Arguments are weights, caches and the rest of the state. Weights are bfloat16, or fp8 with block scales as DeepSeek-V3
stores them.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from rich.console import Console

from mtpjax import ModelConfig, MTPModel, compat
from mtpjax.console import narrow_table
from mtpjax.decoding.capacity import choose_prefill_chunk
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.loop import decode
from mtpjax.decoding.requests import make_drafter
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import empty_state
from mtpjax.models.config import Implementation
from mtpjax.models.decoding_layout import align_blocks, part_specs
from mtpjax.models.presets import presets
from mtpjax.models.quantized import BlockScaled

RESULT = pathlib.Path(__file__).parent / "results" / "mesh_table.json"
SLOTS = 4096
FP8_PLACES = re.compile(r"(query|query_down|query_up|latent_down|qkv|output|gate_up|down)$")
COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled call.

    Attributes:
        arguments: bytes per device of weights and state.
        temp: bytes per device besides.
        collectives: how often each (operation, shapes, place in the program) stands in the module.
        kernels: Triton calls in the module.
        seconds: CPU seconds of the compilation.
    """

    arguments: int
    temp: int
    collectives: Mapping[tuple[str, str, str], int]
    kernels: int
    seconds: float


def as_stored(path, leaf, *, has_fp8: bool):
    """Gives a parameter the dtype of a checkpoint: bfloat16, or fp8 with the scales of 128 x 128 blocks."""
    name = "/".join(key.key for key in path)
    if not has_fp8 or leaf.ndim < 2 or not FP8_PLACES.search(name):
        return leaf.astype(jnp.bfloat16)
    # The input axis: behind that of the experts, and else the first.
    is_stack = re.search(r"experts/(gate_up|down)$", name) is not None
    axis = (1 if is_stack else 0) - leaf.ndim
    shape = list(leaf.shape)
    shape[axis] = -(-shape[axis] // 128)
    return BlockScaled(leaf.astype(jnp.float8_e4m3fn), jnp.ones(shape, jnp.float32), axis=axis, block=128)


def compile_call(
    config: ModelConfig,
    sizes: Mapping[str, int],
    *,
    rows: int,
    slots: int = SLOTS,
    num_steps: int = 1,
    has_fp8: bool = True,
    implementation: Implementation = "triton",
    prefill_chunk: int | None = 64,
) -> Compiled:
    """Compiles the decoding call of a model for a mesh of H100s.

    Args:
        config: the model's config.
        sizes: sizes of the mesh axes.
        rows: rows of the batch.
        slots: cache slots of each row.
        num_steps: draft levels.
        has_fp8: the checkpoint's weights are fp8.
        implementation: what runs the kernels.
        prefill_chunk: tokens of a prefill pass; None: as `speculative_generate` chooses for prompts of half the slots.

    Returns:
        What the compiled module needs.
    """
    model = MTPModel(config, implementation=implementation)
    settings = DecodeConfig(num_steps=num_steps)
    drafter = make_drafter(settings)
    if prefill_chunk is None:
        prefill_chunk = choose_prefill_chunk(model, rows, "cuda", longest_prompt=slots // 2, max_length=slots)
    spec = DecodeSpec.from_config(settings, is_greedy=True, prefill_chunk=prefill_chunk)

    def make():
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        state = empty_state(
            model=model,
            drafter=drafter,
            spec=spec,
            batch=rows,
            capacity=slots,
            stops_shape=(8, 1),
            features=SamplingFeatures(),
            dtype=jnp.bfloat16,
        )
        params = jax.tree_util.tree_map_with_path(functools.partial(as_stored, has_fp8=has_fp8), params)
        return align_blocks(params, config, sizes), state

    params, state = jax.eval_shape(make)
    mesh = compat.make_mesh(sizes, compat.h100_devices(f"1x1x{math.prod(sizes.values())}"))
    params = _place(params, part_specs(params, config, sizes), mesh)
    state = _place(state, part_specs(state, config, sizes, is_state=True), mesh)
    draft_params = drafter.default_params(params, settings, model=model)
    begin = time.process_time()
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = decode.plain.lower(params, draft_params, state, model=model, drafter=drafter, spec=spec)
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    text = str(compiled.as_text())
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        collectives=find_collectives(text),
        kernels=text.count('custom_call_target="__gpu$xla.gpu.triton"'),
        seconds=time.process_time() - begin,
    )


def _place(tree, specs, mesh: Mesh):
    def shape(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, specs)


def find_collectives(text: str) -> dict[tuple[str, str, str], int]:
    """Counts the collectives of a compiled module by operation, shapes and place; layers count as one place."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match:
            source = re.search(r'op_name="([^"]*)"', line)
            place = re.sub(r"layer_\d+", "layer_*", source[1]) if source else ""
            found[match["name"], re.sub(r"\{[^}]*\}", "", match["results"]), place] += 1
    return dict(found)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=8,tensor=8"."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


MODELS = {"deepseek-v3": presets["deepseek-v3"]}
# model, fp8, mesh, rows
CELLS = (
    ("deepseek-v3", True, {"tensor": 8}, 8),
    ("deepseek-v3", True, {"data": 8}, 64),
    ("deepseek-v3", True, {"data": 2, "tensor": 8}, 16),
    ("deepseek-v3", True, {"data": 8, "tensor": 8}, 64),
    ("deepseek-v3", False, {"data": 8, "tensor": 8}, 64),
    ("deepseek-v3", True, {"data": 32, "tensor": 8}, 256),
)


def measure(name: str, has_fp8: bool, sizes: Mapping[str, int], rows: int, layers: int | None) -> dict[str, Any]:
    """Compiles one cell and returns what JSON holds of it."""
    config = MODELS[name]
    if layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=layers, first_k_dense_replace=1)
    found = compile_call(config, sizes, rows=rows, has_fp8=has_fp8)
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "weights": "fp8" if has_fp8 else "bfloat16",
        "mesh": dict(sizes),
        "rows": rows,
        "slots": SLOTS,
        "arguments": found.arguments,
        "temp": found.temp,
        "kernels": found.kernels,
        "collectives": [[*key, count] for key, count in sorted(found.collectives.items(), key=lambda item: -item[1])],
        "cpu_seconds": round(found.seconds),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the cells and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=None, help="of the trunk, one of them dense (default: all)")
    parser.add_argument(
        "--mesh", type=parse_mesh, default=None, help="one mesh, such as data=8,tensor=8 (default: all)"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows with --mesh (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="with --mesh: weights of bfloat16")
    parser.add_argument("--output", type=pathlib.Path, default=RESULT)
    options = parser.parse_args(argv)
    cells = CELLS if options.mesh is None else (("deepseek-v3", not options.bf16, options.mesh, options.rows),)
    about = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "argv": sys.argv[1:]}
    rows: list[dict[str, Any]] = []
    for number, cell in enumerate(cells, start=1):
        print(f"{number}/{len(cells)} {cell[0]}, {cell[2]}, {cell[3]} rows", file=sys.stderr, flush=True)
        rows.append(measure(*cell, options.layers))
        # Keep each cell before the next one begins.
        options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    table = narrow_table("a decoding call on H100s: compiled, not run; GB per device")
    for heading in ("mesh", "weights", "rows", "arguments", "temp", "kernels", "collectives", "CPU s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            " ".join(f"{name} {size}" for name, size in row["mesh"].items()),
            row["weights"],
            str(row["rows"]),
            f"{row['arguments'] / 1e9:.2f}",
            f"{row['temp'] / 1e9:.2f}",
            str(row["kernels"]),
            str(sum(count for *_, count in row["collectives"])),
            str(row["cpu_seconds"]),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
