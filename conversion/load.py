"""A Hugging Face checkpoint directory -> model and parameters, tensor by tensor."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from conversion import hf_config
from conversion.files import CheckpointFileError, Files, same_content
from conversion.names import Layout, Leaf, Piece, copy_into, mtp_names, table, tied_copies
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.quantized import BlockScaled
from mtpjax.models.sharding import param_sharding

log = logging.getLogger("mtpjax.conversion")

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # a table beats a cast twice over
IGNORABLE = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
OTHER_PARTS = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")  # of models that see images too

Index = tuple[tuple[int, int], ...]  # begin, end of each axis of a leaf


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a directory holds in our terms; made from headers, and from the few tensors that decide something."""

    model_type: str
    config: ModelConfig
    layout: Layout
    leaves: dict[str, Leaf]
    scales: dict[str, str]  # fp8 tensor -> the tensor of its scales
    block: tuple[int, int] | None
    tied: dict[str, str]  # copies that are in the files -> what they repeat
    other: tuple[str, ...]  # tensors of other parts of the model, passed through on export
    missing: tuple[str, ...]
    extra: tuple[str, ...]  # not known
    dtypes: dict[str, np.dtype]  # of each leaf; only where nothing is missing


def plan(files: Files, *, dtype=None, model_type: str | None = None, allow_extra: bool = False) -> Plan:
    """Reads `config.json` and checks names, shapes and dtypes. Raises `CheckpointFileError` or `ConfigError`.

    `model_type` is taken instead of the one that the configuration names.
    """
    made = survey(files, model_type=model_type)
    if made.missing:
        found, named = held_modules(made.config, made.layout, files), made.config.num_mtp_modules
        modules = f"; config.json names {named} MTP modules, the files hold {found}" if found < named else ""
        raise CheckpointFileError(
            f"{files.path} lacks {len(made.missing)} tensors{modules}; missing: {', '.join(made.missing[:5])}"
        )
    if made.extra and not allow_extra:
        raise CheckpointFileError(
            f"{files.path} holds {len(made.extra)} tensors that are not known: {', '.join(made.extra[:5])}"
        )
    dtypes = {path: _leaf_dtype(path, leaf, files, made.scales, dtype) for path, leaf in made.leaves.items()}
    return dataclasses.replace(made, other=(*made.other, *made.extra), dtypes=dtypes)


def survey(files: Files, *, model_type: str | None = None) -> Plan:
    """`plan` that puts up with tensors that are missing or not known, and says which."""
    values = files.json("config.json")
    parsed = hf_config.parse(values, model_type)
    if "auto_map" in values:
        log.warning("config.json has auto_map: its code is not run")
    if parsed.unknown:
        log.warning("config.json: not known, and ignored: %s", ", ".join(parsed.unknown))
    config, layout = _settle_modules(parsed, files), parsed.layout
    config = _settle_copies(config, layout, files)
    leaves = table(config, layout, files.tensors.__contains__)
    config = _settle_norms(config, leaves, files)
    tied = {copy: original for copy, original in tied_copies(config, layout) if copy in files.tensors}
    wanted = {piece.name: piece.shape for leaf in leaves.values() for piece in leaf.pieces}
    for name, shape in wanted.items():
        if name in files.tensors and files.tensors[name].shape != shape:
            raise CheckpointFileError(
                f"tensor {name} has shape {files.tensors[name].shape}; the configuration gives {shape}"
            )
    scales = _scales(files, wanted, parsed.block)
    known = wanted.keys() | tied.keys() | set(scales.values())
    known |= {f"{name}_scale_inv" for name in tied}
    other, extra = [], []
    for name in sorted(files.tensors.keys() - known):
        if name.endswith(IGNORABLE):
            log.info("ignored: %s", name)
        (other if name.startswith(OTHER_PARTS) or name.endswith(IGNORABLE) else extra).append(name)
    return Plan(
        model_type=parsed.model_type,
        config=config,
        layout=layout,
        leaves=leaves,
        scales=scales,
        block=parsed.block,
        tied=tied,
        other=tuple(other),
        missing=tuple(sorted(wanted.keys() - files.tensors.keys())),
        extra=tuple(extra),
        dtypes={},
    )


def _settle_modules(parsed: hf_config.Parsed, files: Files) -> ModelConfig:
    """As many MTP modules as the files hold, or as the configuration names where that is more."""
    config = parsed.model
    found, named = held_modules(config, parsed.layout, files), config.num_mtp_modules
    if found > named:
        if parsed.mtp_given:
            log.warning("config.json names %d MTP modules; the files hold %d, which are taken", named, found)
        config = dataclasses.replace(config, num_mtp_modules=found)
    return config


def held_modules(config: ModelConfig, layout: Layout, files: Files) -> int:
    """How many MTP modules the files hold: those that have a first norm."""
    found = 0
    while mtp_names(config, layout, found)[0] + "input_layernorm.weight" in files.tensors:
        found += 1
    return found


def _settle_copies(config: ModelConfig, layout, files: Files) -> ModelConfig:
    """Copies of embedding and head inside MTP modules: equal ones are tied, others are kept apart."""
    own = {"embedding": [], "head": []}
    for copy, original in tied_copies(config, layout):
        if copy not in files.tensors or original not in files.tensors:
            log.info("%s is shared: the files hold no copy", copy)
            continue
        same = _same_bytes(files, copy, original)
        log.info("%s %s %s", copy, "equals, and is tied to," if same else "differs from, and is kept beside,", original)
        if not same and copy == "lm_head.weight":
            raise CheckpointFileError("tie_word_embeddings is true, but lm_head.weight differs from the embedding")
        own["embedding" if "embed_tokens" in copy else "head"].append(not same)
    changes = {}
    for name, differs in own.items():
        if any(differs):
            if len(differs) < config.num_mtp_modules:
                raise CheckpointFileError(f"some MTP modules have a {name} of their own and some have none")
            changes[f"mtp_own_{name}"] = True
    return dataclasses.replace(config, **changes) if changes else config


def _settle_norms(config: ModelConfig, leaves: dict[str, Leaf], files: Files) -> ModelConfig:
    """Zero-centred norms hold w of `1 + w`; some converted files hold `1 + w` already, and have means near 1."""
    names = [leaf.pieces[0].name for path, leaf in leaves.items() if path.endswith("norm_attention/scale")]
    held = [name for name in names if name in files.tensors and files.tensors[name].dtype in FLOATS]
    if not config.zero_centred_norm or not held:
        return config
    typical = float(np.median([files.read(name).astype(np.float32).mean() for name in held]))
    if typical < 0.5:
        return config
    log.warning(
        "norm weights have a mean of %.2f: the files hold 1 + w already, and they are taken as they are", typical
    )
    return dataclasses.replace(config, zero_centred_norm=False)


def _same_bytes(files: Files, one: str, other: str) -> bool:
    a, b = files.tensors[one], files.tensors[other]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and same_content(files.blocks(one), files.blocks(other))


def _scales(files: Files, wanted: dict[str, tuple[int, ...]], block: tuple[int, int] | None) -> dict[str, str]:
    """The tensor of scales of every fp8 tensor: `weight_scale_inv`, or `weight_scale`, as some releases name it."""
    scales = {}
    for name, shape in wanted.items():
        if name not in files.tensors or files.tensors[name].dtype != E4M3:
            continue
        found = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in files.tensors), None)
        if found is None:
            raise CheckpointFileError(f"tensor {name} is fp8, and {name}_scale_inv is missing")
        if block is None:
            raise CheckpointFileError(f"tensor {name} is fp8, and quantization_config names no block-wise fp8")
        grid = tuple(-(-size // side) for size, side in zip(shape, block, strict=True)) if len(shape) == 2 else None
        if files.tensors[found].shape != grid:
            raise CheckpointFileError(
                f"tensor {found} has shape {files.tensors[found].shape}; {shape} in blocks of {block} give {grid}"
            )
        scales[name] = found
    return scales


def _leaf_dtype(path: str, leaf: Leaf, files: Files, scales: dict[str, str], dtype) -> np.dtype:
    found = {files.tensors[piece.name].dtype for piece in leaf.pieces}
    for piece in leaf.pieces:
        kind = files.tensors[piece.name].dtype
        if kind not in FLOATS and piece.name not in scales and (dtype is None or kind.kind in "iub"):
            raise CheckpointFileError(f"tensor {piece.name} is {kind}, which is no dtype of weights here")
    if dtype is not None:
        return np.dtype(dtype)
    if len(found) > 1:
        raise CheckpointFileError(f"{path} is made of tensors of several dtypes, {sorted(map(str, found))}: name one")
    return found.pop()


def load(
    path,
    *,
    dtype=None,
    mesh: Mesh | None = None,
    allow_extra: bool = False,
    strict: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> tuple[MTPModel, dict]:
    """Reads a checkpoint directory: `(model, params)`.

    `dtype=None` keeps what the files hold, fp8 with its scales included (`BlockScaled`). Over a `mesh` each process
    reads what its devices hold. Weights that are not finite are counted in a warning, or refused if `strict`.
    `progress` is called with the bytes of every leaf that is done.
    """
    with Files(path, strict=strict) as files:
        made = plan(files, dtype=dtype, allow_extra=allow_extra)
        _check_memory(made, mesh)

        def read(path: str):
            value = _load_leaf(files, made, path, made.leaves[path], mesh)
            if progress:
                progress(sum(array.nbytes for array in jax.tree.leaves(value)))
            return value

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # reading and reordering let go of the interpreter lock
            values = pool.map(read, made.leaves)
            params = unflatten_dict(dict(zip(made.leaves, values, strict=True)), sep="/")
        files.report()
    return MTPModel(made.config), params


def _load_leaf(files: Files, made: Plan, path: str, leaf: Leaf, mesh: Mesh | None):
    dtype = made.dtypes[path]
    if dtype == E4M3:
        assert made.block is not None
        scales = scale_leaf(leaf, made.block)
        parts = {
            "values": (leaf, lambda index: read_leaf(files, leaf, index)),
            "scales": (scales, lambda index: read_scales(files, made, leaf, index)),
        }
        arrays = {name: _place(f"{path}/{name}", part.shape, mesh, read) for name, (part, read) in parts.items()}
        return BlockScaled(**arrays, axis=leaf.in_axis, block=made.block[1])
    return _place(path, leaf.shape, mesh, lambda index: read_as(files, made, leaf, index, dtype))


def _place(path: str, shape: tuple[int, ...], mesh: Mesh | None, read: Callable[[Index], np.ndarray]) -> jax.Array:
    if mesh is None:
        return jax.device_put(read(tuple((0, size) for size in shape)))

    def part(index) -> np.ndarray:
        return read(tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, param_sharding(path, shape, mesh), part)


def scale_leaf(leaf: Leaf, block: tuple[int, int]) -> Leaf:
    """The shape of a leaf's scales: its input axis in blocks, the others as they are."""
    shape = list(leaf.shape)
    shape[leaf.in_axis] = -(-shape[leaf.in_axis] // block[1])
    return dataclasses.replace(leaf, shape=tuple(shape))


def read_as(files: Files, made: Plan, leaf: Leaf, index: Index, dtype: np.dtype) -> np.ndarray:
    """A part of a leaf in `dtype`, dequantised where it is fp8 (multiplied in float32, then rounded once)."""
    values = read_leaf(files, leaf, index)
    if leaf.pieces[0].name in made.scales:
        assert made.block is not None
        axis, side = leaf.in_axis % len(leaf.shape), made.block[1]
        whole = (*index[:axis], (0, scale_leaf(leaf, made.block).shape[axis]), *index[axis + 1 :])
        values = dequantise(values, read_scales(files, made, leaf, whole), axis, side, index[axis][0])
    return values if values.dtype == dtype else values.astype(dtype)


def dequantise(values: np.ndarray, scales: np.ndarray, axis: int, side: int, begin: int) -> np.ndarray:
    """`value * scale` in float32, of values that begin at `begin` of the axis whose blocks of `side` share a scale."""
    cut = (slice(None),) * axis + (slice(begin, begin + values.shape[axis]),)
    return _E4M3_VALUES.take(values.view(np.uint8)) * np.repeat(scales, side, axis=axis)[cut]


def read_leaf(files: Files, leaf: Leaf, index: Index) -> np.ndarray:
    """The part `index` of a leaf; of each tensor the rows that it needs are read, one tensor at a time."""
    dtype = files.tensors[leaf.pieces[0].name].dtype
    return _fill(leaf, index, dtype, lambda piece, begin, end: files.read_checked(piece.name, begin, end))


def read_scales(files: Files, made: Plan, leaf: Leaf, index: Index) -> np.ndarray:
    """The scales of a part, float32; written out along rows, so that they follow the values' axes."""
    assert made.block is not None
    side = made.block[0]

    def rows(piece: Piece, begin: int, end: int) -> np.ndarray:
        first = begin // side
        blocks = files.read(made.scales[piece.name], first, -(-end // side)).astype(np.float32)
        return np.repeat(blocks, side, axis=0)[begin - first * side : end - first * side]

    return _fill(scale_leaf(leaf, made.block), index, np.dtype(np.float32), rows)


def _fill(leaf: Leaf, index: Index, dtype: np.dtype, rows: Callable[[Piece, int, int], np.ndarray]) -> np.ndarray:
    out = _aligned([end - begin for begin, end in index], dtype)
    for piece in leaf.pieces:
        for block in piece.blocks(dtype.itemsize):
            part = _part(block, leaf, index)
            if part is not None:
                narrow, local, target = part
                copy_into(out[target], narrow.read(rows(narrow, *narrow.rows))[local])
    return out


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX takes over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def _part(piece: Piece, leaf: Leaf, index: Index):
    """What of `piece` lies within `index`: the piece with fewer rows, a cut of it, and where that goes; or None."""
    local, target = [], []
    narrow = piece
    for axis, (place, size, (begin, end)) in enumerate(zip(piece.place, leaf.shape, index, strict=True)):
        if not isinstance(place, slice):
            if not begin <= place < end:
                return None
            target.append(place - begin)
            continue
        first, last, _ = place.indices(size)
        low, high = max(first, begin), min(last, end)
        if low >= high:
            return None
        target.append(slice(low - begin, high - begin))
        if axis == piece.rows_axis:
            narrow = piece.narrowed(low - first, high - first)
            local.append(slice(None))
        else:
            local.append(slice(low - first, high - first))
    return narrow, tuple(local), tuple(target)


def _check_memory(made: Plan, mesh: Mesh | None) -> None:
    """Refuses before anything is allocated what this machine cannot hold."""
    need = sum(np.prod(leaf.shape, dtype=np.int64) * made.dtypes[path].itemsize for path, leaf in made.leaves.items())
    devices = len(mesh.local_devices) / mesh.size if mesh is not None else 1
    if not hasattr(os, "sysconf"):
        return
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    if platform == "cpu" and need * devices > have:
        raise CheckpointFileError(f"the parameters need {need * devices:.3g} bytes; this machine has {have:.3g}")
