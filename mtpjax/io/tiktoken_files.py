"""Converts a `tiktoken.model` to a `tokenizer.json` for the tokenizers package.

A `tiktoken.model` lists only tokens and their ranks. The pattern that splits text into words is in the checkpoint's
Python code, which mtpjax does not run, so this module has the patterns of known tokenizer classes.
"""

import base64
import binascii
import functools
import json
import pathlib
from typing import Any

from mtpjax.byte_letters import LETTER_OF_BYTE
from mtpjax.errors import TokenizerError, printable
from mtpjax.safe_open import parse_json, read_inside

TIKTOKEN_FILE = "tiktoken.model"
MAX_BYTES, MAX_TOKEN_BYTES = 16 << 20, 1024  # of the file and of a token; Kimi-K2's are 3 MB and 128 bytes
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
PATTERNS = {"TikTokenTokenizer": _KIMI}  # by `tokenizer_class`; Kimi-K2 and later


def tokenizer_json(folder: pathlib.Path) -> bytes | None:
    """Returns the `tokenizer.json` for a directory with a `tiktoken.model`; None if it has no such file."""
    ranks = read_inside(folder, TIKTOKEN_FILE, max_bytes=MAX_BYTES)
    if ranks is None:
        return None
    return _convert(ranks, read_inside(folder, "tokenizer_config.json", max_bytes=MAX_BYTES) or b"{}", str(folder))


@functools.lru_cache(maxsize=1)  # a tokenizer is read several times, and converting it takes seconds
def _convert(content: bytes, settings_content: bytes, folder: str) -> bytes:
    settings = _parse_settings(settings_content, folder)
    pattern = PATTERNS[settings["tokenizer_class"]]
    ranks = _parse_ranks(content, f"{folder}/{TIKTOKEN_FILE}")
    special = _added_tokens(settings["added_tokens_decoder"], ranks, f"{folder}/tokenizer_config.json")
    names = {token: "".join(map(LETTER_OF_BYTE.__getitem__, token)) for token in ranks}
    # Special token ids have gaps. The package gives an added token the next free id unless the vocabulary contains it.
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    vocabulary |= {each["content"]: each["id"] for each in special}
    if len(vocabulary) < len(ranks) + len(special):
        raise TokenizerError(f"{folder}/tokenizer_config.json: added_tokens_decoder has a duplicate token")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [f"{names[left]} {names[right]}" for left, right in _merges(ranks)],
            "ignore_merges": True,  # as in tiktoken, a word that is a token is not split
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _parse_settings(content: bytes, folder: str) -> dict[str, Any]:
    """Parses a `tokenizer_config.json`, which must name a known class and list the special tokens."""
    try:
        settings = parse_json(content)
    except ValueError as error:
        raise TokenizerError(f"{folder}/tokenizer_config.json is not JSON: {error}") from error
    settings = settings if isinstance(settings, dict) else {}
    if settings.get("tokenizer_class") not in list(PATTERNS):  # a list, because the value may be unhashable
        raise TokenizerError(
            f"{folder} has a {TIKTOKEN_FILE} and no tokenizer.json. Its tokenizer_class is "
            f"{printable(repr(settings.get('tokenizer_class')), 60)}; the split pattern of that class is only in "
            f"remote code, which mtpjax does not run; supported: {', '.join(PATTERNS)}. Add a tokenizer.json to the "
            "folder, for example with transformers.convert_slow_tokenizer.TikTokenConverter"
        )
    if not isinstance(settings.get("added_tokens_decoder"), dict):
        raise TokenizerError(
            f"{folder}/tokenizer_config.json has no added_tokens_decoder, which lists the special tokens"
        )
    return settings


def _parse_ranks(content: bytes, path: str) -> dict[bytes, int]:
    """Parses lines that each have a token in base64 and its rank, which is also its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path}, line {number}: expected a token in base64 and its rank") from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES or not 0 <= rank < 1 << 31 or token in ranks:
            raise TokenizerError(
                f"{path}, line {number}: a token of {len(token)} bytes with rank {rank}; a token must be "
                f"unique, with 1 to {MAX_TOKEN_BYTES} bytes and a rank from 0 to {(1 << 31) - 1}"
            )
        ranks[token] = rank
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError(f"{path}: {len(ranks)} tokens share {len(set(ranks.values()))} ranks")
    # A text that contains a byte without a token could not be encoded.
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: {len(missing)} of the 256 bytes are not tokens, the first is {missing[0]:#04x}")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Lists the pairs of tokens that merge into a token, ordered by that token's rank.

    tiktoken merges the adjacent tokens whose joined bytes have the lowest rank, regardless of where they are split. So
    every split of a token into two tokens is a merge.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:place], token[place:]) for place in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _added_tokens(entries: dict[str, Any], ranks: dict[bytes, int], path: str) -> list[dict[str, Any]]:
    """Returns the special tokens in the format of `tokenizer.json`, sorted by id."""
    taken, added = set(ranks.values()), []
    for index, entry in entries.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        is_id = index.isascii() and index.isdigit() and len(index) < 10
        if not isinstance(name, str) or not name or not is_id or int(index) in taken:
            raise TokenizerError(
                f"{path}: added_tokens_decoder has {printable(repr(index), 40)}: {printable(repr(entry), 100)}; it "
                f"must have an unused id above the {len(ranks)} ranks, and an object with content"
            )
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
        taken.add(int(index))
        added.append({"id": int(index), "content": name, "special": bool(entry.get("special", True)), **flags})
    return sorted(added, key=lambda token: token["id"])
