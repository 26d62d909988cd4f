"""Reads and checks the files of a tokenizer, which come with checkpoints and are untrusted."""

import contextlib
import itertools
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from mtpjax.errors import TokenizerError, printable
from mtpjax.io.huggingface_files import MAX_TOKENIZER_BYTES, read_small_file
from mtpjax.safe_open import list_chat_templates, parse_json

DEFAULT_TEMPLATE = "default"
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_EXPANSION = 256  # maximum factor by which a normalizer or decoder may lengthen a text
log = logging.getLogger("mtpjax.tokenizer")


@contextlib.contextmanager
def rust_errors(problem: str):
    """Converts errors of the tokenizers package to `TokenizerError`.

    The package raises plain `Exception`. If its Rust code panics, as when a regular expression exceeds a limit, the
    package raises a `BaseException`, which would end the process.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{problem}: {printable(error, 200)}") from error


def read_json_object(folder: pathlib.Path, name: str, *, max_bytes: int = MAX_TOKENIZER_BYTES) -> dict[str, Any]:
    """Reads a JSON object from a checkpoint's file. Returns {} if the file is missing or contains a different value."""
    content = read_small_file(folder, name, max_bytes=max_bytes)
    try:
        values = parse_json(content) if content is not None else {}
    except ValueError as error:
        raise TokenizerError(f"{folder / name} is not JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def check_expansion(content: bytes, path: pathlib.Path) -> None:
    """Checks that the normalizer and the decoder cannot lengthen a text so much that it uses all memory."""
    try:
        values = parse_json(content)
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    for name in ("normalizer", "decoder"):
        # Steps run one after the other, so their factors multiply.
        factor, steps = 1, [values.get(name)] if isinstance(values, dict) else []
        while steps:
            step = steps.pop()
            if isinstance(step, dict):
                added = [step[key] for key in ("content", "prepend") if isinstance(step.get(key), str)]
                factor *= max(1, *map(len, added), 1)
                for key in ("normalizers", "decoders"):
                    steps += step[key] if isinstance(step.get(key), list) else []
        if factor > MAX_EXPANSION:
            raise TokenizerError(
                f"{path}: its {name} can make a text {printable(factor, 30)} times as long; limit: {MAX_EXPANSION}"
            )


def find_end_tokens(
    folder: pathlib.Path, tokenizer: Any, eos_token: str | None, *, generation: dict, config: dict, vocab_size: int
) -> tuple[int, ...]:
    """Finds the tokens that end a text. Combines all files, because a model may generate any of these tokens.

    Warns of likely mistakes: a name that is not a token, and an ordinary token in a file after the first.

    Args:
        config: the content of `config.json`; in multimodal models, it nests the text model's settings.

    Returns:
        The ids without duplicates, from `generation_config.json`, `config.json`, its `text_config`, and `eos_token`.
    """
    sources = {"generation_config.json": generation, "config.json": config}
    first, *others = _read_ids(folder, sources | {"config.json's text_config": config.get("text_config")}, vocab_size)
    named = None if eos_token is None else tokenizer.token_to_id(eos_token)
    if eos_token is not None and named is None:
        log.warning("%s: eos_token %s is not a token: ignored", folder, printable(repr(eos_token), 60))
    # Trust the first file. Later files may have a leftover id from a model with a different tokenizer.
    added = tokenizer.get_added_tokens_decoder()
    for token in dict.fromkeys(itertools.chain(*others)):
        if token not in first and token != named and token not in added:
            text = printable(repr(tokenizer.id_to_token(token)), 60)
            log.warning("%s: config.json's eos_token_id %s is %s, ordinary text, but ends texts", folder, token, text)
    ids = itertools.chain(first, *others, () if named is None else (named,))
    return tuple(dict.fromkeys(ids))


def _read_ids(folder: pathlib.Path, sources: dict[str, Any], vocab_size: int) -> list[list[int]]:
    """Returns the ids in each source that has an `eos_token_id`, or `[[]]` if no source has one."""
    found: list[list[int]] = []
    for name, values in sources.items():
        value = values.get("eos_token_id") if isinstance(values, dict) else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        # A boolean is an int in Python, but not a token id.
        if all(type(index) is int and 0 <= index < vocab_size for index in ids):
            found += [ids] if ids else []
            continue
        problem = (
            f"{folder}: eos_token_id is {printable(repr(value), 100)}, not an id below {vocab_size} or a list of such "
            f"ids, in {name}"
        )
        # A leftover in a later file does not make the checkpoint unusable.
        if not found:
            raise TokenizerError(problem)
        log.warning("%s: ignored", problem)
    return found or [[]]


def read_chat_templates(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Reads a checkpoint's chat templates.

    Returns the templates by name, from `chat_template.jinja` and `additional_chat_templates/`, or else from
    `tokenizer_config.json` or `chat_template.json`.
    """
    found = {DEFAULT_TEMPLATE: "chat_template.jinja"}
    found |= {pathlib.PurePath(file).stem: file for file in list_chat_templates(folder)}
    contents = {name: _read_text(folder, file) for name, file in found.items()}
    templates = {name: content for name, content in contents.items() if content is not None}
    if DEFAULT_TEMPLATE in templates:
        return templates
    setting = settings.get("chat_template")
    if setting is None:
        values = read_json_object(folder, "chat_template.json", max_bytes=MAX_TEMPLATE_CHARACTERS)
        setting = values.get("chat_template")
    entries = setting if isinstance(setting, list) else [{"name": DEFAULT_TEMPLATE, "template": setting}]
    named = {each.get("name"): each.get("template") for each in entries if isinstance(each, dict)}
    return {name: each for name, each in named.items() if isinstance(name, str) and isinstance(each, str)} | templates


def _read_text(folder: pathlib.Path, name: str) -> str | None:
    content = read_small_file(folder, name, max_bytes=MAX_TEMPLATE_CHARACTERS)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{folder / name} is not UTF-8 text") from error
