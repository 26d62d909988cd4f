"""Cases for tokenizers. The text streamed token by token must equal the text decoded from all tokens.

A case draws a small tokenizer of one kind and a sequence of ids for whole characters, halves of characters, runs of
invalid bytes, and special tokens in the middle, or without a token.
"""

import json
import pathlib
import random
from typing import Any

from mtpjax.data.tokenizer import HuggingFaceTokenizer

WORDS = ("the", "cat", "s", "é", "日本", "🙂", "n't", ".", ",", " ", "  ", "\n", "ing", "'", "12", "a\u0301")
SPECIAL = "<|end|>"
BYTE_FALLBACK = {"type": "ByteFallback"}
FROM_METASPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODERS: dict[str, dict[str, Any] | None] = {
    "byte-level": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "byte fallback": {"type": "Sequence", "decoders": [FROM_METASPACE, BYTE_FALLBACK, {"type": "Fuse"}, STRIP]},
    "byte fallback, nothing stripped": {
        "type": "Sequence",
        "decoders": [FROM_METASPACE, BYTE_FALLBACK, {"type": "Fuse"}],
    },
    "metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "plain": None,
    "suffixes": {"type": "BPEDecoder", "suffix": "</w>"},
    "word pieces": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "fused": {"type": "Fuse"},
}


def draw(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    """Draws a case: a `tokenizer.json` and ids."""
    kind = rng.choice(sorted(DECODERS))
    tokens = vocabulary(kind)
    tokenizer = make_tokenizer(tokens, DECODERS[kind])
    # The last id has no token, because vocabularies of models are padded.
    ids = [rng.randrange(len(tokens) + 3) for _ in range(rng.choice([0, 1, 2, 5, 20, 60]))]
    if rng.random() < 0.3:
        ids = [rng.randrange(min(256, len(tokens))) for _ in ids]  # mostly bytes
    what = f"{kind} tokenizer, {len(ids)} ids"
    return {"action": "streamed", "what": what, "tokenizer": json.dumps(tokenizer), "ids": ids, "size": len(tokens) + 3}


def streamed(case: dict[str, Any], folder: pathlib.Path) -> str | None:
    """Streams the ids of a case.

    Args:
        case: as `draw` makes it.
        folder: an empty folder.

    Returns:
        What is wrong with the text; None if nothing is wrong.
    """
    (folder / "tokenizer.json").write_text(case["tokenizer"])
    tokenizer = HuggingFaceTokenizer(folder, case["size"])
    step = tokenizer.incremental_decoder()
    text = "".join(step(index) for index in case["ids"]) + step(None)
    whole = tokenizer.decode(case["ids"])
    return None if text == whole else f"streams {text!a:.100}; the whole is {whole!a:.100}"


def vocabulary(kind: str) -> list[str]:
    """Returns the tokens for a kind in `DECODERS`: all bytes, if it has byte tokens, and some words in its spelling."""
    if kind == "byte-level":
        # GPT-2's characters for bytes. Printable bytes represent themselves; the others are numbered from 256 on.
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = (chr(256 + index) for index in range(256))
        spell = {byte: chr(byte) if byte in kept else next(others) for byte in range(256)}
        words = ["".join(spell[byte] for byte in word.encode()) for word in (*WORDS, " the", " 日", "\n\n")]
        return list(dict.fromkeys([*spell.values(), *words]))
    # Tokens at the start of a word and inside a word, as the kind spells them.
    before, after = {"suffixes": ("", "</w>"), "word pieces": ("##", ""), "plain": ("", ""), "fused": (" ", "")}.get(
        kind, ("▁", "")
    )
    words = [each for word in WORDS for each in (word, f"{before}{word}{after}")]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if kind.startswith("byte fallback") else []
    return list(dict.fromkeys([*pieces, *words, "▁", "▁▁"]))


def make_tokenizer(tokens: list[str], decoder: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a BPE `tokenizer.json` without merges, with an end token and one more added token."""
    has_bytes = tokens[0] == "<0x00>"
    is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": has_bytes},
        "pre_tokenizer": decoder if is_byte_level else None,
        "decoder": decoder,
        "added_tokens": [
            _added(len(tokens), SPECIAL, is_special=True),
            _added(len(tokens) + 1, "<tool>", is_special=False),
        ],
    }


def save_tokenizer(folder: pathlib.Path, template: str) -> HuggingFaceTokenizer:
    """Writes a byte-level tokenizer with a chat template to a folder, and loads it."""
    tokens = vocabulary("byte-level")
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(tokens, DECODERS["byte-level"])))
    settings = {"eos_token": SPECIAL, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(folder, len(tokens) + 3)


def _added(index: int, content: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": is_special, **flags}
