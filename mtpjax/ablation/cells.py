"""Defines an ablation's settings, the cells that combine them, and the rows that describe measured cells.

A row is a line in `cells.jsonl`. Its estimates are objects with "value", "low" and "high".
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from mtpjax.decoding.acceptance.rules import RULES, find_rule
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import make_spec
from mtpjax.evaluation.round_costs import MAX_MEASURED_STEPS
from mtpjax.evaluation.round_shapes import RoundShape
from mtpjax.evaluation.trust import mark

Row = dict[str, Any]  # a line in cells.jsonl
Group = tuple[int, float]  # batch size and temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an ablation, which measures every combination of the values in the tuples.

    Attributes:
        depths: draft depths (`num_steps`).
        topk: branching factors; 1 is a chain.
        num_draft_tokens: numbers of tree nodes to verify per round; 0 derives the number from depth and topk. Chains
            ignore this setting.
        rules: acceptance rules; "auto" means the default rule for each temperature and tree, "exact" every exact rule.
        temperatures: sampling temperatures; 0 is greedy.
        batch_sizes: rows per call.
        max_new_tokens: tokens per text.
        repeats: how many times each batch is decoded, both with and without drafts.
        seed: random seed for prompts and sampling.

    Raises:
        ValueError: a tuple is empty, a value is out of range, or a rule is unknown.
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
        # Convert lists to tuples without duplicates, so that no combination occurs twice.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (list, tuple)):
                if not value:
                    raise ValueError(f"{field.name} is empty")
                object.__setattr__(self, field.name, tuple(dict.fromkeys(value)))
        # Reject bad values here, before any model is loaded.
        for name, values, minimum in (
            ("num_steps", self.depths, 1),
            ("topk", self.topk, 1),
            ("batch_size", self.batch_sizes, 1),
            ("num_draft_tokens", self.num_draft_tokens, 0),
            ("max_new_tokens", (self.max_new_tokens,), 2),
            ("repeats", (self.repeats,), 1),
            ("seed", (self.seed,), 0),
        ):
            if min(values) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {min(values)}")
        if max(self.depths) > MAX_MEASURED_STEPS:
            raise ValueError(f"num_steps must be at most {MAX_MEASURED_STEPS}, not {max(self.depths)}")
        for temperature in self.temperatures:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(f"temperature {temperature} must be finite and not negative")
        for rule in self.rules:
            if rule not in ("auto", "exact"):
                find_rule(rule)


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination of settings.

    `acceptance` is a rule name that `find_rule` accepts; `drafter` is the name of an `AblatedDrafter`.
    """

    batch_size: int
    num_steps: int
    topk: int
    num_nodes: int
    acceptance: str
    temperature: float
    drafter: str = "mtp"

    def config(self, common: DecodeConfig) -> DecodeConfig:
        """Returns `common` with the draft settings of this cell; `AblatedDrafter.config` sets the drafter."""
        return dataclasses.replace(
            common,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_nodes,
            acceptance=self.acceptance,
        )

    @property
    def shape(self) -> RoundShape:
        """The shape of a round, which determines its cost."""
        return RoundShape(self.num_steps, self.topk, self.num_nodes)

    @property
    def setting(self) -> str:
        """The draft setting in words, such as "mtp, depth 3, topk 2, 11 nodes, recursive"."""
        return f"{self.drafter}, {self.shape_text}, {self.acceptance}"

    @property
    def shape_text(self) -> str:
        """The shape of a round in words, such as "depth 3, topk 2, 11 nodes"."""
        tree = f", topk {self.topk}, {self.num_nodes} nodes" if self.topk > 1 else ""
        return f"depth {self.num_steps}{tree}"

    @property
    def name(self) -> str:
        """The cell in words, such as "batch 4, temperature 0, mtp, depth 3, greedy"."""
        return f"batch {self.batch_size}, temperature {self.temperature:g}, {self.setting}"

    @property
    def flags(self) -> str:
        """The shape as SGLang's command-line flags, plus the rule if it is not the default."""
        is_default = self.acceptance in resolve_rules("auto", self.topk, self.temperature)
        return (
            f"--speculative-num-steps {self.num_steps} --speculative-eagle-topk {self.topk} "
            f"--speculative-num-draft-tokens {self.num_nodes}{'' if is_default else f' --acceptance {self.acceptance}'}"
        )


def resolve_rules(name: str, topk: int, temperature: float) -> tuple[str, ...]:
    """Expands "auto" and "exact" into the names of a cell's rules; returns any other name unchanged."""
    if name not in ("auto", "exact"):
        return (name,)
    # At temperature 0, every exact rule equals greedy. At higher temperatures, "auto" means decoding's default rule.
    if not temperature:
        return ("greedy",)
    if name == "auto":
        return (make_spec(DecodeConfig(topk=topk), is_greedy=False).rule.name,)
    # "exact" means every exact rule that supports this shape.
    unsuitable = "fixed tree" if topk == 1 else "chain"
    return tuple(
        name for name, rule in RULES.items() if rule.is_exact and name != "greedy" and rule.drafts != unsuitable
    )


def cell_of(row: Row) -> Cell:
    return Cell(**row["cell"])


def group_by_batch_and_temperature(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Groups rows by batch size and temperature. The groups are sorted; the rows in a group keep their order."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cell"]["batch_size"], row["cell"]["temperature"]), []).append(row)
    return dict(sorted(groups.items()))


def by_speed(row: Row) -> tuple[bool, float]:
    """Returns a sort key that puts trusted rows before the others, and then faster rows before slower ones."""
    return bool(row["problem"]), -row["ratio"]["value"]


def list_drafters(rows: list[Row]) -> list[str]:
    """Lists the drafters' names in the order in which the rows first mention them."""
    return list(dict.fromkeys(row["cell"]["drafter"] for row in rows))


def round_cost(row: Row) -> float:
    """Returns a round's measured cost in units of plain rounds, computed as accept length divided by ratio."""
    return row["accept_length"]["value"] / row["ratio"]["value"]


def parts_cost(row: Row) -> float:
    """Returns the cost of a round's passes alone, in units of plain rounds."""
    return row["costs"]["parts"] / row["costs"]["plain"]


def format_interval(estimate: dict[str, float]) -> str:
    """Formats an estimate with its 95 % interval, for example as "1.50 (1.45-1.55)"."""
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}-{estimate['high']:.2f})"


def format_ratio(row: dict[str, Any]) -> str:
    """Formats the ratio of a row or of a category with its interval, and marks a ratio that cannot be trusted."""
    return format_interval(row["ratio"]) + mark(row["problem"])


def format_rates(rates: Iterable[dict[str, float | None]]) -> str:
    """Formats the rate at each draft position, for example as ".80 .64", with a dash for positions without a rate."""
    return " ".join("-" if rate["value"] is None else f"{rate['value']:.2f}".removeprefix("0") for rate in rates)
