"""The parsers of `mtpjax` and the look of their `--help`, which fits 80 columns. Imports no JAX."""

import argparse
import re
from typing import Any

import jsonargparse


class HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Help of at most 80 columns: short names of values, each shown once per flag, and every default shown once."""

    def __init__(self, prog: str, **settings: Any):
        # jsonargparse repeats "[options]" for every level of subcommands, which pushes the usage to the right.
        super().__init__(prog.replace(" [options]", ""), **settings)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Names a flag's value: N for integers, X for other numbers, else the last word of the flag."""
        numbers: dict[Any, str] = {int: "N", float: "X"}
        # jsonargparse keeps the type of a flag that takes several values in a separate attribute.
        kind = getattr(action, "_typehint", action.type)
        return numbers.get(kind) or action.dest.rsplit("_")[-1].upper()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Shows the value once, behind all names of the flag: `--num-steps, --speculative-num-steps N`."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _get_help_string(self, action: argparse.Action) -> str:
        """Adds the default, or that the flag is required, unless the text says it."""
        text = action.help or ""
        if isinstance(action, argparse._HelpAction):
            return super()._get_help_string(action)
        if action.required and action.option_strings:
            return f"{text} (required)"
        # Switches are off by default; the text explains a default of None.
        has_default = action.default is not None and action.default is not False and action.default != []
        is_told = not has_default or action.default == argparse.SUPPRESS or re.search(r"default:|by default", text)
        if is_told or not action.option_strings:
            return text
        values = action.default if isinstance(action.default, list) else [action.default]
        return f"{text} (default: {' '.join(map(str, values))})"


def command_parser(description: str) -> jsonargparse.ArgumentParser:
    """Makes the parser of a command.

    Args:
        description: what the command does.

    Returns:
        A parser without flags.
    """
    return jsonargparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
