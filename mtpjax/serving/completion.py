"""Turns the tokens of a request into text as they arrive, up to its first stop string."""

import dataclasses
from collections.abc import Sequence

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.request import Delta, Finish, Request
from mtpjax.serving.text_stream import Span, TextStream


@dataclasses.dataclass(frozen=True)
class Job:
    """One text to generate, with its stop strings."""

    request: Request
    stop: tuple[str, ...] = ()

    def text_stream(self, tokenizer: Tokenizer) -> TextStream:
        """Returns the decoder of the new text."""
        return TextStream(
            tokenizer.incremental_decoder(self.request.prompt),
            stop=self.stop,
            hidden_tokens=self.request.stop_token_ids,
            min_tokens=int(self.request.sampling.min_new_tokens),  # type: ignore[arg-type]
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        spans: the text of each token, without the stop string or stop token that ended the text.
        tokens: new token ids, up to the one that completed a stop string.
        finish_reason: "stop" for a stop string, stop token or stop sequence, "length" for the token limit. In
            an engine also "abort", "timeout" or "error".
        matched_stop: the stop string or stop token that ended the text, otherwise None.
        prompt: token ids of the prompt.
        logprobs: log-probability of each of `tokens` under the trunk's unmodified logits; None unless requested.
        finish: the engine's counts for the text; None if no engine generated it.
    """

    spans: list[Span]
    tokens: list[int]
    finish_reason: str
    matched_stop: str | int | None
    prompt: Sequence[int] = ()
    logprobs: list[float] | None = None
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(span.text for span in self.spans)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification pass, including the bonus token; nan if there were no passes."""
        if self.finish is None or not self.finish.num_steps:
            return float("nan")
        return 1 + sum(self.finish.accepted) / self.finish.num_steps


@dataclasses.dataclass(frozen=True)
class Update:
    """New output of one text. `logprobs` is empty unless requested."""

    choice: "Choice"
    spans: list[Span]
    tokens: list[int]
    logprobs: list[float]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


class Choice:
    """One text during its generation.

    Attributes:
        index: its index among the texts of a call.
        spans: its text so far, by token.
        tokens: new tokens so far, excluding tokens after a stop string.
        logprobs: log-probabilities of `tokens`, if requested.
        finish: how it ended; None while it is running.
    """

    def __init__(self, index: int, job: Job, stream: TextStream):
        self.index, self.request, self.stream = index, job.request, stream
        self.spans: list[Span] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    def push(self, delta: Delta) -> Update:
        """Adds new tokens; ignores tokens after a stop string."""
        piece = self.stream.push(delta.tokens, delta.origins)
        tokens, logprobs = delta.tokens[: piece.num_tokens], (delta.logprobs or [])[: piece.num_tokens]
        self.tokens += tokens
        self.logprobs += logprobs
        self.spans += piece.spans
        return Update(self, piece.spans, tokens, logprobs)

    def end(self, finish: Finish) -> Update:
        """Adds the rest of the text after its last token."""
        rest = self.stream.finish()
        # The engine may have reached its limit before it learned of the stop string.
        reason = "stop" if self.stream.is_stopped else finish.reason
        self.finish = dataclasses.replace(finish, reason=reason, num_new_tokens=len(self.tokens))
        self.spans += rest.spans
        return Update(self, rest.spans, [], [])

    def completion(self) -> Completion:
        """Returns the text after its end."""
        assert self.finish is not None
        logprobs = self.logprobs if self.request.logprobs else None
        reason, matched = self.finish.reason, self.stream.matched
        return Completion(self.spans, self.tokens, reason, matched, self.request.prompt, logprobs, self.finish)
