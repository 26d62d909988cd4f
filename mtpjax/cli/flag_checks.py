"""Checks a command line, and reports all unknown flags (also SGLang's and vLLM's) and invalid values in one message."""

import argparse
import functools
import importlib.resources
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from mtpjax.cli.help import CommandParser
from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean


def _by_flag(flags_by_advice: dict[str, str]) -> dict[str, str]:
    return {flag: advice for advice, flags in flags_by_advice.items() for flag in flags.split()}


# Alternatives to unsupported SGLang flags. All other SGLang flags can only be removed.
SGLANG_ADVICE = _by_flag(
    {
        "use --implementation": "--attention-backend --decode-attention-backend --prefill-attention-backend",
        "pass the flags themselves": "--config",
        "use --precompile-bs-paddings": "--cuda-graph-bs-decode",
        "use --max-running-requests": "--cuda-graph-max-bs-decode",
        "use --dp-size": "--data-parallel-size",
        "send chat_template_kwargs with a request": "--default-chat-template-kwargs",
        "set HF_HOME": "--download-dir",
        "the checkpoint's dtype is kept; mtpjax convert can change it": "--dtype",
        "merge the adapter into the weights": "--enable-lora --lora-paths",
        "use --ep-size": "--ep --expert-parallel-size",
        "use --hicache-size": "--hicache-ratio",
        "use --chunked-prefill-size": "--max-prefill-tokens",
        "use --tp-size": "--pipeline-parallel-size --pp-size --tensor-parallel-size",
        "send them with a request": "--preferred-sampling-params",
        "the quantization is read from the checkpoint's config.json": "--quantization",
        "send seed with a request": "--random-seed",
        "answers contain the reasoning as the model writes it": "--reasoning-parser",
        "use --model-path org/name@revision": "--revision",
        "use --speculative-draft-model-path org/name@revision": "--speculative-draft-model-revision",
        "answers contain tool calls as the model writes them": "--tool-call-parser",
        "remove it: code in checkpoints never runs": "--trust-remote-code",
    }
)
# vLLM flags whose names differ from SGLang's.
VLLM_ADVICE = _by_flag(
    {
        "use --page-size": "--block-size",
        "remove it: the template decides": "--chat-template-content-format",
        "remove it: requests are not logged": "--disable-log-requests",
        "remove it": "--disable-log-stats --enforce-eager --generation-config --max-logprobs",
        "remove it: answers contain tool calls as the model writes them": "--enable-auto-tool-choice",
        "remove it: prompts are always processed in chunks": "--enable-chunked-prefill --no-enable-chunked-prefill",
        "use --ep-size": "--enable-expert-parallel",
        "remove it: requests always share prefixes": "--enable-prefix-caching",
        "use --mem-fraction-static": "--gpu-memory-utilization",
        "use --grammar-backend": "--guided-decoding-backend",
        "edit a copy of config.json": "--hf-overrides",
        "remove it: prompts contain only text": "--limit-mm-per-prompt",
        "use --context-length": "--max-model-len",
        "use --chunked-prefill-size": "--max-num-batched-tokens",
        "use --max-running-requests": "--max-num-seqs",
        "use --disable-radix-cache": "--no-enable-prefix-caching",
        "use --max-total-tokens": "--num-gpu-blocks-override",
        "use --num-continuous-decode-steps": "--num-scheduler-steps",
        "send seed with a request": "--seed",
        "use --speculative-algorithm, --speculative-draft-model-path and --num-steps": "--speculative-config",
        "use --enable-hierarchical-cache and --hicache-size": "--swap-space",
        "use --tokenizer-path": "--tokenizer",
        "use --log-level": "--uvicorn-log-level",
        "use --dp-size": "-dp",
        "use --tp-size": "-pp -tp",
    }
)
_FLAG = re.compile(r"--?[A-Za-z]")


def check_command_line(arguments: list[str], parser: CommandParser) -> list[str]:
    """Checks the command and its flags before parsing, because a parser stops at the first error.

    Args:
        arguments: the command line after `mtpjax`.
        parser: the parser of `mtpjax`.

    Returns:
        The arguments, with underscores in flag names replaced by dashes.

    Raises:
        UsageError: the command is unknown or missing, or `check_flags` rejects a flag.
    """
    command: list[str] = []
    # `eval` has subcommands.
    while commands := next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None):
        name, names = next(iter(arguments[len(command) :]), None), commands._name_parser_map
        if name is None:
            raise UsageError(f"a command is missing; `{' '.join(['mtpjax', *command, '--help'])}` lists the commands")
        # There is a flag before the command, which `check_flags` reports.
        if name.startswith("-"):
            break
        if name not in names:
            others = did_you_mean(name, names) or f": the commands are {', '.join(names)}"
            raise UsageError(f"unknown command '{name}'{others}")
        parser, command = names[name], [*command, name]
    advise = {"serve": _advise_server, "train": _advise_training}.get(" ".join(command))
    return [*command, *check_flags(arguments[len(command) :], parser, advise)]


def check_flags(
    arguments: list[str], parser: CommandParser, advise: Callable[[str], tuple[str, str] | None] | None = None
) -> list[str]:
    """Checks the flags of a command.

    Args:
        arguments: the command line after the name of the command.
        parser: the parser of the command.
        advise: returns the program from which an unknown flag comes, and advice; None for other flags.

    Returns:
        The arguments, with underscores in flag names replaced by dashes.

    Raises:
        UsageError: flags are unknown or missing, or have invalid values. The message lists all of them with advice.
    """
    known, seen = parser._option_string_actions, set()
    checked, wrong, bad_values = [], [], []
    flag, action, num_values = "", None, 0.0  # the flag that the next values belong to, and how many it takes
    for place, argument in enumerate(arguments):
        if argument == "--":
            checked += arguments[place:]
            break
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        # As in argparse, an argument with spaces that is not a known flag is a value.
        if _FLAG.match(name) and (name in known or " " not in argument):
            flag, action = name, known.get(name)
            if action is None:
                wrong += [] if name in wrong else [name]
            else:
                seen.add(action)
                num_values = {None: 1, "?": 1, "*": math.inf, "+": math.inf}.get(action.nargs, 0)
                if equals:
                    bad_values, num_values = [*bad_values, *_value_problem(flag, action, value)], 0
            checked.append(name + equals + value)
            continue
        if action is not None and num_values:
            bad_values += _value_problem(flag, action, argument)
            num_values -= 1
        checked.append(argument)
    # Group flags with the same origin and advice.
    groups: dict[tuple[str, str], list[str]] = {}
    for name in wrong:
        problem = (advise and advise(name)) or ("", did_you_mean(name, known).removeprefix(": "))
        groups.setdefault(problem, []).append(name)
    problems = [_describe(names, *problem) for problem, names in groups.items()] + bad_values
    if problems:
        raise UsageError("; ".join(problems))
    missing = [each.option_strings[0] for each in parser._actions if each.required and each.option_strings]
    missing = [name for name in missing if known[name] not in seen]
    if missing and known["--help"] not in seen:
        raise UsageError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; see --help")
    return checked


def _value_problem(name: str, action: Any, value: str) -> Iterator[str]:
    """Yields problems with a flag's value that the parser does not report."""
    kind = getattr(action, "_typehint", action.type)
    if action.choices is not None and value not in action.choices:
        choices = list(map(str, action.choices))
        yield f"{name} must be one of {', '.join(choices)}, got {value}{did_you_mean(value, choices)}"
    elif kind in (int, float):
        try:
            kind(value)
        except ValueError:
            yield f"{name} must be {'an integer' if kind is int else 'a number'}, got {value}"


@functools.cache
def sglang_flags() -> frozenset[str]:
    """Returns the names of SGLang's server flags, as of version 0.5.23."""
    text = importlib.resources.files("mtpjax.cli").joinpath("sglang_flags.txt").read_text()
    return frozenset(text.split())


def _advise_server(name: str) -> tuple[str, str] | None:
    if name in sglang_flags():
        return "SGLang", SGLANG_ADVICE.get(name, "remove it")
    return ("vLLM", VLLM_ADVICE[name]) if name in VLLM_ADVICE else None


def _advise_training(name: str) -> tuple[str, str] | None:
    """Returns how to write a setting of `mtpjax train` that was given as a flag."""
    from mtpjax.training.config import TrainConfig

    setting = name.lstrip("-").replace("-", "_")
    if setting.partition(".")[0] not in TrainConfig.__dataclass_fields__:
        return None
    return "", f"settings are written without dashes: {setting}=VALUE"


def _describe(names: list[str], origin: str, advice: str) -> str:
    is_one, listed = len(names) == 1, ", ".join(names)
    if not origin:
        return f"unknown flag{'' if is_one else 's'} {listed}" + (f": {advice}" if advice else "")
    kind = "is a flag" if is_one else "are flags"
    advice = advice if is_one else re.sub(r"^remove it", "remove them", advice)
    return f"{listed} {kind} of {origin} that mtpjax does not support: {advice}"
