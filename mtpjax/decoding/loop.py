"""The speculation loop, which drafts, verifies, accepts and commits in one `lax.while_loop`."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import commit
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.state import DecodeState, Draft
from mtpjax.decoding.verify import accept, end_failed_rows, verify
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.parallel import over_rows, own_size

Carry = tuple[DecodeState, jax.Array | None]  # the state and the number of rounds left; None: no limit


def run_round(decoder: Decoder, weights: Weights, state: DecodeState) -> DecodeState:
    """Runs one speculative round for every row that is not done.

    A round appends 1 to K+1 tokens to each running row, the accepted drafts and one bonus token from the trunk.
    """
    # 1. Draft: extend the drafter over the tokens that the last round committed, then propose W nodes. Node 0 is the
    #    pending token, which is committed but not yet processed by the trunk.
    draft, state = decoder.drafter.propose(decoder, weights, state)
    # 2. to 4. Verify, accept and commit.
    return finish_round(decoder, weights, state, draft)


def finish_round(
    decoder: Decoder, weights: Weights, state: DecodeState, draft: Draft, allowed: jax.Array | None = None
) -> DecodeState:
    """Runs the rest of a round after drafting: verifies, accepts and commits.

    Args:
        decoder: the decoder for this depth.
        state: the rows, with the drafter's state after drafting.
        draft: the drafted nodes.
        allowed: tokens that may follow each node, as in `adjust_logits`. None: all.
    """
    B, W, K = len(state.length), decoder.spec.num_nodes, decoder.spec.num_steps
    chex.assert_shape(draft.tokens, (B, W))
    chex.assert_type(draft.tokens, jnp.int32)
    # 2. Verify: one trunk pass scores every node under its ancestor mask, so each draft gets the target distribution
    #    that plain decoding would compute after the same tokens.
    verified = verify(decoder, weights, state, draft)
    if verified.logits is not None:
        chex.assert_shape(verified.logits, (B, W, own_size(decoder.vocab_size, "tensor")))
    # 3. Accept: the rule picks a path from the root and draws one bonus token after it, so every round makes progress
    #    even if it rejects all drafts.
    accepted = accept(decoder, state, draft, verified, allowed)
    chex.assert_shape((accepted.num_accepted, accepted.tokens), ((B,), (B, K + 1)))
    if decoder.spec.check_nan:
        state = end_failed_rows(state, verified, accepted)
    # 4. Commit: keep the cache entries of the path, append its tokens, and end finished rows. The bonus token becomes
    #    the pending token of the next round.
    return commit(decoder, state, draft, verified, accepted)


def run_rounds(
    decoder: Decoder,
    weights: Weights,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
    *,
    depth: int | None = None,
) -> DecodeState:
    """Runs rounds until all rows have ended.

    A fixed depth needs one `lax.while_loop`. An adaptive depth needs an outer loop around one inner loop per depth.
    Each inner loop runs while the policy chooses its depth. A single loop that branches on the depth would make XLA
    copy the caches in every round.

    Args:
        decoder: the decoder; an adaptive one drafts 0..`spec.num_steps` levels.
        max_rounds: `[]` int32, maximum number of rounds; None: no limit.
        depth: draft levels per round, if the caller of an adaptive spec fixes them; None: the policy chooses.

    Returns:
        The state after the last round.
    """
    spec, drafter = decoder.spec, decoder.drafter

    def should_continue(carry: Carry) -> jax.Array:
        state, rounds_left = carry
        is_running = ~over_rows(jnp.all, state.done)
        return is_running if rounds_left is None else is_running & (rounds_left > 0)

    def advance(carry: Carry, decoder: Decoder) -> Carry:
        state, rounds_left = carry
        return run_round(decoder, weights, state), None if rounds_left is None else rounds_left - 1

    # At a fixed depth, every round has the same shape, so one loop is enough.
    if not spec.is_adaptive:
        return jax.lax.while_loop(should_continue, functools.partial(advance, decoder=decoder), (state, max_rounds))[0]

    # At an adaptive depth, each depth needs its own compiled round, because shapes are static.
    def chosen_depth(state: DecodeState) -> jax.Array:
        if depth is not None:
            return jnp.int32(depth)
        assert state.policy is not None
        return jnp.where(state.drafting_disabled, 0, state.policy.depth)

    # An inner loop ends when the rows end, when the policy changes the depth, or when the drafter's buffer is full. The
    # buffer fills because rounds of depth 0 skip the drafter, so the hidden states that it must process later
    # accumulate.
    def should_keep_depth(carry: Carry, num_steps: int) -> jax.Array:
        state, _ = carry
        backlog_fits = drafter.backlog_fits(decoder, state, num_steps)
        return should_continue(carry) & backlog_fits & (chosen_depth(state) == num_steps)

    def run_chosen_depth(carry: Carry) -> Carry:
        state, rounds_left = carry
        # First extend the drafter over the backlog from plain rounds, until a round of the chosen depth fits.
        carry = drafter.drain_backlog(decoder, weights, state, chosen_depth(state)), rounds_left
        # The loop for the chosen depth runs at least one round. The other loops run only if the policy has moved to
        # their depth by then; otherwise each costs one test of its condition.
        for num_steps in range(spec.num_steps + 1) if depth is None else (depth,):
            carry = jax.lax.while_loop(
                functools.partial(should_keep_depth, num_steps=num_steps),
                functools.partial(advance, decoder=decoder.at_depth(num_steps)),
                carry,
            )
        return carry

    return jax.lax.while_loop(should_continue, run_chosen_depth, (state, max_rounds))[0]


@one_graph(static_argnames=("decoder", "is_started"), donate_argnames=("state",))
def decode(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
    *,
    decoder: Decoder,
    is_started: bool = False,
) -> DecodeState:
    """Decodes a whole batch in one compiled call, which runs prefill and then rounds until every row is done.

    The host is not involved between the first and the last token, except on a ROCm GPU, where it reads the loop
    condition in every round (`mtpjax.decoding.gpu_graph`).

    Args:
        state: B requests with empty caches (`start_rows`); donated.
        max_rounds: `[]` int32, maximum number of rounds; None: no limit.
        is_started: True if `state` comes from an earlier call, so prefill is already done.

    Returns:
        The state once every row is done, or after `max_rounds` rounds.
    """

    def run(params: dict, draft_params: Any, state: DecodeState, max_rounds: jax.Array | None) -> DecodeState:
        # Work that depends only on parameters, such as gathering a reduced head, runs once here, not in every round.
        weights = decoder.prepare(params, draft_params)
        if not is_started:
            state = prefill(decoder, weights, state)
        return run_rounds(decoder, weights, state, max_rounds)

    return run_on_shards(run, decoder.model.config, params, draft_params, state, max_rounds)
