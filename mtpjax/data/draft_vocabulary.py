"""Chooses the most frequent tokens of a corpus as a reduced draft vocabulary (FR-Spec, 2502.14856).

The output head dominates the cost of drafting, and its cost is proportional to the size of the draft vocabulary. The
distribution of the text does not change, because the trunk can still emit every token.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.atomic import write_text
from mtpjax.data.chat_messages import clean_messages, text_of
from mtpjax.data.prompts import read_text
from mtpjax.data.record_files import as_object, is_record_file, read_file_records
from mtpjax.data.record_forms import find_messages, has_conversation
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.messages import count_of
from mtpjax.safe_open import read_json_file

FORMAT = "mtpjax-vocabulary"
MAX_FILE_BYTES = 64 << 20
COUNTED_KEYS = ("turns", "prompt", "text", "question", "answer", "completion", "response")
PIECE_CHARACTERS = 1 << 16  # characters to encode at a time, so that progress is visible


@dataclasses.dataclass(frozen=True)
class CorpusCounts:
    """Token counts of a corpus.

    Attributes:
        counts: `[V]` occurrences of each token.
        num_files: number of files that were counted.
        skipped: names of files that are not text.
    """

    counts: np.ndarray
    num_files: int
    skipped: tuple[str, ...]


def count_tokens(
    files: Sequence[pathlib.Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    progress: Callable[[int], Any] = lambda count: None,
) -> CorpusCounts:
    """Counts the tokens in text files, and in the texts and conversations of record files."""
    counts = np.zeros(vocab_size, np.int64)
    skipped = []
    for file in files:
        bytes_counted, file_counts = 0, np.zeros_like(counts)
        try:
            # Count into a separate array first, so that a file that turns out not to be text adds nothing.
            for piece in _text_pieces(file):
                file_counts += np.bincount(np.asarray(tokenizer.encode(piece), np.int64), minlength=vocab_size)
                size = len(piece.encode())
                bytes_counted += size
                progress(size)
        except ValueError:
            if len(files) == 1:
                raise
            skipped.append(str(file))
        else:
            counts += file_counts
        # Also report the bytes that are not text, such as JSON syntax, so that progress reaches the files' sizes.
        progress(max(file.stat().st_size - bytes_counted, 0))
    if not counts.any():
        raise ValueError(f"no tokens in {count_of(len(files), 'file')}")
    return CorpusCounts(counts=counts, num_files=len(files) - len(skipped), skipped=tuple(skipped))


def choose_vocabulary(counts: np.ndarray, size: int, *, required_ids: Iterable[int] = ()) -> tuple[int, ...]:
    """Chooses the most frequent tokens.

    Args:
        counts: `[V]` occurrences.
        required_ids: tokens that are always kept, such as special tokens.

    Returns:
        `size` ids, ascending. Among equally frequent tokens, lower ids win.
    """
    required_ids = sorted(set(required_ids))
    if not max(len(required_ids), 1) <= size <= len(counts):
        raise ValueError(
            f"size {size} is outside {max(len(required_ids), 1)}..{len(counts)}: {len(required_ids)} special tokens are"
            f" always kept, and the model has {len(counts)} tokens"
        )
    # Sort required tokens first. A stable sort puts lower ids first among equal counts.
    frequency = counts.astype(np.int64)
    frequency[required_ids] = np.iinfo(np.int64).max
    order = np.argsort(-frequency, kind="stable")
    return tuple(sorted(order[:size].tolist()))


def coverage(counts: np.ndarray, ids: Sequence[int]) -> float:
    """Returns the share of the corpus's tokens that are among `ids`."""
    return float(counts[list(ids)].sum() / counts.sum())


def report_sizes(size: int, vocab_size: int, min_size: int) -> list[int]:
    """Returns the sizes to report, which are `vocab_size`, and halves and doubles of `size` from `min_size` on."""
    sizes = {size // 8, size // 4, size // 2, size, 2 * size, 4 * size, vocab_size}
    return sorted(value for value in sizes if max(min_size, 1) <= value <= vocab_size)


def save_vocabulary(path, ids: Sequence[int], *, counts: np.ndarray, source: str, sizes: dict[int, float]) -> None:
    """Writes a vocabulary file atomically.

    Args:
        counts: `[V]` occurrences, from which the coverage is computed.
    """
    content = {
        "format": FORMAT,
        "size": len(ids),
        "vocab_size": len(counts),
        "coverage": coverage(counts, ids),
        "coverage_by_size": {str(size): share for size, share in sizes.items()},
        "num_tokens": int(counts.sum()),
        "source": source,
        "ids": list(ids),
    }
    write_text(path, json.dumps(content) + "\n")


def load_vocabulary(path) -> tuple[int, ...]:
    """Reads a file that `mtpjax vocabulary` wrote, for `DecodeConfig(draft_vocabulary=...)`."""
    path = pathlib.Path(path)
    try:
        content = read_json_file(path, max_bytes=MAX_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is not a vocabulary file: {str(error)[:100]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a vocabulary file: its format is not {FORMAT!r}")
    # Check the ids here, because an id out of range would index the head outside the vocabulary without an error.
    ids, vocab_size = content.get("ids"), content.get("vocab_size")
    is_integer_list = isinstance(ids, list) and all(type(index) is int for index in ids)
    if not ids or not is_integer_list or not isinstance(vocab_size, int):
        raise ValueError(f"{path} is damaged: ids must be a list of integers below an integer vocab_size")
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(f"{path} is damaged: ids must ascend within 0..{vocab_size - 1}")
    return tuple(ids)


def _text_pieces(file: pathlib.Path) -> Iterator[str]:
    """Yields a file's texts, cut after line ends into pieces of at least `PIECE_CHARACTERS` characters."""
    for text in _texts(file):
        # Cut after a line end, where few tokens would span the cut.
        begin = 0
        while begin < len(text):
            end = text.find("\n", begin + PIECE_CHARACTERS) + 1 or len(text)
            yield text[begin:end]
            begin = end


def _texts(file: pathlib.Path) -> Iterator[str]:
    if not is_record_file(file):
        yield read_text(file)
        return
    for place, content in read_file_records([file]):
        try:
            texts = _record_texts(as_object(content))
        except ValueError as error:
            raise ValueError(f"{place} {error}") from error
        yield from texts


def _record_texts(record: dict[str, Any]) -> list[str]:
    """Returns the messages of a conversation, or every text field of any other record."""
    if has_conversation(record):
        return [text_of(message.get("content")) for message in clean_messages(find_messages(record))]
    # A field may hold several texts, such as Spec-Bench's turns.
    values = [record[key] for key in COUNTED_KEYS if key in record]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"has no text in any of the fields {', '.join(COUNTED_KEYS)}")
    return texts
