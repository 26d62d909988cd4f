"""Resolves names of Hugging Face Hub repositories, which can be given instead of checkpoint paths. Imports no JAX.

    org/name            a repository
    org/name@revision   its branch, tag or commit
    org/name/file.gguf  a GGUF file of a repository, also with @revision

An existing path takes precedence. The `huggingface_hub` package downloads into its cache; its environment variables
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply.
"""

import difflib
import functools
import glob
import os
import pathlib
import re

from mtpjax.errors import CheckpointError, UnsafeFileError, printable
from mtpjax.safe_open import parse_json, read_inside

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?P<file>(?:/[A-Za-z0-9][\w.-]*)+\.gguf)?"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?",
    re.ASCII,
)
# A name whose `org/name` part ends in one of these suffixes is a missing file, not a repository.
_FILE_SUFFIXES = (".gguf", ".json", ".jsonl", ".safetensors", ".txt", ".yaml", ".yml")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES, MAX_SHARDS = 512 << 20, 10_000
TOKENIZER_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/*.jinja",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt"),
)
# Small files that determine which large files are needed. Only mtpjax checkpoints have `digests.json`.
_DESCRIPTION = (
    *(*TOKENIZER_FILES, INDEX, "digests.json", "mtpjax_self_check.json", "adapter_config.json"),
    *("hf_quant_config.json", "quantize_config.json"),
)
_OWN_FILES = ("params/*", "huggingface/*", "huggingface.json", "huggingface.safetensors")


def resolve(name, *, weights: bool = True) -> pathlib.Path:
    """Returns the path for a name: a local path, or the cached snapshot of a Hub repository.

    Args:
        name: a path, or `org/name`, `org/name@revision`, `org/name/file.gguf`.
        weights: whether to download the weights too, not only the tokenizer's files.

    Returns:
        The path itself if it exists, else the snapshot's folder or the file in it.

    Raises:
        CheckpointError: nothing exists at the path and it does not name a repository; or the repository, revision or
            file does not exist; or access is refused; or the Hub cannot be reached and the cache lacks the files.
    """
    text = os.fspath(name)
    # Use `lexists`, because a broken link is a local problem, not the name of a repository.
    if os.path.lexists(text):
        return pathlib.Path(text)
    match = None if ".." in text else _NAME.fullmatch(text)
    if match is None or pathlib.PurePath(match["repository"]).suffix.lower() in _FILE_SUFFIXES:
        raise CheckpointError(_describe_missing(text))
    return _download(match["repository"], match["revision"], (match["file"] or "").removeprefix("/"), weights)


def _describe_missing(text: str) -> str:
    """Returns a message that says that a path does not exist, and lists the content of its folder."""
    folder, path = pathlib.Path(text).parent, printable(repr(text) if not text.strip() else text, 300)
    try:
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    except OSError:
        return f"{path} does not exist"
    if folder == pathlib.Path("."):
        return f"{path} does not exist here, and it is not the name of a Hugging Face Hub repository (org/name)"
    near = difflib.get_close_matches(pathlib.Path(text).name, names, n=4, cutoff=0.4) or names[:4]
    if not names:
        return f"{path} does not exist; its folder is empty"
    others = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
    return f"{path} does not exist; its folder contains {printable(', '.join(near), 300)}{others}"


@functools.cache  # a command resolves a name several times, and must get the same snapshot
def _download(repository: str, revision: str | None, file: str, weights: bool) -> pathlib.Path:
    """Downloads the necessary files of a repository, and returns the snapshot's folder or the file in it."""
    name = repository + (f"@{revision}" if revision else "")
    # A GGUF file contains the whole checkpoint.
    if file:
        path = _fetch(repository, revision, (glob.escape(file),), f"{repository}/{file}") / file
        if not path.exists():
            raise CheckpointError(f"the repository {name} has no file {file}")
        return path
    folder = _fetch(repository, revision, _DESCRIPTION if weights else TOKENIZER_FILES, name)
    has_config = (folder / "config.json").exists()
    # Stop at an adapter, because `mtpjax.folder_kinds` reports what to do with it.
    if not weights or (not has_config and (folder / "adapter_config.json").exists()):
        return folder
    if not has_config:
        raise CheckpointError(f"the repository {name} has no config.json; use {repository}/FILE.gguf for a GGUF file")
    # The small files say which weights belong to the checkpoint; other files, such as copies in a different format, are
    # not downloaded. The folder's name is its commit, so both downloads come from the same commit.
    patterns = _weight_files(folder)
    if (folder / INDEX).exists() and SINGLE not in patterns and _has_file(repository, folder.name, SINGLE):
        # As in a local folder, one of the two is obsolete, and programs differ in which one they read.
        raise CheckpointError(
            f"the repository {name} has {SINGLE} and also {INDEX}, which names other files: only one of the two is the "
            f"checkpoint. Download both (hf download {repository} --local-dir FOLDER), delete one, and use FOLDER"
        )
    _fetch(repository, folder.name, patterns, name)
    return folder


def _weight_files(folder: pathlib.Path) -> tuple[str, ...]:
    """Returns patterns for the weight files: those in the index, the single file, or an mtpjax checkpoint's files."""
    if (folder / "digests.json").exists():
        return _OWN_FILES
    try:
        content = read_inside(folder, INDEX, max_bytes=MAX_INDEX_BYTES)
        index = parse_json(content) if content is not None else {}
    except (UnsafeFileError, ValueError):
        index = {}  # loading reports the problem
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    listed = weight_map.values() if isinstance(weight_map, dict) else [SINGLE]
    # Loading rejects an index with values of other kinds.
    files = {name for name in listed if isinstance(name, str) and name.endswith(".safetensors")}
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{folder / INDEX} lists {len(files)} files; at most {MAX_SHARDS} are accepted")
    # MTP modules may be in a file that the index does not list.
    return (*map(glob.escape, sorted(files)), "*mtp*.safetensors")


def _has_file(repository: str, commit: str, file: str) -> bool:
    """Returns whether a repository has a file; False if the Hub cannot be reached and the cache must suffice."""
    from huggingface_hub import HfApi, constants

    try:
        return HfApi(endpoint=constants.ENDPOINT).file_exists(repository, file, revision=commit)
    # The download, which can use the cache, reports connection errors.
    except Exception:
        return False


def _fetch(repository: str, revision: str | None, patterns: tuple[str, ...], name: str) -> pathlib.Path:
    """Downloads the repository files that match the patterns into the cache, and returns the snapshot's folder."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns))
    # The package does not catch the exceptions of its HTTP library, whose classes differ between versions.
    except Exception as error:
        raise CheckpointError(_explain(error, repository, revision, name)) from error
    return pathlib.Path(folder)


def _explain(error: Exception, repository: str, revision: str | None, name: str) -> str:
    """Explains in one line why a download failed, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repository}"
        return f"the repository {repository} is gated: accept its terms at {page}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository {repository} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{_describe_missing(name)}. {constants.ENDPOINT} has no such repository either, or it is private: if so, "
            "set HF_TOKEN to your token"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            cause = f"{constants.ENDPOINT} cannot be reached ({type(error.__cause__ or error).__name__})"
        return (
            f"{_describe_missing(name)}. As a Hugging Face Hub repository it cannot be read: {cause}, and the cache "
            f"{constants.HF_HUB_CACHE} does not contain all of its files"
        )
    first_line = str(error).strip().partition("\n")[0]
    problem = f"{type(error).__name__}: {printable(first_line, 300)}"
    return f"{_describe_missing(name)}. As a Hugging Face Hub repository it cannot be downloaded: {problem}"
