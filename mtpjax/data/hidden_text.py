"""Keeps the text of users in a conversation from becoming special tokens: a message could end its own turn."""

import json
import re
from collections.abc import Iterable
from typing import Any

FOREIGN_ROLES = ("user", "tool")


def hide_special_text(
    messages: list[dict[str, Any]], names: Iterable[str], template: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replaces special tokens in messages of users and tools by marks, which a chat template leaves as they are.

    Args:
        messages: the conversation.
        names: the special tokens.
        template: the chat template.

    Returns:
        The messages, and the text that each mark replaces.
    """
    # The longest first: one name may begin another.
    special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
    # A mark is a number between two private-use characters that are in neither the messages nor the template.
    everything = json.dumps(messages, ensure_ascii=False, default=str) + template
    character = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in everything)
    hidden: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
        mark = f"{character}{len(hidden)}{character}"
        hidden[mark] = match[0]
        return mark

    def cleaned(content: Any) -> Any:
        if isinstance(content, str):
            return special.sub(hide, content)
        if isinstance(content, list):
            return [cleaned(part) for part in content]
        if isinstance(content, dict) and "text" in content:
            return content | {"text": cleaned(content["text"])}
        return content

    def is_foreign(message: Any) -> bool:
        return isinstance(message, dict) and message.get("role") in FOREIGN_ROLES and "content" in message

    return [
        message | {"content": cleaned(message["content"])} if is_foreign(message) else message for message in messages
    ], hidden


def split_at_marks(text: str, hidden: dict[str, str]) -> list[tuple[str, bool]]:
    """Splits a rendered conversation.

    Args:
        text: the text, with marks.
        hidden: the text of each mark, from `hide_special_text`.

    Returns:
        The parts of the text without marks, each with True where it was hidden.
    """
    if not hidden:
        return [(text, False)]
    return [(hidden.get(part, part), part in hidden) for part in re.split(f"({'|'.join(hidden)})", text)]
