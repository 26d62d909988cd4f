"""Guards around the tokenizers package, whose files come with checkpoints and are untrusted."""

import contextlib
import pathlib
from typing import Any

from mtpjax.errors import TokenizerError, printable
from mtpjax.io.huggingface_files import MAX_TOKENIZER_BYTES, read_small_file
from mtpjax.safe_open import parse_json

MAX_EXPANSION = 256  # times that a normaliser or decoder may lengthen a text


@contextlib.contextmanager
def rust_errors(problem: str):
    """Turns errors of the tokenizers package into TokenizerError.

    It raises Exception itself, and where its Rust code panics, such as at a limit of its regular expressions, a
    BaseException, which would end the process.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{problem}: {printable(error, 200)}") from error


def read_json_object(folder: pathlib.Path, name: str, *, max_bytes: int = MAX_TOKENIZER_BYTES) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint; a missing file, or a value that is not an object, gives an empty one."""
    content = read_small_file(folder, name, max_bytes=max_bytes)
    try:
        values = parse_json(content) if content is not None else {}
    except ValueError as error:
        raise TokenizerError(f"{folder / name} is not JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def check_expansion(content: bytes, path: pathlib.Path) -> None:
    """Checks that normaliser and decoder cannot make a text many times as long, and so use all memory."""
    try:
        values = parse_json(content)
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    for name in ("normalizer", "decoder"):
        # Steps follow each other, so that their factors multiply.
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
                f"{path}: its {name} can make a text {printable(factor, 30)} times as long, above {MAX_EXPANSION}"
            )
