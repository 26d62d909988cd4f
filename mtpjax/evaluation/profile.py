"""What rounds cost on this device by depth and batch, measured once and stored; an adaptive depth goes by it."""

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

from mtpjax.atomic import write_text
from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.config import LOSSY_RULES, DecodeConfig, largest_tree
from mtpjax.evaluation.round_costs import PLAIN, CostMeter, Costs, Shape, widest_write
from mtpjax.host import num_threads
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel

FORMAT, VERSION = "mtpjax-profile", 4
NAME = "profile.json"
LEAST_RATE = 0.01  # of a level; measured ones may be 0
AT_A_TIME, MOST_SECONDS = 4, 20.0  # measurements between ticks of the progress, and per batch size where they are long
SLOTS = 128  # caches are rounded up to so many, as in decoding
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
    temperature: float = 0.0,
    acceptance: dict[str, list[float]] | None = None,
    rounds: int = 48,
    seconds: float = 0.02,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Times rounds of 0..num_steps levels per batch size, `rounds` times in turn: the profile, as JSON holds it.

    Where rounds are long fewer measurements do, and 20 s per batch size are the most that is taken for more than four.
    `context` tokens stand in the caches, fewer where the model has not so many positions; at a `temperature` above 0
    rounds draw their tokens. `acceptance` on other texts is kept beside the costs (`usable_acceptance`). `progress`
    is told how many of how many things are done. Raises `ValueError` for a model without modules or for what no round
    can be.
    """
    config = model.config
    shapes = shapes_up_to(num_steps, topk, num_draft_tokens)
    if not config.num_mtp_modules:
        raise ValueError("the model has no MTP modules: there is nothing to draft with")
    if topk > 1 and config.num_mtp_modules > 1:
        raise ValueError(f"trees need one MTP module; the model has {config.num_mtp_modules}")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} must be at least 0")
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)} must be at least 1")
    widest = max(widest_write(model, shape) for shape in shapes) + 2
    if context < 1 or config.max_position_embeddings < 2 * widest:
        raise ValueError(f"context {context} leaves nothing to measure with {config.max_position_embeddings} positions")
    context = min(context, config.max_position_embeddings - widest)
    capacity = -(-(context + 2 * widest) // SLOTS) * SLOTS
    per_batch = 3 * len(shapes) + 2 + (topk == 1) + rounds
    total, done, costs = per_batch * len(batches), 0, []

    def advance(by: int = 1) -> None:
        nonlocal done
        done += by
        progress(done, total)

    for batch in sorted(set(batches)):
        meter = CostMeter(
            params,
            model=model,
            shapes=shapes,
            context=context,
            capacity=capacity,
            batch=batch,
            min_rows=min_rows_per_pass(batch, jax.default_backend(), model.implementation),
            temperature=temperature,
            seconds=seconds,
            whole=True,
            compiled=advance,
        )
        _measure_for_long_enough(meter, rounds, advance)
        costs.append(meter.costs().to_json())
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_here(),
        "dtype": params["embedding"].dtype.name,
        "model_config_sha256": config_digest(config),
        "context": context,
        "temperature": temperature,
        "capacity": capacity,
        "acceptance": acceptance,
        "batches": costs,
    }


def _measure_for_long_enough(meter: CostMeter, rounds: int, advance: Callable[[int], None]) -> None:
    """`rounds` measurements, or as many as `MOST_SECONDS` hold; `advance` is told of all of them."""
    left, begin = rounds, time.perf_counter()
    while left and (left == rounds or time.perf_counter() - begin < MOST_SECONDS):
        repeats = min(AT_A_TIME, left)
        meter.measure(repeats)
        left -= repeats
        advance(repeats)
    advance(left)


def config_digest(config: ModelConfig) -> str:
    """Names what costs depend on: shapes, not weights."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def _here() -> dict[str, Any]:
    """What a profile must have in common with the process that uses it."""
    threads = {"threads": num_threads()} if jax.default_backend() == "cpu" else {}
    return {"device_kind": jax.devices()[0].device_kind, "jax_version": jax.__version__, **threads}


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
        complete &= profile["acceptance"] is None or _is_usable(**profile["acceptance"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not complete:
        raise ValueError(f"{path} is damaged: a duration is missing or not positive, or a rate or length cannot be")
    return profile, costs


def load_settings(path, *, batch: int, num_steps: int, config: ModelConfig | None = None) -> dict[str, Any]:
    """What the profile says of an adaptive depth of 0..num_steps: `DecodeConfig(depth_policy="adaptive", …, **this)`.

    Of the profiled batch sizes the nearest is taken. A profile of another device, jax version or number of
    threads is used with a warning. Raises `ValueError` where there is none at `path` (a file, or a folder that holds
    `profile.json`), where it is not as deep or holds trees only, and where it is of another model than `config`.
    """
    profile, measured = read(path)
    if config is not None and profile.get("model_config_sha256") != config_digest(config):
        raise ValueError(f"{path} is of another model: measure this one with `mtpjax profile`")
    for name, here in _here().items():
        if profile.get(name) != here:
            log.warning("%s was measured with %s %r; here it is %r", path, name, profile.get(name), here)
    return settings(measured, profile["acceptance"], path, batch=batch, num_steps=num_steps)


def settings(
    measured: Sequence[Costs], acceptance: dict[str, list[float]] | None, origin, *, batch: int, num_steps: int
) -> dict[str, Any]:
    """Makes the fields of `DecodeConfig` that adaptive depth needs.

    Args:
        measured: round costs, per batch size.
        acceptance: rates of similar prompts, see `usable_acceptance`, if they were measured.
        origin: the file or model that an error names.
        batch: rows that will be decoded; the costs of the nearest measured batch size are used.
        num_steps: the deepest draft.

    Returns:
        `depth_costs`, relative to a round without drafts, and `depth_rates`, which are None without `acceptance`.

    Raises:
        ValueError: chains of `num_steps` levels were not measured.
    """
    nearest = min(measured, key=lambda costs: (abs(math.log(costs.batch / batch)), -costs.batch))
    rounds = {shape.num_steps: seconds for shape, seconds in nearest.round.items() if shape.topk == 1}
    missing = [depth for depth in range(1, num_steps + 1) if depth not in rounds]
    if missing:
        deepest = f"chains of 1..{max(rounds)} levels" if max(rounds) else "no chains"
        raise ValueError(f"{origin} holds {deepest}, not of {missing[0]}: `mtpjax profile --num-steps {num_steps}`")
    plain = rounds[0]
    return {
        "depth_costs": tuple(rounds[depth] / plain for depth in range(num_steps + 1)),
        "depth_rates": None if acceptance is None else _rates_to_depth(acceptance["rates"], num_steps),
    }


def _rates_to_depth(rates: list[float], num_steps: int) -> tuple[float, ...]:
    """Returns a rate per level; levels that were not decoded get the rate of the deepest level that was."""
    return tuple([*rates, *rates[-1:] * num_steps][:num_steps])


def usable_acceptance(figures: dict[str, Any]) -> dict[str, list[float]]:
    """`{"rates", "lengths"}` by level and depth of `figures.report`, as JSON: where adaptive depth begins.

    No rate is 0, and those that nothing was counted of are left out, which are the deepest. There are no lengths where
    none could be predicted. Raises `ValueError` where there is no rate, or one that cannot be.
    """
    rates, lengths = (
        [level["value"] for level in levels if level["value"] is not None]
        for levels in (figures["decoded"]["conditional"], figures["predicted"]["accept_length_at_depth"])
    )
    found = {"rates": [max(rate, LEAST_RATE) for rate in rates], "lengths": lengths[: len(rates)]}
    if not _is_usable(**found):
        raise ValueError(f"no rates of acceptance by level, or impossible ones: {found}")
    return found


def _is_usable(rates: list[float], lengths: list[float]) -> bool:
    are_possible = all(1 <= length <= depth + 1 for depth, length in enumerate(lengths, start=1))
    return bool(rates) and all(0 < rate <= 1 for rate in rates) and len(lengths) <= len(rates) and are_possible


def read_acceptance(path) -> dict[str, list[float]]:
    """`usable_acceptance` of what `mtpjax eval acceptance --output` wrote. Raises `ValueError` in one line.

    Trees and lossy rules are refused: adaptive depth drafts chains, which accept less.
    """
    try:
        content = json.loads(pathlib.Path(path).read_bytes())
        found, asked = usable_acceptance(content["figures"]["overall"]), content["settings"]
        is_chain = asked["topk"] == 1
        thresholds = (asked[f"threshold_{name}"] for name in ("single", "acc"))
        is_lossy = asked["acceptance"] in LOSSY_RULES or min(thresholds) < 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not what `mtpjax eval acceptance --output` wrote: {error!r}") from error
    if is_lossy or not is_chain:
        raise ValueError(f"{path} is of {'a lossy rule' if is_chain else 'trees'}: adaptive depth needs exact chains")
    return found


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
    from mtpjax.console import narrow_table

    for stored in profile["batches"]:
        costs = Costs.from_json(stored)
        title = f"batch {costs.batch}, {profile['context']} tokens of context, {profile['dtype']}"
        title += f", temperature {profile['temperature']}" if profile["temperature"] else ""
        title += f"; a change of depth takes {1e3 * costs.change:.2g} ms" if costs.change else ""
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
