"""Command-line flags made from the fields of `DecodeConfig` and `SamplingParams`. Imports no JAX.

The name, type and default of a flag come from the field, and its help text comes from the class's docstring. If SGLang
has a flag for the same setting, it is an alias.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterable
from typing import Any

from mtpjax.decoding.acceptance.rules import EXACT_NAMES, LOSSY_NAMES, PARAMETERS, RULES
from mtpjax.decoding.config import DecodeConfig, SamplingParams

# SGLang's server flags for the same settings; they are aliases.
SGLANG_FLAGS = {
    "num_steps": "--speculative-num-steps",
    "topk": "--speculative-eagle-topk",
    "num_draft_tokens": "--speculative-num-draft-tokens",
    "threshold_single": "--speculative-accept-threshold-single",
    "threshold_acc": "--speculative-accept-threshold-acc",
    "draft_window": "--speculative-draft-window-size",
    "draft_sinks": "--speculative-draft-sink-size",
    "draft_vocabulary": "--speculative-token-map",
}
# Settings for the draft's shape, for acceptance, and for individual drafters.
SHAPE_FIELDS = ("num_steps", "topk", "num_draft_tokens")
ACCEPTANCE_FIELDS = ("acceptance", *PARAMETERS)
MTP_FIELDS = ("draft_vocabulary", "draft_window", "draft_sinks")
LOOKUP_FIELDS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFT_FIELDS = (*SHAPE_FIELDS, *ACCEPTANCE_FIELDS, *MTP_FIELDS)
# Settings for the commands that generate text.
TEXT_FIELDS = ("max_new_tokens", "max_length", "drafter", *DRAFT_FIELDS, *LOOKUP_FIELDS)
TEXT_FIELDS += ("kv_cache_dtype", "deterministic", "allow_copies")
# Sampling options that have one value for all rows. The other fields of `SamplingParams` have no flags.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty")
SAMPLING_FIELDS += ("presence_penalty", "min_new_tokens")
# The `--help` group of each field's flag.
GROUPS = {
    "model": ("kv_cache_dtype", "deterministic"),
    "length": ("max_new_tokens", "max_length", "min_new_tokens"),
    "drafts": ("drafter", *SHAPE_FIELDS, "depth_policy", *MTP_FIELDS, *LOOKUP_FIELDS),
    "acceptance": ACCEPTANCE_FIELDS,
    "sampling": SAMPLING_FIELDS[:-1],
    "devices": ("allow_copies",),
}
FLAG_FIELDS = {name for names in GROUPS.values() for name in names}
# Help texts for the flags whose values differ from the values of their fields.
_HELP = {
    "acceptance": f"acceptance rule: auto, {', '.join(EXACT_NAMES)}, or package.module:RECORD for your own "
    f"AcceptanceRule. The lossy rules {', '.join(LOSSY_NAMES)} change the text's distribution. auto is greedy if all "
    "prompts have temperature 0, else block for chains and recursive for trees",
    "drafter": "draft method: mtp (the model's MTP modules), lookup (n-grams from the prompt and the text so far), or "
    "package.module:RECORD for your own DraftMethod",
    "draft_vocabulary": "file written by `mtpjax vocabulary`: the MTP modules draft only the tokens in it",
}


def add_config_flags(parser, fields: Iterable[str], **defaults: Any) -> None:
    """Adds flags for these fields of `DecodeConfig` or `SamplingParams`; `defaults` override the fields' defaults."""
    for name in fields:
        kind = SamplingParams if name in SAMPLING_FIELDS else DecodeConfig
        default, type_hint = defaults.get(name, getattr(kind, name)), _type_hints(kind)[name]
        text = _HELP.get(name) or _flag_text(field_docs(kind).get(name, ""))
        if name == "num_steps" and default is None:
            text += " (default: 2 with MTP modules, 4 for lookup, else 0)"
        if name == "max_new_tokens" and default is None:
            text += " (default: as many as fit)"
        flag: dict[str, Any] = {"action": "store_true"} if type_hint is bool else {"type": _number_or_text(type_hint)}
        if choices := rule_choices("auto") if name == "acceptance" else _names_of(type_hint):
            flag |= {"choices": choices, "metavar": name.rsplit("_")[-1].upper()}
        group = next(group for group, names in GROUPS.items() if name in names)
        parser.flag_group(group).add_argument(*flag_names(name), default=default, help=text, **flag)


def add_text_flags(parser, *more: str, seed: str) -> None:
    """Adds the `TEXT_FIELDS`, sampling and `--seed` flags of a command that generates text. `seed` is a help text."""
    # `num_steps=None` lets `with_num_steps` choose by drafter and model.
    add_config_flags(parser, (*TEXT_FIELDS, *more, *SAMPLING_FIELDS), max_new_tokens=256, num_steps=None)
    add_seed_flag(parser, seed)


def add_seed_flag(parser, help: str) -> None:
    parser.flag_group("sampling").add_argument("--seed", type=int, default=0, help=help)


_type_hints = functools.cache(typing.get_type_hints)


class _NamesOrRecord(tuple):
    """The names that a flag accepts. It also accepts any `package.module:RECORD`."""

    def __contains__(self, value: object) -> bool:
        return ":" in str(value) or super().__contains__(value)


def rule_choices(*names: str) -> tuple[str, ...]:
    """Returns the choices of `--acceptance`, which are these names, all rules, and `package.module:RECORD`."""
    return _NamesOrRecord((*names, *RULES))


def _flag_text(text: str) -> str:
    """Converts a field's docstring to the help text of its flag."""
    # Drop SGLang's name, which is an alias of the flag, and "None", which cannot be the value of a flag.
    text = re.sub(r"[.] SGLang: `\w+`", "", text)
    text = re.sub(r"[.;] None: (.*)$", r" (default: \1)", text)
    return re.sub(r"`?\b(topk|[a-z]+_[a-z_]+)\b", lambda match: _flag_of(match[0], match[1]), text).replace("`", "")


def _flag_of(text: str, name: str) -> str:
    """Returns the flag of the field `name`, or `text` if it is not a field."""
    return f"--{name.replace('_', '-')}" if name in FLAG_FIELDS else text


def flag_names(name: str) -> list[str]:
    """Returns the flags of a setting, which are its own flag and SGLang's, if any.

    A parser stores the value under the name of the first flag, such as "num_steps" for `--num-steps`.
    """
    return [f"--{name.replace('_', '-')}", *filter(None, [SGLANG_FLAGS.get(name)])]


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Reads each field's description as one line from a class's `Attributes:`. Returns {} under `python -OO`."""
    # The section ends at the first empty line.
    _, _, section = (kind.__doc__ or "").partition("Attributes:\n")
    section = re.split(r"\n\s*\n", section)[0]
    # An entry is `name: text`, indented by 8 spaces. Lines with deeper indentation continue it.
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).rstrip(".") for name, text in entries}


def _names_of(annotation: Any) -> tuple[str, ...]:
    """Returns the values of a `Literal` type, or () for other types."""
    parts = (annotation, *typing.get_args(annotation))
    return next((typing.get_args(part) for part in parts if typing.get_origin(part) is typing.Literal), ())


def _number_or_text(annotation: Any) -> type:
    """Returns the type to which a flag's text is converted."""
    # A union such as `int | None` or `float | Sequence[float]` converts to its number.
    options = (annotation, *typing.get_args(annotation))
    return next((kind for kind in (int, float) if kind in options), str)


def decode_settings(options) -> dict[str, Any]:
    """Collects the fields of `DecodeConfig` from the parsed flags.

    A threshold below 1 selects the acceptance rule "threshold", as in SGLang, and the draft vocabulary is read from its
    file.

    Raises:
        ValueError: a threshold below 1 is given with another rule, or the file is not a draft vocabulary.
        OSError: the file cannot be read.
    """
    # The parsed flags include the command's own, so keep only the fields of `DecodeConfig`.
    known = {field.name for field in dataclasses.fields(DecodeConfig)}
    settings = {name: value for name, value in vars(options).items() if name in known}
    # SGLang has no flag for this rule, which is enabled by a threshold below 1.
    if min(settings.get(name, 1.0) for name in ("threshold_single", "threshold_acc")) < 1:
        if settings["acceptance"] not in ("auto", "threshold"):
            raise ValueError(f"thresholds below 1 need acceptance 'threshold', not '{settings['acceptance']}'")
        settings["acceptance"] = "threshold"
    # The flag's value is a file, but the configuration contains token ids.
    if settings.get("draft_vocabulary") is not None:
        from mtpjax.data.draft_vocabulary import load_vocabulary

        settings["draft_vocabulary"] = load_vocabulary(settings["draft_vocabulary"])
    return settings


def with_num_steps(settings: dict[str, Any], config) -> dict[str, Any]:
    """Returns the arguments for `DecodeConfig`, with `num_steps` set to the given value or to the method's default.

    The default is 0 if the method uses the model's MTP modules and the model has none.
    """
    from mtpjax.drafters.methods import default_num_steps

    if settings["num_steps"] is not None:
        return settings
    return settings | {"num_steps": default_num_steps(settings.get("drafter", "mtp"), config)}


def sampling_params(options) -> SamplingParams:
    """Makes the sampling parameters, which are the same for all rows and contain no seeds."""
    return SamplingParams(**{name: options[name] for name in SAMPLING_FIELDS})
