"""Tables and plots of the parts of training updates, for `mtpjax profile --train`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, colour, draw_picture, legend_below
from mtpjax.evaluation.roofline import Device
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.evaluation.update_roofline import UpdateSetting, predict_update
from mtpjax.models.config import ModelConfig
from mtpjax.models.sharding import mesh_text

Profile = Mapping[str, Any]  # JSON: a prediction, or a measurement by `mtpjax.training.update_profile`


def predict_profile(config: ModelConfig, params: Any, device: Device, setting: UpdateSetting) -> dict[str, Any]:
    """Predicts the parts of an update (`update_roofline.predict_update`) as a JSON object."""
    parts = predict_update(config, params, device, setting)
    count = math.prod(setting.sizes.values())
    profile = {
        "device_kind": device.name,
        "mesh": dict(setting.sizes),
        "dtype": "bfloat16",
        "batch_size": count * setting.rows.num_rows,
        "row_length": setting.rows.row_length,
        "trains": setting.trained.trains,
        "parts": parts,
        "update_seconds": sum(part["seconds"] for part in parts),
        "peak_flops": device.peak_flops("bfloat16"),
    }
    tokens = profile["batch_size"] * profile["row_length"]
    return {**profile, "mfu": mfu_of(profile), "tokens_per_second": tokens / profile["update_seconds"]}


def mfu_of(profile: Profile) -> float | None:
    """Returns the model FLOPs utilisation of an update, or None if its model FLOPs are unknown."""
    counts = [part["flops"] for part in profile["parts"]]
    if None in counts:
        return None
    return sum(counts) / (profile["update_seconds"] * profile["peak_flops"])


def tables(profile: Profile):
    """Yields a line that says whether measured times can be trusted, and a table of the parts, 80 columns wide."""
    from mtpjax.evaluation.tables import number_table

    is_measured, problem = "repeats" in profile, profile.get("problem")
    if is_measured:
        yield verdict([problem], profile["waited"])
    title = f"an update on {profile['device_kind']}{mark(problem)}: {profile['batch_size']} rows of "
    title += f"{profile['row_length']:,} tokens, {profile['dtype']}, trains {profile['trains']}"
    title += f", {mesh_text(profile['mesh'])}" if profile.get("mesh") else ""
    title += "" if is_measured else "; predicted, not measured"
    unit, scale = ("TFLOP", 1e12) if profile["peak_flops"] > 1e13 else ("GFLOP", 1e9)
    table = number_table(title, ("ms", "share", unit, f"{unit}/s", "MFU"), "part")
    whole = sum(part["seconds"] for part in profile["parts"])
    flops = sum(part["flops"] or 0.0 for part in profile["parts"])
    for part in (*profile["parts"], {"name": "sum", "seconds": whole, "flops": flops}):
        seconds = part["seconds"]
        table.add_row(part["name"], f"{1e3 * seconds:,.1f}", f"{seconds / whole:.0%}", *_rates(part, scale, profile))
    table.caption = f"{unit}: model FLOPs of one device; what the backward pass computes again does not count. "
    source = "the rate of a large matrix product here" if profile.get("is_peak_measured") else "the data sheet's rate"
    table.caption += f"MFU: relative to {profile['peak_flops'] / scale:.4g} {unit}/s, {source}."
    yield table


def _rates(part: Mapping[str, Any], scale: float, profile: Profile) -> tuple[str, str, str]:
    """Returns a part's model FLOPs, their rate and utilisation. A part without products has none."""
    seconds, flops = part["seconds"], part["flops"]
    if not flops:
        return "-", "-", "-"
    if not seconds:  # a difference below the noise of the timings
        return f"{flops / scale:.4g}", "-", "-"
    return f"{flops / scale:.4g}", f"{flops / seconds / scale:.4g}", f"{flops / seconds / profile['peak_flops']:.0%}"


def plot_updates(
    path, profiles: Mapping[str, Profile], formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> None:
    """Plots the parts of one or several updates as stacked bars, with each update's utilisation.

    Args:
        profiles: measured or predicted updates by name.
    """
    size = 9, 2.1 + 0.5 * len(profiles)
    draw_picture(path, size, lambda figure: _draw_updates(figure, profiles), formats, title=title)


def _draw_updates(figure, profiles: Mapping[str, Profile]) -> None:
    axis, places = figure.subplots(), range(len(profiles))
    names = list(dict.fromkeys(part["name"] for each in profiles.values() for part in each["parts"]))
    left = [0.0] * len(profiles)
    for number, name in enumerate(names):
        widths = [
            sum(1e3 * part["seconds"] for part in each["parts"] if part["name"] == name) for each in profiles.values()
        ]
        axis.barh(places, widths, 0.6, left=left, color=colour(number), label=name)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, end, each in zip(places, left, profiles.values(), strict=True):
        if (mfu := mfu_of(each)) is not None:
            axis.annotate(f"MFU {mfu:.0%}", (end, place), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(places, list(profiles))
    axis.set(xlabel="milliseconds", xlim=(0, 1.15 * max(left)), ylim=(len(profiles) - 0.5, -0.5))
    axis.grid(visible=False, axis="y")
    legend_below(axis, ncols=len(names))
