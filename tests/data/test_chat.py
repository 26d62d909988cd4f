"""Which tokens of a conversation are answers, token by token."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from mtpjax.data import packing
from mtpjax.data.chat import encode_answers, encode_chat
from mtpjax.data.config import Source
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer, ConversationError, TokenizerError
from mtpjax.errors import AnswerLocationError
from mtpjax.training.losses import depth_targets
from tests.helpers.chat_templates import GENERATION, PARTS, QWEN
from tests.helpers.chatml import CHATML, save_tokenizer

BARE = (  # nothing ends an answer but the next message
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "ä?"},
    {"role": "assistant", "content": "yes é"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def make(tmp_path):
    """`make(template, end tokens, merges)` -> a byte-level tokenizer."""

    return functools.partial(save_tokenizer, tmp_path)


def check(tokenizer, messages, pieces, *, end):
    """`pieces`: the conversation's text, cut by hand into `(text, is an answer)`; `end`: whether packing's token is."""
    tokens, is_target = encode_chat(messages, tokenizer)
    encoded = [(tokenizer.encode(text), is_answer) for text, is_answer in pieces]
    assert tokens == [token for ids, _ in encoded for token in ids]
    assert is_target.tolist() == [is_answer for ids, is_answer in encoded for _ in ids] + [end]


def test_answers_count_up_to_their_end_token(make):
    tokenizer = make()
    assert tokenizer.encode("<|im_end|>\nä") == [257, *tokenizer.encode("\n"), *tokenizer.encode("ä")]
    before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nä?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    pieces = [(before, False), ("yes é<|im_end|>", True), (between, False), ("no<|im_end|>", True), ("\n", False)]
    check(tokenizer, TALK, pieces, end=False)
    check(tokenizer, TALK[:4], [*pieces[:2], ("\n<|im_start|>user\nsure?<|im_end|>\n", False)], end=False)
    quiet = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    check(tokenizer, quiet, [(before + "yes é<|im_end|>" + between, False), *pieces[3:]], end=False)


def test_without_end_tokens_what_stops_decoding_counts(make):
    pieces = [("<|user|>ä?<|assistant|>", False), ("yes é", True), ("<|user|>sure?<|assistant|>", False), ("no", True)]
    check(make(BARE, ("<|end|>",)), TALK[1:], pieces, end=True)
    pieces[2:3] = [("<|user|>", True), ("sure?<|assistant|>", False)]
    check(make(BARE, ("<|end|>", "<|user|>")), TALK[1:], pieces, end=True)
    check(make(BARE, ("<|end|>", "<|user|>")), TALK[1:4], [*pieces[:3], ("sure?", False)], end=False)


def test_an_end_token_within_an_answer_does_not_cut_it(make):
    talk = [TALK[1], {"role": "assistant", "content": "a<|im_end|>b"}]
    prompt = "<|im_start|>user\nä?<|im_end|>\n<|im_start|>assistant\n"
    check(make(), talk, [(prompt, False), ("a<|im_end|>b<|im_end|>", True), ("\n", False)], end=False)


FORGETFUL = BARE.replace("message.content", "message.content if loop.last or message.role == 'user' else ''")
THINKING = BARE.replace("<|assistant|>{% endif %}", "<|assistant|>think:{% endif %}")
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    "template, merges, message",
    [(FORGETFUL, [], 2), (THINKING, [], 2), (PLAIN, [("Ġ", "y")], 2), (PLAIN, [("Ġ", "n")], 4)],
    ids=["forgets earlier answers", "another prompt", "first answer joined", "second answer joined"],
)
def test_a_template_whose_answers_cannot_be_told_is_refused(make, template, merges, message):
    tokenizer = make(template, merges=merges)
    with pytest.raises(TokenizerError, match=rf"the answer in message {message} of 4 cannot be located") as raised:
        encode_chat(TALK[1:], tokenizer)
    assert "\n" not in str(raised.value) and not isinstance(raised.value, ConversationError)


def test_an_empty_answer_is_its_stop_and_one_that_is_left_out_is_refused(make):
    talk = [TALK[1], {"role": "assistant", "content": ""}, TALK[2]]
    pieces = [("<|user|>ä?<|assistant|>", False), ("<|assistant|>", True), ("yes é", True)]
    check(make(BARE, ("<|end|>", "<|assistant|>")), talk, pieces, end=True)
    without_empty = BARE.replace("messages %}", "messages if message.content %}")
    with pytest.raises(TokenizerError, match=r"the answer in message 2 of 3 cannot be located"):
        encode_chat(talk, make(without_empty))


def test_a_plain_template_is_fine_where_no_token_spans_its_boundaries(make):
    pieces = [("user: ä?\nassistant: ", False), ("yes é\n", True), ("user: sure?\nassistant: ", False), ("no\n", True)]
    check(make(PLAIN), TALK[1:], pieces, end=True)


def test_the_tokens_are_the_same_on_another_day(make):
    tokenizer = make("{{ strftime_now('%Y-%m-%d') }}" + BARE)
    tokens, _ = encode_chat(TALK[1:], tokenizer)
    assert tokenizer.decode(tokens).startswith("2025-01-01")


# Templates that mark what the model writes.

BLOCKS = CHATML.replace(  # the end token is outside of the block, as in many trainers' templates
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}",
)


@pytest.mark.parametrize("template", [GENERATION, BLOCKS])
@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (1, 0)])
def test_generation_blocks_and_prefixes_mark_the_same_answers(make, template, weights):
    messages = [dict(message) for message in TALK]
    messages[2]["weight"], messages[4]["weight"] = weights
    blocks, prefixes = encode_chat(messages, make(template)), encode_chat(messages, make(CHATML))
    assert blocks[0] == prefixes[0]
    np.testing.assert_array_equal(blocks[1], prefixes[1])


def test_generation_blocks_locate_answers_that_prefixes_cannot(make):
    """The template writes a text of its own before an answer, which the generation prompt lacks."""
    part = BARE.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' %}hm:{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    tokenizer = make(part, ("<|end|>",))
    pieces = [("<|user|>ä?<|assistant|>hm:", False), ("yes é<|end|>", True)]
    check(tokenizer, TALK[1:3], pieces, end=False)


def test_a_token_that_spans_the_start_of_a_block_is_refused_and_split(make):
    plain = PLAIN.replace(
        "{{ message.content }}\n",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n{% endgeneration %}"
        "{% else %}{{ message.content }}\n{% endif %}",
    )
    tokenizer = make(plain, merges=[("Ġ", "y")])
    assert len(encode_answers(TALK[1:3], make(plain))[0]) == 1
    with pytest.raises(AnswerLocationError, match="a token spans its start or end"):
        encode_chat(TALK[1:3], tokenizer)
    [(tokens, is_target)], problems = encode_answers(TALK[1:3], tokenizer)
    prompt = tokenizer.apply_chat_template(TALK[1:2])
    assert tokens == prompt + tokenizer.encode("yes é\n") and not problems
    assert is_target.tolist() == [False] * len(prompt) + [True] * (len(tokens) - len(prompt) + 1)


# Conversations whose answers are located one by one.


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_thinking_template_gives_a_document_for_each_answer(make, thought):
    tokenizer = make(QWEN)
    talk = [m | {"content": thought + m["content"]} if m["role"] == "assistant" else m for m in TALK]
    with pytest.raises(AnswerLocationError, match="the answer in message 3 of 5 cannot be located"):
        encode_chat(talk, tokenizer)
    documents, problems = encode_answers(talk, tokenizer)
    assert not problems and len(documents) == 2
    written = "hm\n</think>\n\n" if thought else "\n</think>\n\n"
    for (tokens, is_target), index, answer in zip(documents, (2, 4), ("yes é", "no"), strict=True):
        prompt = tokenizer.apply_chat_template(talk[:index])
        whole = tokenizer.apply_chat_template(talk[: index + 1], add_generation_prompt=False)
        assert tokens == whole and tokens[: len(prompt)] == prompt
        assert np.flatnonzero(is_target)[0] == len(prompt)
        assert np.array(tokens)[is_target[:-1]].tolist() == tokenizer.encode(f"{written}{answer}<|im_end|>")
    # One turn needs no split, and gives the same as the plain way.
    [one], _ = encode_answers(talk[:3], tokenizer)
    assert one[0] == documents[0][0] and one[1].tolist() == documents[0][1].tolist()


def test_a_merge_across_the_answers_start_is_cut_as_in_decoding(make):
    tokenizer = make(PLAIN, merges=[("Ġ", "y")])
    documents, problems = encode_answers(TALK[1:], tokenizer)
    assert [len(documents), problems] == [2, []]
    for (tokens, _), index in zip(documents, (2, 4), strict=True):
        prompt = tokenizer.apply_chat_template(TALK[1:index])
        assert tokens == prompt + tokenizer.encode(TALK[index]["content"] + "\n")


def test_what_cannot_be_located_is_counted_and_never_ends_a_run(make, tmp_path):
    file = tmp_path / "talks.jsonl"
    one, two = {"messages": TALK[1:3]}, {"messages": TALK[1:]}
    file.write_text("".join(json.dumps(record) + "\n" for record in (one, two)))
    source = Source(path=str(file), kind="chat")
    # This template forgets earlier answers: the first answer of two is located, and the second has a wrong prompt.
    reading = read_source(source, make(FORGETFUL), vocab_size=300)
    assert len(reading.documents) == 2 and reading.lost_answers == 1 and not any(reading.skipped.values())
    assert "line 2: the chat template does not write the text of message 2 of 3" in reading.last_lost
    # This one never writes an answer after its prompt.
    reading = read_source(source, make(THINKING), vocab_size=300)
    assert not reading.documents and reading.skipped["corrupt"] == 2
    assert "line 2 is skipped: the answer in message 2 of 4 cannot be located: the chat" in reading.last_skipped
    with pytest.raises(ValueError, match=r"over 1 unusable documents \(2 corrupt\); the last: .* cannot be located"):
        read_source(dataclasses.replace(source, max_skipped=1), make(THINKING), vocab_size=300)


def test_the_parts_of_a_conversation_are_held_out_together(make, tmp_path):
    file = tmp_path / "talks.jsonl"
    talks = [[*TALK[1:-1], {"role": "assistant", "content": f"no {number}"}] for number in range(40)]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    documents = read_source(Source(path=str(file)), make(QWEN), vocab_size=300).documents
    assert len(documents) == 80
    train, held_out = packing.split_held_out(documents, 0.3)
    assert {each.name for each in train}.isdisjoint(each.name for each in held_out) and len(train) > len(held_out) > 0


# JSONL of conversations.


def test_columns_that_are_json_text_or_null_are_read(make, tmp_path):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "other": None}}}
    messages = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    null = [{"tool_calls": None, "name": None, "from": None, **message} for message in messages]
    file, tokenizer = tmp_path / "talks.jsonl", make(QWEN)
    documents = []
    for record in (
        {"messages": messages, "tools": [tool]},
        {"messages": null, "tools": json.dumps([tool])},
        {"messages": null, "tools": [{**tool, "strict": None}]},
    ):
        file.write_text(json.dumps(record))
        documents += read_source(Source(path=str(file)), tokenizer, vocab_size=300).documents
    assert len({document.tokens.tobytes() for document in documents}) == 1 and len(documents) == 3
    assert '"arguments": {"city": "Köln"}' in tokenizer.decode(documents[0].tokens)
    file.write_text(json.dumps({"messages": json.dumps(messages)}))
    problem = read_source(Source(path=str(file)), tokenizer, vocab_size=300).last_skipped
    assert "has no 'messages', which must be a list of objects that have a role" in problem


def test_parquet_rows_have_no_fields_of_other_rows(make, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    calls = [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {"zone": "CET"}}]
    talks = [[TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}] for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk} for talk in talks]), tmp_path / "talks.parquet")
    tokenizer = make(QWEN)
    documents = read_source(Source(path=str(tmp_path / "talks.parquet")), tokenizer, vocab_size=300).documents
    for document, talk in zip(documents, talks, strict=True):
        text = tokenizer.decode(document.tokens)
        assert json.dumps(talk[1]["tool_calls"][0]["arguments"], ensure_ascii=False) in text and "null" not in text


@pytest.mark.parametrize(
    "keywords, separators, keys",
    [
        ("ensure_ascii=False", None, False),
        ("separators=(',', ':')", (",", ":"), False),
        ("sort_keys=True", None, True),
    ],
)
def test_templates_that_give_keywords_to_tojson_are_read(make, tmp_path, keywords, separators, keys):
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather in Köln"}}
    file, tokenizer = (
        tmp_path / "talks.jsonl",
        make("{% for t in tools %}{{ t | tojson(" + keywords + ") }}{% endfor %}" + CHATML),
    )
    file.write_text(json.dumps({"messages": TALK[1:3], "tools": [tool]}))
    [document] = read_source(Source(path=str(file)), tokenizer, vocab_size=300).documents
    written = json.dumps(tool, ensure_ascii=False, separators=separators, sort_keys=keys)
    assert tokenizer.decode(document.tokens).startswith(written)


def test_a_template_of_parts_gets_the_text_of_training_data(make, tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK}))
    [document] = read_source(Source(path=str(file)), make(PARTS), vocab_size=300).documents
    tokens, is_target = encode_chat(TALK, make(CHATML))
    assert document.tokens.tolist() == tokens
    np.testing.assert_array_equal(document.loss_mask, is_target)


def test_conversations_are_read_with_their_masks_and_bad_ones_are_counted(make, tmp_path):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ tools[0] }}" + CHATML
    tokenizer = make(strict)
    records = [
        {"messages": TALK[1:], "tools": ["T"]},
        {"messages": TALK, "tools": [""]},  # the template refuses it
        {"messages": TALK[1:2], "tools": [""]},  # no answer
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"content": "hello"}]},
        {"text": "hello"},
        {"messages": TALK[1:3], "tools": ["U"]},
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    reading = read_source(Source(path=str(file), kind="chat"), tokenizer, vocab_size=300)
    assert reading.skipped == {"corrupt": 5, "empty": 1, "vocabulary": 0}
    assert [document.name.rpartition(" ")[2] for document in reading.documents] == ["1", "8"]
    for document, (messages, tool) in zip(reading.documents, ((TALK[1:], "T"), (TALK[1:3], "U")), strict=True):
        tokens, is_target = encode_chat(messages, tokenizer, tools=[tool])
        assert document.tokens.tolist() == tokens and tokenizer.decode(tokens).startswith(tool)
        np.testing.assert_array_equal(document.loss_mask, is_target)


def test_conversations_of_no_use_stop_reading_at_the_limit(make, tmp_path):
    """T10: those with ids outside of the vocabulary, and those without an answer."""
    file = tmp_path / "talks.jsonl"
    records = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": []}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = Source(path=str(file), kind="chat", max_skipped=3)
    reading = read_source(source, make(), vocab_size=257)  # <|im_end|> is 257
    assert reading.skipped == {"corrupt": 1, "empty": 1, "vocabulary": 1} and not reading.documents
    said = r"over 2 unusable documents \(1 corrupt, 1 empty, 1 vocabulary\); the last: .*line 3 has no 'messages'"
    with pytest.raises(ValueError, match=said):
        read_source(dataclasses.replace(source, max_skipped=2), make(), vocab_size=257)


def test_a_tokenizer_that_cannot_read_conversations_stops_at_the_first(make, tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    with pytest.raises(TokenizerError, match=r"talks\.jsonl line 1: the chat template failed: TemplateSyntaxError"):
        read_source(Source(path=str(file), kind="chat"), make("{% if %}"), vocab_size=300)


def test_packed_targets_of_every_depth_are_answer_tokens(make, tmp_path):
    tokenizer = make()
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": TALK[first:]}) + "\n" for first in (0, 1) * 4))
    documents = read_source(Source(path=str(file), kind="chat"), tokenizer, vocab_size=300).documents
    rows = packing.pack(documents, 40, seed=0, eos_token_id=tokenizer.eos_token_ids[0], extra_tokens=4)
    answers = sorted([*tokenizer.encode("yes é<|im_end|>"), *tokenizer.encode("no<|im_end|>")] * 8)
    for depth in range(4):
        targets, is_valid = map(np.asarray, depth_targets(rows.tokens, rows.segment_ids, rows.loss_mask, depth))
        assert sorted(targets[is_valid].tolist()) == answers


def test_a_model_of_bytes_reads_plain_conversations(tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK[1:]}) + "\n")
    [document] = read_source(Source(path=str(file)), ByteTokenizer(), vocab_size=256).documents
    expected = "user: ä?\nassistant: yes é\0user: sure?\nassistant: no\0".encode()
    assert document.tokens.astype(np.uint8).tobytes() == expected
    answers = document.tokens[document.loss_mask[:-1]].astype(np.uint8).tobytes()
    assert answers == "yes é\0no\0".encode()
    for messages in ([{"role": "user", "content": None}], [{"role": "user", "content": "a\0"}]):
        with pytest.raises(ConversationError, match="message 1"):
            ByteTokenizer().apply_chat_template(messages)


def test_text_that_the_template_wrote_has_the_targets_of_the_conversation(make, tmp_path):
    tokenizer = make()
    tokens, is_target = encode_chat(TALK, tokenizer)
    text = tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)
    assert "<|im_end|>" in text
    file = tmp_path / "formatted.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    [document] = read_source(Source(path=str(file), kind="formatted"), tokenizer, vocab_size=300).documents
    assert document.tokens.tolist() == tokens
    np.testing.assert_array_equal(document.loss_mask, is_target)
    file.write_text(json.dumps({"text": "no header"}) + "\n")
    assert read_source(Source(path=str(file), kind="formatted"), tokenizer, vocab_size=300).skipped["empty"] == 1
    with pytest.raises(TokenizerError, match="need a tokenizer with a chat template"):
        read_source(Source(path=str(file), kind="formatted"), ByteTokenizer(), vocab_size=256)
