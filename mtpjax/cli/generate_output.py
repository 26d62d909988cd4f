"""Prints `mtpjax generate`'s texts, log-probabilities and counts, and compares the texts with plain decoding."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mtpjax.errors import printable
from mtpjax.messages import count_of

MIN_LOGPROB = -9999.0  # vLLM's value, because JSON has no infinity
COLORS = ("green", "cyan", "magenta", "yellow")  # of the draft levels


class Output:
    """Prints texts and their log-probabilities to stdout, in readable form or as JSON."""

    def __init__(self, options, tokenizer, *, is_one: bool):
        self._options, self._tokenizer, self._is_one = options, tokenizer, is_one
        self._printer = SpanPrinter()

    def write(self, prompts: list, rows: list[list[int]], completions: Sequence, scores: list | None) -> None:
        """Prints a batch."""
        for place, (prompt, row, completion) in enumerate(zip(prompts, rows, completions, strict=True)):
            own_scores = None if scores is None else scores[place]
            if self._options.json:
                print(self._to_json(prompt, row, completion, own_scores), flush=True)
                continue
            # A chat shows only the answer. Several answers need a line that identifies the prompt.
            if self._options.chat and not self._is_one:
                print(f"[{prompt.id}] {printable(prompt.text, 70)}")
            self._printer.write(completion.spans, "" if self._options.chat else prompt.text)
            print()
            if own_scores is not None:
                print(*self._format_scores(completion.tokens, own_scores), sep="\n")
            sys.stdout.flush()

    def _to_json(self, prompt, row: list[int], completion, scores) -> str:
        values = {
            "id": prompt.id,
            "prompt": prompt.text,
            "text": completion.text,
            "tokens": completion.tokens,
            "num_prompt_tokens": len(row),
            "finish_reason": completion.finish_reason,
            "matched_stop": completion.matched_stop,
        }
        if scores is not None:
            places = zip(completion.tokens, *scores, strict=True)
            values["logprobs"] = [
                self._entry(token, logprob) | {"top_logprobs": list(map(self._entry, top_ids, top))}
                for token, logprob, top_ids, top in places
            ]
        return json.dumps(values, ensure_ascii=False)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text_of(token), "id": token, "logprob": round(max(logprob, MIN_LOGPROB), 6)}

    def _format_scores(self, tokens: list[int], scores) -> list[str]:
        """Formats a line per token with its log-probability, its text, and the most likely tokens at its position."""
        num_top = self._options.logprobs
        lines = ["  logprob  token" + (f"            {num_top} most likely" if num_top else "")]
        for token, logprob, top_ids, top in zip(tokens, *scores, strict=True):
            best = "  ".join(f"{self._text_of(each)!r} {value:.3f}" for each, value in zip(top_ids, top, strict=True))
            lines.append(f"{logprob:9.3f}  {self._text_of(token)!r:<15}  {best}".rstrip())
        return lines

    def _text_of(self, token: int) -> str:
        """Returns the text of a single token, or a placeholder if it has no text, as for an end token."""
        return self._tokenizer.decode([token]) or f"<token {token}>"


class SpanPrinter:
    """Prints generated text to stdout. A terminal shows accepted drafts in one color per level.

    Attributes:
        is_terminal: stdout is a terminal.
    """

    def __init__(self):
        import rich.console

        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self.is_terminal = self._console.is_terminal

    def write(self, spans: Sequence, before: str = "") -> None:
        """Prints spans without a newline, after the text `before` in bold."""
        import rich.text

        # rich replaces tabs and drops other control characters, so text for a file or pipe is printed without it.
        if not self.is_terminal:
            print(before, *(span.text for span in spans), sep="", end="", flush=True)
            return
        text = rich.text.Text(end="").append(before, style="bold")
        # Tokens that the trunk drew itself are not colored.
        for part, level in spans:
            text.append(part, style=COLORS[(level - 1) % len(COLORS)] if level else "")
        self._console.print(text, end="")

    def waiting(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Shows on a terminal that the program waits; "" shows nothing."""
        return self._console.status(what) if what and self.is_terminal else contextlib.nullcontext()


def print_stats(results: list, texts: list[list[int]], config) -> None:
    """Prints the totals over all batches to stderr."""
    import numpy as np

    from mtpjax.decoding.result import DecodeStats

    names = [field.name for field in dataclasses.fields(DecodeStats)]
    parts = {name: np.concatenate([getattr(result.stats, name) for result in results]) for name in names}
    stats = DecodeStats(**parts)
    rates = " ".join(f"{rate:.2f}" for rate in stats.survival_rates)
    num_tokens = sum(map(len, texts))
    # Rounds continue until the next search for stop strings, and until the other texts of the batch have ended.
    num_after = int(stats.emitted.sum()) - num_tokens
    after = f" and {num_after} after stop strings" if num_after else ""
    counts = f"{count_of(num_tokens, 'token')}{after} in {count_of(stats.rounds.sum(), 'round')}"
    line = f"{counts}, accept length {stats.accept_length:.2f}"
    # Without drafts there are no rates to show.
    if rates:
        line += f", accepted per level {rates}"
    if not all(result.is_exact for result in results):
        line += f"; acceptance '{config.acceptance}' has changed the text's distribution"
    print(line, file=sys.stderr)


def warn_of_limit(prompts: list[list[int]], config, positions: int) -> None:
    """Warns on stderr that a text may have fewer new tokens than requested."""
    longest = max(map(len, prompts))
    if config.max_length is None and longest + config.max_new_tokens > positions:
        given = f"a prompt of {count_of(longest, 'token')} and --max-new-tokens {config.max_new_tokens}"
        limit = f"maximum length of {positions} tokens: it gets at most {count_of(positions - longest, 'new token')}"
        print(f"mtpjax generate: {given} exceed the model's {limit}", file=sys.stderr)


def compare_with_plain(
    params, prompts, texts, decode_plainly: Callable[[int | None], list[list[int]]], *, model, config
) -> tuple[list[str], int]:
    """Compares the texts with plain decoding. Returns lines to print, and exit code 4 if a text differs, else 0."""
    import jax.numpy as jnp

    from mtpjax.evaluation.same_text import first_divergences

    plain = decode_plainly(config.min_rows)
    is_equal = [text == other for text, other in zip(texts, plain, strict=True)]
    how = ""
    # Below float32, matmuls round differently at different widths, so near-tied logits can flip. Where texts differ,
    # compare again with plain decoding in passes of the drafts' width.
    if not all(is_equal) and jnp.finfo(params["embedding"].dtype).bits < 32:
        wide = decode_plainly(max(config.num_nodes, config.min_rows or 1))
        is_equal = [same or text == other for same, text, other in zip(is_equal, texts, wide, strict=True)]
        how = ", in passes of the same width: narrower ones round differently" if all(is_equal) else ""
    lines = [f"identical to plain decoding: {'yes' if all(is_equal) else 'NO'}{how}"]
    # For each text that differs, show where, and how close the two tokens' logits are. A near tie indicates rounding.
    for number, divergence in enumerate(first_divergences(params, prompts, texts, plain, model=model), start=1):
        if divergence is not None:
            gap = f"the trunk's logits for the two tokens are {divergence.gap:.2g} apart"
            where = "one text ends" if math.isinf(divergence.gap) else gap
            lines.append(f"prompt {number} differs from new token {divergence.position + 1} on, where {where}")
    return lines, 0 if all(is_equal) else 4
