"""Makes the initial drafter of a run: a new one, or one from files."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.drafters.files.write import find_form
from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.methods import METHODS, find_method, load_drafter, method_of
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.errors import UsageError
from mtpjax.models.model import MTPModel
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus
from mtpjax.training.initial_drafter import add_new_drafter, fit_to_data, new_drafter


class InitialDrafter(NamedTuple):
    """The drafter of a run before its first update."""

    method: DraftMethod
    drafter: TrainedDrafter
    params: DraftParams | None  # None: new weights, which `add_drafter` makes


def initial_drafter(config: TrainConfig, model: MTPModel) -> InitialDrafter | None:
    """Makes a run's drafter, or loads the one to continue training; None for MTP modules.

    Raises:
        ValueError: the settings do not fit the trunk, or contradict the files of `draft_init_from`.
        CheckpointError: these files cannot be read, or no format can express the drafter.
    """
    method = find_method(config.drafter)
    if method.is_of_model:
        return None
    if config.draft_init_from is None:
        return InitialDrafter(method, new_drafter(config, model.config), None)
    # A run replaces the drafter in its folder, and a resumed run reads its original drafter again.
    path, output = (pathlib.Path(each).resolve() for each in (config.draft_init_from, config.output))
    if path.is_relative_to(output):
        raise UsageError(f"draft_init_from {path} is in output {output}: choose another output")
    reading: dict[str, Any] = dict(config.draft_reading)
    # Only files of the methods in `METHODS` can be detected.
    chosen = None if method in METHODS else method
    drafter, params = load_drafter(config.draft_init_from, model=model, dtype=jnp.float32, method=chosen, **reading)
    _check_settings(config, method, drafter)
    # Fail now if the drafter could not be saved at the end of the run.
    find_form(method, drafter.architecture, has_draft_ids=params.draft_ids is not None)
    return InitialDrafter(method, drafter, params)


def add_drafter(
    params: dict, initial: InitialDrafter, *, config: TrainConfig, corpus: Corpus, model: MTPModel
) -> tuple[dict, TrainedDrafter]:
    """Adds a drafter to its trunk's parameters, as `DRAFTER` (float32) and `DRAFT_IDS`; fits a new one to the data."""
    if initial.params is not None:
        return params | initial.params.beside_trunk(), initial.drafter
    drafter, ids = fit_to_data(initial.drafter, config, corpus)
    settings = {"model": model, "method": initial.method, "drafter": drafter, "draft_ids": ids}
    return add_new_drafter(params, **settings, key=jax.random.key(config.seed)), drafter


def _check_settings(config: TrainConfig, method: DraftMethod, drafter: TrainedDrafter) -> None:
    """Raises `UsageError` if settings differ from the files."""
    found, path = method_of(drafter) or method, config.draft_init_from
    if found is not method:
        raise UsageError(
            f"draft_init_from {path} is of kind '{found.name}': set drafter={found.name}, not {config.drafter}"
        )
    assert method.training is not None
    own = method.training.settings_of(drafter.architecture)
    own["draft_vocab_size"] = drafter.architecture.draft_vocab_size
    # Settings left out are taken from the files, except the number of depths.
    defaults = {name: getattr(TrainConfig, name) for name in own if name != "num_depths"}
    wrong = [
        f"{name} is {value}, not {given}"
        for name, value in own.items()
        if (given := getattr(config, name)) != value and (name not in defaults or given != defaults[name])
    ]
    if wrong:
        raise UsageError(
            f"settings differ from the drafter of draft_init_from {path}, whose {'; '.join(wrong)}: set these values, "
            "or leave out settings that begin with draft_; a drafter of another architecture is a new one"
        )
