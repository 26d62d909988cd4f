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
from mtpjax.models.model import MTPModel, add_mtp_modules, init_params
from mtpjax.models.presets import presets
from mtpjax.models.sharding import shard_params
from mtpjax.models.trunk import stack_layers, unstack_layers
from mtpjax.training import distributed, run_dir
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus, load_corpus
from mtpjax.training.data_parallel import place_rows, place_state
from mtpjax.training.decoding_eval import PanelDecoder
from mtpjax.training.gradients import trained
from mtpjax.training.hidden_state_cache import TrunkStates, bytes_per_token, stored_states
from mtpjax.training.log import Log, trace_window
from mtpjax.training.losses import mtp_scale_at
from mtpjax.training.panel import Panel, acceptance_panel
from mtpjax.training.plots import plot_run
from mtpjax.training.step import TrainState, first_state, make_optimizer, train_step
from mtpjax.training.trackers import require_trackers, tracking

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
            except `mtpjax.training.run_dir.FREE_SETTINGS`.
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
    mesh, is_first = _mesh(config), distributed.is_first()
    model, begin_with = _initial(config)
    num_depths = _num_depths(config, model)
    panel_depths = max(num_depths, panel_depths)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=num_depths)
    state, step = _first_state(config, model, begin_with(), num_depths, mesh)
    # 2. Lock the run folder, and start a new run or check that the old one matches. Only the first process writes.
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.told_of_losses())
        output = stack.enter_context(run_dir.locked(config.output)) if is_first else pathlib.Path(config.output)
        is_told_to_end = stack.enter_context(run_dir.ending_signals())
        settings = _json(config)
        if not resume and is_first:
            run_dir.begin(output, settings, corpus.fingerprint, overwrite=overwrite)
        if resume:
            run_dir.check_same(output, settings, corpus.fingerprint, allowed_changes)
        # 3. Fill the cache of trunk states, then restore the newest training state. The clock continues with its number
        # of updates and its seconds, because both determine the progress.
        trunk_states = _trunk_states(config, model, state.params, corpus, is_told_to_end)
        clock = _Clock(config)
        if resume and (restored := run_dir.restore_state(output, state)) is not None:
            state, metadata = restored
            clock = _Clock(config, number=metadata["step"], spent=metadata["seconds"])
        # 4. Open the log, the trackers and the profiler's window; other processes log nothing.
        send = stack.enter_context(tracking(output, clock.number, config, settings)) if is_first else None
        log = stack.enter_context(Log(output if is_first else None, step=clock.number, send=send))
        trace = stack.enter_context(trace_window(output, start=config.profile_start, steps=config.profile_steps))
        decoder = PanelDecoder(corpus, model=model, num_depths=panel_depths, count=config.panel_prompts)

        # All processes compute the teacher-forced panel, because gathering parameters is a collective. Only the first
        # one decodes prompts, and during the run only as long as that stays a small fraction of the time.
        def evaluate(*, is_last: bool = False) -> Panel:
            params = distributed.fetch(state.params)
            panel = acceptance_panel(params, corpus.panel_rows, model=model, num_depths=panel_depths)
            if is_first and (is_last or decoder.fits(clock.seconds)):
                panel = dataclasses.replace(panel, decoded=decoder.measure(params, is_last=is_last))
            log.record({"step": clock.number, "seconds": clock.seconds, "eval": dataclasses.asdict(panel)})
            log.restart_clock(clock.number)
            return panel

        # Gather the state, write it in the first process, and agree in all processes on whether that succeeded.
        def save() -> bool:
            metadata, whole, is_saved = {"seconds": clock.seconds}, distributed.fetch(state), True
            if is_first:
                is_saved = run_dir.save_state(
                    output, whole, step=clock.number, keep=config.keep_states, metadata=metadata
                )
            log.restart_clock(clock.number)
            return not distributed.any_of(not is_saved)

        # 5. The batches depend only on the seed and the number of the update, so a resumed run reads those that an
        # uninterrupted one would read. `numbers` are the rows' numbers, by which trunk states are looked up.
        stream = packing.mixed_batches(
            corpus.parts, corpus.weights, config.batch_size, seed=config.seed, start=clock.number
        )
        bad_steps = 0
        while clock.progress < 1:
            before = clock.progress
            trace(clock.number)
            numbers, batch = next(stream)
            states = None if trunk_states is None else trunk_states.take(numbers)
            if mesh is not None:
                batch, states = place_rows((batch, states), mesh)
            # One update. Learning rate, lambda and mix follow the progress before it.
            state, metrics = step(state, batch, *_rates(before, config), before, states=states)
            clock.tick()
            # The update skips itself if it is not finite. Too many in a row mean divergence, and the run stops.
            bad_steps = 0 if metrics["is_finite"] else bad_steps + 1
            if bad_steps:
                logger.warning("step %d is not finite and was skipped", clock.number)
            if bad_steps >= config.most_bad_steps:
                save()
                raise FloatingPointError(
                    f"{bad_steps} steps in a row up to {clock.number} had no finite loss or gradient and were skipped:"
                    f" lower learning_rate {config.learning_rate}"
                )
            if clock.number % config.log_every == 0:
                losses, tokens = jax.device_get(metrics["losses"]), config.batch_size * config.row_length
                log.record_step(clock.number, clock.seconds, clock.progress, losses=losses, tokens_per_step=tokens)
            # The end has its own evaluation, below. Others come when the progress passes a multiple of 1 / evaluations.
            if clock.progress >= 1:
                break
            if math.floor(clock.progress * evaluations) > math.floor(before * evaluations):
                evaluate()
            # A signal to one process stops all of them at the same update, after the state is saved.
            if distributed.any_of(is_told_to_end()):
                if not save():
                    raise OSError(f"{output} was told to stop, but step {clock.number} could not be saved")
                raise Preempted(f"{output} was told to stop and is saved at step {clock.number}: continue with resume")
            if config.save_every and clock.number % config.save_every == 0:
                save()
        # 6. Evaluate, then write the model in its form for decoding. The checkpoint keeps held-out rows and the
        # modules' output on them, so that a loader can check that it computes the same drafts.
        panel = evaluate(is_last=True)
        if is_first:
            plot_run(output / "panel.png", log.history)

        params = unstack_layers(distributed.fetch(state.params), model.config)
        model = MTPModel(model.config)
        path = output / "checkpoint"
        metadata = {
            "steps": clock.number,
            "panel": dataclasses.asdict(panel),
            "train": settings,
            "data": corpus.summary,
            "self_check": self_check.record(params, corpus.panel_rows.tokens, model=model, num_depths=panel_depths),
        }
        metadata["tokenizer"] = "huggingface" if corpus.file else "bytes"
        if is_first:
            checkpoint.save_model(path, model, params, metadata=metadata, tokenizer=corpus.file)
        # No process may end while the first still writes: that would count as a lost process.
        distributed.wait("saved")
    return TrainResult(model, params, path, corpus.held_out, panel, log.history)


class _Clock:
    """Progress of a run by updates or by wall-clock time, whichever is further.

    `progress` changes only at a tick, so that everything within one update sees the same value.

    Args:
        config: `steps` and `seconds`.
        number: number of updates that the run continues from.
        spent: seconds that they took.
    """

    def __init__(self, config: TrainConfig, *, number: int = 0, spent: float = 0.0):
        self.config, self.number, self.begin = config, number, time.perf_counter() - spent
        self.progress = self._progress()

    @property
    def seconds(self) -> float:
        """Returns the wall-clock time of the run, including the time before a restart."""
        return time.perf_counter() - self.begin

    def tick(self) -> None:
        """Counts an update."""
        self.number += 1
        self.progress = self._progress()

    def _progress(self) -> float:
        return min(max(self.number / self.config.steps, self.seconds / self.config.seconds), 1.0)


def _rates(progress: float, config: TrainConfig) -> tuple[float, float]:
    """Returns learning rate and lambda."""
    scale = mtp_scale_at(
        progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
    )
    return learning_rate_at(progress, config), scale


def _mesh(config: TrainConfig) -> Mesh | None:
    """Makes the mesh; None for one device. Raises `ValueError` for unsupported combinations."""
    size, devices, several = math.prod(dict(config.mesh).values()), jax.device_count(), distributed.are_several()
    # Several processes must use all devices, because each one takes part with its own.
    if size > devices or (several and size != devices):
        raise ValueError(f"the mesh {dict(config.mesh)} covers {size} devices, but JAX has {devices}")
    if several and config.trunk_states is not None:
        raise ValueError("trunk_states must be computed by one process first, without --nnodes")
    # Clocks differ between processes, which would then end after different numbers of updates.
    if several and config.seconds < math.inf:
        raise ValueError(
            f"seconds {config.seconds} is unsupported with several processes, whose clocks differ: use steps"
        )
    return compat.make_mesh(dict(config.mesh)) if size > 1 else None


def _first_state(
    config: TrainConfig, model: MTPModel, params: dict, num_depths: int, mesh: Mesh | None
) -> tuple[TrainState, Callable]:
    """Returns the state before the first update, and the jitted update."""
    optimizer = make_optimizer(config)
    params, stays = params if mesh is None else shard_params(params, mesh), None
    state = first_state(params, optimizer, config.trains)
    # The output keeps the layout of the input, so that the donated state is updated in place.
    if mesh is not None:
        state = place_state(state, mesh, optimizer=optimizer, trains=config.trains)
        stays = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec()))
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
    return state, jax.jit(step, donate_argnames="state", out_shardings=stays)


def _trunk_states(
    config: TrainConfig, model: MTPModel, params: dict, corpus: Corpus, is_told_to_end: Callable[[], bool]
) -> TrunkStates | None:
    """Opens the cache of the frozen trunk's states for all packed rows; None without one."""
    if config.trunk_states is None:
        return None
    return stored_states(
        config.trunk_states,
        params,
        packing.join(corpus.parts),
        model=model,
        batch_size=config.batch_size,
        dtype=config.trunk_states_dtype,
        is_told_to_end=is_told_to_end,
    )


def _initial(config: TrainConfig) -> tuple[MTPModel, Callable[[], dict]]:
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


def _num_depths(config: TrainConfig, model: MTPModel) -> int:
    """Returns the number of draft depths to train: none for a model without MTP modules."""
    return config.num_depths if model.config.num_mtp_modules else 0


def describe(config: TrainConfig) -> dict[str, int]:
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
    model, begin_with = _initial(config)
    params = jax.eval_shape(begin_with)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=_num_depths(config, model))
    state = (params, jax.eval_shape(make_optimizer(config).init, trained(params, config.trains)))
    sizes = {
        "rows": sum(len(rows.tokens) for rows in corpus.parts),
        "tokens": sum(int((rows.segment_ids > 0).sum()) for rows in corpus.parts),
        "held-out documents": len(corpus.held_out),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "bytes of parameters and optimiser": sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
    }
    if config.trunk_states is not None:
        each = bytes_per_token(model, config.trunk_states_dtype)
        sizes["bytes of the trunk's states, each token"] = each
        sizes["bytes of the trunk's states"] = each * sum(rows.tokens.size for rows in corpus.parts)
    return sizes


def _json(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings as JSON can hold them, with None for infinity."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(config).items()}
