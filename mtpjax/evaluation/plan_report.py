"""Compares the meshes of a plan: tables, a picture and JSON."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtpjax.decoding.capacity import round_up_capacity
from mtpjax.evaluation import plan
from mtpjax.evaluation.plan import Plan, Round
from mtpjax.evaluation.plot_style import COLOURS, DEFAULT_FORMATS, GREY, picture, picture_paths
from mtpjax.evaluation.roofline import Device
from mtpjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, with what it needs and how long its rounds take.

    Attributes:
        plan: its memory.
        plain: a round without drafts.
        drafted: a round with drafts.
    """

    plan: Plan
    plain: Round
    drafted: Round


@dataclasses.dataclass
class Comparison:
    """The meshes of a plan.

    Attributes:
        rows: rows that were asked for.
        accept_length: assumed tokens per round, with drafts.
        candidates: the meshes that divide the model.
        excluded: the others, with the reason.
        best: the fastest of those that fit; None if none fits.
        compiled: what the compiled call of the best needs; None if it was not compiled.
    """

    rows: int
    accept_length: float
    candidates: list[Candidate]
    excluded: list[tuple[dict[str, int], str]]
    best: Candidate | None
    compiled: dict[str, float] | None = None

    def speedup(self, candidate: Candidate) -> float:
        """Returns the predicted speed-up of drafts over plain decoding."""
        return self.accept_length * candidate.plain.seconds / candidate.drafted.seconds

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Returns the predicted tokens per second of all requested rows, with drafts."""
        return self.rows * self.accept_length / candidate.drafted.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold."""
        return {
            "rows": self.rows,
            "accept_length": self.accept_length,
            "candidates": [
                dataclasses.asdict(each)
                | {
                    "temp": each.plan.temp,
                    "total": each.plan.total,
                    "speedup": self.speedup(each),
                    "is_best": each is self.best,
                }
                | {"seconds_plain": each.plain.seconds, "seconds_drafted": each.drafted.seconds}
                for each in self.candidates
            ],
            "excluded": [{"mesh": mesh, "reason": reason} for mesh, reason in self.excluded],
            "compiled": self.compiled,
        }


def compare_meshes(
    config: ModelConfig,
    params: dict,
    device: Device,
    meshes: Sequence[Mapping[str, int]],
    *,
    rows: int,
    context: int,
    num_steps: int,
    accept_length: float,
    prefill_chunk: int | None = None,
) -> Comparison:
    """Plans a model on several meshes.

    Args:
        config: the model's config.
        params: shapes of its parameters.
        device: the GPU.
        meshes: sizes of the axes of each.
        rows: rows of the batch.
        context: tokens of a row, prompt and new ones.
        num_steps: draft levels.
        accept_length: assumed tokens per round.
        prefill_chunk: as in `mtpjax.evaluation.plan.plan_layout`.

    Returns:
        The comparison.

    Raises:
        ValueError: a number is out of range, or a single mesh does not divide the model.
    """
    candidates, excluded = [], []
    # A call's caches hold the longest row and what a round writes behind it, rounded up.
    slots = round_up_capacity(context + num_steps + 2)
    for sizes in meshes:
        try:
            layout = plan.plan_layout(
                config, params, sizes, rows=rows, slots=slots, num_steps=num_steps, prefill_chunk=prefill_chunk
            )
        except ValueError as error:
            # Leave out only meshes that do not divide the model. Other errors hold for every mesh.
            if len(meshes) == 1 or "does not divide" not in str(error):
                raise
            excluded.append((dict(sizes), str(error)))
            continue
        estimate = [
            plan.estimate_round(config, params, device, sizes, rows=layout.rows, context=context, num_steps=steps)
            for steps in (0, num_steps)
        ]
        candidates.append(Candidate(layout, *estimate))
    fitting = [each for each in candidates if each.plan.free(device) >= 0]
    best = min(fitting, key=lambda each: each.drafted.seconds, default=None)
    return Comparison(rows, accept_length, candidates, excluded, best)


def describe(result: Comparison, device: Device, count: int) -> Iterator[Any]:
    """Describes a comparison.

    Args:
        result: the comparison.
        device: the GPU.
        count: GPUs.

    Yields:
        Tables and lines to print.
    """
    from mtpjax.console import narrow_table

    if result.candidates:
        # 1. Memory: weights and state by arithmetic, temporary memory by estimate, and the largest sizes that fit.
        first = result.candidates[0].plan
        memory = narrow_table(f"{device.name} x {count}: GB per GPU, {result.rows} rows of {first.slots} slots")
        memory.caption = "weights and state: arithmetic. temp: estimated, with prefill passes of "
        memory.caption += (
            f"{first.prefill_chunk} tokens. fits: {plan.USABLE_SHARE:.0%} of {device.memory / 1e9:.0f} GB. "
        )
        memory.caption += "batch, context: the largest that fit, the other unchanged."
        for heading in ("mesh", "weights", "state", "temp", "total", "fits", "batch", "context"):
            memory.add_column(heading, justify="right")
        for each in result.candidates:
            sizes = (each.plan.weights, each.plan.state, each.plan.temp, each.plan.total)
            fits = "yes" if each.plan.free(device) >= 0 else "no"
            most = (each.plan.largest_batch(device), each.plan.largest_context(device))
            style = "bold" if each is result.best else ""
            memory.add_row(
                mesh_text(each.plan.mesh),
                *(f"{size / 1e9:.2f}" for size in sizes),
                fits,
                *(f"{number:,}" for number in most),
                style=style,
            )
        yield memory
        # 2. Time: the parts of a round with drafts, the round without drafts, and the speed-up.
        times = narrow_table("a round, estimated: milliseconds")
        steps = result.candidates[0].drafted.num_steps
        times.caption = (
            f"mesh: data x tensor. dense to drafts: with {steps} draft levels. plain: without. gain: speed-up "
        )
        times.caption += f"at {result.accept_length:.2f} tokens per round. tok/s: of all rows."
        parts = ("dense", "experts", "cache", "MTP", "launch", "links")
        for heading in ("mesh", *parts, "drafts", "plain", "gain", "tok/s"):
            times.add_column(heading, justify="right")
        for each in result.candidates:
            seconds = {
                part.name: time for part, time in zip(each.drafted.parts, each.drafted.seconds_of_parts, strict=True)
            }
            # The head counts as dense weights.
            seconds["weights"] += seconds.pop("head")
            shown = [seconds.get(name, 0.0) for name in ("weights", "experts", "cache", "MTP modules")]
            shown += [each.drafted.seconds_of_launches, sum(travel.seconds for travel in each.drafted.collectives)]
            shown += [each.drafted.seconds, each.plain.seconds]
            sizes = each.plan.mesh
            times.add_row(
                " x ".join(str(size) for size in sizes.values()) if len(sizes) == 2 else mesh_text(sizes),
                *(f"{1e3 * time:.2f}" for time in shown),
                f"{result.speedup(each):.2f}",
                f"{result.tokens_per_second(each):,.0f}",
                style="bold" if each is result.best else "",
            )
        yield times
    # 3. The meshes that do not divide the model, and the advice.
    for mesh, reason in result.excluded:
        yield f"{mesh_text(mesh)}: {reason}"
    if result.best is None:
        yield f"nothing fits {count} {device.name}: use more GPUs, fp8 weights, or a smaller batch or context"
    else:
        best = result.best.plan
        name = mesh_text(best.mesh)
        yield f"fastest that fits: {name}, {best.total / 1e9:.1f} of {device.memory / 1e9:.0f} GB per GPU"


def compiled_line(result: Comparison) -> str:
    """Describes the compiled call beside its plan."""
    assert result.best is not None and result.compiled is not None
    best, found = result.best.plan, result.compiled
    total = found["arguments"] + found["temp"]
    return (
        f"compiled for {mesh_text(best.mesh)}: arguments {found['arguments'] / 1e9:.3f} GB (planned "
        f"{best.arguments / 1e9:.3f}), temp {found['temp'] / 1e9:.3f} ({best.temp / 1e9:.3f}), total {total / 1e9:.2f} "
        f"({best.total / 1e9:.2f}); {found['collectives']:.0f} collectives, {found['cpu_seconds']:.0f} CPU s"
    )


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Formats a mesh, such as "data 8 tensor 8"."""
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def train_rows(config: ModelConfig, params: dict, device: Device, *, count: int, trains: str) -> list[dict[str, Any]]:
    """Computes the bytes of training on every mesh `fsdp x expert`.

    Args:
        config: the model's config.
        params: shapes of its parameters as they are stored.
        device: the GPU.
        count: GPUs.
        trains: "all" or "modules".

    Returns:
        A row per mesh, as JSON can hold it.
    """
    rows = []
    for expert in (size for size in range(1, count + 1) if count % size == 0):
        if expert > 1 and (not config.n_routed_experts or config.n_routed_experts % expert):
            continue
        mesh = {"fsdp": count // expert, "expert": expert}
        nbytes = plan.train_bytes(params, mesh, trains=trains)
        rows.append({"mesh": mesh, "bytes": nbytes, "fits": nbytes < plan.USABLE_SHARE * device.memory})
    return rows


def train_table(rows: Sequence[Mapping[str, Any]], device: Device, count: int):
    """Returns the rows of `train_rows` as a table to print."""
    from mtpjax.console import narrow_table

    table = narrow_table(f"{device.name} x {count}: training, GB per GPU")
    table.caption = "parameters and AdamW's moments: arithmetic. Gradients and activations come on top: "
    table.caption += "docs/guides/meshes.md has compiled figures."
    for heading in ("mesh", "arguments", "left"):
        table.add_column(heading, justify="right")
    for row in rows:
        left = plan.USABLE_SHARE * device.memory - row["bytes"]
        table.add_row(
            mesh_text(row["mesh"]), f"{row['bytes'] / 1e9:.2f}", f"{left / 1e9:.1f}" if left > 0 else "no room"
        )
    return table


def draw(path, result: Comparison, device: Device, formats: Sequence[str] = DEFAULT_FORMATS) -> None:
    """Draws memory and time of every mesh.

    Args:
        path: the picture, as in `plot_style.picture_paths`.
        result: the comparison.
        device: the GPU.
        formats: formats of a path without suffix.
    """
    if not result.candidates or not picture_paths(path, formats):
        return
    names = [mesh_text(each.plan.mesh) + (" *" if each is result.best else "") for each in result.candidates]
    places = range(len(names))
    with picture(path, (10, 1.2 + 0.35 * len(names)), formats) as figure:
        memory, time = figure.subplots(1, 2)
        # Left: bytes per device, stacked; the lines are the device's memory and its usable share.
        left = [0.0] * len(names)
        for number, part in enumerate(("weights", "state", "temp")):
            widths = [getattr(each.plan, part) / 1e9 for each in result.candidates]
            memory.barh(places, widths, left=left, color=COLOURS[number], label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        memory.axvline(device.memory / 1e9, color="black", linewidth=0.8)
        memory.axvline(plan.USABLE_SHARE * device.memory / 1e9, color=GREY, linewidth=0.8, linestyle="--")
        memory.set(
            yticks=places, yticklabels=names, xlabel=f"GB per {device.name}", title="memory (* fastest that fits)"
        )
        memory.invert_yaxis()
        memory.legend()
        # Right: time per token of a row, without drafts and with them.
        height = 0.38
        for offset, kind, colour in ((-height / 2, "plain", GREY), (height / 2, "drafted", COLOURS[0])):
            per_token = [
                1e3 * getattr(each, kind).seconds / (1 if kind == "plain" else result.accept_length)
                for each in result.candidates
            ]
            time.barh([place + offset for place in places], per_token, height, color=colour, label=kind)
        time.set(yticks=places, yticklabels=[], xlabel="milliseconds per token of a row, estimated", title="time")
        time.invert_yaxis()
        time.legend()
