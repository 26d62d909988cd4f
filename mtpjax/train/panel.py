"""The acceptance panel: what a trained model's drafts are worth on held-out text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.model import MTPModel, forward, shift_left
from mtpjax.train.data import Batch
from mtpjax.train.losses import all_targets, valid_mean
from mtpjax.train.terms import plain_terms


@dataclasses.dataclass(frozen=True)
class Panel:
    """Teacher-forced figures on held-out rows; index k-1 is draft level k.

    Agreement is the share of positions where level k's arg-max is the trunk's own, on true text; survival the share
    where levels 1..k all are. Overlap is the mean of 1 - TV between the trunk's distribution and the draft's, the rate
    at which the rule "token" accepts at temperature 1; sampled survival the mean of its product over levels 1..k.
    Decoding stands at other positions (behind its last rejection, on its own text), so its accept lengths differ from
    these: they are the plain estimates over all positions.
    """

    bits_per_token: tuple[float, ...]  # trunk, then each level, against the data
    agreement: tuple[float, ...]
    survival: tuple[float, ...]
    overlap: tuple[float, ...]
    sampled_survival: tuple[float, ...]

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
    return Panel(*(tuple(row.tolist()) for row in (losses / np.log(2), *shares)))


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


def is_looping(tokens, *, longest_period: int = 48) -> bool:
    """Whether a text's second half repeats itself: nine tokens in ten equal the one some period before.

    Greedy text of small models falls into loops, where drafting is easy: they would inflate an accept length.
    """
    tokens = np.asarray(tokens)
    half = len(tokens) // 2
    periods = range(1, min(longest_period, half) + 1)
    return any(np.mean(tokens[half:] == tokens[half - period : len(tokens) - period]) >= 0.9 for period in periods)
