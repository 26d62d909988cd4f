"""Measures the parts of a training update on this machine, for `mtpjax profile --train`.

The parts are differences between the times of programs that each do the work of the program before and more: the
trunk's forward pass; the modules' too; the losses too; the backward pass too; and the whole update. The programs run in
rotation, and each is compiled alone, so XLA fuses across the border of two parts only where the update does so too.
"""

import datetime
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.forward import read_layers
from mtpjax.evaluation.machine import Stopwatch, product_rate
from mtpjax.evaluation.profile_file import device_properties
from mtpjax.evaluation.trust import waiting_problem
from mtpjax.evaluation.update_flops import flops_by_part, update_flops
from mtpjax.evaluation.update_report import mfu_of
from mtpjax.models.flops import RowCounts
from mtpjax.models.forward import trunk_states
from mtpjax.training.config import TrainConfig
from mtpjax.training.gradients import Rows, TrainSpec, forward_rows, loss_and_gradients, split_rows, sum_over_parts
from mtpjax.training.run import Run
from mtpjax.training.step import prepare_rows
from mtpjax.training.utilisation import trained_part

MAX_SECONDS, MIN_REPEATS = 20.0, 4  # after so many repeats, measuring stops when the time is up


def measure_update(
    config: TrainConfig, *, repeats: int, progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    """Measures the parts of an update with a run's model, data and settings. Writes nothing.

    Args:
        config: the run's settings, for one device.
        repeats: measurements; slow updates get fewer, at least `MIN_REPEATS`.
        progress: called with the number of programs compiled and measurements done, and their total number.

    Returns:
        A JSON object. "parts" has the name, the seconds and the model FLOPs of "data", "trunk", "modules",
        "losses", "backward" and "optimizer", which add up to the whole update.

    Raises:
        ValueError: the settings have a mesh of several devices or cached trunk states, or do not fit model or data.
    """
    if config.trunk_states is not None:
        raise ValueError("profiling runs the trunk in every update: leave out trunk_states")
    if any(size > 1 for size in dict(config.mesh).values()):
        raise ValueError("only updates on one device can be profiled: leave out mesh, or predict with --predict")
    run = Run(config, evaluations=1)
    stream = run.corpus.batches(config.batch_size, seed=config.seed)
    batch = next(stream)
    numbers = (config.learning_rate, config.mtp_loss_scale, 1.0)
    rows, totals = jax.jit(functools.partial(prepare_rows, states=None, spec=run.spec))(run.state, batch)
    prefixes = {name: jax.jit(call) for name, call in _prefixes(run.spec).items()}
    num_done, total = 0, len(prefixes) + 1 + repeats

    def advance() -> None:
        nonlocal num_done
        num_done += 1
        progress(num_done, total)

    # 1. Compile every program. The update changes the state, whose arrays it takes over.
    state = run.state
    for call in prefixes.values():
        jax.block_until_ready(call(state.params, rows, totals, *numbers[1:]))
        advance()
    state, _ = jax.block_until_ready(run.step(state, batch, *numbers, states=None))
    advance()
    # 2. Time the programs in rotation.
    stopwatch, begin = Stopwatch(), time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in ("data", *prefixes, "update")}
    for repeat in range(repeats):
        if repeat >= MIN_REPEATS and time.perf_counter() - begin > MAX_SECONDS:
            break
        seconds["data"].append(_seconds(lambda: jax.device_put(next(stream)))[0])
        for name, call in prefixes.items():
            arguments = (state.params, rows, totals, *numbers[1:])
            seconds[name].append(_seconds(lambda call=call, arguments=arguments: call(*arguments))[0])
        took, (state, _) = _seconds(lambda state=state: run.step(state, batch, *numbers, states=None))
        seconds["update"].append(took)
        advance()
    waited = stopwatch.waited_share()
    progress(total, total)
    # 3. Disturbances only add time, so compare the fastest times.
    fastest = {name: min(each) for name, each in seconds.items()}
    counts = RowCounts.of_segments(batch.segment_ids)
    counted = update_flops(run.model.config, run.state.params, counts, trained_part(config, run.spec))
    parts = _parts(fastest, None if counted is None else flops_by_part(counted))
    profile = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **device_properties(),
        "dtype": config.dtype,
        "batch_size": config.batch_size,
        "row_length": batch.tokens.shape[1],
        "trains": config.trains,
        "parts": parts,
        "update_seconds": fastest["data"] + fastest["update"],
        "peak_flops": run.work.peak_flops or product_rate(config.dtype),
        "is_peak_measured": run.work.peak_flops is None,
        "repeats": len(seconds["update"]),
        "waited": waited,
        "problem": waiting_problem(waited),
    }
    tokens = run.work.tokens
    return {**profile, "mfu": mfu_of(profile), "tokens_per_second": tokens / profile["update_seconds"]}


def _prefixes(spec: TrainSpec) -> dict[str, Callable[..., Any]]:
    """Returns the programs, each of which does more of an update. Microbatches run one after the other, as there."""

    def summed(arrays: Any) -> jax.Array:
        # The sum keeps XLA from removing the computation, and costs one read.
        return sum((leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(arrays)), jnp.zeros(()))

    def over_parts(function: Callable[[Rows], Any], rows: Rows) -> jax.Array:
        if spec.accumulation == 1:
            return summed(function(rows))
        return sum_over_parts(lambda part: summed(function(part)), split_rows(rows, spec.accumulation))

    def trunk(params, rows, totals, mtp_scale, progress):
        states = functools.partial(trunk_states, params, model=spec.model, layer_ids=read_layers(spec.drafter))
        return over_parts(lambda part: states(part.tokens, part.segment_ids), rows)

    def modules(params, rows, totals, mtp_scale, progress):
        def hidden(part: Rows):
            output = forward_rows(params, part, spec).output
            return output.hidden, output.mtp_hidden

        return over_parts(hidden, rows)

    backward = functools.partial(loss_and_gradients, spec=spec)
    # Nothing reads the gradients of the losses, so XLA removes the backward pass.
    losses = lambda *arguments: backward(*arguments)[0]
    return {"trunk": trunk, "modules": modules, "losses": losses, "backward": backward}


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a call takes until its arrays exist, and its result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - begin, result


def _parts(fastest: dict[str, float], flops: dict[str, float] | None) -> list[dict[str, Any]]:
    """Returns the parts of an update. A difference below the noise may be negative, and counts as 0."""
    names = ["trunk", "modules", "losses", "backward", "update"]
    seconds = {"data": fastest["data"], "trunk": fastest["trunk"]}
    for before, after in itertools.pairwise(names):
        seconds["optimizer" if after == "update" else after] = max(fastest[after] - fastest[before], 0.0)
    return [
        {"name": name, "seconds": took, "flops": None if flops is None else flops.get(name, 0.0)}
        for name, took in seconds.items()
    ]
