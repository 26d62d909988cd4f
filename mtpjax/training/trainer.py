"""The training run: reads the data, updates the parameters, evaluates, logs, saves, resumes."""

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax import distributed
from mtpjax.atomic import write_text
from mtpjax.data import packing
from mtpjax.decoding.drafter import Drafter
from mtpjax.drafters.forward import read_layers
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.errors import Preempted, printable
from mtpjax.evaluation import self_check
from mtpjax.evaluation.machine import describe_device
from mtpjax.evaluation.plot_style import picture_paths
from mtpjax.io import checkpoint
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.models.sharding import shard_params
from mtpjax.models.trunk import unstack_layers
from mtpjax.training import run_dir
from mtpjax.training.anchors import MAX_ANCHORS
from mtpjax.training.callbacks import Callback, Moment, TrainEvent, call_callbacks, check_callbacks
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus, load_corpus
from mtpjax.training.data_parallel import make_run_mesh, shard_batch, shard_train_state
from mtpjax.training.decoding_eval import PanelDecoder
from mtpjax.training.hidden_state_cache import HiddenStateCache, open_hidden_state_cache
from mtpjax.training.initial_drafter import add_drafter, initial_drafter
from mtpjax.training.initial_model import init_model, num_trained_depths
from mtpjax.training.log import MetricsLog, peak_memory_bytes, trace_window
from mtpjax.training.loss_inputs import ObjectiveFunction, describe_objective
from mtpjax.training.losses import mtp_scale_at
from mtpjax.training.model_yaml import model_to_yaml
from mtpjax.training.new_drafter import save_trained_drafter
from mtpjax.training.panel import Panel, acceptance_panel
from mtpjax.training.plots import plot_run
from mtpjax.training.progress import ProgressClock, learning_rate_at
from mtpjax.training.step import TrainState, init_train_state, make_optimizer, train_step
from mtpjax.training.trackers import open_trackers, require_trackers

logger = logging.getLogger("mtpjax.train")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        model: the trained model in its form for decoding, with unrolled layers; the trunk of a drafter.
        params: its parameters.
        path: folder of its checkpoint, or of the drafter.
        held_out: the held-out documents.
        panel: the last evaluation.
        history: every logged row of `metrics.jsonl`.
        drafter: the trained drafter, for `DecodeConfig(drafter=...)`; None: MTP modules were trained.
        draft_params: its parameters.
    """

    model: MTPModel
    params: dict
    path: pathlib.Path
    held_out: list[packing.Document]
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
    acceptance panel on held-out documents). The pictures `panel.png` and `panel.svg` show both;
    `checkpoint/` holds the model and its tokenizer, `drafter/` a drafter that is trained in its place. Progress goes to
    stderr, as a live bar on a terminal, else as lines.

    Args:
        config: the settings.
        callbacks: called after each update, evaluation and save, and may ask to stop (`mtpjax.training.Callback`).
        objective: computes the training loss from `mtpjax.training.LossInputs`, in the place of `config.objective`,
            whose loss it may add to. A JAX function: it is traced once. Resuming needs one of the same name.
        panel_depths: minimum number of draft levels in the panel; it has at least those that are trained.
        evaluations: number of evaluations, including the one at the end.
        resume: continue the run in the folder from its newest complete state, or from the beginning if it has none. On
            a CPU the losses are then those of an uninterrupted run, bit for bit. Settings and data must be the same,
            except `mtpjax.training.run_dir.CHANGEABLE_SETTINGS`.
        overwrite: replace a run that is in the folder.
        allowed_changes: further settings that may differ when resuming; "data" allows other data.

    Returns:
        The model, its parameters and checkpoint, the held-out documents, the last panel and all logged rows.

    Raises:
        ValueError: settings do not fit the model, the data or the devices, too many documents are unusable, or the
            folder is in use or holds another run. Also for a callback that is not a `Callback`, and an objective that
            does not return one number.
        FileNotFoundError: the sources have no text.
        FloatingPointError: the loss or gradient was not finite in `most_bad_steps` consecutive updates.
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
    # 1. Prepare everything that can fail on wrong settings, before the run folder is touched.
    if pathlib.Path(config.output).exists() and not pathlib.Path(config.output).is_dir():
        raise ValueError(f"output {config.output} exists and is not a folder")
    require_trackers(config)
    picture_paths(run_dir.PLOT_NAME, config.plot_formats)  # warns now if it cannot be drawn
    check_callbacks(callbacks)
    mesh, is_main_process = make_run_mesh(config), distributed.is_main_process()
    model, make_params = init_model(config, mesh)
    initial = initial_drafter(config, model)
    num_depths = num_trained_depths(config, model)
    # A network with a fixed number of levels drafts the trained ones, and no others.
    has_fixed_levels = initial is not None and initial.drafter.max_levels is not None
    panel_depths = num_depths if has_fixed_levels else max(num_depths, panel_depths)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=num_depths)
    params, drafter = make_params(), None
    if initial is not None:
        params, drafter = add_drafter(params, initial, config=config, corpus=corpus, model=model)
    state, jitted_step = _init_state_and_step(config, model, params, num_depths, mesh, objective, drafter)
    # Tracing without computing finds a faulty objective before an old run is replaced.
    if objective is not None:
        rows = corpus.batches(config.batch_size, seed=config.seed)
        jax.eval_shape(jitted_step, state, next(rows), 0.0, 0.0, 0.0, states=None)
    # 2. Lock the run folder, and start a new run or check that the old one matches. Only the first process writes.
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.raise_on_lost_peer())
        output = (
            stack.enter_context(run_dir.lock_folder(config.output)) if is_main_process else pathlib.Path(config.output)
        )
        should_stop = stack.enter_context(run_dir.catch_stop_signals())
        settings, run_id = _settings_json(config, objective), None
        if not resume and is_main_process:
            run_id = run_dir.begin(output, settings, corpus.fingerprint, overwrite=overwrite)
            write_text(output / run_dir.MODEL_FILE, model_to_yaml(model.config))
        if resume:
            run_id = run_dir.check_settings(output, settings, corpus.fingerprint, allowed_changes)
            run_dir.check_outputs(output)
        # 3. Fill the cache of trunk states, then restore the newest training state. The clock continues with its number
        # of updates and its seconds, because both determine the progress.
        layer_ids = read_layers(drafter)
        trunk_states = _open_trunk_states(config, model, state.params, corpus, layer_ids, should_stop)
        clock = ProgressClock(config)
        if resume and (restored := run_dir.restore_state(output, state, run_id=run_id)) is not None:
            state, metadata = restored
            clock = ProgressClock(config, step=metadata["step"], seconds=metadata["seconds"])
        if is_main_process:
            began = f"resuming at update {clock.step}" if clock.step else "starting at update 0"
            print(f"{printable(output)}: {began} of {config.steps}", file=sys.stderr, flush=True)
        # 4. Open the log, the trackers and the profiler's window; other processes log nothing.
        send = stack.enter_context(open_trackers(output, clock.step, config, settings)) if is_main_process else None
        log = stack.enter_context(MetricsLog(output if is_main_process else None, step=clock.step, send=send))
        trace = stack.enter_context(trace_window(output, start=config.profile_start, steps=config.profile_steps))
        panel_settings = {"model": model, "num_depths": panel_depths, "drafter": drafter}
        decoder = PanelDecoder(corpus, max_prompts=config.panel_prompts, **panel_settings)

        is_stopped, last_metrics = False, {}

        # Callbacks run in every process, and a request to stop in one of them holds for all.
        def notify(moment: Moment, told: Mapping[str, Any], path: pathlib.Path | None = None) -> None:
            nonlocal is_stopped
            if callbacks:
                event = TrainEvent(clock.step, clock.progress, clock.seconds, told, state, path)
                is_stopped |= distributed.any_process(call_callbacks(callbacks, moment, event))

        # All processes take part, because each has a part of the parameters. Prompts are decoded during the run only as
        # long as that stays a small fraction of the time, by the first process's clock.
        def evaluate(*, is_last: bool = False) -> Panel:
            panel = acceptance_panel(state.params, corpus.panel_rows, **panel_settings)
            if is_last or distributed.from_main_process(decoder.is_within_time_share(clock.seconds)):
                panel = dataclasses.replace(panel, decoded=decoder.measure(state.params, is_last=is_last))
            log.record({"step": clock.step, "seconds": clock.seconds, "eval": panel.to_json()})
            notify("after_evaluation", panel.to_json())
            log.restart_clock(clock.step)
            return panel

        def save() -> bool:
            metadata = {"seconds": clock.seconds, "run": run_id}
            is_saved = run_dir.save_state(output, state, step=clock.step, keep=config.keep_states, metadata=metadata)
            log.restart_clock(clock.step)
            return is_saved

        def notify_saved(path: pathlib.Path) -> None:
            notify("after_save", last_metrics, path if is_main_process else None)

        # A failing panel or callback must not cost the updates since the last saved state.
        def call_or_save(function: Callable[..., Any], *args: Any) -> None:
            try:
                function(*args)
            except Exception:
                save()
                raise

        # 5. The batches depend only on the seed and the number of the update, so a resumed run reads those that an
        # uninterrupted one would read. `row_indices` selects the cached trunk states.
        stream = packing.mixed_batches(
            corpus.source_rows, corpus.source_weights, config.batch_size, seed=config.seed, start=clock.step
        )
        bad_steps, first_step = 0, clock.step
        while clock.progress < 1 and not is_stopped:
            progress = clock.progress
            trace(clock.step)
            row_indices, batch = next(stream)
            states = None if trunk_states is None else trunk_states.take(row_indices)
            if mesh is not None:
                batch, states = shard_batch((batch, states), mesh)
            if is_main_process and clock.step == first_step:
                print("compiling the first update", file=sys.stderr, flush=True)
            # One update. Learning rate, lambda and mix follow the progress before it.
            learning_rate, mtp_scale = _learning_rate_and_mtp_scale(progress, config)
            state, metrics = jitted_step(state, batch, learning_rate, mtp_scale, progress, states=states)
            clock.tick()
            # The update skips itself if it is not finite. Too many in a row mean divergence, and the run stops.
            bad_steps = 0 if metrics["is_finite"] else bad_steps + 1
            if bad_steps:
                logger.warning("update %d is not finite and was skipped", clock.step)
            if bad_steps >= config.most_bad_steps:
                save()
                raise FloatingPointError(
                    f"{bad_steps} updates in a row up to {clock.step} had no finite loss or gradient and were skipped:"
                    f" lower learning_rate {config.learning_rate}"
                )
            if clock.step % config.log_every == 0:
                losses, tokens = jax.device_get(metrics["losses"]), config.batch_size * config.row_length
                further = {
                    "learning_rate": learning_rate,
                    "gradient_norm": float(metrics["gradient_norm"]),
                    "tokens": clock.step * tokens,
                    "memory_bytes": peak_memory_bytes(),
                }
                log.record_step(
                    clock.step, clock.seconds, clock.progress, losses=losses, tokens_per_step=tokens, further=further
                )
            if callbacks:
                last_metrics = _plain_metrics(metrics) | {"learning_rate": learning_rate, "mtp_scale": mtp_scale}
                call_or_save(notify, "after_update", last_metrics)
            # The end has its own evaluation, below. Others come when the progress passes a multiple of 1 / evaluations.
            if clock.progress >= 1 or is_stopped:
                break
            if math.floor(clock.progress * evaluations) > math.floor(progress * evaluations):
                call_or_save(evaluate)
            # A signal to one process stops all of them at the same update, after the state is saved.
            if distributed.any_process(should_stop()):
                if not save():
                    raise OSError(f"{output} was told to stop, but update {clock.step} could not be saved")
                notify_saved(run_dir.state_path(output, clock.step))
                raise Preempted(
                    f"{output} was told to stop and is saved at update {clock.step}: continue with --resume"
                )
            if config.save_every and clock.step % config.save_every == 0 and save():
                notify_saved(run_dir.state_path(output, clock.step))
        if is_stopped and is_main_process:
            print(
                f"{printable(output)}: a callback stopped the run at update {clock.step}", file=sys.stderr, flush=True
            )
        # 6. Save what was trained before anything else can fail: the state, from which a resumed run repeats only the
        # evaluation, and the model in its form for decoding.
        is_state_saved = save()
        params = unstack_layers(state.params, model.config) if model.scan_layers else state.params
        unrolled, path = MTPModel(model.config), output / run_dir.CHECKPOINT_FOLDER
        if drafter is not None:
            path = output / run_dir.DRAFTER_FOLDER
        metadata = {"steps": clock.step, "train": settings, "data": corpus.summary}
        metadata["tokenizer"] = "huggingface" if corpus.file_tokenizer else "bytes"

        def save_model(further: dict[str, Any]) -> None:
            if initial is not None and drafter is not None:
                save_trained_drafter(output, params, drafter, initial.method)
                return
            checkpoint.save_model(
                path,
                unrolled,
                params,
                metadata=metadata | further,
                tokenizer=corpus.file_tokenizer,
                init_from=config.init_from,
                model_type=config.model_type,
            )

        save_model({})
        # 7. Evaluate and plot; from here on a signal ends the run at once. Then add the panel to the checkpoint, and
        # held-out rows with the modules' output on them, so that a loader can check that it computes the same drafts.
        further_step = "continue with --resume" if is_state_saved else "the run is complete except for its panel"
        try:
            should_stop.is_immediate = not distributed.is_multiprocess()
            if should_stop():
                raise KeyboardInterrupt
            panel = evaluate(is_last=True)
            if is_main_process:
                _plot_or_warn(output / run_dir.PLOT_NAME, log.history, config)
            further = {"panel": panel.to_json()}
            if drafter is None:
                rows = corpus.panel_rows.tokens
                record = self_check.make_record(params, rows, model=unrolled, num_depths=panel_depths)
                further["self_check"] = record
            should_stop.is_immediate = False
        except KeyboardInterrupt:
            should_stop.is_immediate = False
            raise Preempted(
                f"{output} was told to stop before its panel was complete; the trained model is in {path}: "
                + further_step
            ) from None
        except Exception:
            logger.error("the panel failed; the trained model is in %s", path)
            raise
        # A drafter's files have no place for them; `metrics.jsonl` has the panel.
        if drafter is None:
            save_model(further)
        if is_state_saved:
            notify_saved(run_dir.state_path(output, clock.step))
        notify_saved(path)
        # No process may end while the first still writes: that would count as a lost process.
        distributed.barrier("saved")
    result = TrainResult(unrolled, params, path, corpus.held_out, panel, log.history)
    if drafter is None:
        return result
    trunk = {name: leaf for name, leaf in params.items() if name not in (DRAFTER, DRAFT_IDS)}
    return dataclasses.replace(result, params=trunk, drafter=drafter, draft_params=DraftParams.of(params))


def _plot_or_warn(path: pathlib.Path, history: list[dict[str, Any]], config: TrainConfig) -> None:
    """Plots the run. A failure is a warning: the run is complete without its picture."""
    try:
        title = f"Training of '{config.init_from or config.preset}' in {config.output}\n"
        title += describe_device(max(1, math.prod(dict(config.mesh).values())))
        plot_run(path, history, config.plot_formats, title=title)
    except Exception as error:
        logger.warning("%s could not be drawn: %s", path, error)


def _learning_rate_and_mtp_scale(progress: float, config: TrainConfig) -> tuple[float, float]:
    """Returns learning rate and lambda."""
    scale = mtp_scale_at(
        progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
    )
    return learning_rate_at(progress, config), scale


def _init_state_and_step(
    config: TrainConfig,
    model: MTPModel,
    params: dict,
    num_depths: int,
    mesh: Mesh | None,
    objective: ObjectiveFunction | None,
    drafter: TrainedDrafter | None,
) -> tuple[TrainState, Callable]:
    """Returns the state before the first update, and the jitted update."""
    optimizer = make_optimizer(config)
    params, out_shardings = params if mesh is None else shard_params(params, mesh), None
    state = init_train_state(params, optimizer, config.trains)
    # The output keeps the layout of the input, so that the donated state is updated in place.
    if mesh is not None:
        state = shard_train_state(state, mesh, optimizer=optimizer, trains=config.trains)
        out_shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec()))
    # None is the embedding's dtype, which is float32 unless the trunk is frozen in another.
    dtype = None if config.dtype == config.trunk_dtype == "float32" else config.dtype
    step = functools.partial(
        train_step,
        model=model.clone(remat=config.remat == "layers", dtype=dtype),
        optimizer=optimizer,
        num_depths=num_depths,
        attention_layout=config.attention_layout,
        objective=config.objective,
        trains=config.trains,
        accumulation=config.accumulation,
        mesh=mesh,
        objective_function=objective,
        drafter=drafter,
        num_anchors=config.draft_anchors or MAX_ANCHORS,
        seed=config.seed,
    )
    return state, jax.jit(step, donate_argnames="state", out_shardings=out_shardings)


def _open_trunk_states(
    config: TrainConfig,
    model: MTPModel,
    params: dict,
    corpus: Corpus,
    layer_ids: tuple[int, ...],
    should_stop: Callable[[], bool],
) -> HiddenStateCache | None:
    """Opens the cache of the frozen trunk's states for all packed rows; None without one."""
    if config.trunk_states is None:
        return None
    return open_hidden_state_cache(
        config.trunk_states,
        params,
        packing.concatenate_rows(corpus.source_rows),
        model=model,
        batch_size=config.batch_size,
        dtype=config.trunk_states_dtype,
        layer_ids=layer_ids,
        should_stop=should_stop,
    )


def _plain_metrics(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the metrics of an update on the host: numbers, and `losses` as a numpy array."""
    return {name: value if value.ndim else value.item() for name, value in jax.device_get(metrics).items()}


def _settings_json(config: TrainConfig, objective: ObjectiveFunction | None) -> dict[str, Any]:
    """Returns the settings as JSON can hold them, with None for infinity and for unset fields."""
    values = dataclasses.asdict(config)
    settings = {name: None if value == math.inf else value for name, value in values.items()}
    # The whole architecture, so that a run resumes with it wherever it is named from, and `mtpjax compare` shows the
    # fields that differ. A checkpoint has its own, of which the settings change only the number of modules.
    settings["model"] = config.model_config.to_dict() if config.init_from is None else dict(values["model"])
    # Runs of drafters from before there were two readings resume without one.
    settings["draft_reading"] = dict(config.draft_reading) or None
    # Runs of MTP modules from before there were other drafters resume without these settings.
    if config.draft_method.is_of_model:
        settings = {name: value for name, value in settings.items() if not name.startswith("draft")}
    # Code is not stored: a resumed run is checked to have an objective of the same name.
    return settings | {"objective_function": None if objective is None else describe_objective(objective)}
