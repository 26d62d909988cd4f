import dataclasses
import itertools
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.data import packing
from mtpjax.errors import UsageError
from mtpjax.training.losses import depth_targets


def document(text, name="name"):
    return packing.Document(name=name, tokens=np.frombuffer(text.encode(), np.uint8))


def lettered(num, rng_seed=0):
    """`num` documents of 1 to 40 bytes, most of them different."""
    rng = np.random.default_rng(rng_seed)
    return [packing.Document(str(i), rng.integers(1, 256, rng.integers(1, 41)).astype(np.uint8)) for i in range(num)]


def unpacked(rows):
    """The documents of packed rows, in order, as bytes without their end tokens."""
    stream = rows.tokens[rows.segment_ids > 0]
    return stream.astype(np.uint8).tobytes().removesuffix(b"\0").split(b"\0")


# Targets.


@pytest.mark.parametrize("row_length, extra_tokens", [(1, 0), (3, 0), (5, 2), (16, 4), (64, 0)])
def test_targets_are_counted_as_the_losses_take_them(row_length, extra_tokens):
    rng = np.random.default_rng(1)
    masked = [dataclasses.replace(each, loss_mask=rng.random(len(each.tokens) + 1) < 0.3) for each in lettered(20, 1)]
    rows = packing.pack([*lettered(20), *masked], row_length, seed=0, extra_tokens=extra_tokens)
    counts = packing.count_targets(rows, 4)
    assert counts.tolist() == [int(depth_targets(*map(jnp.asarray, rows), depth)[1].sum()) for depth in range(5)]
    assert counts.any() == (row_length + extra_tokens > 1)


# Packing.


def test_segments_follow_the_documents_within_each_row():
    rows = packing.pack([document("abcde"), document("fg")], 4, seed=0)
    expected = {  # by which document the shuffle put first
        b"abcd": ([[1, 1, 1, 1], [1, 1, 2, 2], [1, 0, 0, 0]], b"abcde\0fg\0\0\0\0"),
        b"fg\0a": ([[1, 1, 1, 2], [1, 1, 1, 1], [1, 0, 0, 0]], b"fg\0abcde\0\0\0\0"),
    }
    segment_ids, stream = expected[rows.tokens[0].astype(np.uint8).tobytes()]
    np.testing.assert_array_equal(rows.segment_ids, segment_ids)
    np.testing.assert_array_equal(rows.loss_mask, np.array(segment_ids) > 0)
    assert rows.tokens.astype(np.uint8).tobytes() == stream
    assert [array.dtype for array in rows] == [np.int32, np.int32, np.bool_]


@pytest.mark.parametrize("row_length", [1, 7, 64, 10_000])
def test_packing_keeps_every_token_once(row_length):
    documents = lettered(50)
    rows = packing.pack(documents, row_length, seed=3)
    assert rows.tokens.shape == rows.segment_ids.shape == rows.loss_mask.shape
    assert rows.tokens.shape[1] == row_length
    assert sorted(unpacked(rows)) == sorted(each.tokens.tobytes() for each in documents)
    assert np.sum(rows.segment_ids == 0) < row_length  # padding in the last row only


def test_a_segment_changes_exactly_after_an_end_token():
    rows = packing.pack(lettered(50), 64, seed=3)
    steps = np.diff(rows.segment_ids, axis=1)
    inside = rows.segment_ids[:, 1:] > 0
    np.testing.assert_array_equal(steps[inside], (rows.tokens[:, :-1] == 0)[inside])
    np.testing.assert_array_equal(rows.segment_ids[:, 0], 1)


def test_a_full_last_row_has_no_padding():
    rows = packing.pack([document("abc"), document("defg"), document("hij")], 13, seed=0)
    np.testing.assert_array_equal(rows.segment_ids > 0, True)


def test_the_seed_decides_the_order_of_documents():
    first, again, other = (unpacked(packing.pack(lettered(50), 32, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_an_empty_document_is_skipped_and_nothing_to_pack_is_an_error():
    assert unpacked(packing.pack([document(""), document("a")], 8, seed=0)) == [b"a"]
    with pytest.raises(ValueError, match="no documents"):
        packing.pack([document("")], 8, seed=0)
    with pytest.raises(ValueError, match="row_length 0"):
        packing.pack([document("a")], 0, seed=0)


@pytest.mark.parametrize("text", ["a\0b", "\0", "ab\0"])
def test_a_document_with_the_end_token_inside_is_named(text):
    with pytest.raises(ValueError, match="document bad contains the end token 0"):
        packing.pack([document("fine", "good"), document(text, "bad"), document("fine, too", "good")], 8, seed=0)


def test_a_row_ends_with_the_first_tokens_of_the_next():
    rows = packing.pack([document("abcdefghij")], 4, seed=0, extra_tokens=2)
    assert [row.astype(np.uint8).tobytes() for row in rows.tokens] == [b"abcdef", b"efghij", b"ij\0\0\0\0"]
    np.testing.assert_array_equal(rows.segment_ids, [[1] * 6, [1] * 6, [1, 1, 1, 0, 0, 0]])
    expected = [[True] * 6, [False] * 2 + [True] * 4, [False, False, True, False, False, False]]
    np.testing.assert_array_equal(rows.loss_mask, expected)
    full = packing.pack(
        [document("abcdefghi")], 4, seed=0, extra_tokens=2
    )  # a third row would have no target of its own
    assert [row.astype(np.uint8).tobytes() for row in full.tokens] == [b"abcdef", b"efghi\0"]
    short = packing.pack([document("ab")], 4, seed=0, extra_tokens=3)  # ends within the first row's extra tokens
    np.testing.assert_array_equal(short.tokens, [[97, 98, 0, 0, 0, 0, 0]])


def test_a_document_brings_its_loss_mask_and_may_then_hold_the_end_token():
    mask = np.array([False, True, True, False, True, False])
    talk = packing.Document("talk", np.array([300, 5, 0, 301, 7], np.int32), mask)
    rows = packing.pack([talk], 4, seed=0)
    np.testing.assert_array_equal(rows.tokens, [[300, 5, 0, 301], [7, 0, 0, 0]])
    np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 1], [1, 1, 0, 0]])  # an end token inside ends no segment
    np.testing.assert_array_equal(rows.loss_mask, [[False, True, True, False], [True, False, False, False]])
    mixed = packing.pack([talk, document("abcd")], 11, seed=0)
    first_is_talk = mixed.tokens[0, 0] == 300
    parts = [mask, np.ones(5, bool)] if first_is_talk else [np.ones(5, bool), mask]
    np.testing.assert_array_equal(mixed.loss_mask, [np.concatenate(parts)])
    with pytest.raises(ValueError, match=r"document talk has a loss mask of shape \(5,\).* need \(6,\)"):
        packing.pack([packing.Document("talk", talk.tokens, mask[:5])], 4, seed=0)
    with pytest.raises(ValueError, match="extra_tokens -1"):
        packing.pack([talk], 4, seed=0, extra_tokens=-1)


def targets_of(rows, row_length, depth):
    """`(position, target)` in the stream of every target of `depth` that counts, sorted."""
    _, is_valid = depth_targets(rows.tokens, rows.segment_ids, rows.loss_mask, depth)
    row, column = np.nonzero(np.asarray(is_valid))
    return sorted((int(at), int(at) + depth + 1) for at in row * row_length + column)


def targets_in_stream(documents, stream, depth):
    """The same by brute force, of the unbroken stream."""
    found, start = [], 0
    waiting = {each.tokens.tobytes(): each for each in documents}
    while waiting:
        [key] = [key for key, each in waiting.items() if np.array_equal(stream[start:][: len(key)], each.tokens)]
        each = waiting.pop(key)
        mask = np.ones(len(key) + 1, bool) if each.loss_mask is None else each.loss_mask
        targets = [target for target in range(depth + 1, len(key) + 1) if mask[target]]
        found += [(start + target - depth - 1, start + target) for target in targets]
        start += len(key) + 1
    return found


@pytest.mark.parametrize("row_length, num_depths", [(2, 3), (5, 1), (8, 0), (16, 3), (1000, 2)])
def test_with_a_token_more_than_depths_every_target_of_the_stream_counts_once(row_length, num_depths):
    rng = np.random.default_rng(row_length)
    documents = []
    for index in range(12):  # a first letter of its own, then what an order cannot be told by
        tokens = np.append(100 + index, rng.integers(1, 100, rng.integers(0, 24))).astype(np.uint8)
        mask = rng.random(len(tokens) + 1) < 0.7 if index % 2 else None
        documents.append(packing.Document(str(index), tokens, mask))
    plain = packing.pack(documents, row_length, seed=1)
    rows = packing.pack(documents, row_length, seed=1, extra_tokens=num_depths + 1)
    assert rows.tokens.shape[1] == row_length + num_depths + 1
    lost = 0
    for depth in range(num_depths + 1):
        expected = targets_in_stream(documents, plain.tokens.reshape(-1), depth)
        assert targets_of(rows, row_length, depth) == expected
        lost += len(expected) - len(targets_of(plain, row_length, depth))
    assert (lost > 0) == (len(plain.tokens) > 1)


@pytest.mark.parametrize("extra_tokens, lost", [(0, [9, 18, 27]), (1, [0, 9, 18]), (2, [0, 0, 9]), (3, [0, 0, 0])])
def test_what_fewer_extra_tokens_lose_at_the_ends_of_rows(extra_tokens, lost):
    """One document of 100 tokens with its end, in rows of 10: depth k alone has 99 - k targets."""
    rows = packing.pack([document("a" * 99)], 10, seed=0, extra_tokens=extra_tokens)
    assert [99 - depth - len(targets_of(rows, 10, depth)) for depth in range(3)] == lost


# Batches.


def test_an_epoch_takes_every_row_once_and_the_next_in_another_order():
    rows = packing.pack(lettered(50), 16, seed=0)
    num_rows = len(rows.tokens)
    rows = rows._replace(tokens=np.arange(num_rows * 16, dtype=np.int32).reshape(num_rows, 16))  # rows tell apart
    first, second = (
        [batch.tokens[0, 0] for batch in epoch] for epoch in epochs(packing.shuffled_batches(rows, 1, seed=0), num_rows)
    )
    assert sorted(first) == sorted(second) == list(rows.tokens[:, 0])
    assert first != second


def epochs(batches, length):
    return [list(itertools.islice(batches, length)) for _ in range(2)]


def test_batches_depend_on_seed_and_number_alone():
    rows = packing.pack(lettered(50), 16, seed=0)
    batch_size = len(rows.tokens) // 3  # three or more an epoch, so that eight cross two epochs
    run = list(itertools.islice(packing.shuffled_batches(rows, batch_size, seed=5), 8))
    for start in range(8):
        resumed = next(packing.shuffled_batches(rows, batch_size, seed=5, start=start))
        for array, expected in zip(resumed, run[start], strict=True):
            assert array.shape == (batch_size, 16)
            np.testing.assert_array_equal(array, expected)
    assert not np.array_equal(run[0].tokens, next(packing.shuffled_batches(rows, batch_size, seed=6)).tokens)


def test_a_batch_larger_than_the_rows_is_refused_at_the_call():
    rows = packing.pack([document("abcdef")], 4, seed=0)  # two rows
    with pytest.raises(ValueError, match=r"batch_size 3 is outside 1\.\.2"):
        packing.shuffled_batches(rows, 3, seed=0)
    with pytest.raises(ValueError, match="start -1"):
        packing.shuffled_batches(rows, 1, seed=0, start=-1)


# Mixtures.


def numbered(*counts):
    """A part per count, of rows that tell their part and number: `[[part, row], …]`."""
    return [
        packing.Batch(
            tokens=np.array([[part, row] for row in range(count)], np.int32),
            segment_ids=np.ones((count, 2), np.int32),
            loss_mask=np.full((count, 2), part % 2 == 0),
        )
        for part, count in enumerate(counts)
    ]


def taken(parts, weights, batch_size, number, **options):
    """The `[part, row]` pairs of the first batches, `[number * batch_size, 2]`."""
    stream = packing.mixed_batches(parts, weights, batch_size, **options)
    return np.concatenate([batch.tokens for _, batch in itertools.islice(stream, number)])


def test_a_mixture_has_the_shares_of_its_weights_in_every_stretch():
    pytest.importorskip("grain")
    rows = taken(numbered(40, 7, 300), [5, 3, 2], 10, 60, seed=0)
    for length in (10, 50, 600):
        for begin in range(0, len(rows) - length + 1, 37):
            counts = np.bincount(rows[begin : begin + length, 0], minlength=3)
            assert np.all(np.abs(counts - length * np.array([0.5, 0.3, 0.2])) <= 2)
    assert np.bincount(rows[:, 0]).tolist() == [300, 180, 120]


def test_each_source_gives_every_row_before_any_again_and_then_in_another_order():
    pytest.importorskip("grain")
    rows = taken(numbered(9, 9, 30), [1, 1, 1], 6, 18, seed=0)
    orders = {part: rows[rows[:, 0] == part, 1].tolist() for part in range(3)}
    for part in (0, 1):
        epochs = [orders[part][begin : begin + 9] for begin in range(0, 36, 9)]
        assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 4
    assert orders[0] != orders[1]  # though they are as many
    assert sorted(orders[2][:30]) == list(range(30))


def test_a_mixture_goes_on_anywhere_as_if_unbroken():
    pytest.importorskip("grain")
    parts, weights = numbered(11, 5, 23), [0.6, 0.3, 0.1]
    run = list(itertools.islice(packing.mixed_batches(parts, weights, 4, seed=5), 40))
    for start in (0, 1, 7, 22, 37):
        resumed = itertools.islice(packing.mixed_batches(numbered(11, 5, 23), weights, 4, seed=5, start=start), 3)
        for (numbers, batch), (same, expected) in zip(resumed, run[start : start + 3], strict=True):
            for array, wanted in zip((numbers, *batch), (same, *expected), strict=True):
                np.testing.assert_array_equal(array, wanted)
    rows = packing.concatenate_rows(parts)
    for numbers, batch in run:
        np.testing.assert_array_equal(batch.tokens, rows.tokens[numbers])
        np.testing.assert_array_equal(batch.loss_mask, batch.tokens[:, :1].repeat(2, 1) % 2 == 0)  # rows stay whole
    first = taken(parts, weights, 4, 5, seed=5)
    assert not np.array_equal(first, taken(parts, weights, 4, 5, seed=6))
    assert not np.array_equal(first, taken(parts, [0.5, 0.4, 0.1], 4, 5, seed=5))
    assert not np.array_equal(first, taken(numbered(11, 6, 23), weights, 4, 5, seed=5))
    far = packing.mixed_batches(parts, weights, 4, seed=5, start=10**9)  # days of training later, and still at once
    assert next(far)[1].tokens.shape == (4, 2)


def test_one_source_needs_no_grain_and_several_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    [part] = numbered(12)
    stream = packing.mixed_batches([part], [3.0], 4, seed=1, start=2)
    plain = packing.shuffled_batches(part, 4, seed=1, start=2)
    for (numbers, batch), expected in itertools.islice(zip(stream, plain, strict=True), 5):
        np.testing.assert_array_equal(batch.tokens, expected.tokens)
        np.testing.assert_array_equal(part.tokens[numbers], expected.tokens)
    with pytest.raises(UsageError, match=r"mixes several sources, is missing: run pip install -e '\.\[train\]'"):
        packing.mixed_batches([part, part], [1, 1], 4, seed=1)


@pytest.mark.parametrize(
    "weights, changes, message",
    [
        ([1], {}, "2 sources and 1 weights"),
        ([1, 0], {}, "positive, not 1, 0"),
        ([1, float("nan")], {}, "positive, not 1, nan"),
        ([1, 1], {"batch_size": 0}, "batch_size 0"),
        ([1, 1], {"start": -1}, "start -1"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_at_the_call(weights, changes, message):
    with pytest.raises(ValueError, match=message):
        packing.mixed_batches(numbered(3, 3), weights, **{"batch_size": 2, "seed": 0, **changes})


# Held-out files.


def test_the_content_alone_decides_what_is_held_out():
    documents = lettered(400)
    train, held_out = packing.split_held_out(documents, 0.25)
    assert 60 < len(held_out) < 140  # 100 +- 9: more than four standard deviations to either side
    assert len(train) + len(held_out) == 400
    renamed = [packing.Document("other", each.tokens.copy()) for each in reversed(documents)]
    again = packing.split_held_out(renamed, 0.25)[1]
    assert [each.tokens.tobytes() for each in again] == [each.tokens.tobytes() for each in reversed(held_out)]
    assert packing.split_held_out(documents, 0)[1] == packing.split_held_out(documents, 1)[0] == []
    with pytest.raises(ValueError, match=r"fraction 1\.5"):
        packing.split_held_out(documents, 1.5)


def test_nothing_of_a_held_out_file_is_in_the_training_rows():
    documents = [document(f"text {i % 150}") for i in range(200)]  # a quarter are copies
    train, held_out = packing.split_held_out(documents, 0.2)
    seen = set(unpacked(packing.pack(train, 32, seed=0)))
    hidden = {each.tokens.tobytes() for each in held_out}
    assert hidden and not hidden & seen
    assert len(hidden | seen) == 150


def test_prompts_start_lines_of_different_files_and_have_a_continuation():
    documents = [document("".join(f"{letter}{i}: some line\n" for i in range(9))) for letter in "abcde"]
    documents += [documents[0], document("x: too short\n")]
    prompts = packing.held_out_prompts(documents, count=8, prompt_length=12, continuation_length=20, seed=0)
    texts = [bytes(prompt).decode() for prompt in prompts]
    assert all(len(text) == 12 and text[2:] == ": some lin" for text in texts)
    assert {text[0] for text in texts[:5]} == set("abcde")  # a copy gives no second turn
    assert len(set(texts)) == 8
    assert all(int(text[1]) <= 6 for text in texts)  # 32 bytes from the start of line 7 would pass the end
    assert prompts == packing.held_out_prompts(documents, count=8, prompt_length=12, continuation_length=20, seed=0)


def test_too_few_prompts_are_an_error_with_the_numbers():
    asked = {"count": 3, "prompt_length": 3, "continuation_length": 1, "seed": 0}
    with pytest.raises(
        ValueError, match="1 held-out documents contain 2 prompts of 3 tokens with 1 more after each; 3"
    ):
        packing.held_out_prompts([document("abc\nabc\n")], **asked)
    assert len(packing.held_out_prompts([document("abc\nabc\n")], **asked, min_count=2)) == 2
    with pytest.raises(ValueError, match="count=0"):
        packing.held_out_prompts([document("abc")], count=0, prompt_length=1, continuation_length=1, seed=0)


# Files.


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.95])
def test_the_end_of_a_single_text_is_held_out(fraction):
    text = "".join(f"line {number} é\n" for number in range(1000)).encode()
    document = packing.Document("one", np.frombuffer(text, np.uint8))
    [train], [held_out] = packing.split_held_out([document], fraction)
    assert train.tokens.tobytes() + held_out.tokens.tobytes() == text
    assert train.tokens.tobytes().endswith(b"\n") and abs(len(held_out.tokens) / len(text) - fraction) < 0.01


def test_of_a_few_texts_the_end_of_the_longest_is_held_out():
    texts = [document("short"), document("a line\n" * 100), document("a line\n" * 100), document("other")]
    for fraction in (0.01, 0.999):  # every text is on one side
        train, held_out = packing.split_held_out(texts, fraction)
        ends = [each.tokens.tobytes() for each in held_out]
        assert len(ends) == 2 and ends[0] == ends[1] and ends[0].endswith(b"a line\n")  # of both copies
        assert sum(len(each.tokens) for each in (*train, *held_out)) == sum(len(each.tokens) for each in texts)


def test_of_a_few_conversations_one_is_held_out():
    mask = np.ones(4, bool)
    talks = [packing.Document("talk", np.frombuffer(text, np.uint8), mask) for text in (b"abc", b"bcd", b"cde")]
    for fraction in (1e-6, 1 - 1e-6):
        train, held_out = packing.split_held_out(talks, fraction)
        assert (len(train), len(held_out)) == (2, 1)


def test_a_single_line_is_cut_between_characters():
    document = packing.Document("one", np.frombuffer(("é" * 101).encode(), np.uint8))
    [train], [held_out] = packing.split_held_out([document], 0.1)
    assert train.tokens.tobytes().decode() + held_out.tokens.tobytes().decode() == "é" * 101


def test_nothing_is_held_out_of_a_single_text_without_a_fraction():
    document = packing.Document("one", np.frombuffer(b"abc", np.uint8))
    assert packing.split_held_out([document], 0)[1] == [] == packing.split_held_out([document], 1)[0]
