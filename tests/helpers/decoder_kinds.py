"""Tiny tokenizers with each kind of decoder that published ones have, and some that nobody has published yet."""

import json

import tokenizers

from mtpjax.byte_letters import LETTER_OF_BYTE

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
ADDED, SPECIAL = ("<think>", "<｜tool｜>", " x ", "▁y"), ("<eos>", "<|im_end|>")


def _strip(start: int, stop: int) -> dict:
    return {"type": "Strip", "content": " ", "start": start, "stop": stop}


def _sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "decoders": list(steps)}


def _metaspace(scheme: str) -> dict:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def _ctc(cleanup: bool) -> dict:
    return {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": cleanup}


def _letters(content: bytes) -> str:
    return "".join(LETTER_OF_BYTE[byte] for byte in content)


BYTES = [*map(_letters, (bytes([byte]) for byte in range(256))), *map(_letters, ("字".encode(), b" the"))]
# A character that two tokens share.
BYTES += [_letters("🙂".encode()[:2]), _letters("🙂".encode()[2:])]
PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES += ["▁", "▁the", "a", " ", "▁▁", "字", "é", "<0x+F>", "<0xé>", "<0xZZ>", ".", "▁.", "<0xe5>"]
WORDS = ["the", "a", "##b", "##", "▁c", "▁", "d</w>", "</w>", "<pad>", ".", "!", " ", "n't", "|", "'s", " n't", "▁▁e"]

WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
KINDS = {
    "byte-level": (BYTES, BYTE_LEVEL),
    "byte-level, strip": (BYTES, _sequence(BYTE_LEVEL, _strip(2, 0))),
    "byte-fallback, Llama": (PIECES, _sequence(SPACES, FALLBACK, FUSE, _strip(1, 0))),
    "byte-fallback, Gemma": (PIECES, _sequence(SPACES, FALLBACK, FUSE)),
    "byte-fallback, nested": (PIECES, _sequence(_sequence(SPACES, FALLBACK), _sequence(FUSE, _strip(3, 0)))),
    "byte-fallback, spaces later": (PIECES, _sequence(FALLBACK, FUSE, SPACES, _strip(1, 0))),
    "byte-fallback, Metaspace": (PIECES, _sequence(FALLBACK, _metaspace("always"))),
    "byte-fallback, a regex later": (
        PIECES,
        _sequence(FALLBACK, FUSE, {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}),
    ),
    "Metaspace": (WORDS, _metaspace("always")),
    "Metaspace, never": (WORDS, _metaspace("never")),
    "WordPiece": (WORDS, WORDPIECE),
    "WordPiece, no cleanup": (WORDS, WORDPIECE | {"cleanup": False}),
    "BPEDecoder": (WORDS, {"type": "BPEDecoder", "suffix": "</w>"}),
    "CTC": (WORDS, _ctc(cleanup=True)),
    "CTC, then WordPiece": (WORDS, _sequence(_ctc(cleanup=False), WORDPIECE)),
    "Fuse alone": (WORDS, FUSE),
    "no decoder": (WORDS, None),
}
# The tokenizers package fails for texts shorter than what these drop at the end.
STRIPPED_AT_THE_END = {
    "byte-level, strip at the end": (BYTES, _sequence(BYTE_LEVEL, _strip(1, 2))),
    "byte-fallback, strip at the end": (PIECES, _sequence(SPACES, FALLBACK, FUSE, _strip(1, 2))),
}


def make_tokenizer(vocabulary: list[str], decoder: dict | None) -> tokenizers.Tokenizer:
    """Returns a tokenizer of the words, and behind them the added and special tokens."""
    names = [(name, False) for name in ADDED] + [(name, True) for name in SPECIAL]
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    added = [
        {"id": len(vocabulary) + 1 + index, "content": name, "special": is_special, **flags}
        for index, (name, is_special) in enumerate(names)
    ]
    words = {word: index for index, word in enumerate(["<unk>", *vocabulary])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    return tokenizers.Tokenizer.from_str(json.dumps({"model": model, "added_tokens": added, "decoder": decoder}))
