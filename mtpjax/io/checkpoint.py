"""Saves and loads checkpoints. `checkpoint_format` describes the folder that `save` writes."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtpjax import distributed
from mtpjax.atomic import atomic_folder
from mtpjax.errors import CheckpointError
from mtpjax.io.array_files import flatten_arrays, write_arrays
from mtpjax.io.checkpoint_format import (
    ARRAYS_FOLDER,
    CONFIG_FILE,
    DIGESTS_FILE,
    FORMAT,
    VERSION,
    file_digest,
    find_checkpoint,
    is_checkpoint,
    json_bytes,
)
from mtpjax.io.checkpoint_reader import model_config, restore
from mtpjax.io.huggingface_files import HUGGINGFACE_FOLDER, count_token_ids, read_kept_config
from mtpjax.io.param_tree import split_scaled
from mtpjax.models.config import Implementation, ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import is_of_modules
from mtpjax.models.quantized import is_scaled
from mtpjax.safe_open import is_gguf, parse_json


class SavableTokenizer(Protocol):
    """A tokenizer that can write its files, as `mtpjax.data.tokenizer.HuggingFaceTokenizer` does."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes the tokenizer's files into an existing folder."""
        ...


def save(
    path, config_dict, params, *, metadata=None, write_extra_files: Callable[[pathlib.Path], Any] | None = None
) -> None:
    """Writes a checkpoint folder, and replaces an older one only once the new one is complete.

    An exception leaves `path` unchanged. All processes of a run must call it. Each writes its devices' shards of arrays
    that a mesh splits, and the first one writes everything else.

    Args:
        config_dict: the configuration, anything that JSON can hold. It is restored as JSON returns it: tuples become
            lists, and keys become strings.
        params: nested dicts of jax or numpy arrays, `BlockScaled` or `StreamedArray`, of any dtype that JAX holds. Keys
            are strings without "/" and ".".
        write_extra_files: called with the unfinished folder, to add files to it.

    Raises:
        FileExistsError: `path` is neither a checkpoint nor an empty folder, so it is not replaced.
    """
    path = pathlib.Path(path).resolve()
    # Check everything that can be checked before the first byte is written.
    params, scaled = split_scaled(params)
    config = {"format": FORMAT, "version": VERSION, "config": config_dict, "metadata": metadata or {}}
    config_bytes = json_bytes(config | ({"block_scaled": scaled} if scaled else {}))
    arrays = flatten_arrays(params)
    # The folder gets its name once it is complete, so readers never see a partial checkpoint. If the first process
    # cannot rename it at the end, all processes raise.
    with (
        distributed.raise_together(OSError(f"the first process could not write {path}")),
        distributed.in_main_process(_unfinished_folder, path) as name,
    ):
        unfinished = pathlib.Path(name)
        records, known = write_arrays(unfinished / ARRAYS_FOLDER, arrays)
        if not distributed.is_main_process():
            return
        (unfinished / CONFIG_FILE).write_bytes(config_bytes)
        if write_extra_files is not None:
            write_extra_files(unfinished)
        # Hash what is on disk. Hashing releases the interpreter lock, so threads hash several files at once.
        found = {str(file.relative_to(unfinished)) for file in unfinished.rglob("*") if file.is_file()}
        files = sorted(found | known.keys())  # a network file system may list files of other processes later
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda file: known.get(file) or file_digest(unfinished / file, unfinished), files)
            sums = dict(zip(files, digests, strict=True))
        # Digests come last: a folder without them is incomplete.
        (unfinished / DIGESTS_FILE).write_bytes(json_bytes({"files": sums, "arrays": records}))


@contextlib.contextmanager
def _unfinished_folder(path: pathlib.Path) -> Iterator[str]:
    """Yields the name of the folder to write into (`atomic_folder`), as text that other processes can receive."""
    with atomic_folder(path, is_checkpoint) as folder:
        yield str(folder)


def save_model(
    path,
    model: MTPModel,
    params: dict,
    *,
    metadata=None,
    tokenizer: SavableTokenizer | None = None,
    init_from=None,
    model_type: str | None = None,
) -> None:
    """Saves a model's configuration and parameters, and a tokenizer. All processes of a run must call it.

    Args:
        path: the folder to write, as for `save`.
        model: the model; its `config` is saved.
        params: its parameters, with unrolled layers.
        metadata: further JSON values.
        tokenizer: saved into the checkpoint, so that `load_tokenizer` finds it there.
        init_from: the checkpoint that training started from. Its Hugging Face `config.json` is kept, so that exporting
            the new weights keeps its family.
        model_type: the family that `init_from` was read as, if it differs from its own; written to the kept file.

    Raises:
        ValueError, FileExistsError: as for `save`.
    """

    def write_small_files(folder: pathlib.Path) -> None:
        # Where a converted checkpoint keeps the original's files, so loading and exporting look in one place.
        kept = folder / HUGGINGFACE_FOLDER
        content = None if init_from is None else read_kept_config(init_from)
        if content is not None and model_type is not None:
            content = json_bytes({**parse_json(content), "model_type": model_type})
        if tokenizer is not None or content is not None:
            kept.mkdir()
        if tokenizer is not None:
            tokenizer.save(kept)
        if content is not None:
            (kept / CONFIG_FILE).write_bytes(content)

    save(path, model.config.to_dict(), params, metadata=metadata, write_extra_files=write_small_files)


def load(
    path,
    *,
    dtype=None,
    mesh: Mesh | None = None,
    allow_copies: bool = False,
    layout: Literal["decoding", "training"] = "decoding",
    model_type: str | None = None,
    implementation: Implementation = "auto",
) -> tuple[MTPModel, dict]:
    """Loads a model from an mtpjax checkpoint, a run folder, a Hugging Face directory, or a GGUF file.

    If the checkpoint has a tokenizer with fewer tokens than the vocabulary has rows, `model.config.num_tokens` is set,
    and decoding never samples the padding rows.

    Args:
        path: an mtpjax checkpoint, a run folder of `mtpjax train`, a Hugging Face directory with safetensors files
            of a supported family, a `.gguf` file (extra `gguf`), whose quantized weights become float32, or a
            repository of the Hugging Face Hub: `org/name`, `org/name@revision` or `org/name/file.gguf`.
        dtype: dtype to cast the parameters to. `None` keeps the dtypes of the files; block-quantized fp8 weights stay
            fp8 with their scales (`BlockScaled`).
        mesh: shards the parameters over this mesh; all processes of a run must load together. Each reads only the
            shards of its devices. Exception: arrays of an mtpjax checkpoint that were saved without a mesh are read
            whole, one at a time.
        allow_copies: let devices hold copies of sizes that an axis of the mesh does not divide.
        layout: the layout for decoding, or the one for training.
        model_type: the family of a Hugging Face directory, instead of the one that its `config.json` names.
        implementation: what runs the model's kernels (`pallas_kernels.dispatch`).

    Returns:
        `(model, params)`: the model, and its parameters as nested dicts of jax arrays.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of an unsupported architecture. Its subclasses
            `CheckpointFileError` and `ConfigError` say so for Hugging Face directories.
        ValueError: the mesh does not divide the model, or `dtype` is not a floating-point type.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> config = mtpjax.ModelConfig(
        ...     vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        ... )
        >>> model = mtpjax.MTPModel(config)
        >>> folder = tempfile.mkdtemp() + "/checkpoint"
        >>> mtpjax.save(folder, model, mtpjax.init_params(model, jax.random.key(0)))
        >>> model, params = mtpjax.load(folder)
        >>> params["embedding"].shape
        (32, 16)
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating-point type, got {jnp.dtype(dtype).name}: weights are not integers")
    path = find_checkpoint(path)
    onto: dict[str, Any] = {"mesh": mesh, "allow_copies": allow_copies, "layout": layout}
    # A Hugging Face directory or GGUF file: `conversion` reads it in place, without an mtpjax copy on disk.
    if is_gguf(path) or (not is_checkpoint(path) and (path / CONFIG_FILE).is_file()):
        from conversion.load import load as load_hugging_face

        model, params = load_hugging_face(path, dtype=dtype, **onto, model_type=model_type)
        return _finish_model(model, path, implementation), params
    # An mtpjax checkpoint: every digest is verified.
    config, params, _ = restore(path, **onto)
    # `BlockScaled` leaves are dequantized by `astype`.
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params, is_leaf=is_scaled)
    model = _finish_model(MTPModel(_checked_config(config, params, path)), path, implementation)
    return model, params


def _checked_config(values: Any, params: dict, path) -> ModelConfig:
    """Returns the configuration; raises `CheckpointError` if it does not fit the arrays."""
    config = model_config(values, path)
    # The numbers that determine how much is built. Flax compares every other shape while it traces.
    embedding = tuple(getattr(params.get("embedding"), "shape", ()))
    found = {
        "vocab_size, hidden_size": embedding,
        "num_hidden_layers": len(params.get("trunk", ())),
        "num_mtp_modules": sum(is_of_modules(name) and name.partition("_")[2].isdecimal() for name in params),
    }
    named = {
        "vocab_size, hidden_size": (config.vocab_size, config.hidden_size),
        "num_hidden_layers": config.num_hidden_layers,
        "num_mtp_modules": config.num_mtp_modules,
    }
    for name, value in named.items():
        if found[name] != value:
            raise CheckpointError(f"{path / CONFIG_FILE} has {name} {value}, but the arrays have {found[name]}")
    return config


def _finish_model(model: MTPModel, path, implementation: Implementation) -> MTPModel:
    """Sets the implementation, and `num_tokens` if the vocabulary has more rows than the tokenizer has tokens."""
    config: ModelConfig = model.config
    count = count_token_ids(path)
    if count is not None and count < config.vocab_size:
        config = dataclasses.replace(config, num_tokens=count)
    return MTPModel(config, implementation=implementation)
