"""Grammars: JSON schemas and regular expressions that a text must match, and the tokens that they allow next.

llguidance compiles a grammar against the bytes of the tokenizer's tokens. Each text has a matcher, which consumes its
tokens on the host and computes the mask of the tokens that may follow.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from mtpjax.serving.grammar_checks import GrammarError, checked_schema, explain

GrammarKind = Literal["json_schema", "regex"]

MAX_GRAMMAR_BYTES = 1 << 16
# Each lexer state takes 1-2 kB, and a step of 100,000 units of fuel takes about 10 ms.
_LIMITS = {"max_lexer_states": 50_000, "step_lexer_fuel": 100_000, "verbose_errors": False}


class Matcher:
    """Follows one text through its grammar. Calls come from one thread at a time.

    Args:
        matcher: llguidance's matcher, at the beginning of the text.
    """

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def consume(self, tokens: Sequence[int]) -> None:
        """Takes new tokens of the text.

        Raises:
            GrammarError: the grammar forbids one of them, or exceeds a limit. The matcher is unusable then.
        """
        if self._matcher.try_consume_tokens(list(tokens)) < len(tokens):
            raise GrammarError("the grammar failed: it forbids a token that its mask allowed")

    def fill_masks(self, masks: np.ndarray, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Computes which tokens may follow each node of a draft.

        The mask of a node stays as it is if the node or an ancestor is forbidden, because no exact rule accepts it, or
        follows an end token, because the text is cut there.

        Args:
            masks: `[W, ceil(V/32)]` int32, a bit per token, the lowest bit first. Callers begin with masks that allow
                every token.
            tokens: of the W nodes; the text consumed so far ends with node 0.
            parents: of the W nodes, parents before children; None: each node follows the one before.

        Raises:
            GrammarError: the grammar exceeds a limit. The matcher is unusable then.
        """
        from llguidance.numpy import fill_next_token_bitmask

        for node in range(len(tokens)):
            path = [tokens[step] for step in _path_to(node, parents)]
            num_consumed = self._matcher.try_consume_tokens(path)
            if num_consumed == len(path):
                fill_next_token_bitmask(self._matcher, masks, node)
                if self._matcher.is_error() or not masks[node].any():
                    message = self._matcher.get_error() or "no token of the vocabulary continues the text"
                    raise GrammarError(f"the grammar failed: {explain(message)}")
            if num_consumed:
                self._matcher.rollback(num_consumed)


class Grammar:
    """A compiled grammar, which many texts may share.

    Args:
        matcher: llguidance's matcher; it stays at the beginning.
        vocab_size: V of the model.

    Raises:
        GrammarError: no text can begin.

    Attributes:
        first_mask: `[ceil(V/32)]` int32 tokens that may begin a text, as in `Matcher.fill_masks`.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        masks = np.zeros((1, num_words(vocab_size)), np.int32)
        self.start().fill_masks(masks, [0])
        self.first_mask = masks[0]

    def start(self) -> Matcher:
        """Returns a matcher for a new text."""
        return Matcher(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: the model's.
        vocab_size: V of the model.

    Raises:
        ValueError: the tokenizer has no end token, with which a complete text ends, or is of an unsupported class.
        ImportError: llguidance is missing.

    Attributes:
        eos_token_ids: tokens that may follow a complete text, and nothing else may follow it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("llguidance is missing: pip install 'mtpjax[serve]'", name="llguidance") from error
        self.eos_token_ids = tuple(tokenizer.eos_token_ids)
        if not self.eos_token_ids:
            raise ValueError("grammars need a tokenizer with an end token")
        ends = {"n_vocab": vocab_size, "eos_token": list(self.eos_token_ids)}
        self._tokenizer = llguidance.LLTokenizer(_tokenizer_source(tokenizer), **ends)
        self._vocab_size = vocab_size

    def compile(self, kind: GrammarKind, source: str) -> Grammar:
        """Compiles a grammar; callable from any thread.

        Args:
            kind: of the source.
            source: a JSON schema as JSON, or a regular expression, which the whole text must match.

        Returns:
            The grammar.

        Raises:
            GrammarError: the source is wrong, unsupported or too large, in one line.
        """
        from llguidance import LLMatcher, LLParserLimits

        if len(source.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes")
        if kind == "json_schema":
            compiled = LLMatcher.grammar_from_json_schema(checked_schema(source))
        else:
            if (len(source) - len(source.rstrip("\\"))) % 2:  # llguidance would escape its own delimiter
                raise GrammarError("the regular expression ends with an incomplete escape")
            compiled = LLMatcher.grammar_from_regex(source)
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise GrammarError(f"the grammar does not compile: {explain(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size)


def num_words(vocab_size: int) -> int:
    """Returns the int32 words of a mask."""
    return -(-vocab_size // 32)


def _path_to(node: int, parents: Sequence[int] | None) -> list[int]:
    """Returns the nodes from the first below the root to `node`."""
    path = []
    while node > 0:
        path.append(node)
        node = node - 1 if parents is None else parents[node]
    return path[::-1]


def _tokenizer_source(tokenizer: Tokenizer) -> Any:
    """Returns a tokenizer in a form that llguidance takes."""
    from llguidance import TokenizerWrapper

    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, ByteTokenizer):
        return TokenizerWrapper(_Bytes())
    raise ValueError(f"grammars do not support a {type(tokenizer).__name__}")


class _Bytes:
    """`ByteTokenizer` in the form that `llguidance.TokenizerWrapper` takes."""

    eos_token_id, bos_token_id = ByteTokenizer.eos_token_id, None
    special_token_ids = ByteTokenizer.special_token_ids
    tokens = tuple(bytes([token]) for token in range(ByteTokenizer.vocab_size))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
