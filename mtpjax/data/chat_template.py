"""Renders conversations with a checkpoint's chat templates.

The server, `regenerate`, `generate` and training all use this module, so they see the same prompts.

Templates expect different forms of their inputs. For example, tool call arguments may be an object or text, and content
may be text or parts. Content in the wrong form often vanishes without an error. Therefore, a conversation of the same
shape is rendered first, with a unique word in place of each text (`mtpjax.data.probe_messages`). A form is right if
every word appears in the prompt.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtpjax.data import probe_messages
from mtpjax.data.chat_messages import Forms, clean_messages, clean_tools, in_forms, text_of
from mtpjax.data.hidden_text import HiddenText, RenderedChat
from mtpjax.data.template_worker import WORKER, Rendered, TemplateFailure
from mtpjax.data.tokenizer_files import DEFAULT_TEMPLATE, MAX_TEMPLATE_CHARACTERS
from mtpjax.errors import ConversationError, DroppedTextError, TokenizerError, printable

MAX_MESSAGES = 10_000
MAX_PROBES, MAX_PROBE_MESSAGES = 128, 4096  # per search step: maximum numbers of renderings and of rendered messages
PROBES_AT_ONCE = 32
MAX_STEPS = 3
SYSTEM_ROLES = ("system", "developer")
MISSING, FAILED = 2, 3  # values of `_Problem.rank`
TOOL_USE = "tool_use"


class ChatTemplates:
    """A checkpoint's chat templates, by name.

    Args:
        templates: jinja2 sources; a conversation uses "tool_use" if it has tools, else "default".
        variables: the special tokens that templates may write, such as `bos_token`.
        special_names: all special tokens, which remain plain text where a user or a tool writes them.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], special_names: Sequence[str]):
        self.templates, self._variables, self._special_names = dict(templates), dict(variables), list(special_names)

    @property
    def setting(self) -> Any:
        """These templates in the format of the `chat_template` value in a `tokenizer_config.json`."""
        if list(self.templates) in ([], [DEFAULT_TEMPLATE]):
            return self.templates.get(DEFAULT_TEMPLATE)
        return [{"name": name, "template": template} for name, template in self.templates.items()]

    def reads(self, name: str) -> bool:
        """Returns whether a template uses a variable."""
        return any(re.search(rf"\b{name}\b", template) for template in self.templates.values())

    def render(
        self, messages: Sequence[Any], *, tools: Any = None, with_generation: bool = False, **variables: Any
    ) -> RenderedChat:
        """Renders a conversation.

        Null fields are dropped. Rendering probe messages of the same shape decides the form of the template's inputs,
        such as whether tool call arguments are objects or JSON text, and which role developer messages have.

        Args:
            **variables: other template variables, such as `enable_thinking`. If `strftime_now` is a date, the template
                uses it as today's date.
        """
        _check_size("", messages)
        messages, tools = clean_messages(messages), clean_tools(tools)
        # transformers always defines these two, and some templates rely on it.
        variables = {**self._variables, "documents": None, "add_generation_prompt": True, **variables}
        # If there are tool calls but no list of tools, try the default template first, as transformers does.
        names = [TOOL_USE, DEFAULT_TEMPLATE] if tools is not None else [DEFAULT_TEMPLATE]
        names = [name for name in names if name in self.templates][:1]
        has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        names += [TOOL_USE] if has_calls and TOOL_USE in self.templates and names != [TOOL_USE] else []
        if not names:
            others = ", ".join(printable(name, 40) for name in self.templates)
            raise TokenizerError(
                f"the checkpoint has no chat template '{DEFAULT_TEMPLATE}', only {others}"
                if others
                else "the checkpoint has no chat template"
            )
        for name in names:
            try:
                return self._render(self.templates[name], messages, tools, variables, with_generation)
            except ConversationError:
                if name == names[-1]:
                    raise
        raise AssertionError("a template was tried")

    @functools.cached_property
    def generation_prompt(self) -> str:
        """The text that the template writes before an answer, or "" if there is none."""
        question = [{"role": "user", "content": "a"}]
        before = self.render(question, add_generation_prompt=False).text
        prompt = self.render(question).text
        return prompt.removeprefix(before) if prompt.startswith(before) else ""

    def _render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: dict[str, Any],
        with_generation: bool,
    ) -> RenderedChat:
        _check_size(template, messages)
        # 1. Find the forms in which the template reads messages, by rendering probe messages with the same roles and
        # fields as this conversation.
        others = {name: value for name, value in variables.items() if name != "strftime_now"}
        forms = _with_errors(lambda: choose_forms(template, messages, tools, others))

        def render(messages: list[dict[str, Any]], tools: list[Any] | None, with_generation: bool = False) -> Rendered:
            messages, tools = in_forms(messages, tools, forms)
            return _render_once(template, messages, {**variables, "tools": tools}, with_generation)

        # 2. Render the conversation unchanged, and again with marks in place of untrusted special tokens.
        plain = render(messages, tools, with_generation)
        hidden = HiddenText(self._special_names, [messages, tools], template)
        hidden_tools = hidden.hide_value(tools)
        without = hidden.hide(messages)
        if not hidden.texts:
            return RenderedChat(plain.text, [], plain.generation)
        marked = render(without, hidden_tools).text
        # 3. Find the marks. A template that inspects the text may write it differently. For example, GLM's template
        # adds `/nothink` to a message unless the user already wrote it. The user's text then counts as that token.
        spans = hidden.find(marked, plain.text)
        if spans is None:
            alike = HiddenText(self._special_names, None, "", keep_length=True)
            shown = render(alike.hide(messages), alike.hide_value(tools)).text
            spans = alike.find_alike(shown, plain.text)
        restored, restored_spans = hidden.restore(marked)
        for ending in hidden.endings(messages) if spans is None else ():
            if restored.count(ending) > plain.text.count(ending) > 0:
                marked = render(hidden.hide(messages, keep_ending=ending), hidden_tools).text
                spans = spans or hidden.find(marked, plain.text)
        if spans is None:
            return RenderedChat(restored, restored_spans)
        return RenderedChat(plain.text, spans, plain.generation)


def _check_size(template: str, messages: Sequence[Any]) -> None:
    for count, limit, what in (
        (len(template), MAX_TEMPLATE_CHARACTERS, "characters in the chat template"),
        (len(messages), MAX_MESSAGES, "messages"),
    ):
        if count > limit:
            raise ConversationError(f"{count} {what}: at most {limit} are allowed")


def _render_once(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any], with_generation: bool
) -> Rendered:
    variables = {"messages": messages, **variables}
    date = variables.pop("strftime_now", None)

    def render() -> Rendered:
        [result] = WORKER.render_all(template, [variables], date=date, with_generation=with_generation)
        if isinstance(result, TemplateFailure):
            raise result
        return result

    return _with_errors(render)


def _with_errors(function: Callable[[], Any]) -> Any:
    """Calls a rendering function, and converts its failures to user-facing errors."""
    try:
        return function()
    except TemplateFailure as error:
        # A template that does not compile is a tokenizer error. A failure on these messages is a conversation error.
        kind = TokenizerError if error.is_template else ConversationError
        raise kind(f"the chat template failed: {error}") from error
    except ConversationError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"the chat template failed: a variable has no JSON form: {error}") from error


class _Probe(NamedTuple):
    """A conversation's shape, with a unique word in place of each text, and the template that renders it."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]

    def render(self, candidates: Sequence[Forms]) -> Iterator[tuple[Rendered | TemplateFailure, list[dict[str, Any]]]]:
        """Renders the probe in each form. Yields each result, and the messages as the template received them."""
        shaped = [in_forms(self.messages, self.tools, forms) for forms in candidates]
        sets = [{**self.variables, "messages": each, "tools": its_tools} for each, its_tools in shaped]
        results = WORKER.render_all(self.template, sets)
        return zip(results, (messages for messages, _ in shaped), strict=True)


class _Problem(NamedTuple):
    """The worst problem of a rendered probe.

    Attributes:
        rank: 0 for no problem, 1 for arguments quoted twice or written as Python values, `MISSING`, or `FAILED`.
        lost: index of the message whose text is missing from the prompt, or -1 for the tools.
        what: what is missing, such as "tool call".
    """

    rank: int
    lost: int = 0
    what: str = ""


def choose_forms(
    template: str, messages: Sequence[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any]
) -> Forms:
    """Finds the forms in which a template reads a conversation.

    Results are cached by the template and the conversation's shape, which consists of the roles and the names of the
    messages' fields. A repeated turn counts at most twice.

    If the template fails on every probe, the usual forms are returned, because the template will either fail on the
    messages too or depends on their text.

    Raises:
        DroppedTextError: in every form, the template omits the text of a message, a tool call, or the tools.
    """
    kept = probe_messages.without_repetitions(list(map(probe_messages.message_shape, messages)))
    probe = [probe_messages.probe_message(messages[index], number) for number, index in enumerate(kept)]
    probe_tools = None
    if tools is not None:
        kinds = {probe_messages.tool_kind(tool): tool for tool in tools}
        probe_tools = [probe_messages.probe_tool(kinds[kind], number) for number, kind in enumerate(sorted(kinds))]
    forms, problem = _choose(template, json.dumps([probe, probe_tools, variables], sort_keys=True))
    if problem.rank == FAILED or problem.what == "tool call":
        # Some templates inspect tool call ids, so try again with the conversation's ids.
        probe = [probe_messages.probe_message(messages[index], n, own_ids=True) for n, index in enumerate(kept)]
        forms, problem = _choose(template, json.dumps([probe, probe_tools, variables], sort_keys=True))
    if problem.rank == FAILED:
        # The template either fails on the messages too, or depends on their text. Fewer templates fail on an empty text
        # than on null.
        return Forms(empty="text")
    if problem.rank == MISSING:
        if problem.lost < 0:
            raise DroppedTextError(
                "the chat template does not write the tools, so the model would not see them; put them into a system"
                " message, or leave them out",
                -1,
            )
        index = kept[problem.lost]
        place = f"message {index + 1} of {len(messages)} (role {printable(messages[index]['role'], 40)})"
        raise DroppedTextError(
            f"the chat template does not write the {problem.what} of {place}, so the model would not see it", index
        )
    return forms


@functools.lru_cache(maxsize=1024)
def _choose(template: str, probe_text: str) -> tuple[Forms, _Problem]:
    """Tries the usual forms, and others only if these are wrong. Returns the best forms and their problem."""
    probe = _Probe(template, *json.loads(probe_text))
    choices = _choices(probe.messages, probe.tools)
    best = Forms()
    tried: dict[Forms, _Problem] = {}
    badness = lambda forms: (tried[forms].rank, -tried[forms].lost)
    # If every form loses some text, the form whose first loss is latest is the closest, so continue from that one.
    for _ in range(MAX_STEPS):
        candidates = [each for each in _candidates(choices, best, len(probe.messages)) if each not in tried]
        # The first form is right for most templates. Try the others in requests that stay within the time limit.
        for start, end in itertools.pairwise([0, 1, *range(1 + PROBES_AT_ONCE, len(candidates), PROBES_AT_ONCE), None]):
            part = candidates[start:end]
            tried |= zip(part, _try(part, probe), strict=True)
            if min(problem.rank for problem in tried.values()) == 0:
                break
        before, best = best, min(tried, key=badness)
        if tried[best].rank == 0 or best == before:
            break
    return best if tried[best].rank >= MISSING else _with_objects(best, probe), tried[best]


def _with_objects(forms: Forms, probe: _Probe) -> Forms:
    """Changes the form of arguments to objects for a template that reads both forms but writes objects differently.

    Such a template writes objects in a separate format (such as XML), and would copy JSON text unchanged.
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
    """Returns the values to try for each field of `Forms`, the usual value first."""
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
    """Returns `first` and the forms nearest to it."""
    usual = [getattr(first, name) for name in choices]
    products = sorted(
        itertools.product(*choices.values()),
        key=lambda values: sum(value != other for value, other in zip(values, usual, strict=True)),
    )
    # Limit the number, so that a client cannot cause many renderings of many messages. Always keep each single change.
    count = max(1, min(MAX_PROBES, MAX_PROBE_MESSAGES // max(1, num_messages)) - 1)
    count = 1 + max(count, sum(len(values) - 1 for values in choices.values()))
    return [Forms(**dict(zip(choices, values, strict=True))) for values in products[:count]]


def _try(candidates: list[Forms], probe: _Probe) -> list[_Problem]:
    return [
        _Problem(FAILED) if isinstance(result, TemplateFailure) else _judge(result, probe, shaped)
        for result, shaped in probe.render(candidates)
    ]


def _judge(result: Rendered, probe: _Probe, shaped: list[dict[str, Any]]) -> _Problem:
    """Checks that a rendered probe contains everything in a correct form.

    `shaped` contains the messages as the template received them.
    """
    text = result.text.casefold()
    if any(probe_messages.unique_word("tool", number) not in text for number in range(len(probe.tools or ()))):
        return _Problem(MISSING, -1, "tools")
    words = []
    for index, message in enumerate(probe.messages):
        if any(word not in text for word in text_of(message.get("content")).split()):
            return _Problem(MISSING, index, "text")
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            words += arguments
            # Some templates, such as Kimi's, write only the id, which contains the name.
            call_id = probe_messages.CALL_ID
            is_named = name in text or ("id" in call and (call["id"] != call_id or call_id in text))
            if not is_named or any(word not in text for word in (*arguments, *arguments.values())):
                return _Problem(MISSING, index, "tool call")
    nulls = [index for index, each in enumerate(shaped) if each.get("content", "") is None]
    if nulls and "None" in result.text:
        return _Problem(MISSING, nulls[0], "missing content")
    # If a part appears with its field names, the template does not read parts.
    if part := re.search(r"""['"]text\\?['"]: ?\\?['"]xqtext(\d+)p""", text):
        return _Problem(MISSING, int(part[1]), "text")
    # A key in single quotes or after a backslash belongs to a Python value, or to JSON text that was quoted again.
    return _Problem(int(any(f"'{word}':" in text or f'\\"{word}' in text for word in words)))
