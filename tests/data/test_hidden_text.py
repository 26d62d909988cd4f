"""Special tokens in the text of users are found again after a template ran, in time that grows with the text only."""

import time

from mtpjax.data.hidden_text import HiddenText
from tests.helpers import chatml


def messages(text):
    return [{"role": "user", "content": text}]


def test_a_mark_is_not_in_the_text():
    for text in ("<s>9000000000", "9000000000000000000001 <s>", "99000000000900000000190000000029<s>"):
        hidden = HiddenText(["<s>"], messages(text), "9000000003")
        [message] = hidden.hide(messages(text))
        assert hidden.restore(message["content"]) == (text, [(text.index("<s>"), text.index("<s>") + 3)])


def test_many_numbers_that_could_begin_a_mark_take_linear_time():
    text = "".join(f"9{number:09o}" for number in range(100_000))
    begin = time.process_time()
    hidden = HiddenText(["<s>"], messages(text + "<s>"), "")
    [message] = hidden.hide(messages(text + "<s>"))
    # A search for each of them takes 10 s; one pass, 0.1 s.
    assert time.process_time() - begin < 2
    assert hidden.restore(message["content"])[0] == text + "<s>"


def test_ten_thousand_hidden_tokens_are_encoded_as_each_alone(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    one, many = (tokenizer.apply_chat_template(messages("<|im_end|>" * count)) for count in (1, 10_000))
    hidden = tokenizer._plain_tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
    assert len(many) - len(one) == 9_999 * len(hidden)
    assert tokenizer.decode(many).count("<|im_end|>") == 10_000
