"""Profiles a device: measures the cost of rounds per depth and batch size, and stores it for adaptive depth."""

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
from mtpjax.decoding.drafter import Drafter
from mtpjax.drafters.methods import uses_mtp_modules
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.round_costs import MAX_MEASURED_STEPS, CostMeter, RoundCosts
from mtpjax.evaluation.round_loops import PLAIN_STEP, RoundShape, max_slots_written
from mtpjax.evaluation.trust import mark, verdict, waiting_problem
from mtpjax.host import num_threads
from mtpjax.inference.requests import check_settings, make_drafter
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.safe_open import read_json_file

FORMAT, VERSION = "mtpjax-profile", 4
FILE_NAME = "profile.json"
MAX_FILE_BYTES = 16 << 20  # of a profile or of measured acceptance; they have kilobytes
MIN_RATE = 0.01  # floor of a level's acceptance rate; a measured rate may be 0
REPEATS_PER_REPORT, MAX_SECONDS_PER_BATCH = 4, 20.0  # measurements between progress reports; time limit per batch size
CAPACITY_STEP = 128  # the cache capacity is a multiple of this, as in decoding
log = logging.getLogger("mtpjax.decode")


def shapes_up_to(num_steps: int, topk: int = 1, num_draft_tokens: int | None = None) -> tuple[RoundShape, ...]:
    """Lists the round shapes of every depth from 1 to `num_steps`.

    Args:
        num_steps: deepest draft.
        topk: children per tree node; 1 makes chains.
        num_draft_tokens: nodes of a tree; shallower trees have fewer if they cannot hold as many. None: the
            default of `DecodeConfig`.

    Returns:
        One shape per depth.

    Raises:
        ValueError: for no levels, or values that `DecodeConfig` rejects.
    """
    if not 1 <= num_steps <= MAX_MEASURED_STEPS:
        limit = f"at least 1, got {num_steps}" if num_steps < 1 else f"at most {MAX_MEASURED_STEPS}, got {num_steps}"
        raise ValueError(f"num_steps must be {limit}")
    # Check the settings at full depth, so that an error names the user's own values.
    DecodeConfig(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    shapes = []
    for depth in range(1, num_steps + 1):
        max_nodes = None if num_draft_tokens is None else min(num_draft_tokens, largest_tree(topk, depth))
        nodes = DecodeConfig(num_steps=depth, topk=topk, num_draft_tokens=max_nodes).num_nodes
        shapes.append(RoundShape(depth, topk, nodes))
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
    drafter: str | Drafter = "mtp",
    draft_params: Any = None,
) -> dict[str, Any]:
    """Times rounds of every depth from 0 to `num_steps`, per batch size.

    Args:
        params: parameters of `model` with unrolled layers.
        model: the model.
        batches: batch sizes.
        num_steps: deepest draft.
        topk: children per tree node; 1 measures chains.
        num_draft_tokens: nodes of a tree; None: the default of `DecodeConfig`.
        context: tokens in the caches; reduced if the model has fewer positions.
        temperature: above 0, rounds sample their tokens.
        acceptance: rates measured on other texts, stored beside the costs (`usable_acceptance`).
        rounds: measurements per batch size. Slow models get fewer: after the first four, measuring stops once the time
            limit of a batch size is reached.
        seconds: approximate duration of one timing.
        progress: called with the numbers of steps done and of all steps.
        drafter: what drafts: the model's MTP modules, or a drafter of `mtpjax.load_drafter`.
        draft_params: parameters of that drafter.

    Returns:
        The profile, a JSON object.

    Raises:
        ValueError: for a model without modules, or for settings that are out of range or that the model or the drafter
            cannot run.
    """
    # Check before compiling, which takes long.
    config = model.config
    shapes = shapes_up_to(num_steps, topk, num_draft_tokens)
    has_modules = uses_mtp_modules(drafter)
    if has_modules and not config.num_mtp_modules:
        raise ValueError("the model has no MTP modules, so no drafts can be measured")
    if has_modules and topk > 1 and config.num_mtp_modules > 1:
        raise ValueError(f"trees need exactly one MTP module; the model has {config.num_mtp_modules}")
    # A drafter refuses what it cannot do, such as a depth beyond its heads, with its reason.
    settings = DecodeConfig(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens, drafter=drafter)
    check_settings(model, settings, make_drafter(settings))
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} must be at least 0")
    if rounds < 1:
        raise ValueError(f"repeats must be at least 1, got {rounds}")
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)} must be at least 1")
    # The context must leave room for the widest round, and the caches for a second one, since rounds move forward.
    max_slots = max(max_slots_written(model, shape, make_drafter(settings)) for shape in shapes) + 2
    if context < 1 or config.max_position_embeddings < 2 * max_slots:
        raise ValueError(f"context {context} leaves no room for a round in {config.max_position_embeddings} positions")
    context = min(context, config.max_position_embeddings - max_slots)
    capacity = -(-(context + 2 * max_slots) // CAPACITY_STEP) * CAPACITY_STEP
    # Steps of the progress: compiled loops (3 per shape, 4 with a drafter other than MTP modules, 2 for plain rounds, 1
    # for chains in turn), then measurements.
    per_batch = (3 + (not has_modules)) * len(shapes) + 2 + (topk == 1) + rounds
    total, done, costs, waited = per_batch * len(batches), 0, [], 0.0

    def advance(by: int = 1) -> None:
        nonlocal done
        done += by
        progress(done, total)

    # Each batch size has its own caches and compiled loops.
    for batch in sorted(set(batches)):
        meter = CostMeter(
            params,
            model=model,
            shapes=shapes,
            context=context,
            capacity=capacity,
            batch=batch,
            min_rows=min_rows_per_pass(model, batch, jax.default_backend()),
            temperature=temperature,
            seconds=seconds,
            time_full_rounds=True,
            on_compiled=advance,
            drafter=drafter,
            draft_params=draft_params,
        )
        # Compiling is over, so the stopwatch measures only disturbances of the timings.
        stopwatch = Stopwatch()
        _measure_within_time_limit(meter, rounds, advance)
        waited = max(waited, stopwatch.waited_share())
        costs.append(meter.costs().to_json())
    # Store the machine and the model's configuration too, so that a reader can tell whether the costs apply.
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_device_properties(),
        "dtype": params["embedding"].dtype.name,
        "model_config_sha256": config_digest(config),
        "drafter": describe_drafter(drafter),
        "context": context,
        "temperature": temperature,
        "capacity": capacity,
        "acceptance": acceptance,
        "waited": waited,  # largest share of a batch size's time, for a core
        "problem": waiting_problem(waited),
        "batches": costs,
    }


def _measure_within_time_limit(meter: CostMeter, rounds: int, advance: Callable[[int], None]) -> None:
    """Measures `rounds` times or for `MAX_SECONDS_PER_BATCH`; `advance` counts the skipped measurements as done."""
    num_left, start = rounds, time.perf_counter()
    while num_left and (num_left == rounds or time.perf_counter() - start < MAX_SECONDS_PER_BATCH):
        repeats = min(REPEATS_PER_REPORT, num_left)
        meter.measure(repeats)
        num_left -= repeats
        advance(repeats)
    advance(num_left)


def config_digest(config: ModelConfig) -> str:
    """Computes the digest that ties a profile to a model: costs depend on the configuration, not on the weights.

    Args:
        config: the model's configuration.

    Returns:
        SHA-256 in hexadecimal.
    """
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def describe_drafter(drafter: Any) -> str | None:
    """Describes the drafter that a profile was measured with: costs depend on its architecture, not on its weights.

    Args:
        drafter: what drafts, as in `DecodeConfig`.

    Returns:
        Its class and a digest of its architecture; None for drafters by name: the configuration of MTP modules is the
        model's.
    """
    if not isinstance(drafter, Drafter):
        return None
    architecture = getattr(drafter, "architecture", drafter)
    return f"{type(drafter).__name__} {hashlib.sha256(repr(architecture).encode()).hexdigest()[:16]}"


def _device_properties() -> dict[str, Any]:
    """Returns the properties of this process that costs depend on: device, JAX version, and threads on a CPU."""
    threads = {"threads": num_threads()} if jax.default_backend() == "cpu" else {}
    return {"device_kind": jax.devices()[0].device_kind, "jax_version": jax.__version__, **threads}


def default_path(folder) -> pathlib.Path:
    """Returns the path of a model's profile, inside the model's folder.

    Args:
        folder: the model's folder.

    Returns:
        The path.

    Raises:
        ValueError: if the folder is missing or not writable.
    """
    folder = pathlib.Path(folder)
    # A GGUF file and a repository of the Hub have no model folder.
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not a writable folder: choose another place with --output FILE")
    return folder / FILE_NAME


def save(path, profile: dict[str, Any]) -> None:
    """Writes a profile atomically.

    Args:
        path: the file.
        profile: the result of `measure`.
    """
    write_text(path, json.dumps(profile, indent=1) + "\n")


def read(path) -> tuple[dict[str, Any], tuple[RoundCosts, ...]]:
    """Reads and checks a profile.

    Args:
        path: a profile, or a folder that contains `profile.json`.

    Returns:
        The profile, and its costs per batch size.

    Raises:
        ValueError: if the file is missing, has another format, or is damaged.
    """
    # 1. Parse the file, and recognise its format and version.
    path = pathlib.Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        profile = read_json_file(path, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: `mtpjax profile` measures one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a profile: {error}") from error
    if not isinstance(profile, dict) or (profile.get("format"), profile.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is not a profile of format {FORMAT!r}, version {VERSION}")
    # 2. Check that every shape has positive, finite durations of each kind, including plain rounds.
    try:
        costs = tuple(RoundCosts.from_json(stored) for stored in profile["batches"])
        complete = bool(costs) and all(
            PLAIN_STEP in kind
            and kind.keys() == cost.parts.keys()
            and all(0 < value < math.inf for value in kind.values())
            for cost in costs
            for kind in (cost.verify, cost.parts, cost.round)
        )
        complete &= profile["acceptance"] is None or _is_usable(**profile["acceptance"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not complete:
        raise ValueError(
            f"{path} is damaged: a duration is missing or not positive, or a rate or length is out of range"
        )
    return profile, costs


def load_depth_settings(
    path, *, batch: int, num_steps: int, config: ModelConfig | None = None, drafter: Any = "mtp"
) -> dict[str, Any]:
    """Reads the settings of adaptive depth from a profile: `DecodeConfig(depth_policy="adaptive", …, **settings)`.

    Logs a warning if the profile cannot be trusted, or was measured with another device, JAX version or number of
    threads.

    Args:
        path: a profile, or a folder that contains `profile.json`.
        batch: rows that will be decoded; the costs of the nearest measured batch size are used.
        num_steps: the deepest draft.
        config: the model's configuration; None skips the comparison with the profile's.
        drafter: what will draft, as in `DecodeConfig`.

    Returns:
        `depth_costs` and `depth_rates`; see `depth_settings`.

    Raises:
        ValueError: if the profile is missing or damaged, belongs to another model or drafter, or has no costs of chains
            of this depth.
    """
    profile, measured = read(path)
    if config is not None and profile.get("model_config_sha256") != config_digest(config):
        raise ValueError(f"{path} was measured on another model: run `mtpjax profile` for this one")
    found, wanted = profile.get("drafter"), describe_drafter(drafter)
    if found != wanted:
        raise ValueError(
            f"{path} was measured with {found or 'MTP modules'}, not with {wanted or 'MTP modules'}: run `mtpjax "
            "profile` for this drafter, with --speculative-draft-model-path if it has its own checkpoint"
        )
    if profile.get("problem"):
        log.warning(
            "%s cannot be trusted: it was %s; run `mtpjax profile` on an idle machine", path, profile["problem"]
        )
    for name, current in _device_properties().items():
        if profile.get(name) != current:
            log.warning("%s was measured with %s %r; here it is %r", path, name, profile.get(name), current)
    return depth_settings(measured, profile["acceptance"], path, batch=batch, num_steps=num_steps)


def depth_settings(
    measured: Sequence[RoundCosts], acceptance: dict[str, list[float]] | None, origin, *, batch: int, num_steps: int
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
    # The nearest batch size by ratio; of two equally near ones, the larger.
    nearest = min(measured, key=lambda costs: (abs(math.log(costs.batch / batch)), -costs.batch))
    rounds = {shape.num_steps: seconds for shape, seconds in nearest.round.items() if shape.topk == 1}
    missing = [depth for depth in range(1, num_steps + 1) if depth not in rounds]
    if missing:
        deepest = f"chains of 1..{max(rounds)} levels" if max(rounds) else "no chains"
        raise ValueError(f"{origin} holds {deepest}; depth {missing[0]} needs `mtpjax profile --num-steps {num_steps}`")
    plain = rounds[0]
    return {
        "depth_costs": tuple(rounds[depth] / plain for depth in range(num_steps + 1)),
        "depth_rates": None if acceptance is None else _rates_to_depth(acceptance["rates"], num_steps),
    }


def _rates_to_depth(rates: list[float], num_steps: int) -> tuple[float, ...]:
    """Returns a rate per level; levels that were not decoded get the rate of the deepest level that was."""
    return tuple([*rates, *rates[-1:] * num_steps][:num_steps])


def usable_acceptance(metrics: dict[str, Any]) -> dict[str, list[float]]:
    """Extracts from a report the rates and lengths that adaptive depth starts from.

    Args:
        metrics: the metrics of one category, as JSON (`mtpjax.evaluation.metrics.report` and `to_json`).

    Returns:
        "rates", the conditional acceptance rate per level, at least `MIN_RATE`; levels that were never reached are
        left out. "lengths", the predicted accept length per depth; empty if none was predicted.

    Raises:
        ValueError: if a value is out of range, or no rate is present.
    """
    rates, lengths = (
        [level["value"] for level in levels if level["value"] is not None]
        for levels in (metrics["decoded"]["conditional"], metrics["predicted"]["accept_length_at_depth"])
    )
    rates_and_lengths = {"rates": [max(rate, MIN_RATE) for rate in rates], "lengths": lengths[: len(rates)]}
    if not _is_usable(**rates_and_lengths):
        raise ValueError(f"acceptance rates are missing or out of range: {rates_and_lengths}")
    return rates_and_lengths


def _is_usable(rates: list[float], lengths: list[float]) -> bool:
    """Returns whether there are rates, all within (0, 1], and no accept length exceeds depth + 1."""
    are_possible = all(1 <= length <= depth + 1 for depth, length in enumerate(lengths, start=1))
    return bool(rates) and all(0 < rate <= 1 for rate in rates) and len(lengths) <= len(rates) and are_possible


def read_acceptance(path) -> dict[str, list[float]]:
    """Reads `usable_acceptance` from the output of `mtpjax eval acceptance`.

    Args:
        path: the file that `--output` wrote.

    Returns:
        The rates and lengths of all prompts together.

    Raises:
        ValueError: for another file, and for trees or lossy rules: adaptive depth drafts chains under an exact rule,
            which accept fewer tokens.
    """
    try:
        content = read_json_file(path, max_bytes=MAX_FILE_BYTES)
        acceptance, settings = usable_acceptance(content["figures"]["overall"]), content["settings"]
        is_chain = settings["topk"] == 1
        thresholds = (settings[f"threshold_{name}"] for name in ("single", "acc"))
        is_lossy = settings["acceptance"] in LOSSY_RULES or min(thresholds) < 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not what `mtpjax eval acceptance --output` wrote: {error!r}") from error
    if is_lossy or not is_chain:
        raise ValueError(
            f"{path} measured {'a lossy rule' if is_chain else 'trees'}: adaptive depth needs exact chains"
        )
    return acceptance


def break_even_rate(relative_cost: float, num_steps: int) -> float | None:
    """Computes the acceptance rate from which a round with drafts is faster than plain decoding.

    Args:
        relative_cost: cost of the round, in plain rounds.
        num_steps: draft levels, K.

    Returns:
        The rate a, equal at every level, with 1 + a + ... + a^K = `relative_cost`; None if even a = 1 is too little.
    """
    if relative_cost > num_steps + 1:
        return None
    # The accept length grows with the rate, so bisection finds it.
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (low, rate) if sum(rate**level for level in range(num_steps + 1)) > relative_cost else (rate, high)
    return high


def tables(profile: dict[str, Any]):
    """Makes a line that says whether the times can be trusted, and a `rich` table per batch size, within 80 columns.

    Args:
        profile: the result of `measure`.

    Yields:
        The line and the tables.
    """
    from mtpjax.console import narrow_table

    problem = profile["problem"]
    yield verdict([problem] * len(profile["batches"]), profile["waited"])
    for stored in profile["batches"]:
        costs = RoundCosts.from_json(stored)
        title = f"batch {costs.batch}{mark(problem)}, {profile['context']} tokens of context, {profile['dtype']}"
        title += f", temperature {profile['temperature']}" if profile["temperature"] else ""
        title += f", {profile['drafter'].partition(' ')[0]}" if profile.get("drafter") else ""
        title += f"; a change of depth takes {1e3 * costs.change:.2g} ms" if costs.change else ""
        table = narrow_table(title)
        headings = (
            "drafts",
            "nodes",
            "round\nms",
            "parts'\nshare",
            *(["draft's\nshare"] if costs.draft else []),
            "verify's\nshare",
            # The column of drafting takes the width of the last two.
            *(
                ("plain rounds\n= break-even\nlength", "rate per\nlevel to\nbreak even")
                if costs.draft
                else ("plain rounds =\nbreak-even length", "rate per level\nto break even")
            ),
        )
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        # A round breaks even if its accept length equals its cost in plain rounds.
        for shape, seconds in costs.round.items():
            relative_cost = seconds / costs.round[PLAIN_STEP]
            rate = break_even_rate(relative_cost, shape.num_steps) if shape.num_steps else 0.0
            table.add_row(
                str(shape.num_steps),
                str(shape.num_nodes),
                f"{1e3 * seconds:.3g}",
                f"{costs.parts[shape] / seconds:.2f}",
                *([f"{costs.draft.get(shape, 0.0) / seconds:.2f}"] if costs.draft else []),
                f"{costs.verify[shape] / seconds:.2f}",
                f"{relative_cost:.2f}",
                "never" if rate is None else f"{rate:.2f}",
            )
        yield table
