"""A training run: data, steps, held-out panel, log, checkpoint."""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.console
import rich.progress

from mtpjax import checkpoint
from mtpjax.architectures import presets
from mtpjax.atomic import write_text
from mtpjax.config import Source, TrainConfig
from mtpjax.model import MTPModel, add_mtp_modules, init_params
from mtpjax.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from mtpjax.train import data, runs
from mtpjax.train.losses import mtp_scale_at
from mtpjax.train.panel import Panel, acceptance_panel
from mtpjax.train.sources import end_token_id, fingerprint, read_source
from mtpjax.train.step import TrainState, make_optimizer, train_step, trained
from mtpjax.trunk import stack_layers, unstack_layers

logger = logging.getLogger("mtpjax.train")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run leaves: the model for decoding, its checkpoint, the held-out documents and every logged row."""

    model: MTPModel
    params: dict
    path: pathlib.Path
    held_out: list[data.Document]
    panel: Panel
    history: list[dict[str, Any]]


def learning_rate_at(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to `final_learning_rate` of the peak; `progress` 0..1 of the run."""
    warm = min(progress / config.warmup, 1.0) if config.warmup else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * warm * (config.final_learning_rate + (1 - config.final_learning_rate) * cosine)


class Preempted(Exception):
    """The run was told to end (SIGTERM or SIGUSR1), and has saved its state: `resume` goes on from there."""


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
    `panel_depths` levels or more, on held-out documents); `checkpoint/` the model and its tokenizer. On a terminal a
    live bar shows the same, elsewhere one line each.

    With `resume` the run in the folder goes on from its newest state that is whole, or from the beginning where there
    is none; on a CPU its losses are then those of an unbroken run, bit for bit. A setting or data that differ are
    refused, but for `runs.FREE_SETTINGS` and `allowed_changes`. `overwrite` replaces a run that is in the folder.

    Raises `ValueError` for settings that do not fit, for sources of which too much is of no use, and for a folder that
    is in use or holds another run, `FileNotFoundError` where there is no text, `FloatingPointError` after too many
    steps in a row that are not finite, `Preempted` when told to end.
    """
    model, begin_with = _initial(config)
    params, model_config = begin_with(), model.config
    num_depths = config.num_depths if model_config.num_mtp_modules else 0
    panel_depths = max(num_depths, panel_depths)
    corpus = _load_data(config, model_config.vocab_size)
    optimizer = make_optimizer(config)
    state = TrainState(params, optimizer.init(trained(params, config.trains)), jnp.zeros((), jnp.int32))
    step = jax.jit(
        functools.partial(
            train_step,
            model=model,
            optimizer=optimizer,
            num_depths=num_depths,
            attention_layout=config.attention_layout,
            objective=config.objective,
            trains=config.trains,
        ),
        donate_argnames="state",
    )

    tokens_per_step = config.batch_size * config.row_length
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(runs.locked(config.output))
        number, spent = 0, 0.0
        settings, digest = _json(config), corpus.summary["fingerprint"]
        if not resume:
            runs.begin(output, settings, digest, overwrite=overwrite)
        else:
            runs.check_same(output, settings, digest, allowed_changes)
            if (restored := runs.restore_state(output, state)) is not None:
                state, metadata = restored
                number, spent = metadata["step"], metadata["seconds"]
        history = _history(output / runs.METRICS, number)
        log = stack.enter_context((output / runs.METRICS).open("a"))
        show = stack.enter_context(_display(config))
        is_told_to_end = stack.enter_context(_ending_signals())
        begin = time.perf_counter() - spent

        def record(row: dict[str, Any]):
            line = json.dumps(row)
            history.append(json.loads(line))
            log.write(line + "\n")
            log.flush()

        def evaluate(step: int) -> Panel:
            panel = acceptance_panel(state.params, corpus.panel_rows, model=model, num_depths=panel_depths)
            record({"step": step, "seconds": time.perf_counter() - begin, "eval": dataclasses.asdict(panel)})
            return panel

        def save() -> bool:
            metadata = {"seconds": time.perf_counter() - begin}
            return runs.save_state(output, state, step=number, keep=config.keep_states, metadata=metadata)

        stream = data.mixed_batches(corpus.parts, corpus.weights, config.batch_size, seed=config.seed, start=number)
        last_time, last_step, bad_steps = time.perf_counter(), number, 0
        progress = min(max(number / config.steps, spent / config.seconds), 1.0)
        while progress < 1:
            scale = mtp_scale_at(
                progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
            )
            state, metrics = step(state, next(stream), learning_rate_at(progress, config), scale, progress)
            bad_steps = 0 if metrics["is_finite"] else bad_steps + 1
            number += 1
            if bad_steps:
                logger.warning("step %d is not finite and was skipped", number)
            if bad_steps >= config.most_bad_steps:
                save()
                raise FloatingPointError(
                    f"{bad_steps} steps in a row up to {number} were not finite, and changed nothing:"
                    f" lower learning_rate {config.learning_rate}"
                )
            now = time.perf_counter()
            before, progress = progress, min(max(number / config.steps, (now - begin) / config.seconds), 1.0)
            if number % config.log_every == 0:
                rate = (number - last_step) * tokens_per_step / (now - last_time)
                last_time, last_step = now, number
                bits = (jax.device_get(metrics["losses"]) / math.log(2)).tolist()
                row = {"step": number, "seconds": now - begin, "bits": bits, "tokens_per_second": rate}
                record(row)
                show(progress, row)
            if math.floor(progress * evaluations) > math.floor(before * evaluations) and progress < 1:
                evaluate(number)
                last_time, last_step = time.perf_counter(), number
            if progress < 1 and is_told_to_end():
                if not save():
                    raise OSError(f"{output} was told to end, and step {number} could not be saved")
                raise Preempted(f"{output} was told to end and stands at step {number}: go on with resume")
            if config.save_every and number % config.save_every == 0 and progress < 1:
                save()
                last_time, last_step = time.perf_counter(), number
        panel = evaluate(number)

        params = unstack_layers(state.params, model_config)
        model = MTPModel(model_config)
        path = output / "checkpoint"
        metadata = {"steps": number, "panel": dataclasses.asdict(panel), "train": settings, "data": corpus.summary}
        metadata["tokenizer"] = "huggingface" if corpus.file else "bytes"
        checkpoint.save_model(path, model, params, metadata=metadata, tokenizer=corpus.file)
    return TrainResult(model, params, path, corpus.held_out, panel, history)


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


def describe(config: TrainConfig) -> dict[str, int]:
    """What a run would be: rows and tokens of its data, parameters, bytes of its state. Raises as `train` does."""
    model, begin_with = _initial(config)
    params = jax.eval_shape(begin_with)
    corpus = _load_data(config, model.config.vocab_size)
    state = (params, jax.eval_shape(make_optimizer(config).init, trained(params, config.trains)))
    return {
        "rows": sum(len(rows.tokens) for rows in corpus.parts),
        "tokens": sum(int((rows.segment_ids > 0).sum()) for rows in corpus.parts),
        "held-out documents": len(corpus.held_out),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "bytes of parameters and optimiser": sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
    }


def _history(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` up to a step; later ones, which will be logged again, are cut off the file."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a killed process had begun
                rows.append(json.loads(line))
    rows = [row for row in rows if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


@contextlib.contextmanager
def _ending_signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGTERM or SIGUSR1 has come; outside the main thread neither is caught."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signals = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(which, lambda number, frame: came.append(number)) for which in signals]
    try:
        yield lambda: bool(came)
    finally:
        for which, handler in zip(signals, before, strict=True):
            signal.signal(which, handler)


class _Corpus(NamedTuple):
    """What a run reads."""

    parts: list[data.Batch]  # packed training rows of each source
    weights: list[float]
    panel_rows: data.Batch  # a batch of packed held-out rows
    held_out: list[data.Document]
    file: FileTokenizer | None  # None: bytes
    summary: dict[str, Any]  # what the checkpoint says of it


def _load_data(config: TrainConfig, vocab_size: int) -> _Corpus:
    folder = config.tokenizer
    if folder is None and config.init_from is not None:
        beside = checkpoint.find(config.init_from)
        folder = str(beside) if (beside / "tokenizer.json").is_file() else None
    file = None if folder is None else FileTokenizer(pathlib.Path(folder), vocab_size)
    tokenizer: Tokenizer = file or ByteTokenizer()
    sources = config.sources or (Source(path=config.data, pattern=config.pattern),)
    packing = {"eos_token_id": end_token_id(tokenizer), "seed": config.seed}
    parts, held_out, skipped = [], [], []
    for source in sources:
        reading = read_source(source, tokenizer, vocab_size=vocab_size)
        training, apart = data.split_held_out(reading.documents, config.held_out_fraction)
        held_out += apart
        if not training or (source is sources[-1] and not held_out):
            count = len(reading.documents)
            raise ValueError(f"{count} documents are too few to hold {config.held_out_fraction:.0%} of them out")
        parts.append(data.pack(training, config.row_length, extra_tokens=config.extra_tokens, **packing))
        skipped.append(reading.skipped)
        if any(reading.skipped.values()):
            counts = " ".join(f"{reason}={count}" for reason, count in reading.skipped.items())
            print(f"skipped of {source.path}: {counts}", file=sys.stderr, flush=True)
    held_out_rows = data.pack(held_out, config.row_length, **packing)
    panel_rows = next(data.batches(held_out_rows, min(32, len(held_out_rows.tokens)), seed=config.seed))
    digest = fingerprint(sources, tokenizer, vocab_size=vocab_size)
    weights = [source.weight for source in sources]
    return _Corpus(parts, weights, panel_rows, held_out, file, {"fingerprint": digest, "skipped": skipped})


def _json(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON holds them: no infinite number."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(config).items()}


@contextlib.contextmanager
def _display(config: TrainConfig):
    """Gives a function `show(progress, row)`: a live bar on a terminal, a line of `key=value` elsewhere."""
    console = rich.console.Console(stderr=True)

    def text(row) -> str:
        losses = " ".join(
            f"{'main' if depth == 0 else f'mtp{depth}'}={bits:.3f}" for depth, bits in enumerate(row["bits"])
        )
        return f"step={row['step']} {losses} tokens/s={row['tokens_per_second']:.0f}"

    if not console.is_terminal:

        def show_line(progress, row):
            left = row["seconds"] * (1 - progress) / max(progress, 1e-9)
            print(f"{text(row)} done={progress:.0%} left={left:.0f}s", file=sys.stderr, flush=True)

        yield show_line
        return
    columns = (
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=1.0)
        yield lambda progress, row: bar.update(task, completed=progress, description=text(row))
