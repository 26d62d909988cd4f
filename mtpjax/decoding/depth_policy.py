"""Chooses the draft depth of the next round from the acceptance so far and from the cost of a round at each depth.

The whole batch drafts to one depth, because one compiled verify pass has one width. The choice maximises expected
committed tokens per unit of time, `(1 + sum_k survival_k) / cost`, the cost model of TurboSpec (2406.14066) with
acceptance rates estimated online. It depends on earlier rounds only, never on a token that it decides about, so every
exact acceptance rule stays exact. `experiments/policy_regret.py` compares it with the best fixed depth.

The model treats rejections as independent given their depth. Text whose rejections come at fixed distances (a table in
which every third token is unpredictable) can make it stay up to 30 % below the best fixed depth.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

PRIOR_RATE = 0.75  # assumed acceptance rate where none was measured
PRIOR_DRAFTS, MEASURED_DRAFTS = 4.0, 16.0  # pseudo-counts of an assumed prior, and of a measured one
ROW_DRAFTS = 3.0  # pseudo-counts with which a row's rate is shrunk towards the batch's rate
MEMORY = 24  # rounds after which a count has faded to 1/e
PROBE_INTERVAL = 16  # rounds between two probes of the next deeper depth
SLOWEST = 12  # power of the mean over the rows' remaining times; large values approach the slowest row's time
MIN_GAIN = 1.05  # speed-up at perfect acceptance below which drafting is not worth probing


class Policy(flax.struct.PyTreeNode):
    """Acceptance counts of B rows at depths 1..D, and the depth that they lead to."""

    costs: jax.Array  # [D+1] float32, duration of a round at each depth, in units of a round at depth 0
    prior: jax.Array  # [D] float32, acceptance rate at each depth before anything is observed
    prior_drafts: jax.Array  # [] float32, number of drafts that the prior counts for
    verified: jax.Array  # [B, D] float32, decayed count of drafts at a depth whose predecessors were all accepted
    accepted: jax.Array  # [B, D] float32, decayed count of those that were accepted
    depth: jax.Array  # [] int32, draft depth of the next round
    since_probe: jax.Array  # [] int32, rounds since the last probe


@functools.partial(jax.jit, static_argnames="batch")  # one dispatch instead of one per field
def init_policy(costs, batch: int, *, prior=None) -> Policy:
    """Creates a policy that has observed nothing; its first depth, at least 1, follows from the prior.

    Args:
        costs: `[D+1]` durations of a round at depths 0..D, in any unit, D >= 1.
        batch: number of rows B.
        prior: `[D]` acceptance rates per depth that were measured on similar text. None assumes 0.75 at every depth.

    Returns:
        The initial `Policy`.
    """
    costs = jnp.asarray(costs, jnp.float32)
    assert costs.ndim == 1 and costs.shape[0] > 1, "depth costs must cover depth 0 and at least one more"
    counts, zero = jnp.zeros((batch, costs.shape[0] - 1)), jnp.zeros((), jnp.int32)
    policy = Policy(
        costs=costs / costs[0],
        prior=jnp.broadcast_to(jnp.asarray(PRIOR_RATE if prior is None else prior, jnp.float32), costs[1:].shape),
        prior_drafts=jnp.float32(PRIOR_DRAFTS if prior is None else MEASURED_DRAFTS),
        verified=counts,
        accepted=counts,
        depth=zero,
        since_probe=zero,
    )
    best = _best_depth(policy, jnp.ones(batch, bool), None)
    # A first round without drafts would tell nothing.
    return policy.replace(depth=jnp.where(best == 0, _probe_depth(policy, best), best))


def observe(policy: Policy, depth, count, *, took_part, active, remaining=None) -> Policy:
    """Records one round and chooses the depth of the next.

    Args:
        policy: the state before the round.
        depth: draft depth of the round, a Python int or an int32 scalar.
        count: `[B]` int32, accepted drafts per row, before stop sequences and limits cut any.
        took_part: `[B]` bool, rows that drafted in this round.
        active: `[B]` bool, rows that run in the next round. Other rows do not influence the choice.
        remaining: `[B]` int32, tokens that each row may still generate. The policy then minimises the time until the
            last row ends and drafts nothing beyond the limits. None maximises the throughput of the batch, for
            batches in which a new request replaces each finished one.

    Returns:
        The policy after the round; `policy.depth` is the depth of the next one.
    """
    # 1. Count. The draft at depth k is verified only if all drafts before it were accepted. Every count decays, so
    # that the estimates follow a change in the text and return to the prior at depths no longer tried.
    depths, count = jnp.arange(1, policy.prior.shape[0] + 1)[None, :], count[:, None]
    was_verified = took_part[:, None] & (depths <= depth) & (depths <= count + 1)
    kept = 1 - 1 / MEMORY
    policy = policy.replace(
        verified=kept * policy.verified + was_verified,
        accepted=kept * policy.accepted + (was_verified & (depths <= count)),
    )

    # 2. Choose the depth with the largest expected gain.
    best = _best_depth(policy, active, remaining)

    # 3. Probe one depth further at regular intervals, because acceptance beyond the chosen depth is otherwise never
    # observed, and at depth 0 none is. A round deeper than the choice counts as a probe, whatever led to it.
    since_probe = jnp.where(depth > best, 0, policy.since_probe + 1)
    is_due = since_probe >= PROBE_INTERVAL
    room = jnp.where(active, policy.prior.shape[0] if remaining is None else remaining - 1, 0).max()
    deepest = jnp.clip(room, 0, policy.prior.shape[0])  # no draft survives beyond the longest row's limit
    return policy.replace(
        depth=jnp.where(is_due, jnp.minimum(_probe_depth(policy, best), deepest), best),
        since_probe=jnp.where(is_due, 0, since_probe),
    )


def reset_rows(policy: Policy, mask) -> Policy:
    """Clears the counts of the rows in `mask` (`[B]` bool), whose slots were given to new requests.

    Returns:
        The policy in which those rows start from the batch's rates again; the depth stays.
    """
    return policy.replace(
        verified=jnp.where(mask[:, None], 0, policy.verified),
        accepted=jnp.where(mask[:, None], 0, policy.accepted),
    )


def may_pay(costs) -> bool:
    """Returns True if some depth beats depth 0 by at least 5 % when every draft is accepted.

    Args:
        costs: `[D+1]` durations of a round at depths 0..D, as numbers (not traced).
    """
    costs = np.asarray(costs, np.float64)
    return bool((np.arange(1, len(costs) + 1) * costs[0] >= MIN_GAIN * costs).any())


def acceptance_rates(policy: Policy, active) -> jax.Array:
    """Estimates `[B, D]` acceptance rates at each depth, given that all drafts before it were accepted.

    Each row's counts are shrunk towards the rate of the active rows (`active [B]` bool) together, and that rate towards
    the prior.
    """
    verified, accepted = (jnp.where(active[:, None], x, 0).sum(axis=0) for x in (policy.verified, policy.accepted))
    rows, batch_rate, row_rate, before = [], policy.prior[0], jnp.ones(active.shape), policy.prior[0]
    for k in range(policy.prior.shape[0]):
        # The prior of a depth follows the estimate at the depth before it, scaled as the measured rates are.
        ratio = policy.prior[k] / before
        expected = jnp.minimum(batch_rate * ratio, 1)
        batch_rate = (accepted[k] + policy.prior_drafts * expected) / (verified[k] + policy.prior_drafts)
        # Mostly easy rows reach a deep depth, so the batch's rate there is too high for a row that is hard so far.
        shrunk_to = jnp.minimum(batch_rate, row_rate * ratio)
        row_rate = (policy.accepted[:, k] + ROW_DRAFTS * shrunk_to) / (policy.verified[:, k] + ROW_DRAFTS)
        rows.append(row_rate)
        before = policy.prior[k]
    return jnp.stack(rows, axis=1)


def _probe_depth(policy: Policy, best) -> jax.Array:
    """Returns the depth after `best`, or `best` where no deeper depth could win even if every draft were accepted.

    Deeper drafts survive less often, so a depth that does not win at perfect acceptance wins at none.
    """
    depths = jnp.arange(policy.costs.shape[0])
    perfect = (depths + 1) / policy.costs
    has_hope = jnp.where(depths > best, perfect, 0).max() >= MIN_GAIN * perfect[best]
    return (best + has_hope).astype(jnp.int32)


def _best_depth(policy: Policy, active, remaining) -> jax.Array:
    """Returns the depth, an int32 scalar, with the most expected tokens per time by the present estimates."""
    # Expected tokens of a round at each depth [B, D+1]: the bonus token and every draft that survives.
    survival = jnp.cumprod(acceptance_rates(policy, active), axis=1)
    if remaining is not None:
        survival = jnp.where(jnp.arange(1, survival.shape[1] + 1)[None, :] < remaining[:, None], survival, 0)
    tokens = 1 + jnp.pad(jnp.cumsum(survival, axis=1), ((0, 0), (1, 0)))
    if remaining is None:
        throughput = jnp.where(active[:, None], tokens, 0).sum(axis=0) / policy.costs
        return jnp.argmax(throughput).astype(jnp.int32)
    # The batch ends with its slowest row. A power mean weighs slow rows most, yet one bad estimate does not decide.
    time = remaining[:, None] / jnp.maximum(remaining.max(), 1) * policy.costs[None, :] / tokens
    return jnp.argmin(jnp.where(active[:, None], time**SLOWEST, 0).sum(axis=0)).astype(jnp.int32)
