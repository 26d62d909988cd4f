"""Warns about `DecodeConfig` settings that have no effect because of other settings."""

import dataclasses
import functools
import logging

from mtpjax.decoding.acceptance.rules import RULES
from mtpjax.decoding.config import DecodeConfig

log = logging.getLogger("mtpjax.decoding")


def find_unused_settings(config: DecodeConfig) -> dict[str, str]:
    """Finds the settings that differ from their defaults and have no effect.

    Returns:
        A mapping from the name of each such setting to the condition under which it would have an effect.
    """
    # Plain decoding ignores all draft settings. Callers derive a config for plain decoding from any other config, so
    # only `num_draft_tokens` is reported.
    if not config.num_steps:
        return {} if config.num_draft_tokens is None else {"num_draft_tokens": "num_steps above 0"}
    needs = {
        name: f"acceptance '{rule}'" for rule in RULES.values() for name in rule.parameters if config.rule is not rule
    }
    if config.depth_policy != "adaptive":
        needs |= dict.fromkeys(("depth_costs", "depth_rates"), "depth_policy 'adaptive'")
    if config.drafter != "lookup":
        needs |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), "drafter 'lookup'")
    if config.draft_window is None:
        needs["draft_sinks"] = "draft_window"
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: need for name, need in needs.items() if getattr(config, name) != defaults[name]}


def warn_of_unused_settings(config: DecodeConfig) -> None:
    """Logs a warning for each setting that has no effect."""
    for name, need in find_unused_settings(config).items():
        _warn_once(f"{name} {getattr(config, name)} has no effect: it needs {need}")


@functools.lru_cache(maxsize=256)  # a program decodes many batches with the same settings
def _warn_once(text: str) -> None:
    log.warning("%s", text)
