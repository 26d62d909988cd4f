"""Our own checkpoint format: a configuration and a params pytree in one folder, every array under a digest.

    config.json    format name and version, the configuration, metadata
    digests.json   the sha256 of every other file; per array its shape, dtype and the sha256 of its elements
    params/        the arrays, written by Orbax, in a folder each

Orbax restores flipped bits without an error: hence the digests. Those of the files are checked first, so that no
parser meets damaged data; those of the arrays prove that what was read is what was in memory when it was saved.
"""

import hashlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.config import ModelConfig
from mtpjax.model import MTPModel
from mtpjax.sharding import shard_params

FORMAT = "mtpjax-checkpoint"
VERSION = 1


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or one whose content is not what was saved."""


def save(path, config_dict, params, *, metadata=None):
    """Writes a checkpoint folder at `path`, replacing one that is there once the new one is complete.

    Args:
      path: the folder; missing parents are made.
      config_dict: what JSON can hold. It comes back as JSON returns it: tuples as lists, keys as strings.
      params: nested dicts of jax or numpy arrays, of any dtype that JAX holds; keys are strings without "/" and ".".
      metadata: further JSON, such as the step; `None` is an empty dict.

    Everything is written to a hidden sibling and renamed, so an exception leaves what was at `path` as it was. A
    process killed between the two renames leaves both checkpoints complete under their hidden names. One process
    saves: in a run of several, gather the arrays first.

    Raises:
      ValueError: params hold something else than such arrays; no array, or one without elements; NaN in the JSON.
      TypeError: something in the JSON that it cannot hold.
      FileExistsError: `path` is neither a checkpoint nor an empty folder, and so is not ours to replace.
    """
    path = pathlib.Path(path).resolve()
    if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is no mtpjax checkpoint: remove it, or save elsewhere")
    config = {"format": FORMAT, "version": VERSION, "config": config_dict, "metadata": metadata or {}}
    config_bytes = _json_bytes(config)
    arrays = _flatten(params)
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    aside = path.with_name(f".tmp-{unique}")
    try:
        aside.mkdir()
        (aside / "config.json").write_bytes(config_bytes)
        _write_arrays(aside / "params", arrays)
        files = sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file())
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            digests = {
                "files": dict(zip(files, pool.map(_file_digest, (aside / file for file in files)), strict=True)),
                "arrays": dict(zip(arrays, pool.map(_describe, arrays.values()), strict=True)),
            }
        (aside / "digests.json").write_bytes(_json_bytes(digests))
        _move_in_place(aside, path, old=path.with_name(f".old-{unique}"))
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already unless something failed


def save_model(path, model: MTPModel, params: dict, *, metadata=None):
    """`save` with the model's configuration. Parameters have unrolled layers."""
    save(path, model.config.to_dict(), params, metadata=metadata)


def load(path, *, dtype=None, mesh: Mesh | None = None) -> tuple[MTPModel, dict]:
    """Reads `(model, params)` from our checkpoint, a run folder that holds one, or a Hugging Face directory.

    `dtype=None` keeps what the files hold, fp8 with its scales included; `mesh` lays the parameters out over it. Raises
    `CheckpointError`, or for a Hugging Face directory another `ValueError`.
    """
    path = pathlib.Path(path)
    inside = path / "checkpoint"
    if not is_checkpoint(inside) and not is_checkpoint(path) and (path / "config.json").is_file():
        from conversion.load import load as load_hugging_face

        return load_hugging_face(path, dtype=dtype, mesh=mesh)
    config, params, _ = restore(inside if is_checkpoint(inside) else path)
    try:
        model = MTPModel(ModelConfig.from_dict(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model configuration: {error}") from error
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return model, params if mesh is None else shard_params(params, mesh)


def restore(path):
    """Reads a checkpoint and verifies every digest.

    Returns `(config_dict, params, metadata)`: params as nested dicts of jax arrays on the default device, with the
    shapes, dtypes and bits that were saved, whatever devices the saving process had.

    Raises:
      CheckpointError: `path` is no checkpoint, is of a newer version, or something in it is missing, truncated or
        changed; the message names the array or the file.
    """
    path = pathlib.Path(path).resolve()
    config = _read_config(path)
    if config is None:
        raise CheckpointError(f"no mtpjax checkpoint at {path}: looked for a config.json with format {FORMAT!r}")
    if config.get("version") != VERSION:
        raise CheckpointError(f"{path / 'config.json'} has version {config.get('version')!r}, not {VERSION}")
    files, recorded = _read_digests(path)
    with ThreadPoolExecutor() as pool:
        for file, digest in zip(files, pool.map(_file_digest, (path / file for file in files)), strict=True):
            if digest != files[file]:
                problem = "is missing or unreadable" if digest is None else "differs from what was saved"
                raise CheckpointError(f"{path / file}{_of_array(file, recorded)} {problem}")
        arrays = _read_arrays(path / "params", recorded)
        for name, found in zip(arrays, pool.map(_describe, arrays.values()), strict=True):
            _check(path / "params", name, found, recorded[name])
    params = _unflatten({name: jnp.asarray(array) for name, array in arrays.items()})
    return config["config"], params, config["metadata"]


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
        complete = "config.json" in files and all(isinstance(record, dict) for record in arrays.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {_one_line(error)}") from error
    if not complete:
        raise CheckpointError(f"{file} is damaged: config.json or an array has no record")
    return files, arrays


def _write_arrays(folder, arrays):
    import orbax.checkpoint as ocp  # half a second, so only where it is used

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)  # OCDBT would mix the arrays' bytes in shared files
    handler.finalize = lambda directory: None  # merges OCDBT files of several processes, and warns that it found none
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(_unflatten(arrays)))


def _read_arrays(folder, recorded):
    """Name -> numpy array as Orbax returns it: no device, no sharding and no requested dtype takes part."""
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            stored = _flatten_tree(checkpointer.metadata(folder).item_metadata.tree)
            for name in sorted(recorded.keys() ^ stored.keys()):
                absent = folder if name in recorded else folder.with_name("digests.json")
                raise CheckpointError(f"array {name!r} is missing from {absent}")
            item = _unflatten(dict.fromkeys(recorded, 0))
            restore_args = _unflatten({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in recorded})
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


def _file_digest(file):
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


def _describe(array):
    """The record of one numpy array; the digest is over its elements in C order, without a copy."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": hashlib.sha256(flat.data).hexdigest()}


def _flatten(params):
    """Nested dicts of arrays -> `{"a/b": numpy array}`, refusing what could not come back the same."""
    arrays = {}
    for name, leaf in _flatten_tree(params).items():
        if not isinstance(leaf, (jax.Array, np.ndarray)) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"params[{name!r}] is a {type(leaf).__name__}; a checkpoint holds jax or numpy arrays")
        if not leaf.size:
            raise ValueError(f"params[{name!r}] has shape {leaf.shape}; Orbax holds no array without elements")
        array = np.asarray(leaf)
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


def _unflatten(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def _move_in_place(aside, path, *, old):
    """Renames `aside` to `path`; what was at `path` goes to `old` meanwhile, and back if that fails."""
    if path.exists():
        path.rename(old)
    try:
        aside.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _json_bytes(value):
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _one_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
