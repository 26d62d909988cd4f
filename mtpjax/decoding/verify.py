"""Runs one trunk pass over the drafted nodes, and applies the acceptance rule, which picks a path."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.decoding import rng
from mtpjax.decoding.acceptance.chain import match_chain
from mtpjax.decoding.acceptance.walk import match_tree
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.logits import adjust_logits, draw_target
from mtpjax.decoding.sampling import PathTokens, distribution, draw
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Acceptance, DecodeState, Draft, VerifyOutput, view_pass
from mtpjax.models.model import bind
from mtpjax.models.view import TreeSlots
from mtpjax.models.vocabulary import Vocabulary


def verify(decoder: Decoder, weights: Weights, state: DecodeState, draft: Draft) -> VerifyOutput:
    """Runs the trunk once over all W nodes, in the cache slots after the committed text."""
    spec, drafter, apply = decoder.spec, decoder.drafter, bind(decoder.model, weights.params)
    W = spec.num_nodes
    # The pass starts with node 0, the pending token, whose cache entry does not exist yet.
    start = state.length - 1
    # 1. Pad to the narrowest pass that runs fast. Padding follows all real nodes, so no real node attends to it.
    width = spec.verify_width
    num_padding = width - W
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, num_padding)))
    # 2. Mask. In a chain the causal mask is enough. In a tree, each node attends to the committed text, its
    # ancestors and itself, but not to its siblings. Its position follows from its depth.
    tree = None
    if draft.ancestor_mask is not None and draft.depths is not None:
        depths = jnp.pad(draft.depths, ((0, 0), (0, num_padding)))
        tree = TreeSlots(start, depths, jnp.pad(draft.ancestor_mask, ((0, 0), (0, num_padding), (0, num_padding))))
    # A plain decoding step always commits its only node, so recurrent layers may advance their state within the pass.
    # In other rounds they store the contribution of each token until the accepted path is known.
    num_valid = None if spec.num_steps else (~state.done).astype(jnp.int32)
    view = view_pass(state, decoder.model.config, start, width, num_used=W, num_valid=num_valid, tree=tree)
    output = apply(tokens, view, state.trunk, layer_ids=drafter.layer_ids, method="run_trunk")
    # 3. Score. For greedy rows with unmodified logits the arg-max is enough, and a kernel computes it without storing
    #    [B, W, V] logits.
    logits = target_tokens = is_nan = None
    if spec.is_greedy and not state.settings.sampling.changes_logits and not spec.logprobs:
        values, tokens, _ = apply(output.hidden, k=1, method="top_tokens")
        target_tokens, best = tokens[:, :W, 0], values[:, :W, 0]
    else:
        logits = apply(output.hidden, method="own_logits")[:, :W]
        best = Vocabulary.of(decoder.vocab_size).logsumexp(logits) if spec.check_nan else None
    if spec.check_nan and best is not None:
        is_nan = jnp.isnan(best)
    # The drafter needs the hidden states of the accepted nodes in the next round, when it extends over them.
    states = jax.tree.map(lambda kept: kept[:, :W], drafter.select_states(decoder, output))
    return VerifyOutput(logits, target_tokens, states, output.cache, is_nan)


def end_failed_rows(state: DecodeState, verified: VerifyOutput, accepted: Acceptance) -> DecodeState:
    """Ends the rows whose accepted path has a node with NaN logits, before they append anything."""
    assert verified.is_nan is not None
    num_tokens = accepted.tokens.shape[1]
    path = accepted.path
    is_nan = verified.is_nan[:, :num_tokens] if path is None else jnp.take_along_axis(verified.is_nan, path, axis=1)
    is_on_path = jnp.arange(num_tokens)[None, :] <= accepted.num_accepted[:, None]
    has_failed = (is_nan & is_on_path).any(axis=1) & ~state.done
    return state.replace(failed=state.failed | has_failed, done=state.done | has_failed)


def accept(
    decoder: Decoder, state: DecodeState, draft: Draft, verified: VerifyOutput, allowed: jax.Array | None = None
) -> Acceptance:
    """Applies the acceptance rule and draws the bonus token.

    Args:
        decoder: the round's decoder, whose spec contains the rule.
        draft: the nodes, and the distributions q that they were drawn from.
        verified: the outputs of the trunk's pass over the nodes.
        allowed: tokens that may follow each node, as in `adjust_logits`; requires logits. An exact rule never accepts a
            draft that is not allowed after its parent, because the draft's p is 0.

    Returns:
        The accepted path and the tokens that the round appends.
    """
    spec = decoder.spec
    # Without logits, the greedy rule accepts a draft if it equals the arg-max after its parent.
    if verified.target_tokens is not None:
        assert allowed is None
        return _accept_matches(draft, verified.target_tokens, spec.num_steps)
    assert verified.logits is not None
    # On a mesh, V is the size of this device's shard of the vocabulary.
    B, W, V = verified.logits.shape
    K, sampling, vocabulary = spec.num_steps, state.settings.sampling, Vocabulary.of(decoder.vocab_size)
    # 1. Adjust the logits after each node as plain decoding would adjust them after the same text. Penalties must count
    #    the drafted tokens on the node's path, and `min_new` must count the new tokens up to the node's depth.
    depth = jnp.broadcast_to(jnp.arange(W)[None, :], (B, W)) if draft.depths is None else draft.depths
    num_new = (state.length - state.settings.prompt_length)[:, None] + depth
    path_tokens = None
    if sampling.has_penalties:
        mask = draft.ancestor_mask
        if mask is None:
            mask = jnp.broadcast_to(jnp.tri(W, dtype=bool)[None], (B, W, W))
        # The path excludes node 0, because the history already counts the pending token, which is committed.
        path_tokens = PathTokens(draft.tokens, mask & (jnp.arange(W) > 0)[None, None])
    adjusted = adjust_logits(verified.logits, state, path_tokens, num_new, decoder.model, allowed)
    round_start = state.length[:, None]

    # 2. The rules "greedy" and "sample" choose the target's token after each node, the arg-max or a sample from p, and
    # accept the drafts that equal it. The text consists of the target's tokens, so any tree is exact.
    if spec.is_greedy:
        return _accept_matches(draft, vocabulary.argmax(adjusted), K)
    probabilities = distribution(adjusted, sampling, vocabulary)
    if spec.rule.follows == "sample":
        return _accept_matches(draft, draw_target(probabilities, sampling, round_start + depth, vocabulary), K)

    # 3. Other rules may accept each draft with some probability, so they get one uniform number per draft. The noise is
    #    keyed by the position at which the round began and by the node, so no two rounds share it.
    nodes = jnp.arange(1, W + 1 if draft.parents is not None else W)
    uniforms = rng.uniform(sampling.seed, jnp.broadcast_to(round_start, (B, len(nodes))), rng.ACCEPT, nodes)
    q = draft.probabilities
    if q is not None and q.shape[-1] != V:  # a user-defined drafter may return the columns of the whole vocabulary
        q = vocabulary.own(q)
    path, num_accepted, weights = _apply_rule(draft, probabilities, q, uniforms, state, spec, vocabulary)
    if path is None:
        accepted = draft.tokens[:, 1:]
    else:
        accepted = jnp.take_along_axis(draft.tokens, path[:, 1:], axis=1)
        path = None if draft.parents is None else path
    # 4. Draw the bonus token from the weights that the rule returns, such as the residual max(p - q, 0) after a
    #    rejection, or p after a fully accepted path. This correction makes ratio rules exact.
    node = jnp.zeros(1, jnp.int32)
    gumbel = rng.gumbel(sampling.seed, round_start, rng.BONUS, node, V, vocabulary.first_id(V))
    bonus = draw(weights[:, None], gumbel, vocabulary)
    column = jnp.arange(K + 1)[None, :]
    tokens = jnp.where(column < num_accepted[:, None], jnp.pad(accepted, ((0, 0), (0, 1))), bonus)
    return Acceptance(path, num_accepted, tokens)


def _accept_matches(draft: Draft, target_tokens: jax.Array, num_steps: int) -> Acceptance:
    """Accepts the drafts that equal the target's token after their parent; `target_tokens [B, W]` has one per node."""
    # In a chain, accept the longest prefix of matches. The target's tokens are then the accepted drafts, followed by
    # the bonus token.
    if draft.parents is None:
        num_accepted = match_chain(draft.tokens[:, 1:], target_tokens)
        if draft.num_drafted is not None:
            num_accepted = jnp.minimum(num_accepted, draft.num_drafted)
        return Acceptance(None, num_accepted, target_tokens)
    # In a tree, descend to the child that equals the target's token, until there is no such child.
    match = jax.vmap(lambda *row: match_tree(*row, num_steps=num_steps))
    path, num_accepted = match(draft.tokens, draft.parents, target_tokens)
    return Acceptance(path, num_accepted, jnp.take_along_axis(target_tokens, path, axis=1))


def _apply_rule(
    draft: Draft, p: jax.Array, q: jax.Array | None, u: jax.Array, state: DecodeState, spec: DecodeSpec, vocabulary
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Maps the rule over the rows. Returns the fields of `AcceptedPath`, `[B, ...]`; a chain rule's path is None."""
    rule, ends = spec.rule, ()
    function = rule.load()
    static: dict[str, Any] = {}
    assert q is not None or not rule.needs_q
    if rule.drafts == "chain":
        # Chain rules return only the count, because the accepted path is a prefix of the chain.
        nodes = (draft.tokens[:, 1:],)
        ends = () if draft.num_drafted is None else (draft.num_drafted,)
    else:
        # Tree rules walk from the root. A chain is a tree in which node n-1 is the parent of node n.
        parents, (B, W) = draft.parents, draft.tokens.shape
        if parents is None:
            parents = jnp.broadcast_to(jnp.arange(W)[None, :] - 1, (B, W))
            if draft.num_drafted is not None:
                parents = jnp.where(jnp.arange(W)[None, :] <= draft.num_drafted[:, None], parents, -1)
        nodes, static = (draft.tokens, parents), {"num_steps": spec.num_steps}
        if rule.drafts == "fixed tree":
            static["tree"] = spec.tree_shape
    if rule.reads_shard:
        static["vocabulary"] = vocabulary

    def apply_to_row(nodes, p, q, u, ends, params):
        # Parameters are per-row arrays, so they may differ between rows, and new values do not cause a recompilation.
        parameters = {name: params[column] for column, name in enumerate(rule.parameters)}
        rows = (p, q) if rule.needs_q else (p,)
        if not rule.reads_shard:  # gather the columns of the whole vocabulary
            rows = tuple(map(vocabulary.gather, rows))
        found = function(*nodes, *rows, u, *ends, **static, **parameters)
        path, num_accepted, weights = (None, *found) if rule.drafts == "chain" else found
        return path, num_accepted, weights if rule.reads_shard else vocabulary.own(weights)

    return jax.vmap(apply_to_row)(nodes, p, q, u, ends, state.settings.rule_params)
