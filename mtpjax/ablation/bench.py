"""Measures one cell of an ablation: each batch of prompts is decoded plainly and with drafts, in turns.

Ratios to plain decoding are medians over the repeats. The shortest time of a one-token call, which is the prefill, is
subtracted from each call. Plain decoding runs in its faster form: one row per pass, or two rows of which one is
discarded.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.ablation.grid import Cell, Settings
from mtpjax.data import packing
from mtpjax.data.config import Source
from mtpjax.data.prompts import choose_prompts, encode_prompts, max_prompt_length, read_prompts
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.decoding.capacity import cache_capacity, choose_prefill_chunk, min_rows_per_pass
from mtpjax.decoding.config import LOSSY_RULES, DecodeConfig
from mtpjax.evaluation.acceptance import equals_plain_decoding, sampling_arguments
from mtpjax.evaluation.intervals import Estimate, estimate_from, resample
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.metrics import decoded_rates, to_json
from mtpjax.evaluation.round_costs import CostMeter, RoundCosts
from mtpjax.evaluation.round_loops import PLAIN_STEP, RoundShape, max_slots_written
from mtpjax.evaluation.trust import seconds_beyond, speed_up_problem, time_calls, waiting_problem
from mtpjax.inference.generate import generate, speculative_generate
from mtpjax.inference.requests import make_drafter
from mtpjax.io.checkpoint_format import is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.messages import count_of
from mtpjax.models.model import MTPModel
from mtpjax.training.decoding_eval import is_looping

PROMPT_TOKENS = 64  # length of prompts from held-out files
SAME_TEXT_RULES = ("greedy", "sample")  # rules that give the same texts as plain decoding with the same seeds
CANDIDATES_PER_PROMPT = 16  # most held-out candidates per prompt


@dataclasses.dataclass(frozen=True)
class Workload:
    """The prompts of an ablation.

    Attributes:
        prompts: token lists.
        source: where they come from, in words.
        stop_token_ids: tokens that end a text.
        categories: the category of each prompt; empty: the prompts have no categories.
    """

    prompts: list[list[int]]
    source: str
    stop_token_ids: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()

    def batches(self, size: int) -> list[list[list[int]]]:
        """Splits the prompts into batches of `size`; the last one repeats the first prompts, so all have one shape."""
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
    """Reads the prompts from a file. Without a file, a byte-level model gets line starts of held-out files.

    Args:
        path: the checkpoint.
        model: the model.
        params: its parameters.
        settings: the settings of the ablation.
        prompts: a prompt file, or None.
        num_prompts: number of prompts.
        categories: categories to draw from; empty: all.
        prompt_tokens: most tokens per prompt; None: as many as fit.
        chat: apply the chat template.

    Returns:
        The workload.

    Raises:
        ValueError: the prompts do not fit the model, or `prompts` is None and the model is not byte-level.
    """
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    # A prompt and its new tokens must fit the model's positions; longer prompts are cut.
    max_tokens = max_prompt_length(model.config.max_position_embeddings, settings.max_new_tokens, prompt_tokens)
    if prompts is not None:
        # Prompts of a file, drawn evenly over its categories.
        chosen = choose_prompts(read_prompts(prompts), num_prompts, categories=categories, seed=settings.seed)
        rows, cut = encode_prompts(chosen, tokenizer, max_tokens=max_tokens, chat=chat)
        source = f"{count_of(len(rows), 'prompt')} of {prompts}" + (
            f", {cut} of them cut to {max_tokens} tokens" if cut else ""
        )
        of_prompts = tuple(prompt.category for prompt in chosen)
        return Workload(rows, source, tuple(tokenizer.eos_token_ids), of_prompts)
    # Without a file, only byte-level models have prompts: the files that their training held out.
    if not isinstance(tokenizer, ByteTokenizer):
        raise ValueError("pass a prompt file with --prompts: only byte-level models have default prompts")
    if num_prompts < 1:
        raise ValueError(f"the number of prompts must be at least 1, not {num_prompts}")
    length = min(PROMPT_TOKENS, max_tokens)
    chosen = _non_looping_prompts(path, model, params, settings, num_prompts=num_prompts, length=length)
    return Workload(
        chosen, f"{count_of(len(chosen), 'prompt')} of {length} bytes from held-out files, none of which loops"
    )


def _non_looping_prompts(path, model: MTPModel, params, settings: Settings, *, num_prompts: int, length: int):
    """Picks held-out prompts whose plain continuation does not loop, because loops are too easy to draft."""
    # The checkpoint records what it was trained on. The same split gives the documents that training held out.
    train_metadata = {}
    if is_checkpoint(path):
        train_metadata = CheckpointReader(path, verify=False).metadata.get("train", {})
    sources = [Source(**values) for values in train_metadata.get("sources", ())]
    sources = sources or [Source(path=train_metadata.get("data"), pattern=train_metadata.get("pattern", "*"))]
    read = {"vocab_size": ByteTokenizer.vocab_size, "output": train_metadata.get("output")}
    contents = [read_source(source, ByteTokenizer(), **read) for source in sources]
    documents = [document for content in contents for document in content.documents]
    candidates = packing.held_out_prompts(
        packing.split_held_out(documents, train_metadata.get("held_out_fraction", 0.05))[1],
        count=CANDIDATES_PER_PROMPT * num_prompts,
        prompt_length=length,
        continuation_length=settings.max_new_tokens,
        seed=settings.seed,
        min_count=num_prompts,
    )
    # Decode candidates in batches until enough continuations do not loop. If all of them loop, use them anyway.
    config, non_looping, candidates_per_call = DecodeConfig(max_new_tokens=settings.max_new_tokens), [], 4 * num_prompts
    for begin in range(0, len(candidates), candidates_per_call):
        candidate_batch = candidates[begin : begin + candidates_per_call]
        rows = generate(params, candidate_batch, model=model, config=config).rows()
        non_looping += [prompt for prompt, row in zip(candidate_batch, rows, strict=True) if not is_looping(row)]
        if len(non_looping) >= num_prompts:
            break
    return (non_looping or candidates)[:num_prompts]


@dataclasses.dataclass
class Bench:
    """Measures cells, and caches what cells share: the faster plain form and the costs of parts.

    Attributes:
        model: the model.
        params: its parameters.
        settings: the settings of the ablation.
        workload: the prompts.
        cells: the cells to be measured.
        methods: the drafters that the cells name.
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

        Args:
            cell: the cell.

        Returns:
            Its results as JSON values: rates and ratios with their intervals, seconds of parts, and the comparison of
                texts.

        Raises:
            ValueError: every prompt ends with its first new token.
        """
        begin = time.perf_counter()
        batches = self.workload.batches(cell.batch_size)
        method = self.method(cell)
        drafted = method.config(cell.config(self._plain_config))
        plain = dataclasses.replace(self._plain_config, min_rows=self._fastest_min_rows(cell.batch_size))
        # Compile before timing: batches of different prompt lengths may need different programs.
        for config in (plain, drafted):
            for number, batch in enumerate(batches):
                self._time_calls(batch, config, cell.temperature, 0, number, method.params)
        shape = (self.settings.repeats, len(batches))
        call_seconds, one_token_seconds, tokens = (np.zeros((2, *shape)) for _ in range(3))
        steps = np.zeros((len(batches), cell.batch_size))
        accepted = np.zeros((len(batches), cell.batch_size, cell.num_steps))
        decoded, stopwatch = {}, Stopwatch()
        for repeat, number in np.ndindex(*shape):
            rows: list[Any] = [None, None]
            # Alternate which form goes first, so that drift of the machine's speed affects both alike.
            for form in (0, 1) if (repeat + number) % 2 == 0 else (1, 0):
                config = (plain, drafted)[form]
                one_token_seconds[form, repeat, number], call_seconds[form, repeat, number], result = self._time_calls(
                    batches[number], config, cell.temperature, repeat, number, method.params
                )
                # Tokens after the first, which the prefill makes and whose time is subtracted.
                tokens[form, repeat, number] = np.maximum(result.lengths - 1, 0).sum()
                rows[form] = result.rows()
                # Acceptance: greedy repeats give the same tokens, so only the first counts.
                if form and (cell.temperature or not repeat):
                    steps[number] += result.stats.rounds
                    accepted[number] += result.stats.accepted
            decoded[repeat, number] = rows
        if not steps.any():
            raise ValueError("every prompt ends with its first new token: there is nothing to measure")
        # Check the texts against plain decoding, then compute the rates per prompt.
        waited = stopwatch.waited_share()
        compared, differing = self._count_differing(decoded, batches, drafted, cell)
        num_prompts = len(self.workload.prompts)  # the last batch repeats some
        steps, accepted = steps.reshape(-1)[:num_prompts], accepted.reshape(-1, cell.num_steps)[:num_prompts]
        rates = decoded_rates(steps, accepted)
        # Subtract the prefill: the shortest one-token call of each batch and form. Texts of one token have no more.
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
            "waited": waited,  # share of the time, for a core
            "problem": problem,
            "seconds": time.perf_counter() - begin,
        }

    def method(self, cell: Cell) -> AblatedDrafter:
        """Returns the drafter that a cell names."""
        return next(method for method in self.methods if method.name == cell.drafter)

    def _rates_by_category(
        self, cell: Cell, costs: RoundCosts, waited: float, steps, accepted, seconds, tokens
    ) -> dict[str, Any]:
        """Computes rates and ratios per category of prompts; nothing for a single category.

        A ratio needs batches of one category each, which batches of one prompt are.
        """
        categories = np.array(self.workload.categories)
        result = {}
        for category in dict.fromkeys(self.workload.categories) if len(set(categories)) > 1 else ():
            is_in = categories == category
            if not steps[is_in].any():
                continue
            rates = decoded_rates(steps[is_in], accepted[is_in])
            # Batches of one prompt are the prompts in their order, so the mask picks a category's batches.
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
        """Counts the texts that can be compared under the rule, and those that differ from plain decoding's."""
        compared = differing = 0
        for (repeat, number), (plain, drafted) in decoded.items() if cell.acceptance in SAME_TEXT_RULES else ():
            sampling = self._sampling_params(batches[number], cell.temperature, repeat, number)
            texts = (batches[number], drafted, plain)
            is_equal = equals_plain_decoding(self.params, *texts, model=self.model, config=config, **sampling)
            compared, differing = compared + is_equal.size, differing + int((~is_equal).sum())
        return compared, differing

    def _sampling_params(self, batch, temperature: float, repeat: int, number: int) -> dict[str, Any]:
        """Returns the sampling parameters of a batch: one seed per row and repeat, the same for plain and drafted."""
        seeds = [self.settings.seed + 1_000_003 * repeat + number * len(batch) + row for row in range(len(batch))]
        return sampling_arguments(temperature, seeds)

    def _decode(
        self, batch, config: DecodeConfig, temperature: float, repeat: int, number: int, draft_params: Any = None
    ):
        sampling: dict[str, Any] = self._sampling_params(batch, temperature, repeat, number)
        # Plain decoding has no drafter, and so no parameters of one.
        sampling |= {"draft_params": draft_params} if config.num_steps and draft_params is not None else {}
        return speculative_generate(self.params, batch, model=self.model, config=config, **sampling)

    def _time_calls(
        self, batch, config: DecodeConfig, temperature: float, repeat: int, number: int, draft_params: Any = None
    ):
        """Returns the seconds of a one-token call and of the whole call, and the result."""
        first_only = dataclasses.replace(config, max_new_tokens=1)
        arguments = (temperature, repeat, number, draft_params)
        timed = time_calls(
            lambda: self._decode(batch, first_only, *arguments), lambda: self._decode(batch, config, *arguments)
        )
        timed[2].stats.check()
        return timed

    def _fastest_min_rows(self, batch_size: int) -> int | None:
        """Returns the `min_rows` of the faster plain form: a lone row runs alone or beside one that is discarded.

        On a CPU XLA compiles a pass over one row differently, so either form may be faster.
        """
        if batch_size > 1 or jax.default_backend() != "cpu":
            return None
        if batch_size not in self._min_rows_cache:
            batch, times = self.workload.batches(1)[0], {}
            # Alternate the forms and keep each one's shortest time; the first of each compiles.
            for rows in (1, 2) * 4:
                config = dataclasses.replace(self._plain_config, min_rows=rows)
                times.setdefault(rows, []).append(self._time_calls(batch, config, 0.0, 0, 0)[1])
            self._min_rows_cache[batch_size] = min(times, key=lambda rows: min(times[rows]))
        return self._min_rows_cache[batch_size]

    def _part_costs(self, cell: Cell) -> tuple[RoundCosts, float]:
        """Measures the costs of the parts for all cells of a batch size and drafter at once.

        Plain steps are measured in their faster form. Returns the costs with the share of the time that threads waited
        for a core meanwhile.
        """
        batch_size, method, key = cell.batch_size, self.method(cell), (cell.batch_size, cell.drafter)
        # Costs that other programs disturbed must not spoil the cells to come: they are measured again.
        if key not in self._costs_cache or waiting_problem(self._costs_cache[key][1]):
            # One meter measures every shape of the batch size in turns. A second one measures plain steps in the faster
            # form if decoding's own form is the other.
            alike = (other for other in (*self.cells, cell) if (other.batch_size, other.drafter) == key)
            shapes = tuple(dict.fromkeys(other.shape for other in alike))
            default_rows = min_rows_per_pass(self.model, batch_size, jax.default_backend())
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
        drafter = make_drafter(method.config(DecodeConfig()))
        max_slots = max((max_slots_written(self.model, shape, drafter) for shape in shapes), default=1)
        # Measure at the mean length of the texts, with caches as large as decoding allocates.
        lengths = [len(row) for row in self.workload.prompts]
        context, longest = int(np.mean(lengths)) + self.settings.max_new_tokens // 2, max(lengths)
        chunk = choose_prefill_chunk(
            self.model, batch_size, jax.default_backend(), longest_prompt=longest, max_length=self._max_length
        )
        return CostMeter(
            self.params,
            model=self.model,
            shapes=shapes,
            batch=batch_size,
            min_rows=min_rows,
            context=context,
            capacity=cache_capacity(longest, self._max_length, max_slots_per_round=max_slots, prefill_chunk=chunk),
            drafter=method.drafter,
            draft_params=method.params,
        )


def lossless_status(cell: Cell, differing: int) -> str:
    """Describes how a cell's texts compare with plain decoding's.

    Args:
        cell: the cell.
        differing: number of texts that differ from plain decoding's.

    Returns:
        "lossy", "identical", "DIFFERS", or "exact by rule" where texts may differ although their distribution is the
        same.
    """
    if cell.acceptance in LOSSY_RULES:
        return "lossy"
    if cell.acceptance in SAME_TEXT_RULES:
        return "identical" if not differing else "DIFFERS"
    return "exact by rule"


def paired_ratio(seconds: np.ndarray, tokens: np.ndarray) -> Estimate:
    """Estimates the speed relative to plain decoding.

    Args:
        seconds: `[2, R, N]` seconds of plain and speculative decoding, R repeats of N batches.
        tokens: `[2, R, N]` tokens made.

    Returns:
        The median over repeats of the ratio of tokens per second, with a 95 % bootstrap interval that resamples whole
        batches of prompts and repeats.
    """
    repeats, count = seconds.shape[1:]

    def ratio(chosen_repeats, chosen):
        # Sum over batches within a repeat, divide within the repeat, and take the median: a pause hits few repeats.
        # A sample whose texts all ended with their first token has no rounds, and counts as 1.
        total_seconds = seconds[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        total_tokens = tokens[:, chosen_repeats[..., :, None], chosen[..., None, :]].sum(axis=-1)
        speed = np.maximum(total_tokens, 1) / np.maximum(total_seconds, 1e-9)
        return np.median(speed[1] / speed[0], axis=-1)

    # Batches and repeats are resampled independently, because both prompts and timing vary.
    return estimate_from(float(ratio(np.arange(repeats), np.arange(count))), ratio(*resample(repeats, count)))
