"""Reads and writes the tensors `d2t` and `t2d`, the draft vocabulary of EAGLE-3, DFlash and DSpark drafters."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtpjax.errors import CheckpointFileError

OFFSETS, IS_DRAFTED = "d2t", "t2d"


@dataclasses.dataclass(frozen=True)
class IdsTensors:
    """Describes how files store the token ids of the columns in a drafter's head.

    Attributes:
        names: plain names of the tensors.
        read: reads the tensors, given the files, their tensor names by plain name, the draft vocabulary size R, and the
            trunk's vocabulary size V. Returns `[R]` int32 ids, or None if every token can be drafted and the files do
            not list the ids.
        write: makes the tensors from `[R]` int64 ids and V.
    """

    names: tuple[str, ...]
    read: Callable[[Any, Mapping[str, str], int, int], np.ndarray | None]
    write: Callable[[np.ndarray, int], dict[str, np.ndarray]]


def read_offsets(files: Any, names: Mapping[str, str], R: int, V: int) -> np.ndarray | None:
    """Implements `IdsTensors.read` for offsets, where column j of the head is token `j + d2t[j]`.

    Raises:
        CheckpointFileError: the vocabulary is missing, damaged or ambiguous.
    """
    marks = _read_marks(files, names, V)
    if OFFSETS not in names:
        if R < V:
            raise CheckpointFileError(
                f"{files.path} lacks {OFFSETS}, which lists the {R} of {V} tokens that can be drafted"
            )
        if marks is not None and not marks.all():
            raise CheckpointFileError(
                f"{files.path}: {IS_DRAFTED} marks {marks.sum()} of {V} tokens, but the head drafts all of them"
            )
        return None
    offsets = files.read(names[OFFSETS])
    if offsets.shape != (R,) or offsets.dtype.kind not in "iu":
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} is {offsets.dtype}{list(offsets.shape)}, not integers [{R}]"
        )
    values = offsets.astype(np.int64)
    ids = values + np.arange(R)
    # Absolute ids, if read as offsets, would give wrong tokens, which may all be valid in a small vocabulary.
    is_offsets, is_absolute = (_are_tokens(each, V) for each in (ids, values))
    if marks is not None:
        is_offsets = is_offsets and np.array_equal(marks, _mark(ids, V))
        is_absolute = is_absolute and np.array_equal(marks, _mark(values, V))
    if is_absolute and not is_offsets:
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} holds token ids ({values[0]}, {values[1 % R]}, ...) instead of offsets: as in "
            f"SGLang and vLLM, column j of the head is token j + {OFFSETS}[j]; subtract j from element j"
        )
    if not is_offsets:
        if marks is not None and _are_tokens(ids, V):
            raise CheckpointFileError(
                f"{files.path}: {IS_DRAFTED} and {OFFSETS} define different draft vocabularies: {IS_DRAFTED} marks "
                f"{marks.sum()} tokens, of which {OFFSETS} lists {marks[ids].sum()}"
            )
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} lists tokens outside 0..{V - 1}, or one twice: j + {OFFSETS}[j] is from "
            f"{ids.min()} to {ids.max()}"
        )
    if is_absolute and marks is None and R > 1:
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} has two readings without {IS_DRAFTED}: its elements are different tokens both as "
            f"offsets and as ids; add {IS_DRAFTED}, bool [{V}], which is True for the tokens that can be drafted"
        )
    return ids.astype(np.int32)


def _are_tokens(ids: np.ndarray, vocab_size: int) -> bool:
    """Returns whether the ids are distinct tokens in the vocabulary."""
    return bool(ids.min() >= 0 and ids.max() < vocab_size and len(np.unique(ids)) == len(ids))


def _read_marks(files: Any, names: Mapping[str, str], vocab_size: int) -> np.ndarray | None:
    """Reads `t2d`, which marks the tokens that can be drafted, either as bool or as integers 0 and 1."""
    if IS_DRAFTED not in names:
        return None
    marks = files.read(names[IS_DRAFTED])
    if marks.shape != (vocab_size,) or marks.dtype.kind not in "biu" or not np.isin(marks, (0, 1)).all():
        raise CheckpointFileError(
            f"{files.path}: {IS_DRAFTED} is {marks.dtype}{list(marks.shape)}, not bool [{vocab_size}] or zeros and ones"
        )
    return marks.astype(bool)


def _mark(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns `[V]` bool, which is True for the tokens in a draft vocabulary `ids [R]`."""
    found = np.zeros(vocab_size, bool)
    found[ids] = True
    return found


def _write_offsets(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    return {OFFSETS: ids - np.arange(len(ids)), IS_DRAFTED: _mark(ids, vocab_size)}


OFFSETS_AND_MARKS = IdsTensors((OFFSETS, IS_DRAFTED), read_offsets, _write_offsets)
