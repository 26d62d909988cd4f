"""The parsers of `mtpjax`, with grouped flags, help within 80 columns and one-line errors. Imports no JAX."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

import jsonargparse

from mtpjax.errors import UsageError


class HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Formats help within 80 columns, with short metavars. Shows each metavar and each default only once per flag."""

    def __init__(self, prog: str, **settings: Any):
        # jsonargparse repeats "[options]" for every level of subcommands, which pushes the usage to the right.
        super().__init__(prog.replace(" [options]", ""), **settings)

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None) -> None:
        """Shows only required flags in the usage, because the groups list all flags."""
        actions = [each for each in actions if not isinstance(each, argparse._HelpAction | argparse._VersionAction)]
        shown = [action for action in actions if action.required or not action.option_strings]
        if len(shown) < len(actions):
            shown.append(argparse.Action([], dest="options", metavar="[options]"))
        super().add_usage(usage, shown, groups, prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Breaks lines only between words, because a flag broken at a dash cannot be copied or searched for."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Returns a flag's metavar, which is N for integers, X for other numbers, else the last word of the flag."""
        numbers: dict[Any, str] = {int: "N", float: "X"}
        # jsonargparse keeps the type of a flag that takes several values in a separate attribute.
        kind = getattr(action, "_typehint", action.type)
        return numbers.get(kind) or action.dest.rsplit("_")[-1].upper()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Shows the value once, after all names of the flag, as in `--num-steps, --speculative-num-steps N`."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _get_help_string(self, action: argparse.Action) -> str:
        """Adds the default, or that the flag is required, unless the text already says so."""
        text = action.help or ""
        if isinstance(action, argparse._HelpAction):
            return super()._get_help_string(action)
        if action.required and action.option_strings:
            return f"{text} (required)"
        # Switches are off by default; the text explains empty defaults.
        has_default = action.default is not None and action.default is not False and action.default not in ("", [])
        is_stated = not has_default or action.default == argparse.SUPPRESS or re.search(r"default:|by default", text)
        if is_stated or not action.option_strings:
            return text
        values = action.default if isinstance(action.default, list) else [action.default]
        return f"{text} (default: {' '.join(map(str, values))})"


class CommandParser(jsonargparse.ArgumentParser):
    """A parser that raises a one-line error where `argparse` prints the usage and exits."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises `UsageError`, which `mtpjax.cli.main` prints before it exits with code 2."""
        # jsonargparse refers to missing arguments by their storage names, such as "convert.source".
        text = re.sub(r"(?<=[ ,])[\w-]+[.](?=\w)", "", " ".join(message.split()))
        raise UsageError(f"{text}; see --help") from ex

    def flag_group(self, title: str) -> Any:
        """Returns the group of flags with this title in `--help`, which the first call adds."""
        groups = self.groups or {}
        return groups[title] if title in groups else self.add_argument_group(title, name=title)


def command_parser(description: str) -> CommandParser:
    return CommandParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
