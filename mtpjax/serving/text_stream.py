"""Decodes new tokens to text as they arrive, in whole characters and up to the first stop string."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """The text of one token, or a part of it. A character made of several tokens belongs to the last of them.

    Attributes:
        text: never empty.
        level: draft level that proposed the token; 0 for a bonus token, which the trunk drew itself.
    """

    text: str
    level: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """The text that one call of a `TextStream` releases.

    Attributes:
        spans: in order; empty while the text may still become a stop string.
        num_tokens: number of tokens, excluding tokens after a stop string.
    """

    spans: list[Span]
    num_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


class TextStream:
    """Decodes the tokens of one request.

    The text does not depend on how the tokens are split into calls. Text is held back only while it may be the start of
    a stop string. Stop strings and stop tokens are never shown.

    Args:
        decoder: the tokenizer's incremental decoder.
        stop: stop strings, none of them empty.
        hidden_tokens: tokens that end the text and are not part of it.
        min_tokens: a stop string that is completed before this number of tokens is ordinary text.
    """

    def __init__(
        self,
        decoder: Callable[[int | None], str],
        *,
        stop: Iterable[str] = (),
        hidden_tokens: Collection[int] = (),
        min_tokens: int = 0,
    ):
        self._decoder, self._stop = decoder, tuple(stop)
        self.has_stops = bool(self._stop)
        self._pending: Callable[[], str] = getattr(decoder, "pending", str)
        self._hidden_tokens, self._min_tokens = frozenset(hidden_tokens), min_tokens
        self._held: list[Span] = []
        self._level = 0  # draft level of the last token
        self.num_tokens = 0
        self.matched: str | int | None = None  # the stop string or stop token that ended the text
        self.is_stopped = False  # whether a stop string has ended the text

    def push(self, tokens: Iterable[int], levels: Iterable[int] = itertools.repeat(0)) -> Piece:
        """Adds tokens with their draft levels, and returns the text to show now. Ignores tokens after a stop string."""
        released: list[Span] = []
        before = self.num_tokens
        for token, self._level in zip(tokens, levels, strict=False):
            if self.is_stopped:
                break
            self.num_tokens += 1
            # A stop token ends the text without being shown.
            if token in self._hidden_tokens:
                self.matched = token
            else:
                released += self._release(self._decoder(token))
                released += self._stop_at_pending()
        return Piece(released, self.num_tokens - before)

    def finish(self) -> Piece:
        """Returns the rest of the text after the last token."""
        if self.is_stopped:
            return Piece([])
        # Flush incomplete characters. Held-back text can no longer become a stop string.
        spans = self._release(self._decoder(None))
        if not self.is_stopped:
            spans, self._held = spans + self._held, []
        return Piece(spans)

    def _stop_at_pending(self) -> list[Span]:
        """Ends the text if whole characters that the decoder holds back complete a stop string."""
        pending = self._pending() if self._stop and not self.is_stopped else ""
        if not pending or self.num_tokens < self._min_tokens:
            return []
        text = "".join(span.text for span in self._held) + pending
        return self._release(pending) if any(stop in text for stop in self._stop) else []

    def _release(self, text: str) -> list[Span]:
        """Adds `text`, which the last token completed, and returns all text that is now safe to show."""
        if not text:
            return []
        # Without stop strings, nothing is ever held back.
        if not self._stop:
            return [Span(text, self._level)]
        spans, self._held = [*self._held, Span(text, self._level)], []
        # Stop strings that end this early do not count, so nothing is held back for them.
        if self.num_tokens < self._min_tokens:
            return spans
        text = "".join(span.text for span in spans)
        # The stop string that starts first wins; if several start at one position, the first in the request.
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda each: each[0])
            self.is_stopped = True
            return _split(spans, place)[0]
        # Hold back the longest suffix that may still become a stop string.
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        shown, self._held = _split(spans, len(text) - held)
        return shown


def _split(spans: list[Span], place: int) -> tuple[list[Span], list[Span]]:
    """Splits spans at a position of their text."""
    before, after = [], []
    for text, level in spans:
        before.append(Span(text[:place], level))
        after.append(Span(text[place:], level))
        place = max(place - len(text), 0)
    return [span for span in before if span.text], [span for span in after if span.text]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
