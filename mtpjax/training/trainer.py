"""A training run: data, steps, held-out panel, log, checkpoint."""

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
    """What a run leaves: the model for decoding, its checkpoint, the held-out documents and every logged row."""

    model: MTPModel
    params: dict
    path: pathlib.Path
    held_out: list[packing.Document]
    panel: Panel
    history: list[dict[str, Any]]


def learning_rate_at(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to `final_learning_rate` of the peak; `progress` 0..1 of the run."""
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
    """Trains `config.preset` from scratch, or the model of `config.init_from`, and writes `config.output`.

    `metrics.jsonl` gets a row every `log_every` steps (losses per depth in bits) and one per evaluation (the panel, of
    `panel_depths` levels or more, on held-out documents); `panel.png` shows both; `checkpoint/` holds the model and its
    tokenizer. On a terminal a live bar shows the same, elsewhere one line each.

    With `resume` the run in the folder goes on from its newest state that is whole, or from the beginning where there
    is none; on a CPU its losses are then those of an unbroken run, bit for bit. A setting or data that differ are
    refused, but for `run_dir.FREE_SETTINGS` and `allowed_changes`. `overwrite` replaces a run that is in the folder.

    Raises `ValueError` for settings that do not fit, for sources of which too much is of no use, and for a folder that
    is in use or holds another run, `FileNotFoundError` where there is no text, `FloatingPointError` after too many
    steps in a row that are not finite, `Preempted` when told to end, `distributed.LostProcess` where another process of
    the run is lost.
    """
    require_trackers(config)
    mesh, is_first = _mesh(config), distributed.is_first()
    model, begin_with = _initial(config)
    num_depths = _num_depths(config, model)
    panel_depths = max(num_depths, panel_depths)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=num_depths)
    state, step = _first_state(config, model, begin_with(), num_depths, mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.told_of_losses())
        output = stack.enter_context(run_dir.locked(config.output)) if is_first else pathlib.Path(config.output)
        is_told_to_end = stack.enter_context(run_dir.ending_signals())
        settings = _json(config)
        if not resume and is_first:
            run_dir.begin(output, settings, corpus.fingerprint, overwrite=overwrite)
        if resume:
            run_dir.check_same(output, settings, corpus.fingerprint, allowed_changes)
        trunk_states = _trunk_states(config, model, state.params, corpus, is_told_to_end)
        clock = _Clock(config)
        if resume and (restored := run_dir.restore_state(output, state)) is not None:
            state, metadata = restored
            clock = _Clock(config, number=metadata["step"], spent=metadata["seconds"])
        send = stack.enter_context(tracking(output, clock.number, config, settings)) if is_first else None
        log = stack.enter_context(Log(output if is_first else None, step=clock.number, send=send))
        trace = stack.enter_context(trace_window(output, start=config.profile_start, steps=config.profile_steps))
        decoder = PanelDecoder(corpus, model=model, num_depths=panel_depths, count=config.panel_prompts)

        def evaluate(*, is_last: bool = False) -> Panel:
            params = distributed.fetch(state.params)
            panel = acceptance_panel(params, corpus.panel_rows, model=model, num_depths=panel_depths)
            if is_first and (is_last or decoder.fits(clock.seconds)):
                panel = dataclasses.replace(panel, decoded=decoder.measure(params, is_last=is_last))
            log.record({"step": clock.number, "seconds": clock.seconds, "eval": dataclasses.asdict(panel)})
            log.restart_clock(clock.number)
            return panel

        def save() -> bool:
            metadata, whole, is_saved = {"seconds": clock.seconds}, distributed.fetch(state), True
            if is_first:
                is_saved = run_dir.save_state(
                    output, whole, step=clock.number, keep=config.keep_states, metadata=metadata
                )
            log.restart_clock(clock.number)
            return not distributed.any_of(not is_saved)

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
            state, metrics = step(state, batch, *_rates(before, config), before, states=states)
            clock.tick()
            bad_steps = 0 if metrics["is_finite"] else bad_steps + 1
            if bad_steps:
                logger.warning("step %d is not finite and was skipped", clock.number)
            if bad_steps >= config.most_bad_steps:
                save()
                raise FloatingPointError(
                    f"{bad_steps} steps in a row up to {clock.number} were not finite, and changed nothing:"
                    f" lower learning_rate {config.learning_rate}"
                )
            if clock.number % config.log_every == 0:
                losses, tokens = jax.device_get(metrics["losses"]), config.batch_size * config.row_length
                log.record_step(clock.number, clock.seconds, clock.progress, losses=losses, tokens_per_step=tokens)
            if clock.progress >= 1:
                break
            if math.floor(clock.progress * evaluations) > math.floor(before * evaluations):
                evaluate()
            if distributed.any_of(is_told_to_end()):
                if not save():
                    raise OSError(f"{output} was told to end, and step {clock.number} could not be saved")
                raise Preempted(f"{output} was told to end and stands at step {clock.number}: go on with resume")
            if config.save_every and clock.number % config.save_every == 0:
                save()
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
        distributed.wait("saved")
    return TrainResult(model, params, path, corpus.held_out, panel, log.history)


class _Clock:
    """How far a run is, by its updates or by the wall, whichever is further; `progress` 0..1 as of the last tick."""

    def __init__(self, config: TrainConfig, *, number: int = 0, spent: float = 0.0):
        self.config, self.number, self.begin = config, number, time.perf_counter() - spent
        self.progress = self._progress()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def tick(self) -> None:
        self.number += 1
        self.progress = self._progress()

    def _progress(self) -> float:
        return min(max(self.number / self.config.steps, self.seconds / self.config.seconds), 1.0)


def _rates(progress: float, config: TrainConfig) -> tuple[float, float]:
    """Learning rate and lambda."""
    scale = mtp_scale_at(
        progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
    )
    return learning_rate_at(progress, config), scale


def _mesh(config: TrainConfig) -> Mesh | None:
    """None for one device. Raises `ValueError` where it does not fit the devices, or the run not several processes."""
    size, devices, several = math.prod(dict(config.mesh).values()), jax.device_count(), distributed.are_several()
    if size > devices or (several and size != devices):
        raise ValueError(f"the mesh {dict(config.mesh)} takes {size} devices, and there are {devices}")
    if several and config.trunk_states is not None:
        raise ValueError("trunk_states are stored by one process: make them first, without --nnodes")
    if several and config.seconds < math.inf:
        raise ValueError(f"seconds {config.seconds} ends one process by its clock: several end after steps alone")
    return compat.make_mesh(dict(config.mesh)) if size > 1 else None


def _first_state(
    config: TrainConfig, model: MTPModel, params: dict, num_depths: int, mesh: Mesh | None
) -> tuple[TrainState, Callable]:
    """The state before the first update, and the jitted update."""
    optimizer = make_optimizer(config)
    params, stays = params if mesh is None else shard_params(params, mesh), None
    state = first_state(params, optimizer, config.trains)
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
    """The model in its form for training, and what makes the parameters that it begins with, in float32."""
    key = jax.random.key(config.seed)
    if config.init_from is None:
        model = MTPModel(presets[config.preset], scan_layers=True)
        return model, functools.partial(init_params, model, key)
    model, params = checkpoint.load(config.init_from, dtype=jnp.float32)
    if config.num_depths and not model.config.num_mtp_modules:
        model, params = add_mtp_modules(model, params, 1, key)
    return MTPModel(model.config, scan_layers=True), functools.partial(stack_layers, params, model.config)


def _num_depths(config: TrainConfig, model: MTPModel) -> int:
    return config.num_depths if model.config.num_mtp_modules else 0


def describe(config: TrainConfig) -> dict[str, int]:
    """What a run would be: rows and tokens of its data, parameters, bytes of its state. Raises as `train` does."""
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
    """The settings as JSON holds them: no infinite number."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(config).items()}
