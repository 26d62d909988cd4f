"""Computes the acceptance panel, which shows how often a model's drafts would be accepted on held-out text."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.console import narrow_table, print_parts
from mtpjax.data.packing import Batch
from mtpjax.drafters.forward import forward_with_drafter
from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.evaluation.trust import mark, verdict
from mtpjax.models.forward import forward, shift_left
from mtpjax.models.model import MTPModel
from mtpjax.training.losses import all_targets, valid_mean
from mtpjax.training.position_losses import plain_terms

KIND_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}  # kind -> temperature
# Maps fields of `DecodedMetrics` to their keys in `metrics.jsonl`.
JSON_KEYS = {"accept_length": "real", "accept_length_low": "real_low", "accept_length_high": "real_high"}


@dataclasses.dataclass(frozen=True)
class DecodedMetrics:
    """Metrics of one category of held-out prompts at one temperature. Accept lengths include the bonus token.

    Attributes:
        prompts: number of prompts.
        looping: number of texts that repeat themselves (`is_looping`).
        accept_length: accept length measured by decoding.
        accept_length_low: lower end of its 95 % interval over prompts.
        accept_length_high: upper end of the interval.
        predicted: accept length predicted along the trunk's plain text (`mtpjax.evaluation.predict`).
        teacher_forced: `1 + sum of survival` over all positions of that text, even where decoding would not draft.
        survival: per draft level, fraction of decoding rounds that accepted it.
        agreement: per draft level, fraction of positions where its arg-max equals the trunk's.
        overlap: per draft level, mean of `1 - TV(p, q)` over positions.
        speed_up: ideal speed-up at batch 1, from `accept_length` and the measured costs of a round's passes; None: not
            measured.
        speed_up_low: lower end of the speed-up's 95 % interval over prompts and timings.
        speed_up_high: upper end of the interval.
        waited: fraction of the timed duration that threads spent waiting for a CPU core.
        problem: why the speed-up cannot be trusted (`mtpjax.evaluation.trust`); None: it can be trusted.
    """

    prompts: int
    looping: int
    accept_length: float
    accept_length_low: float
    accept_length_high: float
    predicted: float
    teacher_forced: float
    survival: tuple[float, ...]
    agreement: tuple[float, ...]
    overlap: tuple[float, ...]
    speed_up: float | None = None
    speed_up_low: float | None = None
    speed_up_high: float | None = None
    waited: float | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """Teacher-forced acceptance metrics on held-out rows, over all positions; index k-1 is draft level k.

    In decoding, rounds start at other positions (after the last rejection, in generated text), so decoded accept
    lengths differ from these estimates; `decoded` holds the acceptance measured by decoding.

    Attributes:
        bits_per_token: cross-entropy against the data, for the trunk and then for each level.
        agreement: fraction of positions where level k's arg-max equals the trunk's.
        survival: fraction of positions where the arg-max of every level 1..k equals the trunk's.
        overlap: mean of `1 - TV(p, q)`, the acceptance rate of the rule "token" at temperature 1.
        sampled_survival: mean of the product of the overlaps of levels 1..k.
        decoded: metrics of decoded prompts by category and kind ("greedy", "sampled"); empty if not measured.

    Example:
        >>> from mtpjax.training import Panel
        >>> panel = Panel((2.0, 2.5), agreement=(0.8,), survival=(0.8,), overlap=(0.7,), sampled_survival=(0.7,))
        >>> panel.accept_length
        1.8
    """

    bits_per_token: tuple[float, ...]
    agreement: tuple[float, ...]
    survival: tuple[float, ...]
    overlap: tuple[float, ...]
    sampled_survival: tuple[float, ...]
    decoded: Mapping[str, Mapping[str, DecodedMetrics]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the panel as `metrics.jsonl` and checkpoints store it, with decoded accept lengths called "real"."""
        panel = dataclasses.asdict(self)
        for row in (row for kinds in panel["decoded"].values() for row in kinds.values()):
            row |= {key: row.pop(name) for name, key in JSON_KEYS.items()}
        return panel

    @property
    def accept_length(self) -> float:
        """Accept length at temperature 0, estimated as `1 + sum of survival`."""
        return 1 + sum(self.survival)

    @property
    def sampled_accept_length(self) -> float:
        """Accept length at temperature 1 under the rule "token", estimated as `1 + sum of sampled survival`."""
        return 1 + sum(self.sampled_survival)


def acceptance_panel(
    params: dict, batch: Batch, *, model: MTPModel, num_depths: int, drafter: TrainedDrafter | None = None
) -> Panel:
    """Computes the teacher-forced metrics of the panel. Recycled levels attend as in decoding (`ttt`).

    Args:
        params: parameters of `model`.
        batch: packed held-out rows `[B, T]`.
        model: the model.
        num_depths: draft levels.
        drafter: the separate drafter; None: MTP modules. If it cannot draft all tokens, the bits of its levels are
            means over the targets that it can draft.

    Returns:
        The panel, without decoded metrics.

    Example:
        >>> import jax, numpy as np
        >>> from mtpjax import MTPModel, init_params, presets
        >>> from mtpjax.training import Batch, acceptance_panel
        >>> model = MTPModel(presets["tiny"])
        >>> tokens = np.arange(16, dtype=np.int32)[None]
        >>> batch = Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
        >>> params = init_params(model, jax.random.key(0))
        >>> panel = acceptance_panel(params, batch, model=model, num_depths=2)
        >>> len(panel.agreement)
        2
    """
    metrics = _panel_metrics(params, batch, model=model, num_depths=num_depths, drafter=drafter)
    losses, *rates = jax.device_get(metrics)
    bits, agreement, survival, overlap, products = (tuple(row.tolist()) for row in (losses / np.log(2), *rates))
    return Panel(bits, agreement, survival, overlap, products)


@functools.partial(jax.jit, static_argnames=("model", "num_depths", "drafter"))
def _panel_metrics(params, batch: Batch, *, model: MTPModel, num_depths: int, drafter: TrainedDrafter | None):
    # One teacher-forced pass gives the trunk's and the drafts' logits at every position.
    tokens, segment_ids, loss_mask = (jnp.asarray(array) for array in batch)
    if drafter is None:
        output = forward(params, tokens, model=model, segment_ids=segment_ids, num_depths=num_depths)
    else:
        output = forward_with_drafter(params, tokens, segment_ids, model=model, num_depths=num_depths, drafter=drafter)
    targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
    terms = plain_terms((output.logits, *output.mtp_logits), targets)
    # Draft level k at position i predicts t[i+k+1], which the trunk predicts at position i+k.
    choices = jnp.argmax(output.logits, axis=-1)
    agrees = [
        jnp.argmax(logits, axis=-1) == shift_left(choices, depth)
        for depth, logits in enumerate(output.mtp_logits, start=1)
    ]
    agrees = jnp.stack(agrees).astype(jnp.float32) if agrees else terms.overlap
    # A draft survives only if all levels before it do, so survival is a product over levels. All rates are means over
    # the positions that have a valid target at that level.
    rates = (agrees, jnp.cumprod(agrees, axis=0), terms.overlap, jnp.cumprod(terms.overlap, axis=0))
    is_draftable = is_valid if drafter is None else is_valid & jnp.isfinite(terms.cross_entropy)
    return valid_mean(terms.cross_entropy, is_draftable), *(valid_mean(rate, is_valid[1:]) for rate in rates)


def print_panel(console, panel: Panel) -> None:
    """Prints the panel as tables at most 80 columns wide.

    They show rates by level, then accept lengths and the speed-up by category and temperature.
    """
    rates = narrow_table("acceptance panel, held-out text: teacher-forced at all positions; decoded")
    headings = ("level", "bits/\ntoken", "agreement\nwith trunk", "survival", "1 - TV", "sampled\nsurvival")
    overall = panel.decoded.get("overall", {})
    for heading in (*headings, *(f"decoded,\n{kind}" for kind in overall)):
        rates.add_column(heading, justify="right")
    # Add a row for the trunk's loss, then one per level with its teacher-forced and decoded rates.
    rates.add_row("trunk", f"{panel.bits_per_token[0]:.2f}")
    columns = (panel.agreement, panel.survival, panel.overlap, panel.sampled_survival)
    columns += tuple(row.survival for row in overall.values())
    for level, (bits, *shares) in enumerate(zip(panel.bits_per_token[1:], *columns, strict=True), 1):
        rates.add_row(str(level), f"{bits:.2f}", *(f"{share:.3f}" for share in shares))
    # The last row has the accept lengths, each under the column of survival rates that it is computed from.
    if panel.agreement:
        lengths = (panel.accept_length, panel.sampled_accept_length, *(row.accept_length for row in overall.values()))
        greedy, sampled, *decoded = (f"{length:.2f}" for length in lengths)
        rates.add_row("1 + sum", "", "", greedy, "", sampled, *decoded)
    console.print(rates)
    if panel.decoded:
        console.print(_lengths_table(panel.decoded))
        timed = [row for kinds in panel.decoded.values() for row in kinds.values() if row.speed_up is not None]
        if timed:
            line = verdict([row.problem for row in timed], max(row.waited or 0.0 for row in timed))
            print_parts(console, [line, _speed_up_table(panel.decoded)])


def _lengths_table(decoded: Mapping[str, Mapping[str, DecodedMetrics]]):
    headings = ("T", "prompts", "loop-\ning", "decoded (95 %)", "pre-\ndicted", "teacher-\nforced")
    table = _category_table(
        "accept length at temperature T on held-out prompts: decoded;\n"
        "predicted at decoding's anchors along the trunk's plain text;\n"
        "teacher-forced over all positions of that text",
        headings,
    )
    for names, row in _category_rows(decoded):
        low, high = row.accept_length_low, row.accept_length_high
        lengths = (f"{row.accept_length:.2f} {low:.2f}-{high:.2f}", f"{row.predicted:.2f}", f"{row.teacher_forced:.2f}")
        table.add_row(*names, str(row.prompts), str(row.looping), *lengths)
    return table


def _speed_up_table(decoded: Mapping[str, Mapping[str, DecodedMetrics]]):
    title = "ideal speed-up over plain decoding at batch 1,\nfrom the measured costs of a round"
    table = _category_table(title, ("T", "accept\nlength", "speed-up (95 %)"))
    # The last column explains why a measurement cannot be trusted.
    table.add_column("problem")
    for names, row in _category_rows(decoded):
        if row.speed_up is not None:
            speed_up = f"{row.speed_up:.2f} {row.speed_up_low:.2f}-{row.speed_up_high:.2f}{mark(row.problem)}"
            table.add_row(*names, f"{row.accept_length:.2f}", speed_up, row.problem or "")
    return table


def _category_table(title: str, headings: Sequence[str]):
    table = narrow_table(title)
    table.add_column("category", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _category_rows(
    decoded: Mapping[str, Mapping[str, DecodedMetrics]],
) -> Iterator[tuple[tuple[str, str], DecodedMetrics]]:
    """Yields category, temperature and metrics for each row. Only the first row of a category has its name."""
    for category, kinds in decoded.items():
        for number, (kind, row) in enumerate(kinds.items()):
            yield ("" if number else category, f"{KIND_TEMPERATURES[kind]:g}"), row
