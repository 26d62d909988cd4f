"""Reads mtpjax checkpoints, either whole (`restore`) or part by part (`CheckpointReader`)."""

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
from mtpjax.io.array_files import Index, array_record, array_spec, check_record, nest, single_thread_context
from mtpjax.io.checkpoint_format import (
    ARRAYS_FOLDER,
    CONFIG_FILE,
    DIGESTS_FILE,
    FORMAT,
    VERSION,
    file_digest,
    read_config,
    read_digests,
)
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
        mesh: the mesh over which to shard a model's parameters, one array at a time. All processes of the run must call
            this together, and each verifies some of the files. None puts all parameters on the default device.
        layout: whether to shard the parameters for decoding or for training.

    Returns:
        `(config_dict, params, metadata)`. The params are nested dicts of jax arrays with the saved shapes, dtypes and
        bits, regardless of the devices from which they were saved.
    """
    # The reader checks file digests before it opens an array.
    if mesh is not None:
        with distributed.raise_together(CheckpointError(f"another process cannot read {path}")):
            reader = CheckpointReader(path, verify=own_share())
            sharding_of = choose_layout(reader.model_config(), mesh, layout, allow_copies=allow_copies)
            placed = {name: reader.place(name, functools.partial(sharding_of, name)) for name in reader.records}
    else:
        reader = CheckpointReader(path, is_threaded=True)
        with ThreadPoolExecutor() as pool:
            arrays = pool.map(reader.read_checked, reader.records)
            placed = {name: jnp.asarray(array) for name, array in zip(reader.records, arrays, strict=True)}
    # Nest the arrays by name, and join the values and scales of quantized parameters again.
    return reader.config, nest(placed, reader.scaled), reader.metadata


class CheckpointReader:
    """A checkpoint whose arrays are read part by part, for conversion with bounded memory.

    Attributes:
        path: the resolved folder.
        config: the model configuration as plain values.
        metadata: the saved metadata.
        files: sha256 by file name.
        records: shape, dtype and sha256 by flat array name.
        scaled: `[axis, block]` by flat name, for quantized parameters.
    """

    def __init__(self, path, *, verify: bool | slice = True, is_threaded: bool = False):
        """Opens a checkpoint and checks the digests of its files.

        Args:
            verify: whether to check the digests of all files, or the slice of files to check if other processes check
                the rest (`own_share`). False reads only metadata, as `mtpjax inspect` does.
            is_threaded: whether to use several threads. Each thread uses memory, so conversion uses only one.
        """
        self.path = pathlib.Path(path).resolve()
        config = read_config(self.path)
        if config is None:
            raise CheckpointError(f"no mtpjax checkpoint at {self.path}: it has no config.json with format {FORMAT!r}")
        if config.get("version") != VERSION:
            raise CheckpointError(
                f"{self.path / CONFIG_FILE} has version {config.get('version')!r}, not {VERSION}: it was written by "
                "a different version of mtpjax"
            )
        self.files, self.records = read_digests(self.path)
        if verify:
            self._verify_files(verify if isinstance(verify, slice) else slice(None))
        # Valid digests do not prove that the content has the right structure.
        if "config" not in config:
            raise CheckpointError(f"{self.path / CONFIG_FILE} is damaged: it has no 'config'")
        self.config: Any = config["config"]
        self.metadata: dict[str, Any] = config.get("metadata", [])  # a missing value is an error below
        self.scaled: dict[str, Any] = config.get("block_scaled", {})
        for name, value in (("metadata", self.metadata), ("block_scaled", self.scaled)):
            if not isinstance(value, dict):
                raise CheckpointError(f"{self.path / CONFIG_FILE} is damaged: {name!r} is not an object")
        # Arrays are opened when they are first read.
        self._open, self._context, self._is_threaded = {}, None, is_threaded

    def model_config(self) -> ModelConfig:
        """Reads the configuration as a `ModelConfig`."""
        return model_config(self.config, self.path)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a part of an array by its flat name, such as "trunk/layer_0/attention/qkv"."""
        return self._store(name)[index].read().result()

    def read_checked(self, name: str) -> np.ndarray:
        """Reads an array whole and verifies its digest."""
        with self._reading(name):
            array = self.read(name, ())
        record = self.records[name]
        check_record(self.path / ARRAYS_FOLDER, name, array_record(array, record.get("chunks")), record)
        return array

    def place(self, name: str, sharding_of: Callable[[tuple[int, ...]], jax.sharding.Sharding]) -> jax.Array:
        """Reads an array's shards for this process's devices."""
        # An array without chunks must be read whole, because its digest covers all elements.
        if "chunks" not in self.records[name]:
            array = self.read_checked(name)
            return read_parts(array.shape, sharding_of(array.shape), lambda cut: array[_slices(cut)])
        # From a chunked array, read only the chunks that these shards need. The file of each chunk has a digest.
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
        """Opens an array with TensorStore on first use."""
        import tensorstore

        if name not in self._open:
            if self._context is None and not self._is_threaded:
                self._context = single_thread_context()
            spec = array_spec(self.path / ARRAYS_FOLDER, name)
            self._open[name] = tensorstore.open(spec, read=True, context=self._context).result()
        return self._open[name]

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Converts any error from TensorStore to `CheckpointError`."""
        try:
            yield
        except Exception as error:
            folder = self.path / ARRAYS_FOLDER
            raise CheckpointError(f"array {name!r} in {folder} cannot be read: {one_line(error)}") from error

    def _verify_files(self, which: slice) -> None:
        """Compares files with their digests, several at once."""
        # Reject devices and links out of the checkpoint, because TensorStore could open them as parts of arrays even if
        # they have no digest. A snapshot's files in the Hugging Face cache are links to the repository's blobs, which
        # are allowed.
        root = allowed_root(self.path)
        for entry in self.path.rglob("*"):
            if entry.is_dir() and not entry.is_symlink():
                continue
            real = entry.resolve()
            if not real.is_relative_to(root) or not stat.S_ISREG(os.stat(entry).st_mode if real.exists() else 0):
                raise CheckpointError(f"{entry} is not a regular file inside the checkpoint: not opened")
        files = list(self.files)[which]
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda file: file_digest(self.path / file, self.path), files)
            for file, digest in zip(files, found, strict=True):
                if digest != self.files[file]:
                    problem = "is missing or unreadable" if digest is None else "differs from what was saved"
                    raise CheckpointError(f"{self.path / file}{_array_suffix(file, self.records)} {problem}")
        # An array without an entry would go unnoticed, and an entry without an array belongs to a different checkpoint.
        metadata = [file.split("/") for file in self.files if file.endswith("/.zarray")]
        stored = {parts[1].replace(".", "/") for parts in metadata if parts[0] == ARRAYS_FOLDER}
        for name in sorted(self.records.keys() ^ stored):
            absent = ARRAYS_FOLDER if name in self.records else DIGESTS_FILE
            raise CheckpointError(f"array {name!r} is missing from {self.path / absent}")


def own_share() -> slice:
    """Returns the slice of files that this process verifies when all processes read a checkpoint together."""
    return slice(jax.process_index(), None, jax.process_count())


def model_config(values: Any, path) -> ModelConfig:
    """Builds a `ModelConfig` from the values in a checkpoint."""
    try:
        return ModelConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has no valid model configuration: {error}") from error


def _slices(cut: tuple[tuple[int, int], ...]) -> Index:
    return tuple(slice(begin, end) for begin, end in cut)


def _array_suffix(file: str, arrays: dict[str, Any]) -> str:
    """Returns " of array 'a/b'" for the file `params/a.b/0.0`, and "" for a file that belongs to no single array."""
    # Orbax stores the array `a/b` in the folder `params/a.b`.
    name = file.split("/")[1].replace(".", "/") if file.count("/") > 1 else ""
    return f" of array {name!r}" if name in arrays else ""
