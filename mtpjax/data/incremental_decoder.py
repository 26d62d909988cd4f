"""Decodes one token at a time, so that the concatenated texts of all steps equal the text of all tokens.

A decoder of the tokenizers package is a chain of stages. Each stage maps a list of pieces to a list of pieces, and the
text is the concatenation of the last list. In this module, a stage receives one piece at a time, and returns the pieces
that later input cannot change:

    ByteLevel (GPT-2)            the bytes of all tokens form one UTF-8 text, so an incomplete character is held back
    ByteFallback (SentencePiece) adjacent byte tokens such as <0xE5> form whole characters, or each becomes U+FFFD, so a
                                 run of byte tokens is held back until it ends
    Metaspace, WordPiece         the first token is decoded differently; no decoder means joining with spaces
    BPEDecoder                   the last token is decoded differently, so one token is held back
    CTC                          a token that equals the previous one is dropped
    Fuse, ByteLevel              joins all pieces into one, which later stages receive in parts
    Strip after a join           drops characters at the start, and holds back those that it may drop at the end

An unknown stage holds back all text until the end, and then runs once over all of it.
"""

import codecs
import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mtpjax.byte_letters import BYTE_OF_LETTER
from mtpjax.data.tokenizer_files import rust_errors

CONTEXT_TOKENS = 16  # number of last prompt tokens to read, because a token affects only its neighbours
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # Rust's from_str_radix allows the sign
Piece = Any  # str, or for the first stateful stage also the bytes or pair that a per-token function returns


class Stage:
    """One stage of a decoder, with the state of one text."""

    def push(self, piece: Piece) -> Iterable[Any]:
        """Adds the next piece. Returns the pieces that can no longer change."""
        raise NotImplementedError

    def finish(self) -> Iterable[str]:
        """Ends the text, and returns what was held back."""
        return ()


class Utf8Stage(Stage):
    """Decodes bytes to characters. Invalid bytes become U+FFFD, exactly as many as in Rust and Python."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> Iterable[str]:
        return (self._decoder.decode(piece),)

    def finish(self) -> Iterable[str]:
        return (self._decoder.decode(b"", final=True),)


class MapStage(Stage):
    """Applies a function to each piece."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def push(self, piece: Piece) -> Iterable[Any]:
        return (self._function(piece),)


class FirstTokenStage(Stage):
    """Takes pairs, and returns the first element for the first token and the second for all others."""

    def __init__(self):
        self._index = 0

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        text = piece[self._index]
        self._index = 1
        return (text,)


class LastTokenStage(Stage):
    """Takes pairs, and returns the second element for the last token and the first for all others."""

    def __init__(self):
        self._held: tuple[str, str] | None = None

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        before, self._held = self._held, piece
        return () if before is None else (before[0],)

    def finish(self) -> Iterable[str]:
        return () if self._held is None else (self._held[1],)


class ChangedTokenStage(Stage):
    """Takes pairs of token and text, and drops tokens that equal the previous one and tokens without text."""

    def __init__(self):
        self._before: str | None = None

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        is_new, self._before = piece[0] != self._before, piece[0]
        return (piece[1],) if is_new and piece[1] else ()


class ByteFallbackStage(Stage):
    """Decodes each run of byte tokens to text if it is valid UTF-8, and otherwise to one U+FFFD per byte."""

    def __init__(self):
        self._start_run()

    def _start_run(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes, self._text, self._is_broken = 0, "", False

    @property
    def has_whole_characters(self) -> bool:
        """True if the run's bytes so far form whole characters. Later bytes can still make the run invalid."""
        return bool(self._text) and not self._is_broken and not self._decoder.getstate()[0]

    def push(self, piece: str | bytes) -> Iterable[str]:
        if isinstance(piece, str):
            return (*self.finish(), piece) if self._num_bytes else (piece,)
        self._num_bytes += len(piece)
        # Later bytes cannot repair an invalid run, so its bytes are returned at once. A valid run may still become
        # invalid.
        if self._is_broken:
            return ("\ufffd",)
        try:
            self._text += self._decoder.decode(piece)
        except UnicodeDecodeError:
            self._is_broken = True
            return ("\ufffd",) * self._num_bytes
        return ()

    def finish(self) -> Iterable[str]:
        num_bytes, text, is_broken = self._num_bytes, self._text, self._is_broken
        is_complete = not self._decoder.getstate()[0]
        self._start_run()
        if is_broken:
            return ()
        if is_complete:
            return (text,) if text else ()
        return ("\ufffd",) * num_bytes


class StripStage(Stage):
    """Drops up to `start` copies of the character `content` at the start of a text in parts, and `stop` at its end."""

    def __init__(self, content: str, start: int, stop: int):
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, piece: str) -> Iterable[str]:
        while self._start and piece:
            if piece[0] == self._content:
                self._start, piece = self._start - 1, piece[1:]
            else:
                self._start = 0
        if not self._stop:
            return (piece,)
        text = self._held + piece
        kept = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._held = text[kept:]
        return (text[:kept],)


class ReplaceStage(Stage):
    """Replaces a string in a text that arrives in parts. Holds back a partial match at the end of a part."""

    def __init__(self, pattern: str, content: str):
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, piece: str) -> Iterable[str]:
        *whole, rest = (self._held + piece).split(self._pattern)
        lengths = range(min(len(rest), len(self._pattern) - 1), 0, -1)
        held = next((length for length in lengths if rest.endswith(self._pattern[:length])), 0)
        self._held = rest[len(rest) - held :]
        return (self._content.join([*whole, rest[: len(rest) - held]]),)

    def finish(self) -> Iterable[str]:
        return (self._held,)


class WholeTextStage(Stage):
    """Runs an unknown stage and all later stages over the whole text when it is complete."""

    def __init__(self, decoder: Any, is_fused: bool):
        self._decoder, self._is_fused, self._pieces = decoder, is_fused, []

    def push(self, piece: str) -> Iterable[str]:
        self._pieces.append(piece)
        return ()

    def finish(self) -> Iterable[str]:
        pieces = ["".join(self._pieces)] if self._is_fused else self._pieces
        with rust_errors("the tokenizer cannot decode these ids"):
            return (self._decoder.decode(pieces),)


class IncrementalDecoder:
    """Decodes the tokens of one text.

    Args:
        piece_of: function that returns a token's piece for the first stage, or None if the token has no text.
        stages: one or more new stages, in order.
        prompt: tokens before the text, the last few of which affect how the text starts. The prompt's own text is not
            returned, except for a character that starts in the prompt and ends in the text.
    """

    def __init__(self, piece_of: Callable[[int], Piece | None], stages: Sequence[Stage], prompt: Sequence[int] = ()):
        self._piece_of, self._first, self._others = piece_of, stages[0], stages[1:]
        # Text of the prompt that the stages still hold back and will return with later text.
        self._held = ""
        for token in prompt[-CONTEXT_TOKENS:]:
            self(int(token))
        if len(prompt):
            self._held = self._copy()._finish()

    def __call__(self, token: int | None) -> str:
        """Returns the text that a token completes. None ends the text, and the rest is returned."""
        text = self._finish() if token is None else self._push(token)
        if self._held and text:
            num_held = min(len(self._held), len(text))
            is_same = self._held[:num_held] == text[:num_held]
            self._held, text = (self._held[num_held:], text[num_held:]) if is_same else ("", text)
        return text

    def _push(self, token: int) -> str:
        piece = self._piece_of(token)
        if piece is None:
            return ""
        pieces = self._first.push(piece)
        for stage in self._others:
            pieces = [text for piece in pieces for text in stage.push(piece)]
        return "".join(pieces)

    def pending(self) -> str:
        """Returns the whole characters that would follow if the text ended here, or "" if there are none.

        The search for stop strings needs them, because "\\n" is a byte token in Llama 2 and may be the last token.
        """
        stages = (self._first, *self._others)
        is_held = isinstance(self._first, ByteFallbackStage) and self._first.has_whole_characters
        if not is_held or any(isinstance(stage, WholeTextStage) for stage in stages):
            return ""
        return self._copy()(None)

    def _copy(self) -> "IncrementalDecoder":
        copied = copy.copy(self)
        copied._first, *copied._others = (copy.deepcopy(stage) for stage in (self._first, *self._others))
        return copied

    def _finish(self) -> str:
        pieces = list(self._first.finish())
        for stage in self._others:
            # Push what the previous stage held back, and then add what this stage held back itself.
            pieces = [text for piece in pieces for text in stage.push(piece)]
            pieces += stage.finish()
        return "".join(pieces)


class TokenizerDecoder:
    """Makes incremental decoders for a tokenizer.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. Its vocabulary and decoder must not change.

    Attributes:
        is_total: whether `tokenizer.decode` accepts every list of ids. With a decoder that strips characters from the
            end, it fails on texts that have fewer characters than it strips.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._piece_of = functools.cache(self._find_piece)
        steps = _flatten(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else None
        self.is_total = not any(step["type"] == "Strip" and step["stop"] for step in steps or ())
        self._functions, self._makers = _compile(steps)

    def start(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """Returns a decoder for a new text, or for the continuation of a prompt."""
        return IncrementalDecoder(self._piece_of, [make() for make in self._makers], prompt)

    def _find_piece(self, token: int) -> Piece | None:
        with rust_errors("the tokenizer cannot decode this id"):
            piece = self._tokenizer.id_to_token(int(token))
            # Special tokens have no text, nor does a vocabulary token with the same name.
            if piece is None or piece in self._special:
                return None
            for function in self._functions:
                piece = function(piece)
        return piece


def _compile(steps: list[dict[str, Any]] | None) -> tuple[list[Callable], list[Callable[[], Stage]]]:
    """Returns the functions to apply to each token, and factories for the first stateful stage and all later stages."""
    if steps is None:
        return [lambda piece: (piece, " " + piece)], [FirstTokenStage]
    functions: list[Callable[[Any], Any]] = []
    makers: list[Callable[[], Stage]] = []
    is_fused = False
    for place, step in enumerate(steps):
        found = (_fused_stage if is_fused else _token_stage)(step)
        if found is None:
            rest = _rust_decoder({"type": "Sequence", "decoders": steps[place:]})
            makers.append(functools.partial(WholeTextStage, rest, is_fused))
            break
        function, maker = found
        if function is not None and not makers:
            functions.append(function)
        elif function is not None:
            makers.append(functools.partial(MapStage, function))
        if maker is not None:
            makers.append(maker)
        is_fused = is_fused or step["type"] in ("Fuse", "ByteLevel")
    return functions, makers or [functools.partial(MapStage, str)]


def _token_stage(step: dict[str, Any]) -> tuple[Callable | None, Callable[[], Stage] | None] | None:
    """Returns a per-token function and the stage after it, for a step that receives tokens. None for unknown steps."""
    kind = step["type"]
    if kind == "Fuse":
        return None, None
    if kind == "ByteLevel":
        return _bytes_of_letters, Utf8Stage
    if kind == "ByteFallback":
        return _byte_of_name, ByteFallbackStage
    if kind == "Strip":
        return (lambda piece: "".join(StripStage(step["content"], step["start"], step["stop"]).push(piece))), None
    # Apply the decoder of `tokenizers` to one token to get its piece.
    decoder = _rust_decoder(step)
    if kind == "Replace":
        return (lambda piece: decoder.decode([piece])), None
    if kind in ("Metaspace", "WordPiece"):
        return (lambda piece: (decoder.decode([piece]), decoder.decode(["", piece]))), FirstTokenStage
    if kind == "BPEDecoder" and step["suffix"]:
        return (lambda piece: (decoder.decode([piece, ""]), decoder.decode([piece]))), LastTokenStage
    if kind == "CTC":
        return (lambda piece: (piece, decoder.decode([piece]))), ChangedTokenStage
    return None


def _fused_stage(step: dict[str, Any]) -> tuple[Callable | None, Callable[[], Stage] | None] | None:
    """Returns the same as `_token_stage` for a step after a join, which receives one piece in parts."""
    kind = step["type"]
    if kind == "Fuse":
        return None, None
    if kind == "Strip":
        return None, functools.partial(StripStage, step["content"], step["start"], step["stop"])
    if kind == "Replace" and (pattern := step["pattern"].get("String")):
        return None, functools.partial(ReplaceStage, pattern, step["content"])
    return None


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a decoder, without nesting."""
    if step["type"] != "Sequence":
        return [step]
    return [each for inner in step["decoders"] for each in _flatten(inner)]


def _rust_decoder(step: dict[str, Any]) -> Any:
    """Makes a decoder of the tokenizers package."""
    import tokenizers

    values = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": step}
    return tokenizers.Tokenizer.from_str(json.dumps(values)).decoder


def _byte_of_name(piece: str) -> str | bytes:
    """Returns the byte for a token such as <0xE5>, and other tokens unchanged."""
    found = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece


def _bytes_of_letters(piece: str) -> bytes:
    """Returns the bytes of a byte-level token. A token with other letters, such as an added token, is already text."""
    try:
        return bytes(map(BYTE_OF_LETTER.__getitem__, piece))
    except KeyError:
        return piece.encode()
