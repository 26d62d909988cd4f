"""The help of every command: within 80 columns, without doubled signs, and with one spelling per flag."""

import argparse
import collections
import pathlib

import pytest

from mtpjax.cli.help import command_parser
from mtpjax.cli.main import make_parser

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Two settings whose names differ by an s: a text to continue, and a file of prompts; a drafter by name, and several by
# name or folder.
SINGULAR_AND_PLURAL = {"--prompt", "--drafter"}


def parsers():
    """Yields the name and parser of every command, and of the groups of commands."""
    left = [("mtpjax", make_parser())]
    while left:
        name, parser = left.pop()
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += [(f"{name} {child}", each) for child, each in action._name_parser_map.items()]


def flags():
    """Yields command, names and stored name of every flag."""
    for name, parser in parsers():
        for action in parser._actions:
            if action.option_strings:
                yield name, tuple(action.option_strings), action.dest


@pytest.mark.parametrize(("name", "parser"), [pytest.param(*each, id=each[0]) for each in parsers()])
def test_help_fits_80_columns_and_shows_defaults_once(name, parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    assert text.startswith(f"usage: {name}"), text
    assert max(map(len, text.splitlines())) <= 80
    assert "%%" not in text and "null" not in text and "[options] " not in text
    for action in parser._actions:
        assert parser._get_formatter()._expand_help(action).count("default:") <= 1, action.option_strings


def test_a_percent_sign_stays_single():
    parser = command_parser("Measure with 95 % intervals.")
    parser.add_argument("--share", type=float, default=0.0, help="5 % of the time")
    assert "--share X" in parser.format_help()
    assert "5 % of the time (default: 0.0)" in parser.format_help()


def test_a_flag_has_the_same_names_in_every_command():
    names_of = collections.defaultdict(set)
    for _, names, _ in flags():
        for name in names:
            names_of[name].add(names)
    assert {name: found for name, found in names_of.items() if len(found) > 1} == {}
    stored = collections.defaultdict(set)
    for _, names, dest in flags():
        stored[dest].add(names)
    assert {dest: found for dest, found in stored.items() if len(found) > 1} == {}
    assert {name for name in names_of if f"{name}s" in names_of} == SINGULAR_AND_PLURAL
    assert "--batch" not in names_of and "--batch-size" in names_of


def test_no_page_has_a_doubled_percent_sign():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 10
    assert [page.name for page in pages if "%%" in page.read_text()] == []
