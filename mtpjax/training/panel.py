"""The acceptance panel: what a trained model's drafts are worth on held-out text."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.console import narrow_table
from mtpjax.data.packing import Batch
from mtpjax.models.model import MTPModel, forward, shift_left
from mtpjax.training.decoding_eval import KINDS, Decoded
from mtpjax.training.losses import all_targets, valid_mean
from mtpjax.training.position_losses import plain_terms


@dataclasses.dataclass(frozen=True)
class Panel:
    """Teacher-forced figures on held-out rows; index k-1 is draft level k.

    Agreement is the share of positions where level k's arg-max is the trunk's own, on true text; survival the share
    where levels 1..k all are. Overlap is the mean of 1 - TV between the trunk's distribution and the draft's, the rate
    at which the rule "token" accepts at temperature 1; sampled survival the mean of its product over levels 1..k.
    Decoding stands at other positions (behind its last rejection, on its own text), so its accept lengths differ from
    these: they are the plain estimates over all positions. `decoded` has what decoding shows, category -> "greedy" and
    "sampled", where it was measured.
    """

    bits_per_token: tuple[float, ...]  # trunk, then each level, against the data
    agreement: tuple[float, ...]
    survival: tuple[float, ...]
    overlap: tuple[float, ...]
    sampled_survival: tuple[float, ...]
    decoded: Mapping[str, Mapping[str, Decoded]] = dataclasses.field(default_factory=dict)

    @property
    def accept_length(self) -> float:
        """At temperature 0: `1 + sum of survival`."""
        return 1 + sum(self.survival)

    @property
    def sampled_accept_length(self) -> float:
        """At temperature 1, drafts drawn and accepted one by one: `1 + sum of sampled survival`."""
        return 1 + sum(self.sampled_survival)


def acceptance_panel(params: dict, batch: Batch, *, model: MTPModel, num_depths: int) -> Panel:
    """The panel of `model` on held-out rows, recycled levels as decoding runs them (`ttt`)."""
    losses, *shares = jax.device_get(_panel(params, batch, model=model, num_depths=num_depths))
    bits, agreement, survival, overlap, products = (tuple(row.tolist()) for row in (losses / np.log(2), *shares))
    return Panel(bits, agreement, survival, overlap, products)


@functools.partial(jax.jit, static_argnames=("model", "num_depths"))
def _panel(params, batch: Batch, *, model: MTPModel, num_depths: int):
    tokens, segment_ids, loss_mask = (jnp.asarray(array) for array in batch)
    output = forward(params, tokens, model=model, segment_ids=segment_ids, num_depths=num_depths)
    targets, is_valid = all_targets(tokens, segment_ids, loss_mask, num_depths)
    terms = plain_terms((output.logits, *output.mtp_logits), targets)
    choices = jnp.argmax(output.logits, axis=-1)
    agrees = [
        jnp.argmax(logits, axis=-1) == shift_left(choices, depth)
        for depth, logits in enumerate(output.mtp_logits, start=1)
    ]
    agrees = jnp.stack(agrees).astype(jnp.float32) if agrees else terms.overlap
    shares = (agrees, jnp.cumprod(agrees, axis=0), terms.overlap, jnp.cumprod(terms.overlap, axis=0))
    return valid_mean(terms.cross_entropy, is_valid), *(valid_mean(share, is_valid[1:]) for share in shares)


def print_panel(console, panel: Panel) -> None:
    """Two tables, within 80 columns: rates by level, and accept lengths by category and temperature."""
    rates = narrow_table("acceptance panel: held-out text, teacher-forced, all positions; decoded prompts")
    headings = ("level", "bits/\ntoken", "agrees with\ntrunk", "and all\nbefore", "1 - TV", "times all\nbefore")
    overall = panel.decoded.get("overall", {})
    for heading in (*headings, *(f"survives,\n{kind}" for kind in overall)):
        rates.add_column(heading, justify="right")
    rates.add_row("trunk", f"{panel.bits_per_token[0]:.2f}")
    columns = (panel.agreement, panel.survival, panel.overlap, panel.sampled_survival)
    columns += tuple(row.survival for row in overall.values())
    for level, (bits, *shares) in enumerate(zip(panel.bits_per_token[1:], *columns, strict=True), 1):
        rates.add_row(str(level), f"{bits:.2f}", *(f"{share:.3f}" for share in shares))
    if panel.agreement:
        lengths = (panel.accept_length, panel.sampled_accept_length, *(row.real for row in overall.values()))
        greedy, sampled, *decoded = (f"{length:.2f}" for length in lengths)
        rates.add_row("1 + sum", "", "", greedy, "", sampled, *decoded)
    console.print(rates)
    if panel.decoded:
        console.print(_lengths_table(panel.decoded))


def _lengths_table(decoded: Mapping[str, Mapping[str, Decoded]]):
    table = narrow_table(
        "accept length at temperature T on held-out prompts: decoded;\n"
        "predicted at decoding's anchors along the trunk's own text;\n"
        "teacher-forced over all positions of that text"
    )
    table.add_column("category", overflow="fold")
    headings = ("T", "prompts", "that\nloop", "decoded (95 %)", "pre-\ndicted", "teacher-\nforced")
    for heading in (*headings, "speed-\nup"):
        table.add_column(heading, justify="right", no_wrap=True)
    for category, kinds in decoded.items():
        for kind, row in kinds.items():
            table.add_row(
                category if kind == next(iter(kinds)) else "",
                f"{KINDS[kind]:g}",
                str(row.prompts),
                str(row.looping),
                f"{row.real:.2f} {row.real_low:.2f}-{row.real_high:.2f}",
                f"{row.predicted:.2f}",
                f"{row.teacher_forced:.2f}",
                "" if row.speed_up is None else f"{row.speed_up:.2f}",
            )
    return table
