import numpy as np
import pytest

from mtpjax.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("text", ["", "def f():\n\treturn 1\n", "naïve — 字 🙂"])
def test_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(np.array(ids, np.int32)) == text


def test_the_end_token_is_skipped_and_broken_bytes_are_replaced():
    ids = [*TOKENIZER.encode("a字"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids) == "a字"
    assert TOKENIZER.decode(ids[:-2]) == "a\ufffd"


@pytest.mark.parametrize("text, problem", [("ab\0c", "NUL at character 2"), ("a\ud800", "surrogate at character 1")])
def test_text_without_an_encoding_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("token", [-1, 256])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"token id {token} .* 256"):
        TOKENIZER.decode([97, token])
