"""Reads a run's training data, packs its documents into rows, and holds some documents out."""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtpjax.data.config import Source
from mtpjax.data.packing import (
    Batch,
    Document,
    count_targets,
    mixed_batches,
    pack,
    shuffled_batches,
    split_held_out,
)
from mtpjax.data.sources import SourceContents, end_token_id, fingerprint, read_source
from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from mtpjax.errors import printable
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.io.huggingface_files import has_tokenizer, huggingface_folder
from mtpjax.training.config import TrainConfig


class Corpus(NamedTuple):
    """The training and held-out data of a run. `load_corpus` makes it, and `batches` iterates over it.

    Attributes:
        source_rows: packed training rows `[R, T]` of each source.
        source_weights: sampling weight of each source.
        panel_rows: one batch of at most 32 packed held-out rows, for the acceptance panel.
        held_out: the held-out documents. A document's category comes from its record, or is the path of its source if
            there are several sources.
        file_tokenizer: the tokenizer read from a file; None: bytes.
        summary: fingerprint and skipped documents, stored in the checkpoint.

    Example:
        >>> from mtpjax import TrainConfig
        >>> from mtpjax.training import load_corpus
        >>> corpus = load_corpus(TrainConfig(data="texts"), vocab_size=256)  # doctest: +SKIP
        >>> batch = next(corpus.batches(8))  # doctest: +SKIP
        >>> batch.tokens.shape  # doctest: +SKIP
        (8, 128)
    """

    source_rows: list[Batch]
    source_weights: list[float]
    panel_rows: Batch
    held_out: list[Document]
    file_tokenizer: HuggingFaceTokenizer | None
    summary: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        return self.file_tokenizer or ByteTokenizer()

    @property
    def fingerprint(self) -> str:
        """Digest of everything that determines the rows."""
        return self.summary["fingerprint"]

    def batches(self, batch_size: int, *, seed: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yields an endless sequence of training batches, in the order in which `mtpjax.train` uses them.

        The n-th batch depends only on the rows, `seed` and n. A resumed loop therefore sets `start` to the number of
        batches that it has already used.

        Args:
            batch_size: rows per batch, B.
            seed: random seed for the order of the rows.
            start: number of batches to skip.

        Returns:
            An iterator of batches `[B, T]`.

        Raises:
            ValueError: there are fewer rows than `batch_size`, or `start` is negative.
            UsageError: there are several sources, and grain (extra `train`) is not installed.
        """
        stream = mixed_batches(self.source_rows, self.source_weights, batch_size, seed=seed, start=start)
        return (batch for _, batch in stream)


def load_corpus(config: TrainConfig, vocab_size: int, *, num_depths: int = 0) -> Corpus:
    """Reads, splits and packs the sources of a run. Prints counts of skipped documents to stderr.

    Args:
        config: the settings.
        vocab_size: the model's vocabulary size, which must cover the tokenizer's ids.
        num_depths: number of draft depths; the rows must contain targets for every depth.

    Returns:
        The corpus.

    Raises:
        ValueError: too many documents of a source are unusable, there are too few documents to hold any out, or the
            trunk or a depth has no target.
        FileNotFoundError: the sources contain no text.

    Example:
        >>> import pathlib, tempfile
        >>> from mtpjax import TrainConfig
        >>> from mtpjax.training import load_corpus
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for number in range(40):
        ...     _ = (folder / f"{number}.py").write_text(f"x = {number}" * 20)
        >>> config = TrainConfig(data=str(folder), row_length=32, held_out_fraction=0.2)
        >>> corpus = load_corpus(config, vocab_size=256, num_depths=2)
        >>> next(corpus.batches(4)).tokens.shape
        (4, 32)
    """
    # The tokenizer comes from the settings or else from the initial checkpoint. Without either, tokens are bytes.
    folder = None if config.tokenizer is None else str(huggingface_folder(config.tokenizer))
    if folder is None and config.init_from is not None:
        # A converted checkpoint keeps the tokenizer of the original in a separate folder.
        beside = find_checkpoint(config.init_from)
        beside = beside if beside.is_file() else huggingface_folder(beside)
        folder = str(beside) if has_tokenizer(beside) else None
    file_tokenizer = None if folder is None else HuggingFaceTokenizer(pathlib.Path(folder), vocab_size)
    tokenizer: Tokenizer = file_tokenizer or ByteTokenizer()
    sources = config.sources or (Source(path=config.data, pattern=config.pattern),)
    # The packing seed is fixed, so that runs with different seeds have the same rows and can share cached trunk states.
    packing = {"eos_token_id": end_token_id(tokenizer), "seed": 0}
    source_rows, held_out, readings = [], [], []
    for source in sources:
        # Hold out whole documents, chosen by a digest of their content, so that no training row contains their text.
        reading = read_source(source, tokenizer, vocab_size=vocab_size, output=config.output)
        training, reserved = split_held_out(reading.documents, config.held_out_fraction)
        name = (source.path or "standard library") if config.sources[1:] else ""
        held_out += [dataclasses.replace(each, category=each.category or name) for each in reserved]
        # Every source needs training documents; held-out documents may come from any of them.
        if not reading.documents and reading.last_skipped:
            raise ValueError(f"{source.path} has no usable document; the last: {reading.last_skipped}")
        if not training or (config.held_out_fraction and source is sources[-1] and not held_out):
            count = len(reading.documents)
            raise ValueError(
                f"{count} documents are too few to hold out {config.held_out_fraction:.0%} of them: add some, or train "
                "on all with held_out_fraction=0"
            )
        source_rows.append(pack(training, config.row_length, extra_tokens=config.extra_tokens, **packing))
        readings.append(reading)
        _print_reading(source, reading, reserved)
    # Every evaluation uses the same batch of held-out rows. Its seed is fixed too, so that `mtpjax compare` compares
    # runs with different seeds on the same rows.
    # If nothing is held out, the panel uses training rows, and a message says so.
    if held_out:
        held_out_rows = pack(held_out, config.row_length, **packing)
    else:
        print("held_out_fraction is 0: the panel measures training rows", file=sys.stderr, flush=True)
        documents = [each for reading in readings for each in reading.documents]
        held_out_rows = pack(documents, config.row_length, **packing)
    panel_rows = next(shuffled_batches(held_out_rows, min(32, len(held_out_rows.tokens)), seed=0))
    # A depth without targets would always have loss 0, so reject it before the run compiles.
    _check_targets(source_rows, num_depths, "the training rows")
    _check_targets([panel_rows], num_depths, "the held-out rows")
    digest = fingerprint(sources, readings, tokenizer, vocab_size=vocab_size)
    summary = {"fingerprint": digest, "skipped": [reading.skipped for reading in readings]}
    summary["lost_answers"] = [reading.lost_answers for reading in readings]
    source_weights = [source.weight for source in sources]
    return Corpus(source_rows, source_weights, panel_rows, held_out, file_tokenizer, summary)


def _print_reading(source: Source, reading: SourceContents, reserved: Sequence[Document]) -> None:
    """Prints to stderr what was read and what was left out, one line each."""
    if source.path is None:
        return
    name, counts = printable(source.path), ", ".join(f"{n} {reason}" for reason, n in reading.skipped.items() if n)
    share = sum(len(each.tokens) for each in reserved) / sum(len(each.tokens) for each in reading.documents)
    files, documents = len(reading.files), len(reading.documents)
    lines = [
        f"read {name}: {files} file{'s' * (files != 1)}, {documents} document{'s' * (documents != 1)}; "
        f"{share:.1%} of the tokens are held out"
    ]
    if reading.left_out:
        lines.append(f"left out files of {name}: {reading.left_out}")
    if counts:
        lines.append(f"skipped documents of {name}: {counts}; the last: {printable(reading.last_skipped, 400)}")
    if reading.lost_answers:
        problem = f"{reading.lost_answers} that cannot be located; the last: {printable(reading.last_lost, 400)}"
        lines.append(f"skipped answers of {name}: {problem}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _check_targets(row_sets: Sequence[Batch], num_depths: int, what: str) -> None:
    """Raises `ValueError` if a depth has no target, because its loss would always be 0."""
    counts = np.sum([count_targets(rows, num_depths) for rows in row_sets], axis=0)
    if counts.all():
        return
    depth = int(np.argmin(counts))
    raise ValueError(
        f"{what} have no target at depth {depth}: a target is an unmasked token with at least {depth + 1} tokens of its"
        f" document before it in a row of {row_sets[0].tokens.shape[1]}; use longer rows (row_length, extra_tokens),"
        " fewer depths (num_depths) or longer documents"
    )
