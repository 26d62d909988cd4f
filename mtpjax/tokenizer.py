"""Text <-> token ids."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte. Byte 0 never occurs in text, so it ends a document."""

    vocab_size = 256
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`, without an end token. Raises ValueError for NUL and lone surrogates."""
        position = text.find("\0")
        if position >= 0:
            raise ValueError(f"text holds NUL at character {position}: byte 0 is the end token")
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at character {error.start}: it has no UTF-8") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, ints or a 1-D integer array: end tokens skipped, bytes that are no UTF-8 as U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        kept = bytearray()
        for index in ids:
            token = int(index)
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
            if token != self.eos_token_id:
                kept.append(token)
        return kept.decode("utf-8", errors="replace")
