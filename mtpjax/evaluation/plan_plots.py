"""Plots a plan's memory and time for every mesh."""

from collections.abc import Sequence

from mtpjax.evaluation import plan
from mtpjax.evaluation.plan_report import Comparison
from mtpjax.evaluation.plot_style import DEFAULT_FORMATS, GREY, colour, draw_picture, legend_below
from mtpjax.evaluation.roofline import Device
from mtpjax.models.sharding import mesh_text


def plot_plan(
    path, result: Comparison, device: Device, formats: Sequence[str] = DEFAULT_FORMATS, *, title: str = ""
) -> None:
    """Plots memory and time for every mesh in a plan; draws nothing if no mesh divides the model."""
    if result.candidates:
        size = 9, 2.2 + 0.4 * len(result.candidates)
        draw_picture(path, size, lambda figure: _draw_plan(figure, result, device), formats, title=title)


def _draw_plan(figure, result: Comparison, device: Device) -> None:
    memory, time = figure.subplots(1, 2, sharey=True)
    places = range(len(result.candidates))
    # The left panel stacks the bytes per GPU, and marks the GPU's memory and its usable share.
    parts = {"weights": "weights", "state": "caches and state", "temp": "temporary (estimated)"}
    keys, left = [], [0.0] * len(places)
    for number, (part, name) in enumerate(parts.items()):
        widths = [getattr(each.plan, part) / 1e9 for each in result.candidates]
        keys.append(memory.barh(places, widths, 0.7, left=left, color=colour(number), label=name))
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    size, usable = device.memory / 1e9, plan.USABLE_SHARE * device.memory / 1e9
    usable_name = f"usable: {usable:.0f} GB ({plan.USABLE_SHARE:.0%})"
    keys.append(memory.axvline(usable, color="black", linestyle="--", label=usable_name))
    keys.append(memory.axvline(size, color="black", label=f"{device.name}: {size:.0f} GB"))
    names = [mesh_text(each.plan.mesh) + " *" * (each is result.best) for each in result.candidates]
    memory.set_yticks(places, names)
    best = " (* fastest that fits)" if result.best else " (no mesh fits)"
    memory.set(title=f"memory{best}", xlabel="GB per GPU", ylim=(len(places) - 0.5, -0.5))
    # The right panel shows the time per token of a row, with and without drafts.
    kinds = {"without drafts": ("plain", 1.0, GREY)}
    if result.load.num_steps:
        name = f"{result.load.drafts_text}, {result.load.accept_length:.2f} tokens per round assumed"
        kinds[name] = ("drafted", result.load.accept_length, colour(-1))
    height = 0.7 / len(kinds)
    for number, (name, (kind, tokens, own)) in enumerate(kinds.items()):
        values = [1e3 * getattr(each, kind).seconds / tokens for each in result.candidates]
        offset = (number - (len(kinds) - 1) / 2) * height
        time.barh([place + offset for place in places], values, height, color=own, label=name)
    time.set(title="time (estimated)", xlabel="milliseconds per token of a row")
    for axis in (memory, time):
        axis.grid(visible=False, axis="y")
    legend_below(memory, handles=keys, ncols=2)
    legend_below(time)
