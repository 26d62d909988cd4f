"""What rounds cost on this device by depth and batch, measured once and stored; `DecodeConfig.depth_costs` takes it."""

import dataclasses
import datetime
import hashlib
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mtpjax.atomic import write_text
from mtpjax.config import ModelConfig
from mtpjax.decode.config import DecodeConfig, largest_tree
from mtpjax.decode.costs import PLAIN, CostMeter, Costs, Shape, chain, widest_write
from mtpjax.decode.generate import bucket, speculative_generate
from mtpjax.decode.loop import least_rows
from mtpjax.model import MTPModel

FORMAT, VERSION = "mtpjax-profile", 2
NAME = "profile.json"
SLOTS = 128  # caches are rounded up to so many, as in decoding
CALL_TOKENS = 96  # that a timed call makes
UNWANTED = 100.0  # cost of depths that a call shall not choose, over that of the one that it shall
log = logging.getLogger("mtpjax.decode")


def shapes_up_to(num_steps: int, topk: int = 1, num_draft_tokens: int | None = None) -> tuple[Shape, ...]:
    """The shapes of 1..num_steps levels, trees of `num_draft_tokens` nodes where they have room for so many.

    Raises `ValueError` as `DecodeConfig` does.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1 to have something to compare, not {num_steps}")
    DecodeConfig(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    shapes = []
    for depth in range(1, num_steps + 1):
        most = None if num_draft_tokens is None else min(num_draft_tokens, largest_tree(topk, depth))
        nodes = DecodeConfig(num_steps=depth, topk=topk, num_draft_tokens=most).num_nodes
        shapes.append(Shape(depth, topk, nodes))
    return tuple(shapes)


def measure(
    params: dict,
    *,
    model: MTPModel,
    batches: tuple[int, ...] = (1,),
    num_steps: int = 5,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    context: int = 512,
    rounds: int = 8,
    seconds: float = 0.02,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Times rounds of 0..num_steps levels per batch size, `rounds` times in turn: the profile, as JSON holds it.

    `context` tokens stand in the caches, fewer where the model has not so many positions. `progress` is told how many
    of how many things are done. Raises `ValueError` for a model without modules or for what no round can be.
    """
    config = model.config
    shapes = shapes_up_to(num_steps, topk, num_draft_tokens)
    if not config.num_mtp_modules:
        raise ValueError("the model has no MTP modules: there is nothing to draft with")
    if topk > 1 and config.num_mtp_modules > 1:
        raise ValueError(f"trees need one MTP module; the model has {config.num_mtp_modules}")
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)} must be at least 1")
    widest = max(widest_write(model, shape) for shape in shapes) + 2
    if context < 1 or config.max_position_embeddings < 2 * widest:
        raise ValueError(f"context {context} leaves nothing to measure with {config.max_position_embeddings} positions")
    context = min(context, config.max_position_embeddings - widest)
    capacity = -(-(context + 2 * widest) // SLOTS) * SLOTS
    of_chains = topk == 1
    per_batch = (2 * len(shapes) + 2 if of_chains else 3 * len(shapes) + 2) + rounds
    total, done, costs = per_batch * len(batches), 0, []

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for batch in sorted(set(batches)):
        meter = CostMeter(
            params,
            model=model,
            shapes=shapes,
            context=context,
            capacity=capacity,
            batch=batch,
            min_rows=least_rows(batch, jax.default_backend(), model.implementation),
            seconds=seconds,
            whole=not of_chains,
            compiled=advance,
        )
        calls = None
        if of_chains:
            calls = AdaptiveCalls(params, model=model, num_steps=num_steps, batch=batch, context=context)
            advance()
        for _ in range(rounds):
            meter.measure(repeats=1)
            if calls is not None:
                calls.measure()
            advance()
        measured = meter.costs()
        if calls is not None:
            measured = dataclasses.replace(measured, round=calls.seconds())
        costs.append(measured.to_json())
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_here(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "dtype": params["embedding"].dtype.name,
        "model_config_sha256": config_digest(config),
        "context": context,
        "capacity": capacity,
        "batches": costs,
    }


class AdaptiveCalls:
    """Times rounds of chains as an adaptive call runs them: all depths in one program, and costs that leave no choice.

    Programs of their own, a loop for each depth, are faster or slower than the very same rounds there, on a CPU by up
    to a quarter at batch 1, each by its own luck; and what the policy compares are the rounds of that one program.
    """

    def __init__(self, params, *, model: MTPModel, num_steps: int, batch: int, context: int):
        self._params, self._model, self._num_steps = params, model, num_steps
        room = model.config.max_position_embeddings - 1
        self._tokens = min(CALL_TOKENS, room // 2)
        length = max(1, min(context - self._tokens // 2, room - self._tokens))
        while length > 1 and bucket(length + SLOTS // 2) != bucket(length + self._tokens + SLOTS // 2):
            length -= 1  # so that the short call has the long one's caches
        vocabulary = model.config.num_tokens or model.config.vocab_size
        self._prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, length))
        self._seconds: dict[int, list[float]] = {depth: [] for depth in range(num_steps + 1)}
        self._call(0, self._tokens)  # compiles

    def measure(self) -> None:
        """Times a round of each depth, once."""
        for depth, times in self._seconds.items():
            (short, _), (long, rounds) = (self._call(depth, tokens) for tokens in (1, self._tokens))
            times.append((long - short) / rounds)

    def seconds(self) -> dict[Shape, float]:
        """The medians of all `measure` calls."""
        return {chain(depth): float(np.median(times)) for depth, times in self._seconds.items()}

    def _call(self, depth: int, new_tokens: int) -> tuple[float, int]:
        """Seconds and rounds."""
        costs = tuple(1.0 if other == depth else UNWANTED for other in range(self._num_steps + 1))
        config = DecodeConfig(
            max_new_tokens=new_tokens, num_steps=self._num_steps, depth_policy="adaptive", depth_costs=costs
        )
        begin = time.perf_counter()
        stats = speculative_generate(self._params, self._prompts, model=self._model, config=config).stats
        return time.perf_counter() - begin, int(stats.steps.max())


def config_digest(config: ModelConfig) -> str:
    """Names what costs depend on: shapes, not weights."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def _here() -> dict[str, str]:
    """What a profile must have in common with the process that uses it."""
    return {"device_kind": jax.devices()[0].device_kind, "jax_version": jax.__version__}


def default_path(folder) -> pathlib.Path:
    """Where a model's profile stands: in its folder. Raises `ValueError` where none can be written there."""
    folder = pathlib.Path(folder)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to: say where the profile shall go with --output FILE")
    return folder / NAME


def save(path, profile: dict[str, Any]) -> None:
    """Writes the file, complete or not at all."""
    write_text(path, json.dumps(profile, indent=1) + "\n")


def read(path) -> tuple[dict[str, Any], tuple[Costs, ...]]:
    """The profile at `path`, or in a folder, and its costs per batch size. Raises `ValueError` in one line."""
    path = pathlib.Path(path)
    path = path / NAME if path.is_dir() else path
    try:
        profile = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: `mtpjax profile` measures one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no profile: {error}") from error
    if not isinstance(profile, dict) or (profile.get("format"), profile.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is no profile of format {FORMAT!r}, version {VERSION}")
    try:
        costs = tuple(Costs.from_json(stored) for stored in profile["batches"])
        complete = bool(costs) and all(
            PLAIN in kind and kind.keys() == cost.parts.keys() and all(0 < value < math.inf for value in kind.values())
            for cost in costs
            for kind in (cost.verify, cost.parts, cost.round)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not complete:
        raise ValueError(f"{path} is damaged: a duration is missing, or not positive")
    return profile, costs


def load_costs(path, *, batch: int, num_steps: int, config: ModelConfig | None = None) -> tuple[float, ...]:
    """Durations of rounds at depths 0..num_steps, in plain steps, for `DecodeConfig(depth_costs=...)`.

    Of the profiled batch sizes the nearest is taken. A profile of another device or jax version is used with a warning.
    Raises `ValueError` where there is none at `path` (a file, or a folder that holds `profile.json`), where it is not
    as deep or holds trees only, and where it is of another model than `config`.
    """
    profile, measured = read(path)
    if config is not None and profile.get("model_config_sha256") != config_digest(config):
        raise ValueError(f"{path} is of another model: measure this one with `mtpjax profile`")
    for name, here in _here().items():
        if profile.get(name) != here:
            log.warning("%s was measured with %s %r; here it is %r", path, name, profile.get(name), here)
    return relative_costs(measured, path, batch=batch, num_steps=num_steps)


def relative_costs(measured: Sequence[Costs], origin, *, batch: int, num_steps: int) -> tuple[float, ...]:
    """Of the measured batch size nearest to `batch`: rounds of chains at depths 0..num_steps, in plain steps.

    Raises `ValueError`, naming `origin`, where they are not as deep.
    """
    nearest = min(measured, key=lambda costs: (abs(math.log(costs.batch / batch)), -costs.batch))
    rounds = {shape.num_steps: seconds for shape, seconds in nearest.round.items() if shape.topk == 1}
    missing = [depth for depth in range(1, num_steps + 1) if depth not in rounds]
    if missing:
        deepest = f"chains of 1..{max(rounds)} levels" if max(rounds) else "no chains"
        raise ValueError(f"{origin} holds {deepest}, not of {missing[0]}: `mtpjax profile --num-steps {num_steps}`")
    return tuple(rounds[depth] / rounds[0] for depth in range(num_steps + 1))


def break_even_rate(relative: float, num_steps: int) -> float | None:
    """The rate, the same at every level, from which a round that costs `relative` plain steps pays; None: never."""
    if relative > num_steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (low, rate) if sum(rate**level for level in range(num_steps + 1)) > relative else (rate, high)
    return high


def tables(profile: dict[str, Any]):
    """A `rich` table per batch size, within 80 columns."""
    from mtpjax.tables import narrow_table

    for stored in profile["batches"]:
        costs = Costs.from_json(stored)
        title = f"batch {costs.batch}, {profile['context']} tokens of context, {profile['dtype']}"
        table = narrow_table(title)
        headings = (
            "drafts",
            "nodes",
            "round\nms",
            "parts'\nshare",
            "verify's\nshare",
            "plain steps =\nbreak-even length",
        )
        for heading in (*headings, "rate per level\nto break even"):
            table.add_column(heading, justify="right", no_wrap=True)
        for shape, seconds in costs.round.items():
            relative = seconds / costs.round[PLAIN]
            rate = break_even_rate(relative, shape.num_steps) if shape.num_steps else 0.0
            table.add_row(
                str(shape.num_steps),
                str(shape.num_nodes),
                f"{1e3 * seconds:.3g}",
                f"{costs.parts[shape] / seconds:.2f}",
                f"{costs.verify[shape] / seconds:.2f}",
                f"{relative:.2f}",
                "never" if rate is None else f"{rate:.2f}",
            )
        yield table
