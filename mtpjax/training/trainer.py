"""The training run: reads the data, updates the parameters, evaluates, logs, saves, resumes."""

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtpjax import compat
from mtpjax.data import packing
from mtpjax.errors import Preempted
from mtpjax.evaluation import self_check
from mtpjax.io import checkpoint
from mtpjax.models.model import MTPModel
from mtpjax.models.params import add_mtp_modules, init_params
from mtpjax.models.presets import presets
from mtpjax.models.sharding import shard_params
from mtpjax.models.trunk import stack_layers, unstack_layers
from mtpjax.training import distributed, run_dir
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus, load_corpus
from mtpjax.training.data_parallel import shard_batch, shard_train_state
from mtpjax.training.decoding_eval import PanelDecoder
from mtpjax.training.gradients import trainable_params
from mtpjax.training.hidden_state_cache import HiddenStateCache, bytes_per_token, open_hidden_state_cache
from mtpjax.training.log import MetricsLog, trace_window
from mtpjax.training.losses import mtp_scale_at
from mtpjax.training.panel import Panel, acceptance_panel
from mtpjax.training.plots import plot_run
from mtpjax.training.step import TrainState, init_train_state, make_optimizer, train_step
from mtpjax.training.trackers import open_trackers, require_trackers

logger = logging.getLogger("mtpjax.train")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        model: the trained model in its form for decoding, with unrolled layers.
        params: its parameters.
        path: folder of its checkpoint.
        held_out: the held-out documents.
        panel: the last evaluation.
        history: every logged row of `metrics.jsonl`.
    """

    model: MTPModel
    params: dict
    path: pathlib.Path
    held_out: list[packing.Document]
    panel: Panel
    history: list[dict[str, Any]]


def learning_rate_at(progress: float, config: TrainConfig) -> float:
    """Returns the learning rate at a point of the run: a cosine, multiplied by a linear warm-up.

    Args:
        progress: fraction of the run that is done, 0..1.
        config: the settings.

    Returns:
        The learning rate, which ends at `final_learning_rate * learning_rate`.
    """
    warm = min(progress / config.warmup, 1.0) if config.warmup else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * warm * (config.final_learning_rate + (1 - config.final_learning_rate) * cosine)


def train(
    config: TrainConfig,
    *,
    panel_depths: int = 0,
    evaluations: int = 6,
    resume: bool = False,
    overwrite: bool = False,
    allowed_changes: Sequence[str] = (),
) -> TrainResult:
    """Trains a model from scratch or from a checkpoint, and writes the run folder `config.output`.

    `metrics.jsonl` gets a row every `log_every` updates (losses per depth in bits) and one per evaluation (the
    acceptance panel on held-out documents). `panel.png` plots both; `checkpoint/` holds the model and its tokenizer.
    Progress goes to stderr, as a live bar on a terminal, else as lines.

    Args:
        config: the settings.
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
        ValueError: settings do not fit the model, the data or the devices; too many documents are unusable; or the
            folder is in use or holds another run.
        FileNotFoundError: there is no text to train on.
        FloatingPointError: the loss or gradient was not finite in `most_bad_steps` consecutive updates.
        Preempted: SIGTERM or SIGUSR1 arrived; the state is saved.
        LostProcess: another process of the run has ended or cannot be reached.

    Example:
        >>> from mtpjax import TrainConfig, load, train
        >>> config = TrainConfig(preset="tiny", data="texts", pattern="*.txt", steps=500, output="runs/example")
        >>> result = train(config)  # doctest: +SKIP
        >>> len(result.panel.survival)  # one rate per draft level  # doctest: +SKIP
        2
        >>> model, params = load(result.path)  # doctest: +SKIP
    """
    # 1. Prepare everything that can fail on wrong settings, before the run folder is touched.
    require_trackers(config)
    mesh, is_main_process = _make_mesh(config), distributed.is_main_process()
    model, make_params = _init_model(config)
    num_depths = _num_trained_depths(config, model)
    panel_depths = max(num_depths, panel_depths)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=num_depths)
    state, jitted_step = _init_state_and_step(config, model, make_params(), num_depths, mesh)
    # 2. Lock the run folder, and start a new run or check that the old one matches. Only the first process writes.
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.raise_on_lost_peer())
        output = (
            stack.enter_context(run_dir.lock_folder(config.output)) if is_main_process else pathlib.Path(config.output)
        )
        should_stop = stack.enter_context(run_dir.catch_stop_signals())
        settings = _settings_json(config)
        if not resume and is_main_process:
            run_dir.begin(output, settings, corpus.fingerprint, overwrite=overwrite)
        if resume:
            run_dir.check_settings(output, settings, corpus.fingerprint, allowed_changes)
        # 3. Fill the cache of trunk states, then restore the newest training state. The clock continues with its number
        # of updates and its seconds, because both determine the progress.
        trunk_states = _open_trunk_states(config, model, state.params, corpus, should_stop)
        clock = _ProgressClock(config)
        if resume and (restored := run_dir.restore_state(output, state)) is not None:
            state, metadata = restored
            clock = _ProgressClock(config, step=metadata["step"], seconds=metadata["seconds"])
        # 4. Open the log, the trackers and the profiler's window; other processes log nothing.
        send = stack.enter_context(open_trackers(output, clock.step, config, settings)) if is_main_process else None
        log = stack.enter_context(MetricsLog(output if is_main_process else None, step=clock.step, send=send))
        trace = stack.enter_context(trace_window(output, start=config.profile_start, steps=config.profile_steps))
        decoder = PanelDecoder(corpus, model=model, num_depths=panel_depths, max_prompts=config.panel_prompts)

        # All processes compute the teacher-forced panel, because gathering parameters is a collective. Only the first
        # one decodes prompts, and during the run only as long as that stays a small fraction of the time.
        def evaluate(*, is_last: bool = False) -> Panel:
            params = distributed.allgather(state.params)
            panel = acceptance_panel(params, corpus.panel_rows, model=model, num_depths=panel_depths)
            if is_main_process and (is_last or decoder.is_within_time_share(clock.seconds)):
                panel = dataclasses.replace(panel, decoded=decoder.measure(params, is_last=is_last))
            log.record({"step": clock.step, "seconds": clock.seconds, "eval": panel.to_json()})
            log.restart_clock(clock.step)
            return panel

        # Gather the state, write it in the first process, and agree in all processes on whether that succeeded.
        def save() -> bool:
            metadata, whole, is_saved = {"seconds": clock.seconds}, distributed.allgather(state), True
            if is_main_process:
                is_saved = run_dir.save_state(
                    output, whole, step=clock.step, keep=config.keep_states, metadata=metadata
                )
            log.restart_clock(clock.step)
            return not distributed.any_process(not is_saved)

        # 5. The batches depend only on the seed and the number of the update, so a resumed run reads those that an
        # uninterrupted one would read. `row_indices` selects the cached trunk states.
        stream = packing.mixed_batches(
            corpus.source_rows, corpus.source_weights, config.batch_size, seed=config.seed, start=clock.step
        )
        bad_steps = 0
        while clock.progress < 1:
            progress = clock.progress
            trace(clock.step)
            row_indices, batch = next(stream)
            states = None if trunk_states is None else trunk_states.take(row_indices)
            if mesh is not None:
                batch, states = shard_batch((batch, states), mesh)
            # One update. Learning rate, lambda and mix follow the progress before it.
            state, metrics = jitted_step(
                state, batch, *_learning_rate_and_mtp_scale(progress, config), progress, states=states
            )
            clock.tick()
            # The update skips itself if it is not finite. Too many in a row mean divergence, and the run stops.
            bad_steps = 0 if metrics["is_finite"] else bad_steps + 1
            if bad_steps:
                logger.warning("step %d is not finite and was skipped", clock.step)
            if bad_steps >= config.most_bad_steps:
                save()
                raise FloatingPointError(
                    f"{bad_steps} steps in a row up to {clock.step} had no finite loss or gradient and were skipped:"
                    f" lower learning_rate {config.learning_rate}"
                )
            if clock.step % config.log_every == 0:
                losses, tokens = jax.device_get(metrics["losses"]), config.batch_size * config.row_length
                log.record_step(clock.step, clock.seconds, clock.progress, losses=losses, tokens_per_step=tokens)
            # The end has its own evaluation, below. Others come when the progress passes a multiple of 1 / evaluations.
            if clock.progress >= 1:
                break
            if math.floor(clock.progress * evaluations) > math.floor(progress * evaluations):
                evaluate()
            # A signal to one process stops all of them at the same update, after the state is saved.
            if distributed.any_process(should_stop()):
                if not save():
                    raise OSError(f"{output} was told to stop, but step {clock.step} could not be saved")
                raise Preempted(f"{output} was told to stop and is saved at step {clock.step}: continue with resume")
            if config.save_every and clock.step % config.save_every == 0:
                save()
        # 6. Evaluate, then write the model in its form for decoding. The checkpoint keeps held-out rows and the
        # modules' output on them, so that a loader can check that it computes the same drafts.
        panel = evaluate(is_last=True)
        if is_main_process:
            plot_run(output / "panel.png", log.history)

        params = unstack_layers(distributed.allgather(state.params), model.config)
        model = MTPModel(model.config)
        path = output / "checkpoint"
        metadata = {
            "steps": clock.step,
            "panel": panel.to_json(),
            "train": settings,
            "data": corpus.summary,
            "self_check": self_check.make_record(
                params, corpus.panel_rows.tokens, model=model, num_depths=panel_depths
            ),
        }
        metadata["tokenizer"] = "huggingface" if corpus.file_tokenizer else "bytes"
        if is_main_process:
            checkpoint.save_model(
                path,
                model,
                params,
                metadata=metadata,
                tokenizer=corpus.file_tokenizer,
                init_from=config.init_from,
            )
        # No process may end while the first still writes: that would count as a lost process.
        distributed.barrier("saved")
    return TrainResult(model, params, path, corpus.held_out, panel, log.history)


class _ProgressClock:
    """Progress of a run by updates or by wall-clock time, whichever is further.

    `progress` changes only at a tick, so that everything within one update sees the same value.

    Args:
        config: `steps` and `seconds`.
        step: number of updates that the run continues from.
        seconds: seconds that they took.
    """

    def __init__(self, config: TrainConfig, *, step: int = 0, seconds: float = 0.0):
        self.config, self.step, self.begin = config, step, time.perf_counter() - seconds
        self.progress = self._progress()

    @property
    def seconds(self) -> float:
        """Returns the wall-clock time of the run, including the time before a restart."""
        return time.perf_counter() - self.begin

    def tick(self) -> None:
        """Counts an update."""
        self.step += 1
        self.progress = self._progress()

    def _progress(self) -> float:
        return min(max(self.step / self.config.steps, self.seconds / self.config.seconds), 1.0)


def _learning_rate_and_mtp_scale(progress: float, config: TrainConfig) -> tuple[float, float]:
    """Returns learning rate and lambda."""
    scale = mtp_scale_at(
        progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
    )
    return learning_rate_at(progress, config), scale


def _make_mesh(config: TrainConfig) -> Mesh | None:
    """Makes the mesh; None for one device. Raises `ValueError` for unsupported combinations."""
    size, num_devices, is_multiprocess = (
        math.prod(dict(config.mesh).values()),
        jax.device_count(),
        distributed.is_multiprocess(),
    )
    # Several processes must use all devices, because each one takes part with its own.
    if size > num_devices or (is_multiprocess and size != num_devices):
        raise ValueError(f"the mesh {dict(config.mesh)} covers {size} devices, but JAX has {num_devices}")
    if is_multiprocess and config.trunk_states is not None:
        raise ValueError("trunk_states must be computed by one process first, without --nnodes")
    # Clocks differ between processes, which would then end after different numbers of updates.
    if is_multiprocess and config.seconds < math.inf:
        raise ValueError(
            f"seconds {config.seconds} is unsupported with several processes, whose clocks differ: use steps"
        )
    return compat.make_mesh(dict(config.mesh)) if size > 1 else None


def _init_state_and_step(
    config: TrainConfig, model: MTPModel, params: dict, num_depths: int, mesh: Mesh | None
) -> tuple[TrainState, Callable]:
    """Returns the state before the first update, and the jitted update."""
    optimizer = make_optimizer(config)
    params, out_shardings = params if mesh is None else shard_params(params, mesh), None
    state = init_train_state(params, optimizer, config.trains)
    # The output keeps the layout of the input, so that the donated state is updated in place.
    if mesh is not None:
        state = shard_train_state(state, mesh, optimizer=optimizer, trains=config.trains)
        out_shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec()))
    step = functools.partial(
        train_step,
        model=model.clone(remat=config.remat == "layers", dtype=None if config.dtype == "float32" else config.dtype),
        optimizer=optimizer,
        num_depths=num_depths,
        attention_layout=config.attention_layout,
        objective=config.objective,
        trains=config.trains,
        accumulation=config.accumulation,
        mesh=mesh,
    )
    return state, jax.jit(step, donate_argnames="state", out_shardings=out_shardings)


def _open_trunk_states(
    config: TrainConfig, model: MTPModel, params: dict, corpus: Corpus, should_stop: Callable[[], bool]
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
        should_stop=should_stop,
    )


def _init_model(config: TrainConfig) -> tuple[MTPModel, Callable[[], dict]]:
    """Returns the model with stacked layers, and a function that makes its initial float32 parameters."""
    # New weights of a preset.
    key = jax.random.key(config.seed)
    if config.init_from is None:
        model = MTPModel(presets[config.preset], scan_layers=True)
        return model, functools.partial(init_params, model, key)
    # A checkpoint. A trunk that comes without MTP modules gets one to train.
    model, params = checkpoint.load(config.init_from, dtype=jnp.float32)
    if config.num_depths and not model.config.num_mtp_modules:
        model, params = add_mtp_modules(model, params, 1, key)
    return MTPModel(model.config, scan_layers=True), functools.partial(stack_layers, params, model.config)


def _num_trained_depths(config: TrainConfig, model: MTPModel) -> int:
    """Returns the number of draft depths to train: none for a model without MTP modules."""
    return config.num_depths if model.config.num_mtp_modules else 0


def compute_run_sizes(config: TrainConfig) -> dict[str, int]:
    """Computes the sizes of a run without training: rows and tokens, parameters, memory, disk space.

    Args:
        config: the settings.

    Returns:
        Sizes by name, for printing.

    Raises:
        ValueError: as `train`.
        FileNotFoundError: as `train`.
    """
    # Shapes only: neither parameters nor optimiser state are allocated.
    model, make_params = _init_model(config)
    params = jax.eval_shape(make_params)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=_num_trained_depths(config, model))
    state = (params, jax.eval_shape(make_optimizer(config).init, trainable_params(params, config.trains)))
    sizes = {
        "rows": sum(len(rows.tokens) for rows in corpus.source_rows),
        "tokens": sum(int((rows.segment_ids > 0).sum()) for rows in corpus.source_rows),
        "held-out documents": len(corpus.held_out),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "bytes of parameters and optimiser": sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
    }
    if config.trunk_states is not None:
        each = bytes_per_token(model, config.trunk_states_dtype)
        sizes["bytes of the trunk's states, each token"] = each
        sizes["bytes of the trunk's states"] = each * sum(rows.tokens.size for rows in corpus.source_rows)
    return sizes


def _settings_json(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings as JSON can hold them, with None for infinity."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(config).items()}
