"""A training run: data, steps, held-out panel, log, checkpoint."""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.progress

from mtpjax import checkpoint
from mtpjax.architectures import presets
from mtpjax.config import TrainConfig
from mtpjax.model import MTPModel, init_params
from mtpjax.train import data
from mtpjax.train.losses import mtp_scale_at
from mtpjax.train.panel import Panel, acceptance_panel
from mtpjax.train.step import TrainState, make_optimizer, train_step
from mtpjax.trunk import unstack_layers


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run leaves: the model for decoding, its checkpoint, the held-out files and every logged row."""

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


def train(config: TrainConfig, *, panel_depths: int = 0, evaluations: int = 6) -> TrainResult:
    """Trains `config.preset` from scratch and writes `config.output`.

    `metrics.jsonl` gets a row every `log_every` steps (losses per depth in bits) and one per evaluation (the panel, of
    `panel_depths` levels or more, on held-out files); `checkpoint/` the model. On a terminal a live bar shows the same,
    elsewhere one line each. Raises `ValueError` for settings that do not fit, `FileNotFoundError` where there is no
    text.
    """
    model_config = presets[config.preset]
    num_depths = config.num_depths if model_config.num_mtp_modules else 0
    panel_depths = max(num_depths, panel_depths)
    rows, held_out_rows, held_out = _load_data(config)
    stream = data.batches(rows, config.batch_size, seed=config.seed)

    model = MTPModel(model_config, scan_layers=True)
    params = init_params(model, jax.random.key(config.seed))
    optimizer = make_optimizer(config)
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    step = jax.jit(
        functools.partial(
            train_step,
            model=model,
            optimizer=optimizer,
            num_depths=num_depths,
            attention_layout=config.attention_layout,
            objective=config.objective,
        ),
        donate_argnames="state",
    )

    output = pathlib.Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    history: list[dict[str, Any]] = []
    begin = time.perf_counter()
    tokens_per_step = config.batch_size * config.row_length
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((output / "metrics.jsonl").open("w"))
        show = stack.enter_context(_display(config))

        def record(row: dict[str, Any]):
            line = json.dumps(row)
            history.append(json.loads(line))
            log.write(line + "\n")
            log.flush()

        def evaluate(step: int) -> Panel:
            panel = acceptance_panel(state.params, held_out_rows, model=model, num_depths=panel_depths)
            record({"step": step, "seconds": time.perf_counter() - begin, "eval": dataclasses.asdict(panel)})
            return panel

        last_time, last_step, number, progress = begin, 0, 0, 0.0
        while progress < 1:
            scale = mtp_scale_at(
                progress, scale=config.mtp_loss_scale, final=config.mtp_loss_scale_final, switch=config.mtp_loss_switch
            )
            state, metrics = step(state, next(stream), learning_rate_at(progress, config), scale, progress)
            jax.block_until_ready(metrics)
            number += 1
            now = time.perf_counter()
            before, progress = progress, min(max(number / config.steps, (now - begin) / config.seconds), 1.0)
            if number % config.log_every == 0:
                if not metrics["is_finite"]:
                    raise FloatingPointError(f"step {number} is not finite: lower learning_rate {config.learning_rate}")
                rate = (number - last_step) * tokens_per_step / (now - last_time)
                last_time, last_step = now, number
                bits = (jax.device_get(metrics["losses"]) / math.log(2)).tolist()
                row = {"step": number, "seconds": now - begin, "bits": bits, "tokens_per_second": rate}
                record(row)
                show(progress, row)
            if math.floor(progress * evaluations) > math.floor(before * evaluations) and progress < 1:
                evaluate(number)
                last_time, last_step = time.perf_counter(), number
        panel = evaluate(number)

    params = unstack_layers(state.params, model_config)
    model = MTPModel(model_config)
    path = output / "checkpoint"
    metadata = {"tokenizer": "bytes", "steps": number, "panel": dataclasses.asdict(panel), "train": _json(config)}
    checkpoint.save_model(path, model, params, metadata=metadata)
    return TrainResult(model, params, path, held_out, panel, history)


def _load_data(config: TrainConfig) -> tuple[data.Batch, data.Batch, list[data.Document]]:
    """Packed training rows, a batch of packed held-out rows, and the held-out documents."""
    if config.data is None:
        paths = data.python_sources()
    else:
        folder = pathlib.Path(config.data)
        paths = sorted(path for path in folder.rglob(config.pattern) if path.is_file())
        if not paths:
            raise FileNotFoundError(f"no files match {config.pattern} under {folder}")
    training, held_out = data.split_held_out(data.read_documents(paths), config.held_out_fraction)
    if not training or not held_out:
        raise ValueError(f"{len(paths)} files are too few to hold {config.held_out_fraction:.0%} of them out")
    rows = data.pack(training, config.row_length, seed=config.seed)
    held_out_rows = data.pack(held_out, config.row_length, seed=config.seed)
    panel_rows = next(data.batches(held_out_rows, min(32, len(held_out_rows.tokens)), seed=config.seed))
    return rows, panel_rows, held_out


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
