"""Depth-k losses: pure functions of logits, or of terms per position, and tokens.

A draft depth minimises a mix of objectives (`mtpjax.training.config.Objective`). With p the trunk's distribution of
the token
that a depth predicts, q the draft's, and `alpha = sum min(p, q) = 1 - TV(p, q)`, the rate at which sampling accepts:

- `cross_entropy`: `-log q[target]` of the data;
- `kl`: `KL(p||q)`;
- `lk_hybrid`: `w KL + (1 - w) (1 - alpha)` with `w = exp(-eta alpha)` (2602.23881), all three means over a depth;
- `end_to_end_tv`: what is missing of the drafts that a whole chain gets accepted (2606.12370).

p, and alpha in w, get no gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.model import ForwardOutput, shift_left
from mtpjax.training.config import Objective
from mtpjax.training.position_losses import Terms, plain_terms


def depth_targets(
    tokens: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array, depth: int
) -> tuple[jax.Array, jax.Array]:
    """Targets of `depth` (0: the trunk) and which count, both `[B, T]`.

    Position i aims at t[i+depth+1], which counts if it lies in the row and in the same document, and is not masked: the
    mask belongs to the target. Documents are contiguous, so equal segment ids at both ends suffice.
    """
    there = shift_left(segment_ids, depth + 1)
    is_valid = (there == segment_ids) & (segment_ids != 0) & shift_left(loss_mask, depth + 1)
    return shift_left(tokens, depth + 1), is_valid


def all_targets(
    tokens: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array, num_depths: int
) -> tuple[jax.Array, jax.Array]:
    """`depth_targets` of the trunk and of `num_depths` depths, both `[1 + num_depths, B, T]`."""
    targets = [depth_targets(tokens, segment_ids, loss_mask, depth) for depth in range(num_depths + 1)]
    return jnp.stack([target for target, _ in targets]), jnp.stack([is_valid for _, is_valid in targets])


def valid_mean(values: jax.Array, is_valid: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Mean over the valid positions of the last two axes, `[..., B, T] -> [...]`; 0 where there are none.

    With the `count [...]` of a whole batch, what a part of it contributes to the batch's mean.
    """
    count = is_valid.sum((-2, -1)) if count is None else count
    return jnp.where(is_valid, values, 0).sum((-2, -1)) / jnp.maximum(count, 1)


class Totals(NamedTuple):
    """What losses take from all rows of a batch: with these, the losses of its parts add up to the batch's.

    The overlap makes the LK hybrid's w, through which no gradient goes.
    """

    valid: jax.Array  # [1 + depths] valid targets
    reached: jax.Array  # [] drafts of the chains of end-to-end total variation
    overlap: jax.Array  # [depths] mean over valid targets


def batch_totals(is_valid: jax.Array, overlap: jax.Array) -> Totals:
    """Of `is_valid [1 + depths, B, T]` and the mean `overlap [depths]`."""
    return Totals(is_valid.sum((-2, -1)), jnp.cumprod(is_valid[1:], axis=0, dtype=bool).sum(), overlap)


def cross_entropy(logits: jax.Array, targets: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Mean of `-log softmax(logits)[target]` in nats over the valid positions; 0 where there are none.

    `logits [B, T, V]`, the others `[B, T]`.
    """
    return valid_mean(plain_terms([logits], targets[None]).cross_entropy[0], is_valid)


def lk_hybrid(
    kl: jax.Array, overlap: jax.Array, is_valid: jax.Array, *, decay: float, totals: Totals | None = None
) -> jax.Array:
    """The LK hybrid of each depth, `[depths, B, T] -> [depths]`; 0 for a depth without valid targets.

    alpha is the mean over a depth's valid targets of the batch, so that each depth has one w, as in SpecForge's
    `lk_loss.py`; vllm's speculators take a w per position.
    """
    count, alpha = (None, valid_mean(overlap, is_valid)) if totals is None else (totals.valid[1:], totals.overlap)
    w = jnp.exp(-decay * jax.lax.stop_gradient(alpha))
    return w * valid_mean(kl, is_valid, count) + (1 - w) * valid_mean(1 - overlap, is_valid, count)


def end_to_end_tv(overlap: jax.Array, is_valid: jax.Array, totals: Totals | None = None) -> jax.Array:
    """`1 - 1/K * sum_{j=1..K} prod_{k<=j} alpha_k` (2606.12370, equation 13), of `[depths, B, T]`; 0 without targets.

    Position i is the anchor whose chain of drafts depths 1..K are, and K its number of valid depths before the first
    that is not. The mean is over all anchors' depths: a long chain weighs more than one that a document cuts short.
    """
    is_reached = jnp.cumprod(is_valid, axis=0, dtype=bool)
    survival, missing = jnp.ones(overlap.shape[1:]), jnp.zeros(())
    for alpha, is_counted in zip(overlap, is_reached, strict=True):
        survival = survival * alpha
        missing += jnp.where(is_counted, 1 - survival, 0).sum()
    return missing / jnp.maximum(is_reached.sum() if totals is None else totals.reached, 1)


def depth_weights(num_depths: int, objective: Objective) -> jax.Array:
    """`[num_depths]`, summing to 1: equal (DeepSeek-V3, equation 25), or `beta^(k-1) / sum` (FastMTP, 2509.18362)."""
    decay = objective.depth_decay if objective.depth_weights == "decayed" else 1.0
    weights = decay ** jnp.arange(num_depths, dtype=jnp.float32)
    return weights / weights.sum()


def mix_at(progress: jax.Array | float, objective: Objective) -> dict[str, jax.Array | float]:
    """Weight of each objective at `progress` 0..1 of a run: linearly from `start` to `mix` over `warmup`.

    An empty mix, outside a `TrainConfig`, is cross-entropy.
    """
    mix, start = dict(objective.mix) or {"cross_entropy": 1.0}, dict(objective.start)
    if not start:
        return {**mix}
    part = jnp.minimum(progress / objective.warmup, 1)
    return {
        name: (1 - part) * start.get(name, 0.0) + part * mix.get(name, 0.0) for name in dict.fromkeys((*start, *mix))
    }


def objective_loss(
    terms: Terms,
    is_valid: jax.Array,
    *,
    mtp_scale: jax.Array | float,
    objective: Objective,
    progress: jax.Array | float = 1.0,
    totals: Totals | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`L_main + mtp_scale * mix of the draft depths' objectives`, and the `[1 + depths]` cross-entropies by themselves.

    `is_valid [1 + depths, B, T]`. Each loss is a mean over its valid targets, whatever their number (Megatron's
    normalisation, not DeepSeek-V3's by T). With the `totals` of a batch the terms are of some of its rows, and both are
    what these contribute to the batch's.
    """
    totals = totals or batch_totals(is_valid, valid_mean(terms.overlap, is_valid[1:]))
    losses = valid_mean(terms.cross_entropy, is_valid, totals.valid)
    if len(losses) == 1:
        return losses[0], losses
    weights = depth_weights(len(losses) - 1, objective)
    drafts = is_valid[1:]
    total = jnp.zeros(())
    for name, share in mix_at(progress, objective).items():
        if name == "cross_entropy":
            value = weights @ losses[1:]
        elif name == "kl":
            value = weights @ valid_mean(terms.kl, drafts, totals.valid[1:])
        elif name == "lk_hybrid":
            value = weights @ lk_hybrid(terms.kl, terms.overlap, drafts, decay=objective.lk_decay, totals=totals)
        else:
            value = end_to_end_tv(terms.overlap, drafts, totals)
        total += share * value
    return losses[0] + mtp_scale * total, losses


def multi_depth_loss(
    output: ForwardOutput,
    tokens: jax.Array,
    segment_ids: jax.Array,
    loss_mask: jax.Array,
    *,
    mtp_scale: jax.Array | float,
    objective: Objective = Objective(),  # noqa: B008, frozen
    progress: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """`objective_loss` of a pass's logits. By default `L_main + mtp_scale / D * sum L_k` (DeepSeek-V3, equation 25)."""
    targets, is_valid = all_targets(tokens, segment_ids, loss_mask, len(output.mtp_logits))
    terms = plain_terms((output.logits, *output.mtp_logits), targets)
    return objective_loss(terms, is_valid, mtp_scale=mtp_scale, objective=objective, progress=progress)


def mtp_scale_at(progress: float, *, scale: float, final: float, switch: float) -> float:
    """Lambda at `progress` 0..1 of a run: `scale`, then `final` (DeepSeek-V3: 0.3, and 0.1 for the last third)."""
    return scale if progress < switch else final
