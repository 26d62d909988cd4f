"""Checks a command line: one message names all unknown flags, including SGLang's and vLLM's, and bad values."""

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

# What to give in place of a flag of SGLang that is not supported. Others can only be left out.
SGLANG_ADVICE = {
    "--attention-backend": "use --implementation",
    "--config": "write the flags out",
    "--cuda-graph-bs-decode": "use --precompile-bs-paddings",
    "--cuda-graph-max-bs-decode": "use --max-running-requests",
    "--data-parallel-size": "use --dp-size",
    "--decode-attention-backend": "use --implementation",
    "--default-chat-template-kwargs": "send chat_template_kwargs with a request",
    "--download-dir": "set HF_HOME",
    "--dtype": "the checkpoint's dtype is kept; mtpjax convert writes another",
    "--enable-lora": "merge the adapter into the weights",
    "--ep": "use --ep-size",
    "--expert-parallel-size": "use --ep-size",
    "--hicache-ratio": "use --hicache-size",
    "--lora-paths": "merge the adapter into the weights",
    "--max-prefill-tokens": "use --chunked-prefill-size",
    "--pipeline-parallel-size": "use --tp-size",
    "--pp-size": "use --tp-size",
    "--prefill-attention-backend": "use --implementation",
    "--preferred-sampling-params": "send them with a request",
    "--quantization": "the checkpoint's own quantization is read from its config.json",
    "--random-seed": "send seed with a request",
    "--reasoning-parser": "answers hold the reasoning as the model writes it",
    "--revision": "use --model-path org/name@revision",
    "--speculative-draft-model-revision": "use --speculative-draft-model-path org/name@revision",
    "--tensor-parallel-size": "use --tp-size",
    "--tool-call-parser": "answers hold tool calls as the model writes them",
    "--trust-remote-code": "leave it out: code of checkpoints never runs",
}
# Flags of vLLM under other names than SGLang's.
VLLM_ADVICE = {
    "-dp": "use --dp-size",
    "-pp": "use --tp-size",
    "-tp": "use --tp-size",
    "--block-size": "use --page-size",
    "--chat-template-content-format": "leave it out: the template tells",
    "--disable-log-requests": "leave it out: requests are not logged",
    "--disable-log-stats": "leave it out",
    "--enable-auto-tool-choice": "leave it out: answers hold tool calls as the model writes them",
    "--enable-chunked-prefill": "leave it out: prompts are always processed in chunks",
    "--enable-expert-parallel": "use --ep-size",
    "--enable-prefix-caching": "leave it out: requests always share prefixes",
    "--enforce-eager": "leave it out",
    "--generation-config": "leave it out",
    "--gpu-memory-utilization": "use --mem-fraction-static",
    "--guided-decoding-backend": "use --grammar-backend",
    "--hf-overrides": "change a copy of config.json",
    "--limit-mm-per-prompt": "leave it out: prompts are texts",
    "--max-logprobs": "leave it out",
    "--max-model-len": "use --context-length",
    "--max-num-batched-tokens": "use --chunked-prefill-size",
    "--max-num-seqs": "use --max-running-requests",
    "--no-enable-chunked-prefill": "leave it out: prompts are always processed in chunks",
    "--no-enable-prefix-caching": "use --disable-radix-cache",
    "--num-gpu-blocks-override": "use --max-total-tokens",
    "--num-scheduler-steps": "use --num-continuous-decode-steps",
    "--seed": "send seed with a request",
    "--speculative-config": "use --speculative-algorithm, --speculative-draft-model-path and --num-steps",
    "--swap-space": "use --enable-hierarchical-cache and --hicache-size",
    "--tokenizer": "use --tokenizer-path",
    "--uvicorn-log-level": "use --log-level",
}
_FLAG = re.compile(r"--?[A-Za-z]")


def check_command_line(arguments: list[str], parser: CommandParser) -> list[str]:
    """Checks the command and its flags before parsing, because a parser stops at the first error.

    Args:
        arguments: the command line after `mtpjax`.
        parser: the parser of `mtpjax`.

    Returns:
        The arguments, with dashes for underscores in the names of flags.

    Raises:
        UsageError: the command is unknown or missing, or as for `check_flags`.
    """
    command: list[str] = []
    # `eval` has commands of its own.
    while commands := next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None):
        name, names = next(iter(arguments[len(command) :]), None), commands._name_parser_map
        if name is None:
            raise UsageError(f"a command is missing; `{' '.join(['mtpjax', *command, '--help'])}` lists the commands")
        # Flags before the command.
        if name.startswith("-"):
            break
        if name not in names:
            others = did_you_mean(name, names) or f": the commands are {', '.join(names)}"
            raise UsageError(f"unknown command '{name}'{others}")
        parser, command = names[name], [*command, name]
    advise = {"serve": _advise_server, "train": _advise_training}.get(" ".join(command))
    return [*command, *check_flags(arguments[len(command) :], parser, advise)]


def check_flags(
    arguments: list[str],
    parser: CommandParser,
    advise: Callable[[str], tuple[str, str] | None] | None = None,
) -> list[str]:
    """Checks the flags of a command.

    Args:
        arguments: the command line after the name of the command.
        parser: the parser of the command.
        advise: returns the origin of an unknown flag and the advice, if it is known elsewhere.

    Returns:
        The arguments, with dashes for underscores in the names of flags.

    Raises:
        UsageError: flags are unknown or missing, or have invalid values. The message names each, and what to do.
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
        # As for argparse, a text with spaces that is not a flag is a value.
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
    # Flags that have the same origin and need the same are told together.
    groups: dict[tuple[str, str], list[str]] = {}
    for name in wrong:
        problem = (advise and advise(name)) or ("", did_you_mean(name, known).removeprefix(": "))
        groups.setdefault(problem, []).append(name)
    problems = [_told(names, *problem) for problem, names in groups.items()] + bad_values
    if problems:
        raise UsageError("; ".join(problems))
    missing = [each.option_strings[0] for each in parser._actions if each.required and each.option_strings]
    missing = [name for name in missing if known[name] not in seen]
    if missing and known["--help"] not in seen:
        raise UsageError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; see --help")
    return checked


def _value_problem(name: str, action: Any, value: str) -> Iterator[str]:
    """Yields what is wrong with a flag's value, unless the parser checks it."""
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
        return "SGLang", SGLANG_ADVICE.get(name, "leave it out")
    return ("vLLM", VLLM_ADVICE[name]) if name in VLLM_ADVICE else None


def _advise_training(name: str) -> tuple[str, str] | None:
    """Tells how to write a setting of `mtpjax train` that is given as a flag."""
    from mtpjax.training.config import TrainConfig

    setting = name.lstrip("-").replace("-", "_")
    if setting.partition(".")[0] not in TrainConfig.__dataclass_fields__:
        return None
    return "", f"settings are written without dashes: {setting}=VALUE"


def _told(names: list[str], origin: str, advice: str) -> str:
    is_one, listed = len(names) == 1, ", ".join(names)
    if not origin:
        return f"unknown flag{'' if is_one else 's'} {listed}" + (f": {advice}" if advice else "")
    kind = "is a flag" if is_one else "are flags"
    advice = advice if is_one else re.sub(r"^leave it out", "leave them out", advice)
    return f"{listed} {kind} of {origin} that mtpjax does not support: {advice}"
