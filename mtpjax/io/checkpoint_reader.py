"""Reads checkpoints of mtpjax: whole (`restore`), or part by part (`CheckpointReader`)."""

import contextlib
import functools
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax import distributed
from mtpjax.errors import CheckpointError, one_line
from mtpjax.io.array_files import Index, array_record, array_spec, check_record, read_arrays, single_thread_context
from mtpjax.io.checkpoint_format import (
    ARRAYS_FOLDER,
    CONFIG_FILE,
    FORMAT,
    VERSION,
    file_digest,
    read_config,
    read_digests,
)
from mtpjax.io.param_tree import join_scaled, unflatten
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import choose_layout
from mtpjax.models.sharding import read_parts
from mtpjax.safe_open import allowed_root


def restore(
    path,
    *,
    mesh: Mesh | None = None,
    allow_copies: bool = False,
    layout: Literal["decoding", "training"] = "decoding",
) -> tuple[Any, dict, dict]:
    """Reads a whole checkpoint and verifies every digest.

    Args:
        mesh: shards the parameters of a model over this mesh, one array at a time. All processes of the run must read
            it together, and each verifies its share of the files. None: the default device.
        layout: the layout for decoding, or the one for training.

    Returns:
        `(config_dict, params, metadata)`. The params are nested dicts of jax arrays, with the shapes, dtypes and bits
        that were saved, regardless of the saving process's devices.
    """
    # The reader checks the digests of files before an array is opened.
    if mesh is not None:
        with distributed.raise_together(CheckpointError(f"another process cannot read {path}")):
            reader = CheckpointReader(path, verify=own_share())
            sharding_of = choose_layout(reader.model_config(), mesh, layout, allow_copies=allow_copies)
            placed = {name: reader.place(name, functools.partial(sharding_of, name)) for name in reader.records}
        return reader.config, join_scaled(unflatten(placed), reader.scaled), reader.metadata
    reader = CheckpointReader(path)
    folder = reader.path / ARRAYS_FOLDER
    arrays = read_arrays(folder, reader.records)
    # The arrays in memory must be the ones that were in memory when they were saved.
    with ThreadPoolExecutor() as pool:
        chunks = [reader.records[name].get("chunks") for name in arrays]
        for name, found in zip(arrays, pool.map(array_record, arrays.values(), chunks), strict=True):
            check_record(folder, name, found, reader.records[name])
    # Nest the arrays by name, and put values and scales of quantized parameters together again.
    params = unflatten({name: jnp.asarray(array) for name, array in arrays.items()})
    return reader.config, join_scaled(params, reader.scaled), reader.metadata


class CheckpointReader:
    """A checkpoint whose arrays are read part by part, for conversion with bounded memory.

    Attributes:
        path: the resolved folder.
        config: the model configuration as plain values.
        metadata: the metadata that was saved.
        files: sha256 by file name.
        records: shape, dtype and sha256 by flat array name.
        scaled: `[axis, block]` of quantized parameters by flat name.
    """

    def __init__(self, path, *, verify: bool | slice = True):
        """Opens a checkpoint and checks the digests of its files.

        Args:
            verify: check the digest of every file, or only of these, if others check the rest (`own_share`). False
                reads only descriptions, for `mtpjax inspect`.
        """
        self.path = pathlib.Path(path).resolve()
        config = read_config(self.path)
        if config is None:
            raise CheckpointError(
                f"no mtpjax checkpoint at {self.path}: looked for a config.json with format {FORMAT!r}"
            )
        # Formats of other versions are rejected, not guessed at.
        if config.get("version") != VERSION:
            raise CheckpointError(
                f"{self.path / CONFIG_FILE} has version {config.get('version')!r}, not {VERSION}: it was written by "
                "another version of mtpjax"
            )
        self.files, self.records = read_digests(self.path)
        if verify:
            self._verify_files(verify if isinstance(verify, slice) else slice(None))
        # Valid digests do not prove that `save` wrote the content.
        if "config" not in config:
            raise CheckpointError(f"{self.path / CONFIG_FILE} is damaged: it has no 'config'")
        self.config: Any = config["config"]
        self.metadata: dict[str, Any] = config.get("metadata", [])  # anything but an object is an error
        self.scaled: dict[str, Any] = config.get("block_scaled", {})
        for name, value in (("metadata", self.metadata), ("block_scaled", self.scaled)):
            if not isinstance(value, dict):
                raise CheckpointError(f"{self.path / CONFIG_FILE} is damaged: {name!r} is not an object")
        # Arrays are opened when they are first read, since a converter reads them one at a time.
        self._open, self._context = {}, None

    def model_config(self) -> ModelConfig:
        """Reads the configuration as a `ModelConfig`."""
        return model_config(self.config, self.path)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a part of an array.

        Args:
            name: the flat name, such as "trunk/layer_0/attention/qkv".
        """
        return self._store(name)[index].read().result()

    def read_checked(self, name: str) -> np.ndarray:
        """Reads an array whole and verifies its digest."""
        with self._reading(name):
            array = self.read(name, ())
        record = self.records[name]
        check_record(self.path / ARRAYS_FOLDER, name, array_record(array, record.get("chunks")), record)
        return array

    def place(self, name: str, sharding_of: Callable[[tuple[int, ...]], jax.sharding.Sharding]) -> jax.Array:
        """Reads the shards of an array that this process's devices hold."""
        # An unchunked array is one file, which is read whole: its digest covers all elements.
        if "chunks" not in self.records[name]:
            array = self.read_checked(name)
            return read_parts(array.shape, sharding_of(array.shape), lambda cut: array[_slices(cut)])
        # Read only the chunks of these shards of a chunked array; each chunk's file has a digest.
        with self._reading(name):
            store = self._store(name)
        shape = tuple(store.shape)
        found = {"shape": list(shape), "dtype": store.dtype.numpy_dtype.name}
        check_record(self.path / ARRAYS_FOLDER, name, found, self.records[name])

        def read(cut: tuple[tuple[int, int], ...]) -> np.ndarray:
            with self._reading(name):
                return self.read(name, _slices(cut))

        return read_parts(shape, sharding_of(shape), read)

    def _store(self, name: str) -> Any:
        """Opens an array with TensorStore. Opening reads its description, so each is opened once."""
        import tensorstore

        if name not in self._open:
            self._context = self._context or single_thread_context()
            spec = array_spec(self.path / ARRAYS_FOLDER, name)
            self._open[name] = tensorstore.open(spec, read=True, context=self._context).result()
        return self._open[name]

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Converts TensorStore's errors, of any kind, to `CheckpointError`."""
        try:
            yield
        except Exception as error:
            folder = self.path / ARRAYS_FOLDER
            raise CheckpointError(f"array {name!r} in {folder} cannot be read: {one_line(error)}") from error

    def _check_place(self, entry: pathlib.Path) -> None:
        """Raises `CheckpointError` unless a file is a regular one inside the checkpoint."""
        # Files of a repository of the Hugging Face Hub are links into its cache.
        real, root = entry.resolve(), allowed_root(self.path)
        if not real.is_relative_to(root) or not stat.S_ISREG(os.stat(entry).st_mode if real.exists() else 0):
            raise CheckpointError(f"{entry} is not a regular file of the checkpoint: not opened")

    def _verify_files(self, which: slice) -> None:
        """Compares files with their digests, several at once."""
        # A link or device that no digest covers could still be opened as a part of an array.
        for entry in self.path.rglob("*"):
            if not entry.is_dir() or entry.is_symlink():
                self._check_place(entry)
        files = list(self.files)[which]
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda file: file_digest(self.path / file, self.path), files)
            for file, digest in zip(files, found, strict=True):
                if digest != self.files[file]:
                    problem = "is missing or unreadable" if digest is None else "differs from what was saved"
                    raise CheckpointError(f"{self.path / file}{_array_suffix(file, self.records)} {problem}")


def own_share() -> slice:
    """Returns which files of a checkpoint this process verifies, if all processes of the run read it together."""
    return slice(jax.process_index(), None, jax.process_count())


def model_config(values: Any, path) -> ModelConfig:
    """Builds a `ModelConfig` from the values in a checkpoint."""
    try:
        return ModelConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model configuration: {error}") from error


def _slices(cut: tuple[tuple[int, int], ...]) -> Index:
    return tuple(slice(begin, end) for begin, end in cut)


def _array_suffix(file: str, arrays: dict[str, Any]) -> str:
    """Returns " of array 'a/b'" for the file `params/a.b/0.0`, and "" for a file that belongs to no single array."""
    # Orbax stores the array `a/b` in the folder `params/a.b`.
    name = file.split("/")[1].replace(".", "/") if file.count("/") > 1 else ""
    return f" of array {name!r}" if name in arrays else ""
