"""The settings that a run folder stores, and which of them may differ when the run resumes."""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax import distributed
from mtpjax.evaluation.plan import USABLE_SHARE
from mtpjax.models.config import ModelConfig, Remat
from mtpjax.models.trunk import unstack_layers
from mtpjax.training.config import TrainConfig
from mtpjax.training.losses import ObjectiveFunction, describe_objective
from mtpjax.training.run_dir import RunError, read_run_file
from mtpjax.training.update_memory import UpdateShape, choose_remat

# Settings that may differ when a run resumes, because they do not change an update. Accumulation, remat and mesh are
# not among them, because they change how an update is rounded.
CHANGEABLE_SETTINGS = ("output", "log_every", "save_every", "keep_states", "max_consecutive_bad_steps", "panel_prompts")
CHANGEABLE_SETTINGS += ("tensorboard", "wandb", "profile_start", "profile_steps", "plot_formats")


def settings_to_json(config: TrainConfig, objective: ObjectiveFunction | None) -> dict[str, Any]:
    """Converts the settings to JSON values; infinity becomes None."""
    values = dataclasses.asdict(config)
    settings = {name: None if value == math.inf else value for name, value in values.items()}
    # Store the complete architecture, whatever its source, so that a run resumes with it and `mtpjax compare` shows the
    # fields that differ. A checkpoint determines the architecture; settings change only its number of modules.
    settings["model"] = config.model_config.to_dict() if config.init_from is None else dict(values["model"])
    settings["draft_reading"] = dict(config.draft_reading) or None
    # Runs that train MTP modules have no drafter settings.
    if config.draft_method.is_of_model:
        settings = {name: value for name, value in settings.items() if not name.startswith("draft")}
    # The objective's code is not stored, so resuming only checks that the objective has the same name.
    return settings | {"objective_function": None if objective is None else describe_objective(objective)}


def resolve_remat(
    config: TrainConfig, model_config: ModelConfig, params: dict, num_depths: int, *, platform: str
) -> Remat:
    """Returns a run's `remat`. On GPUs, "auto" is the fastest policy whose estimated memory fits, and is printed.

    With the mesh axis "context", "auto" on GPUs is "layers".

    Args:
        config: the run's settings.
        model_config: the model's config.
        params: the initial parameters, with stacked layers.
        num_depths: number of trained depths.
        platform: "cpu", "gpu" or "tpu".
    """
    if config.remat != "auto":
        return config.remat
    # A drafter's trunk has no backward pass.
    stats = jax.local_devices()[0].memory_stats() if platform == "gpu" and config.draft_method.is_of_model else None
    if not stats or "bytes_limit" not in stats:
        return "none"
    sizes, length = dict(config.mesh), config.row_length + config.extra_tokens
    # The estimate leaves out the keys and values that "context" gathers, so it cannot show that more fits.
    if sizes.get("context", 1) > 1:
        return "layers"
    shape = UpdateShape(
        tokens=config.batch_size // (config.accumulation * math.prod(sizes.values())) * length,
        row_length=length,
        trains=config.trains,
        num_depths=num_depths,
        vocab_chunk=config.objective.vocab_chunk,
        itemsize=jnp.dtype(config.dtype).itemsize,
        is_accumulated=config.accumulation > 1,
    )
    shapes = jax.eval_shape(functools.partial(unstack_layers, config=model_config), params)
    remat = choose_remat(model_config, shapes, sizes, shape, USABLE_SHARE * stats["bytes_limit"])
    # All processes must compile the same program, even if their GPUs differ.
    remat = distributed.from_main_process(remat)
    if distributed.is_main_process():
        print(f"remat auto: {remat}, for GPUs with {stats['bytes_limit'] / 1e9:.0f} GB", file=sys.stderr, flush=True)
    return remat


def check_settings(
    folder: pathlib.Path, settings: Mapping[str, Any], fingerprint: str, allowed_changes: Sequence[str] = ()
) -> str:
    """Checks that a run resumes with its original settings and data.

    Returns the run's identifier.

    Args:
        allowed_changes: settings that may differ, in addition to `CHANGEABLE_SETTINGS`; "data" allows different data.

    Raises:
        RunError: the folder holds no run, the run is damaged, or other settings or the data differ; for settings, the
            message shows both values.
    """
    before, data_before, run_id = read_run_file(folder, "fingerprint", "run")
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
        raise RunError(f"{folder} was started with different settings: {'; '.join(changed)}")
    if fingerprint != data_before and "data" not in free:
        raise RunError(f"{folder} was started with different data: files, their order or their content have changed")
    return run_id


def _with_model_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Replaces `model` with one entry per field, so that errors list the fields that differ, and drops the preset."""
    # The preset does not matter, because `model` has all its fields.
    others = {name: value for name, value in settings.items() if name not in ("model", "preset")}
    return others | {f"model.{name}": value for name, value in settings["model"].items()}
