"""Compiles grammars, which are JSON schemas or regular expressions that a text must match.

llguidance compiles a grammar against the bytes of the tokenizer's tokens. Each text then has a `Matcher`, which
consumes its tokens on the host and computes the mask of the allowed next tokens.
"""

import signal
from typing import Literal

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.errors import install_extra
from mtpjax.serving.grammar_checks import checked_schema
from mtpjax.serving.grammar_vocabulary import llguidance_tokenizer
from mtpjax.serving.matcher import Grammar, GrammarError, explain
from mtpjax.serving.trial_compile import MAX_MEMORY, MAX_WALL_SECONDS, TRIAL_COMPILE
from mtpjax.worker_process import WorkerEnded

GrammarKind = Literal["json_schema", "regex"]

MAX_GRAMMAR_BYTES = 1 << 16
MAX_COMPILE_SECONDS = 10.0  # CPU time
# Each lexer state takes 1-2 kB, and a step of 100,000 units of fuel takes about 10 ms.
_LIMITS = {"max_lexer_states": 50_000, "step_lexer_fuel": 100_000, "verbose_errors": False}


class GrammarTooSlow(GrammarError):
    def __init__(self, seconds: float):
        super().__init__(f"the grammar takes more than {seconds:g} seconds to compile")


class Grammars:
    """Compiles grammars for one tokenizer.

    Raises:
        ValueError: the tokenizer has no token that ends a complete text, or its class is unsupported.
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
            kind: "json_schema" or "regex".
            source: a JSON schema as JSON, or a regular expression that the whole text must match.
            seconds: CPU time limit.

        Raises:
            GrammarError: the source is invalid, unsupported or too large; the message is one line.
            GrammarTooSlow: compiling takes longer than `seconds`.
        """
        from llguidance import LLMatcher, LLParserLimits

        if len(source.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes")
        if kind == "json_schema":
            try:
                source = checked_schema(source)
            except ValueError as error:
                raise GrammarError(str(error)) from error
            compiled = LLMatcher.grammar_from_json_schema(source)
        else:
            if (len(source) - len(source.rstrip("\\"))) % 2:  # llguidance would escape its own delimiter
                raise GrammarError("the regular expression ends with an incomplete escape")
            compiled = LLMatcher.grammar_from_regex(source)
        # A separate process compiles the grammar first, because compiling cannot be interrupted in this one.
        try:
            TRIAL_COMPILE(compiled, _LIMITS, seconds)
        except WorkerEnded as ended:
            raise _compile_failure(ended.code, seconds) from ended
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise GrammarError(f"the grammar does not compile: {explain(matcher.get_error())}")
        return Grammar(matcher, self._vocab_size)


def _compile_failure(code: int | None, seconds: float) -> GrammarError:
    """Returns the error for the exit code of a trial; `code` is None if the trial did not end."""
    if code == -signal.SIGPROF:
        return GrammarTooSlow(seconds)
    if code is None:
        return GrammarError(f"the grammar did not compile within {MAX_WALL_SECONDS:.0f} seconds")
    limit = f"{MAX_MEMORY >> 20} MiB"
    return GrammarError(f"compiling the grammar ended with code {code}, probably because it needs more than {limit}")
