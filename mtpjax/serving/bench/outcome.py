"""The outcome of one benchmark request, with the arrival times of its tokens and the server's counts."""

import dataclasses
import itertools

from mtpjax.serving.bench.backends import BenchRequest, Update


@dataclasses.dataclass
class Outcome:
    """The outcome of a request. Times come from `time.perf_counter`.

    Attributes:
        sent: when it was sent.
        arrivals: time and number of tokens so far, for each event that brought tokens.
        num_prompt_tokens: tokens of the prompt, as the server counts them.
        num_verify_steps: verification passes; 0 if the server does not report them.
        accept_length: tokens per verification pass; None if the server does not report it.
        error: one line if the request failed, otherwise empty.
    """

    request: BenchRequest
    sent: float
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    num_prompt_tokens: int = 0
    num_verify_steps: int = 0
    accept_length: float | None = None
    text: str = ""
    error: str = ""

    @property
    def num_new_tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token."""
        return self.arrivals[-1][0] - self.sent

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds per token after the first event. Tokens of one event share the time since the previous event."""
        result = []
        for (before, old), (now, new) in itertools.pairwise(self.arrivals):
            result += [(now - before) / (new - old)] * (new - old)
        return result


class AnswerReader:
    """Fills an outcome from the events of its answer, in order."""

    def __init__(self, outcome: Outcome, *, text_is_cumulative: bool):
        self._outcome, self._text_is_cumulative = outcome, text_is_cumulative
        self._texts: list[str] = []
        self._times_of_text: list[float] = []
        self._counts: list[tuple[float, int]] = []

    def add(self, now: float, update: Update) -> None:
        outcome = self._outcome
        if update.text:
            self._times_of_text.append(now)
            if self._text_is_cumulative:
                self._texts.clear()
            self._texts.append(update.text)
        if update.num_new_tokens is not None:
            self._counts.append((now, update.num_new_tokens))
        # These numbers describe the whole request, so the last reported value of each one counts.
        outcome.num_prompt_tokens = update.num_prompt_tokens or outcome.num_prompt_tokens
        outcome.num_verify_steps = update.num_verify_steps or outcome.num_verify_steps
        outcome.accept_length = update.accept_length or outcome.accept_length

    def close(self) -> None:
        """Completes the outcome after the last event."""
        self._outcome.text = "".join(self._texts)
        # Servers without running counts report only the total at the end, so spread it over the events with text.
        counts, num_events = self._counts, len(self._times_of_text)
        if len(counts) == 1 and num_events:
            total = counts[0][1]
            counts = [(now, total * event // num_events) for event, now in enumerate(self._times_of_text, start=1)]
        # Keep the events that brought tokens.
        for now, count in counts:
            if count > self._outcome.num_new_tokens:
                self._outcome.arrivals.append((now, count))
