"""A `tiktoken.model` gives the tokens that tiktoken gives."""

import base64
import itertools
import json
import random

import pytest
import tokenizers

from mtpjax.byte_letters import BYTE_OF_LETTER
from mtpjax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from mtpjax.errors import TokenizerError, UnsafeFileError
from mtpjax.io.huggingface_files import count_token_ids
from mtpjax.io.save import _TokenizerWriter
from mtpjax.io.tiktoken_files import PATTERNS, TIKTOKEN_FILE

KIMI = "TikTokenTokenizer"
WORDS = ("the", " the", "   ", "------", "字漢", "かな", "'s", "12", "token", "tokens", " aaa", "\n\n", "é")
VOCAB_SIZE = 700


@pytest.fixture(scope="module")
def ranks():
    """The 256 bytes in another order than their numbers, and merges that were trained on the words."""
    rng = random.Random(0)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(["".join(rng.choices(WORDS, k=6)) for _ in range(400)], trainer)
    return {bytes(map(BYTE_OF_LETTER.__getitem__, name)): index for name, index in trained.get_vocab().items()}


@pytest.fixture
def folder(tmp_path, ranks):
    write_ranks(tmp_path, ranks)
    # Kimi's ids have gaps too.
    names = {650: ("[BOS]", True), 651: ("[EOS]", True), 652: ("<|im_end|>", True), 660: ("<|tool_call|>", False)}
    settings = {
        "tokenizer_class": KIMI,
        "eos_token": "[EOS]",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}<|im_end|>",
        "bos_token": "[BOS]",
        "added_tokens_decoder": {str(i): {"content": name, "special": special} for i, (name, special) in names.items()},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 652}')
    return tmp_path


def write_ranks(folder, ranks):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (folder / TIKTOKEN_FILE).write_bytes(b"\n".join(lines) + b"\n")


def encode_word(word, ranks):
    """tiktoken's algorithm: merge the neighbours whose joint bytes have the lowest rank, the first of equal ones."""
    parts = [word[place : place + 1] for place in range(len(word))]
    while True:
        joint = [ranks.get(left + right, VOCAB_SIZE) for left, right in itertools.pairwise(parts)]
        if min(joint, default=VOCAB_SIZE) == VOCAB_SIZE:
            return [ranks[part] for part in parts] if word not in ranks else [ranks[word]]
        place = joint.index(min(joint))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_tokens_are_those_of_the_lowest_ranks(folder, ranks):
    tokenizer = load_tokenizer(folder, VOCAB_SIZE)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[KIMI]), "isolated")
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices((*WORDS, " ", "a", "-", "ü", "🙂", "9"), k=rng.randrange(12)))
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert tokenizer.encode(text) == [token for word in words for token in encode_word(word.encode(), ranks)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_is_split_as_kimi_splits_it():
    """The words are those that tiktoken 0.14 finds with the pattern of Kimi-K2."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[KIMI]), "isolated")
    text = "Hello字word 12345 it's IT'S 々漢字かな カナ　x  \n\n  y\u0130'ſ é\u0301--!\n\nfooBar"
    expected = ["Hello", "字", "word", " ", "123", "45", " it's", " IT'S", " ", "々漢字", "かな", " カナ", "\u3000x"]
    expected += ["  \n\n", " ", " y", "\u0130'ſ", " é\u0301", "--!\n\n", "foo", "Bar"]
    assert [word for word, _ in split.pre_tokenize_str(text)] == expected


def test_special_tokens_and_the_template_are_those_of_the_settings(folder, tmp_path_factory):
    tokenizer = load_tokenizer(folder, VOCAB_SIZE)
    assert tokenizer.eos_token_ids == (652, 651) and tokenizer.special_token_ids == (650, 651, 652)
    assert tokenizer.encode("the<|im_end|>")[-1] == 652
    assert tokenizer.decode([650, *tokenizer.encode("the"), 660, 652]) == "the<|tool_call|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the<|im_end|>"}])
    assert ids[0] == 650 and ids.count(652) == 1
    # What is saved is a tokenizer.json.
    saved, written = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("written")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    tokenizer.save(saved)
    _TokenizerWriter(folder, VOCAB_SIZE).save(written)
    for other in (saved, written):
        assert (other / "tokenizer.json").exists() and load_tokenizer(other, VOCAB_SIZE).digest == tokenizer.digest
    assert count_token_ids(folder) == 661
    with pytest.raises(TokenizerError, match="has token 660; the model has 660 tokens"):
        load_tokenizer(folder, 660)


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda ranks: b"no base64 1", "line 1: expected a token in base64 and its rank"),
        (lambda ranks: b"YQ== -1", "a token of 1 bytes with rank -1"),
        (lambda ranks: b"YQ== 1\nYg== 1", "2 tokens share 1 ranks"),
        (lambda ranks: b"YQ== 1\nYQ== 2", "line 2: a token of 1 bytes"),
        (lambda ranks: base64.b64encode(b"a" * 2000) + b" 1", "a token of 2000 bytes"),
        (lambda ranks: b"YQ== 1", "255 of the 256 bytes are not tokens, the first is 0x00"),
        (lambda ranks: b"", "256 of the 256 bytes"),
    ],
)
def test_a_damaged_file_is_refused(change, problem, folder, ranks):
    (folder / TIKTOKEN_FILE).write_bytes(change(ranks))
    with pytest.raises(TokenizerError, match=problem):
        load_tokenizer(folder, VOCAB_SIZE)


@pytest.mark.parametrize(
    "settings, problem",
    [
        (
            {"tokenizer_class": "HYTokenizer"},
            "tokenizer_class is 'HYTokenizer'; .* supported: TikTokenTokenizer. Add a",
        ),
        ({}, "tokenizer_class is None"),
        ({"tokenizer_class": [KIMI]}, "tokenizer_class is "),
        ({"tokenizer_class": KIMI}, "no added_tokens_decoder"),
        ({"tokenizer_class": KIMI, "added_tokens_decoder": {"7": {"content": "x"}}}, "an unused id above"),
        ({"tokenizer_class": KIMI, "added_tokens_decoder": {"-1": {"content": "x"}}}, "an unused id above"),
        ({"tokenizer_class": KIMI, "added_tokens_decoder": {"660": "x"}}, "an object with content"),
        (
            {"tokenizer_class": KIMI, "added_tokens_decoder": {"660": {"content": "a"}}},
            "duplicate token",
        ),
    ],
)
def test_settings_that_do_not_tell_the_tokens_are_refused(settings, problem, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match=problem):
        load_tokenizer(folder, VOCAB_SIZE)


def test_a_file_without_bound_is_not_read(folder):
    (folder / TIKTOKEN_FILE).write_bytes(bytes((16 << 20) + 1))
    with pytest.raises(UnsafeFileError, match="larger than"):
        load_tokenizer(folder, VOCAB_SIZE)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_another_format_is_named_with_the_way_on(name, tmp_path):
    (tmp_path / name).write_text("")
    with pytest.raises(
        TokenizerError, match=f"no tokenizer.json.* Its {name} has an unsupported format: .*AutoTokenizer"
    ):
        load_tokenizer(tmp_path, 320)
