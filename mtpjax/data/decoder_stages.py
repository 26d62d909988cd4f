"""Stages of the incremental decoder. Each has the state of one text and returns what later tokens cannot change."""

import codecs
from collections.abc import Callable, Iterable
from typing import Any

from mtpjax.data.tokenizer_files import rust_errors

Piece = Any  # str; before the first stage with a state also the result of its function of one token: bytes, a pair


class Stage:
    """One stage of a decoder, with the state of one text."""

    def push(self, piece: Piece) -> Iterable[Any]:
        """Takes the next piece; returns pieces that can no longer change."""
        raise NotImplementedError

    def finish(self) -> Iterable[str]:
        """Returns what was held back, at the end of the text."""
        return ()


class Utf8Stage(Stage):
    """Joins bytes to characters. Bytes that are not UTF-8 become U+FFFD, counted as Rust and Python both do."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> Iterable[str]:
        return (self._decoder.decode(piece),)

    def finish(self) -> Iterable[str]:
        return (self._decoder.decode(b"", final=True),)


class MapStage(Stage):
    """A function of one piece, between stages with a state."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def push(self, piece: Piece) -> Iterable[Any]:
        return (self._function(piece),)


class FirstTokenStage(Stage):
    """Takes the first of a pair for the first token, the second for all others."""

    def __init__(self):
        self._index = 0

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        text = piece[self._index]
        self._index = 1
        return (text,)


class LastTokenStage(Stage):
    """Takes the second of a pair for the last token, the first for all others."""

    def __init__(self):
        self._held: tuple[str, str] | None = None

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        before, self._held = self._held, piece
        return () if before is None else (before[0],)

    def finish(self) -> Iterable[str]:
        return () if self._held is None else (self._held[1],)


class ChangedTokenStage(Stage):
    """Drops tokens that equal the previous one, and tokens without text. A pair: the token, its text."""

    def __init__(self):
        self._before: str | None = None

    def push(self, piece: tuple[str, str]) -> Iterable[str]:
        is_new, self._before = piece[0] != self._before, piece[0]
        return (piece[1],) if is_new and piece[1] else ()


class ByteFallbackStage(Stage):
    """Joins runs of byte tokens: one valid UTF-8 text, or U+FFFD for each byte of the run."""

    def __init__(self):
        self._start_run()

    def _start_run(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes, self._text, self._is_broken = 0, "", False

    @property
    def has_whole_characters(self) -> bool:
        """The run, which may still break, is whole characters so far."""
        return bool(self._text) and not self._is_broken and not self._decoder.getstate()[0]

    def push(self, piece: str | bytes) -> Iterable[str]:
        if isinstance(piece, str):
            return (*self.finish(), piece) if self._num_bytes else (piece,)
        self._num_bytes += len(piece)
        # Later bytes cannot repair a run, so its bytes are shown as invalid from then on. A valid run may still become
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
    """Drops up to `start` and `stop` times the character `content` at the two ends of a text that comes in parts."""

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
    """Replaces a string in a text that comes in parts; holds back a partial match at the end of a part."""

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
    """Runs all later stages over the whole text at its end, for stages that are not known."""

    def __init__(self, decoder: Any, is_fused: bool):
        self._decoder, self._is_fused, self._pieces = decoder, is_fused, []

    def push(self, piece: str) -> Iterable[str]:
        self._pieces.append(piece)
        return ()

    def finish(self) -> Iterable[str]:
        pieces = ["".join(self._pieces)] if self._is_fused else self._pieces
        with rust_errors("the tokenizer cannot decode these ids"):
            return (self._decoder.decode(pieces),)
