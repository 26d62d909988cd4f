"""The Hugging Face files that an mtpjax checkpoint keeps. Imports no JAX.

huggingface/              config.json, tokenizer and other small files, byte for byte
huggingface.json          model type and the headers of the safetensors files, so that export can reproduce them
huggingface.safetensors   tensors that are not parameters of the model, such as a vision tower
"""

import pathlib

from mtpjax.hub import resolve
from mtpjax.io.checkpoint_format import checkpoint_of_run, find_checkpoint, is_checkpoint, read_config
from mtpjax.io.tiktoken_files import TIKTOKEN_FILE, tokenizer_json
from mtpjax.safe_open import is_gguf, parse_json, read_inside

HUGGINGFACE_FOLDER, HEADERS_FILE, OTHER_TENSORS_FILE = "huggingface", "huggingface.json", "huggingface.safetensors"
SELF_CHECK_FILE = "mtpjax_self_check.json"  # in an exported directory, the acceptance measured in training
MAX_TOKENIZER_BYTES = 64 << 20  # maximum size of a tokenizer.json; published files have 7 to 20 MB


def read_small_file(path, name: str, *, max_bytes: int = MAX_TOKENIZER_BYTES) -> bytes | None:
    """Reads a small file from a checkpoint, such as its tokenizer.

    For a GGUF file, returns the equivalent content. For a directory with a `tiktoken.model` but no `tokenizer.json`,
    returns the equivalent `tokenizer.json`.

    Args:
        max_bytes: the maximum size in bytes.

    Returns:
        The content, or None if there is no such file.
    """
    path = pathlib.Path(path)
    if not is_gguf(path):
        content = read_inside(path, name, max_bytes=max_bytes)
        return tokenizer_json(path) if content is None and name == "tokenizer.json" else content
    from conversion.gguf_files import GGUFFiles

    with GGUFFiles(path) as files:
        return b"".join(files.bytes_of(name)) if name in files.other_files() else None


def has_tokenizer(path) -> bool:
    """Returns whether a Hugging Face directory or a GGUF file has a tokenizer."""
    path = pathlib.Path(path)
    if is_gguf(path):
        return read_small_file(path, "tokenizer.json") is not None
    return any((path / name).exists() for name in ("tokenizer.json", TIKTOKEN_FILE))


def huggingface_folder(path) -> pathlib.Path:
    """Finds the folder with a checkpoint's Hugging Face files, such as the tokenizer.

    Args:
        path: an mtpjax checkpoint, a run folder, a Hugging Face directory, or a Hugging Face Hub repository, from
            which only the tokenizer's files are downloaded.

    Returns:
        The `huggingface/` folder of an mtpjax checkpoint, if it has one; otherwise `path`.
    """
    path = checkpoint_of_run(resolve(path, weights=False))
    kept = path / HUGGINGFACE_FOLDER
    return kept if kept.is_dir() else path


def read_kept_config(path) -> bytes | None:
    """Reads the Hugging Face `config.json` of a checkpoint.

    Args:
        path: a Hugging Face directory, a GGUF file, an mtpjax checkpoint, or a run folder.

    Returns:
        The content, or None for an mtpjax checkpoint without a Hugging Face `config.json`, as from a preset.
    """
    found = find_checkpoint(path)
    folder = huggingface_folder(found)
    # The `config.json` in the root of an mtpjax checkpoint is mtpjax's own, not Hugging Face's.
    if folder == found and is_checkpoint(found):
        return None
    return read_small_file(folder, "config.json")


def read_vocab_size(path) -> int | None:
    """Returns a model's vocabulary size, or None if no `config.json` contains it."""
    found = checkpoint_of_run(resolve(path, weights=False))
    own = read_config(found)
    try:
        values = own["config"] if own is not None else parse_json(read_small_file(found, "config.json") or b"null")
        # A multimodal checkpoint nests the settings of its text model.
        values = values.get("text_config") or values
        return values["vocab_size"] if type(values["vocab_size"]) is int else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def count_token_ids(path) -> int | None:
    """Counts the token ids that a checkpoint's tokenizer defines.

    Embedding tables are often padded, so that rows from this index on belong to no token.

    Args:
        path: an mtpjax checkpoint, or a Hugging Face directory.

    Returns:
        One more than the largest id in `tokenizer.json`, or `None` if that file is missing or cannot be read.
    """
    try:
        content = read_small_file(huggingface_folder(path), "tokenizer.json")
        values = parse_json(content) if content is not None else {}
        # BPE and WordPiece have a dict from token to id, and Unigram has a list. Added tokens are listed separately.
        vocabulary = values["model"]["vocab"]
        largest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        # Added tokens may have ids above or inside the vocabulary's range, so compare both.
        return 1 + max([largest, *(token["id"] for token in values.get("added_tokens", ()))])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
