"""The settings of a run in its folder: what is stored, and what may differ when the run resumes."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.safe_open import read_json_file
from mtpjax.training.config import TrainConfig
from mtpjax.training.losses import ObjectiveFunction, describe_objective
from mtpjax.training.run_dir import MAX_SETTINGS_BYTES, SETTINGS_FILE, RunError

# Settings that may differ when a run resumes, because they do not change an update. Accumulation, remat and mesh are
# not among them: they change its rounding.
CHANGEABLE_SETTINGS = ("output", "log_every", "save_every", "keep_states", "max_consecutive_bad_steps", "panel_prompts")
CHANGEABLE_SETTINGS += ("tensorboard", "wandb", "profile_start", "profile_steps", "plot_formats")


def settings_to_json(config: TrainConfig, objective: ObjectiveFunction | None) -> dict[str, Any]:
    """Converts the settings to JSON values, with None for infinity and for unset fields."""
    values = dataclasses.asdict(config)
    settings = {name: None if value == math.inf else value for name, value in values.items()}
    # The whole architecture, so that a run resumes with it regardless of its source, and `mtpjax compare` shows the
    # fields that differ. A checkpoint has its own, and the settings change only its number of modules.
    settings["model"] = config.model_config.to_dict() if config.init_from is None else dict(values["model"])
    settings["draft_reading"] = dict(config.draft_reading) or None
    # Runs of MTP modules have no settings of drafters.
    if config.draft_method.is_of_model:
        settings = {name: value for name, value in settings.items() if not name.startswith("draft")}
    # Code is not stored: a resumed run is checked to have an objective of the same name.
    return settings | {"objective_function": None if objective is None else describe_objective(objective)}


def check_settings(
    folder: pathlib.Path, settings: Mapping[str, Any], fingerprint: str, allowed_changes: Sequence[str] = ()
) -> str:
    """Checks that a run resumes with the settings and data it was started with.

    Returns the run's identifier.

    Args:
        allowed_changes: settings that may differ, in addition to `CHANGEABLE_SETTINGS`; "data" allows other data.

    Raises:
        RunError: the folder holds no run, the run is damaged, or something else differs; the message names both values.
    """
    try:
        stored = read_json_file(folder / SETTINGS_FILE, max_bytes=MAX_SETTINGS_BYTES)
        before, data_before, run_id = dict(stored["settings"]), stored["fingerprint"], stored["run"]
    except FileNotFoundError:
        raise RunError(f"{folder} holds no run to resume: {SETTINGS_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / SETTINGS_FILE} is damaged: {error}") from error
    # Compare as JSON, in which tuples are lists. A setting missing on one side counts as None.
    free = {*CHANGEABLE_SETTINGS, *allowed_changes}
    now = json.loads(json.dumps(dict(settings)))
    if isinstance(before.get("model"), dict) and isinstance(now.get("model"), dict):
        before, now = _with_model_fields(before), _with_model_fields(now)
    changed = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not {name, name.partition(".")[0]} & free
    ]
    if changed:
        raise RunError(f"{folder} was started with other settings: {'; '.join(changed)}")
    if fingerprint != data_before and "data" not in free:
        raise RunError(f"{folder} was started with other data: files, their order or content have changed")
    return run_id


def _with_model_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Replaces `model` by an entry per field, so that a message names those that differ, and drops the preset."""
    # The preset does not matter: `model` has all its fields.
    others = {name: value for name, value in settings.items() if name not in ("model", "preset")}
    return others | {f"model.{name}": value for name, value in settings["model"].items()}
