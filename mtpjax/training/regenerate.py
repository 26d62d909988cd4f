"""Regenerates a data set by replacing its answers with the model's own, to train drafters on them.

Drafts are accepted more often if the drafter is trained on text that the model would write. Records are processed in
windows. The prompts in a window are decoded in batches of similar length, turn by turn, and the window's records are
then appended in input order. Windows, batches and seeds depend only on the settings and the records' positions in the
input, so an interrupted run continues after its last complete window and writes the same bytes as an uninterrupted one.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax import distributed
from mtpjax.data.jsonl import SkippedRecordError
from mtpjax.data.prompts import max_prompt_length
from mtpjax.data.record_files import FileDigest, read_file_records
from mtpjax.data.regeneration_output import Tally, open_output
from mtpjax.data.regeneration_tasks import RecordKind, Task, detect_record_kind, make_task
from mtpjax.data.tokenizer import Tokenizer, TokenizerError
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.field_types import check_range
from mtpjax.inference.generate import speculative_generate
from mtpjax.models.model import MTPModel
from mtpjax.program_memory import free_programs_if_full

# Increase this when the same settings begin to give different output. Only runs with the same version are resumed.
OUTPUT_VERSION = 2
BATCHES_PER_WINDOW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationRequest:
    """The records to answer, and how to answer them.

    Args:
        paths: files that all hold the same kind of content: conversations, prompts, or documents.
        config: decoding settings, with a fixed depth.
        sampling: sampling parameters, without seeds.
        chat: treat prompts as user messages and apply the chat template.
        prompt_tokens: number of tokens to keep from each text; None: all tokens of a prompt, or 64 of a document.
        batch_size: maximum number of records decoded together.
        seed: random seed. The random numbers for an answer depend on this seed, the record's index and the turn.

    Raises:
        ValueError: the files have several kinds of content, or a setting is out of range or unsupported.
    """

    paths: Sequence[pathlib.Path]
    config: DecodeConfig
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009, frozen
    chat: bool = False
    prompt_tokens: int | None = None
    batch_size: int = 8
    seed: int = 0
    kind: RecordKind = dataclasses.field(init=False)

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("seed", 0), ("prompt_tokens", 1)):
            check_range(name, getattr(self, name), least)
        if self.config.depth_policy != "fixed":
            raise ValueError("depth_policy must be 'fixed': with an adaptive depth, texts depend on other records")
        # The first record decides what the files contain.
        object.__setattr__(self, "kind", detect_record_kind(self.paths))
        if self.chat and self.kind == "documents":
            raise ValueError("documents are not messages: chat needs records of prompts")
        if self.prompt_tokens is not None and self.output_kind == "chat":
            raise ValueError("messages are kept whole: prompt_tokens applies only to prompts and documents")

    @property
    def output_kind(self) -> str:
        """The `kind` with which a `mtpjax.data.config.Source` reads the output."""
        return "chat" if self.chat or self.kind == "conversations" else "jsonl"

    def describe(self, files: Sequence[FileDigest]) -> dict[str, Any]:
        """Returns everything that determines the output, except the model and its tokenizer."""
        # File names are relative to their common folder, so that a moved data set still matches.
        data = hashlib.sha256(json.dumps([(name, digest) for name, _, digest in files]).encode()).hexdigest()
        settings = {name: getattr(self, name) for name in ("chat", "prompt_tokens", "batch_size", "seed")}
        return (
            {"version": OUTPUT_VERSION, "data": data}
            | settings
            | {name: value for name, value in dataclasses.asdict(self.config).items() if name != "allow_copies"}
            | {name: value for name, value in dataclasses.asdict(self.sampling).items() if name != "seed"}
        )


def regenerate(
    params: dict,
    request: RegenerationRequest,
    path,
    *,
    model: MTPModel,
    tokenizer: Tokenizer,
    model_digest: str,
    progress: Callable[[Tally, float], Any] = lambda tally, share: None,
) -> Tally:
    """Regenerates records into a JSONL file, or continues an interrupted run there.

    Args:
        model_digest: digest of the model; a run resumes only with the same model.
    """
    # A prompt must leave room for its answer.
    max_length = request.config.max_length or model.config.max_position_embeddings
    max_prompt_tokens = max_prompt_length(max_length, request.config.max_new_tokens)
    # Count the records first, to show progress, because the size of a compressed file does not show how many it has.
    files: list[FileDigest] = []
    num_records = sum(1 for _ in read_file_records(request.paths, files=files))
    records = enumerate(read_file_records(request.paths))
    settings = {"model": model_digest, "tokenizer": tokenizer.digest, **request.describe(files)}
    output = None

    @contextlib.contextmanager
    def open_here() -> Iterator[dict[str, Any]]:
        nonlocal output
        with open_output(path, settings, request.output_kind) as output:
            yield dataclasses.asdict(output.tally)

    # Every process decodes every record, because each has a part of the model. Only the first process writes.
    with distributed.in_main_process(open_here) as counts:
        tally, done = Tally(**counts), 0
        if output is not None:
            output.tally = tally
        # Windows already in the output are read again, to keep the records' indices, but not decoded again.
        while window := list(itertools.islice(records, request.batch_size * BATCHES_PER_WINDOW)):
            done += len(window)
            if window[0][0] >= tally.read:
                begin = time.perf_counter()
                tasks = _make_tasks(window, request, tokenizer, max_prompt_tokens, tally)
                _answer_tasks(params, tasks, request, model, tally)
                written = _finished_records(tasks, tally)
                tally.seconds += time.perf_counter() - begin
                if output is not None:
                    output.append(written)
                # Batches of many lengths compile many programs, which take memory.
                free_programs_if_full()
                progress(tally, done / num_records)
    if not tally.regenerated:
        raise ValueError(f"no record could be used: {tally}")
    return tally


def answer_seed(seed: int, number: int, turn: int) -> int:
    """Returns the sampling seed for one answer."""
    return int(np.random.SeedSequence([seed, number, turn]).generate_state(1, np.uint64)[0])


def _make_tasks(
    window, request: RegenerationRequest, tokenizer: Tokenizer, max_prompt_tokens: int, tally: Tally
) -> list[tuple[int, Task]]:
    """Returns the tasks for a window's usable records with the records' indices, and counts the other records."""
    settings = {"kind": request.kind, "chat": request.chat, "prompt_tokens": request.prompt_tokens}
    settings |= {"max_prompt_tokens": max_prompt_tokens}
    tasks = []
    for number, (place, content) in window:
        tally.read += 1
        try:
            tasks.append((number, make_task(content, tokenizer, **settings)))
        except SkippedRecordError as problem:
            tally.skipped[problem.reason] += 1
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return tasks


def _answer_tasks(
    params, tasks: list[tuple[int, Task]], request: RegenerationRequest, model: MTPModel, tally: Tally
) -> None:
    """Generates the answers of a window's tasks, turn by turn."""
    config, stops = request.config, request.config.stop_token_ids
    while waiting := [(number, task, task.prompt) for number, task in tasks if task.prompt is not None]:
        # Answer one turn of every conversation that has turns left. Sorting by length reduces padding within a batch.
        waiting.sort(key=lambda entry: len(entry[2]))
        for begin in range(0, len(waiting), request.batch_size):
            group = waiting[begin : begin + request.batch_size]
            # Pad the batch to a power of two with copies of its last row, so that decoding compiles for few sizes. A
            # copy ends in the same round as its original, so it adds no rounds.
            count, size = len(group), min(1 << (len(group) - 1).bit_length(), request.batch_size)
            rows = group + group[-1:] * (size - count)
            seeds = [answer_seed(request.seed, number, len(task.finish_reasons)) for number, task, _ in rows]
            sampling = dataclasses.replace(request.sampling, seed=seeds)
            prompts = [prompt for _, _, prompt in rows]
            result = speculative_generate(params, prompts, model=model, config=config, sampling=sampling)
            # Give each task its answer, without the stop token. The next turn's prompt depends on the answer.
            for (_, task, _), tokens, reason in zip(group, result.rows(), result.finish_reasons, strict=False):
                ends = tokens[-1:] if reason == "stop" and tokens[-1] in stops else []
                tally.changed += not task.add_answer(tokens[: len(tokens) - len(ends)], reason)
                tally.finished[reason] += 1
            tally.tokens += int(result.lengths[:count].sum())
            tally.rounds += int(result.stats.rounds[:count].sum())
            tally.accepted += int(result.stats.accepted[:count].sum())


def _finished_records(tasks: list[tuple[int, Task]], tally: Tally) -> list[dict[str, Any]]:
    """Returns the finished records, and counts records that training could not read."""
    records = []
    for _, task in tasks:
        try:
            records.append(task.record())
        except SkippedRecordError as problem:
            tally.skipped[problem.reason] += 1
            continue
        tally.regenerated += 1
        tally.cut += task.is_truncated
    return records
