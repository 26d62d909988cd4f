"""Writes the measurements of `train_smollm2` as Markdown tables."""

import pathlib
import shlex
from typing import Any

from experiments.common.smollm2_settings import CHECKPOINT_FOLDER, VOCABULARY_FILE


def format_report(report: dict[str, Any]) -> str:
    """Formats the tables of docs/results/smollm2.md.

    Args:
        report: the content of `results.json`.

    Returns:
        Markdown.
    """
    parts = [acceptance_table(report["acceptance"]), speed_table(report["speed"]), law_lines(report)]
    return "\n\n".join(parts)


def acceptance_table(acceptance: dict[str, Any]) -> str:
    """Formats accept lengths and rates by category.

    Args:
        acceptance: result of `smollm2_measure.measure_acceptance`.

    Returns:
        A Markdown table, "overall" first.
    """
    depths = len(acceptance["rates"]["overall"]["survival"])
    levels = "".join(f" level {level} |" for level in range(1, depths + 1))
    lines = [
        f"| category | prompts | accept length (95 %) |{levels}",
        "|---|---|---|" + "---|" * depths,
    ]
    for name, row in acceptance["rates"].items():
        length = row["accept_length"]
        rates = "".join(f" {_number(rate['value'])} |" for rate in row["survival"])
        # Prompts are what the interval resamples: one prompt has none.
        interval = f" ({_number(length['low'])}-{_number(length['high'])})" if row["prompts"] > 1 else ""
        lines.append(f"| {name} | {row['prompts']} | {_number(length['value'])}{interval} |{rates}")
    return "\n".join(lines)


def speed_table(speed: dict[str, Any]) -> str:
    """Formats speeds, costs and the accept length that breaks even.

    Args:
        speed: result of `smollm2_speed.measure_speed`.

    Returns:
        A Markdown table, and a line about disturbances.
    """
    lines = [
        "| engine | tokens/s | speed, plain = 1 (range) | by CPU time (range) | accept length | breaks even at |"
        " rate per level there | equal texts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in speed["engines"].items():
        label = f"{name} draft level{'s' * (name != '1')}" if name.isdecimal() else name
        cells = [label, f"{row['tokens_per_second']:.1f}"]
        for prefix in ("", "cpu_"):
            low, high = row[f"{prefix}range"]
            cells.append(f"{row[f'{prefix}speed_up']:.2f} ({low:.2f}-{high:.2f})")
        if "cost" in row:
            rate = row["break_even_rate"]
            cells += [_number(row["accept_length"]), _number(row["cost"]), "never" if rate is None else _number(rate)]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join([*cells, f"{row['equal_texts']} of {row['texts']}"]) + " |")
    lines += ["", f"Threads waited {speed['waited_share']:.2f} seconds for a core in each timed second."]
    return "\n".join(lines)


def law_lines(report: dict[str, Any]) -> str:
    """Formats the equality of texts, and the test of the sampled distribution.

    Args:
        report: the content of `results.json`.

    Returns:
        A Markdown list.
    """
    acceptance, law = report["acceptance"], report["law"]
    gaps = [row["gap"] for row in acceptance["differing"]]
    lines = [f"Greedy texts equal to plain decoding: {acceptance['equal_texts']} of {acceptance['prompts']}."]
    if gaps:
        lines.append(f"Where they differ, the trunk's two logits are at most {max(gaps):.2g} apart.")
    lines += [
        f"Sampled texts against the exact distribution: chi-square {law['statistic']:.1f} with {law['degrees']} degrees"
        f" of freedom, p = {law['p']:.2f} ({law['samples']} samples, accept length {law['accept_length']:.2f}).",
        f"Rule `sample` gives plain sampling's tokens in {law['rule_sample_equal']} of {law['rule_sample_texts']}"
        " texts.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def next_commands(gguf: pathlib.Path, folder: pathlib.Path) -> str:
    """Formats the commands that put the module into the model and decode with it.

    Args:
        gguf: the model's file.
        folder: the output folder.

    Returns:
        A line for each.
    """
    merged, vocabulary = shlex.quote(f"{folder}-mtp"), shlex.quote(str(folder / VOCABULARY_FILE))
    drafts = f"--model {merged} --draft-vocabulary {vocabulary} --num-steps 1"
    base = f"--input-dir {shlex.quote(str(gguf))} --mtp-dir {shlex.quote(str(folder))}"
    return "\n".join(
        [
            f"wrote {folder}: {CHECKPOINT_FOLDER}/, {VOCABULARY_FILE}",
            f"next: mtpjax merge-mtp {base} --output-dir {merged}",
            f'      mtpjax generate --chat --prompt "How many legs do two spiders have?" {drafts}',
            f"      mtpjax serve {drafts}",
        ]
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
