"""Defines `train`, which runs the stages of a `Run` and returns what was trained."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from mtpjax.data.packing import Document
from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.callbacks import Callback
from mtpjax.training.config import TrainConfig
from mtpjax.training.losses import ObjectiveFunction
from mtpjax.training.panel import Panel
from mtpjax.training.run import Run


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        model: the trained model in its form for decoding, with unrolled layers; for a drafter, its trunk.
        params: the model's parameters.
        path: folder of the model's checkpoint, or of the drafter.
        held_out: the held-out documents.
        panel: the last evaluation.
        history: every logged row of `metrics.jsonl`.
        drafter: the trained drafter, for `DecodeConfig(drafter=...)`; None: MTP modules were trained.
        draft_params: the drafter's parameters.
    """

    model: MTPModel
    params: dict
    path: pathlib.Path
    held_out: list[Document]
    panel: Panel
    history: list[dict[str, Any]]
    drafter: Drafter | None = None
    draft_params: Any = None


def train(
    config: TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    objective: ObjectiveFunction | None = None,
    panel_depths: int = 0,
    evaluations: int = 6,
    resume: bool = False,
    overwrite: bool = False,
    allowed_changes: Sequence[str] = (),
) -> TrainResult:
    """Trains a model from scratch or from a checkpoint, and writes the run folder `config.output`.

    `metrics.jsonl` gets a row every `log_every` updates (losses per depth in bits) and one per evaluation (the
    acceptance panel on held-out documents). The plots `panel.png` and `panel.svg` show both. `checkpoint/` holds the
    model and its tokenizer; if a separate drafter is trained, `drafter/` holds the drafter instead. Progress is shown
    on stderr, as a live bar on a terminal and as lines elsewhere.

    Args:
        config: the settings.
        callbacks: called after each update, evaluation and save; may request a stop (`mtpjax.training.Callback`).
        objective: JAX function that computes the training loss from `mtpjax.training.LossInputs` and replaces
            `config.objective`, whose loss it may add to. It is traced once. To resume, pass one with the same name.
        panel_depths: minimum number of draft levels in the panel, which always includes the trained ones.
        evaluations: number of evaluations, including the one at the end.
        resume: continue the run in the folder from its newest complete state, or from the start if there is no state.
            On a CPU, its losses are then the same as in an uninterrupted run, bit for bit. Settings and data must be
            the same, except for `mtpjax.training.run_settings.CHANGEABLE_SETTINGS`.
        overwrite: replace an existing run in the folder.
        allowed_changes: further settings that may differ when resuming; "data" allows different data.

    Returns:
        The model, its parameters and checkpoint, the held-out documents, the last panel and all logged rows.

    Raises:
        ValueError: settings do not fit the model, the data or the devices, too many documents are unusable, or the
            folder is in use or holds a run; a callback is not a `Callback`, or the objective does not return one
            number.
        FileNotFoundError: the sources contain no text.
        FloatingPointError: the loss or gradient was not finite in `max_consecutive_bad_steps` consecutive updates.
        Preempted: SIGINT, SIGTERM or SIGUSR1 arrived; the state is saved.
        LostProcess: another process of the run has ended or cannot be reached.

    Example:
        >>> from mtpjax import TrainConfig, load, train
        >>> config = TrainConfig(preset="tiny", data="texts", steps=500, output="runs/example")
        >>> result = train(config)  # doctest: +SKIP
        >>> len(result.panel.survival)  # one rate per draft level  # doctest: +SKIP
        2
        >>> model, params = load(result.path)  # doctest: +SKIP
    """
    run = Run(config, callbacks=callbacks, objective=objective, panel_depths=panel_depths, evaluations=evaluations)
    with run.open(resume=resume, overwrite=overwrite, allowed_changes=allowed_changes):
        run.update_until_done()
        params, path, panel = run.finish()
    draft_params = None if run.drafter is None else DraftParams.of(params)
    params = {name: leaf for name, leaf in params.items() if name not in (DRAFTER, DRAFT_IDS)}
    found = run.corpus.held_out, panel, run.log.history
    return TrainResult(MTPModel(run.model.config), params, path, *found, run.drafter, draft_params)
