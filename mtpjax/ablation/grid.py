"""The cells of an ablation: the combinations of settings to measure, and the reasons why others are left out."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.decoding.acceptance.rules import RULES, find_rule
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.evaluation.round_costs import MAX_MEASURED_STEPS
from mtpjax.evaluation.round_shapes import RoundShape
from mtpjax.inference.requests import check_settings, make_drafter
from mtpjax.models.model import MTPModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an ablation, which measures every combination of the tuples.

    Attributes:
        depths: draft depths, `num_steps`.
        topk: branching factors; 1 is a chain.
        num_draft_tokens: tree nodes to verify per round; 0: as many as depth and topk give. Chains ignore it.
        rules: acceptance rules; "auto" is the default rule of each temperature and tree, "exact" every exact rule.
        temperatures: sampling temperatures; 0 is greedy.
        batch_sizes: rows per call.
        max_new_tokens: tokens per text.
        repeats: how often plain and speculative decoding take turns on each batch.
        seed: seed of prompts and samples.

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
        # Lists become tuples without duplicates, so that every combination is one cell.
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
        ):
            if min(values) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {min(values)}")
        if max(self.depths) > MAX_MEASURED_STEPS:
            raise ValueError(f"num_steps must be at most {MAX_MEASURED_STEPS}, not {max(self.depths)}")
        for name, minimum in (("max_new_tokens", 2), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        for temperature in self.temperatures:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(f"temperature {temperature} must be finite and not negative")
        for rule in self.rules:
            if rule not in ("auto", "exact"):
                find_rule(rule)


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination of settings.

    `acceptance` names a rule as `find_rule` takes it; `drafter` is the name of an `AblatedDrafter`.
    """

    batch_size: int
    num_steps: int
    topk: int
    num_nodes: int
    acceptance: str
    temperature: float
    drafter: str = "mtp"

    def config(self, common: DecodeConfig) -> DecodeConfig:
        """Returns `common` with this cell's draft settings; `AblatedDrafter.config` sets the drafter."""
        return dataclasses.replace(
            common,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_nodes,
            acceptance=self.acceptance,
        )

    @property
    def shape(self) -> RoundShape:
        """The shape of a round, by which costs are measured."""
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
        """The shape as SGLang's command-line flags, with the rule if it is not the default one."""
        is_default = self.acceptance in _resolve_rules("auto", self.topk, self.temperature)
        return (
            f"--speculative-num-steps {self.num_steps} --speculative-eagle-topk {self.topk} "
            f"--speculative-num-draft-tokens {self.num_nodes}{'' if is_default else f' --acceptance {self.acceptance}'}"
        )


def list_cells(
    settings: Settings, *, model: MTPModel, methods: Sequence[AblatedDrafter] = (MTP,)
) -> tuple[list[Cell], dict[str, int]]:
    """Lists the cells to measure, and for each reason the number of combinations left out."""
    cells: dict[Cell, None] = {}
    reasons: dict[str, int] = {}
    combinations = itertools.product(
        methods,
        settings.batch_sizes,
        settings.depths,
        settings.topk,
        settings.num_draft_tokens,
        settings.rules,
        settings.temperatures,
    )
    for method, batch_size, num_steps, topk, num_draft_tokens, name, temperature in combinations:
        # `DecodeConfig`, `check_settings` and `_check_combination` reject what cannot run, such as a depth beyond a
        # drafter's heads, or repeats another cell. Their messages are the reasons that the report lists.
        for rule in _resolve_rules(name, topk, temperature):
            try:
                config = DecodeConfig(
                    num_steps=num_steps,
                    topk=topk,
                    num_draft_tokens=num_draft_tokens or None if topk > 1 and num_steps else None,
                    acceptance=rule,
                    drafter=method.drafter,
                )
                check_settings(model, config, make_drafter(config))
                _check_combination(rule, topk, temperature)
            except ValueError as error:
                reason = f"{method.name}: {error}" if len(methods) > 1 else str(error)
                reasons[reason] = reasons.get(reason, 0) + 1
                continue
            # A dict keeps the order and drops duplicates, such as a chain with two values of num_draft_tokens.
            cells[Cell(batch_size, num_steps, topk, config.num_nodes, rule, temperature, method.name)] = None
    return list(cells), reasons


def _resolve_rules(name: str, topk: int, temperature: float) -> tuple[str, ...]:
    """Returns the rules that "auto" and "exact" mean for a cell; any other name means itself."""
    if name not in ("auto", "exact"):
        return (name,)
    # At temperature 0 every exact rule equals greedy. Above, "auto" is decoding's own default.
    if not temperature:
        return ("greedy",)
    if name == "auto":
        return (DecodeSpec.from_config(DecodeConfig(topk=topk), is_greedy=False).rule.name,)
    # "exact": every exact rule that supports this shape.
    unsuitable = "fixed tree" if topk == 1 else "chain"
    return tuple(
        name for name, rule in RULES.items() if rule.is_exact and name != "greedy" and rule.drafts != unsuitable
    )


def _check_combination(name: str, topk: int, temperature: float) -> None:
    """Raises `ValueError` for combinations that decoding rejects or that repeat another cell."""
    rule, is_greedy = find_rule(name), name == "greedy"
    if is_greedy and temperature:
        raise ValueError("greedy supports only temperature 0")
    if rule.is_exact and not is_greedy and not temperature:
        raise ValueError("at temperature 0 every exact rule equals greedy")
    if rule.drafts == "fixed tree" and topk == 1:
        raise ValueError(f"{rule} supports only trees: on a chain it equals another rule")
