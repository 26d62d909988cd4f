"""What a chat template needs is found by trying it: nothing that a message says may be missing from the prompt."""

import json

import pytest
from mtpjax.data.tokenizer_files import read_chat_templates

from mtpjax.data import chat_messages, template_probe
from mtpjax.data.chat_template import ChatTemplates
from mtpjax.data.config import Source
from mtpjax.data.record_forms import find_messages
from mtpjax.data.regeneration_tasks import make_task
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from mtpjax.errors import ConversationError, DroppedTextError, TokenizerError
from tests.helpers import chat_templates, chatml
from tests.helpers.chat_templates import DEEPSEEK, GLM, KIMI, LLAMA, MINIMAX, MISTRAL, PUBLISHED, QWEN
from tests.helpers.rendered_chats import render_chat

QUESTION = {"role": "user", "content": "Weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def render(template, messages, names=(), **variables):
    templates = template if isinstance(template, dict) else {"default": template}
    return ChatTemplates(templates, {"bos_token": "<s>"}, names).render(messages, **variables).text


def call(arguments, **fields):
    """A question, a call of a tool and its result."""
    made = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [made], **fields}
    return [QUESTION, answer, {"role": "tool", "tool_call_id": "call00001", "content": "12 degrees"}]


ARGUMENTS = {"city": "Köln", "days": 3}
WRITTEN = {
    "glm": "<key>city</key><value>Köln</value><key>days</key><value>3</value>",
    "minimax": "<city>Köln</city><days>3</days>",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_arguments_reach_the_prompt_once_as_text_and_as_objects(name):
    texts = {
        render(PUBLISHED[name], call(arguments))
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False), {**ARGUMENTS, "other": None})
    }
    assert len(texts) == 1
    text = texts.pop()
    assert text.count(WRITTEN.get(name, '{"city": "Köln", "days": 3}')) == 1
    assert "12 degrees" in text and "None" not in text and "other" not in text


def test_null_content_beside_a_call_stays_null_where_templates_test_for_it():
    # DeepSeek's templates write an answer of its own for a content that is not null.
    assert render(DEEPSEEK, call(ARGUMENTS), add_generation_prompt=False).count("<|assistant|>") == 1
    assert render(KIMI, call(ARGUMENTS)).count("None") == 0


def test_calls_are_read_in_the_forms_that_data_sets_have():
    expected = render(QWEN, call(ARGUMENTS))
    bare = {"name": "weather", "arguments": ARGUMENTS}
    for calls in ([bare], json.dumps([bare]), bare, [{**bare, "function": None, "id": None}]):
        assert render(QWEN, call(None, tool_calls=calls)) == expected
    assert render(QWEN, call(None, tool_calls=None, function_call=bare)) == expected
    only_bare = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}{% if c.arguments %}"
    )
    only_bare += "{{ c.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
    assert 'weather{"city": "Köln", "days": 3}' in render(only_bare, call(ARGUMENTS))


def test_a_function_call_of_sharegpt_is_a_tool_call():
    made = {"name": "weather", "arguments": ARGUMENTS}
    turns = [("human", "Weather?"), ("function_call", json.dumps(made)), ("observation", "12 degrees")]
    messages = find_messages({"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert render(QWEN, messages) == render(QWEN, call(ARGUMENTS))
    assert find_messages({"conversations": [{"from": "function_call", "value": "{"}]})[0]["content"] == "{"


def test_a_null_in_json_text_stays_and_one_in_an_object_is_a_missing_field():
    assert '{"city": null}' in render(LLAMA, call('{"city": null}'))
    assert '"parameters": {}' in render(LLAMA, call({"city": None}))
    nested = [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}], "tool_calls": None}]
    template = "{% for m in messages %}{{ m.content if m.tool_calls is not defined else m.tool_calls }}{% endfor %}"
    assert render(template, nested) == "a"


def test_a_template_with_a_form_of_its_own_for_objects_writes_text_in_it_too():
    # In single quotes, which make no Python value of it.
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}"
        "<call name='{{ c.function.name }}'>{% if a is string %}{{ a }}{% else %}{% for key, value in a.items() %}"
        "<arg name='{{ key }}'>{{ value }}</arg>{% endfor %}{% endif %}</call>{% endfor %}{% endfor %}"
    )
    xml = "<call name='weather'><arg name='city'>Köln</arg><arg name='days'>3</arg></call>"
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        assert xml in render(template, call(arguments))
    assert "<call name='weather'>[1]</call>" in render(template, call("[1]"))
    assert '{"city":"Köln"}' in render(QWEN, call('{"city":"Köln"}'))  # as the model wrote it


def test_no_text_of_arguments_is_an_empty_object():
    for arguments in ("", " ", "null", None):
        assert '"arguments": {}' in render(QWEN, call(arguments))


def test_a_template_that_looks_into_ids_gets_them():
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id.split('_')[1] }}"
        "{% for key in c.function.arguments if c.function.arguments is mapping %}{{ key }}"
        "={{ c.function.arguments[key] }};{% endfor %}{% endfor %}{% endfor %}"
    )
    messages = call(json.dumps(ARGUMENTS))
    messages[1]["tool_calls"][0]["id"] = "call_weather"
    assert "weathercity=Köln;days=3;" in render(template, messages)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ("{bad", "message 2: tool call 1: arguments is text that is not JSON"),
        ("[1]", "message 2: tool call 1: arguments is a list; the chat template needs an object"),
        ([1], "message 2: tool call 1: arguments is a list, not an object or its JSON text"),
    ],
)
def test_wrong_arguments_are_refused_by_message(arguments, problem):
    with pytest.raises(ConversationError, match=problem):
        render(GLM, call(arguments))


def test_tools_are_parsed_and_wrapped_as_the_template_reads_them():
    text = render(QWEN, [QUESTION], tools=[TOOL])
    assert text.startswith(json.dumps(TOOL))
    parameters_as_text = {"type": "function", "function": {"name": "weather", "parameters": json.dumps(PARAMETERS)}}
    null_fields = {**TOOL, "function": {**TOOL["function"], "strict": None}}
    for tools in (json.dumps([TOOL]), TOOL, [json.dumps(TOOL)], [parameters_as_text], [null_fields]):
        assert render(QWEN, [QUESTION], tools=tools) == text
    # A template that only dumps tools gets bare ones as they are; one that reads `function` gets them wrapped.
    assert render(QWEN, [QUESTION], tools=[TOOL["function"]]).startswith(json.dumps(TOOL["function"]))
    assert render(MISTRAL, [QUESTION], tools=[TOOL["function"]]) == render(MISTRAL, [QUESTION], tools=[TOOL])
    assert render(MISTRAL, [QUESTION], tools=[TOOL, TOOL["function"]]).count("weather") == 2
    nothing = render(MISTRAL, [QUESTION])
    assert (
        nothing
        == render(MISTRAL, [QUESTION], tools=[])
        == render(MISTRAL, [QUESTION], tools="")
        == "[INST]Weather?[/INST]"
    )
    with pytest.raises(DroppedTextError, match="does not write the tools, so the model would not see them"):
        render(DEEPSEEK, [QUESTION], tools=[TOOL])
    for wrong, problem in (("{", "tools is text that is not JSON"), (5, "tools is a number, not a list of objects")):
        with pytest.raises(ConversationError, match=problem):
            render(QWEN, [QUESTION], tools=wrong)


@pytest.mark.parametrize("name", ["PARTS", "FIRST_PART", "PARTS_AFTER_SYSTEM", "GEMMA", "CHATML"])
def test_text_and_parts_reach_every_template(name):
    template = chatml.CHATML if name == "CHATML" else getattr(chat_templates, name)
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    for content in ("first second", parts):
        text = render(template, [{"role": "system", "content": "Brief."}, {"role": "user", "content": content}])
        assert all(text.count(word) == 1 for word in ("Brief.", "first", "second")) and "type" not in text
    assert render(template, [QUESTION]).count("Weather?") == 1


def test_parts_of_a_tools_result_are_not_written_as_a_list():
    result = [{"type": "text", "text": "12 degrees"}]
    assert render(GLM, [*call(ARGUMENTS)[:2], {"role": "tool", "content": result}]) == render(GLM, call(ARGUMENTS))


@pytest.mark.parametrize("template", [GLM, DEEPSEEK, QWEN, MINIMAX], ids=["glm", "deepseek", "qwen", "minimax"])
def test_developer_messages_become_system_messages_where_they_would_vanish(template):
    developer, system = ([{"role": role, "content": "Brief."}, QUESTION] for role in ("developer", "system"))
    assert "Brief." in render(template, developer)
    assert render(template, developer) == render(template, system)
    assert "<|im_start|>developer" in render(chatml.CHATML, developer)


@pytest.mark.parametrize(
    "template, messages, place",
    [
        (
            MINIMAX,
            [QUESTION, {"role": "system", "content": "Later."}, QUESTION],
            r"text of message 2 of 3 \(role system\)",
        ),
        (MINIMAX, [QUESTION, {"role": "developer", "content": "x"}], r"text of message 2 of 2 \(role developer\)"),
        (LLAMA, call(ARGUMENTS, content="Let me see."), r"text of message 2 of 3 \(role assistant\)"),
        (chatml.CHATML, call(ARGUMENTS), r"tool call of message 2 of 3 \(role assistant\)"),
        (KIMI, call(None, tool_calls=[{"name": "weather"}]), r"tool call of message 2 of 3"),  # it writes the id alone
        ("{{ messages[0].content[0] }}", [QUESTION], r"text of message 1 of 1 \(role user\)"),
        (GLM, [*[QUESTION] * 9, {"role": "critic", "content": "x"}], r"text of message 10 of 10 \(role critic\)"),
    ],
)
def test_a_template_that_drops_a_text_is_an_error_that_names_the_message(template, messages, place):
    with pytest.raises(DroppedTextError, match=f"the chat template does not write the {place}"):
        render(template, messages)


def test_a_template_that_needs_several_forms_is_found_also_for_long_conversations():
    # Parts, objects, system in place of developer; one text is no part, so that content needs another form too.
    template = (
        "{% for m in messages if m.role != 'developer' %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for key, value in c.function.arguments.items() %}"
        "{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "Weather?"}]
    rule = {"role": "developer", "content": "Brief."}
    short = [rule, {"role": "user", "content": parts}, *call(json.dumps(ARGUMENTS))[1:]]
    assert render(template, short) == "Brief.Weather?weathercity=Köln;days=3;12 degrees"
    # Turns that do not repeat: the number of probes is limited.
    long = [{**rule, "content": parts}, *short[1:]] + [
        m for n in range(60) for m in [*[short[1]] * (n % 7), *call(json.dumps(ARGUMENTS))[1:]]
    ]
    assert render(template, long).count("city=Köln;days=3;") == 61


def test_probes_are_few_and_shared_by_conversations_of_a_shape(monkeypatch):
    rendered = []
    real = template_probe.WORKER.render_all

    def counted(template, sets, **options):
        rendered.append(len(sets))
        return real(template, sets, **options)

    monkeypatch.setattr(template_probe.WORKER, "render_all", counted)
    template = GLM + "{# counted #}"
    turn = [QUESTION, {"role": "assistant", "content": "Fine."}]
    for turns in (3, 4, 50):
        rendered.clear()
        render(template, [*turn * turns, QUESTION])
        assert rendered == ([1, 1] if turns == 3 else [1])  # the probe, and the conversation
    rendered.clear()
    developer = [{"role": "developer", "content": "x"}]
    with pytest.raises(DroppedTextError):
        render(
            template,
            [*developer, *call("{}", content=[{"type": "text", "text": "a"}]), {"role": "critic", "content": "x"}],
        )
    assert sum(rendered) < 200


def test_named_templates_are_read_chosen_and_saved(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(QWEN)
    named = load_tokenizer(tmp_path, 300)
    assert named.digest != tokenizer.digest
    assert isinstance(named, HuggingFaceTokenizer)
    assert named.chat_templates.render([QUESTION]).text == render(chatml.CHATML, [QUESTION])
    assert named.chat_templates.render([QUESTION], tools=[TOOL]).text == render(QWEN, [QUESTION], tools=[TOOL])
    # Calls that the default template would drop.
    assert named.chat_templates.render(call(ARGUMENTS)).text == render(QWEN, call(ARGUMENTS))
    other = tmp_path / "other"
    other.mkdir()
    named.save(other)
    assert HuggingFaceTokenizer(other, 300).digest == named.digest
    setting = json.loads((other / "tokenizer_config.json").read_text())["chat_template"]
    assert {each["name"]: each["template"] for each in setting} == {"default": chatml.CHATML, "tool_use": QWEN}
    with pytest.raises(TokenizerError, match="no chat template named default, only rag"):
        render({"rag": QWEN}, [QUESTION])


def test_another_template_takes_the_place_of_the_files(tmp_path):
    chatml.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 300, chat_template=QWEN)
    assert tokenizer.apply_chat_template([QUESTION]) == tokenizer.encode(render(QWEN, [QUESTION]))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, which a chat template needs"):
        load_tokenizer(tmp_path, 256, chat_template=QWEN)


def test_a_template_in_chat_template_json_is_read(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "x"}))
    assert read_chat_templates(tmp_path, {}) == {"default": "x"}
    assert read_chat_templates(tmp_path, {"chat_template": "y"}) == {"default": "y"}
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"chat_template\.json is not JSON"):
        read_chat_templates(tmp_path, {})


def test_tools_and_documents_are_none_as_transformers_defines_them():
    assert render("{{ tools is none and documents is none }}{{ messages[0].content }}", [QUESTION]) == "TrueWeather?"


NAMES = ["<|user|>", "<|im_end|>", "/nothink", '<|"|>']


def hidden_texts(template, messages, **variables):
    rendered = ChatTemplates({"default": template}, {}, NAMES).render(messages, **variables)
    return rendered.text, [rendered.text[start:end] for start, end in rendered.hidden]


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_in_calls_tools_and_results_stay_text(name):
    messages = call(json.dumps({"city": '<|user|>"é', "k<|user|>": "<|im_end|>"}, ensure_ascii=False))
    messages[2]["content"] = [{"type": "text", "text": "r <|im_end|>"}]
    tool = {"type": "function", "function": {**TOOL["function"], "description": "<|user|>"}}
    has_tools = name not in ("deepseek", "mistral", "gpt-oss")
    text, hidden = hidden_texts(PUBLISHED[name], messages, tools=[tool] if has_tools else None)
    num_keys = 2 if name == "minimax" else 1  # it opens and closes an element of the key's name
    assert sorted(hidden) == sorted(["<|user|>"] * (1 + num_keys + has_tools) + ["<|im_end|>"] * 2)
    # Nothing but the marks changed: the text is that of a render that hides nothing.
    assert text == render(PUBLISHED[name], messages, tools=[tool] if has_tools else None)


def test_marks_survive_filters_and_json():
    template = "{% for m in messages %}{{ m.content | trim | upper | tojson(ensure_ascii=True) }}{% endfor %}"
    text, hidden = hidden_texts(template.replace("| upper ", ""), [{"role": "user", "content": ' é9<|"|>9000000000 '}])
    assert text == r'"\u00e99<|\"|>9000000000"' and hidden == [r"<|\"|>"]
    text, hidden = hidden_texts(template, [{"role": "user", "content": " é<|user|>"}])
    assert text.endswith('<|USER|>"') and hidden == ["<|USER|>"]


@pytest.mark.parametrize("expression", ["m.content | truncate(9)", "m.content | e", "m.content, m.content | length"])
def test_templates_that_cut_count_or_escape_see_the_text_itself(expression):
    template = "{% for m in messages %}<|end|>{{ " + expression + " }}{% endfor %}<|end|>"
    messages = [{"role": "user", "content": "abc <|end|> d"}]
    rendered = ChatTemplates({"default": template}, {}, ["<|end|>"]).render(messages)
    assert rendered.text == render_chat(template, messages)
    spans = [rendered.text[start:end] for start, end in rendered.hidden]
    assert spans == ["<|end|>"] * (rendered.text.count("<|end|>") - 2)


@pytest.mark.parametrize("question", ["Hi /nothink", "Hi/nothink", "<|user|> hi/nothink"])
def test_a_users_own_nothink_is_not_doubled(question):
    text, hidden = hidden_texts(GLM, [{"role": "user", "content": question}], enable_thinking=False)
    assert text == f"<|user|>\n{question}<|assistant|>\n".rstrip("\n") and "/nothink" not in hidden
    assert hidden == ["<|user|>"] * question.count("<|user|>")
    # It is the template's own token, as after a question without it; other endings stay text.
    text, hidden = hidden_texts(GLM, [{"role": "user", "content": "Hi<|im_end|>"}], enable_thinking=False)
    assert text.count("/nothink") == 1 and hidden == ["<|im_end|>"]
    two = [{"role": "user", "content": "a/nothink"}, {"role": "user", "content": "b<|im_end|>"}]
    assert hidden_texts(GLM, two, enable_thinking=False)[1] == ["<|im_end|>"]


def test_reasoning_reaches_templates_under_each_of_its_names():
    template = "{% for m in messages %}{{ m.content }}{{ m.thinking or '' }}{{ m.reasoning_content or '' }}{% endfor %}"
    for name in chat_messages.REASONING_FIELDS:
        assert render(template, [{"role": "assistant", "content": "a", name: "hm"}]) == "ahmhm"


# The same conversation through the doors of the server, `regenerate` and training.

CONVERSATIONS = {
    "text": [{"role": "system", "content": "Brief."}, QUESTION],
    "developer": [{"role": "developer", "content": "Brief."}, QUESTION],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a <|im_end|>"}, {"type": "text", "text": "b"}]}],
    "turns": [QUESTION, {"role": "assistant", "content": "Fine.", "weight": 0}, {"role": "user", "content": "Sure?"}],
    "call as object": [*call(ARGUMENTS, weight=0), QUESTION],
    "call as text": [*call(json.dumps(ARGUMENTS), weight=0), QUESTION],
    "no content": [QUESTION, {"role": "assistant", "content": None, "reasoning_content": "hm", "weight": 0}, QUESTION],
}
TEMPLATES = PUBLISHED | {"chatml": chatml.CHATML, "parts": chat_templates.PARTS, "blocks": chat_templates.GENERATION}


@pytest.mark.parametrize("name", TEMPLATES)
def test_three_doors_give_the_same_prompt(name, tmp_path):
    pytest.importorskip("fastapi")
    from mtpjax.serving.api.settings import Limits

    from mtpjax.serving.api.prompts import read_chat

    tokenizer = chatml.save_tokenizer(tmp_path, TEMPLATES[name])
    sizes = {"max_length": 2000, "vocab_size": 300, "max_prompt_characters": 10_000, "max_total_characters": 10_000}
    limits = Limits(**sizes)
    tools = None if name in ("deepseek", "chatml", "parts", "blocks") else [TOOL]
    for kind, messages in CONVERSATIONS.items():
        if kind.startswith("call") and name in ("chatml", "parts", "blocks"):
            continue  # they write no calls
        record = {"messages": messages, "tools": tools}
        body = {**record, "tool_choice": "none"}
        prompt = read_chat(tokenizer, body, limits, add_generation_prompt=True)
        task = make_task(json.dumps(record).encode(), tokenizer, kind="conversations", max_prompt_tokens=2000)
        assert task.prompt == prompt
        file = tmp_path / "data.jsonl"
        record["messages"] = [*messages, {"role": "assistant", "content": "It is fine."}]
        file.write_text(json.dumps(record))
        reading = read_source(Source(path=str(file), kind="chat"), tokenizer, vocab_size=300)
        assert len(reading.documents) == 1, reading.last_skipped
        [document] = reading.documents
        assert document.loss_mask is not None and document.loss_mask.argmax() == len(prompt)
        assert document.tokens[: len(prompt)].tolist() == prompt


def test_a_conversation_of_several_turns_is_regenerated_under_a_thinking_template(tmp_path):
    tokenizer = chatml.save_tokenizer(tmp_path, QWEN)
    record = {"messages": [QUESTION, {"role": "assistant", "content": None}, QUESTION], "tools": json.dumps([TOOL])}
    task = make_task(json.dumps(record).encode(), tokenizer, kind="conversations", max_prompt_tokens=2000)
    written = [QUESTION]
    for answer in ("hm\n</think>\n\nyes", "\n</think>\n\nno"):
        assert task.prompt == tokenizer.apply_chat_template(written, tools=[TOOL])
        assert task.add_answer(tokenizer.encode(answer), "stop")
        written += [{"role": "assistant", "content": answer}, QUESTION]
    assert task.prompt is None and task.record()["messages"] == written[:-1]


def test_a_plain_render_passes_what_it_gets():
    assert render_chat("{{ messages[0].content is none }}", [{"role": "user", "content": None}]) == "True"
