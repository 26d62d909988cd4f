"""Prepares docstrings and signatures for the reference.

Docstrings mark code with single backticks, anywhere in a word, as Markdown does. Classes of settings get their required
fields in the signature, and each default beside its field's text.
"""

import dataclasses
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

FEW_FIELDS = 8  # classes with at most this many fields keep their whole signature


def shorten(app: Sphinx, kind: str, name: str, target: Any, options: Any, signature: str | None, returns: str | None):
    """Keeps only the required fields in a large dataclass's signature, and hides what Flax adds to a module's."""
    if kind == "class" and signature:
        signature = re.sub(r", parent=<flax[^>]*>, name=None", "", signature)
    if kind != "class" or not dataclasses.is_dataclass(target) or len(dataclasses.fields(target)) <= FEW_FIELDS:
        return signature, returns
    required = [field.name for field in dataclasses.fields(target) if not _has_default(field)]
    return f"(*, {', '.join([*required, '...'])})", returns


def add_defaults(app: Sphinx, kind: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Appends the default to each field's text in a dataclass's docstring, before napoleon reads it."""
    if kind != "class" or not dataclasses.is_dataclass(target) or len(dataclasses.fields(target)) <= FEW_FIELDS:
        return
    parts = re.split(r"^((?:Attributes|Args):\n)", "\n".join(lines), maxsplit=1, flags=re.MULTILINE)
    if len(parts) < 3:
        return
    before, heading, (section, gap, rest) = *parts[:2], parts[2].partition("\n\n")
    defaults = {field.name: field.default for field in dataclasses.fields(target)}

    def with_default(match: re.Match) -> str:
        default = defaults.get(match["name"], dataclasses.MISSING)
        if default is dataclasses.MISSING or default is None or len(repr(default)) > 40:
            return match[0]
        return f"{match[0].rstrip().removesuffix('.')} (default: ``{default!r}``)."

    entry = r"^ {4}(?P<name>\w+): .*(?:\n {5,}.*)*"
    section = re.sub(entry, with_default, section, flags=re.MULTILINE)
    lines[:] = (before + heading + section + gap + rest).split("\n")


def separate_code(app: Sphinx, kind: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Lets code between backticks touch letters and digits, as in `row`s and 0..`K`; reST requires an escape there."""
    text = "\n".join(lines)  # code may begin on one line and end on the next

    def separated(match: re.Match) -> str:
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        return ("\\ " if before.isalnum() or before == "." else "") + match[0] + ("\\ " if after.isalnum() else "")

    lines[:] = re.sub(r"``[^`]+``|`[^`]+`", separated, text).split("\n")


def keep_property(app: Sphinx, kind: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Undoes napoleon's reading of a property's text, which takes words before a colon for a type."""
    if kind == "property":
        lines[:] = inspect.cleandoc(getattr(target, "__doc__", None) or "").split("\n")
        separate_code(app, kind, name, target, options, lines)


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the handlers; napoleon's priority is 500."""
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", separate_code, priority=400)
    app.connect("autodoc-process-docstring", add_defaults, priority=401)
    app.connect("autodoc-process-docstring", keep_property, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
