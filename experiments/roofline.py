"""Predicts rounds of four models on three GPUs, and draws the speed-up of speculation by batch size.

    python -m experiments.roofline --output docs/results/roofline.md

Replaces the tables of a page and draws `docs/images/roofline.png`. Nothing runs on a GPU: the predictions are those of
`mtpjax profile --predict`.
"""

import argparse
import datetime
import pathlib
import sys

import jax

from experiments.bench_gpu import MODELS as BENCHED
from mtpjax.evaluation.plot_style import COLOURS, picture
from mtpjax.evaluation.roofline import DEVICES, predict_round, tokens_per_round
from mtpjax.models.config import ModelConfig
from mtpjax.models.presets import presets

CONTEXT, RATE = 2048, 0.8
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MODELS: dict[str, tuple[ModelConfig, float, int]] = {  # config, bytes of a weight, GPUs
    **{name: (config, 2.0, 1) for name, config in BENCHED.items()},
    "DeepSeek-V3": (presets["deepseek-v3"], 1.0, 16),
}
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "roofline.png"


def predictions() -> list[dict]:
    """Predicts every model on every device, at each batch size, plain and with one and three draft levels."""
    rows = []
    for name, (config, weight_bytes, num_devices) in MODELS.items():
        for device in DEVICES.values():
            for batch in BATCHES:
                settings = {"batch": batch, "context": CONTEXT, "weight_bytes": weight_bytes}
                plain = predict_round(config, device, num_steps=0, num_devices=num_devices, **settings)
                for steps in (0, 1, 3):
                    found = predict_round(config, device, num_steps=steps, num_devices=num_devices, **settings)
                    rows.append(
                        {
                            "model": name,
                            "device": device.name,
                            "num_devices": num_devices,
                            "batch": batch,
                            "num_steps": steps,
                            "microseconds": 1e6 * found.seconds,
                            "bytes": sum(part.nbytes for part in found.parts),
                            "operations": sum(part.flops for part in found.parts),
                            "launches": found.launches,
                            "microseconds_of_launches": 1e6 * found.seconds_of_launches,
                            "limit": found.limit,
                            "speedup": tokens_per_round(RATE, steps) * plain.seconds / found.seconds,
                        }
                    )
    return rows


def markdown(rows: list[dict]) -> str:
    """Formats the rounds at batch 1 and the speed-ups by batch size."""
    lines = ["| model | GPUs | drafts | bytes | operations | launches | round, us | longest part | measured |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|---|---|")
    for row in rows:
        if row["batch"] == 1:
            launches = f"{row['launches']}, {row['microseconds_of_launches']:.0f} us"
            cells = [row["model"], f"{row['num_devices']} x {row['device']}", str(row["num_steps"])]
            cells += [f"{row['bytes'] / 1e9:.2f} GB", f"{row['operations'] / 1e9:.1f} G", launches]
            cells += [f"{row['microseconds']:.0f}", row["limit"], "not yet"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Speed-up over plain decoding with 3 drafts, each accepted with probability {RATE}:", ""]
    lines.append("| model | GPU | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |")
    lines.append("|---|---|" + "--:|" * len(BATCHES))
    for name, (_, _, num_devices) in MODELS.items():
        for device in DEVICES.values():
            found = [_speedup(rows, name, device.name, batch) for batch in BATCHES]
            lines.append(
                f"| {name} | {num_devices} x {device.name} | " + " | ".join(f"{one:.2f}" for one in found) + " |"
            )
    return "\n".join(lines)


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the speed-ups by batch size, one panel for each model."""
    with picture(path, (11, 3.2)) as figure:
        axes = figure.subplots(1, len(MODELS), sharey=True)
        for axis, name in zip(axes, MODELS, strict=True):
            for colour, device in zip(COLOURS, DEVICES.values(), strict=False):
                found = [_speedup(rows, name, device.name, batch) for batch in BATCHES]
                axis.plot(range(len(BATCHES)), found, marker="o", color=colour, label=device.name)
            axis.set(title=name, xlabel="batch size", xticks=range(len(BATCHES)), xticklabels=BATCHES)
        axes[0].set_ylabel("predicted speed-up with 3 drafts")
        axes[0].legend()


def _speedup(rows, model, device, batch) -> float:
    keys = {"model": model, "device": device, "batch": batch, "num_steps": 3}
    return next(row["speedup"] for row in rows if keys.items() <= row.items())


def main(argv: list[str] | None = None) -> int:
    """Prints the tables, or writes them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=None, help="page whose table is replaced")
    options = parser.parse_args(argv)
    rows = predictions()
    table = markdown(rows)
    print(table)
    if options.output is not None:
        about = f"{datetime.date.today().isoformat()}, jax {jax.__version__} (shapes alone), context {CONTEXT}"
        begin, end = "<!-- table: begin -->", "<!-- table: end -->"
        head, rest = options.output.read_text().split(begin)
        tail = rest.split(end)[1]
        options.output.write_text(f"{head}{begin}\n{about}:\n\n{table}\n{end}{tail}")
        draw(rows, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
