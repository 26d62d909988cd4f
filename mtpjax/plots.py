"""Pictures of what was measured, as PNG files."""

import pathlib
from typing import Any


def plot_quickstart(path: pathlib.Path, history: list[dict[str, Any]], rows) -> None:
    """Losses and agreement against time, and speed-up against depth (`rows`: quickstart's `DepthRow`s)."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(13, 4), layout="constrained")
    losses, agreement, speed = figure.subplots(1, 3)

    steps = [row for row in history if "bits" in row]
    evaluations = [row for row in history if "eval" in row]
    for depth in range(len(steps[0]["bits"]) if steps else 0):
        name = "trunk" if depth == 0 else f"draft {depth}"
        seconds = [row["seconds"] for row in steps]
        losses.plot(
            seconds, [row["bits"][depth] for row in steps], color=f"C{depth}", alpha=0.6, label=f"{name}, training"
        )
        held_out = [row["eval"]["bits_per_token"][depth] for row in evaluations]
        losses.plot(
            [row["seconds"] for row in evaluations], held_out, "o-", color=f"C{depth}", label=f"{name}, held out"
        )
    losses.set(title="loss", xlabel="seconds", ylabel="bits per byte", ylim=(1.5, 6))
    losses.legend(fontsize=8)

    depths = len(evaluations[0]["eval"]["agreement"])
    for depth in range(depths):
        seconds = [row["seconds"] for row in evaluations]
        values = [row["eval"]["agreement"][depth] for row in evaluations]
        agreement.plot(seconds, values, "o-", color=f"C{depth + 1}", label=f"draft {depth + 1}")
    agreement.set(title="drafts that agree with the trunk (held out)", xlabel="seconds", ylabel="share", ylim=(0, 1))
    agreement.legend(fontsize=8, loc="lower right")

    num_steps = [row.num_steps for row in rows]
    errors = [[row.ratio - row.interval[0] for row in rows], [row.interval[1] - row.ratio for row in rows]]
    errors = [[max(error, 0) for error in side] for side in errors]
    speed.errorbar(num_steps, [row.ratio for row in rows], errors, fmt="o-", capsize=4, label="measured / best plain")
    speed.plot(num_steps, [row.ideal for row in rows], "s--", color="C7", label="ideal, from measured costs")
    speed.plot(num_steps, [row.accept_length for row in rows], "^:", color="C2", label="accept length (costs nothing)")
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set(title="speed-up against drafts per round", xlabel="drafts per round", ylabel="ratio", xticks=num_steps)
    speed.set_ylim(bottom=0.5)
    speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)
