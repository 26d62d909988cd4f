"""Advises which setting to use for each batch size and temperature, based on the rows of an ablation."""

import dataclasses
from collections.abc import Iterable

from mtpjax.ablation.cells import Group, Row, by_speed, cell_of, format_ratio, group_by_batch_and_temperature


def group_rows(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Groups rows by batch size and temperature. Each group has its trusted rows first and is then sorted by speed."""
    return group_by_batch_and_temperature(sorted(rows, key=by_speed))


@dataclasses.dataclass(frozen=True)
class Advice:
    """The advice for one batch size and temperature.

    Attributes:
        batch_size: the batch size.
        temperature: the temperature.
        best: the row with the setting to use, or None if plain decoding is best or `is_known` is False.
        text: the advice in words.
        certainty: how certain the advice is, in words.
        is_known: whether at least one exact setting has a trusted measurement.
    """

    batch_size: int
    temperature: float
    best: Row | None
    text: str
    certainty: str
    is_known: bool = True


def advise(rows: Iterable[Row]) -> list[Advice]:
    """Chooses the fastest exact setting for each batch size and temperature.

    A setting is advised only if its measurement can be trusted, the interval of its ratio is entirely above 1, and
    its texts passed the comparison with plain decoding.
    """
    return [Advice(*key, *_choose(group)) for key, group in group_rows(rows).items()]


def _choose(group: list[Row]) -> tuple[Row | None, str, str, bool]:
    """Returns the last four fields of `Advice` for a group of rows that `group_rows` has sorted."""
    # Lossy rules change the distribution, so they are reported but never advised.
    exact = [row for row in group if row["lossless"] not in ("lossy", "DIFFERS")]
    if not exact:
        return None, "no exact setting was measured", "", False
    fastest, trusted = exact[0], [row for row in exact if not row["problem"]]
    measured = f"the fastest, {cell_of(fastest).setting}, has a ratio to plain of {format_ratio(fastest)}"
    if not trusted:
        text = "not known: no measurement can be trusted; measure again"
        return None, text, f"{measured}: {fastest['problem']}", False
    # Speculation pays only if the lower end of the ratio's interval is above 1.
    paying, left_out = [row for row in trusted if row["ratio"]["low"] > 1], len(exact) - len(trusted)
    also = f"; not compared, because they cannot be trusted: {left_out}" if left_out else ""
    if not paying:
        is_slower = fastest["ratio"]["value"] <= 1
        text = "do not speculate" if is_slower else "speculation is not clearly faster: decode plainly"
        return None, text, measured + also, True
    best = paying[0]
    text = f"{cell_of(best).setting}: accept length {best['accept_length']['value']:.2f}"
    text += f", ratio to plain {format_ratio(best)}"
    return best, text, _certainty(best, [row for row in trusted if row is not best]) + also, True


def _certainty(best: Row, others: list[Row]) -> str:
    """Describes how clearly the best setting beats the runner-up, judging by their intervals."""
    if not others:
        return "no other setting to compare with"
    # The difference is clear if the intervals do not overlap. It is probable if the best setting's whole interval is
    # above the runner-up's ratio.
    second = others[0]
    measured = f"{cell_of(second).setting}: {format_ratio(second)}"
    if best["ratio"]["low"] > second["ratio"]["high"]:
        return f"clearly faster than {measured}"
    if best["ratio"]["low"] > second["ratio"]["value"]:
        return f"probably faster than {measured}"
    alike = [row for row in others if row["ratio"]["value"] >= best["ratio"]["low"]]
    return f"not distinguishable from {measured}" + (f", nor from {len(alike) - 1} more" if len(alike) > 1 else "")
