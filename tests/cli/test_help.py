"""Every command: help in groups and within 80 columns, one spelling per flag, and one line for what is wrong."""

import argparse
import collections
import pathlib
import re

import pytest

from mtpjax.cli.flag_checks import check_command_line
from mtpjax.cli.help import command_parser
from mtpjax.cli.main import main, make_parser
from mtpjax.cli.prediction import DEVICE_NAMES
from mtpjax.drafters.methods import METHODS, find_method
from mtpjax.evaluation.roofline import DEVICES
from mtpjax.messages import count_of, did_you_mean, nearest

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


COMMANDS = [(name, parser) for name, parser in parsers() if parser._subparsers is None]


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


@pytest.mark.parametrize(("name", "parser"), [pytest.param(*each, id=each[0]) for each in COMMANDS])
def test_help_begins_with_what_is_needed_and_has_groups(name, parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    own = [group for group in parser._action_groups if group._group_actions][1:]
    # All flags but --help stand in groups with titles of ours.
    assert [action.option_strings for action in parser._optionals._group_actions] == [["-h", "--help"]]
    assert not parser._positionals._group_actions
    assert own and len({group.title for group in own}) == len(own)
    # The flags begin on the first screen; the usage has only those that are required.
    lines = parser.format_help().splitlines()
    assert lines.index(f"{own[0].title}:") <= 24
    usage = " ".join(lines[: lines.index("")])
    assert set(re.findall(r"--[a-z-]+", usage)) == {
        action.option_strings[0] for action in parser._actions if action.required and action.option_strings
    }


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize(("name", "parser"), [pytest.param(*each, id=each[0]) for each in parsers()])
def test_help_is_in_the_words_of_the_command_line(name, parser, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = parser.format_help()
    # None, False and fields of Python classes cannot be typed, and empty defaults say nothing.
    assert "None" not in text and "False" not in text and "(default: )" not in text
    assert not re.search(r"\b(num_steps|num_draft_tokens|draft_window|draft_sinks|top_k)\b", text)
    # A step is a decoding round, a draft level or an update; only SGLang's flags and a training setting say steps.
    assert "step" not in re.sub(r"--[a-z-]*steps\b|steps=\d+", "", text)
    # A flag that is broken at a dash can be neither copied nor searched for.
    assert not [line for line in text.splitlines() if re.search(r"--[a-z-]*-$", line.strip())]


def wrong_lines():
    """Yields the command line of every command with its longest flag misspelt, and the flag that it means."""
    for name, parser in COMMANDS:
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help"]
        flag = max(flags, key=len)
        yield pytest.param([*name.split()[1:], f"{flag[:-2]}{flag[-1]}", "3"], flag, id=name)


@pytest.mark.parametrize(("line", "flag"), list(wrong_lines()))
def test_a_wrong_flag_is_one_line_with_a_suggestion(line, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"mtpjax {line[0]}: unknown flag ") and message.endswith(f"did you mean {flag}?")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serve --prot 3", "mtpjax serve: unknown flag --prot: did you mean --port?"),
        ("genrate", "mtpjax: unknown command 'genrate': did you mean generate?"),
        ("bench", "mtpjax: unknown command 'bench': did you mean bench-serving?"),
        ("eval aceptance", "mtpjax eval: unknown command 'aceptance': did you mean acceptance?"),
        ("--vers", "mtpjax: unknown flag --vers: did you mean --version?"),
        ("", "mtpjax: a command is missing; `mtpjax --help` lists the commands"),
        ("eval", "mtpjax eval: a command is missing; `mtpjax eval --help` lists the commands"),
        (
            "generate --model m",
            "mtpjax generate: the prompt is missing: use --prompt TEXT, --prompt - or --prompts FILE",
        ),
        ("convert m", "mtpjax convert: the following arguments are required: target; see --help"),
        ("inspect m --mesh", "mtpjax inspect: argument --mesh: expected one argument; see --help"),
        ("quickstart extra", "mtpjax quickstart: unrecognized arguments: extra; see --help"),
        ("train --nnodes two", "mtpjax train: --nnodes must be an integer, got two"),
        ("tune --model m --speculative_num_steps=x", "mtpjax tune: --speculative-num-steps must be an integer, got x"),
    ],
)
def test_a_wrong_command_line_is_one_line(line, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("quickstart --plot-formats pgn", "got pgn: did you mean png?"),
        ("quickstart --preset tini", "unknown preset 'tini': did you mean tiny?"),
        ("generate --model m --prompt p --acceptance blok", "got blok: did you mean block?"),
        ("regenerate --model m --data d --output o --drafter lokup", "got lokup: did you mean lookup?"),
        ("generate --model m --prompt p --depth-policy adaptiv", "got adaptiv: did you mean adaptive?"),
        ("generate --model m --prompt p --kv-cache-dtype fp8", "got fp8: did you mean fp8_e4m3?"),
        ("ablate --model m --output o --acceptance greedi", "got greedi: did you mean greedy?"),
        ("convert a b --dtype bfloat", "got bfloat: did you mean bfloat16?"),
        ("plan deepseek-v3 --device h10", "did you mean h100?"),
        ("profile --model deepseek-v3 --predict --device mi30x", "got mi30x: did you mean mi300x?"),
        ("serve --model m --speculative-algorithm nextm", "got NEXTM: did you mean NEXTN?"),
        ("bench-serving --backend vlm", "got vlm: did you mean vllm?"),
    ],
)
def test_a_misspelt_value_is_one_line_with_a_suggestion(line, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert told in message, message


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        # Values that look like flags or belong to nobody.
        (["--model_path", "m", "--prompt", "--model is a flag"], {"model_path": "m", "prompt": ["--model is a flag"]}),
        (["--model=m", "--prompt=-x", "--temperature", "0.5"], {"prompt": ["-x"], "temperature": 0.5}),
    ],
)
def test_right_lines_are_parsed_as_they_are(line, stored):
    parser = make_parser()
    options = parser.parse_args(check_command_line(["generate", *line], parser)).generate
    assert {name: options[name] for name in stored} == stored


def test_values_end_where_a_flag_has_enough_of_them():
    parser = make_parser()
    options = parser.parse_args(check_command_line(["train", "--nnodes", "2", "steps=5", "data=x"], parser)).train
    assert options.nnodes == 2 and options.settings == ["steps=5", "data=x"]


def test_device_names_are_those_of_the_roofline():
    assert set(DEVICE_NAMES) == set(DEVICES)


@pytest.mark.parametrize(("number", "told"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds")])
def test_nouns_agree_with_their_numbers(number, told):
    assert count_of(number, "round") == told


def test_a_similar_name_is_suggested():
    assert nearest("gen", ["generate", "regenerate"]) == "generate"
    assert nearest("ser", ["serve", "serve-router"]) == "serve"
    assert did_you_mean("xyz", ["generate"]) == ""


def test_help_names_every_draft_method_and_its_default_depth(monkeypatch):
    """The help is written without importing the methods."""
    monkeypatch.setenv("COLUMNS", "2000")
    algorithms = {algorithm for method in METHODS for algorithm in method.algorithms}
    found = [text for text in (parser.format_help() for _, parser in COMMANDS) if "--speculative-algorithm" in text]
    assert len(found) >= 3 and all(algorithms <= set(re.findall(r"[A-Z0-9]+", text)) for text in found)
    mtp, lookup, eagle3 = (find_method(name).default_levels for name in ("mtp", "lookup", "eagle3"))
    assert sum(f"(default: {mtp} with MTP modules, {lookup} for lookup, else 0)" in text for text in found) >= 2
    assert all(f"defaults to {eagle3} for EAGLE-3" in text for text in found)
