"""The tokens that end a text. Several files of a checkpoint name them, and may disagree."""

import itertools
import logging
import pathlib
from typing import Any

from mtpjax.errors import TokenizerError, printable

log = logging.getLogger("mtpjax.data")


def find_end_tokens(
    folder: pathlib.Path, tokenizer: Any, eos_token: str | None, *, generation: dict, config: dict, vocab_size: int
) -> tuple[int, ...]:
    """Finds the tokens that end a text: those of all files, since a model may write any of them.

    Warns of likely mistakes: a name that is not a token, and ordinary text in a file after the first.

    Args:
        config: the content of `config.json`; a multimodal one nests the text model's settings.

    Returns:
        The ids, each once: of `generation_config.json`, `config.json`, its `text_config`, and the named token.
    """
    sources = {"generation_config.json": generation, "config.json": config}
    first, *others = _read_ids(folder, sources | {"config.json's text_config": config.get("text_config")}, vocab_size)
    named = None if eos_token is None else tokenizer.token_to_id(eos_token)
    if eos_token is not None and named is None:
        log.warning("%s: eos_token %s is no token of the tokenizer: ignored", folder, printable(repr(eos_token), 60))
    # The first file counts. Another may have a leftover id from a model with a different tokenizer.
    added = tokenizer.get_added_tokens_decoder()
    for token in dict.fromkeys(itertools.chain(*others)):
        if token not in first and token != named and token not in added:
            text = printable(repr(tokenizer.id_to_token(token)), 60)
            log.warning("%s: config.json's eos_token_id %s is %s, ordinary text, and ends texts", folder, token, text)
    ids = itertools.chain(first, *others, () if named is None else (named,))
    return tuple(dict.fromkeys(ids))


def _read_ids(folder: pathlib.Path, sources: dict[str, Any], vocab_size: int) -> list[list[int]]:
    """Returns the `eos_token_id` of each source that has one; an empty list if none has."""
    found: list[list[int]] = []
    for name, values in sources.items():
        value = values.get("eos_token_id") if isinstance(values, dict) else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        # A truth value is an int in Python, but not a token.
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
