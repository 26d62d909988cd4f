"""Text that comes token by token is the text of all tokens, and comes as soon as nothing can change it."""

import itertools
import random

import numpy as np
import pytest

from mtpjax.data.incremental_decoder import TokenizerDecoder
from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.helpers import decoder_kinds
from tests.helpers.decoder_kinds import KINDS, STRIPPED_AT_THE_END, make_tokenizer


def streamed(stream, ids):
    """Returns the texts of the steps and of the end."""
    return [*map(stream, ids), stream(None)]


def random_ids(rng, size):
    """Yields 2,000 lists: of all ids, of neighbours such as bytes alone, and of few that repeat, such as specials."""
    for number in range(2000):
        length = rng.choice((0, 1, 2, 3, 5, 8, 20))
        if number % 4 == 0:
            begin = rng.randrange(size)
            yield [min(begin + rng.randrange(12), size - 1) for _ in range(length)]
        elif number % 4 == 1:
            yield rng.choices(rng.sample(range(size), 4), k=length)
        else:
            yield [rng.randrange(size) for _ in range(length)]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_equals_the_text_of_all_tokens(kind):
    tokenizer = make_tokenizer(*KINDS[kind])
    decoder = TokenizerDecoder(tokenizer)
    for ids in random_ids(random.Random(0), len(KINDS[kind][0]) + 14):
        assert "".join(streamed(decoder.start(), ids)) == tokenizer.decode(ids), ids


def test_streamed_bytes_equal_the_text_of_all_bytes():
    tokenizer = ByteTokenizer()
    for ids in random_ids(random.Random(0), 256):
        expected = bytes(filter(None, ids)).decode(errors="replace")
        assert "".join(streamed(tokenizer.incremental_decoder(), ids)) == expected == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", STRIPPED_AT_THE_END)
def test_text_may_be_shorter_than_what_is_stripped_at_its_end(kind, tmp_path):
    made = make_tokenizer(*STRIPPED_AT_THE_END[kind])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path, 320)
    space = made.token_to_id("Ġ") or made.token_to_id("▁")
    for ids in ([], [space], [space] * 4):
        assert "".join(streamed(tokenizer.incremental_decoder(), ids)) == tokenizer.decode(ids) == " " * (len(ids) - 3)
    # The package itself decodes texts that are long enough.
    for ids in random_ids(random.Random(0), made.get_vocab_size()):
        ids = [made.token_to_id("a"), *ids, made.token_to_id("a"), space, space][:: random.choice((1, -1))]
        if ids[-1] == space:
            assert tokenizer.decode(ids) == "".join(streamed(tokenizer.incremental_decoder(), ids)) == made.decode(ids)


@pytest.mark.parametrize(
    "kind, names",
    [
        ("byte-level", ["å", "Ń", "Ĺ", "a", "Ġ", "<eos>"]),  # the three bytes of a character
        ("byte-level, strip", ["Ġ", "Ġthe", "a", "å", "Ń", "Ĺ"]),
        ("byte-fallback, Llama", ["<0xC3>", "<0xA9>", "a", "▁", "<eos>", "<think>"]),
        ("byte-fallback, Metaspace", ["<0xC3>", "<0xA9>", "▁the", "a"]),
        ("byte-fallback, strip at the end", ["▁", "a", "▁▁", "<0x20>", "<0xA9>"]),
        ("byte-fallback, spaces later", ["▁the", "▁", "<0x20>", "<0xA9>"]),
        ("Metaspace", ["▁c", "a", "▁▁e"]),
        ("WordPiece", ["##b", ".", "a", "n't"]),
        ("CTC", ["a", "|", "<pad>"]),
        ("no decoder", ["a", "the", " "]),
    ],
)
def test_text_is_shown_as_soon_as_no_token_can_change_it(kind, names):
    """The twin tries every continuation of up to two tokens: what all texts have in common must be shown."""
    made = make_tokenizer(*(KINDS | STRIPPED_AT_THE_END)[kind])
    decoder = TokenizerDecoder(made)
    ids = [made.token_to_id(name) for name in names]

    def whole(tokens):
        return "".join(streamed(decoder.start(), tokens))

    lists = [list(each) for length in range(3) for each in itertools.product(ids, repeat=length)]
    for tokens in lists:
        shown = "".join(streamed(decoder.start(), tokens)[:-1])
        texts = sorted(whole(tokens + more) for more in lists)
        # Of sorted texts, the first and the last have in common what all have.
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
        assert shown == "".join(pair[0] for pair in pairs), tokens


def test_a_character_in_a_run_of_broken_bytes_is_not_shown_before_the_run_ends():
    made = make_tokenizer(*KINDS["byte-fallback, Llama"])
    decoder = TokenizerDecoder(made)
    run = [made.token_to_id(name) for name in ("▁the", "<0xC3>", "<0xA9>")]
    broken, word = made.token_to_id("<0xC3>"), made.token_to_id("a")
    assert streamed(decoder.start(), [*run, word]) == ["the", "", "", "éa", ""]
    assert streamed(decoder.start(), [*run, broken, word]) == ["the", "", "", "", "\ufffd\ufffd\ufffda", ""]
    assert streamed(decoder.start(), run[:2]) == ["the", "", "\ufffd"]


def test_a_step_does_not_read_the_text_before_it(monkeypatch):
    """After each token was seen once, the tokenizers package is not called any more."""
    made = make_tokenizer(*KINDS["byte-fallback, Llama"])
    decoder = TokenizerDecoder(made)
    ids = np.arange(len(decoder_kinds.PIECES) + 14)
    expected = streamed(decoder.start(), ids)
    monkeypatch.setattr(decoder, "_tokenizer", None)
    assert streamed(decoder.start(), list(ids) * 3)[: len(ids)] == expected[:-1]


@pytest.mark.parametrize("kind", ["byte-fallback, Llama", "byte-level", "WordPiece", "no decoder"])
def test_a_tokenizer_file_of_each_kind_streams(kind, tmp_path):
    make_tokenizer(*KINDS[kind]).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path, 320)
    for ids in itertools.islice(random_ids(random.Random(1), 270), 100):
        assert "".join(streamed(tokenizer.incremental_decoder(), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_what_follows_are_the_text_of_all_tokens(kind):
    tokenizer = make_tokenizer(*KINDS[kind])
    decoder = TokenizerDecoder(tokenizer)
    rng, num_joined = random.Random(1), 0
    for ids in random_ids(rng, len(KINDS[kind][0]) + 14):
        prompt, answer = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
        after = "".join(streamed(decoder.start(prompt), answer))
        # A character that begins in the prompt changes the prompt's text.
        if whole.startswith(before):
            assert before + after == whole, (prompt, answer)
        else:
            num_joined += 1
            assert whole.endswith(after), (prompt, answer)
    assert num_joined < 1000


def test_the_first_token_after_a_prompt_keeps_its_space():
    tokenizer = make_tokenizer(*KINDS["byte-fallback, Llama"])
    decoder, the = TokenizerDecoder(tokenizer), tokenizer.token_to_id("▁the")
    special = tokenizer.token_to_id("<eos>")
    for prompt, text in (([the], " the the"), ([the] * 100, " the the"), ([], "the the"), ([special], "the the")):
        assert "".join(streamed(decoder.start(prompt), [the, the])) == text
