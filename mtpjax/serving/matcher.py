"""Compiled grammars, the matchers that follow a text through them, and explanations of llguidance's messages."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.errors import printable

MAX_MESSAGE_CHARACTERS = 200

# llguidance's terms, and what they mean to the author of the grammar.
_MEANINGS = {
    "NoExtension": "no text of the model's tokens matches it",
    "LexerTooComplex": "it is too complex: its regular expressions have too many states",
    "coerce_one_of": "oneOf is not supported here: use anyOf",
    "lookarounds not supported": "^, $ and \\b are not supported; a regular expression always matches the whole text",
}
_TOO_MANY = re.compile(r"row has (?P<items>\d+) items; max is (?P<limit>\d+)")
# A regular expression is compiled as part of a larger grammar, whose positions and text mean nothing to a client.
_WRAPPED = re.compile(r'^at \d+\(\d+\): invalid regex ".*" \(in regex\): (?P<problem>.*?)( \d+ \| start: .*)?$')


class GrammarError(ValueError):
    """A grammar does not compile, or exceeds a limit during generation. The message is one line for the client."""


def explain(message: str) -> str:
    """Returns a message from llguidance as one line, without its internal terms."""
    message = " ".join(message.split()).removesuffix("<non-verbose/>").strip()
    if found := _TOO_MANY.search(message):
        return (
            f"it allows {found['items']} alternatives at one point, more than {found['limit']}; an object has about "
            "four for each of its optional properties, so make some of them required, or leave some out"
        )
    found = _WRAPPED.match(message)
    message = found["problem"] if found else message
    message = next((meaning for word, meaning in _MEANINGS.items() if word in message), message)
    return printable(message, MAX_MESSAGE_CHARACTERS)


class Matcher:
    """Follows one text through its grammar. Not thread-safe."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def consume(self, tokens: Sequence[int]) -> None:
        """Consumes new tokens. Raises GrammarError, after which the matcher is unusable."""
        num_consumed = self._matcher.try_consume_tokens(list(tokens))
        self._check()
        if num_consumed < len(tokens):
            raise GrammarError("the grammar failed: it forbids a token that its mask allowed")

    def fill_masks(self, masks: np.ndarray, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Computes which tokens may follow each node of a draft.

        A node's mask stays unchanged if the node or an ancestor is forbidden, because no exact rule accepts it, or if
        the node follows an end token, because the text ends there.

        Args:
            masks: `[W, ceil(V/32)]` int32 with one bit per token, lowest bit first; initially, all bits are set.
            tokens: tokens of the W nodes; node 0 is the last token consumed.
            parents: parents of the W nodes, which come before their children; None for a chain.

        Raises:
            GrammarError: the grammar exceeds a limit. The matcher is unusable afterwards.
        """
        from llguidance.numpy import fill_next_token_bitmask

        for node in range(len(tokens)):
            path = [tokens[step] for step in _path_to(node, parents)]
            num_consumed = self._matcher.try_consume_tokens(path)
            # An exceeded limit looks like a forbidden token here, but the previous mask allowed this one.
            self._check()
            if num_consumed == len(path):
                fill_next_token_bitmask(self._matcher, masks, node)
                self._check()
                if not masks[node].any():
                    raise GrammarError("the grammar failed: it allows no token in the vocabulary as the next token")
            if num_consumed:
                self._matcher.rollback(num_consumed)
                self._check()

    def _check(self) -> None:
        """Raises GrammarError if the matcher has failed, because its masks are then meaningless."""
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {explain(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar, which many texts may share.

    Args:
        matcher: llguidance's matcher at the start of a text; only copies of it are advanced.
        vocab_size: V of the model.

    Raises:
        GrammarError: no text matches.

    Attributes:
        first_mask: `[ceil(V/32)]` int32 mask of the tokens that may start a text, as in `Matcher.fill_masks`.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        masks = np.zeros((1, num_words(vocab_size)), np.int32)
        self.start().fill_masks(masks, [0])
        self.first_mask = masks[0]

    def start(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())


def num_words(vocab_size: int) -> int:
    """Returns the number of int32 words in a mask."""
    return -(-vocab_size // 32)


def _path_to(node: int, parents: Sequence[int] | None) -> list[int]:
    """Returns the nodes on the path from the root to `node`, without the root."""
    path = []
    while node > 0:
        path.append(node)
        node = node - 1 if parents is None else parents[node]
    return path[::-1]
