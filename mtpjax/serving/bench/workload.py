"""Makes the requests of a benchmark and their arrival times. The same seed gives the same requests and times."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.data.jsonl import read_json_objects
from mtpjax.data.prompts import Prompt, choose_prompts, read_prompts
from mtpjax.messages import require
from mtpjax.safe_open import read_json_file
from mtpjax.serving.bench.backends import BenchRequest

MAX_DATASET_BYTES = 4 << 30
# The server's tokenizer turns these words into the token ids of random prompts.
WORDS = """
    river market window seven paper garden mountain letter engine yellow doctor winter bridge music simple number
    travel kitchen history corner silver question morning animal factory summer village picture ocean teacher quiet
    answer street orange machine forest evening island science water market people between against another under
    never always because through example system program error value result table return start begin finish reason
"""


@dataclasses.dataclass(frozen=True)
class RandomLengths:
    """Lengths of random requests, uniform from `range_ratio` times the maximum to the maximum, as in SGLang."""

    num_input: int = 1024
    num_output: int = 1024
    range_ratio: float = 0.0

    def __post_init__(self):
        if min(self.num_input, self.num_output) < 1:
            raise ValueError(f"random lengths must be at least 1, got {self.num_input} and {self.num_output}")
        require(0 <= self.range_ratio <= 1, f"random_range_ratio must be from 0 to 1, got {self.range_ratio}")


def random_requests(token_ids: Sequence[int], count: int, lengths: RandomLengths, *, seed: int) -> list[BenchRequest]:
    rng = np.random.default_rng(seed)

    def draw(greatest: int) -> list[int]:
        least = max(int(greatest * lengths.range_ratio), 1)
        return rng.integers(least, greatest + 1, count).tolist()

    sizes = list(zip(draw(lengths.num_input), draw(lengths.num_output), strict=True))
    choices = np.asarray(token_ids)
    return [BenchRequest(tuple(rng.choice(choices, given).tolist()), new, "random") for given, new in sizes]


def read_dataset(path, count: int, *, categories: Sequence[str] = (), seed: int) -> list[tuple[Prompt, str | None]]:
    """Returns prompts from a file, chosen evenly over its categories, each with its reply in the file, or None.

    Args:
        path: conversations in ShareGPT's format, as JSON or JSONL, or prompts as in `mtpjax.data.prompts`.
        count: number of prompts; fewer if the file has fewer.
        categories: categories of the prompts to choose; if empty, all prompts may be chosen.
        seed: random seed for the choice.

    Raises:
        ValueError: the file has a different format.
        OSError: the file cannot be read.
    """
    path = pathlib.Path(path)
    replies = dict(_conversations(path)) if path.suffix in (".json", ".jsonl") else {}
    # Prompt files, such as Spec-Bench's, have no replies.
    prompts = list(replies) or read_prompts(path)
    chosen = choose_prompts(prompts, count, categories=categories, seed=seed)
    return [(prompt, replies.get(prompt)) for prompt in chosen]


def _conversations(path: pathlib.Path) -> Iterator[tuple[Prompt, str]]:
    """Yields the first turn and the reply of each conversation; nothing if the file has no conversations."""
    records: Any = (
        read_json_file(path, max_bytes=MAX_DATASET_BYTES)
        if path.suffix == ".json"
        else (record for _, record in read_json_objects(path))
    )
    for number, record in enumerate(records, start=1):
        turns = record.get("conversations") if isinstance(record, dict) else None
        if not isinstance(turns, list):
            continue
        # A turn's text is called "value" in ShareGPT's format and "content" in OpenAI's. A single turn has no reply.
        found = [turn.get("value", turn.get("content")) for turn in turns[:2] if isinstance(turn, dict)]
        texts = [text for text in found if isinstance(text, str) and text.strip()]
        if len(texts) == 2:
            yield Prompt(text=texts[0], category=path.stem, id=str(number)), texts[1]


def arrival_times(count: int, request_rate: float, *, seed: int) -> list[float]:
    """Draws the arrival times of requests, ascending, in seconds after the first.

    Args:
        count: number of requests.
        request_rate: mean requests per second of a Poisson process, above 0; if infinite, all requests arrive at once.
        seed: random seed for the gaps.
    """
    require(request_rate > 0, f"request_rate must be above 0, got {request_rate}")
    # A Poisson process has exponential gaps of mean 1 / rate, which is 0 for an infinite rate.
    gaps = np.random.default_rng([seed, 1]).exponential(1 / request_rate, max(count - 1, 0))
    return list(itertools.accumulate(gaps.tolist(), initial=0.0))[:count]
