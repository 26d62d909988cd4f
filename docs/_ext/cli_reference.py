"""Writes the command-line reference from the parsers of `mtpjax`, when Sphinx reads the page.

The line `<!-- commands -->` in a page becomes one section per command, with an entry per flag. No text is copied by
hand, so the page always agrees with `mtpjax COMMAND --help`. The parsers are made without importing JAX.
"""

import argparse
import pathlib
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

from mtpjax.cli import main

MARK = "<!-- commands -->"


def commands(parser: argparse.ArgumentParser, name: str, summary: str = "") -> Iterator[str]:
    """Yields the Markdown of a parser and of its subcommands, depth first."""
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if children:
        for child in children[0]._choices_actions:
            yield from commands(children[0]._name_parser_map[child.dest], f"{name} {child.dest}", child.help or "")
        return
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    flags = [
        signature(parser, action).split(", ")[0] for action in actions if action.option_strings and action.required
    ]
    values = [
        parser._get_formatter()._format_args(action, action.dest) for action in actions if not action.option_strings
    ]
    yield f"## `{name}`\n"
    yield f"{marked_up(parser.description or summary)}\n"
    yield "\n".join(["```text", " ".join([name, *flags, *values, "[options]"]), "```\n"])
    yield f"```{{program}} {name}\n```\n"
    for group in parser._action_groups:
        flags = [action for action in group._group_actions if action in actions]
        if flags:
            yield f"**{group.title}**\n"
        for action in flags:
            yield f"::::{{option}} {signature(parser, action)}\n{described(parser, action)}\n::::\n"


def signature(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns the names of a flag, each with its value: `--num-steps N, --speculative-num-steps N`."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = ""
    if action.nargs != 0:
        formatter = parser._get_formatter()
        value = " " + formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    return ", ".join(f"{flag}{value}" for flag in action.option_strings)


def described(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns a flag's help as `--help` prints it, with its default or that it is required."""
    return marked_up(parser._get_formatter()._expand_help(action))


def marked_up(text: str) -> str:
    """Marks flags as code and escapes what Markdown would take for markup, outside of code."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text))
    for index in range(0, len(parts), 2):
        escaped = re.sub(r"([*_<>\[\]])", r"\\\1", parts[index])
        parts[index] = re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", escaped)
    return "".join(parts)


def fill_in(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces the mark in a page, and makes the page depend on the parsers' files."""
    if MARK not in source[0]:
        return
    source[0] = source[0].replace(MARK, "\n".join(commands(main.make_parser(), "mtpjax")))
    for path in pathlib.Path(main.__file__).parent.glob("*.py"):
        app.env.note_dependency(str(path))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the replacement."""
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
