"""Describes a checkpoint from its headers and configuration, without loading weights."""

import collections
import json
import math
import pathlib
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from conversion.families import Layout
from conversion.gguf_files import GGUFFiles, open_checkpoint
from conversion.load_plan import LoadPlan, inspect_files
from conversion.names import param_specs
from conversion.read_params import scale_spec
from conversion.safetensors_header import DTYPE_NAMES, E4M3, FLOAT32
from mtpjax.errors import CheckpointFileError
from mtpjax.io.array_files import nest
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.messages import count_of
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import find_copies, param_part_spec
from mtpjax.models.sharding import mesh_text, num_shards
from mtpjax.safe_open import is_gguf

LINE_WIDTH, NAME_WIDTH = 80, 14  # width in characters of a printed line, and of the name at its start
UNQUANTIZED = ("F64", "F32", "F16", "BF16")  # llama.cpp's unquantized types
# Reported names by `LayerKind.attention`. Hugging Face's layer_types has the same names, but none for latent attention.
ATTENTION_NAMES = {"grouped": "full_attention", "delta": "linear_attention", "latent": "latent_attention"}


def inspect(path, *, mesh: dict[str, int] | None = None, model_type: str | None = None) -> dict[str, Any]:
    """Describes a Hugging Face directory or an mtpjax checkpoint.

    Args:
        path: the checkpoint, or a run folder.
        mesh: sizes of the mesh axes by name, such as `{"tensor": 8}`, for "bytes_per_device"; one device by default.
        model_type: the family to use instead of the one in `config.json`.

    Returns:
        JSON values with the format, the family, the tensors' dtypes after reading ("dtypes"), llama.cpp's types in a
        GGUF file ("stored_types"), the files, missing and unknown tensors, the configuration, the number of trunk
        layers by kind of attention, and the number and bytes of parameters. "copies" lists the dimensions that are
        replicated because they are not divisible by their mesh axis. Loading raises the first of the "problems" as an
        error, and logs the "notes" as warnings.
    """
    found = find_checkpoint(path)
    # `config`, `sizes` and `scaled` are intermediate values; the rest is reported.
    facts = _inspect_mtpjax(found) if is_checkpoint(found) else _inspect_hugging_face(path, model_type)
    config, sizes = facts.pop("config"), facts.pop("sizes")
    facts.pop("scaled")
    # Compute the numbers that follow from the configuration and the shapes in both formats.
    facts["bytes"] = sum(facts["shards"].values())
    facts["parameters"] = count_parameters(config)
    facts["bytes_of_parameters"] = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes.values())
    # Use the sharding of `mtpjax.load(mesh=...)`. Arrays are replicated along axes that they do not use.
    mesh = mesh or {}
    facts["mesh"] = mesh
    facts["bytes_per_device"] = sum(
        math.prod(shape) // num_shards(param_part_spec(name, shape, config, mesh), mesh) * dtype.itemsize
        for name, (shape, dtype) in sizes.items()
    )
    facts["copies"] = find_copies(config, mesh)
    facts["attention"] = count_attention_kinds(config)
    facts["configuration"] = config.to_dict()
    return facts


def stored_params(path, *, model_type: str | None = None) -> tuple[ModelConfig, dict]:
    """Returns a checkpoint's configuration and abstract parameters (shapes and dtypes), without reading weights.

    Args:
        path: the checkpoint, or a run folder.
        model_type: the family to use instead of the one in `config.json`.
    """
    found = find_checkpoint(path)
    facts = _inspect_mtpjax(found) if is_checkpoint(found) else _inspect_hugging_face(path, model_type)
    if facts["problems"]:
        raise CheckpointFileError(facts["problems"][0])
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in facts["sizes"].items()}
    return facts["config"], nest(leaves, facts["scaled"])


def count_attention_kinds(config: ModelConfig) -> dict[str, int]:
    """Counts the trunk's layers by kind of attention.

    The kinds are "full_attention" (grouped-query), "sliding_attention" (grouped-query within a window),
    "linear_attention" (gated delta rule), "latent_attention" (multi-head latent), and "sparse_latent_attention"
    (latent, with an indexer).
    """
    kinds = (
        "sliding_attention"
        if kind.is_sliding
        else ("sparse_" if kind.indexer else "") + ATTENTION_NAMES[kind.attention]
        for kind in config.trunk_kinds
    )
    return dict(collections.Counter(kinds))


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Counts a model's parameters.

    Returns "trunk" (including embedding and head) and "mtp" (the MTP modules). "active" and "mtp_active" count only the
    parameters in one token's matrix products. They include `num_experts_per_tok` of the routed experts, and the
    embedding only if it is also the head.
    """
    counts = collections.Counter(trunk=0, mtp=0, active=0, mtp_active=0)
    # All layouts have the same parameters, so use the default one.
    for path, spec in param_specs(config, Layout(), lambda name: False).items():
        part = "mtp" if path.startswith("mtp_") else "trunk"
        number = math.prod(spec.shape)
        counts[part] += number
        # A token uses only some of the routed experts.
        if path.endswith(("experts/gate_up", "experts/down")):
            number = number // config.n_routed_experts * config.num_experts_per_tok
        # The embedding is a table look-up, unless it is also the head.
        if path.startswith(("embedding", "mtp_embedding")) and not config.tie_word_embeddings:
            continue
        counts["mtp_active" if part == "mtp" else "active"] += number
    return dict(counts)


def format_lines(facts: dict[str, Any]) -> list[str]:
    """Formats the result of `inspect` as a table with 80 characters per line. Long paths and names are not wrapped."""
    config, parameters, quantization = facts["configuration"], facts["parameters"], facts["quantization"]
    experts = "dense"
    if config["n_routed_experts"]:
        experts = f"{config['n_routed_experts']} experts, {config['num_experts_per_tok']} per token, "
        experts += f"from layer {config['first_k_dense_replace']} on"
    types = [("dtypes", _format_types(facts["dtypes"]))]
    quantized = json.dumps(quantization or "none").strip('"')
    # GGUF files are dequantized when they are loaded.
    if facts["stored_types"]:
        types = [("stored as", _format_types(facts["stored_types"])), ("loaded as", types[0][1])]
        if quantization:
            quantized = f"{', '.join(quantization['types'])}, dequantized when the file is loaded"
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["attention"].items())
    sizes = f"vocabulary {config['vocab_size']}, width {config['hidden_size']}, "
    sizes += f"context {config['max_position_embeddings']}"
    files = f"{count_of(len(facts['shards']), 'shard')}, {count_of(facts['tensors'], 'tensor')}"
    rows = [
        ("checkpoint", f"{facts['path']} ({facts['format']})"),
        ("family", facts["model_type"]),
        ("layers", f"{layers}; {experts}"),
        ("sizes", sizes),
        ("MTP modules", str(config["num_mtp_modules"])),
        (
            "parameters",
            f"{parameters['trunk']:,} in the trunk, {parameters['active']:,} of them active; "
            f"{parameters['mtp']:,} in MTP modules, {parameters['mtp_active']:,} active",
        ),
        *types,
        ("quantization", quantized),
        ("files", f"{files}, {format_bytes(facts['bytes'])}"),
        ("memory", f"{format_bytes(facts['bytes_per_device'])} of parameters per device on {mesh_text(facts['mesh'])}"),
    ]
    rows += [("copies", problem) for problem in facts["copies"]]
    rows += [("note", note) for note in facts["notes"]]
    rows += [("not loadable", problem) for problem in facts["problems"][:4]]
    # Count tied, other, missing and unknown tensors, and list a few names of each kind.
    for name in ("tied", "other", "missing", "extra"):
        found = facts[name]
        if found:
            rows.append((f"{name} tensors", f"{len(found)}: {', '.join(found[:4])}{', …' if len(found) > 4 else ''}"))
    if not facts["problems"]:
        rows.append(("complete", "no missing or unknown tensors"))
    # Indent continuation lines to the start of the value.
    fill = textwrap.TextWrapper(
        width=LINE_WIDTH, subsequent_indent=" " * (NAME_WIDTH + 1), break_long_words=False, break_on_hyphens=False
    )
    return [line for name, value in rows for line in fill.wrap(f"{name:<{NAME_WIDTH}} {value}")]


def _format_types(kinds: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{kind['tensors']} {name} ({format_bytes(kind['bytes'])})" for name, kind in kinds.items())


def format_bytes(count: float) -> str:
    """Formats a number of bytes with a decimal unit, such as "1.5 GB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((power for power in range(len(units) - 1) if count < 1000 ** (power + 1)), len(units) - 1)
    return f"{count / 1000**power:.4g} {units[power]}"


def _inspect_hugging_face(path, model_type: str | None) -> dict[str, Any]:
    with open_checkpoint(path) as files:
        plan = inspect_files(files, model_type=model_type)
        stored_types = files.stored_types() if isinstance(files, GGUFFiles) else {}
        quantized = [name for name in stored_types if name not in UNQUANTIZED]
        notes = [plan.mixed] if plan.mixed else []
        notes += [f"files that are not read: {', '.join(files.unread)}"] if files.unread else []
        quantization = {"quant_method": "gguf", "types": quantized} if quantized else None
        return {
            "path": str(path),
            "format": "GGUF" if is_gguf(path) else "Hugging Face",
            "model_type": plan.model_type,
            "quantization": files.json("config.json").get("quantization_config") or quantization,
            "stored_types": stored_types,
            "dtypes": _count_by_dtype((tensor.shape, tensor.dtype) for tensor in files.tensors.values()),
            "shards": dict(files.sizes),
            "tensors": len(files.tensors),
            **{name: list(getattr(plan, name)) for name in ("missing", "extra", "tied", "other", "problems")},
            "unread": list(files.unread),
            "notes": notes,
            "config": plan.config,
            "sizes": dict(_param_sizes(plan)),
            "scaled": {
                path: (plan.specs[path].in_axis, plan.scales.block[1])
                for path, dtype in plan.dtypes.items()
                if dtype == E4M3
            },
        }


def _param_sizes(plan: LoadPlan) -> Iterator[tuple[str, tuple[tuple[int, ...], np.dtype]]]:
    """Yields `(path, (shape, dtype))` for each array in the loaded parameters."""
    for path, spec in plan.specs.items():
        dtype = plan.dtypes[path]
        yield f"{path}/values" if dtype == E4M3 else path, (spec.shape, dtype)
        if dtype == E4M3:
            yield f"{path}/scales", (scale_spec(spec, plan.scales).shape, FLOAT32)


def _inspect_mtpjax(path: pathlib.Path) -> dict[str, Any]:
    # Do not verify digests here, because hashing a large checkpoint takes minutes. Loading verifies them.
    stored = CheckpointReader(path, verify=False)
    config = stored.model_config()
    sizes = {name: (tuple(record["shape"]), np.dtype(record["dtype"])) for name, record in stored.records.items()}
    return {
        "path": str(path),
        "format": "mtpjax",
        "model_type": "described by the configuration",
        "quantization": {"block": next(iter(stored.scaled.values()))[1]} if stored.scaled else None,
        "stored_types": {},
        "dtypes": _count_by_dtype(sizes.values()),
        "shards": {name: (path / name).stat().st_size for name in stored.files},
        "tensors": len(sizes),
        **{name: [] for name in ("missing", "extra", "tied", "other", "unread", "notes", "problems")},
        "config": config,
        "sizes": sizes,
        "scaled": stored.scaled,
    }


def _count_by_dtype(arrays: Iterable[tuple[tuple[int, ...], np.dtype]]) -> dict[str, dict[str, int]]:
    """Counts arrays and their bytes by dtype."""
    kinds: dict[str, dict[str, int]] = {}
    for shape, dtype in arrays:
        kind = kinds.setdefault(DTYPE_NAMES[dtype], {"tensors": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["bytes"] += math.prod(shape) * dtype.itemsize
    return kinds
