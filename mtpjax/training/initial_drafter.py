"""Makes or loads the drafter that a run trains, and saves the trained one."""

import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax import distributed
from mtpjax.data.draft_vocabulary import choose_vocabulary
from mtpjax.drafters.files.write import find_form
from mtpjax.drafters.forward import draft_heads
from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.methods import DRAFTER_FOLDER, METHODS, load_drafter, method_of, save_drafter
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.errors import UsageError
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus


class InitialDrafter(NamedTuple):
    """The drafter of a run before its first update."""

    drafter: TrainedDrafter
    params: DraftParams | None  # None: new weights, which `add_drafter` makes


def initial_drafter(config: TrainConfig, model: MTPModel) -> InitialDrafter | None:
    """Makes a new drafter, or loads the one to continue training; returns None for MTP modules.

    Raises:
        ValueError: the settings do not fit the trunk, or contradict the files in `draft_init_from`.
        CheckpointError: these files cannot be read, or no file format can represent the drafter.
    """
    method = config.draft_method
    if method.is_of_model:
        return None
    if config.draft_init_from is None:
        return InitialDrafter(new_drafter(config, model.config), None)
    # A run replaces the drafter in its own folder, but reads its initial drafter again when it resumes.
    path, output = (pathlib.Path(each).resolve() for each in (config.draft_init_from, config.output))
    if path.is_relative_to(output):
        raise UsageError(f"draft_init_from {path} is in output {output}: choose a different output")
    reading: dict[str, Any] = dict(config.draft_reading)
    # The files of user-defined methods cannot be detected, so name the method.
    chosen = None if method in METHODS else method
    drafter, params = load_drafter(config.draft_init_from, model=model, dtype=jnp.float32, method=chosen, **reading)
    _check_settings(config, method, drafter)
    # Fail now if the drafter could not be saved at the end of the run.
    find_form(method, drafter.architecture, has_draft_ids=params.draft_ids is not None)
    return InitialDrafter(drafter, params)


def add_drafter(
    params: dict, initial: InitialDrafter, *, config: TrainConfig, corpus: Corpus, model: MTPModel
) -> tuple[dict, TrainedDrafter]:
    """Adds a drafter to its trunk's parameters, as `DRAFTER` (float32) and `DRAFT_IDS`. Fits a new drafter first."""
    if initial.params is not None:
        return params | initial.params.beside_trunk(), initial.drafter
    drafter, ids = fit_to_data(initial.drafter, config, corpus)
    settings = {"model": model, "method": config.draft_method, "drafter": drafter, "draft_ids": ids}
    return add_new_drafter(params, **settings, key=jax.random.key(config.seed)), drafter


def _check_settings(config: TrainConfig, method: DraftMethod, drafter: TrainedDrafter) -> None:
    """Raises `UsageError` if the settings contradict the drafter's files."""
    found, path = method_of(drafter) or method, config.draft_init_from
    if found is not method:
        raise UsageError(
            f"draft_init_from {path} holds a drafter of method '{found.name}': set drafter={found.name}, not "
            f"{config.drafter}"
        )
    assert method.training is not None
    own = method.training.settings_of(drafter.architecture)
    own["draft_vocab_size"] = drafter.architecture.draft_vocab_size
    # Omitted settings are taken from the files, except for the number of depths.
    wrong = [
        f"{name} is {value}, not {given}"
        for name, value in own.items()
        if (given := getattr(config, name)) != value and (name == "num_depths" or given != getattr(TrainConfig, name))
    ]
    if wrong:
        raise UsageError(
            f"settings differ from the drafter in draft_init_from {path}, whose {'; '.join(wrong)}: set these values, "
            "or leave out the draft_* settings; a different architecture needs a new drafter"
        )


def new_drafter(config: TrainConfig, trunk: ModelConfig) -> TrainedDrafter:
    """Makes the drafter for a run that trains one from scratch; `fit_to_data` completes it.

    Raises:
        ValueError: the settings do not fit the trunk.
    """
    method, V = config.draft_method, trunk.vocab_size
    assert method.training is not None
    if config.draft_vocab_size > V:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary size {V}")
    # 0 means the full vocabulary.
    return method.for_architecture(method.training.architecture(config, trunk, config.draft_vocab_size or V))


def fit_to_data(
    drafter: TrainedDrafter, config: TrainConfig, corpus: Corpus
) -> tuple[TrainedDrafter, jax.Array | None]:
    """Completes a new drafter's architecture from the training rows, and chooses its draft vocabulary from them.

    Returns:
        The drafter and its draft vocabulary: the ids of the most frequent targets and of the end-of-text tokens, `[R]`
        int32 in ascending order; None if all tokens can be drafted.
    """
    method, own = config.draft_method, drafter.architecture
    assert method.training is not None
    V = own.trunk.vocab_size
    # Count the targets of the training rows.
    counts = np.zeros(V, np.int64)
    for rows in corpus.source_rows:
        counts += np.bincount(rows.tokens[(rows.segment_ids > 0) & rows.loss_mask], minlength=V)
    # Keep the end-of-text tokens, so that every text can end.
    ends = [token for token in corpus.tokenizer.eos_token_ids if token < V]
    drafter = method.for_architecture(method.training.fit_to_data(own, config, counts, ends))
    if (size := own.draft_vocab_size) == V:
        return drafter, None
    return drafter, jnp.array(choose_vocabulary(counts, size, required_ids=ends), jnp.int32)


def add_new_drafter(
    params: dict,
    *,
    model: MTPModel,
    method: DraftMethod,
    drafter: TrainedDrafter,
    draft_ids: jax.Array | None,
    key: jax.Array,
) -> dict:
    """Adds a new drafter to its trunk's parameters. Its heads start as the trunk head's columns for the draft ids.

    Args:
        params: the trunk's parameters.
        model: the trunk.
        method: the drafter's method.
        drafter: the drafter.
        draft_ids: `[R]` int32 token id of each column of the drafter's head; None: column j is token j.
        key: a `jax.random` key.

    Returns:
        The parameters with `DRAFTER` (float32), and with `DRAFT_IDS` if `draft_ids` are given.
    """
    assert method.training is not None
    network = method.training.init(drafter.architecture, key)
    params = params | DraftParams(network, draft_ids).beside_trunk()
    head = draft_heads(params, model=model, drafter=drafter, num_depths=0)[0].astype(jnp.float32)
    for name in drafter.head_names:
        if name in network:
            params[DRAFTER][name] = jnp.copy(head)
    return params


def save_trained_drafter(
    output: pathlib.Path, params: dict, drafter: TrainedDrafter, method: DraftMethod
) -> pathlib.Path:
    """Saves a trained drafter in the run folder, in the format that `find_form` chooses; replaces an older one.

    All processes must call it. The first one writes.
    """
    path, unfinished = output / DRAFTER_FOLDER, output / f".{DRAFTER_FOLDER}-new"
    form = find_form(method, drafter.architecture, has_draft_ids=DRAFT_IDS in params)
    draft_params = distributed.gather_processes(DraftParams.of(params))
    with distributed.raise_together(OSError(f"process 0 cannot write {path}; see its error message")):
        if distributed.is_main_process():
            shutil.rmtree(unfinished, ignore_errors=True)
            save_drafter(unfinished, drafter, draft_params, format=form, method=method)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
    return path
