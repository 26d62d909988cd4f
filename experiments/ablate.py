"""Which draft settings to use: a grid of cells, each measured in turns with plain decoding of the same batch.

A cell is one draft depth, tree, rule, temperature and batch size. Its line in `cells.jsonl` carries a fingerprint of
all that it depends on, so that a run that was ended goes on behind its last cell and changed settings are measured
anew.

Ratios to plain decoding are medians over the repeats; within a repeat every batch of prompts is decoded both ways, one
right after the other, and the least time of a call for one token (prefill) is taken off each. The plain setting is the
faster of a pass over one row and over two. Intervals are 95 %, by resampling whole batches of prompts and repeats.
"""

import csv
import dataclasses
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import rich.box
import rich.table

from experiments.bench_decode import QUIET, machine
from mtpjax import checkpoint
from mtpjax.atomic import write_text
from mtpjax.decode.config import EXACT_RULES, LOSSY_RULES, DecodeConfig
from mtpjax.decode.costs import CostMeter
from mtpjax.decode.evaluate import RESAMPLES, Estimate, decoded_rates, sampled, to_json
from mtpjax.decode.generate import bucket, generate, speculative_generate
from mtpjax.model import MTPModel
from mtpjax.plots import plot_heatmap, plot_pareto
from mtpjax.prompts import choose_prompts, encode_prompts, read_prompts, room_for_prompts
from mtpjax.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.train import data
from mtpjax.train.panel import is_looping

VERSION = 1  # of a cell's line: another one is measured anew
PROMPT_TOKENS = 64  # of held-out files
CANDIDATES = 16  # held-out prompts looked at, at most, for each that is used
CELLS_IN_MEMORY = 16  # compiled programs take memory mappings; a process has 65,530


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked for: every combination of the tuples.

    Attributes:
        num_draft_tokens: nodes of trees, verified per round; 0: what depth and topk give. A chain has its depth's.
        rules: of acceptance; "auto" is the best exact one of each temperature and tree.
        repeats: rounds in which plain and speculative decoding take turns.
    """

    depths: tuple[int, ...] = (1, 2, 3)
    topk: tuple[int, ...] = (1, 2)
    num_draft_tokens: tuple[int, ...] = (0,)
    rules: tuple[str, ...] = ("auto",)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_sizes: tuple[int, ...] = (1, 4)
    max_new_tokens: int = 96
    repeats: int = 5
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (list, tuple)):
                if not value:
                    raise ValueError(f"{field.name} is empty")
                object.__setattr__(self, field.name, tuple(dict.fromkeys(value)))
        for name, least in (("depths", 1), ("topk", 1), ("batch_sizes", 1), ("num_draft_tokens", 0)):
            smallest = min(getattr(self, name))
            if smallest < least:
                raise ValueError(f"{name} must be at least {least}, not {smallest}")
        for name, least in (("max_new_tokens", 2), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for temperature in self.temperatures:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(f"temperature {temperature} must be finite and not negative")
        for rule in self.rules:
            if rule not in ("auto", *EXACT_RULES, *LOSSY_RULES):
                raise ValueError(f"rule '{rule}' is not one of auto, {', '.join((*EXACT_RULES, *LOSSY_RULES))}")


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination of settings; a rule "auto" stands here as what it means."""

    batch_size: int
    num_steps: int
    topk: int
    num_nodes: int
    acceptance: str
    temperature: float

    def config(self, settings: Settings, **more: Any) -> DecodeConfig:
        return DecodeConfig(
            max_new_tokens=settings.max_new_tokens,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_nodes,
            acceptance=self.acceptance,  # pyright: ignore[reportArgumentType]
            **more,
        )

    @property
    def tree(self) -> tuple[int, int, int]:
        return self.num_steps, self.topk, self.num_nodes

    @property
    def shape(self) -> str:
        return f"depth {self.num_steps}" + (f", topk {self.topk}, {self.num_nodes} nodes" if self.topk > 1 else "")

    @property
    def name(self) -> str:
        """Such as "batch 4, temperature 1, depth 3, topk 2, 11 nodes, block"."""
        return f"batch {self.batch_size}, temperature {self.temperature:g}, {self.shape}, {self.acceptance}"


def plan(settings: Settings, *, num_modules: int) -> tuple[list[Cell], dict[str, int]]:
    """The cells that are possible, those that share a compiled call beside each other; and reason -> how many are not.

    Raises `ValueError` for a model without modules.
    """
    if not num_modules:
        raise ValueError("the model has no MTP module: there is nothing to draft with")
    cells: dict[Cell, None] = {}
    reasons: dict[str, int] = {}
    product = itertools.product(
        settings.batch_sizes,
        settings.depths,
        settings.topk,
        settings.num_draft_tokens,
        settings.rules,
        settings.temperatures,
    )
    for batch_size, num_steps, topk, num_draft_tokens, rule, temperature in product:
        acceptance = _meant(rule, topk, temperature)
        try:
            shape = DecodeConfig(
                num_steps=num_steps,
                topk=topk,
                num_draft_tokens=num_draft_tokens or None if topk > 1 else None,
                acceptance=acceptance,  # pyright: ignore[reportArgumentType]
            )
            _require_sense(acceptance, topk, temperature, num_modules)
        except ValueError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        cells[Cell(batch_size, num_steps, topk, shape.num_nodes, acceptance, temperature)] = None
    return list(cells), reasons


def _meant(rule: str, topk: int, temperature: float) -> str:
    if rule != "auto":
        return rule
    return "greedy" if not temperature else "block" if topk == 1 else "recursive"


def _require_sense(acceptance: str, topk: int, temperature: float, num_modules: int) -> None:
    """Raises `ValueError` with the reason why a cell is left out."""
    if acceptance == "greedy" and temperature:
        raise ValueError("greedy is for temperature 0")
    if acceptance != "greedy" and not temperature:
        raise ValueError("at temperature 0 every rule is greedy")
    if acceptance == "recursive" and topk == 1:
        raise ValueError("recursive is for trees: on a chain it is the rule token")
    if topk > 1 and num_modules > 1:
        raise ValueError(f"a tree needs one MTP module, and the model has {num_modules}")
    if (topk > 1 or temperature) and not _decodes_trees():
        raise ValueError("decoding takes greedy chains only, so far")


def _decodes_trees() -> bool:
    return "sampling" in inspect.signature(speculative_generate).parameters


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

    Of the latter those are left out whose plain continuation repeats itself: it would be too easy to draft. Raises
    `ValueError` for prompts that do not fit the model.
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
    candidates = data.held_out_prompts(
        _held_out(path),
        count=CANDIDATES * num_prompts,
        prompt_length=length,
        continuation_length=settings.max_new_tokens,
        seed=settings.seed,
    )
    config, lively, at_once = DecodeConfig(max_new_tokens=settings.max_new_tokens), [], 4 * num_prompts
    for begin in range(0, len(candidates), at_once):
        some = candidates[begin : begin + at_once]
        rows = generate(params, some, model=model, config=config).rows()
        lively += [prompt for prompt, row in zip(some, rows, strict=True) if not is_looping(row)]
        if len(lively) >= num_prompts:
            break
    chosen = (lively or candidates)[:num_prompts]
    return Workload(chosen, f"{len(chosen)} prompts of {length} bytes from held-out files, that do not loop")


def _held_out(path: pathlib.Path) -> list[data.Document]:
    """What training on the same files held out, by the settings that the checkpoint keeps."""
    trained = {}
    if checkpoint.is_checkpoint(path):
        trained = checkpoint.Stored(path, verify=False).metadata.get("train", {})
    folder, pattern = trained.get("data"), trained.get("pattern", "*.py")
    if folder is None:
        files = data.python_sources()
    else:
        files = sorted(file for file in pathlib.Path(folder).rglob(pattern) if file.is_file())
    return data.split_held_out(data.read_documents(files), trained.get("held_out_fraction", 0.05))[1]


class CellFile:
    """`cells.jsonl`: a line per finished cell, whole or not at all."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def read(self) -> dict[str, dict[str, Any]]:
        """Fingerprint -> the newest line of it. A torn last line is cut off. Raises `ValueError` for another one."""
        if not self.path.exists():
            return {}
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        found = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                found[row["fingerprint"]] = row
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"{self.path} line {number} is damaged: remove that line to go on") from error
        return found

    def append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with self.path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())


def fingerprint(cell: Cell, settings: Settings, workload: Workload, about: dict[str, Any]) -> str:
    """A digest of all that a cell's figures depend on, but for chance."""
    content = {
        "version": VERSION,
        "cell": dataclasses.asdict(cell),
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "prompts": workload.prompts,
        "stop_token_ids": workload.stop_token_ids,
        "about": about,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def describe(path: pathlib.Path) -> dict[str, Any]:
    """Model, machine and versions: what other figures would need."""
    described = [path / name for name in ("digests.json", "config.json", "model.safetensors.index.json")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in described if file.is_file()))
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": digest.hexdigest()[:16],
        "device": f"{device.device_kind}, {cores} cores" if device.platform == "cpu" else device.device_kind,
        "processor": machine()["cpu"] if hasattr(os, "sched_getaffinity") else platform.machine(),
        "jax": jax.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


@dataclasses.dataclass
class Bench:
    """Measures cells; keeps what cells share, the faster plain form and the costs of parts."""

    model: MTPModel
    params: dict
    settings: Settings
    workload: Workload
    cells: Sequence[Cell] = ()  # to be measured

    def __post_init__(self):
        self._plain_rows: dict[tuple[int, float], int | None] = {}
        self._costs: dict[int, dict[tuple[int, int, int], dict[str, float]]] = {}
        self.max_length = min(
            self.model.config.max_position_embeddings,
            max(map(len, self.workload.prompts)) + self.settings.max_new_tokens,
        )

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The figures of a cell, as JSON holds them."""
        begin = time.perf_counter()
        batches = self.workload.batches(cell.batch_size)
        common = {"max_length": self.max_length, "stop_token_ids": self.workload.stop_token_ids}
        drafted = cell.config(self.settings, **common)
        plain = dataclasses.replace(
            drafted, num_steps=0, num_draft_tokens=None, topk=1, acceptance="auto", min_rows=self._best_rows(cell)
        )
        for config in (plain, drafted):  # compiles: longer prompts may take another program
            for number, batch in enumerate(batches):
                self._time(batch, config, cell.temperature, 0, number)
        shape = (self.settings.repeats, len(batches))
        whole, first, tokens = (np.zeros((2, *shape)) for _ in range(3))
        steps = np.zeros((len(batches), cell.batch_size))
        accepted = np.zeros((len(batches), cell.batch_size, cell.num_steps))
        differing, began, cpu_began = 0, time.perf_counter(), time.process_time()
        for repeat, number in np.ndindex(*shape):
            order = (0, 1) if (repeat + number) % 2 == 0 else (1, 0)
            rows = {}
            for which in order:
                config = (plain, drafted)[which]
                first[which, repeat, number], whole[which, repeat, number], result = self._time(
                    batches[number], config, cell.temperature, repeat, number
                )
                tokens[which, repeat, number] = np.maximum(result.lengths - 1, 0).sum()
                rows[which] = result.rows()
                if which and (cell.temperature or not repeat):
                    steps[number] += result.stats.steps
                    accepted[number] += result.stats.accepted
            differing += sum(found != wanted for found, wanted in zip(rows[1], rows[0], strict=True))
        if not steps.any():
            raise ValueError("every prompt ends with its first new token: there is nothing to measure")
        share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        count = len(self.workload.prompts)  # the last batch repeats some
        rates = decoded_rates(steps.reshape(-1)[:count], accepted.reshape(-1, cell.num_steps)[:count])
        seconds = whole - first.min(axis=1, keepdims=True)
        ratio = paired_ratio(seconds, tokens)
        accept_length = rates["accept_length"].value
        costs = self._part_costs(cell, accept_length)
        rate = [float(np.median(tokens[which].sum(1) / seconds[which].sum(1))) for which in (0, 1)]
        return {
            "cell": dataclasses.asdict(cell),
            **{name: to_json(value) for name, value in rates.items()},
            "tokens_per_second": rate[1],
            "plain_tokens_per_second": rate[0],
            "plain_min_rows": plain.min_rows,
            "ratio": to_json(ratio),
            "costs": costs,
            "ideal_ratio": costs and costs["ideal_ratio"],
            "lossless": _verdict(cell, differing),
            "differing_rows": differing,
            "waited": max(0.0, 1 - share) if jax.default_backend() == "cpu" else 0.0,  # for a core
            "compared_rows": int(np.prod(shape)) * cell.batch_size,
            "seconds": time.perf_counter() - begin,
        }

    def _decode(self, batch, config: DecodeConfig, temperature: float, repeat: int, number: int):
        seeds = [self.settings.seed + 1_000_003 * repeat + number * len(batch) + row for row in range(len(batch))]
        return speculative_generate(self.params, batch, model=self.model, config=config, **sampled(temperature, seeds))

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

    def _best_rows(self, cell: Cell) -> int | None:
        """The faster form of plain decoding: a lone row is passed alone, or with another that is thrown away."""
        key = (cell.batch_size, cell.temperature)
        if cell.batch_size > 1 or jax.default_backend() != "cpu":
            return None
        if key not in self._plain_rows:
            config = DecodeConfig(max_new_tokens=self.settings.max_new_tokens, num_steps=0, max_length=self.max_length)
            batch, times = self.workload.batches(1)[0], {}
            for rows in (1, 2) * 4:
                _, taken, _ = self._time(batch, dataclasses.replace(config, min_rows=rows), cell.temperature, 0, 0)
                times.setdefault(rows, []).append(taken)
            self._plain_rows[key] = min(times, key=lambda rows: min(times[rows]))
        return self._plain_rows[key]

    def _part_costs(self, cell: Cell, accept_length: float) -> dict[str, float] | None:
        """Costs of the parts, measured at once for all cells of a batch size that are to be measured."""
        if cell.batch_size not in self._costs:
            shapes = [other.tree for other in {*self.cells, cell} if other.batch_size == cell.batch_size]
            context = (
                int(np.mean([len(prompt) for prompt in self.workload.prompts])) + self.settings.max_new_tokens // 2
            )
            self._costs[cell.batch_size] = part_costs(
                self.params,
                self.model,
                sorted(set(shapes)),
                batch_size=cell.batch_size,
                context=context,
                capacity=bucket(self.max_length + DecodeConfig().prefill_chunk),
            )
        costs = self._costs[cell.batch_size].get(cell.tree)
        return costs and {**costs, "ideal_ratio": accept_length * costs["plain"] / costs["round"]}


def part_costs(
    params: dict,
    model: MTPModel,
    trees: Sequence[tuple[int, int, int]],
    *,
    batch_size: int,
    context: int,
    capacity: int,
) -> dict[tuple[int, int, int], dict[str, float]]:
    """By (num_steps, topk, num_nodes): seconds of a plain step, of verifying, of drafting and of all parts of a round.

    What cannot be measured is left out.
    """
    chains = [tree for tree in trees if tree[1] == 1]
    if batch_size > 1 or not chains or model.config.num_mtp_modules > 1:
        return {}
    depths = tuple(num_steps for num_steps, _, _ in chains)
    meter = CostMeter(params, model=model, num_steps=depths, context=context, capacity=capacity)
    meter.measure()
    costs = meter.costs()
    return {
        tree: {
            "plain": costs.plain,
            "verify": costs.verify[tree[0]],
            "draft": max(costs.round[tree[0]] - costs.verify[tree[0]], 0.0),
            "round": costs.round[tree[0]],
        }
        for tree in chains
    }


def _verdict(cell: Cell, differing: int) -> str:
    if cell.acceptance in LOSSY_RULES:
        return "lossy"
    if cell.acceptance in ("greedy", "sample"):  # token for token, by the same seed
        return "identical" if not differing else "DIFFERS"
    return "exact by rule"


def paired_ratio(seconds: np.ndarray, tokens: np.ndarray) -> Estimate:
    """Speed over plain speed, from `[2, R, N]`: plain and speculative, R repeats of N batches.

    The median over repeats of the ratio of times per token; batches and repeats are resampled.
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


def run_cells(
    cells: list[Cell],
    bench: Bench,
    file: CellFile,
    about: dict[str, Any],
    *,
    say: Callable[[str], Any] = print,
) -> tuple[list[dict[str, Any]], bool]:
    """Measures what `file` does not hold. Returns the rows there are, and whether they are all: not after Ctrl-C."""
    known = file.read()
    prints = {cell: fingerprint(cell, bench.settings, bench.workload, about) for cell in cells}
    rows = {cell: known[prints[cell]] for cell in cells if prints[cell] in known}
    if rows:
        say(f"{len(rows)} of {len(cells)} cells are there already")
    waiting = bench.cells = [cell for cell in cells if cell not in rows]
    begin = time.perf_counter()
    try:
        for number, cell in enumerate(waiting, start=1):
            row = {"fingerprint": prints[cell], "about": about, **bench.measure(cell)}
            file.append(row)
            rows[cell] = row
            left = (time.perf_counter() - begin) / number * (len(waiting) - number)
            say(f"{len(rows)}/{len(cells)} {cell.name}: {_short(row)}; {_minutes(left)} left")
            if number % CELLS_IN_MEMORY == 0:
                jax.clear_caches()
    except KeyboardInterrupt:
        pass
    return [rows[cell] for cell in cells if cell in rows], len(rows) == len(cells)


def _short(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return (
        f"accept length {row['accept_length']['value']:.2f}, ratio {ratio['value']:.2f} "
        f"({ratio['low']:.2f}-{ratio['high']:.2f}), {row['lossless']}"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(**row["cell"])


def groups_of(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, float], list[dict[str, Any]]]:
    """(batch size, temperature) -> its rows, fastest first; in ascending order."""
    groups: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -row["ratio"]["value"]):
        cell = cell_of(row)
        groups.setdefault((cell.batch_size, cell.temperature), []).append(row)
    return dict(sorted(groups.items()))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to use at one batch size and temperature. `best` is None where plain decoding is best."""

    batch_size: int
    temperature: float
    best: dict[str, Any] | None
    says: str
    certainty: str


def advise(rows: Iterable[dict[str, Any]]) -> list[Advice]:
    """The fastest exact setting of each batch size and temperature, and how sure that is.

    A setting whose ratio is not above 1 within its interval is not advised. Cells that failed their check are not
    advised either.
    """
    result = []
    for (batch_size, temperature), group in groups_of(rows).items():
        exact = [row for row in group if row["lossless"] not in ("lossy", "DIFFERS")]
        if not exact:
            result.append(Advice(batch_size, temperature, None, "no exact setting was measured", ""))
            continue
        best, others = exact[0], exact[1:]
        ratio = best["ratio"]
        measured = f"ratio to plain {ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
        if ratio["low"] <= 1:
            says = "do not speculate" if ratio["value"] <= 1 else "speculation is not shown to pay: decode plainly"
            best_is = f"the fastest, {cell_of(best).shape}, {cell_of(best).acceptance}, has {measured}"
            result.append(Advice(batch_size, temperature, None, says, best_is))
            continue
        length = best["accept_length"]["value"]
        says = f"{cell_of(best).shape}, {cell_of(best).acceptance}: accept length {length:.2f}, {measured}"
        result.append(Advice(batch_size, temperature, best, says, _certainty(best, others)))
    return result


def _certainty(best: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The best against the runner-up, by their intervals."""
    if not others:
        return "there is no other setting to compare with"
    second = others[0]
    name = f"{cell_of(second).shape}, {cell_of(second).acceptance}"
    value = f"{second['ratio']['value']:.2f} ({second['ratio']['low']:.2f}-{second['ratio']['high']:.2f})"
    if best["ratio"]["low"] > second["ratio"]["high"]:
        return f"surely before {name}: {value}"
    if best["ratio"]["low"] > second["ratio"]["value"]:
        return f"likely before {name}: {value}"
    alike = [row for row in others if row["ratio"]["value"] >= best["ratio"]["low"]]
    least = min(alike, key=lambda row: (row["cell"]["num_nodes"], row["cell"]["num_steps"]))
    return (
        f"not told apart from {name}: {value}"
        + (f", nor from {len(alike) - 1} more" if len(alike) > 1 else "")
        + (f"; the narrowest of these is {cell_of(least).shape}" if least is not second else "")
    )


def flags(cell: Cell) -> str:
    """The setting as flags, SGLang's names."""
    return (
        f"--speculative-num-steps {cell.num_steps} --speculative-eagle-topk {cell.topk} "
        f"--speculative-num-draft-tokens {cell.num_nodes}"
    )


def recommendation(
    rows: list[dict[str, Any]], reasons: dict[str, int], workload: Workload, settings: Settings, about: dict[str, Any]
) -> str:
    """`recommendation.md`."""
    lines, advices = ["# Which draft settings to use", ""], advise(rows)
    for advice in advices:
        lines.append(f"- **batch {advice.batch_size}, temperature {advice.temperature:g}**: {advice.says}")
        if advice.certainty:
            lines.append(f"  - {advice.certainty}")
        if advice.best is not None:
            lines.append(f"  - `{flags(cell_of(advice.best))}`")
    without = [f"batch {each.batch_size} at temperature {each.temperature:g}" for each in advices if not each.best]
    lines += ["", "When not to speculate: " + (", ".join(without) or "at nothing that was measured") + "."]
    lossy = [row for row in rows if row["lossless"] == "lossy"]
    if lossy:
        lines += ["", "## Lossy settings, which change the text's distribution and are never advised", ""]
        lines += [f"- {cell_of(row).name}: {_short(row)}" for row in lossy]
    wrong = [row for row in rows if row["lossless"] == "DIFFERS"]
    if wrong:
        lines += ["", "## Texts that differ from plain decoding", ""]
        lines += [f"- {cell_of(row).name}: {row['differing_rows']} of {row['compared_rows']} texts" for row in wrong]
    lines += ["", "## Measured", ""]
    lines += [
        f"- {len(rows)} cells, {settings.repeats} repeats, {settings.max_new_tokens} new tokens; {workload.source}",
        f"- {about['device']}, {about['processor']}, jax {about['jax']}, model {about['model']}",
        "- ratio: tokens/s over those of plain decoding of the same prompts, batch and temperature, in turns; 95 %",
    ]
    waited = max(row["waited"] for row in rows)
    if waited > QUIET:
        lines += [f"- others used the machine: it waited for a core up to {waited:.0%} of a cell's time. Run it again"]
    lines += [f"- left out: {reason} ({count} cells)" for reason, count in reasons.items()]
    return "\n".join(lines) + "\n"


CSV_COLUMNS = (
    "batch_size",
    "temperature",
    "num_steps",
    "topk",
    "num_nodes",
    "acceptance",
    "accept_length",
    "accept_length_low",
    "accept_length_high",
    "accept_length_macro",
    "conditional",
    "survival",
    "tokens_per_second",
    "plain_tokens_per_second",
    "ratio",
    "ratio_low",
    "ratio_high",
    "ideal_ratio",
    "plain_ms",
    "verify_ms",
    "draft_ms",
    "lossless",
)


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """A line per cell; rates by level are separated by spaces."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        spreads = {}
        for name in ("accept_length", "ratio"):
            spreads |= {name: row[name]["value"], f"{name}_low": row[name]["low"], f"{name}_high": row[name]["high"]}
        numbers = {
            **spreads,
            "accept_length_macro": row["accept_length_macro"]["value"],
            "tokens_per_second": row["tokens_per_second"],
            "plain_tokens_per_second": row["plain_tokens_per_second"],
            "ideal_ratio": row["ideal_ratio"],
            **{f"{part}_ms": row["costs"] and 1e3 * row["costs"][part] for part in ("plain", "verify", "draft")},
        }
        writer.writerow(
            {
                **{name: row["cell"][name] for name in CSV_COLUMNS[:6]},
                **{name: "" if value is None else f"{value:.5g}" for name, value in numbers.items()},
                **{name: " ".join(_number(rate) for rate in row[name]) for name in ("conditional", "survival")},
                "lossless": row["lossless"],
            }
        )
    return file.getvalue()


def _number(rate: dict[str, float | None]) -> str:
    return "" if rate["value"] is None else f"{rate['value']:.4f}"


def print_cells(console, rows: list[dict[str, Any]]) -> None:
    """A table within 80 columns per batch size and temperature."""
    for (batch_size, temperature), group in groups_of(rows).items():
        table = rich.table.Table(
            title=f"batch {batch_size}, temperature {temperature:g}: plain {group[0]['plain_tokens_per_second']:.0f} "
            "tokens/s",
            title_style="",
            title_justify="left",
            box=rich.box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        headings = ("depth", "topk/\nnodes", "rule", "accept\nlength", "survival", "tokens/s", "ratio (95 %)", "ideal")
        for heading in headings:
            fixed = heading != "survival"
            table.add_column(heading, justify="right", no_wrap=fixed, min_width=None if fixed else len(heading))
        for row in group:
            cell, ratio = cell_of(row), row["ratio"]
            table.add_row(
                str(cell.num_steps),
                f"{cell.topk}/{cell.num_nodes}",
                cell.acceptance + {"lossy": " *", "DIFFERS": " !"}.get(row["lossless"], ""),
                f"{row['accept_length']['value']:.2f}",
                " ".join(f"{rate['value'] or 0:.2f}".removeprefix("0") for rate in row["survival"]),
                f"{row['tokens_per_second']:.0f}",
                f"{ratio['value']:.2f} {ratio['low']:.2f}-{ratio['high']:.2f}",
                "" if row["ideal_ratio"] is None else f"{row['ideal_ratio']:.2f}",
            )
        console.print(table)
    kinds = {row["lossless"] for row in rows}
    if "lossy" in kinds:
        console.print("* lossy: the text's distribution is another")
    if "DIFFERS" in kinds:
        console.print("! texts DIFFER from plain decoding", style="bold red")


def run(
    model_path,
    output,
    settings: Settings,
    *,
    console,
    prompts: str | None = None,
    num_prompts: int = 12,
    categories: Sequence[str] = (),
    prompt_tokens: int | None = None,
    chat: bool = False,
) -> int:
    """Measures the grid, writes the results, prints them. Returns 4 if a text differs, 75 if it was ended before."""
    path = checkpoint.find(model_path)
    model, params = checkpoint.load(path)
    cells, reasons = plan(settings, num_modules=model.config.num_mtp_modules)
    for reason, count in reasons.items():
        console.print(f"left out: {reason} ({count} cells)", highlight=False)
    if not cells:
        raise ValueError("no combination of the settings is possible: the reasons are above")
    workload = find_workload(
        path,
        model,
        params,
        settings,
        prompts=prompts,
        num_prompts=num_prompts,
        categories=categories,
        prompt_tokens=prompt_tokens,
        chat=chat,
    )
    about = describe(path)
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"{len(cells)} cells; {workload.source}", highlight=False, soft_wrap=True)
    bench = Bench(model, params, settings, workload)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    rows, is_complete = run_cells(cells, bench, CellFile(output / "cells.jsonl"), about, say=say)
    if rows:
        print_cells(console, rows)
        text = recommendation(rows, reasons, workload, settings, about)
        write_text(output / "cells.csv", to_csv(rows))
        write_text(output / "recommendation.md", text)
        plot_heatmap(output / "heatmap.png", rows)
        plot_pareto(output / "pareto.png", rows)
        console.print(text.partition("\n## Measured")[0], highlight=False, soft_wrap=True, markup=False)
        console.print(f"wrote {output}/: cells.jsonl, cells.csv, heatmap.png, pareto.png, recommendation.md")
    if not is_complete:
        console.print(f"ended with {len(rows)} of {len(cells)} cells done: the same command goes on", soft_wrap=True)
        return 75
    return 4 if any(row["lossless"] == "DIFFERS" for row in rows) else 0
