"""Makes tables for a profile, and computes the acceptance rate at which drafts break even."""

from typing import Any

from mtpjax.evaluation.roofline import tokens_per_round
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts
from mtpjax.evaluation.trust import mark, verdict


def break_even_rate(relative_cost: float, num_steps: int) -> float | None:
    """Computes the acceptance rate above which rounds with drafts are faster than plain decoding.

    Returns:
        The rate a, equal at all levels, that solves 1 + a + ... + a^K = `relative_cost`; None if even a = 1 is too low.
    """
    if relative_cost > num_steps + 1:
        return None
    # The accept length grows with the rate, so bisection finds it.
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (low, rate) if tokens_per_round(rate, num_steps) > relative_cost else (rate, high)
    return high


def tables(profile: dict[str, Any]):
    """Yields a line that says whether the times can be trusted, and a `rich` table 80 columns wide per batch size."""
    from mtpjax.evaluation.tables import number_table

    problem = profile["problem"]
    yield verdict([problem] * len(profile["batches"]), profile["waited"])
    for stored in profile["batches"]:
        costs = RoundCosts.from_json(stored)
        title = f"batch {costs.batch}{mark(problem)}, {profile['context']} tokens of context, {profile['dtype']}"
        title += f", temperature {profile['temperature']}" if profile["temperature"] else ""
        title += f", {profile['drafter'].partition(' ')[0]}" if profile.get("drafter") else ""
        title += f"; a change of depth takes {1e3 * costs.change:.2g} ms" if costs.change else ""
        # If there is a column for drafting, the last two are narrower.
        draft, last = [], ("plain rounds =\nbreak-even length", "rate per level\nto break even")
        if costs.draft:
            draft, last = ["draft's\nshare"], ("plain rounds\n= break-even\nlength", "rate per\nlevel to\nbreak even")
        headings = ("drafts", "nodes", "round\nms", "parts'\nshare", *draft, "verify's\nshare", *last)
        table = number_table(title, headings)
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
