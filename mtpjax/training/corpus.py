"""What a run reads: its sources as packed rows, some of their documents held out."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mtpjax.data.config import Source
from mtpjax.data.packing import Batch, Document, batches, count_targets, pack, split_held_out
from mtpjax.data.sources import end_token_id, fingerprint, read_source
from mtpjax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.training.config import TrainConfig


class Corpus(NamedTuple):
    """What a run reads."""

    parts: list[Batch]  # packed training rows of each source
    weights: list[float]
    panel_rows: Batch  # a batch of packed held-out rows
    held_out: list[Document]  # their category: what a record names, else of several sources the path
    file: FileTokenizer | None  # None: bytes
    summary: dict[str, Any]  # what the checkpoint says of it

    @property
    def tokenizer(self) -> Tokenizer:
        return self.file or ByteTokenizer()

    @property
    def fingerprint(self) -> str:
        return self.summary["fingerprint"]


def load_corpus(config: TrainConfig, vocab_size: int, *, num_depths: int = 0) -> Corpus:
    """Reads, splits and packs `config`'s sources; what is skipped is told on stderr.

    Raises `ValueError` for sources of which too much is of no use, that leave nothing held out, or in which the trunk
    or one of `num_depths` depths has no target; `FileNotFoundError` where there is no text.
    """
    folder = config.tokenizer
    if folder is None and config.init_from is not None:
        beside = find_checkpoint(config.init_from)
        folder = str(beside) if (beside / "tokenizer.json").is_file() else None
    file = None if folder is None else FileTokenizer(pathlib.Path(folder), vocab_size)
    tokenizer: Tokenizer = file or ByteTokenizer()
    sources = config.sources or (Source(path=config.data, pattern=config.pattern),)
    packing = {"eos_token_id": end_token_id(tokenizer), "seed": 0}  # runs of all seeds have the same rows: `states.py`
    parts, held_out, readings = [], [], []
    for source in sources:
        reading = read_source(source, tokenizer, vocab_size=vocab_size)
        training, apart = split_held_out(reading.documents, config.held_out_fraction)
        name = (source.path or "standard library") if config.sources[1:] else ""
        held_out += [dataclasses.replace(each, category=each.category or name) for each in apart]
        if not training or (source is sources[-1] and not held_out):
            count = len(reading.documents)
            raise ValueError(f"{count} documents are too few to hold {config.held_out_fraction:.0%} of them out")
        parts.append(pack(training, config.row_length, extra_tokens=config.extra_tokens, **packing))
        readings.append(reading)
        if any(reading.skipped.values()):
            counts = " ".join(f"{reason}={count}" for reason, count in reading.skipped.items())
            print(f"skipped of {source.path}: {counts}", file=sys.stderr, flush=True)
    held_out_rows = pack(held_out, config.row_length, **packing)
    panel_rows = next(batches(held_out_rows, min(32, len(held_out_rows.tokens)), seed=config.seed))
    _check_targets(parts, num_depths, "the training rows")
    _check_targets([panel_rows], num_depths, "the held-out rows")
    digest = fingerprint(sources, readings, tokenizer, vocab_size=vocab_size)
    summary = {"fingerprint": digest, "skipped": [reading.skipped for reading in readings]}
    return Corpus(parts, [source.weight for source in sources], panel_rows, held_out, file, summary)


def _check_targets(parts: Sequence[Batch], num_depths: int, what: str) -> None:
    """Raises `ValueError` for a depth without a target: its loss would be 0 from the first step to the last."""
    counts = np.sum([count_targets(rows, num_depths) for rows in parts], axis=0)
    if counts.all():
        return
    depth = int(np.argmin(counts))
    raise ValueError(
        f"{what} have no target at depth {depth}: one is a token that counts, with {depth + 1} or more of its document"
        f" before it in a row of {parts[0].tokens.shape[1]}; take longer rows (row_length, extra_tokens), fewer depths"
        " (num_depths) or longer documents"
    )
