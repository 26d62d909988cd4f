"""Documents -> packed rows -> batches. Plain numpy: no device takes part.

The default corpus is the Python standard library of the running interpreter, so a first run downloads nothing.
"""

import dataclasses
import hashlib
import itertools
import os
import pathlib
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_NEWLINE = 10
_FEW_FILES = 100  # a whole standard library has over a thousand; a zipped or stripped one a handful


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One file, or one record of a file."""

    name: str
    tokens: np.ndarray  # [n] uint8 or int32, without the end token that packing adds
    loss_mask: np.ndarray | None = None  # [n + 1] bool, the last of that end token; None: all count
    category: str = ""  # what the panel's figures are grouped by


class Batch(NamedTuple):
    """Packed rows. `loss_mask` belongs to the token as a target: true where predicting this token counts."""

    tokens: np.ndarray  # [B, T] int32
    segment_ids: np.ndarray  # [B, T] int32; 0 is padding, the documents of a row are 1, 2, …
    loss_mask: np.ndarray  # [B, T] bool


def python_sources(root=None) -> list[pathlib.Path]:
    """The .py files under `root`, by default of the running interpreter's standard library, in sorted order.

    Left out: installed packages, links that lead out of the folder or to a file already taken, and files that are
    empty, unreadable, hold NUL or are no UTF-8. Where the standard library is zipped or stripped, the installed
    packages make up for it. Raises FileNotFoundError if there is nothing.
    """
    if root is not None:
        roots = [root]
        files = _sources_under(root)
    else:
        roots = [sysconfig.get_path("stdlib")]
        files = _sources_under(roots[0])
        if len(files) < _FEW_FILES:
            packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
            roots += dict.fromkeys(packages)
            files = list(dict.fromkeys(file for folder in roots for file in _sources_under(folder)))
    if not files:
        raise FileNotFoundError(f"no Python sources under {', '.join(map(str, roots))}: name a folder of .py files")
    return files


def read_documents(paths: Iterable[str | os.PathLike]) -> list[Document]:
    """Reads each file into a document of its bytes. Raises OSError, or ValueError for what is no text."""
    documents = []
    for path in paths:
        content = pathlib.Path(path).read_bytes()
        if not _is_text(content):
            raise ValueError(f"{path} is no text to train on: it is empty, holds NUL or is no UTF-8")
        documents.append(Document(name=str(path), tokens=np.frombuffer(content, np.uint8)))
    return documents


def split_held_out(documents: Sequence[Document], fraction=0.05) -> tuple[list[Document], list[Document]]:
    """Splits whole documents into `(train, held_out)`, about `fraction` of them held out.

    The sha256 of the content decides alone: no path, order or neighbour changes the side, and copies of a file share
    it. So a few documents can all fall on one side. Raises ValueError for a fraction outside 0..1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"held-out fraction {fraction} is outside 0..1")
    train, held_out = [], []
    for document in documents:
        digest = hashlib.sha256(np.ascontiguousarray(document.tokens).data).digest()
        is_held_out = int.from_bytes(digest[:8], "big") < fraction * 2**64
        (held_out if is_held_out else train).append(document)
    return train, held_out


def pack(
    documents: Sequence[Document], row_length: int, *, seed: int, eos_token_id: int = 0, extra_tokens: int = 0
) -> Batch:
    """Shuffles the documents, ends each with `eos_token_id`, and cuts the stream into rows, one every `row_length`.

    A row is `row_length + extra_tokens` long: it ends with the first `extra_tokens` of the next row, where they are no
    targets again. So every token is a target once, and from the second row on all of a row's targets have at least
    `extra_tokens` before them: with `D + 1` no target of the depths 0..D is lost where a row ends, with D one of depth
    D, with 0 the first k + 1 of each later row at depth k (DeepSeek-V3's window, figure 3).

    A document goes on in the next row, as that row's segment 1. The end of the last row is padding: segment 0,
    `eos_token_id`, no loss. Empty documents are skipped; where a document has a loss mask, the row has it too.

    Returns arrays `[R, row_length + extra_tokens]`. Raises ValueError for a row length below 1, for negative extra
    tokens, for no tokens at all, for a loss mask of another length, and for a document that holds `eos_token_id`: one
    with a loss mask may, as conversations have such tokens after each answer.
    """
    if row_length < 1:
        raise ValueError(f"row_length {row_length} is below 1")
    if extra_tokens < 0:
        raise ValueError(f"extra_tokens {extra_tokens} is below 0")
    documents = [document for document in documents if len(document.tokens)]
    if not documents:
        raise ValueError("there are no documents to pack")
    documents = [documents[index] for index in np.random.default_rng(seed).permutation(len(documents))]
    end = np.array([eos_token_id], np.int32)
    lengths = np.array([len(document.tokens) + 1 for document in documents])
    num_tokens = int(lengths.sum())
    num_rows = max(1, -(-(num_tokens - extra_tokens) // row_length))

    stream = np.full(num_rows * row_length + extra_tokens, eos_token_id, np.int32)
    np.concatenate([part for document in documents for part in (document.tokens, end)], out=stream[:num_tokens])
    is_target = np.zeros(len(stream), bool)
    np.concatenate([_loss_mask(document, eos_token_id) for document in documents], out=is_target[:num_tokens])
    owner = np.full(len(stream), -1, np.int32)  # which document a token is of; of padding none
    owner[:num_tokens] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    def rows(array):
        windows = np.lib.stride_tricks.sliding_window_view(array, row_length + extra_tokens, writeable=True)
        return np.ascontiguousarray(windows[::row_length])  # copies where rows overlap

    tokens, owner, loss_mask = rows(stream), rows(owner), rows(is_target)
    loss_mask[1:, :extra_tokens] = False  # they were targets at the end of the row before
    segment_ids = owner - owner[:, :1] + 1
    segment_ids[owner < 0] = 0
    return Batch(tokens=tokens, segment_ids=segment_ids, loss_mask=loss_mask)


def count_targets(rows: Batch, num_depths: int) -> np.ndarray:
    """How many targets the trunk and every depth have, `[1 + num_depths]`, by the rule of `losses.depth_targets`."""
    counts = []
    for ahead in range(1, num_depths + 2):
        here, there = rows.segment_ids[:, :-ahead], rows.segment_ids[:, ahead:]
        counts.append(np.sum((here == there) & (there != 0) & rows.loss_mask[:, ahead:]))
    return np.array(counts)


def join(parts: Sequence[Batch]) -> Batch:
    """The rows of several sources, one after the other."""
    return parts[0] if len(parts) == 1 else Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def take(rows: Batch, numbers: np.ndarray) -> Batch:
    """The rows of these numbers."""
    return Batch(*(array[numbers] for array in rows))


def batches(rows: Batch, batch_size: int, *, seed: int, start: int = 0) -> Iterator[Batch]:
    """Batches `[batch_size, T]` without end, the rows in a new order every epoch.

    The n-th batch depends on `seed` and n alone, so a resumed run goes on with `start` = batches already taken. The
    rows that do not fill an epoch's last batch wait for a later epoch. Raises ValueError for fewer rows than that.
    """
    return (take(rows, numbers) for numbers in _numbers(len(rows.tokens), batch_size, seed=seed, start=start))


def _numbers(num_rows: int, batch_size: int, *, seed: int, start: int) -> Iterator[np.ndarray]:
    if not 1 <= batch_size <= num_rows:
        raise ValueError(f"batch_size {batch_size} is outside 1..{num_rows}, the number of packed rows")
    if start < 0:
        raise ValueError(f"start {start} is below 0")

    def generate():  # an inner generator, so that the errors above come at the call
        epoch, first = divmod(start, num_rows // batch_size)
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(num_rows)
            for batch in range(first, num_rows // batch_size):
                yield order[batch * batch_size : (batch + 1) * batch_size]
            epoch, first = epoch + 1, 0

    return generate()


def mixed_batches(
    parts: Sequence[Batch], weights: Sequence[float], batch_size: int, *, seed: int, start: int = 0
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Batches `[batch_size, T]` without end, of the packed rows of several sources, in shares by `weights`; before each
    the numbers `[batch_size]` of its rows among those of all parts, one part after the other (`join`).

    The sources take turns, so that every stretch of rows has their shares to within a row or two; each gives its rows
    in a new order every time they are used up, so small sources with a large weight repeat. The n-th batch depends on
    the parts, weights, `seed` and n alone: a resumed run goes on with `start` = batches already taken, at once wherever
    that is. One source gives the same as `batches`; several take grain, of the extra `train`.

    Raises ValueError for other numbers of weights than parts, weights that are not positive, a batch size below 1, a
    negative start; ImportError where grain is missing.
    """
    if len(parts) != len(weights) or not parts:
        raise ValueError(f"there are {len(parts)} sources and {len(weights)} weights")
    if not all(0 < weight < np.inf for weight in weights):
        raise ValueError(f"weights must be positive, not {', '.join(map(str, weights))}")
    rows = join(parts)
    if len(parts) == 1:
        stream = _numbers(len(rows.tokens), batch_size, seed=seed, start=start)
    else:
        stream = _mixed_numbers([len(part.tokens) for part in parts], weights, batch_size, seed=seed, start=start)
    return ((numbers, take(rows, numbers)) for numbers in stream)


def _mixed_numbers(
    sizes: Sequence[int], weights: Sequence[float], batch_size: int, *, seed: int, start: int
) -> Iterator[np.ndarray]:
    if batch_size < 1 or start < 0:
        raise ValueError(f"batch_size {batch_size} is below 1 or start {start} below 0")
    try:
        import grain
    except ImportError as error:
        raise ImportError("several sources are mixed by grain: pip install 'mtpjax[train]'") from error
    ends = np.cumsum(sizes).tolist()
    seeds = np.random.SeedSequence(seed).generate_state(len(sizes)).tolist()  # sources of one size differ in order
    numbers = [
        grain.MapDataset.range(begin, end).shuffle(seed=its_seed).repeat()
        for begin, end, its_seed in zip([0, *ends], ends, seeds, strict=False)
    ]
    mixture: Any = grain.MapDataset.mix(numbers, weights=list(weights)).batch(batch_size)
    return (mixture[number] for number in itertools.count(start))


def held_out_prompts(
    documents: Sequence[Document],
    *,
    count: int,
    prompt_length: int,
    continuation_length: int,
    seed: int,
    least: int | None = None,
) -> list[list[int]]:
    """`count` prompts of `prompt_length` byte tokens, each from a line's start, each with a continuation in its file.

    Every file gives one prompt before any gives a second; copies of a file count as one, and no start is used twice.
    Raises ValueError, with the number found, if the documents hold fewer; or, with `least`, fewer than that.
    """
    if min(count, prompt_length) < 1 or continuation_length < 0:
        raise ValueError(f"no prompts: {count=}, {prompt_length=}, {continuation_length=}")
    rng = np.random.default_rng(seed)
    distinct = list({document.tokens.tobytes(): document.tokens for document in documents}.values())
    places = []  # (round, document, start): sorted by round, documents take turns
    for index in rng.permutation(len(distinct)):
        starts = np.append(0, np.flatnonzero(distinct[index] == _NEWLINE) + 1)
        starts = starts[starts + prompt_length + continuation_length <= len(distinct[index])]
        places += [(turn, index, start) for turn, start in enumerate(rng.permutation(starts)[:count])]
    places.sort(key=lambda place: place[0])  # stable: the shuffled order of the documents stays
    least = count if least is None else least
    if len(places) < least:
        raise ValueError(
            f"{len(distinct)} held-out documents hold {len(places)} prompts of {prompt_length} tokens with"
            f" {continuation_length} to follow; {least} were asked for"
        )
    return [distinct[index][start : start + prompt_length].tolist() for _, index, start in places[:count]]


def _sources_under(root) -> list[pathlib.Path]:
    root = pathlib.Path(root)
    inside = root.resolve()
    files = {}  # resolved path -> path
    for folder, subfolders, names in os.walk(root):  # follows no link to a folder
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            target = path.resolve()
            if path.suffix == ".py" and target.is_relative_to(inside) and target not in files and _is_source(path):
                files[target] = path
    return sorted(files.values())


def _is_source(path) -> bool:
    try:
        return path.is_file() and _is_text(path.read_bytes())
    except OSError:
        return False


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content


def _loss_mask(document: Document, eos_token_id: int) -> np.ndarray:
    """Which tokens of a document and its end are targets, `[n + 1]`. Raises ValueError, see `pack`."""
    if document.loss_mask is None:
        if (document.tokens == eos_token_id).any():
            raise ValueError(f"document {document.name} holds the end token {eos_token_id}")
        return np.ones(len(document.tokens) + 1, bool)
    if document.loss_mask.shape != (len(document.tokens) + 1,):
        raise ValueError(
            f"document {document.name} has a loss mask of shape {document.loss_mask.shape};"
            f" its {len(document.tokens)} tokens and their end want ({len(document.tokens) + 1},)"
        )
    return document.loss_mask
