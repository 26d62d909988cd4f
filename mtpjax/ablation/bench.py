"""Measures one cell of an ablation by decoding each batch of prompts alternately with and without drafts.

Ratios to plain decoding are medians over the repeats. The shortest one-token call measures the prefill time, which is
subtracted from each call. Plain decoding runs in its faster form, which has either one row per pass or two rows, the
second of which is discarded.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mtpjax.ablation.cells import Cell, Settings
from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.ablation.workload import Workload
from mtpjax.decoding.acceptance.rules import find_rule
from mtpjax.decoding.capacity import choose_prefill_chunk, min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.evaluation.acceptance import equals_plain_decoding, sampling_arguments
from mtpjax.evaluation.intervals import Estimate, estimate_from, resample
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.metrics import decoded_rates, to_json
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.round_loops import TimingConditions
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts, RoundShape
from mtpjax.evaluation.trust import seconds_beyond, speed_up_problem, time_calls, waiting_problem
from mtpjax.inference.generate import speculative_generate
from mtpjax.inference.requests import make_drafter
from mtpjax.models.model import MTPModel


@dataclasses.dataclass
class Bench:
    """Measures cells, and caches what they share, namely the faster form of plain decoding and the part costs.

    `cells` are all cells to measure, and `methods` are the drafters that they use.
    """

    model: MTPModel
    params: dict
    settings: Settings
    workload: Workload
    cells: Sequence[Cell] = ()
    methods: Sequence[AblatedDrafter] = (MTP,)

    def __post_init__(self):
        self._min_rows_cache: dict[int, int | None] = {}
        self._costs_cache: dict[tuple[int, str], tuple[RoundCosts, float]] = {}
        longest = max(map(len, self.workload.prompts)) + self.settings.max_new_tokens
        self._max_length = min(self.model.config.max_position_embeddings, longest)
        self._plain_config = DecodeConfig(
            num_steps=0,
            max_new_tokens=self.settings.max_new_tokens,
            max_length=self._max_length,
            stop_token_ids=self.workload.stop_token_ids,
        )

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measures a cell.

        Returns:
            The results as JSON values, including rates and ratios with their intervals, the costs of a round's parts in
            seconds, and how the texts compare with plain decoding.

        Raises:
            ValueError: generation stopped after the first new token for every prompt.
        """
        begin = time.perf_counter()
        batches = self.workload.batches(cell.batch_size)
        method = self.method(cell)
        drafted = method.config(cell.config(self._plain_config))
        plain = dataclasses.replace(self._plain_config, min_rows=self._fastest_min_rows(cell.batch_size))
        # Run every batch before timing, because batches with different prompt lengths may compile different programs.
        for config, (number, batch) in itertools.product((plain, drafted), enumerate(batches)):
            self._time_calls(batch, config, self._sampling_params(batch, cell.temperature, 0, number), method.params)
        shape = (self.settings.repeats, len(batches))
        call_seconds, one_token_seconds, tokens = (np.zeros((2, *shape)) for _ in range(3))
        steps = np.zeros((len(batches), cell.batch_size))
        accepted = np.zeros((len(batches), cell.batch_size, cell.num_steps))
        decoded, stopwatch = {}, Stopwatch()
        for repeat, number in np.ndindex(*shape):
            rows, batch = [[], []], batches[number]
            sampling = self._sampling_params(batch, cell.temperature, repeat, number)
            # Alternate which form runs first, so that changes in the machine's speed affect both forms equally.
            for form in (0, 1) if (repeat + number) % 2 == 0 else (1, 0):
                timed = self._time_calls(batch, (plain, drafted)[form], sampling, method.params)
                one_token_seconds[form, repeat, number], call_seconds[form, repeat, number], result = timed
                # Exclude the first token of each row, because prefill generates it and the prefill time is subtracted.
                tokens[form, repeat, number] = np.maximum(result.lengths - 1, 0).sum()
                rows[form] = result.rows()
                # Count acceptance in only one greedy repeat, because all of them generate the same tokens.
                if form and (cell.temperature or not repeat):
                    steps[number] += result.stats.rounds
                    accepted[number] += result.stats.accepted
            decoded[repeat, number] = rows
        if not steps.any():
            raise ValueError(
                "generation stopped after the first new token for every prompt: there is nothing to measure"
            )
        # Check the texts against plain decoding, then compute the rates per prompt.
        waited = stopwatch.waited_share()
        compared, differing = self._count_differing(decoded, batches, drafted, cell)
        num_prompts = len(self.workload.prompts)  # the last batch may repeat some prompts
        steps, accepted = steps.reshape(-1)[:num_prompts], accepted.reshape(-1, cell.num_steps)[:num_prompts]
        rates = decoded_rates(steps, accepted)
        # Subtract the prefill time, which is the shortest one-token call for each batch and form. A batch without
        # further tokens takes no further time.
        prefill = np.broadcast_to(one_token_seconds.min(axis=1, keepdims=True), call_seconds.shape)
        seconds = np.where(tokens > 0, seconds_beyond(prefill, call_seconds), 0.0)
        is_negative = bool(((call_seconds <= prefill) & (tokens > 0)).any())
        speeds = [float(np.median(tokens[form].sum(1) / np.maximum(seconds[form].sum(1), 1e-9))) for form in (0, 1)]
        costs, waited_for_costs = self._part_costs(cell)
        ratio, accept_length = paired_ratio(seconds, tokens), rates["accept_length"].value
        ideal_ratio, waited = costs.ideal_ratio(accept_length, cell.shape), max(waited, waited_for_costs)
        problem = speed_up_problem(ratio, accept_length, waited=waited, ideal=ideal_ratio, is_negative=is_negative)
        return {
            "cell": dataclasses.asdict(cell),
            **{name: to_json(value) for name, value in rates.items()},
            "tokens_per_second": speeds[1],
            "plain_tokens_per_second": speeds[0],
            "ratio": to_json(ratio),
            "ideal_ratio": ideal_ratio,
            "costs": {"plain": costs.plain, "verify": costs.verify[cell.shape], "parts": costs.parts[cell.shape]},
            "categories": self._rates_by_category(cell, costs, waited, steps, accepted, seconds, tokens),
            "lossless": lossless_status(cell, differing),
            "differing_rows": differing,
            "compared_rows": compared,
            "waited": waited,  # share of the time that threads spent waiting for a core
            "problem": problem,
            "seconds": time.perf_counter() - begin,
        }

    def method(self, cell: Cell) -> AblatedDrafter:
        return next(method for method in self.methods if method.name == cell.drafter)

    def _rates_by_category(
        self, cell: Cell, costs: RoundCosts, waited: float, steps, accepted, seconds, tokens
    ) -> dict[str, Any]:
        """Computes rates and ratios per prompt category; returns {} if all prompts have the same category.

        Ratios are computed only at batch size 1, because larger batches mix categories.
        """
        categories = np.array(self.workload.categories)
        result = {}
        for category in dict.fromkeys(self.workload.categories) if len(set(categories)) > 1 else ():
            is_in = categories == category
            if not steps[is_in].any():
                continue
            rates = decoded_rates(steps[is_in], accepted[is_in])
            # At batch size 1, every prompt is its own batch, so the mask also selects the batches of a category.
            ratio = paired_ratio(seconds[..., is_in], tokens[..., is_in]) if cell.batch_size == 1 else None
            length = rates["accept_length"].value
            result[category] = {
                "prompts": int(is_in.sum()),
                "accept_length": to_json(rates["accept_length"]),
                "survival": to_json(rates["survival"]),
                "ratio": to_json(ratio),
                "ideal_ratio": costs.ideal_ratio(length, cell.shape),
                "problem": None if ratio is None else speed_up_problem(ratio, length, waited=waited),
            }
        return result

    def _count_differing(self, decoded, batches, config: DecodeConfig, cell: Cell) -> tuple[int, int]:
        """Counts the texts that can be compared under the rule, and how many of them differ from plain decoding."""
        compared = differing = 0
        for (repeat, number), (plain, drafted) in decoded.items() if find_rule(cell.acceptance).follows else ():
            sampling = self._sampling_params(batches[number], cell.temperature, repeat, number)
            texts = (batches[number], drafted, plain)
            is_equal = equals_plain_decoding(self.params, *texts, model=self.model, config=config, **sampling)
            compared, differing = compared + is_equal.size, differing + int((~is_equal).sum())
        return compared, differing

    def _sampling_params(self, batch, temperature: float, repeat: int, number: int) -> dict[str, Any]:
        """Returns sampling parameters with one seed per row and repeat, shared by calls with and without drafts."""
        seeds = [self.settings.seed + 1_000_003 * repeat + number * len(batch) + row for row in range(len(batch))]
        return sampling_arguments(temperature, seeds)

    def _time_calls(self, batch, config: DecodeConfig, sampling: dict[str, Any], draft_params: Any = None):
        """Returns the seconds that a one-token call and the whole call take, and the result of the whole call."""
        # Plain decoding has no drafter, so it takes no drafter parameters.
        own = {"draft_params": draft_params} if config.num_steps else {}

        def decode(config: DecodeConfig):
            return speculative_generate(self.params, batch, model=self.model, config=config, **sampling, **own)

        first_only = dataclasses.replace(config, max_new_tokens=1)
        timed = time_calls(lambda: decode(first_only), lambda: decode(config))
        timed[2].stats.check()
        return timed

    def _fastest_min_rows(self, batch_size: int) -> int | None:
        """Returns the `min_rows` with which plain decoding of one row is faster: 1, or 2 with a discarded second row.

        On a CPU, XLA compiles a pass over one row differently, so either form may be faster.
        """
        if batch_size > 1 or jax.default_backend() != "cpu":
            return None
        if batch_size not in self._min_rows_cache:
            batch, times = self.workload.batches(1)[0], {}
            # Alternate the two forms and use the shortest time of each, because the first call of each form compiles.
            for rows in (1, 2) * 4:
                config = dataclasses.replace(self._plain_config, min_rows=rows)
                times.setdefault(rows, []).append(self._time_calls(batch, config, {})[1])
            self._min_rows_cache[batch_size] = min(times, key=lambda rows: min(times[rows]))
        return self._min_rows_cache[batch_size]

    def _part_costs(self, cell: Cell) -> tuple[RoundCosts, float]:
        """Measures the part costs for all cells with the same batch size and drafter at once.

        Plain steps are measured in their faster form. Returns the costs, and the share of the time that threads waited
        for a core during these measurements.
        """
        batch_size, method, key = cell.batch_size, self.method(cell), (cell.batch_size, cell.drafter)
        # Costs that other programs disturbed must not affect later cells, so they are measured again.
        if key not in self._costs_cache or waiting_problem(self._costs_cache[key][1]):
            # One meter measures all shapes at this batch size in rotation. If the default form of plain decoding is the
            # slower one, a second meter measures plain steps in the faster form.
            alike = (other for other in (*self.cells, cell) if (other.batch_size, other.drafter) == key)
            shapes = tuple(dict.fromkeys(other.shape for other in alike))
            default_rows = min_rows_per_pass(self.model.config, batch_size, jax.default_backend())
            meters = [self._make_meter(method, batch_size, shapes, default_rows)]
            if (fastest_rows := self._fastest_min_rows(batch_size) or default_rows) != default_rows:
                meters.append(self._make_meter(method, batch_size, (), fastest_rows))
            stopwatch = Stopwatch()
            for meter in meters:
                meter.measure()
            costs = meters[0].costs()
            costs.parts[PLAIN_STEP] = meters[-1].costs().plain
            self._costs_cache[key] = costs, stopwatch.waited_share()
        return self._costs_cache[key]

    def _make_meter(
        self, method: AblatedDrafter, batch_size: int, shapes: tuple[RoundShape, ...], min_rows: int
    ) -> CostMeter:
        # Measure at the mean text length, with caches of the size that decoding allocates.
        lengths, platform = [len(row) for row in self.workload.prompts], jax.default_backend()
        context, longest = int(np.mean(lengths)) + self.settings.max_new_tokens // 2, max(lengths)
        sizes: dict[str, Any] = {"longest_prompt": longest, "max_length": self._max_length}
        sizes["implementation"] = self.model.implementation
        chunk = choose_prefill_chunk(self.model.config, batch_size, platform, **sizes)
        rounds = [DecodeSpec(*shape, prefill_chunk=chunk, min_rows=2) for shape in shapes]
        rounds = rounds or [DecodeSpec(0, prefill_chunk=chunk)]
        drafter = make_drafter(method.config(DecodeConfig()))
        capacity = max(Decoder(self.model, drafter, each).capacity(self._max_length, longest) for each in rounds)
        conditions = TimingConditions(batch_size, context, capacity, min_rows)
        drafts = {"drafter": method.drafter, "draft_params": method.params}
        return CostMeter(self.params, model=self.model, shapes=shapes, conditions=conditions, **drafts)


def lossless_status(cell: Cell, differing: int) -> str:
    """Describes how a cell's texts compare with plain decoding, given the number of texts that differ.

    "exact by rule" means that the texts may differ, but have the same distribution.
    """
    rule = find_rule(cell.acceptance)
    if not rule.is_exact:
        return "lossy"
    if rule.follows:
        return "identical" if not differing else "DIFFERS"
    return "exact by rule"


def paired_ratio(seconds: np.ndarray, tokens: np.ndarray) -> Estimate:
    """Estimates the speed relative to plain decoding.

    Args:
        seconds: `[2, R, N]` seconds of plain decoding and of speculative decoding, for R repeats and N batches.
        tokens: `[2, R, N]` numbers of generated tokens.

    Returns:
        The ratio of tokens per second as the median over repeats, with a 95 % bootstrap interval from resampling whole
        batches of prompts and repeats.
    """
    repeats, count = seconds.shape[1:]

    def ratio(chosen_repeats, chosen):
        # Sum over batches and divide within each repeat, then take the median, because a pause affects only a few
        # repeats. A bootstrap sample whose texts all end with their first token has no rounds; its ratio becomes 1.
        total_seconds = seconds[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        total_tokens = tokens[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        speed = np.maximum(total_tokens, 1) / np.maximum(total_seconds, 1e-9)
        return np.median(speed[1] / speed[0], axis=-1)

    # Batches and repeats are resampled independently, because both prompts and timing vary.
    return estimate_from(float(ratio(np.arange(repeats), np.arange(count))), ratio(*resample(repeats, count)))
