"""Decides the forms in which a chat template reads messages, by trying them on probe messages.

Templates differ in what they read: arguments of tool calls as an object or as text, content as text or as parts, and so
on. Content that a template does not read often vanishes without an error. So a conversation's shape is first rendered
with a unique word in place of each text, and a form is right if every word reaches the prompt.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mtpjax.data.chat_messages import Forms, in_forms, text_of
from mtpjax.data.template_worker import WORKER, Rendered, TemplateFailure
from mtpjax.errors import DroppedTextError, printable

MAX_PERIOD = 6  # messages of a repeated turn, such as question, call, result, answer
MAX_PROBES, MAX_PROBE_MESSAGES = 128, 4096  # renderings of a shape in one step, and messages in all of them
PROBES_AT_ONCE = 32
MAX_STEPS = 3
MAX_CALLS = MAX_PARTS = 2  # probe calls, and parts of content, of one message
SYSTEM_ROLES = ("system", "developer")
CALL_ID = "probecall"  # Mistral's templates require nine characters


class Choice(NamedTuple):
    """The outcome of the probes of one shape.

    Attributes:
        forms: the forms to use.
        lost: index of the message whose text does not reach the prompt in any form, or -1 for the tools.
        problem: what is lost; "": nothing.
    """

    forms: Forms
    lost: int = 0
    problem: str = ""


class _Probe(NamedTuple):
    """A conversation's shape, with a unique word in place of each text, and the template that renders it."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]

    def render(self, candidates: Sequence[Forms]) -> Iterator[tuple[Rendered | TemplateFailure, list[dict[str, Any]]]]:
        """Renders in each form. Yields the text, and the messages as the template got them."""
        shaped = [in_forms(self.messages, self.tools, forms) for forms in candidates]
        sets = [{**self.variables, "messages": each, "tools": its_tools} for each, its_tools in shaped]
        results = WORKER.render_all(self.template, sets)
        return zip(results, (messages for messages, _ in shaped), strict=True)


class _Problem(NamedTuple):
    """The rank of a rendered probe: 0 right, 1 quoted twice or as a Python value, 2 something is missing, 3 failed."""

    rank: int
    lost: int = 0
    what: str = ""


def choose_forms(
    template: str, messages: Sequence[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any]
) -> Forms:
    """Finds the forms in which a template reads a conversation.

    Probes are cached by the template and the shape of the conversation: roles, and which fields the messages have. A
    turn that repeats counts as two.

    If the template fails on every probe, these are the usual forms: it then fails on the messages too, or it looks at
    their text.

    Raises:
        DroppedTextError: the template writes the conversation without the text of a message, without a tool call or
            without the tools, in every form.
    """
    kept = _without_repetitions(list(map(_shape, messages)))
    probe = [_probe_message(messages[index], number) for number, index in enumerate(kept)]
    probe_tools = None
    if tools is not None:
        kinds = {_tool_kind(tool): tool for tool in tools}
        probe_tools = [_probe_tool(kinds[kind], number) for number, kind in enumerate(sorted(kinds))]
    choice = _choose(template, json.dumps([probe, probe_tools, variables], sort_keys=True))
    if choice is None or choice.problem == "tool call":
        # Some templates look into the ids of tool calls, so try again with the conversation's own.
        probe = [_probe_message(messages[index], number, own_ids=True) for number, index in enumerate(kept)]
        choice = _choose(template, json.dumps([probe, probe_tools, variables], sort_keys=True))
    if choice is None:
        # The template fails on the messages too, or it looks at their text. Fewer templates fail on an empty text than
        # on null.
        return Forms(empty="text")
    if choice.problem:
        if choice.lost < 0:
            raise DroppedTextError(
                "the chat template does not write the tools, so the model would not see them; put them into a system"
                " message, or leave them out",
                -1,
            )
        index = kept[choice.lost]
        place = f"message {index + 1} of {len(messages)} (role {printable(messages[index]['role'], 40)})"
        raise DroppedTextError(
            f"the chat template does not write the {choice.problem} of {place}, so the model would not see it", index
        )
    return choice.forms


@functools.lru_cache(maxsize=1024)
def _choose(template: str, probe_text: str) -> Choice | None:
    """Tries the usual forms, and the others only if those are wrong. None: the template fails on all."""
    probe = _Probe(template, *json.loads(probe_text))
    choices = _choices(probe.messages, probe.tools)
    best = Forms()
    tried: dict[Forms, _Problem] = {}
    badness = lambda forms: (tried[forms].rank, -tried[forms].lost)
    # If every form loses something, the one that loses it latest is closest: further changes start from there.
    for _ in range(MAX_STEPS):
        candidates = [each for each in _candidates(choices, best, len(probe.messages)) if each not in tried]
        # The first form is right for most; the others follow in requests that stay within the time limit.
        for start, end in itertools.pairwise([0, 1, *range(1 + PROBES_AT_ONCE, len(candidates), PROBES_AT_ONCE), None]):
            part = candidates[start:end]
            tried |= zip(part, _try(part, probe), strict=True)
            if min(problem.rank for problem in tried.values()) == 0:
                break
        before, best = best, min(tried, key=badness)
        if tried[best].rank == 0 or best == before:
            break
    problem = tried[best]
    if problem.rank < 2:
        return Choice(_with_objects(best, probe))
    if problem.rank == 3:
        return None
    return Choice(best, problem.lost, problem.what)


def _with_objects(forms: Forms, probe: _Probe) -> Forms:
    """Gives arguments as objects to a template that reads both forms, if it then writes them differently.

    Such a template has a separate form for objects (such as XML), and would copy JSON text unchanged.
    """
    calls = [call for message in probe.messages for call in message.get("tool_calls", ())]
    if forms.arguments != "given" or not any(isinstance(call["function"]["arguments"], str) for call in calls):
        return forms
    as_objects = dataclasses.replace(forms, arguments="object or text")
    (as_given, _), (result, shaped) = probe.render((forms, as_objects))
    if isinstance(result, TemplateFailure) or result == as_given:
        return forms
    return forms if _judge(result, probe, shaped).rank else as_objects


def _choices(messages: list[dict[str, Any]], tools: list[Any] | None) -> dict[str, list[Any]]:
    """Returns the values of each field of `Forms` that may make a difference, the usual one first."""
    roles = {message["role"] for message in messages}
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    has_empty = any("content" not in message for message in messages)
    groups = [group for group in (SYSTEM_ROLES, ("tool",), (*SYSTEM_ROLES, "tool")) if roles.intersection(group)]
    return {
        "content": ["given", "text", "parts", "one part"] if has_parts else ["given", "parts"],
        "text_roles": [(), *groups],
        "arguments": ["given", "object", "text"] if calls else ["given"],
        "empty": ["usual", "text", "null", "absent"] if has_empty else ["usual"],
        "developer": ["developer", "system"] if "developer" in roles else ["developer"],
        "calls": ["wrapped", "bare"] if calls else ["wrapped"],
        "tools": ["given", "wrapped", "bare"] if tools else ["given"],
    }


def _candidates(choices: dict[str, list[Any]], first: Forms, num_messages: int) -> list[Forms]:
    """Returns forms, `first` and those nearest to it."""
    usual = [getattr(first, name) for name in choices]
    products = sorted(
        itertools.product(*choices.values()),
        key=lambda values: sum(value != other for value, other in zip(values, usual, strict=True)),
    )
    # A client must not be able to cause many renderings of many messages. Each single change is tried.
    count = max(1, min(MAX_PROBES, MAX_PROBE_MESSAGES // max(1, num_messages)) - 1)
    count = 1 + max(count, sum(len(values) - 1 for values in choices.values()))
    return [Forms(**dict(zip(choices, values, strict=True))) for values in products[:count]]


def _try(candidates: list[Forms], probe: _Probe) -> list[_Problem]:
    return [
        _Problem(3) if isinstance(result, TemplateFailure) else _judge(result, probe, shaped)
        for result, shaped in probe.render(candidates)
    ]


def _judge(result: Rendered, probe: _Probe, shaped: list[dict[str, Any]]) -> _Problem:
    """Checks that everything in a probe reached the text in a correct form.

    `shaped` are the messages as the template got them.
    """
    text = result.text.casefold()
    if any(_word("tool", number) not in text for number in range(len(probe.tools or ()))):
        return _Problem(2, -1, "tools")
    words = []
    for index, message in enumerate(probe.messages):
        if any(word not in text for word in text_of(message.get("content")).split()):
            return _Problem(2, index, "text")
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            words += arguments
            # Some templates write only the id, which contains the name (Kimi's).
            is_named = name in text or ("id" in call and (call["id"] != CALL_ID or CALL_ID in text))
            if not is_named or any(word not in text for word in (*arguments, *arguments.values())):
                return _Problem(2, index, "tool call")
    nulls = [index for index, each in enumerate(shaped) if each.get("content", "") is None]
    if nulls and "None" in result.text:
        return _Problem(2, nulls[0], "missing content")
    # A part that was written with its field names is not read as a part.
    if part := re.search(r"""['"]text\\?['"]: ?\\?['"]xqtext(\d+)p""", text):
        return _Problem(2, int(part[1]), "text")
    # A key in single quotes or after a backslash belongs to a Python value, or to JSON text that was quoted again.
    return _Problem(int(any(f"'{word}':" in text or f'\\"{word}' in text for word in words)))


def _probe_message(message: dict[str, Any], number: int, *, own_ids: bool = False) -> dict[str, Any]:
    """Returns a message with the same fields, whose texts are unique words."""
    probe: dict[str, Any] = {"role": message["role"]}
    if "content" in message:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content[:MAX_PARTS]]
        words = [_word("text", f"{number}p{n}") if text.strip() else "" for n, text in enumerate(texts)]
        probe["content"] = words[0] if isinstance(content, str) else [{"type": "text", "text": w} for w in words]
    for name in ("reasoning_content", "thinking", "name"):
        if name in message:
            probe[name] = _word(name.replace("_", ""), number)
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"][:MAX_CALLS])
        probe["tool_calls"] = [
            _probe_call(call, f"{number}p{n}", call.get("id") if own_ids else CALL_ID) for n, call in calls
        ]
    if "tool_call_id" in message:
        probe["tool_call_id"] = message["tool_call_id"] if own_ids else CALL_ID
    return probe


def _probe_call(call: dict[str, Any], number: str, call_id: Any) -> dict[str, Any]:
    given = call["function"]["arguments"]
    arguments: Any = {_word("key", number): _word("value", number)} if given not in ({}, "", "{}") else {}
    arguments = json.dumps(arguments) if isinstance(given, str) else arguments
    function = {"name": _word("call", number), "arguments": arguments}
    return {**({"id": call_id} if "id" in call else {}), "type": "function", "function": function}


def _tool_kind(tool: Any) -> str:
    return "text" if not isinstance(tool, dict) else "wrapped" if isinstance(tool.get("function"), dict) else "bare"


def _probe_tool(tool: Any, number: int) -> Any:
    word = _word("tool", number)
    if not isinstance(tool, dict):
        return word
    properties = {"a": {"type": "string", "description": "b"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    function = {"name": word, "description": word, "parameters": parameters}
    return {"type": "function", "function": function} if _tool_kind(tool) == "wrapped" else function


def _shape(message: dict[str, Any]) -> str:
    return json.dumps(_probe_message(message, 0), sort_keys=True)


def _without_repetitions(shapes: list[str]) -> list[int]:
    """Returns the indices of the messages without those of a turn that repeats more than twice in a row."""
    kept: list[int] = []
    names: list[str] = []
    for index, shape in enumerate(shapes):
        kept.append(index)
        names.append(shape)
        for period in range(1, MAX_PERIOD + 1):
            last, before, first = names[-period:], names[-2 * period : -period], names[-3 * period : -2 * period]
            if len(first) == period and last == before == first:
                del kept[-period:], names[-period:]
                break
    return kept


def _word(kind: str, number: int | str) -> str:
    return f"xq{kind}{number}qx"
