"""Profiles a device by measuring what a round costs at each depth and batch size; `profile_file` stores the result."""

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any

import jax

from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig, largest_tree
from mtpjax.drafters.methods import uses_mtp_modules
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.profile_file import FORMAT, VERSION, config_digest, describe_drafter, device_properties
from mtpjax.evaluation.round_costs import MAX_MEASURED_STEPS, CostMeter
from mtpjax.evaluation.round_loops import TimingConditions, max_slots_written
from mtpjax.evaluation.round_shapes import RoundShape
from mtpjax.evaluation.trust import waiting_problem
from mtpjax.inference.requests import check_settings, make_drafter
from mtpjax.models.model import MTPModel

REPEATS_PER_REPORT, MAX_SECONDS_PER_BATCH = 4, 20.0  # measurements between progress reports; time limit per batch size
CAPACITY_STEP = 128  # the cache capacity is a multiple of this, as in decoding


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions under which rounds are timed.

    Attributes:
        batches: batch sizes.
        context: tokens per row in the caches; reduced if the model's maximum length is smaller.
        temperature: above 0, rounds sample their tokens.
        repeats: measurements per batch size. Slow models get fewer, because after the first four, measuring stops when
            the time limit for a batch size is reached.
        seconds: approximate duration of one timing.

    Raises:
        ValueError: a value is out of range.
    """

    batches: tuple[int, ...] = (1,)
    context: int = 512
    temperature: float = 0.0
    repeats: int = 48
    seconds: float = 0.02

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} must be at least 0")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batch sizes {list(self.batches)} must be at least 1")


def shapes_up_to(num_steps: int, topk: int = 1, num_draft_tokens: int | None = None) -> tuple[RoundShape, ...]:
    """Lists the round shape of every depth from 1 to `num_steps`; shallower trees have fewer nodes.

    Raises:
        ValueError: `num_steps` is out of range, or `DecodeConfig` rejects a value.
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
    config: DecodeConfig,
    conditions: Conditions,
    draft_params: Any = None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> dict[str, Any]:
    """Times rounds of every depth from 0 to `config.num_steps`, for each batch size.

    Only the drafter, depth and tree in `config` are used. `progress` is called with the number of steps done and the
    total number of steps.

    Returns:
        The profile, as a JSON object. Its "acceptance" is None; rates measured separately may be stored there
        (`profile_file.usable_acceptance`).

    Raises:
        ValueError: the model has no MTP modules to draft with, or settings are out of range or not supported by the
            model or drafter.
    """
    # Check before compiling, which is slow.
    shapes = shapes_up_to(config.num_steps, config.topk, config.num_draft_tokens)
    _check_modules(model, config)
    drafter = make_drafter(config)
    # A drafter rejects unsupported settings, such as more draft levels than it has heads.
    check_settings(model, config, drafter)
    context, capacity = _fit_context(
        model, max(max_slots_written(model, shape, drafter) for shape in shapes), conditions
    )
    # `progress` counts compiled loops (3 per shape, or 4 with a drafter other than MTP modules, 2 for plain rounds, and
    # 1 for a cycle of chains) and then measurements.
    per_batch = (3 + (not uses_mtp_modules(config.drafter))) * len(shapes) + 2 + (config.topk == 1) + conditions.repeats
    total, done, costs, waited = per_batch * len(conditions.batches), 0, [], 0.0

    def advance(by: int = 1) -> None:
        nonlocal done
        done += by
        progress(done, total)

    # Each batch size has its own caches and compiled loops.
    for batch in sorted(set(conditions.batches)):
        min_rows = min_rows_per_pass(model.config, batch, jax.default_backend())
        timing = TimingConditions(batch, context, capacity, min_rows, conditions.temperature)
        drafts = {"drafter": config.drafter, "draft_params": draft_params, "time_full_rounds": True}
        meter = CostMeter(params, model=model, shapes=shapes, conditions=timing, seconds=conditions.seconds, **drafts)
        meter.compile(advance)
        # Compilation is done, so the stopwatch measures only disturbances during the timings.
        stopwatch = Stopwatch()
        _measure_within_time_limit(meter, conditions.repeats, advance)
        waited = max(waited, stopwatch.waited_share())
        costs.append(meter.costs().to_json())
    # Store the machine and the model's configuration too, to check later whether the costs apply.
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **device_properties(),
        "dtype": params["embedding"].dtype.name,
        "model_config_sha256": config_digest(model.config),
        "drafter": describe_drafter(config.drafter),
        "context": context,
        "temperature": conditions.temperature,
        "capacity": capacity,
        "acceptance": None,
        "waited": waited,  # share of the time that threads waited for a core, the maximum over batch sizes
        "problem": waiting_problem(waited),
        "batches": costs,
    }


def _fit_context(model: MTPModel, num_slots: int, conditions: Conditions) -> tuple[int, int]:
    """Returns the context and cache capacity for rounds that write `num_slots` slots."""
    # The context must leave room for the widest round, and the caches for a second one, since rounds move forward.
    max_slots, max_positions = num_slots + 2, model.config.max_position_embeddings
    if conditions.context < 1 or max_positions < 2 * max_slots:
        raise ValueError(
            f"context {conditions.context} leaves no room for a round: the model's maximum length is {max_positions}"
        )
    context = min(conditions.context, max_positions - max_slots)
    return context, -(-(context + 2 * max_slots) // CAPACITY_STEP) * CAPACITY_STEP


def _check_modules(model: MTPModel, config: DecodeConfig) -> None:
    """Raises `ValueError` if MTP modules must draft but there are none, or must draft a tree but there are several."""
    num_modules, has_modules = model.config.num_mtp_modules, uses_mtp_modules(config.drafter)
    if has_modules and not num_modules:
        raise ValueError("the model has no MTP modules, so no drafts can be measured")
    if has_modules and config.topk > 1 and num_modules > 1:
        raise ValueError(f"trees need exactly one MTP module; the model has {num_modules}")


def _measure_within_time_limit(meter: CostMeter, repeats: int, advance: Callable[[int], None]) -> None:
    """Measures `repeats` times or for `MAX_SECONDS_PER_BATCH`; `advance` counts the skipped measurements as done."""
    num_left, start = repeats, time.perf_counter()
    while num_left and (num_left == repeats or time.perf_counter() - start < MAX_SECONDS_PER_BATCH):
        count = min(REPEATS_PER_REPORT, num_left)
        meter.measure(count)
        num_left -= count
        advance(count)
    advance(num_left)
