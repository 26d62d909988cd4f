"""Formats log-probabilities as in OpenAI's completions and chats."""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.api.generation import json_logprob
from mtpjax.serving.completion import Choice
from mtpjax.serving.request import Scores


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Finite log-probabilities of a text's tokens.

    Attributes:
        logprobs: log-probability of each token; None for the first token of a text.
        alternatives: per token, the most likely ids at its position and their log-probabilities, descending.
    """

    tokens: list[int]
    logprobs: Sequence[float | None]
    alternatives: Sequence[list[tuple[int, float]]] | None = None


async def score_choice(
    score: Callable[[list[int], int], Awaitable[Scores]], choice: Choice, num_top: int, *, with_prompt: bool = False
) -> TokenScores:
    """Collects the log-probabilities of a text that has ended.

    The engine returns log-probabilities with the new tokens. Alternatives, and log-probabilities of the prompt, require
    an additional pass over the whole text, which `score` runs.
    """
    if not num_top and not with_prompt:
        return TokenScores(choice.tokens, choice.logprobs)
    prompt = list(choice.request.prompt)
    scores = await score(prompt + choice.tokens, num_top)
    rows = list(zip(scores.top_ids, scores.top_logprobs, strict=True))
    alternatives = [[(token, json_logprob(each)) for token, each in zip(*row, strict=True)] for row in rows]
    given = [None if each is None else json_logprob(each) for each in scores.logprobs[: len(prompt)]]
    start = 0 if with_prompt else len(prompt)
    tokens, logprobs = (prompt + choice.tokens)[start:], [*given, *choice.logprobs][start:]
    return TokenScores(tokens, logprobs, alternatives[start:] if num_top else None)


class TextOffsets:
    """Computes each token's offset in the text, in characters. A stream keeps a `TextOffsets` for each text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._decoder, self._length = tokenizer.incremental_decoder(prompt), 0

    def push(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._decoder(token))
        return offsets


def completion_logprobs(tokenizer: Tokenizer, scores: TokenScores, offsets: TextOffsets) -> dict[str, Any]:
    """Makes the `logprobs` object of a completion. `offsets` must already include the tokens before `scores`."""
    text_of = _token_texts(tokenizer)
    top = None
    if scores.alternatives is not None:
        # Tokens with the same text share a key, which the most likely token keeps.
        rows = [[(text_of(token), logprob) for token, logprob in row] for row in scores.alternatives]
        top = [dict(reversed(row)) if row else None for row in rows]
    return {
        "tokens": [text_of(token) for token in scores.tokens],
        "token_logprobs": list(scores.logprobs),
        "top_logprobs": top,
        "text_offset": offsets.push(scores.tokens),
    }


def chat_logprobs(tokenizer: Tokenizer, scores: TokenScores) -> dict[str, Any]:
    """Makes the `logprobs` object of a chat, with one entry of `content` per token."""
    text_of = _token_texts(tokenizer)

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = text_of(token)
        # A token that is part of a character has no text, and its bytes are unknown.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    alternatives: Iterable = scores.alternatives or [[]] * len(scores.tokens)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*each) for each in row]}
        for token, logprob, row in zip(scores.tokens, scores.logprobs, alternatives, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    return functools.cache(lambda token: tokenizer.decode([token]))
