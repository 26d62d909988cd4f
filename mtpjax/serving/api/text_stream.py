"""New tokens to text, piece by piece: whole characters only, and an end at the first stop string."""

import dataclasses
from collections.abc import Callable, Collection, Iterable


@dataclasses.dataclass(frozen=True)
class Piece:
    """The text that some tokens released.

    Attributes:
        text: may be empty while it could still become a stop string.
        num_tokens: tokens that count; those behind a stop string do not.
    """

    text: str
    num_tokens: int


class TextStream:
    """Decodes the tokens of one request.

    The text does not depend on how the tokens are split into calls. Text is held back only while it is the beginning
    of a stop string. Of a stop string, and of a stop token, nothing is shown.

    Args:
        decoder: the tokenizer's incremental decoder.
        stop: stop strings, not empty.
        hidden_tokens: tokens that end the text and are not part of it.
        min_tokens: stop strings that end before this number of tokens are part of the text.
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
        self._hidden_tokens, self._min_tokens = frozenset(hidden_tokens), min_tokens
        self._held = ""
        self.num_tokens = 0
        self.matched: str | int | None = None  # the stop string or stop token that ended the text
        self.is_stopped = False  # by a stop string

    def push(self, tokens: Iterable[int]) -> Piece:
        """Takes the next tokens.

        Args:
            tokens: in order. Those behind a stop string are ignored.

        Returns:
            The text that can be shown now.
        """
        released, before = [], self.num_tokens
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            if token in self._hidden_tokens:
                self.matched = token
            else:
                released.append(self._release(self._decoder(token)))
        return Piece("".join(released), self.num_tokens - before)

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        if self.is_stopped:
            return ""
        text = self._release(self._decoder(None))
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        """Returns the text that is safe to show once `text` follows what is held back."""
        if not text:
            return ""
        text, self._held = self._held + text, ""
        if self.num_tokens < self._min_tokens:
            return text
        # The stop string that begins first wins; of several at one place, the first in the request's order.
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda each: each[0])
            self.is_stopped = True
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
