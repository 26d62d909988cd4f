"""Command-line flags made from the fields of `DecodeConfig` and `SamplingParams`. Imports no JAX.

The dataclass alone describes a setting: a flag has its field's name, type and default, and the field's text in the
class's docstring is its help. SGLang's flag for the same setting, if any, is an alias.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from mtpjax.decoding.acceptance.rules import EXACT_NAMES, LOSSY_NAMES, PARAMETERS, RULES
from mtpjax.decoding.config import DecodeConfig, SamplingParams

# SGLang's server flags for the same settings, accepted as aliases.
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
# Settings of the draft's shape, of acceptance, and of one drafter each.
SHAPE_FIELDS = ("num_steps", "topk", "num_draft_tokens")
ACCEPTANCE_FIELDS = ("acceptance", *PARAMETERS)
MTP_FIELDS = ("draft_vocabulary", "draft_window", "draft_sinks")
LOOKUP_FIELDS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFT_FIELDS = (*SHAPE_FIELDS, *ACCEPTANCE_FIELDS, *MTP_FIELDS)
# Numbers with one value for all rows. The other fields of `SamplingParams` have no form on a command line.
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_new_tokens",
)
# The group of flags in `--help` that a field belongs to.
GROUPS = {
    "model": ("kv_cache_dtype", "deterministic"),
    "length": ("max_new_tokens", "max_length", "min_new_tokens"),
    "drafts": ("drafter", *SHAPE_FIELDS, "depth_policy", *MTP_FIELDS, *LOOKUP_FIELDS),
    "acceptance": ACCEPTANCE_FIELDS,
    "sampling": (*SAMPLING_FIELDS[:-1], "seed"),
    "devices": ("allow_copies",),
}
FLAG_FIELDS = tuple(
    name for names in GROUPS.values() for name in names if name not in SAMPLING_FIELDS and name != "seed"
)
# Fields whose flag takes a different kind of value.
_HELP = {
    "acceptance": f"acceptance rule: auto, {', '.join(EXACT_NAMES)}; {', '.join(LOSSY_NAMES)} change the text's "
    "distribution; or package.module:RECORD, an AcceptanceRule of yours. auto is greedy if every prompt is at "
    "temperature 0, else block for a chain and recursive for a tree",
    "drafter": "draft method: mtp (the model's MTP modules), lookup (n-grams copied from the row's own text, which "
    "needs no MTP modules), or package.module:RECORD, a DraftMethod of yours",
    "draft_vocabulary": "file written by `mtpjax vocabulary`: the MTP modules draft only its tokens",
}


def add_config_flags(parser, fields: Iterable[str], **defaults: Any) -> None:
    """Adds a flag for each of these fields of `DecodeConfig`; `defaults` replace the fields' own."""
    _add_flags(parser, DecodeConfig, fields, defaults)


def add_sampling_flags(parser, *, seed: str = "seed of the first prompt; each further prompt adds 1") -> None:
    """Adds a flag for each number in `SamplingParams`, and `--seed` with this help."""
    _add_flags(parser, SamplingParams, SAMPLING_FIELDS, {})
    parser.flag_group(_group_of("seed")).add_argument("--seed", type=int, default=0, help=seed)


def _add_flags(parser, kind: type, fields: Iterable[str], defaults: Mapping[str, Any]) -> None:
    texts = {name: _flag_text(text) for name, text in field_docs(kind).items()} | _HELP
    types = typing.get_type_hints(kind)
    own_defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name in fields:
        default = defaults.get(name, own_defaults[name])
        text = texts.get(name, "")
        if name == "num_steps" and default is None:
            text += " (default: 2 with MTP modules, 4 for lookup, else 0)"
        kind_of_flag = {"action": "store_true"} if types[name] is bool else {"type": _number_or_text(types[name])}
        choices = rule_choices("auto") if name == "acceptance" else _names_of(types[name])
        if choices:
            kind_of_flag |= {"choices": choices, "metavar": name.rsplit("_")[-1].upper()}
        parser.flag_group(_group_of(name)).add_argument(*flag_names(name), default=default, help=text, **kind_of_flag)


class _NamesOrRecord(tuple):
    """Names that a flag takes, in addition to `package.module:RECORD`."""

    def __contains__(self, value: object) -> bool:
        return ":" in str(value) or super().__contains__(value)


def rule_choices(*names: str) -> tuple[str, ...]:
    """Returns what `--acceptance` takes: these names, those of all rules, and `package.module:RECORD`."""
    return _NamesOrRecord((*names, *RULES))


def _group_of(name: str) -> str:
    return next(group for group, names in GROUPS.items() if name in names)


def _flag_text(text: str) -> str:
    """Converts a field's docstring to the help text of its flag."""
    # Drops SGLang's name, which is an alias of the flag, and "None", which a flag cannot take.
    text = re.sub(r"[.] SGLang: `\w+`", "", text)
    text = re.sub(r"[.;] None: (.*)$", r" (default: \1)", text)
    return re.sub(r"`?\b(topk|[a-z]+_[a-z_]+)\b", lambda match: _flag_of(match[0], match[1]), text).replace("`", "")


def _flag_of(text: str, name: str) -> str:
    """Returns the flag of the field `name`, or `text` if it is not a field."""
    return f"--{name.replace('_', '-')}" if name in FLAG_FIELDS + SAMPLING_FIELDS else text


def flag_names(name: str) -> list[str]:
    """Returns the flags of a setting: its own name, and SGLang's if SGLang has one.

    The first decides where a parser stores the value: `--num-steps` under "num_steps".
    """
    return [f"--{name.replace('_', '-')}", *filter(None, [SGLANG_FLAGS.get(name)])]


def field_docs(kind: type) -> dict[str, str]:
    """Reads the text of each field, on one line, from a class's `Attributes:`; nothing under `python -OO`."""
    # The section ends at the first empty line.
    _, _, section = (kind.__doc__ or "").partition("Attributes:\n")
    section = re.split(r"\n\s*\n", section)[0]
    # An entry is `name: text` at 8 spaces; deeper lines continue it.
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).rstrip(".") for name, text in entries}


def _names_of(annotation: Any) -> tuple[str, ...]:
    """Returns the values of a `Literal` type; empty for other types."""
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
    # The parser holds flags of the command itself too; keep those that `DecodeConfig` knows.
    known = {field.name for field in dataclasses.fields(DecodeConfig)}
    settings = {name: value for name, value in vars(options).items() if name in known}
    # SGLang has no flag for the rule: a threshold below 1 turns it on.
    if min(settings.get(name, 1.0) for name in ("threshold_single", "threshold_acc")) < 1:
        if settings["acceptance"] not in ("auto", "threshold"):
            raise ValueError(f"thresholds below 1 need acceptance 'threshold', not '{settings['acceptance']}'")
        settings["acceptance"] = "threshold"
    # The flag names a file; the configuration holds the token ids.
    if settings.get("draft_vocabulary") is not None:
        from mtpjax.data.draft_vocabulary import load_vocabulary

        settings["draft_vocabulary"] = load_vocabulary(settings["draft_vocabulary"])
    return settings


def choose_num_steps(flag_value: int | None, drafter: str, num_mtp_modules: int) -> int:
    """Returns the given draft levels, or the method's default; 0 for MTP modules that the model does not have."""
    if flag_value is not None:
        return flag_value
    from mtpjax.drafters.methods import find_method

    method = find_method(drafter)
    return 0 if method.is_of_model and not num_mtp_modules else method.default_levels


def with_num_steps(settings: dict[str, Any], config) -> dict[str, Any]:
    """Returns arguments of `DecodeConfig` with the draft levels of `choose_num_steps`."""
    steps = choose_num_steps(settings["num_steps"], settings.get("drafter", "mtp"), config.num_mtp_modules)
    return settings | {"num_steps": steps}


def sampling_params(options, num_prompts: int) -> SamplingParams:
    """Makes the sampling parameters of a batch: one seed per row, so that a repeated prompt gets a different text."""
    # One number for all rows; only the seed differs.
    numbers = {name: options[name] for name in SAMPLING_FIELDS}
    return SamplingParams(**numbers, seed=[options.seed + row for row in range(num_prompts)])
