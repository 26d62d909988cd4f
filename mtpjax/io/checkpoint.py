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

    An exception leaves `path` unchanged. All processes of a run must call this function. Each writes its devices'
    shards of sharded arrays, and the main process writes everything else.

    Args:
        config_dict: the configuration as JSON values. Restoring it turns tuples into lists, and keys into strings.
        params: nested dicts of jax or numpy arrays, `BlockScaled` or `StreamedArray`, of any dtype that JAX supports.
            Keys are strings without "/" or ".".
        write_extra_files: function that is called with the unfinished folder and adds files to it.

    Raises:
        FileExistsError: `path` is neither a checkpoint nor an empty folder, so it is not replaced.
    """
    path = pathlib.Path(path).resolve()
    # Check as much as possible before the first byte is written.
    arrays, scaled = flatten_arrays(params)
    config = {"format": FORMAT, "version": VERSION, "config": config_dict, "metadata": metadata or {}}
    config_bytes = json_bytes(config | ({"block_scaled": scaled} if scaled else {}))
    # The folder is renamed to `path` once it is complete, so readers never see a partial checkpoint. If the main
    # process cannot rename it, all processes raise an error.
    with (
        distributed.raise_together(OSError(f"the main process could not write {path}")),
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
        files = sorted(found | known.keys())  # a network file system may list other processes' files later
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda file: known.get(file) or file_digest(unfinished / file, unfinished), files)
            sums = dict(zip(files, digests, strict=True))
        # Write the digests last, because a folder without them is incomplete.
        (unfinished / DIGESTS_FILE).write_bytes(json_bytes({"files": sums, "arrays": records}))


@contextlib.contextmanager
def _unfinished_folder(path: pathlib.Path) -> Iterator[str]:
    """Yields the name of the unfinished folder (`atomic_folder`) as text, which can be sent to other processes."""
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
        metadata: additional JSON values to store.
        tokenizer: tokenizer to save in the checkpoint, where `load_tokenizer` finds it.
        init_from: the checkpoint that training started from. Its Hugging Face `config.json` is kept, so that an export
            of the new weights has the same family.
        model_type: the family that was used to load `init_from`, if it was overridden; the kept file records it.

    Raises:
        ValueError, FileExistsError: as for `save`.
    """

    def write_small_files(folder: pathlib.Path) -> None:
        # Use the same folder as a converted checkpoint, so that loading and exporting look in one place.
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

    If the tokenizer has fewer tokens than the embedding has rows, `model.config.num_tokens` is set, and decoding never
    samples the padding rows.

    Args:
        path: an mtpjax checkpoint, a run folder of `mtpjax train`, a Hugging Face directory with the safetensors files
            of a supported family, a `.gguf` file (extra `gguf`), whose quantized weights become float32, or a
            Hugging Face Hub repository (`org/name`, `org/name@revision` or `org/name/file.gguf`).
        dtype: dtype to cast the parameters to. `None` keeps the files' dtypes; block-quantized fp8 weights stay fp8
            with their scales (`BlockScaled`).
        mesh: the mesh over which to shard the parameters; all processes of a run must call `load` together. Each reads
            only its devices' shards, except that arrays in an mtpjax checkpoint that were saved without a mesh are read
            whole, one at a time.
        allow_copies: whether to replicate dimensions that are not divisible by their mesh axis.
        layout: whether to shard the parameters for decoding or for training.
        model_type: the family to use for a Hugging Face directory instead of the one in its `config.json`.
        implementation: the implementation of the model's kernels (`pallas_kernels.dispatch`).

    Returns:
        `(model, params)`, where the parameters are nested dicts of jax arrays.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or its architecture is unsupported. Hugging Face
            directories raise its subclasses `CheckpointFileError` and `ConfigError`.
        ValueError: the model cannot be sharded over the mesh, or `dtype` is not a floating-point type.

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
        raise ValueError(f"dtype must be a floating-point type, got {jnp.dtype(dtype).name}")
    path = find_checkpoint(path)
    onto: dict[str, Any] = {"mesh": mesh, "allow_copies": allow_copies, "layout": layout}
    # A Hugging Face directory or GGUF file is read directly, without an mtpjax copy on disk.
    if is_gguf(path) or (not is_checkpoint(path) and (path / CONFIG_FILE).is_file()):
        from conversion.load import load as load_hugging_face

        model, params = load_hugging_face(path, dtype=dtype, **onto, model_type=model_type)
        return _finish_model(model, path, implementation), params
    # Read an mtpjax checkpoint and verify every digest.
    config, params, _ = restore(path, **onto)
    # `BlockScaled.astype` dequantizes.
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params, is_leaf=is_scaled)
    model = _finish_model(MTPModel(_checked_config(config, params, path)), path, implementation)
    return model, params


def _checked_config(values: Any, params: dict, path) -> ModelConfig:
    """Returns the configuration. Raises `CheckpointError` if it does not fit the arrays."""
    config = model_config(values, path)
    # Check the sizes that determine how much is built. Flax checks all other shapes when it traces.
    embedding = tuple(getattr(params.get("embedding"), "shape", ()))
    modules = sum(is_of_modules(name) and name.partition("_")[2].isdecimal() for name in params)
    for name, value, found in (
        ("vocab_size, hidden_size", (config.vocab_size, config.hidden_size), embedding),
        ("num_hidden_layers", config.num_hidden_layers, len(params.get("trunk", ()))),
        ("num_mtp_modules", config.num_mtp_modules, modules),
    ):
        if found != value:
            raise CheckpointError(f"{path / CONFIG_FILE}: {name} is {value}, but the arrays imply {found}")
    return config


def _finish_model(model: MTPModel, path, implementation: Implementation) -> MTPModel:
    """Sets the implementation, and `num_tokens` if the vocabulary has more rows than the tokenizer has tokens."""
    config: ModelConfig = model.config
    count = count_token_ids(path)
    if count is not None and count < config.vocab_size:
        config = dataclasses.replace(config, num_tokens=count)
    return MTPModel(config, implementation=implementation)
