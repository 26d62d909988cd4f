"""Checks the flags of `mtpjax serve`: one message names the unknown ones, those of SGLang and vLLM, and bad values."""

import difflib
import importlib.resources
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mtpjax.errors import UsageError

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


def check_flags(arguments: list[str], known: Mapping[str, Any]) -> list[str]:
    """Checks flags before they are parsed: a parser stops at the first that is wrong, and says only that it is.

    Args:
        arguments: the command line behind `mtpjax serve`.
        known: the parser's actions by the names of the flags.

    Returns:
        The arguments, with dashes for underscores in the names of flags.

    Raises:
        UsageError: flags are unknown, or those of SGLang or vLLM and not supported, or have values that are no number
            or no choice. The message names each, and what to do.
    """
    checked, wrong, bad_values, action = [], [], [], None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if _FLAG.match(name):
            name = name.replace("_", "-")
            action = known.get(name)
            wrong += [] if action is not None or name in wrong else [name]
        if action is not None and (equals or not _FLAG.match(name)):
            bad_values += _value_problem(action, value if equals and _FLAG.match(name) else argument)
        checked.append(name + equals + value)
    # Flags that have the same origin and need the same are told together.
    sglang, groups = sglang_flags(), {}
    for name in wrong:
        groups.setdefault(_problem(name, known, sglang), []).append(name)
    problems = [_told(names, *problem) for problem, names in groups.items()] + bad_values
    if problems:
        raise UsageError("; ".join(problems))
    return checked


def _value_problem(action: Any, value: str) -> Iterator[str]:
    """Yields what is wrong with a flag's value, unless the parser must tell."""
    name, kind = action.option_strings[-1], getattr(action, "_typehint", action.type)
    if action.choices is not None and value not in action.choices:
        yield f"{name} must be one of {', '.join(map(str, action.choices))}, got {value}"
    elif kind in (int, float):
        try:
            kind(value)
        except ValueError:
            yield f"{name} must be {'an integer' if kind is int else 'a number'}, got {value}"


def sglang_flags() -> frozenset[str]:
    """Returns the names of SGLang's server flags, as of version 0.5.23."""
    text = importlib.resources.files("mtpjax.cli").joinpath("sglang_flags.txt").read_text()
    return frozenset(text.split())


def _problem(name: str, known: Collection[str], sglang: Collection[str]) -> tuple[str, str]:
    """Returns whose flag this is, "" for nobody's, and what to do."""
    if name in sglang:
        return "SGLang", SGLANG_ADVICE.get(name, "leave it out")
    if name in VLLM_ADVICE:
        return "vLLM", VLLM_ADVICE[name]
    near = difflib.get_close_matches(name, known, n=1)
    return "", f"did you mean {near[0]}?" if near else ""


def _told(names: list[str], origin: str, advice: str) -> str:
    is_one, listed = len(names) == 1, ", ".join(names)
    if not origin:
        return f"unknown flag{'' if is_one else 's'} {listed}" + (f"; {advice}" if advice else "")
    kind = "is a flag" if is_one else "are flags"
    advice = advice if is_one else re.sub(r"^leave it out", "leave them out", advice)
    return f"{listed} {kind} of {origin} that mtpjax does not support: {advice}"
