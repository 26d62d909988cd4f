"""A model's own answers in place of those that a data set holds: text to train drafts on.

Drafts are accepted more often where they were trained on what the model itself would write. The records are worked
through in windows: a window's prompts are decoded in batches of similar length, turn by turn, and its records appended
to the output in the order of the input. Windows, batches and seeds depend on the settings and on a record's number
alone, so that a run that was ended goes on behind its last window with the bytes of an unbroken one.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtpjax.data.jsonl import UnusableError, read_parts
from mtpjax.data.prompts import room_for_prompts
from mtpjax.data.regeneration_output import Tally, open_output
from mtpjax.data.regeneration_tasks import Kind, Task, find_kind, make_task
from mtpjax.data.tokenizer import Tokenizer, TokenizerError
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.generate import speculative_generate
from mtpjax.models.model import MTPModel

VERSION = 1  # of what a setting gives: another one is not gone on with
BATCHES_PER_WINDOW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to answer, and how.

    Attributes:
        paths: files of one kind: JSONL of conversations, JSONL of prompts, or documents.
        config, sampling: as for decoding; at a fixed depth, and without seeds.
        chat: take prompts for messages, by the chat template.
        prompt_tokens: the first so many of a text are kept; None: all of a prompt, 64 of a document.
        batch_size: records decoded together, at most.
        seed: what a record's noise depends on, beside its number.

    Raises `ValueError` for files of several kinds, and for settings that do not fit.
    """

    paths: Sequence[pathlib.Path]
    config: DecodeConfig
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009, frozen
    chat: bool = False
    prompt_tokens: int | None = None
    batch_size: int = 8
    seed: int = 0
    kind: Kind = dataclasses.field(init=False)

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("seed", 0), ("prompt_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.config.depth_policy != "fixed":
            raise ValueError("an adaptive depth makes a record's text depend on its neighbours: depth_policy 'fixed'")
        object.__setattr__(self, "kind", find_kind(self.paths))
        if self.chat and self.kind == "documents":
            raise ValueError("documents are no messages: conversations are made of prompts in JSONL")
        if self.prompt_tokens is not None and self.output_kind == "chat":
            raise ValueError("messages are kept whole: prompt_tokens is for prompts and documents")

    @property
    def output_kind(self) -> str:
        """The `kind` of the output as a `mtpjax.data.config.Source`."""
        return "chat" if self.chat or self.kind == "conversations" else "jsonl"

    def describe(self) -> dict[str, Any]:
        """All that decides the output, but for the model and its tokenizer."""
        root = os.path.commonpath([path.parent for path in self.paths])
        files = [(os.path.relpath(path, root), _digest(path)) for path in self.paths]
        data = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        settings = {name: getattr(self, name) for name in ("chat", "prompt_tokens", "batch_size", "seed")}
        return (
            {"version": VERSION, "data": data}
            | settings
            | dataclasses.asdict(self.config)
            | {name: value for name, value in dataclasses.asdict(self.sampling).items() if name != "seed"}
        )


def regenerate(
    params: dict,
    request: Request,
    path,
    *,
    model: MTPModel,
    tokenizer: Tokenizer,
    model_digest: str,
    progress: Callable[[Tally, float], Any] = lambda tally, share: None,
) -> Tally:
    """Writes the file at `path`, or what it does not hold yet; `progress` is told the share of the input that is done.

    Raises `ValueError` for what decoding refuses, for a file that cannot be gone on with (`open_output`), and where no
    record at all could be used; `TokenizerError` for a tokenizer that takes no conversations; `OSError`.
    """
    most = request.config.max_length or model.config.max_position_embeddings
    room = room_for_prompts(most, request.config.max_new_tokens)
    size = max(sum(path.stat().st_size for path in request.paths), 1)
    records = enumerate(read_parts(request.paths, by_line=request.kind != "documents"))
    settings = {"model": model_digest, "tokenizer": tokenizer.digest, **request.describe()}
    with open_output(path, settings, request.output_kind) as output:
        tally, done = output.tally, 0
        while window := list(itertools.islice(records, request.batch_size * BATCHES_PER_WINDOW)):
            done += sum(len(content) for _, (_, content) in window)
            if window[0][0] >= tally.read:
                begin = time.perf_counter()
                tasks = _read(window, request, tokenizer, room, tally)
                _answer(params, tasks, request, model, tally)
                written = _written(tasks, tally)
                tally.seconds += time.perf_counter() - begin
                output.append(written)
                progress(tally, min(done / size, 1.0))
    if not tally.regenerated:
        raise ValueError(f"no record could be used: {tally}")
    return tally


def record_seed(seed: int, number: int, turn: int) -> int:
    """Of the noise of one answer, 0..2^64-1; of another record, turn or seed it is another."""
    return int(np.random.SeedSequence([seed, number, turn]).generate_state(1, np.uint64)[0])


def _read(window, request: Request, tokenizer: Tokenizer, room: int, tally: Tally) -> list[tuple[int, Task]]:
    """The records of a window that can be used, with their numbers."""
    settings = {"kind": request.kind, "room": room, "chat": request.chat, "prompt_tokens": request.prompt_tokens}
    tasks = []
    for number, (place, content) in window:
        tally.read += 1
        try:
            tasks.append((number, make_task(content, tokenizer, **settings)))
        except UnusableError as problem:
            tally.skipped[problem.reason] += 1
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return tasks


def _answer(params, tasks: list[tuple[int, Task]], request: Request, model: MTPModel, tally: Tally) -> None:
    """Decodes turn by turn, the shortest prompts first."""
    config, stops = request.config, request.config.stop_token_ids
    while waiting := [(number, task, task.prompt) for number, task in tasks if task.prompt is not None]:
        waiting.sort(key=lambda entry: len(entry[2]))
        for begin in range(0, len(waiting), request.batch_size):
            group = waiting[begin : begin + request.batch_size]
            count, size = len(group), min(1 << (len(group) - 1).bit_length(), request.batch_size)
            rows = group + group[-1:] * (size - count)  # few shapes; a copy takes no round more than what it copies
            seeds = [record_seed(request.seed, number, len(task.finish_reasons)) for number, task, _ in rows]
            sampling = dataclasses.replace(request.sampling, seed=seeds)
            prompts = [prompt for _, _, prompt in rows]
            result = speculative_generate(params, prompts, model=model, config=config, sampling=sampling)
            for (_, task, _), tokens, reason in zip(group, result.rows(), result.finish_reasons, strict=False):
                ends = tokens[-1:] if reason == "stop" and tokens[-1] in stops else []
                tally.changed += not task.take(tokens[: len(tokens) - len(ends)], reason)
                tally.finished[reason] += 1
            tally.tokens += int(result.lengths[:count].sum())
            tally.steps += int(result.stats.steps[:count].sum())
            tally.accepted += int(result.stats.accepted[:count].sum())


def _written(tasks: list[tuple[int, Task]], tally: Tally) -> list[dict[str, Any]]:
    records = []
    for _, task in tasks:
        try:
            records.append(task.record())
        except UnusableError as problem:
            tally.skipped[problem.reason] += 1
            continue
        tally.regenerated += 1
        tally.cut += task.is_cut
    return records


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
