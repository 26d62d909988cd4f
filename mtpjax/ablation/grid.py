"""Lists the combinations of settings that an ablation measures, and the reasons why it leaves out the others."""

import itertools
from collections.abc import Sequence

from mtpjax.ablation.cells import Cell, Settings, resolve_rules
from mtpjax.ablation.drafters import MTP, AblatedDrafter
from mtpjax.decoding.acceptance.rules import find_rule
from mtpjax.decoding.config import DecodeConfig
from mtpjax.inference.requests import check_settings, make_drafter
from mtpjax.models.model import MTPModel


def list_cells(
    settings: Settings, *, model: MTPModel, methods: Sequence[AblatedDrafter] = (MTP,)
) -> tuple[list[Cell], dict[str, int]]:
    """Lists the cells to measure, and counts the combinations that are left out for each reason."""
    cells: dict[Cell, None] = {}
    reasons: dict[str, int] = {}
    combinations = itertools.product(
        methods, settings.batch_sizes, settings.depths, settings.topk, settings.num_draft_tokens, settings.rules,
        settings.temperatures,
    )  # fmt: skip
    for method, batch_size, num_steps, topk, num_draft_tokens, name, temperature in combinations:
        # `DecodeConfig`, `check_settings` and `_check_combination` reject a cell that cannot run (for example, with
        # more draft levels than the drafter has heads) or that duplicates another cell. The report shows the reasons.
        nodes = num_draft_tokens or None if topk > 1 and num_steps else None
        for rule in resolve_rules(name, topk, temperature):
            try:
                config = DecodeConfig(
                    num_steps=num_steps, topk=topk, num_draft_tokens=nodes, acceptance=rule, drafter=method.drafter
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


def _check_combination(name: str, topk: int, temperature: float) -> None:
    """Raises `ValueError` for combinations that decoding rejects or that duplicate another cell."""
    rule, is_greedy = find_rule(name), name == "greedy"
    if is_greedy and temperature:
        raise ValueError("greedy supports only temperature 0")
    if rule.is_exact and not is_greedy and not temperature:
        raise ValueError("at temperature 0, every exact rule equals greedy")
    if rule.drafts == "fixed tree" and topk == 1:
        raise ValueError(f"{rule} supports only trees, because on a chain it equals another rule")
