"""The acceptance panel: what a trained model's drafts are worth on held-out text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.model import MTPModel, forward, shift_left
from mtpjax.train.data import Batch
from mtpjax.train.losses import depth_targets, multi_depth_loss


@dataclasses.dataclass(frozen=True)
class Panel:
    """Teacher-forced figures on held-out rows; index k-1 is draft level k.

    Agreement is the share of positions where level k's arg-max is the trunk's own, on true text; survival the share
    where levels 1..k all are. Decoding stands at other positions (behind its last rejection, on its own text), so its
    accept length differs from `accept_length`: this is the plain estimate over all positions.
    """

    bits_per_token: tuple[float, ...]  # trunk, then each level, against the data
    agreement: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def accept_length(self) -> float:
        """`1 + sum of survival`."""
        return 1 + sum(self.survival)


def acceptance_panel(params: dict, batch: Batch, *, model: MTPModel, num_depths: int) -> Panel:
    """The panel of `model` on held-out rows, recycled levels as decoding runs them (`ttt`)."""
    losses, agreement, survival = jax.device_get(_panel(params, batch, model=model, num_depths=num_depths))
    return Panel(*(tuple(row.tolist()) for row in (losses / np.log(2), agreement, survival)))


@functools.partial(jax.jit, static_argnames=("model", "num_depths"))
def _panel(params, batch: Batch, *, model: MTPModel, num_depths: int):
    tokens, segment_ids, loss_mask = (jnp.asarray(array) for array in batch)
    output = forward(params, tokens, model=model, segment_ids=segment_ids, num_depths=num_depths)
    _, losses = multi_depth_loss(output, tokens, segment_ids, loss_mask, mtp_scale=1.0)
    choices = jnp.argmax(output.logits, axis=-1)
    survives = jnp.ones_like(loss_mask)
    agreement, survival = [], []
    for depth, logits in enumerate(output.mtp_logits, start=1):
        _, is_valid = depth_targets(tokens, segment_ids, loss_mask, depth)
        agrees = jnp.argmax(logits, axis=-1) == shift_left(choices, depth)
        survives &= agrees
        count = jnp.maximum(is_valid.sum(), 1)
        agreement.append((agrees & is_valid).sum() / count)
        survival.append((survives & is_valid).sum() / count)
    return losses, jnp.array(agreement), jnp.array(survival)


def is_looping(tokens, *, longest_period: int = 48) -> bool:
    """Whether a text's second half repeats itself: nine tokens in ten equal the one some period before.

    Greedy text of small models falls into loops, where drafting is easy: they would inflate an accept length.
    """
    tokens = np.asarray(tokens)
    half = len(tokens) // 2
    periods = range(1, min(longest_period, half) + 1)
    return any(np.mean(tokens[half:] == tokens[half - period : len(tokens) - period]) >= 0.9 for period in periods)
