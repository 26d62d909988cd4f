"""Makes tables of predicted rounds, for `mtpjax profile --predict`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mtpjax.evaluation.roofline import DEVICES, Round, count_launches, predict_round, tokens_per_round, weights_of
from mtpjax.models.config import ModelConfig

HEADINGS = ("rows", "levels", "GB", "dense", "experts", "cache", "MTP", "launch", "round", "token", "gain")


def tables(
    config: ModelConfig,
    *,
    devices: Sequence[str],
    batches: Sequence[int],
    num_steps: int,
    acceptance_rate: float,
    context: int,
    weight_bytes: float,
    num_devices: int,
) -> tuple[list[dict[str, Any]], list]:
    """Predicts plain and speculative rounds for several devices and batch sizes.

    Rounds with 0..num_steps draft levels are predicted. Each level is accepted with probability `acceptance_rate`, if
    all levels before it are accepted. The other arguments are as in `predict_round`.

    Returns:
        The predictions as JSON values, and tables to print.

    Raises:
        ValueError: a device is unknown, or a number is out of range.
    """
    from mtpjax.evaluation.tables import number_table

    unknown = [name for name in devices if name not in DEVICES]
    if unknown:
        raise ValueError(f"device {unknown[0]!r} is not one of {', '.join(DEVICES)}")
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"the assumed acceptance rate must be within 0..1, got {acceptance_rate}")
    settings: dict[str, Any] = {"context": context, "weight_bytes": weight_bytes, "num_devices": num_devices}
    needed = weights_of(config, weight_bytes=weight_bytes)
    rows, printed = [], []
    for device in (DEVICES[name] for name in devices):
        # Make a table per device; its title says if the weights do not fit into the memory.
        title = f"{device.name} x {num_devices}: predicted, not measured; microseconds, context {context}"
        title += f" (the weights, {needed / 1e9:.0f} GB, do not fit)" * (needed > num_devices * device.memory)
        table = number_table(title, HEADINGS)
        table.caption = _caption(config, num_steps, acceptance_rate)
        # Depth 0 comes first, because speed-ups are relative to plain decoding at the same batch size.
        for batch in batches:
            plain = None
            for steps in range(num_steps + 1):
                found = predict_round(config, device, batch=batch, num_steps=steps, **settings)
                plain = found.seconds if plain is None else plain
                tokens = tokens_per_round(acceptance_rate, steps)
                setting = {"device": device.name, "num_devices": num_devices, "batch": batch, "num_steps": steps}
                row = _to_json(found, tokens, tokens * plain / found.seconds)
                rows.append(setting | row)
                table.add_row(str(batch), str(steps), *_cells(found, row))
        printed.append(table)
    return rows, printed


def _caption(config: ModelConfig, num_steps: int, acceptance_rate: float) -> str:
    launches = count_launches(config, 0)
    caption = "GB: bytes that a round reads at least once. dense: weights outside experts. "
    caption += "token: time per token of a row. gain: speed-up over plain decoding. "
    if num_steps:
        caption += f"Both assume that a draft level is accepted with probability {acceptance_rate:g}. "
    caption += f"A round launches {launches} kernels"
    if num_steps:
        caption += f", and {count_launches(config, 1) - launches} more for each draft level"
    return caption + "."


def _to_json(found: Round, tokens: float, speedup: float) -> dict[str, Any]:
    return {
        "bytes": sum(part.nbytes for part in found.parts),
        "seconds_per_token": found.seconds / tokens,
        "parts": [dataclasses.asdict(part) for part in found.parts],
        "seconds_of_parts": found.seconds_by_part,
        "launches": found.launches,
        "seconds_of_launches": found.seconds_of_launches,
        "seconds": found.seconds,
        "limit": found.limit,
        "speedup": speedup,
    }


def _cells(found: Round, row: dict[str, Any]) -> list[str]:
    seconds = found.seconds_by_column
    names = ("weights", "experts", "cache", "MTP modules")
    parts = (f"{1e6 * seconds[name]:.0f}" if name in seconds else "-" for name in names)
    times = (f"{1e6 * row[name]:.0f}" for name in ("seconds_of_launches", "seconds", "seconds_per_token"))
    return [f"{row['bytes'] / 1e9:.1f}", *parts, *times, f"{row['speedup']:.2f}"]
