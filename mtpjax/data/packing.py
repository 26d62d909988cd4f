"""Packs documents into rows and draws batches of rows. It uses only NumPy, so nothing runs on a device."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mtpjax.errors import UsageError, install_extra

_NEWLINE = 10
_NO_ITEM: Any = object()
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One file, or one record in a file.

    Attributes:
        name: the document's file, with the line or item if it is a record.
        tokens: `[n]` uint8 or int32, without the end token that packing adds.
        loss_mask: `[n + 1]` bool, true where a token is a target; the last entry is for the end token. None means that
            all tokens are targets.
        category: the group under which evaluations report it.
        origin: digest of the record that the document is a part of, or "" if it is a whole record.

    Example:
        >>> import numpy as np
        >>> from mtpjax.training import Document
        >>> document = Document("greeting", np.frombuffer(b"hello", np.uint8))
    """

    name: str
    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    category: str = ""
    origin: str = ""


class Batch(NamedTuple):
    """Packed rows of documents for one update.

    Attributes:
        tokens: `[B, T]` int32.
        segment_ids: `[B, T]` int32 document of each token. The documents in a row are 1, 2, …, and padding is 0.
        loss_mask: `[B, T]` bool, true where a token counts as a target.

    Example:
        >>> import numpy as np
        >>> from mtpjax.training import Batch
        >>> tokens = np.array([[5, 6, 7, 0], [8, 9, 8, 9]], np.int32)
        >>> batch = Batch(tokens, segment_ids=np.int32(tokens > 0), loss_mask=tokens > 0)  # here 0 is padding
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray


def split_held_out(documents: Sequence[Document], fraction=0.05) -> tuple[list[Document], list[Document]]:
    """Splits documents into training and held-out documents.

    Only the sha256 of its content decides whether a document is held out. Paths, order and other documents have no
    effect, and copies of a file and parts of one record stay together. If one of the two lists would be empty, which
    can happen with few texts, the last part of the longest text is held out; for byte tokens, this part begins at a
    line start. Conversations cannot be cut, so the conversation with the lowest digest is held out instead.

    Returns `(train, held_out)`.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"held-out fraction {fraction} is outside 0..1")
    # The first 8 bytes of the digest are a uniformly distributed number. Numbers below the fraction are held out.
    numbered = [(int.from_bytes(_digest(document)[:8], "big"), document) for document in documents]
    train, held_out = _divide(numbered, fraction * 2**64)
    if (train and held_out) or not documents or fraction in (0, 1):
        return train, held_out
    # One list is empty. Cut all copies of the longest text in the same place, so that its end is never trained on.
    cut_number, longest = max(numbered, key=lambda each: len(each[1].tokens))
    if longest.loss_mask is not None:
        return _divide(numbered, min(number for number, _ in numbered) + 1)
    parts = [_split_text(each, fraction) if number == cut_number else ([each], []) for number, each in numbered]
    return [each for part, _ in parts for each in part], [each for _, part in parts for each in part]


def _divide(numbered: Sequence[tuple[int, Document]], limit: float) -> tuple[list[Document], list[Document]]:
    """Returns the documents whose number is at least the limit, and the other documents."""
    return [each for number, each in numbered if number >= limit], [each for number, each in numbered if number < limit]


def _digest(document: Document) -> bytes:
    """Returns the digest of a document's tokens or of its record, which decides whether the document is held out."""
    return hashlib.sha256(document.origin.encode() or np.ascontiguousarray(document.tokens).data).digest()


def _split_text(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """Splits one text by its length into a training and a held-out part."""
    tokens = document.tokens
    cut = len(tokens) - max(1, round(len(tokens) * fraction))
    if tokens.dtype == np.uint8:
        # Cut at the start of a line if possible, else of a character (bytes 0x80 to 0xBF continue a character).
        line_starts = np.flatnonzero(tokens[cut:-1] == _NEWLINE) + cut + 1
        character_starts = np.flatnonzero((tokens[cut:] & 0xC0) != 0x80) + cut
        cut = int(next(iter([*line_starts[:1], *character_starts[:1]]), cut))
    parts = [dataclasses.replace(document, tokens=part) for part in (tokens[:cut], tokens[cut:])]
    return parts[:1] if cut else [], parts[1:]


def pack(
    documents: Sequence[Document], row_length: int, *, seed: int, eos_token_id: int = 0, extra_tokens: int = 0
) -> Batch:
    """Shuffles documents, ends each with `eos_token_id`, and cuts the stream into overlapping rows.

    A row starts every `row_length` tokens and is `row_length + extra_tokens` long. Its last `extra_tokens` are the
    first tokens of the next row, where they are not targets again. Every token is thus a target exactly once, and from
    the second row on, each target has at least `extra_tokens` tokens before it. With `D + 1` extra tokens, no target of
    depths 0..D is lost at the end of a row; with D, one target of depth D is lost. With 0, each later row loses its
    first k + 1 targets at depth k (DeepSeek-V3's window, 2412.19437, figure 3).

    A document that continues in the next row is that row's segment 1. The last row is padded with `eos_token_id`, which
    has segment 0 and no loss. Empty documents are skipped.

    Args:
        documents: the documents to pack.
        row_length: tokens between the starts of two rows.
        seed: random seed for the order of the documents.
        eos_token_id: the token that ends each document.
        extra_tokens: number of tokens by which a row overlaps the next row.

    Returns:
        Arrays `[R, row_length + extra_tokens]`.

    Raises:
        ValueError: a length is out of range, there are no tokens, a loss mask has the wrong length, or a document
            without a loss mask contains `eos_token_id` (conversations may contain it after each answer).

    Example:
        >>> import numpy as np
        >>> from mtpjax.training import Document, pack
        >>> documents = [Document("a", np.array([5, 6, 7])), Document("b", np.array([8, 9]))]
        >>> rows = pack(documents, 4, seed=0, extra_tokens=1)
        >>> rows.tokens.shape  # seven tokens with the two end tokens, in rows of 4 + 1
        (2, 5)
    """
    if row_length < 1:
        raise ValueError(f"row_length {row_length} is below 1")
    if extra_tokens < 0:
        raise ValueError(f"extra_tokens {extra_tokens} is below 0")
    documents = [document for document in documents if len(document.tokens)]
    if not documents:
        raise ValueError("there are no documents to pack")
    # The order is drawn once per seed; epochs shuffle rows (`shuffled_batches`), not documents.
    documents = [documents[index] for index in np.random.default_rng(seed).permutation(len(documents))]
    end = np.array([eos_token_id], np.int32)
    lengths = np.array([len(document.tokens) + 1 for document in documents])
    num_tokens = int(lengths.sum())
    num_rows = max(1, -(-(num_tokens - extra_tokens) // row_length))

    # Make one stream of all documents and end tokens, with a target flag and an owning document for each token; the
    # owner of padding is -1.
    stream = np.full(num_rows * row_length + extra_tokens, eos_token_id, np.int32)
    np.concatenate([part for document in documents for part in (document.tokens, end)], out=stream[:num_tokens])
    is_target = np.zeros(len(stream), bool)
    np.concatenate([_loss_mask(document, eos_token_id) for document in documents], out=is_target[:num_tokens])
    owner = np.full(len(stream), -1, np.int32)
    owner[:num_tokens] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    def rows(array):
        windows = np.lib.stride_tricks.sliding_window_view(array, row_length + extra_tokens, writeable=True)
        return np.ascontiguousarray(windows[::row_length])  # copies where rows overlap

    # Cut the three streams into the same rows. Overlapping tokens are targets in the earlier row only.
    tokens, owner, loss_mask = rows(stream), rows(owner), rows(is_target)
    loss_mask[1:, :extra_tokens] = False
    # Segments count from 1 within each row.
    segment_ids = owner - owner[:, :1] + 1
    segment_ids[owner < 0] = 0
    return Batch(tokens=tokens, segment_ids=segment_ids, loss_mask=loss_mask)


def count_targets(rows: Batch, num_depths: int) -> np.ndarray:
    """Counts the targets of the trunk and of every depth, by the same rule as `losses.depth_targets`.

    Returns `[1 + D]` counts.
    """
    counts = []
    for ahead in range(1, num_depths + 2):
        # A target counts if it is in the same document as the position that predicts it, and the mask allows it.
        here, there = rows.segment_ids[:, :-ahead], rows.segment_ids[:, ahead:]
        counts.append(np.sum((here == there) & (there != 0) & rows.loss_mask[:, ahead:]))
    return np.array(counts)


def concatenate_rows(row_sets: Sequence[Batch]) -> Batch:
    """Concatenates the rows of several sources."""
    if len(row_sets) == 1:
        return row_sets[0]
    return Batch(*(np.concatenate(arrays) for arrays in zip(*row_sets, strict=True)))


def select_rows(rows: Batch, numbers: np.ndarray) -> Batch:
    """Returns the rows with these indices."""
    return Batch(*(array[numbers] for array in rows))


def shuffled_batches(rows: Batch, batch_size: int, *, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yields batches endlessly, with the rows in a new order every epoch.

    The n-th batch depends only on `seed` and n, so a resumed run passes the number of batches it has used as `start`.
    Rows that do not fill an epoch's last batch are left out of that epoch.

    Args:
        rows: packed rows.
        batch_size: rows per batch.
        seed: random seed for the row orders.
        start: number of batches to skip.

    Returns:
        An iterator of batches `[batch_size, T]`.

    Raises:
        ValueError: there are fewer rows than `batch_size`, or `start` is negative.

    Example:
        >>> import numpy as np
        >>> from mtpjax.training import Document, pack, shuffled_batches
        >>> rows = pack([Document("a", np.arange(1, 64))], 16, seed=0)
        >>> batches = shuffled_batches(rows, 2, seed=0)
        >>> next(batches).tokens.shape
        (2, 16)
    """
    return (
        select_rows(rows, numbers) for numbers in _row_numbers(len(rows.tokens), batch_size, seed=seed, start=start)
    )


def _row_numbers(num_rows: int, batch_size: int, *, seed: int, start: int) -> Iterator[np.ndarray]:
    if not 1 <= batch_size <= num_rows:
        raise ValueError(f"batch_size {batch_size} is outside 1..{num_rows}, the number of packed rows")
    if start < 0:
        raise ValueError(f"start {start} is below 0")

    # Use an inner generator, so that the errors above are raised by the call and not at the first batch.
    def generate():
        epoch, first = divmod(start, num_rows // batch_size)
        while True:
            # Seeding by epoch lets a resumed run start in any epoch without replaying the earlier ones.
            order = np.random.default_rng([seed, epoch]).permutation(num_rows)
            for batch in range(first, num_rows // batch_size):
                yield order[batch * batch_size : (batch + 1) * batch_size]
            epoch, first = epoch + 1, 0

    return generate()


def mixed_batches(
    source_rows: Sequence[Batch], weights: Sequence[float], batch_size: int, *, seed: int, start: int = 0
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields batches of packed rows from several sources, in proportion to `weights`.

    The sources are interleaved so evenly that any range of rows has the right share of each source, to within a row or
    two. A source whose rows are used up starts again in a new order, so small sources with a large weight repeat. The
    n-th batch depends only on the rows, weights, `seed` and n, and a large `start` costs no time. With one source, the
    batches equal those from `shuffled_batches`. Several sources need grain, which is in the `train` extra.

    Returns an iterator of `(indices, batch)`: the rows' indices `[batch_size]` in `concatenate_rows(source_rows)`, and
    the batch `[batch_size, T]`.
    """
    if len(source_rows) != len(weights) or not source_rows:
        raise ValueError(f"there are {len(source_rows)} sources and {len(weights)} weights")
    if not all(0 < weight < np.inf for weight in weights):
        raise ValueError(f"weights must be positive, not {', '.join(map(str, weights))}")
    rows, sizes = concatenate_rows(source_rows), [len(part.tokens) for part in source_rows]
    if len(sizes) == 1:
        stream = _row_numbers(sizes[0], batch_size, seed=seed, start=start)
    else:
        stream = _mixed_row_numbers(sizes, weights, batch_size, seed=seed, start=start)
    return ((numbers, select_rows(rows, numbers)) for numbers in stream)


def _mixed_row_numbers(
    sizes: Sequence[int], weights: Sequence[float], batch_size: int, *, seed: int, start: int
) -> Iterator[np.ndarray]:
    if batch_size < 1 or start < 0:
        raise ValueError(f"batch_size {batch_size} is below 1 or start {start} below 0")
    try:
        import grain
    except ImportError as error:
        raise UsageError(f"grain, which mixes several sources, is missing: {install_extra('train')}") from error
    ends = np.cumsum(sizes).tolist()
    # Each source is a range of row indices, shuffled again at every repetition. Separate seeds give sources of equal
    # size different orders. grain computes any element directly, so a large `start` needs no skipping.
    seeds = np.random.SeedSequence(seed).generate_state(len(sizes)).tolist()
    numbers = [
        grain.MapDataset.range(begin, end).shuffle(seed=source_seed).repeat()
        for begin, end, source_seed in zip([0, *ends], ends, seeds, strict=False)
    ]
    mixture: Any = grain.MapDataset.mix(numbers, weights=list(weights)).batch(batch_size)
    return (mixture[number] for number in itertools.count(start))


def draw_prompts(
    documents: Sequence[Document], count: int, *, length: int, seed: int, num_after: int | None = None
) -> list[tuple[list[int], str]]:
    """Draws prompts, with their categories, from each category in turn and from each of its documents in turn.

    A prompt of byte tokens begins at a line start, a prompt from a conversation ends where an answer starts, and any
    other prompt can be anywhere. If `num_after` is None, a document without such a position yields one prompt, which
    ends in the middle of the document. Copies of a document count once per category, and no position is used twice.

    Args:
        count: maximum number of prompts.
        length: maximum number of tokens in a prompt.
        num_after: number of tokens that must follow the prompt in its document; None means 0.
    """
    rng = np.random.default_rng(seed)
    # Shuffle the documents, and the possible positions within each.
    distinct = list({(each.category, each.tokens.tobytes()): each for each in documents if len(each.tokens)}.values())
    prompts: dict[str, list[list]] = {}  # category -> prompts of each document
    for index in rng.permutation(len(distinct)):
        tokens, category = distinct[index].tokens, distinct[index].category
        ends = rng.permutation(_prompt_ends(distinct[index], length, num_after))[:count]
        of_document = [(tokens[max(0, end - length) : end].tolist(), category) for end in ends]
        prompts.setdefault(category, []).append(of_document)
    # Take one prompt from every document before a second from any.
    return take_turns([take_turns(of_category) for _, of_category in sorted(prompts.items())])[:count]


def take_turns(groups: Iterable[Iterable[T]]) -> list[T]:
    """Returns the first item of each group, then the second of each, and so on."""
    turns = itertools.zip_longest(*groups, fillvalue=_NO_ITEM)
    return [each for turn in turns for each in turn if each is not _NO_ITEM]


def _prompt_ends(document: Document, length: int, num_after: int | None) -> np.ndarray:
    """Returns the positions where a prompt of a document may end (exclusive)."""
    tokens = document.tokens
    # In a conversation, an answer starts where the loss mask turns on. Byte prompts end `length` after a line start.
    if document.loss_mask is not None:
        ends = np.flatnonzero(np.diff(document.loss_mask[: len(tokens)].astype(int)) > 0) + 1
    elif tokens.dtype == np.uint8:
        ends = np.append(0, np.flatnonzero(tokens == _NEWLINE) + 1) + length
    else:
        ends = np.arange(length, len(tokens) + 1)
    ends = ends[ends <= len(tokens) - (num_after or 0)]
    return ends if len(ends) or num_after is not None else np.array([-(-len(tokens) // 2)])


def held_out_prompts(
    documents: Sequence[Document],
    *,
    count: int,
    prompt_length: int,
    continuation_length: int,
    seed: int,
    min_count: int | None = None,
) -> list[list[int]]:
    """Draws prompts of byte tokens as `draw_prompts` does, each with a continuation in its document.

    Args:
        continuation_length: number of tokens that must follow the prompt in its document.
        min_count: minimum number of prompts; by default `count`.
    """
    if min(count, prompt_length) < 1 or continuation_length < 0:
        raise ValueError(f"no prompts: {count=}, {prompt_length=}, {continuation_length=}")
    # Drop categories and loss masks, so that every line start is a possible position and all copies count as one.
    distinct = {each.tokens.tobytes(): Document("", each.tokens.astype(np.uint8)) for each in documents}
    prompts = draw_prompts(
        list(distinct.values()), count, length=prompt_length, seed=seed, num_after=continuation_length
    )
    min_count = count if min_count is None else min_count
    if len(prompts) < min_count:
        raise ValueError(
            f"{len(distinct)} held-out documents contain {len(prompts)} prompts of {prompt_length} tokens with"
            f" {continuation_length} more after each; {min_count} were requested"
        )
    return [prompt for prompt, _ in prompts]


def _loss_mask(document: Document, eos_token_id: int) -> np.ndarray:
    """Returns the target mask `[n + 1]` of a document and its end token. Raises ValueError as `pack` does."""
    if document.loss_mask is None:
        # Without a mask, an end token inside the document would split it where the text continues.
        if (document.tokens == eos_token_id).any():
            raise ValueError(f"document {document.name} contains the end token {eos_token_id}")
        return np.ones(len(document.tokens) + 1, bool)
    if document.loss_mask.shape != (len(document.tokens) + 1,):
        raise ValueError(
            f"document {document.name} has a loss mask of shape {document.loss_mask.shape};"
            f" its {len(document.tokens)} tokens and their end token need ({len(document.tokens) + 1},)"
        )
    return document.loss_mask
