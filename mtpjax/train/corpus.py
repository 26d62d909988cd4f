"""What a run reads: its sources as packed rows, some of their documents held out."""

import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

from mtpjax import checkpoint
from mtpjax.config import Source, TrainConfig
from mtpjax.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from mtpjax.train.data import Batch, Document, batches, pack, split_held_out
from mtpjax.train.sources import end_token_id, fingerprint, read_source


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


def load_corpus(config: TrainConfig, vocab_size: int) -> Corpus:
    """Reads, splits and packs `config`'s sources; what is skipped is told on stderr.

    Raises `ValueError` for sources of which too much is of no use or that leave nothing held out, `FileNotFoundError`
    where there is no text.
    """
    folder = config.tokenizer
    if folder is None and config.init_from is not None:
        beside = checkpoint.find(config.init_from)
        folder = str(beside) if (beside / "tokenizer.json").is_file() else None
    file = None if folder is None else FileTokenizer(pathlib.Path(folder), vocab_size)
    tokenizer: Tokenizer = file or ByteTokenizer()
    sources = config.sources or (Source(path=config.data, pattern=config.pattern),)
    packing = {"eos_token_id": end_token_id(tokenizer), "seed": 0}  # runs of all seeds have the same rows: `states.py`
    parts, held_out, skipped = [], [], []
    for source in sources:
        reading = read_source(source, tokenizer, vocab_size=vocab_size)
        training, apart = split_held_out(reading.documents, config.held_out_fraction)
        name = (source.path or "standard library") if config.sources[1:] else ""
        held_out += [dataclasses.replace(each, category=each.category or name) for each in apart]
        if not training or (source is sources[-1] and not held_out):
            count = len(reading.documents)
            raise ValueError(f"{count} documents are too few to hold {config.held_out_fraction:.0%} of them out")
        parts.append(pack(training, config.row_length, extra_tokens=config.extra_tokens, **packing))
        skipped.append(reading.skipped)
        if any(reading.skipped.values()):
            counts = " ".join(f"{reason}={count}" for reason, count in reading.skipped.items())
            print(f"skipped of {source.path}: {counts}", file=sys.stderr, flush=True)
    held_out_rows = pack(held_out, config.row_length, **packing)
    panel_rows = next(batches(held_out_rows, min(32, len(held_out_rows.tokens)), seed=config.seed))
    digest = fingerprint(sources, tokenizer, vocab_size=vocab_size)
    weights = [source.weight for source in sources]
    return Corpus(parts, weights, panel_rows, held_out, file, {"fingerprint": digest, "skipped": skipped})
