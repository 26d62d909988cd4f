"""Verifying: one trunk pass over the drafted nodes, and what a rule makes of it."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding import acceptance, rng
from mtpjax.decoding.draft import Draft, adjust_logits
from mtpjax.decoding.sampling import Path, distribution, draw, draw_target
from mtpjax.decoding.state import DecodeState, Plan
from mtpjax.models.cache import Cache
from mtpjax.models.layers.attend import Branches, cached_view
from mtpjax.models.model import MTPModel, bind


class Verified(flax.struct.PyTreeNode):
    """The trunk's pass over W nodes."""

    logits: jax.Array | None  # [B, W, V] float32, as they are; None where nothing reads them
    choices: jax.Array | None  # [B, W] int32, the tokens of the largest, where nothing else is read
    entering: jax.Array  # [B, W, D], what the modules take in
    trunk: Cache  # with the nodes appended


class Verdict(flax.struct.PyTreeNode):
    """What a rule accepted."""

    path: jax.Array | None  # [B, K+1] int32, nodes; None: 0, 1, … of a chain
    count: jax.Array  # [B] int32, accepted drafts
    tokens: jax.Array  # [B, K+1] int32: the accepted drafts and one more token; behind them garbage


def verify(params: dict, state: DecodeState, draft: Draft, *, model: MTPModel, plan: Plan) -> Verified:
    """Passes the nodes through the trunk, each after its ancestors, behind the committed text."""
    apply = bind(model, params)
    start, W = state.length - 1, draft.tokens.shape[1]
    width = max(W, plan.min_rows)
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, width - W)))
    branches = None
    if draft.is_on is not None and draft.depths is not None:
        extra = width - W
        depth = jnp.pad(draft.depths, ((0, 0), (0, extra)))
        branches = Branches(start, depth, jnp.pad(draft.is_on, ((0, 0), (0, extra), (0, extra))))
    taken = None if plan.num_steps else (~state.done).astype(jnp.int32)
    view = cached_view(model.config, start, width, state.tokens.shape[1], taken=taken, branches=branches)
    hidden, before, trunk = apply(tokens, view, state.trunk, method="run_trunk")
    logits = choices = None
    if plan.rule == "greedy" and not state.sampling.changes_logits and state.logprobs is None:
        choices = apply(hidden, k=1, method="top_tokens")[1][:, :W, 0]
    else:
        logits = apply(hidden, method="logits")[:, :W]
    return Verified(logits, choices, apply(hidden, before, method="entering")[:, :W], trunk)


def judge(state: DecodeState, draft: Draft, verified: Verified, *, model: MTPModel, plan: Plan) -> Verdict:
    """Accepts drafts by `plan.rule`, given what the trunk says after each node."""
    if verified.choices is not None:
        return _follow(draft, verified.choices, plan.num_steps)
    assert verified.logits is not None
    B, W, V = verified.logits.shape
    K = plan.num_steps
    depth = jnp.broadcast_to(jnp.arange(W)[None, :], (B, W)) if draft.depths is None else draft.depths
    num_new = (state.length - state.prompt_length)[:, None] + depth
    path = None
    if state.sampling.counts_tokens:
        is_on = jnp.broadcast_to(jnp.tri(W, dtype=bool)[None], (B, W, W)) if draft.is_on is None else draft.is_on
        path = Path(draft.tokens, is_on & (jnp.arange(W) > 0)[None, None])  # the pending token is history
    adjusted = adjust_logits(verified.logits, state, path, num_new, model)
    seed, began = state.sampling.seed, state.length[:, None]

    if plan.rule in ("greedy", "sample"):
        if plan.rule == "greedy":
            choices = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
        else:
            probabilities = distribution(adjusted, state.sampling)
            choices = draw_target(probabilities, state.sampling, began + depth)
        return _follow(draft, choices, K)

    probabilities = distribution(adjusted, state.sampling)
    nodes = jnp.arange(1, W + 1 if draft.parents is not None else W)
    coins = rng.uniform(seed, jnp.broadcast_to(began, (B, len(nodes))), rng.ACCEPT, nodes)
    if plan.rule in ("token", "block"):
        assert draft.probabilities is not None
        rule = {"token": acceptance.token_chain, "block": acceptance.block_chain}[plan.rule]
        count, weights = jax.vmap(rule)(draft.tokens[:, 1:], probabilities, draft.probabilities, coins)
        walked, accepted = None, draft.tokens[:, 1:]
    else:
        parents = draft.parents
        if parents is None:
            parents = jnp.broadcast_to(jnp.arange(W)[None, :] - 1, (B, W))
        walk = jax.vmap(_tree_rule(plan))(draft.tokens, parents, probabilities, draft.probabilities, coins)
        walked, count, weights = walk.path, walk.count, walk.weights
        accepted = jnp.take_along_axis(draft.tokens, walked[:, 1:], axis=1)
        walked = None if draft.parents is None else walked
    bonus = draw(weights[:, None], rng.gumbel(seed, began, rng.FINAL, jnp.zeros(1, jnp.int32), V))
    places = jnp.arange(K + 1)[None, :]
    tokens = jnp.where(places < count[:, None], jnp.pad(accepted, ((0, 0), (0, 1))), bonus)
    return Verdict(walked, count, tokens)


def _follow(draft: Draft, choices: jax.Array, num_steps: int) -> Verdict:
    """Accepts drafts that are the trunk's `choices [B, W]`."""
    if draft.parents is None:
        return Verdict(None, acceptance.accept_greedy(draft.tokens[:, 1:], choices), choices)
    follow = jax.vmap(lambda *row: acceptance.follow(*row, num_steps=num_steps))
    walked, count = follow(draft.tokens, draft.parents, choices)
    return Verdict(walked, count, jnp.take_along_axis(choices, walked, axis=1))


def _tree_rule(plan: Plan):
    """One row's rule: tokens, parents, p, q and coins to a walk."""
    K = plan.num_steps
    if plan.rule == "recursive":
        assert plan.shape is not None
        topk = plan.shape.topk
        return lambda tokens, parents, p, q, u: acceptance.recursive_tree(
            tokens, parents, p, q, u, num_steps=K, topk=topk
        )
    if plan.rule == "traversal":
        assert plan.shape is not None
        shape = plan.shape.parents
        return lambda tokens, _, p, q, u: acceptance.traversal_tree(tokens, p, q, u, parents=shape, num_steps=K)
    if plan.rule == "threshold":
        single, acc = plan.parameters
        return lambda tokens, parents, p, _, u: acceptance.threshold_tree(
            tokens, parents, p, u, single=single, acc=acc, num_steps=K
        )
    if plan.rule == "typical":
        epsilon, delta = plan.parameters
        return lambda tokens, parents, p, *_: acceptance.typical_tree(
            tokens, parents, p, epsilon=epsilon, delta=delta, num_steps=K
        )
    topk, delta = plan.parameters
    return lambda tokens, parents, p, *_: acceptance.relaxed_tree(
        tokens, parents, p, topk=int(topk), delta=delta, num_steps=K
    )
