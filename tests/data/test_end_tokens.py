"""Each end token that a file of the checkpoint names ends a text; the first separates documents."""

import json
import logging
import re

import pytest

from mtpjax.data.sources import end_token_id
from mtpjax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from mtpjax.errors import TokenizerError
from tests.helpers import chatml

START, END, USER, ASSISTANT, LAST = range(256, 261)  # ids of chatml.SPECIAL


@pytest.fixture
def folder(tmp_path):
    chatml.save_tokenizer(tmp_path)  # generation_config.json names <|im_end|>
    return tmp_path


def write(folder, **files):
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, (END, LAST)),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, (END, LAST)),
        ({"special_tokens_map": {"eos_token": "<|end|>"}}, (END, LAST)),
        ({"special_tokens_map": {"eos_token": "<|end|>"}, "tokenizer_config": {"eos_token": "<|user|>"}}, (END, USER)),
        ({"config": {"eos_token_id": LAST}}, (END, LAST)),
        ({"config": {"eos_token_id": [LAST, END]}}, (END, LAST)),
        ({"config": {"text_config": {"eos_token_id": LAST}}}, (END, LAST)),
        # Qwen: the chat model's end of a turn, and the end of a document.
        ({"generation_config": {"eos_token_id": [END, LAST]}, "config": {"eos_token_id": END}}, (END, LAST)),
        # Llama 3: the end of a text, of a message, of a turn.
        (
            {
                "generation_config": {"eos_token_id": LAST},
                "config": {"eos_token_id": USER, "pad_token_id": USER},
                "tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
            },
            (LAST, USER, END),
        ),
        (
            {"generation_config": {}, "config": {"eos_token_id": USER, "text_config": {"eos_token_id": LAST}}},
            (USER, LAST),
        ),
        ({"generation_config": {"eos_token_id": []}, "tokenizer_config": {"eos_token": "<|end|>"}}, (LAST,)),
    ],
)
def test_end_tokens_of_all_files_count(files, expected, folder, tmp_path_factory, caplog):
    write(folder, **files)
    tokenizer = load_tokenizer(folder, 300)
    assert tokenizer.eos_token_ids == expected and end_token_id(tokenizer) == expected[0] and not caplog.records
    # A saved tokenizer has the same.
    other = tmp_path_factory.mktemp("saved")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    tokenizer.save(other)
    again = load_tokenizer(other, 300)
    assert again.eos_token_ids == expected and again.digest == tokenizer.digest


@pytest.mark.parametrize(
    "files, expected, warning",
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, (END,), "eos_token '</s>' is not a token: ignored"),
        (
            {"config": {"eos_token_id": 300}},
            (END,),
            "eos_token_id is 300, not an id .* in config.json: ignored",
        ),
        ({"config": {"eos_token_id": -1}}, (END,), "eos_token_id is -1, not an id below 300"),
        ({"config": {"text_config": {"eos_token_id": "2"}}}, (END,), "in config.json's text_config: ignored"),
        # The default of a class that has another tokenizer, maybe.
        (
            {"config": {"eos_token_id": 2}},
            (END, 2),
            "config.json's eos_token_id 2 is '#', ordinary text, but ends texts",
        ),
    ],
)
def test_an_end_token_that_may_be_a_mistake_is_told(files, expected, warning, folder, caplog):
    write(folder, **files)
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(folder, 300).eos_token_ids == expected
    (record,) = caplog.records
    assert re.search(warning, record.getMessage())


def test_the_first_file_with_an_end_token_must_have_an_id(folder):
    write(folder, generation_config={}, config={"eos_token_id": 300, "text_config": {"eos_token_id": END}})
    with pytest.raises(TokenizerError, match=r"eos_token_id is 300, not an id below 300 .* in config\.json"):
        load_tokenizer(folder, 300)
