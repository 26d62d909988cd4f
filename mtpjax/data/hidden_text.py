"""Keeps special tokens in users' messages from taking effect, because a message could otherwise end its own turn."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

TRUSTED_ROLES = ("system", "developer", "assistant")
_COUNTER_DIGITS = 8
_PREFIX = re.compile(r"(?=(9[0-7]{9}))")  # prefixes of marks, including overlapping ones

Spans = list[tuple[int, int]]  # start and end of parts of a text, ascending


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """A conversation rendered by a chat template.

    Attributes:
        text: the text.
        hidden: start and end of the parts whose special tokens are plain text, because a user or a tool wrote them.
        generation: start and end of the template's `{% generation %}` blocks, which mark what the model writes. None if
            the template has no such blocks or they were not requested.
    """

    text: str
    hidden: Spans
    generation: Spans | None = None

    def pieces(self, start: int = 0) -> list[tuple[int, str, bool]]:
        """Cuts the text at the boundaries of hidden parts.

        Returns each piece's start index, its text, and whether its special tokens are plain text.
        """
        pieces = []
        for begin, end in [*self.hidden, (len(self.text), len(self.text))]:
            pieces += [(start, self.text[start:begin], False)] if begin > start else []
            begin = max(begin, start)
            pieces += [(begin, self.text[begin:end], True)] if end > begin else []
            start = max(start, end)
        return pieces


class HiddenText:
    """Replaces special tokens in text from users, tools and tool calls with marks while a chat template runs.

    A mark is a number, which is valid in a JSON string and does not change when a template trims a text, changes its
    case or writes it as JSON.

    Args:
        names: the special tokens.
        given: the JSON values in which special tokens will be replaced.
        template: the chat template.
        keep_length: use as mark the special token with one character changed, for templates that count or cut
            characters.
    """

    def __init__(self, names: Sequence[str], given: Any, template: str, *, keep_length: bool = False):
        # Sort the longest name first, because one name may be a prefix of another.
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._given, self._template = given, template
        self.texts: list[str] = []
        self._keep_length = keep_length

    @functools.cached_property
    def _prefix(self) -> str:
        """The prefix of marks (a 9 and nine digits from 0 to 7), which occurs in neither the messages nor the template.

        No suffix of it is also a prefix of it, so digits next to a mark cannot be mistaken for one.
        """
        everything = json.dumps(self._given, ensure_ascii=False, default=str) + self._template
        # A client may write many such numbers, so find all of them in one pass.
        taken = set(_PREFIX.findall(everything))
        return next(mark for n in range(8**9) if (mark := f"9{n:09o}") not in taken)

    def hide(self, messages: list[dict[str, Any]], *, keep_ending: str | None = None) -> list[dict[str, Any]]:
        """Replaces special tokens in messages with untrusted roles, and in all tool calls."""
        hidden = []
        for message in messages:
            if message.get("role") not in TRUSTED_ROLES:
                ending = self._ending(message.get("content"))
                message = self.hide_value(message)
                if ending and ending == keep_ending:
                    content = message["content"]
                    message["content"] = content[: -len(self._prefix) - _COUNTER_DIGITS] + ending
            elif "tool_calls" in message:
                message = message | {"tool_calls": self.hide_value(message["tool_calls"])}
            hidden.append(message)
        return hidden

    def endings(self, messages: list[dict[str, Any]]) -> list[str]:
        """Returns the distinct special tokens that end the text of a message with an untrusted role."""
        foreign = [message for message in messages if message.get("role") not in TRUSTED_ROLES]
        return sorted({self._ending(message.get("content")) for message in foreign} - {""})

    def hide_value(self, value: Any) -> Any:
        """Replaces special tokens in all strings of a JSON value."""
        if isinstance(value, str):
            return self._special.sub(self._mark, value)
        if isinstance(value, list):
            return [self.hide_value(each) for each in value]
        if isinstance(value, dict):
            return {self.hide_value(key): self.hide_value(each) for key, each in value.items()}
        return value

    def find(self, marked: str, plain: str) -> Spans | None:
        """Finds the hidden text in a rendered conversation.

        Args:
            plain: the conversation, rendered without hiding anything.

        Returns:
            The spans of the hidden text in `plain`, where it may be inside a JSON string. None if the two renderings do
            not match because the template depends on the hidden text.
        """
        spans, place = [], 0
        for number, part in enumerate(self._split(marked)):
            # Texts and marks alternate.
            if number % 2:
                name = self.texts[int(part)]
                forms = (name, json.dumps(name, ensure_ascii=False)[1:-1], json.dumps(name)[1:-1])
                # A template may change the case of a whole text.
                parts = (plain[place : place + len(form)] for form in forms)
                part = next(
                    (each for each, form in zip(parts, forms, strict=True) if each.lower() == form.lower()), None
                )
                if part is None:
                    return None
                spans.append((place, place + len(part)))
            elif not plain.startswith(part, place):
                return None
            place += len(part)
        return spans if place == len(plain) else None

    def find_alike(self, marked: str, plain: str) -> Spans | None:
        """Finds the hidden text as `find` does, but by the characters that `keep_length` marks change."""
        pairs = {(a, b) for name in self.texts for a, b in zip(name, self._alike(name), strict=True)}
        pairs |= {(a.lower(), b) for a, b in pairs} | {(a.upper(), b) for a, b in pairs}
        is_alike = len(marked) == len(plain) and all(self._alike(name) != name for name in self.texts)
        if not is_alike or any(p != m and (p, m) not in pairs for p, m in zip(plain, marked, strict=True)):
            return None
        return [each.span() for each in self._special.finditer(plain) if marked[slice(*each.span())] != each[0]]

    def restore(self, marked: str) -> tuple[str, Spans]:
        """Returns a rendered conversation with the hidden text in place of the marks, and the spans of that text."""
        pieces, spans, place = [], [], 0
        for number, part in enumerate(self._split(marked)):
            piece = self.texts[int(part)] if number % 2 else part
            if number % 2:
                spans.append((place, place + len(piece)))
            pieces.append(piece)
            place += len(piece)
        return "".join(pieces), spans

    def _split(self, marked: str) -> list[str]:
        """Splits at the marks. Returns a list that alternates between texts and the numbers of marks."""
        return re.split(rf"{self._prefix}(\d{{{_COUNTER_DIGITS}}})", marked)

    def _mark(self, match: re.Match[str]) -> str:
        self.texts.append(match[0])
        if self._keep_length:
            return self._alike(match[0])
        return f"{self._prefix}{len(self.texts) - 1:0{_COUNTER_DIGITS}d}"

    def _alike(self, name: str) -> str:
        """Returns a text of the same length that is not a special token."""
        places = sorted(range(len(name)), key=lambda place: not name[place].isalnum())
        changed = (f"{name[:place]}{digit}{name[place + 1 :]}" for place in places for digit in "0123456789")
        return next((each for each in changed if not self._special.search(each)), name)

    def _ending(self, content: Any) -> str:
        """Returns the special token that ends a text, or ""."""
        if not isinstance(content, str):
            return ""
        return next((match[0] for match in self._special.finditer(content) if match.end() == len(content)), "")
