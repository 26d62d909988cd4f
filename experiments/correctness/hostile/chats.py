"""Cases for chat templates, which check that everything in a conversation reaches the prompt.

A case draws a template that reads messages in the same form as some published template, and a conversation in a form
that occurs in data sets or requests. The prompt must contain every text, name and value in the conversation, in order,
without nulls and without JSON inside JSON; rejecting the conversation passes too. The text for training must start
with that prompt.
"""

import json
import pathlib
import random
from typing import Any

from experiments.correctness.hostile.streams import save_tokenizer

CONTENT = (
    "{{ message.content }}",
    "{{ (message.content or '') | trim }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
    "{% for part in message.content or [] %}{{ part.text }}{% endfor %}",
    "{% for part in message['content'] or [] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}",
    "{% if message.content %}{{ message.content[0].text }}{% endif %}",
    "{% if message.content is not none %}{{ message.content + '' }}{% endif %}",
)
ARGUMENTS = (
    "{% for name, value in call.arguments.items() %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}",
    "{% for name in call.arguments %}<{{ name }}>{{ call.arguments[name] }}</{{ name }}>{% endfor %}",
    "{% for name, value in call.arguments | items %}{{ name }}={{ value | tojson(ensure_ascii=False) }}{% endfor %}",
    "{{ call.arguments | tojson }}",
    "{{ call.arguments | tojson(ensure_ascii=False, separators=(',', ':')) }}",
    "{{ '' + call.arguments }}",
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "{% if call.arguments is mapping %}{{ call.arguments | tojson }}{% else %}{{ call.arguments }}{% endif %}",
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{% for name, value in call.arguments.items() %}"
    "<arg name='{{ name }}'>{{ value }}</arg>{% endfor %}{% endif %}",
)
CHECKS = (
    "",
    "{% if message.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    "{% if message.role == 'tool' and message.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}",
    "{% if message.role == 'user' %}({{ message.content | length }}){% endif %}",  # marks must not change the prompt
)
THOUGHTS = (
    "",
    "{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}",
)
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}{% endif %}",
    "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}",
)
FOREIGN = ("question", "value", "result", "last")
ROLES = (
    "{{ message.role }}",
    "{% if message.role == 'developer' %}system{% else %}{{ message.role }}{% endif %}",
)


def draw(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    """Draws a case: a template, messages and tools."""
    content, arguments, thoughts, tools = map(rng.choice, (CONTENT, ARGUMENTS, THOUGHTS, TOOLS))
    # Some templates skip unknown roles, mark the answers, or remove the reasoning from earlier answers.
    known = rng.choice(["", " if message.role in ['system', 'user', 'assistant', 'tool']"])
    if thoughts and rng.random() < 0.3:
        thoughts = "{% if loop.last %}" + thoughts + "{% endif %}"
    calls = (
        "{% for each in message.tool_calls or [] %}{% set call = each.function or each %}"
        "<call>{{ call.name }} " + arguments + "</call>{% endfor %}"
    )
    answer = thoughts + content + calls + "<|end|>"
    if rng.random() < 0.3:
        answer = "{% generation %}" + answer + "{% endgeneration %}"
    template = (
        f"{tools}{{% for message in messages{known} %}}{rng.choice(CHECKS)}[{rng.choice(ROLES)}]"
        "{% if message.role == 'assistant' %}" + answer + "{% else %}" + content + "{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages, texts = _conversation(rng, has_thoughts=bool(thoughts))
    case = {"action": "rendered", "template": template, "messages": messages, "texts": texts}
    description = {"name": "weather", "description": "Tells the weather of é", "parameters": {"type": "object"}}
    given = [{"type": "function", "function": description}]
    case["tools"] = rng.choice([None, given, json.dumps(given), [{**given[0], "strict": None}]])
    return {**case, "what": f"chat template {template[:60]!a}, {len(messages)} messages"}


def _conversation(rng: random.Random, *, has_thoughts: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Draws messages, and lists the texts that must reach the prompt, in order."""
    texts: list[str] = []
    in_parts, with_nulls, as_text = rng.random() < 0.3, rng.random() < 0.4, rng.random() < 0.5

    def text(name: str) -> str:
        # A user, a tool or a call may write the end token, which must stay text.
        typed = "<|end|>" if name in FOREIGN and rng.random() < 0.2 else ""
        texts.append(f"{name}{len(texts)}é {typed}{rng.choice(['a', 'b c', 'd'])}")
        return texts[-1]

    def content(name: str) -> Any:
        return [{"type": "text", "text": text(name)}] if in_parts else text(name)

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content("rule")})
    for _ in range(rng.choice([1, 2])):
        messages.append({"role": "user", "content": content("question")})
        if rng.random() < 0.6:
            value = text("value")
            arguments: Any = {"city": value, "days": 3, **rng.choice([{}, {"nested": {"list": [1.5, True, "x"]}}])}
            if with_nulls and not as_text:
                arguments["unit"] = None  # as Arrow adds the arguments of other tools
            function = {
                "name": "weather",
                "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
            }
            numbers = range(rng.choice([1, 1, 3]))
            calls = [{"id": f"call0000{n}", "type": "function", "function": function} for n in numbers]
            nothing = rng.choice([{"content": None}, {"content": ""}, {}, {"content": []}])
            messages.append({"role": "assistant", **nothing, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": f"call0000{n}", "content": content("result")} for n in numbers
            ]
        answer: dict[str, Any] = {"role": "assistant", "content": content("answer")}
        if has_thoughts and rng.random() < 0.3:
            answer["reasoning_content"] = "thought"
        messages.append(answer)
    messages.append({"role": "user", "content": content("last")})
    if with_nulls:
        messages = [{"name": None, "tool_calls": None, "reasoning_content": None, **message} for message in messages]
    return messages, texts


def rendered(case: dict[str, Any], folder: pathlib.Path) -> str | None:
    """Renders and encodes the conversation of a case.

    Args:
        case: as `draw` makes it.
        folder: an empty folder.

    Returns:
        What is wrong with the prompt, or with the text for training; None if nothing is wrong.

    Raises:
        ConversationError: the conversation is rejected.
    """
    from mtpjax.data.chat import encode_answers

    tokenizer = save_tokenizer(folder, case["template"])
    variables = {} if case["tools"] is None else {"tools": case["tools"]}
    prompt = tokenizer.apply_chat_template(case["messages"], **variables)
    text, position = tokenizer.decode(prompt), 0
    for each in case["texts"]:
        position = text.find(each, position)
        if position < 0:
            return f"{each!a} does not reach the prompt, or stands in the wrong place: {text!a:.500}"
    if "None" in text or "null" in text:
        return f"the prompt holds a null: {text!a:.500}"
    if '\\"' in text:
        return f"the prompt holds JSON inside of JSON: {text!a:.500}"
    if case["tools"] is not None and "Tells the weather of é" not in text:
        return f"the tools do not reach the prompt: {text!a:.500}"
    # The end tokens in the prompt are the ends of answers; an end token that a user wrote is not among them.
    num_answers = sum(message["role"] == "assistant" for message in case["messages"])
    if prompt.count(tokenizer.eos_token_ids[0]) != num_answers:
        return f"{prompt.count(tokenizer.eos_token_ids[0])} end tokens for {num_answers} answers: {text!a:.500}"
    # In training, the same prompt precedes its answer.
    answered = [*case["messages"], {"role": "assistant", "content": "fine"}]
    documents, _ = encode_answers(answered, tokenizer, **variables)
    ids, is_target = documents[-1]
    is_same = ids[: len(prompt)] == prompt and is_target[len(prompt)] and not is_target[len(prompt) - 1]
    return None if is_same else f"training reads another prompt: {tokenizer.decode(ids)!a:.500}"
