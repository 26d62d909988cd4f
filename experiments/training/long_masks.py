"""Lists the memory of updates over long rows with masks that are not causal: compiled for one H100, not run.

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m experiments.training.long_masks

"DFlash" trains a new drafter with five layers, blocks of 16 slots and 512 anchors per row, on the frozen fp8 trunk of a
dense 1B. "DeepSeek-V3.2" trains an MTP module on a frozen fp8 trunk of two layers, with the sizes and sparse indexer of
DeepSeek-V3.2 but dense feed-forward layers. A batch has one row. All kernels are XLA's.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from mtpjax import MTPModel, TrainConfig, presets
from mtpjax.console import narrow_table
from mtpjax.data.packing import Batch
from mtpjax.evaluation.compiled_call import h100_mesh, stored_shapes
from mtpjax.models.params import is_of_modules
from mtpjax.models.quantized import is_scaled
from mtpjax.models.trunk import stack_layers
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.initial_drafter import add_new_drafter, new_drafter
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state

RESULT = RESULTS / "train_long_masks.json"
DEPTHS = {"DFlash": 15, "DeepSeek-V3.2": 1}
CELLS = tuple((name, tokens) for name in DEPTHS for tokens in (16384, 32768))
CONFIGS = {
    "DFlash": dataclasses.replace(MODELS["1B"], num_mtp_modules=0, max_position_embeddings=32768),
    "DeepSeek-V3.2": dataclasses.replace(presets["deepseek-v3.2"], num_hidden_layers=2, n_routed_experts=0),
}


def compile_update(name: str, num_tokens: int) -> Any:
    """Compiles an update over one row of `num_tokens` tokens. Returns XLA's memory analysis."""
    config, num_depths = CONFIGS[name], DEPTHS[name]
    model = MTPModel(config, scan_layers=name != "DFlash", implementation="xla", remat="layers", dtype=jnp.bfloat16)
    settings = TrainConfig(drafter="dflash" if name == "DFlash" else "mtp", init_from="unused", num_depths=num_depths)
    optimizer = make_optimizer(settings)
    drafter = new_drafter(settings, config) if name == "DFlash" else None

    def make(params):
        widen = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree, is_leaf=is_scaled)
        params = {name: widen(leaf) if is_of_modules(name) else leaf for name, leaf in params.items()}
        if drafter is None:
            params = stack_layers(params, config)
        else:
            shape = {"model": model, "method": settings.draft_method, "drafter": drafter, "draft_ids": None}
            params = add_new_drafter(params, **shape, key=jax.random.key(0))
        return init_train_state(params, optimizer, "modules")

    sharding = NamedSharding(h100_mesh({"fsdp": 1}), PartitionSpec())
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    state = jax.tree.map(place, jax.eval_shape(make, stored_shapes(config, has_fp8=True)))
    arrays: list[Any] = [jax.ShapeDtypeStruct((1, num_tokens), dtype) for dtype in (jnp.int32, jnp.int32, bool)]
    batch, numbers = jax.tree.map(place, (Batch(*arrays), [jax.ShapeDtypeStruct((), jnp.float32)] * 3))
    objective = dataclasses.replace(settings.objective, vocab_chunk=8192)
    spec = TrainSpec(model=model, num_depths=num_depths, objective=objective, trains="modules", drafter=drafter)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer), donate_argnames="state")
    return step.lower(state, batch, *numbers).compile().memory_analysis()


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the cells and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=DEPTHS, help="only this model")
    parser.add_argument("--output", type=pathlib.Path, default=RESULT, help="JSON file (default: %(default)s)")
    options = parser.parse_args(argv)
    description, rows = about(argv), []
    table = narrow_table("updates over one long row: compiled for one H100, not run; GB")
    for heading in ("model", "tokens", "arguments", "temp"):
        table.add_column(heading, justify="right")
    for name, tokens in CELLS:
        if options.only not in (None, name):
            continue
        memory = compile_update(name, tokens)
        sizes = {"arguments": memory.argument_size_in_bytes, "temp": memory.temp_size_in_bytes}
        rows.append({"model": name, "tokens": tokens, **sizes})
        write(options.output, {**description, "rows": rows})
        table.add_row(name, str(tokens), *(f"{size / 1e9:.2f}" for size in sizes.values()))
        print(rows[-1], file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
