"""How deep to draft: what was accepted so far, and what rounds cost, choose the levels of the next round.

One depth serves the batch, for a pass has one width. It depends on earlier rounds alone, never on a draft that it
decides about, so the text keeps its law under every acceptance rule (non-anticipation). Pure arithmetic on `[B, S]`
arrays, cheap enough for every round of a compiled loop.

Levels are estimated one by one, as if failures came at random. Where they come at regular distances (a list whose
every fourth token cannot be known) that is wrong by up to a factor of two, either way: two drafts and a bonus token
stop short of the fourth token every time, three drafts leave it to the bonus. So a row also remembers its *gaps*, the
tokens from one failure to the next, as the rounds that each depth would have needed for them, and its tokens per round
are corrected by how these compare with those of random gaps of the same mean, and at first by how accept lengths that
were measured at each depth compare with those of random failures.

Two things keep it from staying at a depth that was right once: counts fade, so that the estimate of a level that is not
tried any more returns to that of the level before; and now and then a round *probes* a deeper level, if that could pay,
ever more rarely while nothing comes of it. Where rates were measured, deep levels also get the benefit of the doubt
until this batch has tried them: deep rounds tell about shallow levels, and not the other way round. What a change of
depth costs by itself (each depth is a program of its own, which the processor's caches must take in) is charged for.

The constants are the best found by `experiments/policy_regret.py`, and on recorded texts for what a measured prior is
worth.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

PRIOR, PRIOR_DRAFTS = 0.75, 3.0  # rate before anything is known, and the drafts that it is worth at level 1
MEASURED_DRAFTS, DEEPER = 35.0, 0.5  # what it is worth more where it was measured, if trusted; share of it deeper down
MOST_TRUST, LEAST_TRUST = 1000.0, 1 / 32  # odds that measured rates hold for a row: at first, and when they do not
BORROWED_DRAFTS = 2.0  # what the level before is worth at a deeper one; what either is beside the other rows' drafts
OTHERS_DRAFTS = 1.0  # most that the other rows' drafts are worth at a deeper level; at level 1 all of them count
BATCH_MEMORY, ROW_MEMORY = 24, 12  # drafts of a level that are remembered: by the batch, and at least by each row
GAP_MEMORY, USUAL_GAPS = 12, 8.0  # gaps that a row remembers; what the usual ones are worth that are added to them
FADING = 0.99  # of a count, per round in which its level was not tried
HOPED_DRAFTS, GAIN = 3.0, 1.2  # a probe: so many drafts more, all accepted, would make some depth pay by this factor
SHORTEST_WAIT, LONGEST_WAIT = 8, 96  # rounds from one probe to the next
OPTIMISM, ENOUGH = 0.05, 8.0  # by which depths of 2 or more count for more, if measured; drafts per row that halve it
CHANGES = 16  # rounds that a change of depth is spread over, for batches whose rows are replaced
SLOWEST, SLOWEST_MEASURED = 6, 12  # power of the mean over rows' times: 1 is their sum, large ones the slowest row's


class Policy(flax.struct.PyTreeNode):
    """What is known of B rows and S levels, and the choice that follows from it."""

    costs: jax.Array  # [S+1] float32, duration of a round by its depth, in any unit
    change: jax.Array  # [] float32, what a round takes longer that follows one of another depth, in that unit
    prior: jax.Array  # [S] float32, rate of each level before anything is known
    usual: jax.Array  # [S+1] float32, `regularity` of the texts that `prior` was measured on; 1 where it was not
    is_measured: jax.Array  # [] float32, 1 where `prior` was measured on other texts, 0 where it is a guess
    trust: jax.Array  # [B] float32, odds that it holds for the row, by what became of its first drafts of each round
    reached: jax.Array  # [B, S] float32, fading count of drafts of level k verified with all before them accepted
    accepted: jax.Array  # [B, S] float32, those of them that were accepted
    tried: jax.Array  # [S] float32, all that were ever verified of a level, per row of the batch
    run: jax.Array  # [B] float32, tokens since the row's last failure
    gaps: jax.Array  # [B] float32, fading count of gaps
    passes: jax.Array  # [B, S+1] float32, fading sum of the rounds for these gaps, by depth; at depth 0 their tokens
    depth: jax.Array  # [] int32, levels of the next round
    settled: jax.Array  # [] int32, depth that the estimates favour; `depth` is deeper in a round that probes
    promise: jax.Array  # [] float32, worth of the probed depth over that of the settled one, as estimated before it
    wait: jax.Array  # [] int32, rounds until a probe
    interval: jax.Array  # [] int32, the wait after the next probe that fails is twice this
    slowest: int = flax.struct.field(pytree_node=False)  # power of the mean over rows' times


@functools.partial(jax.jit, static_argnames="batch")  # in one call to the device
def init_policy(costs, batch: int, *, change=0.0, prior=None, lengths=None) -> Policy:
    """Nothing seen yet; the first depth follows from the prior.

    `costs`: a round's duration at depths 0..S, S >= 1. `change`: see `Policy`. `prior [S]`: rates of the levels,
    measured on other texts, in rounds of all levels; None: the same guess for all. `lengths [S]`: accept lengths of
    rounds of 1..S levels, measured there too; None: those that such rates give if failures come at random.
    """
    costs = jnp.asarray(costs, jnp.float32)
    assert costs.ndim == 1 and costs.shape[0] > 1, "costs of depth 0 and of at least one more"
    zero, one, by_depth = jnp.zeros((), jnp.int32), jnp.ones(()), jnp.zeros((batch, costs.shape[0]), jnp.float32)
    is_measured = prior is not None
    prior = jnp.broadcast_to(jnp.asarray(PRIOR if prior is None else prior, jnp.float32), costs[1:].shape)
    usual = jnp.ones(costs.shape)
    if lengths is not None:
        usual = usual.at[1:].set(jnp.asarray(lengths, jnp.float32) / (1 + jnp.cumsum(jnp.cumprod(prior))))
    policy = Policy(
        costs=costs,
        change=change * one,
        prior=prior,
        usual=usual,
        is_measured=is_measured * one,
        trust=jnp.full(batch, MOST_TRUST),
        reached=by_depth[:, 1:],
        accepted=by_depth[:, 1:],
        tried=by_depth[0, 1:],
        run=by_depth[:, 0],
        gaps=by_depth[:, 0],
        passes=by_depth,
        depth=zero - 1,
        settled=zero,
        promise=one,
        wait=zero + SHORTEST_WAIT,
        interval=zero + SHORTEST_WAIT,
        slowest=SLOWEST_MEASURED if is_measured else SLOWEST,
    )
    settled, deeper, promise, _ = _choose(policy, jnp.ones(batch, bool), None)
    depth = jnp.where(settled == 0, deeper, settled)  # the first round is the cheapest to learn from
    return policy.replace(depth=depth, settled=settled, promise=promise)


def record(policy: Policy, depth: int | jax.Array, count: jax.Array, took_part: jax.Array) -> Policy:
    """Takes in a round of `depth` levels: `count [B]` drafts accepted, before any are cut, of rows that `took_part`."""
    levels = jnp.arange(1, policy.reached.shape[1] + 1)[None, :]
    was_tried = took_part[:, None] & (levels <= depth)
    was_reached = was_tried & (levels <= count[:, None] + 1)
    was_accepted = was_reached & (levels <= count[:, None])
    memory = max(ROW_MEMORY, BATCH_MEMORY / took_part.shape[0])
    kept = jnp.where(was_reached, 1 - 1 / memory, jnp.where(was_tried, 1.0, FADING))
    failed = took_part & (count < depth)
    tokens = policy.run + jnp.where(took_part & (depth > 0), count + 1, 0)
    old = jnp.where(failed, 1 - 1 / GAP_MEMORY, 1.0)
    needed = jnp.ceil(tokens[:, None] / _widths(policy))
    likelihood = jnp.where(count > 0, policy.prior[0], 1 - policy.prior[0])
    alike = jnp.where(count > 0, policy.accepted[:, 0], policy.reached[:, 0] - policy.accepted[:, 0])
    by_any_rate = (alike + 1) / (policy.reached[:, 0] + 2)  # Laplace's rule of succession
    trust = jnp.clip(policy.trust * likelihood / by_any_rate, LEAST_TRUST, MOST_TRUST)
    return policy.replace(
        trust=jnp.where(was_reached[:, 0], trust, policy.trust),
        reached=kept * policy.reached + was_reached,
        accepted=kept * policy.accepted + was_accepted,
        tried=policy.tried + was_reached.mean(axis=0),
        run=jnp.where(failed, 0, tokens),
        gaps=old * policy.gaps + failed,
        passes=old[:, None] * policy.passes + jnp.where(failed[:, None], needed, 0),
    )


def decide(policy: Policy, active: jax.Array, remaining: jax.Array | None = None) -> Policy:
    """Chooses the depth of the next round.

    Args:
        active: `[B]` bool, rows that run in the next round. The others count for nothing.
        remaining: `[B]` tokens that a row may still take. With it the depth is that which ends the batch soonest, by
            rows' estimated times, and no draft is made behind a limit. None: that which makes the most tokens, for
            batches whose rows are replaced as they end.
    """
    settled, deeper, promise, score = _choose(policy, active, remaining)
    probed = policy.depth > policy.settled
    went_well = probed & (score[policy.depth] > policy.promise * score[policy.settled])
    rose = settled > policy.settled
    longer = jnp.minimum(2 * policy.interval, LONGEST_WAIT)
    interval = jnp.where(rose, SHORTEST_WAIT, jnp.where(probed & ~went_well, longer, policy.interval))
    left = jnp.maximum(policy.wait - 1, 0)
    wait = jnp.where(went_well, 0, jnp.where(probed | rose, interval, left))
    return policy.replace(
        depth=jnp.where(wait == 0, deeper, settled),
        settled=settled,
        promise=promise,
        wait=wait,
        interval=interval,
    )


def observe(policy: Policy, depth, count: jax.Array, *, took_part, active, remaining=None) -> Policy:
    """`record`, then `decide`: a round and the choice behind it."""
    return decide(record(policy, depth, count, took_part), active, remaining)


def may_pay(costs: jax.Array) -> jax.Array:
    """Whether any depth could pay enough to be tried, `[]` bool: with every draft accepted."""
    return (jnp.arange(1, costs.shape[0] + 1) * costs[0] > GAIN * costs).any()


def rates(policy: Policy, active: jax.Array, *, trusting: bool = True) -> jax.Array:
    """`[B, S]`: estimated rate of acceptance at each level, given that all before it were accepted.

    A row's own counts, shrunk towards a mix of what its rate at the level before says (at level 1: of the prior) and
    the other active rows' rate at this one. Those that reach a deep level are the easy rows: hence they count for
    little there. A level's prior over that of the level before is how much likelier it is accepted; where that is above
    1, it is by differences between rows, and fades with what is known of this one. Where it is `trusting`, measured
    rates weigh more, beside the mix, as long as they may hold for the row: by the odds at first, times the likelihood
    of the row's drafts under them over that under a rate of which nothing is known (`record`).
    """
    others_reached, others_accepted = (
        (counts * active[:, None]).sum(axis=0)[None, :] - counts * active[:, None]
        for counts in (policy.reached, policy.accepted)
    )
    measured = MEASURED_DRAFTS * policy.is_measured * jnp.minimum(policy.trust, 1) * trusting
    known = policy.reached[:, 0] / (policy.reached[:, 0] + BORROWED_DRAFTS)
    strength, prior = PRIOR_DRAFTS, policy.prior[0]
    columns = []
    for level in range(policy.reached.shape[1]):
        reached, accepted = others_reached[:, level], others_accepted[:, level]
        if level:
            share = OTHERS_DRAFTS / jnp.maximum(reached, OTHERS_DRAFTS)
            reached, accepted = share * reached, share * accepted
            strength = BORROWED_DRAFTS
            ratio = policy.prior[level] / policy.prior[level - 1]
            ratio = jnp.where(ratio > 1, ratio + (1 - ratio) * known, ratio)
            prior = jnp.minimum(columns[-1] * ratio, jnp.maximum(columns[-1], policy.prior[level]))
        worth = DEEPER * measured if level else measured
        mixed = (accepted + BORROWED_DRAFTS * prior) / (reached + BORROWED_DRAFTS)
        expected = policy.accepted[:, level] + strength * mixed + worth * prior
        columns.append(expected / (policy.reached[:, level] + strength + worth))
    return jnp.stack(columns, axis=1)


def regularity(policy: Policy) -> jax.Array:
    """`[B, S+1]`: a row's tokens per round at each depth, over what random failures as frequent as its own would give.

    Random gaps of mean m take a round of depth d `1 / (1 - (1 - 1/m)^(d+1))` passes. What the last round's depth gives
    is in the rates already, so all are relative to that one. Where nothing is known of the row it is that of the texts
    that were measured, or 1.
    """
    mean = jnp.maximum(policy.passes[:, :1] / jnp.maximum(policy.gaps[:, None], 1e-6), 1)
    per_round = 1 - (1 - 1 / mean) ** _widths(policy)
    over_random = (policy.gaps[:, None] + USUAL_GAPS) / (policy.passes * per_round + USUAL_GAPS / policy.usual[None, :])
    return over_random / jax.lax.dynamic_index_in_dim(over_random, jnp.maximum(policy.depth, 0), axis=1)


def _widths(policy: Policy) -> jax.Array:
    """`[1, S+1]`: most tokens that a round of each depth makes."""
    return jnp.arange(1, policy.passes.shape[1] + 1)[None, :]


def _choose(policy: Policy, active: jax.Array, remaining: jax.Array | None) -> tuple[jax.Array, ...]:
    """The depth that the estimates favour, the one to probe (the same if none), its worth over that of the first; and
    all depths' worth `[S+1]`."""
    rate = rates(policy, active, trusting=remaining is not None)  # one bad guess of many counts where all are awaited
    pace = regularity(policy)
    score = _worth(policy, rate, pace, active, remaining)
    bonus = jnp.pad(OPTIMISM * policy.is_measured / (1 + policy.tried[1:] / ENOUGH), (2, 0))
    best = jnp.argmax(score * (1 + bonus)).astype(jnp.int32)
    evidence = (policy.reached * active[:, None]).sum(axis=0)[None, :]
    hoped = (rate * evidence + HOPED_DRAFTS) / (evidence + HOPED_DRAFTS)
    is_deeper = jnp.arange(1, rate.shape[1] + 1)[None, :] > best
    hope = _worth(policy, jnp.where(is_deeper, hoped, rate), pace, active, remaining)
    shallowest = jnp.argmax(hope > score[best]).astype(jnp.int32)
    deeper = jnp.where((hope > GAIN * score[best]).any(), shallowest, best)
    return best, deeper, score[deeper] / jnp.maximum(score[best], 1e-30), score


def _worth(policy: Policy, rate, pace, active: jax.Array, remaining: jax.Array | None) -> jax.Array:
    """`[S+1]`: what the next round is worth at each depth, by rates `[B, S]` and `pace [B, S+1]` (`regularity`).

    Levels one by one: a product of them along the axis would be a kernel of its own.
    """
    survival = made = jnp.ones(active.shape, jnp.float32)
    columns = [made]
    for level in range(rate.shape[1]):
        survival = survival * rate[:, level]
        if remaining is not None:
            survival = jnp.where(level + 1 < remaining, survival, 0)
        made = made + survival
        columns.append(made)
    tokens = jnp.clip(jnp.stack(columns, axis=1) * pace, 1, _widths(policy))
    is_change = jnp.arange(len(columns)) != policy.depth
    if remaining is None:
        return jnp.where(active[:, None], tokens, 0).sum(axis=0) / (policy.costs + is_change * policy.change / CHANGES)
    time = remaining[:, None] * policy.costs[None, :] / tokens + is_change[None, :] * policy.change
    time = time / jnp.maximum(jnp.where(active, remaining, 0).max() * policy.costs[0], 1e-30)
    return jnp.maximum(jnp.where(active[:, None], time**policy.slowest, 0).sum(axis=0), 1e-30) ** (-1 / policy.slowest)
