"""How deep to draft: what was accepted so far, and what rounds cost, choose the levels of the next round.

One depth serves the batch, since a pass has one width: the one with the most expected tokens per cost, over the rows
that run. It depends on earlier rounds alone, never on a draft that it decides about, so the text keeps its law under
every acceptance rule. Pure arithmetic on `[B, S]` arrays, cheap enough for every round of a compiled loop.
"""

import flax.struct
import jax
import jax.numpy as jnp

PRIOR = 0.75  # rate of a draft, before anything is known
OWN_STRENGTH = 2.0  # drafts that the other rows' rate is worth, beside a row's own
BATCH_STRENGTH = 2.0  # drafts that the level before is worth, beside the other rows
SHORTEST = 12.0
MEMORY = 32.0  # of a count, per later draft at its level
FADE = 0.99  # of a count, per round in which its level was not tried
HOPE = 3.0  # accepted drafts more that would have to make a deeper round pay, for a probe
MARGIN = 1.05  # and by how much
POWER = 4.0
STAY = 1.0
EAGER = True
GROWTH = 2
PRIOR_STRENGTH = 2.0
FIRST_WAIT, LONGEST_WAIT = 12, 96  # rounds without a look at deeper levels


class Policy(flax.struct.PyTreeNode):
    """What is known of B rows and S levels, and the choice that follows from it."""

    costs: jax.Array  # [S+1] float32, duration of a round by its depth, in any unit
    reached: jax.Array  # [B, S] float32, decayed count of drafts of level k verified, all before it accepted
    accepted: jax.Array  # [B, S] float32, those of them that were accepted
    depth: jax.Array  # [] int32, levels of the next round
    settled: jax.Array  # [] int32, the depth that the estimates favour; `depth` is deeper in a round that probes
    promise: jax.Array  # [] float32
    wait: jax.Array  # [] int32, rounds until the next probe
    interval: jax.Array  # [] int32, and how many they were at first


def init_policy(costs, batch: int) -> Policy:
    """Nothing seen yet; the first depth is the prior's. `costs`: a round's duration at depths 0..S."""
    costs = jnp.asarray(costs, jnp.float32)
    S = costs.shape[0] - 1
    zero = jnp.zeros((batch, S))
    wait = jnp.asarray(FIRST_WAIT, jnp.int32)
    policy = Policy(costs, zero, zero, jnp.int32(0), jnp.int32(0), jnp.float32(1), wait, wait)
    best, deeper, promise = _choose(policy, jnp.ones(batch, bool), None)
    depth = jnp.where((best == 0) & EAGER, deeper, best)
    return policy.replace(depth=depth, settled=best, promise=promise)


def observe(policy, depth, count, took_part, active, remaining=None):
    S = policy.reached.shape[1]
    levels = jnp.arange(1, S + 1)[None, :]
    drafts = count[:, None]
    was_tried = took_part[:, None] & (levels <= depth)
    was_reached = was_tried & (drafts >= levels - 1)
    was_accepted = was_reached & (drafts >= levels)
    B = policy.reached.shape[0]
    memory = 1 - 1 / max(SHORTEST, MEMORY / B)
    keep = jnp.where(was_reached, memory, jnp.where(was_tried, 1.0, FADE))
    probed = depth > policy.settled
    policy = policy.replace(reached=keep * policy.reached + was_reached, accepted=keep * policy.accepted + was_accepted)
    score = _score(policy.costs, rates(policy, active)[0], active, remaining)
    good = score[depth] > policy.promise * score[policy.settled]
    best, deeper, promise = _choose(policy, active, remaining)
    rose = best > policy.settled
    interval = jnp.where(probed & ~good, jnp.minimum(GROWTH * policy.interval, LONGEST_WAIT), policy.interval)
    interval = jnp.where(rose, FIRST_WAIT, interval)
    wait = jnp.where(probed, jnp.where(good, 0, interval), jnp.where(rose, interval, policy.wait - 1))
    probe = (wait <= 0) & (deeper > best)
    return policy.replace(
        depth=jnp.where(probe, deeper, best).astype(jnp.int32),
        settled=best,
        promise=promise,
        wait=jnp.maximum(wait, 0).astype(jnp.int32),
        interval=interval.astype(jnp.int32),
    )


def rates(policy: Policy, active: jax.Array):
    """`[B, S]`: the estimated rate of each row's level, given that all before it were accepted."""
    reached = policy.reached * active[:, None]
    accepted = policy.accepted * active[:, None]
    other_reached = reached.sum(0)[None, :] - reached
    other_accepted = accepted.sum(0)[None, :] - accepted
    rate, columns = jnp.full(reached.shape[0], PRIOR), []
    for level in range(reached.shape[1]):
        strength = OWN_STRENGTH if level else PRIOR_STRENGTH
        others = (other_accepted[:, level] + BATCH_STRENGTH * rate) / (other_reached[:, level] + BATCH_STRENGTH)
        rate = (policy.accepted[:, level] + strength * others) / (policy.reached[:, level] + strength)
        columns.append(rate)
    return jnp.stack(columns, axis=1), reached.sum(0)[None, :]


def _choose(policy, active, remaining):
    rate, evidence = rates(policy, active)
    S = rate.shape[1]
    score = _score(policy.costs, rate, active, remaining)
    best = jnp.argmax(score * jnp.where(jnp.arange(S + 1) == policy.settled, STAY, 1.0))
    is_deeper = jnp.arange(1, S + 1)[None, :] > best
    hoped = jnp.where(is_deeper, (rate * evidence + HOPE) / (evidence + HOPE), rate)
    hope = _score(policy.costs, hoped, active, remaining)
    pays = hope > score[best]
    worth = (hope > MARGIN * score[best]).any()
    deeper = jnp.where(worth, jnp.argmax(pays), best)
    return best.astype(jnp.int32), deeper.astype(jnp.int32), score[deeper] / score[best]


def _score(costs, rate, active, remaining):
    survival = jnp.cumprod(rate, axis=1)
    if remaining is not None:
        levels = jnp.arange(1, rate.shape[1] + 1)[None, :]
        survival = jnp.where(levels < remaining[:, None], survival, 0)
    tokens = 1 + jnp.pad(jnp.cumsum(survival, axis=1), ((0, 0), (1, 0)))
    if remaining is None or POWER == 0:
        return (tokens * active[:, None]).sum(0) / costs
    time = jnp.where(active[:, None], remaining[:, None] / tokens, 0) * costs[None, :]
    time = time / jnp.maximum(time.max(), 1e-30)
    return 1 / jnp.maximum((time**POWER).sum(0), 1e-30) ** (1 / POWER)
