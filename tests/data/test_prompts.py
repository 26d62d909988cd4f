"""Prompts of every format, a choice that stays the same, and errors that say where."""

import json
from collections import Counter

import pytest

from mtpjax.data.prompts import Prompt, choose_prompts, read_prompts


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_spec_bench_gives_the_first_turn_with_its_category(tmp_path):
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 161, "category": "translation", "turns": ["Übersetze: fünf."]},
    )
    assert read_prompts(path) == [
        Prompt("Compose a post.", "writing", "81"),
        Prompt("Übersetze: fünf.", "translation", "161"),
    ]


def test_gsm8k_and_other_jsonl_give_text_category_and_id(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(
        json.dumps({"question": "Two and two?", "answer": "4\n#### 4"})
        + '\n\n{"prompt": "def ", "category": "code", "id": "a", "text": "not this"}\n{"text": "once"}'
    )
    assert read_prompts(path) == [
        Prompt("Two and two?", "gsm8k", "1"),
        Prompt("def ", "code", "a"),
        Prompt("once", "gsm8k", "4"),
    ]


def test_text_gives_paragraphs_or_lines_cut_at_white_space(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text("\ufeff\nFirst:\nSpeak.\n \n\nAll:\r\nSpeak, speak.\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["First:\nSpeak.", "All:\nSpeak, speak."]
    path.write_text("one\ntwo\n")
    assert read_prompts(path) == [Prompt("one", "play", "1"), Prompt("two", "play", "2")]
    path.write_text("alpha beta gamma " + "x" * 25)
    texts = [prompt.text for prompt in read_prompts(path, max_characters=10)]
    assert texts == ["alpha beta", "gamma", "x" * 10, "x" * 10, "x" * 5]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "contains no prompt"),
        (b" \n\n", "contains no prompt"),
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2 is not a JSON object but a list"),
        (b'{"turns": []}', "line 1 has 'turns' that are not a list with at least one turn"),
        (b'{"turns": [3]}', "line 1 has a number, not text, in 'turns'"),
        (b'\n{"question": null}', "line 2 has null, not text, in 'question'"),
        (b'{"answer": "4"}', "line 1 has none of turns, prompt, text, question"),
        (b'{"text": " "}', "line 1 has an empty 'text'"),
        (b'{"text": "a", "category": 3}', "line 1 has a number, not text, in 'category'"),
        (b'{"text": "a"}\n\xff\xfe', "line 2 is not UTF-8 text"),
        (b'{"text": "a"}\n\0', "line 2 contains NUL"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"text": "a"}\n{"text": "\\ud83d"}', "line 2 is not JSON"),  # half a character, which has no UTF-8 encoding
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path, content, said):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"prompts\.jsonl") as error:
        read_prompts(path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_text_that_is_none_is_told_with_its_line(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(ValueError, match=r"notes\.txt line 2 is not UTF-8"):
        read_prompts(path)
    with pytest.raises(OSError):
        read_prompts(tmp_path / "missing.txt")


def test_a_choice_is_even_nested_and_depends_on_the_seed():
    prompts = [Prompt(f"{kind}{n}", kind, str(n)) for kind, size in (("a", 9), ("b", 9), ("c", 2)) for n in range(size)]
    chosen = choose_prompts(prompts, 9)
    assert Counter(prompt.category for prompt in chosen) == {"a": 4, "b": 3, "c": 2}
    assert chosen == choose_prompts(prompts, 9) != choose_prompts(prompts, 9, seed=1)
    assert chosen[:5] == choose_prompts(prompts, 5)
    only = choose_prompts(prompts, 4, categories=["b"])
    assert only == [prompt for prompt in choose_prompts(prompts, 20) if prompt.category == "b"][:4]
    assert len(choose_prompts(prompts, 100)) == len(set(choose_prompts(prompts, 100))) == 20


def test_a_choice_of_nothing_is_refused():
    prompts = [Prompt("x", "a", "1")]
    with pytest.raises(ValueError, match="no prompts of category 'z', only of a"):
        choose_prompts(prompts, 1, categories=["z"])
    with pytest.raises(ValueError, match="at least 1, not 0"):
        choose_prompts(prompts, 0)


def test_the_layout_of_the_published_spec_bench_file_is_read(tmp_path):
    """The published file's ids, categories and keys: 80 questions of MT-bench, then 80 of each of five tasks."""
    mt_bench = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    tasks = ("translation", "summarization", "qa", "math_reasoning", "rag")
    categories = [name for name in mt_bench for _ in range(10)] + [name for name in tasks for _ in range(80)]
    records = []
    for number, category in enumerate(categories, start=81):
        turns = [f"Question {number}.", "Shorter, please."][: 2 if category in mt_bench else 1]
        answer = {"reference": ["42"]} if category in ("math", "reasoning", "coding") else {}
        records.append({"question_id": number, "category": category, "turns": turns, **answer})
    prompts = read_prompts(write(tmp_path / "question.jsonl", *records))
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) == 480 and prompts[0].id == "81" and prompts[-1].id == "560"
    assert len(counts) == 13 and counts["rag"] == 80 and counts["writing"] == 10
    assert len(choose_prompts(prompts, 26)) == 26
