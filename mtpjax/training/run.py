"""Implements a training run as stages, which prepare, open the run folder, update, evaluate, save and finish."""

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mtpjax import distributed
from mtpjax.atomic import write_text
from mtpjax.data import packing
from mtpjax.drafters.forward import read_layers
from mtpjax.errors import Preempted, printable
from mtpjax.evaluation import self_check
from mtpjax.evaluation.machine import describe_device
from mtpjax.evaluation.plot_style import picture_paths
from mtpjax.io import checkpoint
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import platform_of, shard_params
from mtpjax.models.trunk import unstack_layers
from mtpjax.training import run_dir
from mtpjax.training.anchors import MAX_ANCHORS
from mtpjax.training.callbacks import Callback, Moment, TrainEvent, check_callbacks
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import load_corpus
from mtpjax.training.data_parallel import make_run_mesh, shard_batch, shard_train_state
from mtpjax.training.decoding_eval import PanelDecoder
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.hidden_state_cache import HiddenStateCache, open_hidden_state_cache
from mtpjax.training.initial_drafter import add_drafter, initial_drafter, save_trained_drafter
from mtpjax.training.initial_model import init_model, num_trained_depths
from mtpjax.training.log import MetricsLog, peak_memory_bytes, trace_window
from mtpjax.training.losses import ObjectiveFunction, mtp_scale_at
from mtpjax.training.panel import Panel, acceptance_panel
from mtpjax.training.plots import plot_run
from mtpjax.training.progress import ProgressClock, learning_rate_at
from mtpjax.training.run_settings import check_settings, resolve_remat, settings_to_json
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.trackers import open_trackers, require_trackers
from mtpjax.training.train_state import TrainState, init_train_state
from mtpjax.training.utilisation import update_work
from mtpjax.training.yaml_config import model_to_yaml

logger = logging.getLogger("mtpjax.train")


class Run:
    """A training run. `mtpjax.train` calls its stages in order and documents the arguments.

    Every process calls every stage, because each has shards of the parameters. Only the first process writes.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        callbacks: Sequence[Callback] = (),
        objective: ObjectiveFunction | None = None,
        panel_depths: int = 0,
        evaluations: int = 6,
    ):
        """Does everything that can fail because of wrong settings before touching the run folder."""
        self.config, self.callbacks, self.evaluations = config, callbacks, evaluations
        self.output, self.is_main_process = pathlib.Path(config.output), distributed.is_main_process()
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {config.output} exists and is not a folder")
        require_trackers(config)
        picture_paths(run_dir.PLOT_NAME, config.plot_formats)  # warns now if the plot cannot be drawn
        check_callbacks(callbacks)
        self.mesh = make_run_mesh(config)
        self.model, make_params = init_model(config, self.mesh)
        initial = initial_drafter(config, self.model)
        num_depths = num_trained_depths(config, self.model)
        # A drafter with a fixed number of levels can only be evaluated at the levels that it trains.
        has_fixed_levels = initial is not None and initial.drafter.max_levels is not None
        panel_depths = num_depths if has_fixed_levels else max(num_depths, panel_depths)
        self.corpus = load_corpus(config, self.model.config.vocab_size, num_depths=num_depths)
        params, self.drafter = make_params(), None
        if initial is not None:
            params, self.drafter = add_drafter(params, initial, config=config, corpus=self.corpus, model=self.model)
        self.panel_settings = {"model": self.model, "num_depths": panel_depths, "drafter": self.drafter}
        self.state, self.step, self.spec = self._compile(params, num_depths, objective)
        self.work = update_work(config, self.spec, self.state.params, self.corpus)
        # Tracing without computing finds a faulty objective before an old run is replaced.
        if objective is not None:
            rows = self.corpus.batches(config.batch_size, seed=config.seed)
            jax.eval_shape(self.step, self.state, next(rows), 0.0, 0.0, 0.0, states=None)
        self.settings = settings_to_json(config, objective) | {"remat": self.remat}
        self.is_stopped, self.last_metrics, self.num_bad_steps = False, {}, 0

    def _compile(
        self, params: dict, num_depths: int, objective: ObjectiveFunction | None
    ) -> tuple[TrainState, Callable[..., Any], TrainSpec]:
        """Returns the state before the first update, the jitted update, and its static settings."""
        config, optimizer, out_shardings = self.config, make_optimizer(self.config), None
        params = params if self.mesh is None else shard_params(params, self.mesh)
        state = init_train_state(params, optimizer, config.trains)
        # The output keeps the layout of the input, so that the donated state is updated in place.
        if self.mesh is not None:
            state = shard_train_state(state, self.mesh, optimizer=optimizer, trains=config.trains)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            out_shardings = (shardings, NamedSharding(self.mesh, PartitionSpec()))
        # The choice of "auto" is stored with the settings, so that a resumed run rounds its updates in the same way.
        self.remat = resolve_remat(config, self.model.config, params, num_depths, platform=platform_of(self.mesh))
        # None means the embedding's dtype, which is float32 unless the frozen trunk has a different dtype.
        dtype = None if config.dtype == config.trunk_dtype == "float32" else config.dtype
        spec = TrainSpec(
            model=self.model.clone(remat=self.remat, dtype=dtype),
            num_depths=num_depths,
            trains=config.trains,
            objective=config.objective,
            objective_function=objective,
            attention_layout=config.attention_layout,
            accumulation=config.accumulation,
            mesh=self.mesh,
            drafter=self.drafter,
            num_anchors=config.draft_anchors or MAX_ANCHORS,
            seed=config.seed,
        )
        step = functools.partial(train_step, spec=spec, optimizer=optimizer)
        return state, jax.jit(step, donate_argnames="state", out_shardings=out_shardings), spec

    @contextlib.contextmanager
    def open(self, *, resume: bool, overwrite: bool, allowed_changes: Sequence[str]) -> Iterator[None]:
        """Locks the run folder, starts a run there or restores the newest state, and opens the log and the trackers."""
        config = self.config
        with contextlib.ExitStack() as stack:
            stack.enter_context(distributed.raise_on_lost_peer())
            if self.is_main_process:
                self.output = stack.enter_context(run_dir.lock_folder(config.output))
            self.should_stop = stack.enter_context(run_dir.catch_stop_signals())
            self.run_id = None
            if resume:
                self.run_id = check_settings(self.output, self.settings, self.corpus.fingerprint, allowed_changes)
                run_dir.check_outputs(self.output)
            elif self.is_main_process:
                self.run_id = run_dir.begin(self.output, self.settings, self.corpus.fingerprint, overwrite=overwrite)
                write_text(self.output / run_dir.MODEL_FILE, model_to_yaml(self.model.config))
            self.trunk_states = self._open_trunk_states()
            # Restore the newest training state, if there is one. The clock continues from its step and seconds.
            restored = run_dir.restore_state(self.output, self.state, run_id=self.run_id) if resume else None
            self.clock = ProgressClock(config)
            if restored is not None:
                self.state, metadata = restored
                self.clock = ProgressClock(config, step=metadata["step"], seconds=metadata["seconds"])
            if self.is_main_process:
                began = f"resuming at update {self.clock.step}" if self.clock.step else "starting at update 0"
                end = f"of {config.steps}" if math.isinf(config.seconds) else f"for {config.seconds:g} s"
                print(f"{printable(self.output)}: {began} {end}", file=sys.stderr, flush=True)
            # Other processes log nothing.
            folder, send = None, None
            if self.is_main_process:
                folder = self.output
                send = stack.enter_context(open_trackers(folder, self.clock.step, config, self.settings))
            self.log = stack.enter_context(MetricsLog(folder, step=self.clock.step, send=send))
            window = {"start": config.profile_start, "steps": config.profile_steps}
            self.trace = stack.enter_context(trace_window(self.output, **window))
            prompts: dict[str, Any] = {"max_prompts": config.panel_prompts, "acceptance": config.panel_acceptance}
            self.decoder = PanelDecoder(self.corpus, **prompts, **self.panel_settings)
            yield

    def _open_trunk_states(self) -> HiddenStateCache | None:
        """Opens the cache of trunk states for all packed rows; returns None if `trunk_states` is not set."""
        if self.config.trunk_states is None:
            return None
        return open_hidden_state_cache(
            self.config.trunk_states,
            self.state.params,
            packing.concatenate_rows(self.corpus.source_rows),
            model=self.model,
            batch_size=self.config.batch_size,
            dtype=self.config.trunk_states_dtype,
            layer_ids=read_layers(self.drafter),
            should_stop=self.should_stop,
        )

    def update_until_done(self) -> None:
        """Updates, evaluates and saves until the run reaches its limit of steps or seconds, or a callback stops it.

        The batches depend only on the seed and the step, so a resumed run reads the same batches.
        """
        config, corpus, clock = self.config, self.corpus, self.clock
        stream = packing.mixed_batches(
            corpus.source_rows, corpus.source_weights, config.batch_size, seed=config.seed, start=clock.step
        )
        if self.is_main_process and clock.progress < 1:
            print("compiling the first update", file=sys.stderr, flush=True)
        while clock.progress < 1 and not self.is_stopped:
            progress = clock.progress
            self.trace(clock.step)
            with self.log.waiting_for_data():
                row_indices, batch = next(stream)
            self.update(row_indices, batch)
            # `finish` does the last evaluation. The others happen when progress passes a multiple of 1 / evaluations.
            if clock.progress >= 1 or self.is_stopped:
                break
            if math.floor(clock.progress * self.evaluations) > math.floor(progress * self.evaluations):
                self._call_or_save(self.evaluate)
            self._stop_if_requested()
            if config.save_every and clock.step % config.save_every == 0 and self.save_state():
                self._notify_saved(run_dir.state_path(self.output, clock.step))
        if self.is_stopped and self.is_main_process:
            what = f"{printable(self.output)}: a callback stopped the run at update {clock.step}"
            print(what, file=sys.stderr, flush=True)

    def update(self, row_indices: np.ndarray, batch: packing.Batch) -> None:
        """Runs one update and logs it. `row_indices` selects the cached trunk states of the batch."""
        config, clock = self.config, self.clock
        with self.log.waiting_for_data():
            states = None if self.trunk_states is None else self.trunk_states.take(row_indices, self.mesh)
            if self.mesh is not None:
                batch = shard_batch(batch, self.mesh)
        # Learning rate, lambda and mix depend on the progress before the update.
        progress = clock.progress
        learning_rate = learning_rate_at(progress, config)
        mtp_scale = mtp_scale_at(
            progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
        )
        self.state, metrics = self.step(self.state, batch, learning_rate, mtp_scale, progress, states=states)
        clock.tick()
        self._check_finite(metrics)
        if clock.step % config.log_every == 0:
            row = {
                "step": clock.step,
                "seconds": clock.seconds,
                "bits": [float(loss) / math.log(2) for loss in jax.device_get(metrics["losses"])],
                "learning_rate": learning_rate,
                "gradient_norm": float(metrics["gradient_norm"]),
                "tokens": clock.step * self.work.tokens,
                "memory_bytes": peak_memory_bytes(),
            }
            self.log.record_step(row, work=self.work, progress=clock.progress)
        if self.callbacks:
            values = jax.device_get(metrics).items()
            self.last_metrics = {name: value if value.ndim else value.item() for name, value in values}
            self.last_metrics |= {"learning_rate": learning_rate, "mtp_scale": mtp_scale}
            self._call_or_save(self._notify, "after_update", self.last_metrics)

    def _check_finite(self, metrics: Mapping[str, jax.Array]) -> None:
        """Counts consecutive updates that were skipped because they were not finite; too many end the run."""
        if metrics["is_finite"]:
            self.num_bad_steps = 0
            return
        self.num_bad_steps += 1
        logger.warning("update %d is not finite and was skipped", self.clock.step)
        if self.num_bad_steps >= self.config.max_consecutive_bad_steps:
            self.save_state()
            raise FloatingPointError(
                f"{self.num_bad_steps} updates in a row up to {self.clock.step} had no finite loss or gradient and were"
                f" skipped: lower learning_rate {self.config.learning_rate}"
            )

    def _stop_if_requested(self) -> None:
        """Saves the state and ends the run after a stop signal, which stops all processes at the same update."""
        if not distributed.any_process(self.should_stop()):
            return
        if not self.save_state():
            raise OSError(f"{self.output} received a stop signal, but update {self.clock.step} could not be saved")
        self._notify_saved(run_dir.state_path(self.output, self.clock.step))
        raise Preempted(
            f"{self.output} received a stop signal and is saved at update {self.clock.step}: continue with --resume"
        )

    def evaluate(self, *, is_last: bool = False) -> Panel:
        """Measures the acceptance panel and logs it."""
        clock, panel = self.clock, acceptance_panel(self.state.params, self.corpus.panel_rows, **self.panel_settings)
        # Before the end, decode prompts only while decoding takes a small fraction of the run's time. The clock of the
        # first process decides.
        if is_last or distributed.from_main_process(self.decoder.is_within_time_share(clock.seconds)):
            panel = dataclasses.replace(panel, decoded=self.decoder.measure(self.state.params, is_last=is_last))
        self.log.record({"step": clock.step, "seconds": clock.seconds, "eval": panel.to_json()})
        self._notify("after_evaluation", panel.to_json())
        self.log.restart_clock(clock.step)
        return panel

    def save_state(self) -> bool:
        """Saves the training state. Returns False if saving failed, for example on a full disk; the error is logged."""
        metadata = {"seconds": self.clock.seconds, "run": self.run_id}
        keep, step = self.config.keep_states, self.clock.step
        is_saved = run_dir.save_state(self.output, self.state, step=step, keep=keep, metadata=metadata)
        self.log.restart_clock(step)
        return is_saved

    def _notify(self, moment: Moment, metrics: Mapping[str, Any], path: pathlib.Path | None = None) -> None:
        """Calls the callbacks in every process. A stop request in one process stops all of them."""
        if self.callbacks:
            clock = self.clock
            event = TrainEvent(clock.step, clock.progress, clock.seconds, metrics, self.state, path)
            # Use a list, so that a stop request does not keep later callbacks from being called.
            requests = [bool(getattr(callback, moment)(event)) for callback in self.callbacks]
            self.is_stopped |= distributed.any_process(any(requests))

    def _notify_saved(self, path: pathlib.Path) -> None:
        self._notify("after_save", self.last_metrics, path if self.is_main_process else None)

    def _call_or_save(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function. If it fails, saves the training state before raising the error."""
        try:
            function(*args)
        except Exception:
            self.save_state()
            raise

    def finish(self) -> tuple[dict, pathlib.Path, Panel]:
        """Saves what was trained, evaluates it, and adds the panel to the checkpoint.

        Returns the parameters with unrolled layers, the folder of the model or drafter, and the panel.
        """
        # Save before anything else can fail: first the state, from which a resumed run repeats only the evaluation,
        # then the model in its form for decoding.
        is_state_saved = self.save_state()
        params = self.state.params
        if self.model.scan_layers:
            params = unstack_layers(params, self.model.config)
        path = self._save_model(params, {})
        panel, further = self._evaluate_saved(params, path, is_state_saved)
        # A drafter's files cannot store the panel; it is in `metrics.jsonl`.
        if self.drafter is None:
            self._save_model(params, further)
        if is_state_saved:
            self._notify_saved(run_dir.state_path(self.output, self.clock.step))
        self._notify_saved(path)
        # No process may end while the first one still writes, because that would count as a lost process.
        distributed.barrier("saved")
        return params, path, panel

    def _save_model(self, params: dict, further: Mapping[str, Any]) -> pathlib.Path:
        """Saves the trained model or drafter, and returns its folder. `further` is added to the metadata."""
        config, corpus = self.config, self.corpus
        if self.drafter is not None:
            return save_trained_drafter(self.output, params, self.drafter, config.draft_method)
        path, kind = self.output / run_dir.CHECKPOINT_FOLDER, "huggingface" if corpus.file_tokenizer else "bytes"
        metadata = {"steps": self.clock.step, "train": self.settings, "data": corpus.summary, "tokenizer": kind}
        checkpoint.save_model(
            path,
            MTPModel(self.model.config),
            params,
            metadata={**metadata, **further},
            tokenizer=corpus.file_tokenizer,
            init_from=config.init_from,
            model_type=config.model_type,
        )
        return path

    def _evaluate_saved(self, params: dict, path: pathlib.Path, is_state_saved: bool) -> tuple[Panel, dict[str, Any]]:
        """Evaluates and plots the saved model. Returns the panel, and further metadata for the checkpoint.

        The metadata have the panel and, for MTP modules, the record with which a loader checks their drafts
        (`mtpjax.evaluation.self_check`). Everything trained is already saved, so a stop signal here ends the run at
        once.
        """
        next_step = "continue with --resume" if is_state_saved else "the run is complete except for its panel"
        try:
            self.should_stop.is_immediate = not distributed.is_multiprocess()
            if self.should_stop():
                raise KeyboardInterrupt
            panel = self.evaluate(is_last=True)
            if self.is_main_process:
                self._plot_or_warn()
            further: dict[str, Any] = {"panel": panel.to_json()}
            if self.drafter is None:
                model, num_depths = MTPModel(self.model.config), self.panel_settings["num_depths"]
                tokens = self.corpus.panel_rows.tokens
                further["self_check"] = self_check.make_record(params, tokens, model=model, num_depths=num_depths)
            self.should_stop.is_immediate = False
            return panel, further
        except KeyboardInterrupt:
            self.should_stop.is_immediate = False
            raise Preempted(
                f"{self.output} received a stop signal before its panel was complete; the trained model is in {path}: "
                + next_step
            ) from None
        except Exception:
            logger.error("the panel failed; the trained model is in %s", path)
            raise

    def _plot_or_warn(self) -> None:
        """Plots the run. A failure only logs a warning, because the run is complete without its plot."""
        config, path = self.config, self.output / run_dir.PLOT_NAME
        try:
            title = f"Training of '{config.init_from or config.preset}' in {config.output}\n"
            title += describe_device(max(1, math.prod(dict(config.mesh).values())))
            plot_run(path, self.log.history, config.plot_formats, title=title)
        except Exception as error:
            logger.warning("%s could not be drawn: %s", path, error)
