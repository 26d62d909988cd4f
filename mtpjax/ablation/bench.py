"""What an ablation measures of a cell: each batch of prompts is decoded plainly and with drafts, in turns.

Ratios to plain decoding are medians over the repeats; the least time of a call for one token (prefill) is taken off
each call. The plain setting is the faster of a pass over one row and over two.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mtpjax.ablation.grid import Cell, Settings
from mtpjax.data import packing
from mtpjax.data.config import Source
from mtpjax.data.prompts import choose_prompts, encode_prompts, read_prompts, room_for_prompts
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.decoding.capacity import cache_capacity, min_rows_per_pass
from mtpjax.decoding.config import LOSSY_RULES, DecodeConfig
from mtpjax.decoding.generate import generate, speculative_generate
from mtpjax.evaluation.acceptance import is_plain, sampled
from mtpjax.evaluation.machine import Clock
from mtpjax.evaluation.metrics import RESAMPLES, Estimate, decoded_rates, to_json
from mtpjax.evaluation.round_costs import PLAIN, CostMeter, Costs, Shape, widest_write
from mtpjax.io.checkpoint_format import is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.models.model import MTPModel
from mtpjax.training.decoding_eval import is_looping

PROMPT_TOKENS = 64  # of held-out files
SAME_TOKENS = ("greedy", "sample")  # rules whose texts are those of plain decoding with the same seeds
CANDIDATES = 16  # held-out prompts looked at, at most, for each that is used


@dataclasses.dataclass(frozen=True)
class Workload:
    """The prompts, as tokens, and what they are."""

    prompts: list[list[int]]
    source: str
    stop_token_ids: tuple[int, ...] = ()

    def batches(self, size: int) -> list[list[list[int]]]:
        """The prompts in batches of `size`; the last is filled up from the front, so that all have one shape."""
        count = -(-len(self.prompts) // size)
        return [
            [self.prompts[(begin * size + row) % len(self.prompts)] for row in range(size)] for begin in range(count)
        ]


def find_workload(
    path: pathlib.Path,
    model: MTPModel,
    params: dict,
    settings: Settings,
    *,
    prompts: str | None = None,
    num_prompts: int = 12,
    categories: Sequence[str] = (),
    prompt_tokens: int | None = None,
    chat: bool = False,
) -> Workload:
    """The prompts of a file, or, for a model of bytes, starts of lines in files that training held out.

    Raises `ValueError` for prompts that do not fit the model.
    """
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    most = room_for_prompts(model.config.max_position_embeddings, settings.max_new_tokens, prompt_tokens)
    if prompts is not None:
        chosen = choose_prompts(read_prompts(prompts), num_prompts, categories=categories, seed=settings.seed)
        rows, cut = encode_prompts(chosen, tokenizer, most_tokens=most, chat=chat)
        source = f"{len(rows)} prompts of {prompts}" + (f", {cut} of them cut to {most} tokens" if cut else "")
        return Workload(rows, source, tuple(tokenizer.eos_token_ids))
    if not isinstance(tokenizer, ByteTokenizer):
        raise ValueError("name a file of --prompts: only for models of bytes there are some without")
    if num_prompts < 1:
        raise ValueError(f"the number of prompts must be at least 1, not {num_prompts}")
    length = min(PROMPT_TOKENS, most)
    chosen = _lively_prompts(path, model, params, settings, num_prompts=num_prompts, length=length)
    return Workload(chosen, f"{len(chosen)} prompts of {length} bytes from held-out files, that do not loop")


def _lively_prompts(path, model: MTPModel, params, settings: Settings, *, num_prompts: int, length: int):
    """Held-out prompts but those whose plain continuation repeats itself, which would be too easy to draft."""
    trained = {}
    if is_checkpoint(path):
        trained = CheckpointReader(path, verify=False).metadata.get("train", {})
    sources = [Source(**values) for values in trained.get("sources", ())]
    sources = sources or [Source(path=trained.get("data"), pattern=trained.get("pattern", "*.py"))]
    readings = [read_source(source, ByteTokenizer(), vocab_size=ByteTokenizer.vocab_size) for source in sources]
    documents = [document for reading in readings for document in reading.documents]
    candidates = packing.held_out_prompts(
        packing.split_held_out(documents, trained.get("held_out_fraction", 0.05))[1],
        count=CANDIDATES * num_prompts,
        prompt_length=length,
        continuation_length=settings.max_new_tokens,
        seed=settings.seed,
        least=num_prompts,
    )
    config, lively, at_once = DecodeConfig(max_new_tokens=settings.max_new_tokens), [], 4 * num_prompts
    for begin in range(0, len(candidates), at_once):
        some = candidates[begin : begin + at_once]
        rows = generate(params, some, model=model, config=config).rows()
        lively += [prompt for prompt, row in zip(some, rows, strict=True) if not is_looping(row)]
        if len(lively) >= num_prompts:
            break
    return (lively or candidates)[:num_prompts]


@dataclasses.dataclass
class Bench:
    """Measures cells; keeps what cells share, the faster plain form and the costs of parts."""

    model: MTPModel
    params: dict
    settings: Settings
    workload: Workload
    cells: Sequence[Cell] = ()  # to be measured

    def __post_init__(self):
        self._plain_rows: dict[int, int | None] = {}
        self._costs: dict[int, Costs] = {}
        longest = max(map(len, self.workload.prompts)) + self.settings.max_new_tokens
        self._max_length = min(self.model.config.max_position_embeddings, longest)
        self._plain = DecodeConfig(
            num_steps=0,
            max_new_tokens=self.settings.max_new_tokens,
            max_length=self._max_length,
            stop_token_ids=self.workload.stop_token_ids,
        )

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The figures of a cell, as JSON holds them."""
        begin = time.perf_counter()
        batches = self.workload.batches(cell.batch_size)
        drafted = cell.config(self._plain)
        plain = dataclasses.replace(self._plain, min_rows=self._best_rows(cell.batch_size))
        for config in (plain, drafted):  # compiles: longer prompts may take another program
            for number, batch in enumerate(batches):
                self._time(batch, config, cell.temperature, 0, number)
        shape = (self.settings.repeats, len(batches))
        whole, first, tokens = (np.zeros((2, *shape)) for _ in range(3))
        steps = np.zeros((len(batches), cell.batch_size))
        accepted = np.zeros((len(batches), cell.batch_size, cell.num_steps))
        decoded, clock = {}, Clock()
        for repeat, number in np.ndindex(*shape):
            rows: list[Any] = [None, None]
            for which in (0, 1) if (repeat + number) % 2 == 0 else (1, 0):
                config = (plain, drafted)[which]
                first[which, repeat, number], whole[which, repeat, number], result = self._time(
                    batches[number], config, cell.temperature, repeat, number
                )
                tokens[which, repeat, number] = np.maximum(result.lengths - 1, 0).sum()
                rows[which] = result.rows()
                if which and (cell.temperature or not repeat):
                    steps[number] += result.stats.steps
                    accepted[number] += result.stats.accepted
            decoded[repeat, number] = rows
        if not steps.any():
            raise ValueError("every prompt ends with its first new token: there is nothing to measure")
        took = clock.read()
        compared, differing = self._compare(decoded, batches, drafted, cell)
        count = len(self.workload.prompts)  # the last batch repeats some
        rates = decoded_rates(steps.reshape(-1)[:count], accepted.reshape(-1, cell.num_steps)[:count])
        seconds = whole - first.min(axis=1, keepdims=True)
        rate = [float(np.median(tokens[which].sum(1) / seconds[which].sum(1))) for which in (0, 1)]
        costs = self._part_costs(cell)
        return {
            "cell": dataclasses.asdict(cell),
            **{name: to_json(value) for name, value in rates.items()},
            "tokens_per_second": rate[1],
            "plain_tokens_per_second": rate[0],
            "ratio": to_json(paired_ratio(seconds, tokens)),
            "ideal_ratio": costs.ideal_ratio(rates["accept_length"].value, cell.shape),
            "costs": {"plain": costs.plain, "verify": costs.verify[cell.shape], "parts": costs.parts[cell.shape]},
            "lossless": verdict(cell, differing),
            "differing_rows": differing,
            "compared_rows": compared,
            "waited": took["waited_seconds"] / took["seconds"],  # for a core
            "seconds": time.perf_counter() - begin,
        }

    def _compare(self, decoded, batches, config: DecodeConfig, cell: Cell) -> tuple[int, int]:
        """How many texts the rule lets compare, and how many of them are not plain decoding's."""
        compared = differing = 0
        for (repeat, number), (plain, drafted) in decoded.items() if cell.acceptance in SAME_TOKENS else ():
            asked = self._asked(batches[number], cell.temperature, repeat, number)
            texts = (batches[number], drafted, plain)
            found = is_plain(self.params, *texts, model=self.model, config=config, **asked)
            compared, differing = compared + found.size, differing + int((~found).sum())
        return compared, differing

    def _asked(self, batch, temperature: float, repeat: int, number: int) -> dict[str, Any]:
        seeds = [self.settings.seed + 1_000_003 * repeat + number * len(batch) + row for row in range(len(batch))]
        return sampled(temperature, seeds)

    def _decode(self, batch, config: DecodeConfig, temperature: float, repeat: int, number: int):
        asked = self._asked(batch, temperature, repeat, number)
        return speculative_generate(self.params, batch, model=self.model, config=config, **asked)

    def _time(self, batch, config: DecodeConfig, temperature: float, repeat: int, number: int):
        """Seconds for one token and for all, and the result."""
        first_only = dataclasses.replace(config, max_new_tokens=1)
        begin = time.perf_counter()
        self._decode(batch, first_only, temperature, repeat, number)
        middle = time.perf_counter()
        result = self._decode(batch, config, temperature, repeat, number)
        end = time.perf_counter()
        result.stats.check()
        return middle - begin, end - middle, result

    def _best_rows(self, batch_size: int) -> int | None:
        """The faster form of plain decoding: a lone row is passed alone, or with another that is thrown away."""
        if batch_size > 1 or jax.default_backend() != "cpu":
            return None
        if batch_size not in self._plain_rows:
            batch, times = self.workload.batches(1)[0], {}
            for rows in (1, 2) * 4:
                config = dataclasses.replace(self._plain, min_rows=rows)
                times.setdefault(rows, []).append(self._time(batch, config, 0.0, 0, 0)[1])
            self._plain_rows[batch_size] = min(times, key=lambda rows: min(times[rows]))
        return self._plain_rows[batch_size]

    def _part_costs(self, cell: Cell) -> Costs:
        """Costs of the parts, measured at once for all cells of a batch size; of plain steps those of its best form."""
        batch_size = cell.batch_size
        if batch_size not in self._costs:
            shapes = tuple({other.shape: None for other in (*self.cells, cell) if other.batch_size == batch_size})
            usual = min_rows_per_pass(batch_size, jax.default_backend(), self.model.implementation)
            meters = [self._meter(batch_size, shapes, usual)]
            if (best := self._best_rows(batch_size) or usual) != usual:
                meters.append(self._meter(batch_size, (), best))
            for meter in meters:
                meter.measure()
            costs = meters[0].costs()
            costs.parts[PLAIN] = meters[-1].costs().plain
            self._costs[batch_size] = costs
        return self._costs[batch_size]

    def _meter(self, batch_size: int, shapes: tuple[Shape, ...], min_rows: int) -> CostMeter:
        widest = max((widest_write(self.model, shape) for shape in shapes), default=1)
        lengths = [len(row) for row in self.workload.prompts]
        context, longest = int(np.mean(lengths)) + self.settings.max_new_tokens // 2, max(lengths)
        return CostMeter(
            self.params,
            model=self.model,
            shapes=shapes,
            batch=batch_size,
            min_rows=min_rows,
            context=context,
            capacity=cache_capacity(longest, self._max_length, widest=widest, chunk=DecodeConfig().prefill_chunk),
        )


def verdict(cell: Cell, differing: int) -> str:
    """What is known of a cell's texts, of which so many are not plain decoding's."""
    if cell.acceptance in LOSSY_RULES:
        return "lossy"
    if cell.acceptance in SAME_TOKENS:
        return "identical" if not differing else "DIFFERS"
    return "exact by rule"


def paired_ratio(seconds: np.ndarray, tokens: np.ndarray) -> Estimate:
    """Speed over plain speed, from `[2, R, N]`: plain and speculative, R repeats of N batches.

    The median over repeats of the ratio of times per token. The interval is 95 %, by resampling whole batches of
    prompts and repeats.
    """
    repeats, count = seconds.shape[1:]

    def ratio(chosen_repeats, chosen):
        time_ = seconds[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        made = tokens[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        speed = np.maximum(made, 1) / time_
        return np.median(speed[1] / speed[0], axis=-1)

    rng = np.random.default_rng(0)
    drawn = ratio(rng.integers(repeats, size=(RESAMPLES, repeats)), rng.integers(count, size=(RESAMPLES, count)))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(float(ratio(np.arange(repeats), np.arange(count))), float(low), float(high))
