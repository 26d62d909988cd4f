"""Compares the meshes in a plan, as tables and JSON."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mtpjax.decoding.capacity import round_down_capacity, round_up_capacity
from mtpjax.evaluation import plan
from mtpjax.evaluation.plan import Plan
from mtpjax.evaluation.plan_rounds import estimate_round
from mtpjax.evaluation.roofline import Device, Round
from mtpjax.messages import count_of
from mtpjax.models.config import ModelConfig
from mtpjax.models.sharding import mesh_text


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, with the memory it needs and the time of its rounds.

    Attributes:
        plan: the mesh and its memory.
        plain: a round without drafts.
        drafted: a round with drafts.
    """

    plan: Plan
    plain: Round
    drafted: Round


@dataclasses.dataclass(frozen=True)
class Load:
    """The workload to plan for.

    Attributes:
        rows: rows in the batch.
        context: tokens per row, including prompt and new tokens.
        num_steps: draft levels.
        accept_length: assumed number of tokens per round with drafts.
        prefill_chunk: as in `mtpjax.evaluation.compiled_call`.
    """

    rows: int
    context: int
    num_steps: int
    accept_length: float
    prefill_chunk: int | None = None

    @property
    def num_scratch_slots(self) -> int:
        """Number of slots that a chain's round writes after a row's text; the round verifies one token fewer."""
        return self.num_steps + 2

    @property
    def drafts_text(self) -> str:
        """The number of draft levels in words."""
        if not self.num_steps:
            return "without drafts"
        return f"with {count_of(self.num_steps, 'draft level')}"


@dataclasses.dataclass
class Comparison:
    """The meshes in a plan.

    Attributes:
        load: the planned workload.
        candidates: the meshes that divide the model.
        excluded: the other meshes, with the reasons why they are excluded.
        best: the fastest candidate that fits; None if none fits.
        compiled: memory, collectives and CPU time of the compiled call for the best mesh; None if it was not compiled.
    """

    load: Load
    candidates: list[Candidate]
    excluded: list[tuple[dict[str, int], str]]
    best: Candidate | None
    compiled: dict[str, float] | None = None

    def speedup(self, candidate: Candidate) -> float:
        """Returns the predicted speed-up of decoding with drafts over plain decoding."""
        return self.load.accept_length * candidate.plain.seconds / candidate.drafted.seconds

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Returns the predicted tokens per second with drafts, summed over all requested rows."""
        return self.load.rows * self.load.accept_length / candidate.drafted.seconds

    def longest_context(self, candidate: Candidate, device: Device) -> int:
        """Returns the maximum number of tokens per row that fit with this batch size."""
        return max(0, round_down_capacity(candidate.plan.largest_slots(device)) - self.load.num_scratch_slots)

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self.load).items() if name != "prefill_chunk"},
            "candidates": [
                dataclasses.asdict(each)
                | {"temp": each.plan.temp, "total": each.plan.total, "speedup": self.speedup(each)}
                | {"is_best": each is self.best}
                | {"seconds_plain": each.plain.seconds, "seconds_drafted": each.drafted.seconds}
                for each in self.candidates
            ],
            "excluded": [{"mesh": mesh, "reason": reason} for mesh, reason in self.excluded],
            "compiled": self.compiled,
        }


def compare_meshes(
    config: ModelConfig, params: dict, device: Device, meshes: Sequence[Mapping[str, int]], load: Load
) -> Comparison:
    """Plans a model on several meshes; `params` are shapes.

    Raises:
        ValueError: a number is out of range, or there is only one mesh and it does not divide the model.
    """
    candidates, excluded = [], []
    # A cache row holds the longest text and the slots that the last round writes after it. Round the sum up.
    slots = round_up_capacity(load.context + load.num_scratch_slots)
    shape = {"rows": load.rows, "slots": slots, "num_steps": load.num_steps, "prefill_chunk": load.prefill_chunk}
    for sizes in meshes:
        try:
            layout = plan.plan_layout(config, params, sizes, **shape)
        except ValueError as error:
            # Leave out only meshes that do not divide the model. Other errors apply to every mesh.
            if len(meshes) == 1 or "does not divide" not in str(error):
                raise
            excluded.append((dict(sizes), str(error)))
            continue
        # Estimate a round without drafts as well, to compute the speed-up.
        estimate = [
            estimate_round(config, params, device, sizes, rows=layout.rows, context=load.context, num_steps=steps)
            for steps in (0, load.num_steps)
        ]
        candidates.append(Candidate(layout, *estimate))
    # Of the meshes that fit, choose the one whose rounds with drafts are fastest.
    fitting = [each for each in candidates if each.plan.free(device) >= 0]
    best = min(fitting, key=lambda each: each.drafted.seconds, default=None)
    return Comparison(load, candidates, excluded, best)


def describe(result: Comparison, device: Device, count: int) -> Iterator[Any]:
    """Yields tables and lines, 80 columns wide, that describe a comparison for `count` GPUs."""
    if result.candidates:
        yield _memory_table(result, device, count)
        yield _parts_table(result)
        yield _speed_table(result)
    # Then list the meshes that do not divide the model, and give advice.
    for mesh, reason in result.excluded:
        yield f"{mesh_text(mesh)}: {reason}"
    if result.best is None:
        yield f"no mesh of {count} {device.name} fits: use more GPUs, fp8 weights, or a smaller batch or context"
    else:
        best = result.best.plan
        name = mesh_text(best.mesh)
        yield f"fastest that fits: {name}, {best.total / 1e9:.1f} of {device.memory / 1e9:.0f} GB per GPU"


def _mesh_table(result: Comparison, title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]):
    """Makes a table with one line per mesh, with the best mesh in bold."""
    from mtpjax.evaluation.tables import number_table

    table = number_table(title, headings, "mesh")
    for each, cells in zip(result.candidates, lines, strict=True):
        table.add_row(mesh_text(each.plan.mesh), *cells, style="bold" if each is result.best else "")
    return table


def _memory_table(result: Comparison, device: Device, count: int):
    """Makes the table of exact weights and state, estimated temporary memory, and the largest sizes that fit."""
    first = result.candidates[0].plan
    headings = ("weights", "state", "temp", "total", "fits", "largest\nbatch", "longest\ncontext")
    lines = []
    for each in result.candidates:
        own = each.plan
        sizes = [f"{size / 1e9:.2f}" for size in (own.weights, own.state, own.temp, own.total)]
        largest = (own.largest_batch(device), result.longest_context(each, device))
        lines.append((*sizes, "yes" if own.free(device) >= 0 else "no", *(f"{number:,}" for number in largest)))
    title = f"memory, GB per GPU: {device.name} x {count}, {result.load.rows} rows of {result.load.context} tokens"
    table = _mesh_table(result, title, headings, lines)
    reserved = first.slots - result.load.context
    table.caption = (
        f"A row has {first.slots} cache slots, {result.load.context} for its tokens and {reserved} for the drafts in "
        "its last round and for rounding up, as in decoding. weights, state: exact. temp: "
        f"estimated, for prefill passes of {first.prefill_chunk} tokens. fits: in {plan.USABLE_SHARE:.0%} of "
        f"{device.memory / 1e9:.0f} GB. batch, context: the largest that fits if the other is unchanged."
    )
    return table


def _parts_table(result: Comparison):
    """Makes the table of the time that each part of a round with drafts takes."""
    headings = ("dense", "experts", "cache", "MTP", "launches", "links", "sum")
    lines = []
    for each in result.candidates:
        own = each.drafted
        shown = [own.seconds_by_column.get(name, 0.0) for name in ("weights", "experts", "cache", "MTP modules")]
        shown += [own.seconds_of_launches, own.seconds_of_collectives, own.seconds]
        lines.append([_milliseconds(time) for time in shown])
    return _mesh_table(result, f"a round {result.load.drafts_text}, estimated milliseconds", headings, lines)


def _speed_table(result: Comparison):
    """Makes the table of round times with and without drafts, and of speed-ups at the assumed accept length."""
    headings = ["round, ms:\nplain"]
    if result.load.num_steps:
        headings += ["with\ndrafts", "speed-up,\nassumed"]
    lines = []
    for each in result.candidates:
        cells = [_milliseconds(each.plain.seconds)]
        if result.load.num_steps:
            cells += [_milliseconds(each.drafted.seconds), f"{result.speedup(each):.2f}"]
        lines.append((*cells, f"{result.tokens_per_second(each):,.0f}"))
    title = "speed, estimated"
    title += f", if a round yields {result.load.accept_length:.2f} tokens (assumed)" * bool(result.load.num_steps)
    return _mesh_table(result, title, (*headings, "tokens/s,\nall rows"), lines)


def _milliseconds(seconds: float) -> str:
    """Formats a time in milliseconds with about four digits, so that columns stay narrow."""
    return f"{1e3 * seconds:.{2 if seconds < 0.1 else 1 if seconds < 1 else 0}f}"


def compiled_line(result: Comparison) -> str:
    """Returns a line that compares the compiled call with the plan."""
    assert result.best is not None and result.compiled is not None
    best, found = result.best.plan, result.compiled
    total = found["arguments"] + found["temp"]
    return (
        f"compiled for {mesh_text(best.mesh)}: arguments {found['arguments'] / 1e9:.3f} GB (planned "
        f"{best.arguments / 1e9:.3f}), temp {found['temp'] / 1e9:.3f} ({best.temp / 1e9:.3f}), total {total / 1e9:.2f} "
        f"({best.total / 1e9:.2f}); {found['collectives']:.0f} collectives, {found['cpu_seconds']:.0f} CPU s"
    )


def train_rows(
    config: ModelConfig, params: dict, device: Device, *, count: int, trains: str, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Computes the bytes per device that training needs, as one JSON object per mesh.

    Args:
        sizes: the mesh of `count` devices; {}: each `fsdp x expert` mesh.
    """
    experts = [size for size in range(1, count + 1) if count % size == 0 and config.n_routed_experts % size == 0]
    meshes = [{"fsdp": count // size, "expert": size} for size in (experts if config.n_routed_experts else [1])]
    rows = []
    for mesh in [dict(sizes)] if sizes else meshes:
        nbytes = plan.train_bytes(params, mesh, trains=trains)
        rows.append({"mesh": mesh, "bytes": nbytes, "fits": nbytes < plan.USABLE_SHARE * device.memory})
    return rows


def train_table(rows: Sequence[Mapping[str, Any]], device: Device, count: int):
    """Returns the rows of `train_rows` as a table to print."""
    from mtpjax.evaluation.tables import number_table

    table = number_table(f"{device.name} x {count}: training, GB per GPU", ("mesh", "arguments", "left"))
    table.caption = "arguments: parameters and AdamW's moments, exact. Gradients and activations are not included: "
    table.caption += "docs/results/meshes.md lists the memory of compiled updates."
    for row in rows:
        left = plan.USABLE_SHARE * device.memory - row["bytes"]
        cells = f"{row['bytes'] / 1e9:.2f}", f"{left / 1e9:.1f}" if left > 0 else "no room"
        table.add_row(mesh_text(row["mesh"]), *cells)
    return table
