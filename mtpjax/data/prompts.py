"""Reads prompts from JSONL files, such as those of Spec-Bench and GSM8K, and from plain text."""

import dataclasses
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.data.jsonl import SkippedRecordError, read_json_objects
from mtpjax.data.packing import take_turns
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.messages import json_type_name
from mtpjax.safe_open import open_regular

TEXT_KEYS = ("prompt", "text", "question")  # a record's text is in the first of these that it has
ID_KEYS = ("question_id", "id", "task_id")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue, its category, and its id within its file."""

    text: str
    category: str
    id: str


def read_prompts(path, *, max_characters: int = 2000) -> list[Prompt]:
    """Reads the prompts in a file.

    A `.jsonl` file has one JSON object per line. The object's text is the first of its `turns` (Spec-Bench), or its
    `prompt`, `text` or `question` (GSM8K). Category and id come from the object, or else from the file's name and the
    line number. Any other file is plain text: its prompts are its paragraphs, or its lines if no line is blank.
    """
    path = pathlib.Path(path)
    if path.suffix == ".jsonl":
        prompts = [_to_prompt(record, place, path.stem) for place, record in read_json_objects(path)]
    else:
        prompts = [
            Prompt(text=text, category=path.stem, id=str(number))
            for number, text in enumerate(_paragraphs(read_text(path), max_characters), start=1)
        ]
    if not prompts:
        raise ValueError(f"{path} contains no prompt, only white space")
    return prompts


def read_text(path) -> str:
    """Reads a file of UTF-8 text, with or without a byte order mark."""
    with open_regular(path) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} line {line} is not UTF-8 text") from error
    # NUL is valid UTF-8, but it means a binary file, and byte tokenizers use it as the end token.
    position = text.find("\0")
    if position >= 0:
        raise ValueError(f"{path} line {text.count(chr(10), 0, position) + 1} contains NUL: it is not text")
    return text


def choose_prompts(
    prompts: Sequence[Prompt], count: int, *, categories: Iterable[str] = (), seed: int = 0
) -> list[Prompt]:
    """Draws prompts evenly, from each category in turn.

    The choice within a category depends only on its prompts and `seed`, and the prompts for a larger `count` include
    those for a smaller one.

    Args:
        count: number of prompts; all prompts if there are fewer.
        categories: categories to draw from; by default all.
    """
    if count < 1:
        raise ValueError(f"the number of prompts must be at least 1, not {count}")
    # Group by category, in the order of the file or of the request.
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    selected = list(dict.fromkeys(categories)) or list(by_category)
    for category in selected:
        if category not in by_category:
            raise ValueError(f"there are no prompts of category '{category}', only of {', '.join(by_category)}")
    # Shuffle each category with a separate seed.
    groups = []
    for category in selected:
        order = np.random.default_rng([seed, zlib.crc32(category.encode())]).permutation(len(by_category[category]))
        groups.append([by_category[category][index] for index in order[:count]])
    return take_turns(groups)[:count]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_tokens: int, chat: bool = False
) -> tuple[list[list[int]], int]:
    """Encodes prompts, and cuts long prompts to `max_tokens`.

    Returns the tokens of each prompt, and the number of prompts that were cut.
    """
    rows = []
    for prompt in prompts:
        try:
            if chat:
                tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
            else:
                tokens = tokenizer.encode(prompt.text)
        except ValueError as error:
            # Keep the type of the error, such as `TokenizerError`, and name the prompt.
            raise type(error)(f"prompt {prompt.id} of {prompt.category}: {error}") from error
        if not tokens:
            raise ValueError(f"prompt {prompt.id} of {prompt.category} has no tokens")
        rows.append(tokens)
    return [row[:max_tokens] for row in rows], sum(len(row) > max_tokens for row in rows)


def max_prompt_length(max_positions: int, max_new_tokens: int, requested: int | None = None) -> int:
    """Returns the maximum number of tokens in a prompt.

    Args:
        requested: the requested limit, or None.
    """
    room = max_positions - max_new_tokens
    if room < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} leaves no room for prompts in {max_positions} positions")
    if requested is not None and requested < 1:
        raise ValueError(f"prompts must keep at least 1 token, not {requested}")
    return room if requested is None else min(requested, room)


def read_turns(record: dict[str, Any]) -> Iterator[str]:
    """Yields all turns of a Spec-Bench record (at least one), or the text of any other record.

    Raises:
        SkippedRecordError: a turn is not text (reason "corrupt") or is empty (reason "empty"). The error is raised when
            that turn is reached.
    """
    key = next((key for key in ("turns", *TEXT_KEYS) if key in record), None)
    if key is None:
        raise SkippedRecordError("corrupt", f"has none of turns, {', '.join(TEXT_KEYS)}")
    turns = record[key] if key == "turns" else [record[key]]
    if not isinstance(turns, list) or not turns:
        raise SkippedRecordError("corrupt", "has 'turns' that are not a list with at least one turn")
    for text in turns:
        if not isinstance(text, str):
            raise SkippedRecordError("corrupt", f"has {json_type_name(text)}, not text, in '{key}'")
        if not text.strip():
            raise SkippedRecordError("empty", f"has an empty '{key}'")
        yield text


def _to_prompt(record: dict[str, Any], place: str, stem: str) -> Prompt:
    """Converts a record to a prompt. Raises `ValueError` with the record's location."""
    try:
        text, category = next(read_turns(record)), record.get("category", stem)
        if not isinstance(category, str):
            raise SkippedRecordError("corrupt", f"has {json_type_name(category)}, not text, in 'category'")
    except SkippedRecordError as error:
        raise ValueError(f"{place} {error}") from error
    # Use the first id that the record has, or else its line number.
    named = [record[key] for key in ID_KEYS if isinstance(record.get(key), (str, int))]
    return Prompt(text=text, category=category, id=str(named[0]) if named else place.rpartition(" ")[2])


def _paragraphs(text: str, max_characters: int) -> Iterator[str]:
    """Yields blocks between blank lines, or lines if none is blank, none longer than `max_characters`."""
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    # Blank lines separate paragraphs. Without any, each line is a prompt.
    blocks = [block.strip("\n") for block in text.split("\n\n")] if "\n\n" in text else text.split("\n")
    for block in blocks:
        # Cut long blocks at the last white space that fits, or within a word if there is none.
        while len(block) > max_characters:
            cut = max(block.rfind(mark, 1, max_characters + 1) for mark in (" ", "\n"))
            cut = cut if cut > 0 else max_characters
            yield block[:cut].rstrip()
            block = block[cut:].lstrip()
        if block.strip():
            yield block
