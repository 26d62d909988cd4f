"""The chat templates of a checkpoint: the choice for a conversation, its inputs, and the text it writes.

Server, `regenerate`, `generate` and training all render conversations here, so they see the same prompts.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtpjax.data.chat_messages import clean_messages, clean_tools, in_forms
from mtpjax.data.chat_template import choose_forms
from mtpjax.data.hidden_text import HiddenText, Spans
from mtpjax.data.template_worker import WORKER, Rendered, TemplateFailure
from mtpjax.data.tokenizer_files import read_json_object
from mtpjax.errors import ConversationError, TokenizerError, printable
from mtpjax.io.huggingface_files import read_small_file
from mtpjax.safe_open import list_chat_templates

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_MESSAGES = 10_000
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """A conversation that a chat template has written.

    Attributes:
        text: the text.
        hidden: start and end of the parts whose special tokens are only text, since a user or a tool wrote them.
        generation: start and end of the template's `{% generation %}` blocks, which mark what the model writes; None:
            the template has none, or they were not requested.
    """

    text: str
    hidden: Spans
    generation: Spans | None = None

    def pieces(self, start: int = 0) -> list[tuple[int, str, bool]]:
        """Cuts the text at the boundaries of hidden parts.

        Returns for each piece, its first character's place, the piece, and True where special tokens are only text.
        """
        pieces = []
        for begin, end in [*self.hidden, (len(self.text), len(self.text))]:
            pieces += [(start, self.text[start:begin], False)] if begin > start else []
            begin = max(begin, start)
            pieces += [(begin, self.text[begin:end], True)] if end > begin else []
            start = max(start, end)
        return pieces


class ChatTemplates:
    """The chat templates of a checkpoint, by name.

    Args:
        templates: jinja2 sources; a conversation takes "tool_use" if it has tools, else "default".
        variables: the special tokens that templates may write, such as `bos_token`.
        special_names: all special tokens, which stay text where a user or a tool writes them.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], special_names: Sequence[str]):
        self.templates, self._variables, self._special_names = dict(templates), dict(variables), list(special_names)

    @property
    def setting(self) -> Any:
        """The value of `chat_template` in a `tokenizer_config.json` that stands for these templates."""
        if list(self.templates) in ([], [DEFAULT]):
            return self.templates.get(DEFAULT)
        return [{"name": name, "template": template} for name, template in self.templates.items()]

    def reads(self, name: str) -> bool:
        """Returns whether a template uses a variable."""
        return any(re.search(rf"\b{name}\b", template) for template in self.templates.values())

    def render(
        self, messages: Sequence[Any], *, tools: Any = None, with_generation: bool = False, **variables: Any
    ) -> RenderedChat:
        """Renders a conversation.

        Null fields are dropped. Probe messages of the conversation's shape decide the inputs of the template: arguments
        of tool calls as objects or as JSON text, content as text or as parts, the role of developer messages.

        Args:
            **variables: further variables of the template, such as `enable_thinking`; `strftime_now` may be a date,
                which the template's function of that name then takes for today.
        """
        _check_size("", messages)
        messages, tools = clean_messages(messages), clean_tools(tools)
        # transformers always defines these two, and some templates rely on it.
        variables = {**self._variables, "documents": None, "add_generation_prompt": True, **variables}
        # Where there are tool calls but no list of tools, the default template comes first, as in transformers.
        names = [TOOL_USE, DEFAULT] if tools is not None else [DEFAULT]
        names = [name for name in names if name in self.templates][:1]
        has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        names += [TOOL_USE] if has_calls and TOOL_USE in self.templates and names != [TOOL_USE] else []
        if not names:
            others = ", ".join(printable(name, 40) for name in self.templates)
            raise TokenizerError(
                f"the checkpoint has no chat template named {DEFAULT}, only {others}"
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
        """The text that the template writes before an answer; "" if none."""
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
        # 1. Decide the forms, by probes of this shape.
        others = {name: value for name, value in variables.items() if name != "strftime_now"}
        forms = _with_errors(lambda: choose_forms(template, messages, tools, others))

        def render(messages: list[dict[str, Any]], tools: list[Any] | None, with_generation: bool = False) -> Rendered:
            messages, tools = in_forms(messages, tools, forms)
            return _render_once(template, messages, {**variables, "tools": tools}, with_generation)

        # 2. Render the conversation as it is, and again with marks in place of foreign special tokens.
        plain = render(messages, tools, with_generation)
        hidden = HiddenText(self._special_names, [messages, tools], template)
        hidden_tools = hidden.hide_value(tools)
        without = hidden.hide(messages)
        if not hidden.texts:
            return RenderedChat(plain.text, [], plain.generation)
        marked = render(without, hidden_tools).text
        # 3. Find the marks. A template that looks at the text may write it differently, such as one that adds a token
        # to a message unless the user already wrote it (GLM's `/nothink`). The user's text then becomes that token.
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


def read_chat_templates(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Reads the chat templates of a checkpoint.

    Returns the templates by name: those of `chat_template.jinja` and `additional_chat_templates/`, or else those of
    `tokenizer_config.json` or `chat_template.json`.
    """
    found = {DEFAULT: "chat_template.jinja"}
    found |= {pathlib.PurePath(file).stem: file for file in list_chat_templates(folder)}
    contents = {name: _read_text(folder, file) for name, file in found.items()}
    templates = {name: content for name, content in contents.items() if content is not None}
    if DEFAULT in templates:
        return templates
    setting = settings.get("chat_template")
    if setting is None:
        values = read_json_object(folder, "chat_template.json", max_bytes=MAX_TEMPLATE_CHARACTERS)
        setting = values.get("chat_template")
    entries = setting if isinstance(setting, list) else [{"name": DEFAULT, "template": setting}]
    named = {each.get("name"): each.get("template") for each in entries if isinstance(each, dict)}
    return {name: each for name, each in named.items() if isinstance(name, str) and isinstance(each, str)} | templates


def _read_text(folder: pathlib.Path, name: str) -> str | None:
    content = read_small_file(folder, name, max_bytes=MAX_TEMPLATE_CHARACTERS)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{folder / name} is not UTF-8 text") from error


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
    """Calls a function that renders, and converts its failures to errors for users."""
    try:
        return function()
    except TemplateFailure as error:
        # A template that does not compile is the tokenizer's error; one that fails on these messages is theirs.
        kind = TokenizerError if error.is_template else ConversationError
        raise kind(f"the chat template failed: {error}") from error
    except ConversationError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"the chat template failed: a variable has no JSON form: {error}") from error
