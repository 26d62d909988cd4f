"""Text comes in whole characters, and ends at a stop string, however its tokens are split into deltas."""

import itertools
import random

import pytest

from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from mtpjax.serving.text_stream import TextStream
from tests.helpers import chatml
from tests.helpers.decoder_kinds import KINDS, make_tokenizer

TEXT = "né 🙂 abcabd €"


def stream(text, sizes, **options):
    """Returns the pieces of a text whose bytes come in deltas of the given sizes, and the stream."""
    made = TextStream(ByteTokenizer().incremental_decoder(), **options)
    tokens, pieces = iter(text if isinstance(text, list) else text.encode()), []
    for size in sizes:
        pieces.append(made.push(list(itertools.islice(tokens, size))).text)
    pieces.append(made.push(list(tokens)).text)
    return [*pieces, made.finish().text], made


@pytest.mark.parametrize("stop", [(), ("abd",), ("🙂",), ("x", "€"), ("é 🙂 a", "bca"), ("ab", "abc"), ("€ and more",)])
def test_all_splits_give_the_same_text(stop):
    places = [place for each in stop if (place := TEXT.find(each)) >= 0]
    expected = TEXT[: min(places, default=len(TEXT))]
    rng, num_tokens = random.Random(0), set()
    for size in (1, 2, 3, 100):
        sizes = [size] * (100 // size)
        for case in (sizes, [rng.randint(0, 4) for _ in range(40)]):
            pieces, made = stream(TEXT, case, stop=stop)
            assert "".join(pieces) == expected
            num_tokens.add(made.num_tokens)
    assert len(num_tokens) == 1, "the tokens that count depend on the split"


def test_every_split_into_two_or_three_deltas_finds_the_stop_string():
    num_bytes = len(TEXT.encode())
    for first, second in itertools.combinations(range(num_bytes), 2):
        pieces, made = stream(TEXT, (first, second - first), stop=("abd",))
        assert "".join(pieces) == "né 🙂 abc"
        assert made.matched == "abd" and made.is_stopped


def test_deltas_never_hold_half_a_character():
    pieces, _ = stream(TEXT, [1] * 100)
    assert "\ufffd" not in "".join(pieces)
    assert set(pieces) - {""} == set(TEXT)


def test_only_the_beginning_of_a_stop_string_is_held_back():
    pieces, _ = stream("xabcaby", [1] * 7, stop=("abd",))
    assert pieces[:7] == ["x", "", "", "abc", "", "", "aby"]


def test_released_text_keeps_the_draft_level_of_its_token():
    texts = {0: "xa", 1: "b", 2: "ay", None: ""}
    made = TextStream(texts.__getitem__, stop=("abd",))
    pieces = [made.push([0], [1]), made.push([1], [2]), made.push([2], [0]), made.push([0], [1]), made.finish()]
    assert [piece.spans for piece in pieces] == [
        [("x", 1)],
        [],
        [("a", 1), ("b", 2), ("ay", 0)],
        [("x", 1)],
        [("a", 1)],
    ]


@pytest.mark.parametrize("stop", [(), ("abd",), ("🙂",), ("€ and more",)])
def test_all_splits_give_the_same_levels(stop):
    tokens, seen = TEXT.encode(), set()
    for size in (1, 2, 3, 100):
        made = TextStream(ByteTokenizer().incremental_decoder(), stop=stop)
        starts = range(0, len(tokens), size)
        pieces = [made.push(tokens[start : start + size], range(start, start + size)) for start in starts]
        spans = [span for piece in [*pieces, made.finish()] for span in piece.spans]
        seen.add(tuple(spans))
        # Here each token has a level of its own: its place.
        assert all(tokens[: span.level + 1].decode().endswith(span.text) for span in spans)
    assert len(seen) == 1


def test_held_text_is_released_at_the_end():
    assert "".join(stream("see ab", (), stop=("abd",))[0]) == "see ab"


def test_half_a_character_at_the_end_is_shown_as_replacement():
    assert "".join(stream(list("🙂".encode()[:2]), ())[0]) == "\ufffd"


def test_a_stop_token_is_counted_and_not_shown():
    pieces, made = stream([*b"ok", 10], (), hidden_tokens=(10,))
    assert ("".join(pieces), made.num_tokens, made.matched, made.is_stopped) == ("ok", 3, 10, False)


def test_stop_strings_count_only_after_the_least_number_of_tokens():
    pieces, made = stream("a.b.c.", (), stop=(".",), min_tokens=3)
    assert "".join(pieces) == "a.b" and made.num_tokens == 4


def test_tokens_behind_a_stop_string_do_not_count():
    pieces, made = stream("ab.cdef", (), stop=(".",))
    assert "".join(pieces) == "ab" and made.num_tokens == 3
    assert made.push(b"more").num_tokens == 0


def test_a_checkpoint_tokenizer_gives_whole_characters_and_hides_special_tokens(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    tokens = [*tokenizer.encode(TEXT), 257]
    for size in (1, 2, 3, 100):
        made = TextStream(tokenizer.incremental_decoder(), stop=("abd",), hidden_tokens=tokenizer.eos_token_ids)
        pieces = [made.push(tokens[place : place + size]).text for place in range(0, len(tokens), size)]
        assert "".join([*pieces, made.finish().text]) == "né 🙂 abc" and made.matched == "abd"
        assert not any("\ufffd" in piece for piece in pieces)
    made = TextStream(tokenizer.incremental_decoder(), hidden_tokens=tokenizer.eos_token_ids)
    assert made.push(tokens).text + made.finish().text == TEXT == tokenizer.decode(tokens)


@pytest.mark.parametrize("stop", [(), ("the",), (" a", "\ufffd\ufffd"), ("A", "é")])
def test_any_tokens_of_a_byte_fallback_tokenizer_give_the_text_of_all_tokens(stop, tmp_path):
    make_tokenizer(*KINDS["byte-fallback, Llama"]).save(str(tmp_path / "tokenizer.json"))
    tokenizer, rng = HuggingFaceTokenizer(tmp_path, 320), random.Random(0)
    for _ in range(200):
        tokens = [rng.choice((66, rng.randrange(250), rng.randrange(250, 276))) for _ in range(rng.randrange(12))]
        for size in (1, 3, 100):
            made = TextStream(tokenizer.incremental_decoder(), stop=stop)
            pieces = [made.push(tokens[place : place + size]).text for place in range(0, len(tokens), size)]
            text = "".join([*pieces, made.finish().text])
            whole = tokenizer.decode(tokens[: made.num_tokens])
            places = [place for each in stop if (place := whole.find(each)) >= 0]
            assert text == whole[: min(places, default=len(whole))]
            assert made.is_stopped == bool(places) and (places or made.num_tokens == len(tokens))


def test_a_stop_string_of_byte_tokens_needs_no_token_behind_it(tmp_path):
    made = make_tokenizer(*KINDS["byte-fallback, Llama"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path, 320)
    tokens = [made.token_to_id(name) for name in ("▁the", "<0x0A>", "<0xC3>", "<0xA9>", "a")]
    for stop, text, num_tokens in (("\n", "the", 2), ("\né", "the", 4), ("e\n", "th", 2), ("é", "the\n", 4)):
        stream = TextStream(tokenizer.incremental_decoder(), stop=(stop,))
        assert (stream.push(tokens).text + stream.finish().text, stream.num_tokens) == (text, num_tokens)
    # Before the least number of tokens, a stop string is text.
    stream = TextStream(tokenizer.incremental_decoder(), stop=("\n",), min_tokens=3)
    assert (stream.push(tokens[:2]).text + stream.finish().text, stream.is_stopped) == ("the\n", False)
