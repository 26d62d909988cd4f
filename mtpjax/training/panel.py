"""The acceptance panel: how often a model's drafts would be accepted on held-out text."""

import dataclasses
import functools
from collections.abc import Mapping
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
from mtpjax.training.panel import JSON_KEYS, KIND_TEMPERATURES, DecodedMetrics
from mtpjax.training.position_losses import plain_terms


@dataclasses.dataclass(frozen=True)
class Panel:
    """Teacher-forced acceptance metrics on held-out rows, over all positions; index k-1 is draft level k.

    Decoding drafts at other positions (after its last rejection, on its own text), so its accept lengths differ from
    these estimates; `decoded` has the actual acceptance of decoding.

    Attributes:
        bits_per_token: cross-entropy against the data, of the trunk and then of each level.
        agreement: fraction of positions where level k's arg-max is the trunk's.
        survival: fraction of positions where the arg-max of all levels 1..k is the trunk's.
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
        """Returns the panel as `metrics.jsonl` and checkpoints store it, with accept lengths of decoding as "real"."""
        panel = dataclasses.asdict(self)
        for row in (row for kinds in panel["decoded"].values() for row in kinds.values()):
            row |= {key: row.pop(name) for name, key in JSON_KEYS.items()}
        return panel

    @property
    def accept_length(self) -> float:
        """Estimates the accept length at temperature 0: `1 + sum of survival`."""
        return 1 + sum(self.survival)

    @property
    def sampled_accept_length(self) -> float:
        """Estimates the accept length at temperature 1 under the rule "token": `1 + sum of sampled survival`."""
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
        drafter: the separate drafter; None: MTP modules. The bits of levels that cannot draft all tokens are means over
            the targets that they can draft.

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
    # One teacher-forced pass gives trunk and draft logits at every position.
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
    """Prints the panel as tables of at most 80 columns.

    They show rates by level, then accept lengths and the speed-up by category and temperature.
    """
    rates = narrow_table("acceptance panel, held-out text: teacher-forced at all positions; decoded")
    headings = ("level", "bits/\ntoken", "agreement\nwith trunk", "survival", "1 - TV", "sampled\nsurvival")
    overall = panel.decoded.get("overall", {})
    for heading in (*headings, *(f"decoded,\n{kind}" for kind in overall)):
        rates.add_column(heading, justify="right")
    # A row for the trunk's loss, then one per level with its teacher-forced and decoded rates.
    rates.add_row("trunk", f"{panel.bits_per_token[0]:.2f}")
    columns = (panel.agreement, panel.survival, panel.overlap, panel.sampled_survival)
    columns += tuple(row.survival for row in overall.values())
    for level, (bits, *shares) in enumerate(zip(panel.bits_per_token[1:], *columns, strict=True), 1):
        rates.add_row(str(level), f"{bits:.2f}", *(f"{share:.3f}" for share in shares))
    # The last row turns survival into accept lengths, under the columns they are computed from.
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
    table = narrow_table(
        "accept length at temperature T on held-out prompts: decoded;\n"
        "predicted at decoding's anchors along the trunk's own text;\n"
        "teacher-forced over all positions of that text"
    )
    table.add_column("category", overflow="fold")
    headings = ("T", "prompts", "loop-\ning", "decoded (95 %)", "pre-\ndicted", "teacher-\nforced")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    # One row per category and temperature; the category's name is on its first row only.
    for category, kinds in decoded.items():
        for kind, row in kinds.items():
            table.add_row(
                category if kind == next(iter(kinds)) else "",
                f"{KIND_TEMPERATURES[kind]:g}",
                str(row.prompts),
                str(row.looping),
                f"{row.accept_length:.2f} {row.accept_length_low:.2f}-{row.accept_length_high:.2f}",
                f"{row.predicted:.2f}",
                f"{row.teacher_forced:.2f}",
            )
    return table


def _speed_up_table(decoded: Mapping[str, Mapping[str, DecodedMetrics]]):
    table = narrow_table("speed-up over plain decoding at batch 1\nthat the measured costs of a round allow")
    table.add_column("category", overflow="fold")
    for heading in ("T", "accept\nlength", "speed-up (95 %)"):
        table.add_column(heading, justify="right", no_wrap=True)
    # The row of an untrusted measurement gives the reason.
    table.add_column("problem")
    for category, kinds in decoded.items():
        for kind, row in kinds.items():
            if row.speed_up is None:
                continue
            table.add_row(
                category if kind == next(iter(kinds)) else "",
                f"{KIND_TEMPERATURES[kind]:g}",
                f"{row.accept_length:.2f}",
                f"{row.speed_up:.2f} {row.speed_up_low:.2f}-{row.speed_up_high:.2f}{mark(row.problem)}",
                row.problem or "",
            )
    return table
