"""Grammars: JSON schemas and regular expressions that a text must match, and the tokens that they allow next.

llguidance compiles a grammar against the bytes of the tokenizer's tokens. Each text has a matcher, which consumes its
tokens on the host and computes the mask of the allowed next tokens.
"""

import signal
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.errors import install_extra
from mtpjax.serving.grammar_checks import checked_schema
from mtpjax.serving.grammar_vocabulary import llguidance_tokenizer
from mtpjax.serving.matcher import GrammarError, explain
from mtpjax.serving.trial_compile import MAX_MEMORY, MAX_WALL_SECONDS, TRIAL_COMPILE
from mtpjax.worker_process import WorkerEnded

GrammarKind = Literal["json_schema", "regex"]

MAX_GRAMMAR_BYTES = 1 << 16
MAX_COMPILE_SECONDS = 10.0  # of CPU time
# Each lexer state takes 1-2 kB, and a step of 100,000 units of fuel takes about 10 ms.
_LIMITS = {"max_lexer_states": 50_000, "step_lexer_fuel": 100_000, "verbose_errors": False}


class GrammarTooSlow(GrammarError):
    def __init__(self, seconds: float):
        super().__init__(f"the grammar takes more than {seconds:g} seconds to compile")


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

        The mask of a node stays unchanged if the node or an ancestor is forbidden, because no exact rule accepts it, or
        follows an end token, because the text is cut there.

        Args:
            masks: `[W, ceil(V/32)]` int32, a bit per token, the lowest bit first, all set at first.
            tokens: of the W nodes; node 0 is the last token consumed.
            parents: of the W nodes, parents before children; None: a chain.

        Raises:
            GrammarError: the grammar exceeds a limit. The matcher is unusable then.
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
                    raise GrammarError("the grammar failed: no token of the vocabulary continues the text")
            if num_consumed:
                self._matcher.rollback(num_consumed)
                self._check()

    def _check(self) -> None:
        """Raises GrammarError if the matcher has failed: its masks mean nothing then."""
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {explain(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar, which many texts may share.

    Args:
        matcher: llguidance's matcher; it stays at the start.
        vocab_size: V of the model.

    Raises:
        GrammarError: no text matches.

    Attributes:
        first_mask: `[ceil(V/32)]` int32 tokens that may begin a text, as in `Matcher.fill_masks`.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        masks = np.zeros((1, num_words(vocab_size)), np.int32)
        self.start().fill_masks(masks, [0])
        self.first_mask = masks[0]

    def start(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one tokenizer.

    Raises:
        ValueError: the tokenizer has no end token, which ends a complete text, or its class is unsupported.
        ImportError: llguidance is missing.

    Attributes:
        eos_token_ids: the only tokens that may follow a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise ImportError(f"llguidance is missing: {install_extra('serve')}", name="llguidance") from error
        self.eos_token_ids = tuple(tokenizer.eos_token_ids)
        if not self.eos_token_ids:
            raise ValueError("grammars need a tokenizer with an end token")
        self._tokenizer = llguidance_tokenizer(tokenizer, vocab_size)
        self._vocab_size = vocab_size

    def compile(self, kind: GrammarKind, source: str, *, seconds: float = MAX_COMPILE_SECONDS) -> Grammar:
        """Compiles a grammar; thread-safe.

        Args:
            kind: of the source.
            source: a JSON schema as JSON, or a regular expression that the whole text must match.
            seconds: limit of CPU time.

        Raises:
            GrammarError: in one line: the source is invalid, unsupported or too large.
            GrammarTooSlow: it takes longer.
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
        # A separate process compiles it first, because compiling cannot be interrupted here.
        try:
            TRIAL_COMPILE(compiled, _LIMITS, seconds)
        except WorkerEnded as ended:
            raise _compile_failure(ended.code, seconds) from ended
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise GrammarError(f"the grammar does not compile: {explain(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size)


def num_words(vocab_size: int) -> int:
    """Returns the number of int32 words in a mask."""
    return -(-vocab_size // 32)


def _path_to(node: int, parents: Sequence[int] | None) -> list[int]:
    """Returns the path from below the root to `node`."""
    path = []
    while node > 0:
        path.append(node)
        node = node - 1 if parents is None else parents[node]
    return path[::-1]


def _compile_failure(code: int | None, seconds: float) -> GrammarError:
    """Returns the error for the exit code of a trial; None: it did not end."""
    if code == -signal.SIGPROF:
        return GrammarTooSlow(seconds)
    if code is None:
        return GrammarError(f"the grammar did not compile within {MAX_WALL_SECONDS:.0f} seconds")
    limit = f"{MAX_MEMORY >> 20} MiB"
    return GrammarError(f"compiling the grammar ended with code {code}, probably because it needs more than {limit}")
