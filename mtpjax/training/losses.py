"""Computes losses of trunk and draft depths, in pure functions of tokens and logits or of per-position terms.

A draft depth minimises a mix of objectives (`mtpjax.training.config.Objective`). Let p be the trunk's distribution for
the token that a depth predicts, q the draft's distribution, and `alpha = sum min(p, q) = 1 - TV(p, q)` the probability
that the rule "token" accepts a draft drawn from q:

- `cross_entropy`: `-log q[target]`, with targets from the data;
- `kl`: `KL(p||q)`;
- `total_variation`: `TV(p, q) = 1 - alpha`, half of the L1 distance (DSpark, 2607.05147);
- `lk_hybrid`: `w KL + (1 - w) (1 - alpha)` with `w = exp(-eta alpha)` (2602.23881), where KL and alpha are means over
  the positions of a depth;
- `end_to_end_tv`: 1 minus the expected fraction of a chain's drafts that are accepted (2606.12370).

p gets no gradient, and neither does alpha in w.

DSpark's confidence head predicts alpha for each draft. It minimises the binary cross-entropy with alpha as the target,
weighted by depth; alpha gets no gradient here, but the drafter's states do (DeepSpec's `loss.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.forward import DepthsOutput, ForwardOutput, shift_left
from mtpjax.training.objective import Objective
from mtpjax.training.position_losses import PositionTerms, plain_terms


def depth_targets(
    tokens: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array, depth: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the targets of a depth and which of them are valid.

    The target of position i is t[i+depth+1]. It is valid if it is inside the row, in the same document as position i,
    and unmasked; the loss mask applies to the target token, not to position i.

    Args:
        tokens: `[B, T]` int32.
        segment_ids: `[B, T]` document of each token; 0 is padding.
        loss_mask: `[B, T]` bool, tokens that count as targets.
        depth: draft depth; 0 is the trunk.

    Returns:
        Targets `[B, T]` int32, and `is_valid [B, T]` bool.
    """
    # Documents are contiguous, so equal segment ids at both ends mean one document. Past the row, ids are 0.
    there = shift_left(segment_ids, depth + 1)
    is_valid = (there == segment_ids) & (segment_ids != 0) & shift_left(loss_mask, depth + 1)
    return shift_left(tokens, depth + 1), is_valid


def all_targets(
    tokens: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array, num_depths: int
) -> tuple[jax.Array, jax.Array]:
    """Stacks the results of `depth_targets` for the trunk and `num_depths` depths, each `[1 + num_depths, B, T]`."""
    targets = [depth_targets(tokens, segment_ids, loss_mask, depth) for depth in range(num_depths + 1)]
    return jnp.stack([target for target, _ in targets]), jnp.stack([is_valid for _, is_valid in targets])


def valid_mean(values: jax.Array, is_valid: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Averages over the valid positions of the last two axes.

    Args:
        values: `[..., B, T]`.
        is_valid: bool, same shape.
        count: `[...]` number to divide by; None: the number of valid positions. With the count for a whole batch, the
            results for its parts add up to the batch's mean.

    Returns:
        `[...]` the means; 0 without valid positions.
    """
    count = is_valid.sum((-2, -1)) if count is None else count
    return jnp.where(is_valid, values, 0).sum((-2, -1)) / jnp.maximum(count, 1)


class BatchTotals(NamedTuple):
    """Totals over a whole batch, which make the losses of the batch's parts add up to the batch's loss.

    Attributes:
        num_valid: `[1 + depths]` number of valid targets.
        num_reached: `[]` number of drafts that end-to-end total variation counts, over all chains.
        overlap: `[depths]` mean overlap over valid targets, for the LK hybrid's w; gets no gradient.
    """

    num_valid: jax.Array
    num_reached: jax.Array
    overlap: jax.Array


def batch_totals(is_valid: jax.Array, overlap: jax.Array) -> BatchTotals:
    """Computes the totals of a batch from `is_valid [1 + depths, B, T]` and the mean `overlap [depths]`."""
    return BatchTotals(is_valid.sum((-2, -1)), jnp.cumprod(is_valid[1:], axis=0, dtype=bool).sum(), overlap)


def lk_hybrid(
    kl: jax.Array, overlap: jax.Array, is_valid: jax.Array, *, decay: float, totals: BatchTotals | None = None
) -> jax.Array:
    """Computes the LK hybrid of each depth: `w KL + (1 - w) (1 - alpha)`, `w = exp(-decay alpha)` (2602.23881).

    Args:
        kl: `[depths, B, T]` KL(p||q) in nats.
        overlap: `[depths, B, T]` 1 - TV(p, q).
        is_valid: `[depths, B, T]` bool.
        decay: eta.
        totals: totals of the batch if the rows are a part of it.

    Returns:
        `[depths]`; 0 for a depth without valid targets.
    """
    # Use one w per depth, computed from the depth's mean overlap in the batch, as in SpecForge's `lk_loss.py` (vLLM's
    # speculators uses one per position). While drafts are poor, w is near 1 and KL dominates; later, total variation
    # dominates.
    count, alpha = (None, valid_mean(overlap, is_valid)) if totals is None else (totals.num_valid[1:], totals.overlap)
    w = jnp.exp(-decay * jax.lax.stop_gradient(alpha))
    return w * valid_mean(kl, is_valid, count) + (1 - w) * valid_mean(1 - overlap, is_valid, count)


def end_to_end_tv(overlap: jax.Array, is_valid: jax.Array, totals: BatchTotals | None = None) -> jax.Array:
    """Computes the end-to-end total variation loss `1 - 1/K * sum_{j=1..K} prod_{k<=j} alpha_k` (2606.12370, eq. 13).

    Position i is the anchor of a chain of depths 1..K, where K is the last depth before an invalid one. The mean is
    over the depths of all chains, so a long chain weighs more than a chain that the end of its document cuts short.

    Args:
        overlap: `[depths, B, T]` alpha, 1 - TV(p, q).
        is_valid: `[depths, B, T]` bool.
        totals: totals of the batch if the rows are a part of it.

    Returns:
        `[]`; 0 without valid targets.
    """
    # A depth belongs to the chain only if all depths before it are valid. `survival` is the probability that depths up
    # to j are all accepted; `missing` sums its complement.
    is_reached = jnp.cumprod(is_valid, axis=0, dtype=bool)
    survival, missing = jnp.ones(overlap.shape[1:]), jnp.zeros(())
    for alpha, is_counted in zip(overlap, is_reached, strict=True):
        survival = survival * alpha
        missing += jnp.where(is_counted, 1 - survival, 0).sum()
    return missing / jnp.maximum(is_reached.sum() if totals is None else totals.num_reached, 1)


def binary_cross_entropy(logits: jax.Array, chances: jax.Array) -> jax.Array:
    """Computes `-c log s - (1 - c) log(1 - s)` in nats, where s is the sigmoid of the logits and c is `chances`."""
    return (1 - chances) * logits + jax.nn.softplus(-logits)


def depth_weights(num_depths: int, objective: Objective) -> jax.Array:
    """Returns the weights of the depths, equal (DeepSeek-V3, equation 25) or `beta^(k-1) / sum` (FastMTP, 2509.18362).

    The result is `[num_depths]` float32 and sums to 1.
    """
    decay = objective.depth_decay if objective.depth_weights == "decayed" else 1.0
    weights = decay ** jnp.arange(num_depths, dtype=jnp.float32)
    return weights / weights.sum()


def mix_at(progress: jax.Array | float, objective: Objective) -> dict[str, jax.Array | float]:
    """Returns each objective's weight at a point of the run, interpolated from `start` to `mix` over `warmup`.

    Args:
        progress: `[]` fraction of the run that is done, 0..1.
        objective: the mixes. An empty `mix` (outside a `TrainConfig`) means cross-entropy.
    """
    mix, start = dict(objective.mix) or {"cross_entropy": 1.0}, dict(objective.start)
    if not start:
        return {**mix}
    part = jnp.minimum(progress / objective.warmup, 1)
    return {
        name: (1 - part) * start.get(name, 0.0) + part * mix.get(name, 0.0) for name in dict.fromkeys((*start, *mix))
    }


def objective_loss(
    terms: PositionTerms,
    is_valid: jax.Array,
    *,
    mtp_scale: jax.Array | float,
    objective: Objective,
    progress: jax.Array | float = 1.0,
    totals: BatchTotals | None = None,
    confidence: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the training loss `L_main + mtp_scale * sum over objectives of weight * L_objective`.

    Each loss is a mean over its valid targets (as in Megatron; DeepSeek-V3 divides by T).

    Args:
        terms: cross-entropy, KL and overlap per position.
        is_valid: `[1 + depths, B, T]` bool.
        mtp_scale: `[]` lambda.
        objective: the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.
        totals: totals of the batch if the rows are a part of it; both results are then shares of the batch's values.
        confidence: `[depths, B, T]` logits of the predicted acceptance; their loss is added with weight 1.

    Returns:
        The loss `[]`, and the cross-entropies `[1 + depths]` in nats.
    """
    totals = totals or batch_totals(is_valid, valid_mean(terms.overlap, is_valid[1:]))
    losses = valid_mean(terms.cross_entropy, is_valid, totals.num_valid)
    # Without depths only the trunk's loss remains.
    if len(losses) == 1:
        return losses[0], losses
    # Cross-entropy, KL, total variation and the LK hybrid are weighted by depth. End-to-end total variation couples the
    # depths, and its formula already weights them.
    weights = depth_weights(len(losses) - 1, objective)
    drafts = is_valid[1:]
    total = jnp.zeros(())
    for name, share in mix_at(progress, objective).items():
        if name == "cross_entropy":
            value = weights @ losses[1:]
        elif name == "kl":
            value = weights @ valid_mean(terms.kl, drafts, totals.num_valid[1:])
        elif name == "total_variation":
            value = weights @ valid_mean(1 - terms.overlap, drafts, totals.num_valid[1:])
        elif name == "lk_hybrid":
            value = weights @ lk_hybrid(terms.kl, terms.overlap, drafts, decay=objective.lk_decay, totals=totals)
        else:
            value = end_to_end_tv(terms.overlap, drafts, totals)
        total += share * value
    # The confidence head learns to predict the overlap without changing it.
    if confidence is not None:
        surprise = binary_cross_entropy(confidence, jax.lax.stop_gradient(terms.overlap))
        total += weights @ valid_mean(surprise, drafts, totals.num_valid[1:])
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
    """Computes the loss of a forward pass from its logits, by calling `objective_loss` with `plain_terms`.

    By default, this is `L_main + mtp_scale / D * sum L_k` with D depths (DeepSeek-V3, equation 25).

    Args:
        output: the forward pass over `tokens`.
        tokens: `[B, T]` int32.
        segment_ids: `[B, T]` document of each token; 0 is padding.
        loss_mask: `[B, T]` bool, tokens that count as targets.
        mtp_scale: `[]` lambda.
        objective: the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.

    Returns:
        The loss `[]`, and the cross-entropies `[1 + depths]` in nats.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mtpjax import MTPModel, forward, init_params, presets
        >>> from mtpjax.training import multi_depth_loss
        >>> model = MTPModel(presets["tiny"])
        >>> tokens = jnp.arange(16)[None]
        >>> output = forward(init_params(model, jax.random.key(0)), tokens, model=model, num_depths=2)
        >>> document = jnp.ones_like(tokens)  # one document, and no padding
        >>> loss, losses = multi_depth_loss(output, tokens, document, document > 0, mtp_scale=0.3)
        >>> losses.shape
        (3,)
    """
    targets, is_valid = all_targets(tokens, segment_ids, loss_mask, len(output.mtp_logits))
    terms = plain_terms((output.logits, *output.mtp_logits), targets)
    return objective_loss(terms, is_valid, mtp_scale=mtp_scale, objective=objective, progress=progress)


def mtp_scale_at(progress: float, *, scale: float, final: float, switch: float) -> float:
    """Returns lambda at a point of the run (DeepSeek-V3: 0.3, then 0.1 for the last third).

    Args:
        progress: fraction of the run that is done, 0..1.
        scale: lambda before the switch.
        final: lambda after the switch.
        switch: fraction of the run at which lambda changes.

    Returns:
        Lambda.

    Example:
        >>> from mtpjax.training import mtp_scale_at
        >>> [mtp_scale_at(progress, scale=0.3, final=0.1, switch=0.7) for progress in (0.0, 0.8)]
        [0.3, 0.1]
    """
    return scale if progress < switch else final


class LossInputs(NamedTuple):
    """The arguments of an objective, for the rows on one device or in one microbatch.

    Values that an objective does not read are not computed. If the mesh axis `context` splits rows by tokens, T counts
    the device's tokens, which are not consecutive.

    Attributes:
        loss: `[]` the loss that the run minimises without a custom objective. `inputs.loss + extra` adds a term to it.
        terms: cross-entropy of trunk and depths, and the depths' KL and overlap with the trunk, at each position.
        targets: `[1 + num_depths, B, T]` int32, the token that trunk (0) and depth k predict at each position.
        is_valid: `[1 + num_depths, B, T]` bool, which targets count.
        output: logits and hidden states of trunk and depths; for a block drafter, the levels' arrays hold only the
            anchors, `[B, A, ...]`. If the objective reads the logits, they are stored, even with `vocab_chunk`.
        totals: counts of valid targets in the whole batch; `mean` uses them.
        mtp_scale: `[]` lambda, the weight of the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.

    Example:
        >>> import jax
        >>> from mtpjax.training import LossInputs
        >>> def z_loss(inputs: LossInputs) -> jax.Array:
        ...     '''Adds the squared log-normaliser of the trunk's softmax (PaLM, 2204.02311).'''
        ...     normaliser = jax.nn.logsumexp(inputs.output.logits, axis=-1)
        ...     return inputs.loss + 1e-4 * inputs.mean(normaliser**2, depth=0)
    """

    loss: jax.Array
    terms: PositionTerms
    targets: jax.Array
    is_valid: jax.Array
    output: DepthsOutput
    totals: BatchTotals
    mtp_scale: jax.Array | float
    progress: jax.Array | float

    def mean(self, values: jax.Array, *, depth: int) -> jax.Array:
        """Averages values over the valid positions of a depth in the whole batch.

        With accumulation or a mesh, an objective gets only a part of the batch at a time. The results for the parts add
        up to the batch's mean, because each is divided by the batch's number of targets. Such means may be summed, but
        not multiplied.

        Args:
            values: `[B, T]` a value for each position.
            depth: draft depth; 0 is the trunk.

        Returns:
            `[]` this part's share of the mean; 0 without valid targets.
        """
        return valid_mean(values, self.is_valid[depth], self.totals.num_valid[depth])


ObjectiveFunction = Callable[[LossInputs], jax.Array]


def call_objective(objective_function: ObjectiveFunction, inputs: LossInputs) -> jax.Array:
    """Calls an objective, checks its result, and returns it as a float32 scalar."""
    loss = jnp.asarray(objective_function(inputs))
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"the objective {describe_objective(objective_function)} returned {loss.dtype.name}{list(loss.shape)}, not"
            " one floating-point number"
        )
    return loss.astype(jnp.float32)


def describe_objective(objective_function: ObjectiveFunction) -> str:
    """Returns the name under which a run's settings store an objective."""
    named = objective_function if hasattr(objective_function, "__qualname__") else type(objective_function)
    return f"{named.__module__}.{named.__qualname__}"
