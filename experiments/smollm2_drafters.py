"""Trains the drafters of `compare_smollm2_drafters` on one cache of trunk states, and brings them to the full trunk.

All train on the trunk in the vocabulary of its answers (`smollm2_data`). A module does not depend on the vocabulary.
Other drafters name tokens: their draft ids, the mask token of a block, and the rows of DSpark's Markov head.
"""

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.compare_drafters import METHODS
from experiments.smollm2_modules import attach_modules, save_modules, train_config
from experiments.smollm2_settings import Settings
from experiments.train_smollm2 import TrainingData
from mtpjax import DecodeConfig, MTPModel, TrainConfig, load_drafter, save_drafter
from mtpjax.atomic import write_text
from mtpjax.data.packing import concatenate_rows
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.forward import read_layers
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.training import run_dir
from mtpjax.training.callbacks import Callback, TrainEvent
from mtpjax.training.corpus import load_corpus
from mtpjax.training.cost import seconds_per_update
from mtpjax.training.hidden_state_cache import open_hidden_state_cache
from mtpjax.training.initial_model import init_model
from mtpjax.training.new_drafter import new_drafter
from mtpjax.training.trainer import train

SAVE_EVERY = 50  # updates; a state has the trunk, too


class Drafts(NamedTuple):
    """What `speculative_generate` takes, beside the prompts."""

    model: MTPModel
    params: dict
    draft_params: Any
    config: DecodeConfig


class CpuBudget(Callback):
    """Stops a run once it has taken its CPU time. The time of interrupted calls counts.

    Args:
        path: JSON file of the time and of the number of updates.
        seconds: CPU time of all threads.
    """

    def __init__(self, path: pathlib.Path, seconds: float):
        self.path, self.seconds = path, seconds
        self.spent: dict[str, Any] = {"cpu_seconds": 0.0, "updates": 0}
        if path.exists():
            self.spent = json.loads(path.read_text())
        self.begin = time.process_time() - self.spent["cpu_seconds"]

    def after_update(self, event: TrainEvent) -> bool:
        """Writes the time down, so that a killed run loses none of it."""
        self.spent = {"cpu_seconds": time.process_time() - self.begin, "updates": event.step}
        write_text(self.path, json.dumps(self.spent) + "\n")
        return self.spent["cpu_seconds"] >= self.seconds


def drafter_config(folder: pathlib.Path, data: TrainingData, method: str, settings: Settings) -> TrainConfig:
    """Makes the settings of one drafter's run: those of `train_smollm2`, so that all see the same rows.

    Args:
        folder: output folder.
        data: what to train on.
        method: name in `METHODS`.
        settings: the settings.

    Returns:
        The settings.
    """
    own = dict(METHODS[method])
    # A module has no head: its draft vocabulary is that of decoding.
    if method != "mtp":
        own["draft_vocab_size"] = len(data.vocabulary)
    log_every = max(1, min(10, settings.updates // 4))
    own |= {"output": str(folder / "runs" / method), "log_every": log_every, "save_every": SAVE_EVERY}
    return dataclasses.replace(train_config(folder, data.reduced, data.conversations, settings), **own)


def fill_states(configs: Sequence[TrainConfig]) -> None:
    """Computes the trunk states that any of the runs reads, in one pass; continues an interrupted call.

    Args:
        configs: runs on the same rows, with one folder of states.

    Raises:
        Preempted: the process was told to stop.
    """
    # A run with unrolled layers, if there is one: only those return the states that enter them.
    config = max(configs, key=lambda each: each.drafter != "mtp")
    model, make_params = init_model(config)
    drafters = [new_drafter(each, model.config) for each in configs if not each.draft_method.is_of_model]
    corpus = load_corpus(config, model.config.vocab_size, num_depths=config.num_depths)
    with run_dir.catch_stop_signals() as should_stop:
        open_hidden_state_cache(
            config.trunk_states,
            make_params(),
            concatenate_rows(corpus.source_rows),
            model=model,
            batch_size=config.batch_size,
            dtype=config.trunk_states_dtype,
            layer_ids=tuple(sorted({layer for drafter in drafters for layer in read_layers(drafter)})),
            should_stop=should_stop,
        )


def train_drafter(
    folder: pathlib.Path, data: TrainingData, method: str, settings: Settings, *, embedding: jax.Array, minutes: float
) -> dict[str, Any]:
    """Trains one drafter, or continues its run, and writes it for the full trunk.

    Args:
        folder: output folder, which receives `runs/` and `drafters/`.
        data: what to train on.
        method: name in `METHODS`.
        settings: the settings.
        embedding: `[V, D]` of the full trunk, which is also its head.
        minutes: CPU time after which training ends.

    Returns:
        Updates, tokens, CPU seconds, and the median duration of an update, as JSON.
    """
    config = drafter_config(folder, data, method, settings)
    budget = CpuBudget(folder / "runs" / f"{method}.cpu.json", 60 * minutes)
    is_begun = (pathlib.Path(config.output) / run_dir.SETTINGS_FILE).exists()
    # One evaluation, at the end: each one runs the trunk.
    result = train(config, callbacks=[budget], evaluations=1, resume=is_begun)
    path = drafter_path(folder, method)
    if result.drafter is None:
        save_modules(path, result.params["mtp_0"], data.vocabulary)
    else:
        shutil.rmtree(path, ignore_errors=True)
        full = to_full_vocabulary(result.drafter, result.draft_params, data.ids, embedding)  # type: ignore[reportArgumentType]
        files = config.draft_method.files
        save_drafter(path, *full, format=None if files is None else files.format_with_ids)
    updates = budget.spent["updates"]
    tokens = updates * config.batch_size * config.row_length
    return {**budget.spent, "tokens": tokens, "seconds_per_step": seconds_per_update(result.history)}


def to_full_vocabulary(
    drafter: TrainedDrafter, draft_params: DraftParams, ids: np.ndarray, embedding: jax.Array
) -> tuple[TrainedDrafter, DraftParams]:
    """Brings a drafter from the trunk in a part of the vocabulary to the trunk in all of it.

    Args:
        drafter: the drafter.
        draft_params: its parameters.
        ids: `[R]` token of the full trunk of each token of the reduced one.
        embedding: `[V, D]` of the full trunk, which is also its head.

    Returns:
        The drafter and its parameters. It drafts the same tokens, with a head of its own.
    """
    V, own = len(embedding), drafter.architecture
    draft_ids = jnp.asarray(ids if draft_params.draft_ids is None else ids[np.asarray(draft_params.draft_ids)])
    sizes: dict[str, Any] = {"draft_vocab_size": len(draft_ids)}
    if isinstance(own, MedusaConfig):
        config: Any = dataclasses.replace(own, vocab_size=V, **sizes)
        return dataclasses.replace(drafter, architecture=config), draft_params.replace(draft_ids=draft_ids)
    network = dict(draft_params.network)
    sizes |= {"block": dataclasses.replace(own.block, vocab_size=V), "own_head": True}  # type: ignore[reportAttributeAccessIssue]
    network.setdefault("head", embedding[draft_ids].T)
    # Rows of tokens that the reduced trunk does not have are never learned.
    for name in network.keys() & {"embedding", "markov_in"}:
        network[name] = jnp.zeros((V, network[name].shape[1]), network[name].dtype).at[ids].set(network[name])
    if isinstance(own, DFlashConfig):
        sizes["mask_token_id"] = int(ids[own.mask_token_id])
    config = dataclasses.replace(own, **sizes)
    return dataclasses.replace(drafter, architecture=config), draft_params.replace(network=network, draft_ids=draft_ids)


def drafter_path(folder: pathlib.Path, method: str) -> pathlib.Path:
    """Returns the file of a module, or the folder of another drafter."""
    return folder / "drafters" / ("mtp.safetensors" if method == "mtp" else method)


def load_trained(folder: pathlib.Path, method: str, params: dict, *, model: MTPModel, config: DecodeConfig) -> Drafts:
    """Loads a drafter of `train_drafter`.

    Args:
        folder: output folder.
        method: name in `METHODS`.
        params: parameters of `model`.
        model: the full trunk.
        config: decoding settings without a drafter.

    Returns:
        What decodes with it. A module drafts in its draft vocabulary.
    """
    path = drafter_path(folder, method)
    if method == "mtp":
        model, params, vocabulary = attach_modules(path, model, params)
        return Drafts(model, params, None, dataclasses.replace(config, draft_vocabulary=vocabulary))
    drafter, draft_params = load_drafter(path, model=model)
    return Drafts(model, params, draft_params, dataclasses.replace(config, drafter=drafter))
