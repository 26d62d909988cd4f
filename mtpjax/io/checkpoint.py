"""Our own checkpoint format: a configuration and a params pytree in one folder, every array under a digest.

    config.json    format name and version, the configuration, metadata
    digests.json   the sha256 of every other file; per array its shape, dtype and the sha256 of its elements
    params/        the arrays, written by Orbax, in a folder each
    huggingface*   what else the Hugging Face directory held that this was converted from (`mtpjax.io.convert`)

Orbax restores flipped bits without an error: hence the digests. Those of the files are checked first, so that no
parser meets damaged data; those of the arrays prove that what was read is what was in memory when it was saved.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.atomic import new_folder
from mtpjax.data.tokenizer import FileTokenizer, count_tokens
from mtpjax.errors import CheckpointError
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.quantized import BlockScaled, is_scaled
from mtpjax.models.sharding import shard_params

FORMAT = "mtpjax-checkpoint"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Stream:
    """An array that need never be in memory as a whole: `read(index)` gives one chunk after the other of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


def save(path, config_dict, params, *, metadata=None, write_more: Callable[[pathlib.Path], Any] | None = None):
    """Writes a checkpoint folder at `path`, replacing one that is there once the new one is complete.

    Args:
      path: the folder; missing parents are made.
      config_dict: what JSON can hold. It comes back as JSON returns it: tuples as lists, keys as strings.
      params: nested dicts of jax or numpy arrays, `BlockScaled` or `Stream`, of any dtype that JAX holds; keys are
        strings without "/" and ".".
      metadata: further JSON, such as the step; `None` is an empty dict.
      write_more: called with the folder while it is written, to add files.

    An exception leaves what was at `path` as it was (`mtpjax.atomic`). One process saves: in a run of several, gather
    the arrays first.

    Raises:
      ValueError: params hold something else than such arrays; no array, or one without elements; NaN in the JSON.
      TypeError: something in the JSON that it cannot hold.
      FileExistsError: `path` is neither a checkpoint nor an empty folder, and so is not ours to replace.
    """
    path = pathlib.Path(path).resolve()
    params, scaled = _split_scaled(params)
    config = {"format": FORMAT, "version": VERSION, "config": config_dict, "metadata": metadata or {}}
    config_bytes = _json_bytes(config | ({"block_scaled": scaled} if scaled else {}))
    arrays = _flatten(params)
    with new_folder(path, is_checkpoint) as aside:
        (aside / "config.json").write_bytes(config_bytes)
        records, known = _write_arrays(aside / "params", arrays)
        if write_more is not None:
            write_more(aside)
        files = sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file())
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            digests = pool.map(lambda file: known.get(file) or file_digest(aside / file), files)
            sums = dict(zip(files, digests, strict=True))
        (aside / "digests.json").write_bytes(_json_bytes({"files": sums, "arrays": records}))


def save_model(path, model: MTPModel, params: dict, *, metadata=None, tokenizer: FileTokenizer | None = None):
    """`save` with the model's configuration, and a tokenizer beside it. Parameters have unrolled layers."""

    def write_tokenizer(folder: pathlib.Path) -> None:
        if tokenizer is not None:
            (folder / "huggingface").mkdir()
            tokenizer.save(folder / "huggingface")

    save(path, model.config.to_dict(), params, metadata=metadata, write_more=write_tokenizer)


def load(path, *, dtype=None, mesh: Mesh | None = None) -> tuple[MTPModel, dict]:
    """Reads `(model, params)` from our checkpoint, a run folder that holds one, or a Hugging Face directory.

    Where a tokenizer stands beside it, `model.config.num_tokens` says how many ids have a meaning: no other is decoded.

    `dtype=None` keeps what the files hold, fp8 with its scales included; `mesh` lays the parameters out over it. Raises
    `CheckpointError`, or for a Hugging Face directory another `ValueError`.
    """
    path = find(path)
    if not is_checkpoint(path) and (path / "config.json").is_file():
        from conversion.load import load as load_hugging_face

        model, params = load_hugging_face(path, dtype=dtype, mesh=mesh)
        return _without_padding(model, path), params
    config, params, _ = restore(path)
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params, is_leaf=is_scaled)
    model = _without_padding(MTPModel(model_config(config, path)), path)
    return model, params if mesh is None else shard_params(params, mesh)


def _without_padding(model: MTPModel, path) -> MTPModel:
    """The model, told where its tables have more rows than the checkpoint's tokenizer has tokens."""
    count = count_tokens(path)
    if count is None or count >= model.config.vocab_size:
        return model
    return MTPModel(dataclasses.replace(model.config, num_tokens=count))


def find(path) -> pathlib.Path:
    """The checkpoint of a run folder, or `path` itself."""
    path = pathlib.Path(path)
    return path / "checkpoint" if is_checkpoint(path / "checkpoint") else path


def digest(path: pathlib.Path) -> str:
    """Hexadecimal sha256 that tells checkpoints apart without reading weights.

    Ours by their digests, Hugging Face's by configuration, index and the sizes of their files.
    """
    described = [path / name for name in ("digests.json", "config.json", "model.safetensors.index.json")]
    whole = hashlib.sha256(b"".join(file.read_bytes() for file in described if file.is_file()))
    for file in sorted(path.glob("*.safetensors")):
        whole.update(f"{file.name} {file.stat().st_size}".encode())
    return whole.hexdigest()


def model_config(config: Any, path) -> ModelConfig:
    """The configuration that `save_model` wrote. Raises `CheckpointError`."""
    try:
        return ModelConfig.from_dict(config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model configuration: {error}") from error


def restore(path):
    """Reads a checkpoint and verifies every digest.

    Returns `(config_dict, params, metadata)`: params as nested dicts of jax arrays on the default device, with the
    shapes, dtypes and bits that were saved, whatever devices the saving process had.

    Raises:
      CheckpointError: `path` is no checkpoint, is of a newer version, or something in it is missing, truncated or
        changed; the message names the array or the file.
    """
    stored = Stored(path)
    with ThreadPoolExecutor() as pool:
        arrays = _read_arrays(stored.path / "params", stored.records)
        chunks = [stored.records[name].get("chunks") for name in arrays]
        for name, found in zip(arrays, pool.map(describe_array, arrays.values(), chunks), strict=True):
            _check(stored.path / "params", name, found, stored.records[name])
    params = unflatten({name: jnp.asarray(array) for name, array in arrays.items()})
    return stored.config, _join_scaled(params, stored.scaled), stored.metadata


class Stored:
    """A checkpoint whose files have proved to be those that were saved; its arrays are read part by part.

    `verify=False` takes the files' word for it, to read descriptions only. Raises `CheckpointError` as `restore` does.
    """

    def __init__(self, path, *, verify: bool = True):
        self.path = pathlib.Path(path).resolve()
        config = _read_config(self.path)
        if config is None:
            raise CheckpointError(
                f"no mtpjax checkpoint at {self.path}: looked for a config.json with format {FORMAT!r}"
            )
        if config.get("version") != VERSION:
            raise CheckpointError(f"{self.path / 'config.json'} has version {config.get('version')!r}, not {VERSION}")
        self.files, self.records = _read_digests(self.path)
        with ThreadPoolExecutor() as pool:
            files = self.files if verify else {}
            found = pool.map(file_digest, (self.path / file for file in files))
            for file, digest in zip(files, found, strict=True):
                if digest != self.files[file]:
                    problem = "is missing or unreadable" if digest is None else "differs from what was saved"
                    raise CheckpointError(f"{self.path / file}{_of_array(file, self.records)} {problem}")
        self.config, self.metadata, self.scaled = config["config"], config["metadata"], config.get("block_scaled", {})
        self._open, self._context = {}, None

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of array `name`, like `a/b`."""
        import tensorstore

        if name not in self._open:
            self._context = self._context or _one_thread()
            spec = _store(self.path / "params", name)
            self._open[name] = tensorstore.open(spec, read=True, context=self._context).result()
        return self._open[name][index].read().result()


def is_checkpoint(path):
    """Whether `path` is a folder of this format, of any version; says nothing of its arrays. Never raises."""
    return _read_config(pathlib.Path(path)) is not None


def _read_config(path):
    """The content of config.json, or `None` where it is not of this format."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # ValueError: neither JSON nor UTF-8
        return None
    return config if isinstance(config, dict) and config.get("format") == FORMAT else None


def _read_digests(path):
    """`(file -> sha256, array name -> {"shape", "dtype", "sha256"})` of digests.json."""
    file = path / "digests.json"
    try:
        digests = json.loads(file.read_bytes())
        files, arrays = dict(digests["files"]), dict(digests["arrays"])
        complete = "config.json" in files and all(_is_record(record) for record in arrays.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {_one_line(error)}") from error
    if not complete:
        raise CheckpointError(f"{file} is damaged: config.json or an array has no record")
    return files, arrays


def _is_record(record):
    chunks = record.get("chunks", [1]) if isinstance(record, dict) else [0]
    return isinstance(chunks, list) and all(isinstance(size, int) and size > 0 for size in chunks)


def _write_arrays(folder, arrays):
    """Writes the arrays with Orbax, and what it describes but is only streamed here.

    Returns name -> record, and the digests of files that are known already.
    """
    import orbax.checkpoint as ocp  # half a second, so only where it is used

    checkpointer, handler = _checkpointer()
    handler.finalize = lambda directory: None  # merges OCDBT files of several processes, and warns that it found none
    streams = {name: array for name, array in arrays.items() if isinstance(array, Stream)}
    stand_ins = {name: np.zeros(1, stream.dtype) for name, stream in streams.items()}
    with checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(unflatten(arrays | stand_ins)))
    whole = {name: array for name, array in arrays.items() if name not in streams}
    with ThreadPoolExecutor() as pool:
        records = dict(zip(whole, pool.map(describe_array, whole.values()), strict=True))
    streamed, known = _write_streams(folder, streams)
    records |= streamed
    return {name: records[name] for name in arrays}, known


def _write_streams(folder, streams):
    """Writes arrays chunk by chunk, as uncompressed zarr, which is what Orbax reads; returns as `_write_arrays` does.

    A file of a whole chunk has the chunk's own bytes, and so its digest.
    """
    import tensorstore

    stores, context = {}, _one_thread()
    for name, stream in streams.items():
        spec = _store(folder, name)
        shutil.rmtree(spec["kvstore"]["path"])
        dtype = "bool" if stream.dtype == np.bool_ else stream.dtype.name
        spec |= {"dtype": dtype, "store_data_equal_to_fill_value": True}
        spec["metadata"] = {"shape": stream.shape, "chunks": stream.chunks, "compressor": None}
        stores[name] = tensorstore.open(spec, create=True, context=context).result()

    def write(part):
        name, index = part
        array = np.ascontiguousarray(streams[name].read(index))
        stores[name][index].write(array, can_reference_source_data_indefinitely=True).result()
        return _digest(array)

    parts = [(name, index) for name, stream in streams.items() for index in _grid(stream.shape, stream.chunks)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a chunk in memory for each thread
        digests = list(pool.map(write, parts))
    sums: dict[str, Any] = {name: hashlib.sha256() for name in streams}
    known = {}
    for (name, index), digest in zip(parts, digests, strict=True):
        sums[name].update(digest)
        chunks = streams[name].chunks
        if all(cut.stop - cut.start == size for cut, size in zip(index, chunks, strict=True)):
            place = ".".join(str(cut.start // size) for cut, size in zip(index, chunks, strict=True))
            known[f"{folder.name}/{name.replace('/', '.')}/{place}"] = digest.hex()
    return {name: _record(stream, sums[name].hexdigest(), stream.chunks) for name, stream in streams.items()}, known


def _store(folder, name):
    """Where TensorStore finds an array that Orbax has written."""
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / name.replace("/", "."))}}


def _checkpointer():
    """Orbax's, and its handler: for this process alone, since the others of a run do not save or wait with it."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )
    # OCDBT would mix the arrays' bytes in shared files.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone), handler


def _one_thread():
    """Of TensorStore, for copies and for files: each more would keep memory of its own."""
    import tensorstore

    return tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}})


def _grid(shape, chunks):
    """The index of every chunk, in C order."""
    axes = [range(0, size, step) for size, step in zip(shape, chunks, strict=True)]
    for begins in itertools.product(*axes):
        yield tuple(
            slice(begin, min(begin + step, size)) for begin, step, size in zip(begins, chunks, shape, strict=True)
        )


def _read_arrays(folder, recorded):
    """Name -> numpy array as Orbax returns it: no device, no sharding and no requested dtype takes part."""
    import orbax.checkpoint as ocp

    try:
        with _checkpointer()[0] as checkpointer:
            stored = _flatten_tree(checkpointer.metadata(folder).item_metadata.tree)
            for name in sorted(recorded.keys() ^ stored.keys()):
                absent = folder if name in recorded else folder.with_name("digests.json")
                raise CheckpointError(f"array {name!r} is missing from {absent}")
            item = unflatten(dict.fromkeys(recorded, 0))
            restore_args = unflatten({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in recorded})
            tree = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
            return _flatten_tree(tree)
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever their parsers meet
        raise CheckpointError(f"{folder} cannot be read: {_one_line(error)}") from error


def _check(folder, name, found, recorded):
    """Raises `CheckpointError` for the first of shape, dtype and sha256 that differs from the record."""
    for key, value in found.items():
        if value != recorded.get(key):
            raise CheckpointError(f"array {name!r} in {folder} has {key} {value}; saved was {recorded.get(key)}")


def file_digest(file):
    """The sha256 of a file, or `None` where there is none to read."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _of_array(file, arrays):
    """` of array 'a/b'` for `params/a.b/0.0`, nothing for a file that is of no array alone."""
    name = file.split("/")[1].replace(".", "/") if file.count("/") > 1 else ""
    return f" of array {name!r}" if name in arrays else ""


def describe_array(array, chunks=None):
    """The record of one numpy array: the digest of its elements in C order, or of the digests of its chunks."""
    if chunks is None:
        return _record(array, _digest(array).hex())
    total = hashlib.sha256()
    for index in _grid(array.shape, chunks):
        total.update(_digest(np.ascontiguousarray(array[index])))
    return _record(array, total.hexdigest(), chunks)


def _record(array, digest, chunks=None):
    record = {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}
    return record if chunks is None else record | {"chunks": list(chunks)}


def _digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()  # without a copy


def _split_scaled(params):
    """`BlockScaled` leaves as `{values, scales}`, and name -> [axis, block] of them."""
    scaled = {}

    def split(path, leaf):
        if not is_scaled(leaf):
            return leaf
        scaled["/".join(path)] = [leaf.axis, leaf.block]
        return {"values": leaf.values, "scales": leaf.scales}

    return _map_leaves(split, params), scaled


def _join_scaled(params, scaled):
    for name, (axis, block) in scaled.items():
        *folders, last = name.split("/")
        node = params
        for folder in folders:
            node = node[folder]
        node[last] = BlockScaled(**node[last], axis=axis, block=block)
    return params


def _map_leaves(function, tree, path=()):
    if not isinstance(tree, Mapping):
        return function(path, tree)
    return {key: _map_leaves(function, value, (*path, key)) for key, value in tree.items()}


def _flatten(params):
    """Nested dicts of arrays -> `{"a/b": numpy array}`, refusing what could not come back the same."""
    arrays = {}
    for name, leaf in _flatten_tree(params).items():
        if not isinstance(leaf, (jax.Array, np.ndarray, Stream)) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"params[{name!r}] is a {type(leaf).__name__}; a checkpoint holds jax or numpy arrays")
        if not math.prod(leaf.shape):
            raise ValueError(f"params[{name!r}] has shape {leaf.shape}; Orbax holds no array without elements")
        array = leaf if isinstance(leaf, Stream) else np.asarray(leaf)
        if not array.dtype.isnative or not _is_jax_dtype(array.dtype):
            raise ValueError(f"params[{name!r}] has dtype {array.dtype.str} ({array.dtype}); JAX would not restore it")
        arrays[name] = array
    if not arrays:
        raise ValueError("params hold no array")
    return arrays


def _is_jax_dtype(dtype):
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype  # float64 is none unless jax_enable_x64


def _flatten_tree(tree, prefix=""):
    if not isinstance(tree, Mapping):
        raise ValueError(f"params are a {type(tree).__name__}, not nested dicts of arrays")
    leaves = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key or "." in key:  # "." is what Orbax joins names with
            raise ValueError(f"params key {key!r} under {prefix!r} is no string without '/' and '.'")
        if isinstance(value, Mapping) and value:
            leaves |= _flatten_tree(value, f"{prefix}{key}/")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a/b": value}` -> nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def _json_bytes(value):
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _one_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
