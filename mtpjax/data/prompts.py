"""Prompts from files: Spec-Bench's and GSM8K's JSONL, other JSONL, and plain text."""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.data.tokenizer import Tokenizer

TEXT_KEYS = ("prompt", "text", "question")  # the first that a record has
ID_KEYS = ("question_id", "id", "task_id")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue, the kind of text it is, and its name within its file."""

    text: str
    category: str
    id: str


def read_prompts(path, *, most_characters: int = 2000) -> list[Prompt]:
    """The prompts of a file.

    A file whose name ends in `.jsonl` has a JSON object in each line. Its text is the first of `turns` (Spec-Bench), or
    `prompt`, `text` or `question` (GSM8K); `category` and an id are taken where it has them, else they are the file's
    name and the line's number. Any other file is plain text: its paragraphs are the prompts, or its lines if no line
    is blank; a paragraph longer than `most_characters` is cut into several at white space.

    Raises `ValueError`, in one line that names the file and the line, for what is none of this, and `OSError`.
    """
    path = pathlib.Path(path)
    if path.suffix == ".jsonl":
        prompts = [_prompt(record, place, path.stem) for place, record in read_records(path)]
    else:
        prompts = [
            Prompt(text=text, category=path.stem, id=str(number))
            for number, text in enumerate(_paragraphs(read_text(path), most_characters), start=1)
        ]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: there is nothing but white space in it")
    return prompts


def read_text(path) -> str:
    """A whole file. Raises `ValueError` for one that is no UTF-8, naming the line."""
    content = pathlib.Path(path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} line {line} is no UTF-8 text") from error
    position = text.find("\0")
    if position >= 0:
        raise ValueError(f"{path} line {text.count(chr(10), 0, position) + 1} holds NUL: it is no text")
    return text


def read_records(path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`("FILE line N", object)` of each line that is not blank. Raises `ValueError` for a line that is no object."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is no JSON: {str(error)[:100]}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{place} is no JSON object but {_kind(record)}")
        yield place, record


def choose_prompts(
    prompts: Sequence[Prompt], count: int, *, categories: Iterable[str] = (), seed: int = 0
) -> list[Prompt]:
    """`count` of the prompts, drawn evenly over the categories, which take turns; fewer where there are fewer.

    What a category gives depends on its own prompts and `seed` alone, and a larger `count` keeps the choice of a
    smaller one. `categories` limits the choice to these. Raises `ValueError` for a category without prompts.
    """
    if count < 1:
        raise ValueError(f"the number of prompts must be at least 1, not {count}")
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    wanted = list(dict.fromkeys(categories)) or list(by_category)
    for category in wanted:
        if category not in by_category:
            raise ValueError(f"there are no prompts of category '{category}', only of {', '.join(by_category)}")
    places = []  # (turn, category's number, index)
    for number, category in enumerate(wanted):
        rng = np.random.default_rng([seed, zlib.crc32(category.encode())])
        order = rng.permutation(len(by_category[category]))
        places += [(turn, number, int(index)) for turn, index in enumerate(order[:count])]
    return [by_category[wanted[number]][index] for _, number, index in sorted(places)[:count]]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, most_tokens: int, chat: bool = False
) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, the first `most_tokens` at most, and how many prompts were cut to that.

    `chat` takes each for a message, by the tokenizer's template. Raises `ValueError`, naming the prompt.
    """
    rows = []
    for prompt in prompts:
        try:
            if chat:
                tokens = tokenizer.chat([{"role": "user", "content": prompt.text}])
            else:
                tokens = tokenizer.encode(prompt.text)
        except ValueError as error:
            raise type(error)(f"prompt {prompt.id} of {prompt.category}: {error}") from error
        if not tokens:
            raise ValueError(f"prompt {prompt.id} of {prompt.category} has no tokens")
        rows.append(tokens)
    return [row[:most_tokens] for row in rows], sum(len(row) > most_tokens for row in rows)


def room_for_prompts(most_positions: int, max_new_tokens: int, asked: int | None = None) -> int:
    """Most tokens of a prompt: `asked`, or what the new tokens leave. Raises `ValueError` where that is nothing."""
    room = most_positions - max_new_tokens
    if room < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} leaves no room for prompts in {most_positions} positions")
    if asked is not None and asked < 1:
        raise ValueError(f"prompts must keep at least 1 token, not {asked}")
    return room if asked is None else min(asked, room)


def _prompt(record: dict[str, Any], place: str, stem: str) -> Prompt:
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{place}: 'turns' is no list with a first turn")
        key, text = "turns", turns[0]
    else:
        key = next((key for key in TEXT_KEYS if key in record), None)
        if key is None:
            raise ValueError(f"{place} has none of turns, {', '.join(TEXT_KEYS)}")
        text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{place}: '{key}' holds {_kind(text)}, not text")
    if not text.strip():
        raise ValueError(f"{place}: '{key}' is empty")
    named = [record[key] for key in ID_KEYS if isinstance(record.get(key), (str, int))]
    category = record.get("category", stem)
    if not isinstance(category, str):
        raise ValueError(f"{place}: 'category' holds {_kind(category)}, not text")
    return Prompt(text=text, category=category, id=str(named[0]) if named else place.rpartition(" ")[2])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _paragraphs(text: str, most_characters: int) -> Iterator[str]:
    """Blocks between blank lines, or lines where none is blank, none longer than `most_characters`."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    blocks = lines if all(lines) else [block.strip("\n") for block in "\n".join(lines).split("\n\n")]
    for block in blocks:
        while len(block) > most_characters:
            cut = max(block.rfind(mark, 1, most_characters + 1) for mark in (" ", "\n"))
            cut = cut if cut > 0 else most_characters
            yield block[:cut].rstrip()
            block = block[cut:].lstrip()
        if block.strip():
            yield block
