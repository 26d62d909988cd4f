"""The most frequent tokens of a corpus, for modules that draft from fewer (FR-Spec, 2502.14856).

The head is most of what a draft costs. Over a part of the vocabulary it costs that part, and the text keeps its
distribution: the trunk may still say every token.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.atomic import write_text
from mtpjax.data.prompts import read_records, read_text
from mtpjax.data.tokenizer import Tokenizer

FORMAT = "mtpjax-vocabulary"
TEXT_KEYS = ("turns", "prompt", "text", "question", "answer", "completion", "response")
PIECE = 1 << 16  # characters encoded at a time, so that progress shows


@dataclasses.dataclass(frozen=True)
class Corpus:
    """How often each token occurs: `counts [V]`."""

    counts: np.ndarray
    num_files: int
    skipped: tuple[str, ...]  # files that are no text


def corpus_files(path, pattern: str = "*") -> list[pathlib.Path]:
    """`path` itself if it is a file, else the files under it that match, sorted. Raises `ValueError` for none."""
    path = pathlib.Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder")
    files = sorted(file for file in path.rglob(pattern) if file.is_file())
    if not files:
        raise ValueError(f"no files match {pattern} under {path}")
    return files


def count_tokens(
    files: Sequence[pathlib.Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    progress: Callable[[int], Any] = lambda count: None,
) -> Corpus:
    """Counts the tokens of every file; of `.jsonl` those of the texts in its records. `progress` is told bytes.

    A file that is no text is skipped, a lone one refused. Raises `ValueError`, `OSError`.
    """
    counts = np.zeros(vocab_size, np.int64)
    skipped = []
    for file in files:
        done, found = 0, np.zeros_like(counts)
        try:
            for piece in _pieces(file):
                found += np.bincount(np.asarray(tokenizer.encode(piece), np.int64), minlength=vocab_size)
                size = len(piece.encode())
                done += size
                progress(size)
        except ValueError:
            if len(files) == 1:
                raise
            skipped.append(str(file))
        else:
            counts += found
        progress(max(file.stat().st_size - done, 0))
    if not counts.any():
        raise ValueError(f"{len(files)} files hold no token")
    return Corpus(counts=counts, num_files=len(files) - len(skipped), skipped=tuple(skipped))


def choose_vocabulary(counts: np.ndarray, size: int, *, kept: Iterable[int] = ()) -> tuple[int, ...]:
    """The ids `kept` and the most frequent others, `size` in all, ascending; of equally frequent ones the lower ids.

    Raises `ValueError` for a size outside `len(kept)..len(counts)`.
    """
    kept = sorted(set(kept))
    if not max(len(kept), 1) <= size <= len(counts):
        raise ValueError(
            f"size {size} is outside {max(len(kept), 1)}..{len(counts)}: {len(kept)} special tokens are always kept, "
            f"and the model has {len(counts)} tokens"
        )
    frequency = counts.astype(np.int64)
    frequency[kept] = np.iinfo(np.int64).max
    order = np.argsort(-frequency, kind="stable")
    return tuple(sorted(order[:size].tolist()))


def coverage(counts: np.ndarray, ids: Sequence[int]) -> float:
    """The share of the corpus's tokens that are among `ids`."""
    return float(counts[list(ids)].sum() / counts.sum())


def sizes_around(size: int, vocab_size: int, least: int) -> list[int]:
    """Sizes to report beside `size`: halves and doubles of it, up to the whole vocabulary."""
    sizes = {size // 8, size // 4, size // 2, size, 2 * size, 4 * size, vocab_size}
    return sorted(value for value in sizes if max(least, 1) <= value <= vocab_size)


def save_vocabulary(path, ids: Sequence[int], *, counts: np.ndarray, source: str, sizes: dict[int, float]) -> None:
    """Writes the ids with what they are of, the whole file or none."""
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
    """The ids of a file of `mtpjax vocabulary`, for `DecodeConfig(draft_vocabulary=...)`. Raises `ValueError`."""
    path = pathlib.Path(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no vocabulary: {str(error)[:100]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no vocabulary: its format is not {FORMAT!r}")
    ids, most = content.get("ids"), content.get("vocab_size")
    if not isinstance(ids, list) or not ids or not all(type(index) is int for index in ids) or type(most) is not int:
        raise ValueError(f"{path} is damaged: ids must be a list of integers below an integer vocab_size")
    if sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < most:
        raise ValueError(f"{path} is damaged: ids must ascend within 0..{most - 1}")
    return tuple(ids)


def _pieces(file: pathlib.Path) -> Iterator[str]:
    """The texts of a file, cut behind line ends into pieces of some size."""
    for text in _texts(file):
        begin = 0
        while begin < len(text):
            end = text.find("\n", begin + PIECE) + 1 or len(text)
            yield text[begin:end]
            begin = end


def _texts(file: pathlib.Path) -> Iterator[str]:
    if file.suffix != ".jsonl":
        yield read_text(file)
        return
    for place, record in read_records(file):
        values = [record[key] for key in TEXT_KEYS if key in record]
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place} has no text under any of {', '.join(TEXT_KEYS)}")
        yield from texts
