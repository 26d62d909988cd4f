"""Times reading and converting checkpoints, compared with `cat`, and measures the memory that they need.

Makes checkpoints with random weights (stacked experts in bfloat16; block-fp8 with one expert per tensor), then runs
every method in rotation, each in its own process: mtpjax's functions, `cat` of the same files (to /dev/null, and to a
copy), Orbax's safetensors reader and the safetensors package. Speeds count the bytes of the whole checkpoint, even for
`export-mtp`, which reads only the modules. Files come from the page cache. Peak memory is the process's maximum
resident size minus its resident size after the imports.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from experiments.common.results import about, write
from mtpjax import presets

MODULE = "experiments.checkpoints.bench_load"
# (preset, changed fields): the widths of the releases, with fewer layers and experts
SHAPES = {
    "stacked": (
        "qwen3.5-35b-a3b",
        {"num_hidden_layers": 8, "layer_types": presets["qwen3.5-35b-a3b"].layer_types[:8], "n_routed_experts": 32},
    ),
    "fp8": (
        "deepseek-v3",
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4, "topk_group": 2},
    ),
}
QUICK = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64}
WAYS = ("cat", "cat copy", "load", "orbax", "safetensors", "to mtpjax", "to hugging face", "export-mtp")


def make_checkpoint(shape: str, folder: pathlib.Path, *, shard_bytes: int, changes: dict) -> None:
    """Makes a checkpoint directory with random weights."""
    import ml_dtypes

    from conversion.describe_config import describe_config
    from conversion.families import FAMILIES
    from conversion.names import param_specs
    from conversion.shards import TensorEntry, split_into_shards, write_index, write_shards

    preset, fewer = SHAPES[shape]
    config = dataclasses.replace(presets[preset], **{**fewer, "vocab_size": 16384, **changes})
    is_fp8 = shape == "fp8"
    model_type, values = describe_config(config, "deepseek_v3" if is_fp8 else "qwen3_5_moe_text")
    if is_fp8:
        values["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    specs = param_specs(config, FAMILIES[model_type].layout, lambda name: not is_fp8)
    bf16, fp8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
    entries: dict[str, TensorEntry] = {}
    for piece in (piece for spec in specs.values() for piece in spec.slices):
        entries[piece.name] = TensorEntry(piece.name, bf16, piece.shape)
        if is_fp8 and len(piece.shape) == 2 and piece.name.endswith("_proj.weight") and "eh_proj" not in piece.name:
            entries[piece.name] = TensorEntry(piece.name, fp8, piece.shape)
            grid = tuple(-(-side // 128) for side in piece.shape)
            entries[f"{piece.name}_scale_inv"] = TensorEntry(f"{piece.name}_scale_inv", np.dtype(np.float32), grid)
        if piece.name.endswith(("e_score_correction_bias", "A_log")):
            entries[piece.name] = TensorEntry(piece.name, np.dtype(np.float32), piece.shape)
    noise = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * 0.02

    def blocks(entry: TensorEntry):
        values = noise.astype(entry.dtype)
        count = int(np.prod(entry.shape))
        for begin in range(0, count, noise.size):
            yield values[: min(noise.size, count - begin)]

    folder.mkdir()
    shards = split_into_shards(entries.values(), shard_bytes)
    write_shards(folder, shards, blocks)
    write_index(folder, shards)
    (folder / "config.json").write_text(json.dumps(values, indent=1))


def run_one(way: str, source: pathlib.Path, ours: pathlib.Path, target: pathlib.Path) -> dict[str, float]:
    """Runs one method once in this process. Returns the seconds, and the peak memory beyond that of the imports."""
    import jax
    import orbax.checkpoint
    import tensorstore  # noqa: F401 (so that its memory counts as an import's)

    from conversion.export_mtp import export_mtp
    from conversion.load import load
    from mtpjax.io import convert

    def orbax_load():
        import orbax.checkpoint.experimental.v1 as ocp

        layout = ocp.options.CheckpointLayout.SAFETENSORS
        with ocp.Context(checkpoint_layout=layout):
            return ocp.load(str(source))

    def safetensors_load():
        from safetensors import safe_open

        arrays = {}
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="flax") as tensors:
                arrays |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        return arrays

    runs = {
        "load": lambda: load(source)[1],
        "orbax": orbax_load,
        "safetensors": safetensors_load,
        "to mtpjax": lambda: convert.to_mtpjax(source, target),
        "to hugging face": lambda: convert.to_hugging_face(ours, target),
        "export-mtp": lambda: export_mtp(source, target),
    }
    assert orbax.checkpoint and jax.devices()
    before = resident()
    begin = time.perf_counter()
    jax.block_until_ready(runs[way]())
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before}


def resident() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def ask(way: str, source: pathlib.Path, ours: pathlib.Path, target: pathlib.Path) -> dict[str, float]:
    """Runs `run_one` in its own process, or `cat`."""
    files = sorted(str(file) for file in source.glob("*.safetensors"))
    shutil.rmtree(target, ignore_errors=True)
    if way.startswith("cat"):
        output = target.with_name("copy") if way == "cat copy" else pathlib.Path("/dev/null")
        with output.open("wb") as stream:
            begin = time.perf_counter()
            subprocess.run(["cat", *files], stdout=stream, check=True)
            return {"seconds": time.perf_counter() - begin}
    command = [sys.executable, "-m", MODULE, "--child", way, str(source), str(ours), str(target)]
    reply = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(reply.stdout.splitlines()[-1])


def measure(shape: str, options, folder: pathlib.Path) -> dict[str, Any]:
    """Runs all methods in rotation, `repeats` times; returns medians, and the ratio to `cat` within each round."""
    source, ours, target = folder / shape, folder / f"{shape}-ours", folder / "target"
    shard_bytes = (4 if options.quick else options.shard_mb) << 20
    make_checkpoint(shape, source, shard_bytes=shard_bytes, changes=QUICK if options.quick else {})
    sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
    total = sum(sizes)
    print(f"{shape}: {total / 1e9:.2f} GB in {len(sizes)} shards, the largest {max(sizes) / 1e6:.0f} MB", flush=True)
    ways = [way for way in WAYS if (shape, way) != ("fp8", "safetensors")]  # which has no fp8 for JAX or NumPy
    ask("to mtpjax", source, ours, target)
    target.rename(ours)
    rounds = []
    for number in range(options.repeats):
        rounds.append({way: ask(way, source, ours, target) for way in ways})
        print(f"  round {number + 1} of {options.repeats}", file=sys.stderr, flush=True)
    rows = {}
    for way in ways:
        reference = "cat" if way in ("cat", "load", "orbax", "safetensors", "export-mtp") else "cat copy"
        ratios = [one[reference]["seconds"] / one[way]["seconds"] for one in rounds]
        peaks = [one[way]["peak_bytes"] for one in rounds if "peak_bytes" in one[way]]
        seconds = statistics.median(one[way]["seconds"] for one in rounds)
        rows[way] = {
            "gigabytes_per_second": total / 1e9 / seconds,
            "reference": reference,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "peak_of_largest_shard": max(peaks) / max(sizes) if peaks else None,
            "peak_bytes": max(peaks) if peaks else None,
        }
        row = rows[way]
        memory = f"peak {row['peak_bytes'] / 1e6:6.0f} MB, {row['peak_of_largest_shard']:.2f} shards" if peaks else ""
        low, high = row["ratio_range"]
        print(
            f"  {way:<16} {row['gigabytes_per_second']:5.2f} GB/s  {row['ratio']:.2f} ({low:.2f}-{high:.2f}) of "
            f"{reference:<9} {memory}"
        )
    for path in (source, ours, target):
        shutil.rmtree(path, ignore_errors=True)
    return {"bytes": total, "largest_shard": max(sizes), "shards": len(sizes), "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="checkpoints to make")
    parser.add_argument("--shard-mb", type=int, default=512, help="largest shard (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--folder", default=None, help="folder with space for 4 times the checkpoint (default: a temporary folder)"
    )
    parser.add_argument("--output", default=None, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="small shards and two rounds, as a smoke test")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, *paths = options.child
        print(json.dumps(run_one(way, *map(pathlib.Path, paths))))
        return
    if options.quick:
        options.repeats = 2
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = {shape: measure(shape, options, pathlib.Path(folder)) for shape in options.shapes}
    write(options.output, about(results=results))


if __name__ == "__main__":
    main()
