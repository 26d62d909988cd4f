"""Chooses the draft depth of the next round from observed acceptance and measured round costs.

The whole batch drafts to one depth, because one compiled verify pass has one width. The choice maximises the expected
number of committed tokens per unit of time, `(1 + sum_k survival_k) / cost`. This is the cost model of TurboSpec
(2406.14066), with acceptance rates estimated online. The choice depends only on earlier rounds, never on tokens of the
round whose depth it sets, so every exact acceptance rule stays exact. `experiments/decoding/policy_regret.py` compares
it with the best fixed depth.

The model assumes that rejections are independent given their depth. If they are not, for example in a table where every
third token is unpredictable, the policy can do worse than the best fixed depth.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

PRIOR_RATE = 0.75  # assumed acceptance rate where none was measured
ASSUMED_PRIOR_COUNT, MEASURED_PRIOR_COUNT = 4.0, 16.0  # pseudo-counts of an assumed and a measured prior
ROW_PSEUDO_COUNT = 3.0  # pseudo-counts with which a row's rate is shrunk towards the batch's rate
DECAY_ROUNDS = 24  # rounds after which a count has faded to 1/e
PROBE_INTERVAL = 16  # rounds between two probes of the next deeper depth
POWER_MEAN_EXPONENT = 12  # exponent of the power mean over the rows' remaining times; large values approach the maximum
MIN_SPEEDUP = 1.05  # drafting is not probed below this speed-up at perfect acceptance


class DepthPolicy(flax.struct.PyTreeNode):
    """Acceptance counts for B rows at depths 1..D, and the chosen depth."""

    costs: jax.Array  # [D+1] float32, duration of a round at each depth, relative to a round at depth 0
    prior: jax.Array  # [D] float32, acceptance rate at each depth before anything is observed
    prior_count: jax.Array  # [] float32, pseudo-count of the prior, in drafts
    verified: jax.Array  # [B, D] float32, decayed count of drafts per depth whose predecessors were all accepted
    accepted: jax.Array  # [B, D] float32, decayed count of these drafts that were accepted
    depth: jax.Array  # [] int32, draft depth of the next round
    since_probe: jax.Array  # [] int32, rounds since the last probe


@functools.partial(jax.jit, static_argnames="batch")  # one dispatch instead of one per field
def init_policy(costs, batch: int, *, prior=None) -> DepthPolicy:
    """Creates a policy without observations; its first depth follows from the prior.

    Args:
        costs: `[D+1]` durations of a round at depths 0..D, in any unit, D >= 1.
        prior: `[D]` acceptance rates per depth that were measured on similar text. None assumes `PRIOR_RATE` at every
            depth.

    Returns:
        The initial `DepthPolicy`.
    """
    costs = jnp.asarray(costs, jnp.float32)
    assert costs.ndim == 1 and costs.shape[0] > 1, "depth costs must cover depth 0 and at least one more"
    # Only cost ratios matter, so costs are stored relative to a plain decoding step. A measured prior counts as more
    # drafts than an assumed one.
    counts, zero = jnp.zeros((batch, costs.shape[0] - 1)), jnp.zeros((), jnp.int32)
    policy = DepthPolicy(
        costs=costs / costs[0],
        prior=jnp.broadcast_to(jnp.asarray(PRIOR_RATE if prior is None else prior, jnp.float32), costs[1:].shape),
        prior_count=jnp.float32(ASSUMED_PRIOR_COUNT if prior is None else MEASURED_PRIOR_COUNT),
        verified=counts,
        accepted=counts,
        depth=zero,
        since_probe=zero,
    )
    best = _best_depth(policy, jnp.ones(batch, bool), None)
    # A first round at depth 0 would reveal nothing about acceptance, so the first round probes depth 1 if drafting
    # could ever pay off.
    return policy.replace(depth=jnp.where(best == 0, _probe_depth(policy, best), best))


def update_policy(policy: DepthPolicy, depth, num_accepted, *, was_active, is_active, remaining=None) -> DepthPolicy:
    """Records one round and chooses the depth of the next one.

    Args:
        policy: the policy before the round.
        depth: draft depth of the round, a Python int or an int32 scalar.
        num_accepted: `[B]` int32, accepted drafts per row, before any are cut off at stop sequences or limits.
        was_active: `[B]` bool, rows that drafted in this round.
        is_active: `[B]` bool, rows that run in the next round. Other rows do not influence the choice.
        remaining: `[B]` int32, tokens that each row may still generate. The policy then minimises the time until the
            last row ends, and counts no drafts beyond a row's limit. None maximises the throughput of the batch, for
            servers in which a new request replaces each finished one.

    Returns:
        The policy after the round; `policy.depth` is the depth of the next one.
    """
    # 1. Count. A draft at depth k provides evidence only if all drafts before it were accepted. Every count decays, so
    #    the estimates follow a change in the text and return to the prior at depths that are no longer tried.
    depths, num_accepted = jnp.arange(1, policy.prior.shape[0] + 1)[None, :], num_accepted[:, None]
    was_verified = was_active[:, None] & (depths <= depth) & (depths <= num_accepted + 1)
    decay = 1 - 1 / DECAY_ROUNDS
    policy = policy.replace(
        verified=decay * policy.verified + was_verified,
        accepted=decay * policy.accepted + (was_verified & (depths <= num_accepted)),
    )

    # 2. Choose the depth with the most expected tokens per unit of time.
    best = _best_depth(policy, is_active, remaining)

    # 3. Probe one depth deeper at regular intervals, because rounds reveal nothing about acceptance beyond their depth.
    # A round deeper than the current choice is itself such a probe, so it also restarts the interval.
    since_probe = jnp.where(depth > best, 0, policy.since_probe + 1)
    is_due = since_probe >= PROBE_INTERVAL
    max_drafts = jnp.where(is_active, policy.prior.shape[0] if remaining is None else remaining - 1, 0).max()
    # With r tokens to go, r-1 drafts and the bonus token reach the limit, so deeper drafts gain nothing.
    max_depth = jnp.clip(max_drafts, 0, policy.prior.shape[0])
    return policy.replace(
        depth=jnp.where(is_due, jnp.minimum(_probe_depth(policy, best), max_depth), best),
        since_probe=jnp.where(is_due, 0, since_probe),
    )


def can_speed_up(costs) -> bool:
    """Returns True if some depth would be at least `MIN_SPEEDUP` times as fast as depth 0 with all drafts accepted.

    `costs [D+1]` are concrete values, not traced. If False, the caller can disable drafting permanently.
    """
    # A fully accepted round of depth d commits d+1 tokens.
    costs = np.asarray(costs, np.float64)
    return bool((np.arange(1, len(costs) + 1) * costs[0] >= MIN_SPEEDUP * costs).any())


def acceptance_rates(policy: DepthPolicy, is_active) -> jax.Array:
    """Estimates each row's acceptance rate at each depth, `[B, D]` float32, given that earlier drafts were accepted.

    Each row's rate is shrunk towards the joint rate of all active rows, and the joint rate is shrunk towards the prior.
    """
    verified, accepted = (jnp.where(is_active[:, None], x, 0).sum(axis=0) for x in (policy.verified, policy.accepted))
    rates, batch_rate, row_rate, prior_before = [], policy.prior[0], jnp.ones(is_active.shape), policy.prior[0]
    for k in range(policy.prior.shape[0]):
        # The expected rate is the estimate at the previous depth times the ratio of the two priors, because text that
        # is easier than the prior at one depth is usually easier at the next as well.
        ratio = policy.prior[k] / prior_before
        expected = jnp.minimum(batch_rate * ratio, 1)
        batch_rate = (accepted[k] + policy.prior_count * expected) / (verified[k] + policy.prior_count)
        # Mostly rows with easy text reach large depths, so the batch's rate there is too high for a row whose rates
        # have been low so far. Cap it at the row's rate at the previous depth, times the same ratio.
        shrunk_to = jnp.minimum(batch_rate, row_rate * ratio)
        row_rate = (policy.accepted[:, k] + ROW_PSEUDO_COUNT * shrunk_to) / (policy.verified[:, k] + ROW_PSEUDO_COUNT)
        rates.append(row_rate)
        prior_before = policy.prior[k]
    return jnp.stack(rates, axis=1)


def _probe_depth(policy: DepthPolicy, best) -> jax.Array:
    """Returns `best + 1`, or `best` if no deeper depth could win even if every draft were accepted.

    Perfect acceptance favours deep drafts most, so a depth that does not win then cannot win at lower acceptance.
    """
    depths = jnp.arange(policy.costs.shape[0])
    perfect = (depths + 1) / policy.costs
    can_win = jnp.where(depths > best, perfect, 0).max() >= MIN_SPEEDUP * perfect[best]
    return (best + can_win).astype(jnp.int32)


def _best_depth(policy: DepthPolicy, is_active, remaining) -> jax.Array:
    """Returns the depth (int32 scalar) with the most expected tokens per unit of time under the current estimates."""
    # 1. Compute the expected tokens per round at each depth, [B, D+1]. The bonus token counts 1, and each draft counts
    #    its survival probability (the product of the rates up to it). Drafts beyond a row's limit count 0.
    survival = jnp.cumprod(acceptance_rates(policy, is_active), axis=1)
    if remaining is not None:
        survival = jnp.where(jnp.arange(1, survival.shape[1] + 1)[None, :] < remaining[:, None], survival, 0)
    tokens = 1 + jnp.pad(jnp.cumsum(survival, axis=1), ((0, 0), (1, 0)))
    # 2. Without limits, maximise the batch's tokens per unit of time.
    if remaining is None:
        throughput = jnp.where(is_active[:, None], tokens, 0).sum(axis=0) / policy.costs
        return jnp.argmax(throughput).astype(jnp.int32)
    # 3. With limits, minimise the time until the slowest row ends, because the batch ends with it. A power mean gives
    #    slow rows the largest weight without letting one bad estimate decide alone. Times are scaled to avoid overflow.
    time = remaining[:, None] / jnp.maximum(remaining.max(), 1) * policy.costs[None, :] / tokens
    return jnp.argmin(jnp.where(is_active[:, None], time**POWER_MEAN_EXPONENT, 0).sum(axis=0)).astype(jnp.int32)
