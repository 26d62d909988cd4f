"""The speculation loop: draft, verify, accept, commit, in one `lax.while_loop`."""

import functools
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import commit
from mtpjax.decoding.drafter import Draft, Drafter
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.decoding.verify import accept, end_failed_rows, verify
from mtpjax.models.decoding_layout import run_in_parts
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import over_rows, own_size

Carry = tuple[DecodeState, jax.Array | None]  # the state and the number of rounds left; None: no limit


def run_round(
    params: dict,
    state: DecodeState,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    prepared: Any = None,
) -> DecodeState:
    """Runs one speculative round for every row that is not done.

    A round appends 1 to K+1 tokens to each running row: the accepted drafts and one bonus token from the trunk.

    Args:
        params: model parameters.
        state: the rows before the round.
        model: the model.
        drafter: the draft method.
        spec: the shape of the round.
        prepared: the drafter's prepared parameters (`Drafter.prepare`).

    Returns:
        The state after the round.
    """
    # 1. Draft: extend the drafter over the tokens that the last round committed, then propose W nodes. Node 0 is the
    #    pending token: it is committed, but the trunk has not processed it.
    draft, state = drafter.propose(prepared, state, model=model, spec=spec)
    # 2. to 4. Verify, accept and commit.
    return finish_round(params, state, draft, model=model, drafter=drafter, spec=spec)


def finish_round(
    params: dict,
    state: DecodeState,
    draft: Draft,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    allowed: jax.Array | None = None,
) -> DecodeState:
    """Runs a round from the draft on: verify, accept, commit.

    Args:
        params: model parameters.
        state: the rows, with the drafter's state after drafting.
        draft: the nodes.
        model: the model.
        drafter: the draft method.
        spec: the shape of the round.
        allowed: tokens that may follow each node, as in `adjust_logits`. None: all.

    Returns:
        The state after the round.
    """
    B, W, K = len(state.length), spec.num_nodes, spec.num_steps
    chex.assert_shape(draft.tokens, (B, W))
    chex.assert_type(draft.tokens, jnp.int32)
    # 2. Verify: one trunk pass scores every node under its ancestor mask, so each draft gets the target distribution
    #    that plain decoding would compute after the same tokens.
    verified = verify(params, state, draft, model=model, drafter=drafter, spec=spec)
    if verified.logits is not None:
        chex.assert_shape(verified.logits, (B, W, own_size(model.config.vocab_size, "tensor")))
    # 3. Accept: the rule picks a path from the root and draws one bonus token after it, so every round makes progress
    #    even if it rejects all drafts.
    accepted = accept(state, draft, verified, model=model, spec=spec, allowed=allowed)
    chex.assert_shape((accepted.num_accepted, accepted.tokens), ((B,), (B, K + 1)))
    if spec.check_nan:
        state = end_failed_rows(state, verified, accepted)
    # 4. Commit: keep the cache entries of the path, append its tokens, and end finished rows. The bonus token becomes
    #    the pending token of the next round.
    return commit(state, draft, verified, accepted, model=model, drafter=drafter, spec=spec)


def run_rounds(
    params: dict,
    prepared: Any,
    state: DecodeState,
    max_rounds: jax.Array | None = None,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    until: Literal["all", "any"] = "all",
    depth: int | None = None,
) -> DecodeState:
    """Runs rounds until the rows have ended.

    A fixed depth needs one `lax.while_loop`. An adaptive depth needs an outer loop around one inner loop per depth.
    Each inner loop runs while the policy keeps its depth. A single loop that branches on the depth would make XLA copy
    the caches in every round.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters (`Drafter.prepare`).
        state: the rows.
        max_rounds: `[]` int32, maximum number of rounds; None: no limit.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round; an adaptive call drafts 0..`spec.num_steps` levels.
        until: "all" stops when every row is done, "any" when a row ends that was running at the start.
        depth: draft levels of every round, of an adaptive spec whose caller chooses them; None: the policy does.

    Returns:
        The state after the last round.
    """
    # Free slots are done from the start, so "any" counts only rows that end during this call.
    was_running = ~state.done
    run_one_round = functools.partial(run_round, params, model=model, drafter=drafter, prepared=prepared)

    def should_continue(carry: Carry) -> jax.Array:
        state, rounds_left = carry
        is_running = ~over_rows(jnp.all, state.done)
        if until == "any":
            is_running &= ~over_rows(jnp.any, state.done & was_running)
        return is_running if rounds_left is None else is_running & (rounds_left > 0)

    def advance(carry: Carry, spec: DecodeSpec) -> Carry:
        state, rounds_left = carry
        return run_one_round(state, spec=spec), None if rounds_left is None else rounds_left - 1

    # Fixed depth: every round has the same shape, so one loop is enough.
    if not spec.is_adaptive:
        return jax.lax.while_loop(should_continue, functools.partial(advance, spec=spec), (state, max_rounds))[0]

    # Adaptive depth: shapes are static, so each depth has its own compiled round.
    def chosen_depth(state: DecodeState) -> jax.Array:
        if depth is not None:
            return jnp.int32(depth)
        assert state.policy is not None
        return jnp.where(state.drafting_disabled, 0, state.policy.depth)

    # An inner loop ends when the rows end, when the policy chooses another depth, or when the drafter's buffer is full.
    # Rounds of depth 0 skip the drafter, so hidden states that it has to process later pile up.
    def should_keep_depth(carry: Carry, num_steps: int) -> jax.Array:
        state, _ = carry
        backlog_fits = drafter.backlog_fits(state, num_steps, model=model, spec=spec)
        return should_continue(carry) & backlog_fits & (chosen_depth(state) == num_steps)

    def run_chosen_depth(carry: Carry) -> Carry:
        state, rounds_left = carry
        # Extend the drafter over the backlog of plain rounds first, until a round of the chosen depth fits.
        carry = drafter.drain_backlog(prepared, state, chosen_depth(state), model=model, spec=spec), rounds_left
        # The loop for the chosen depth runs at least one round. Any other loop runs only if the policy has moved to its
        # depth by then; otherwise it costs one test of its condition.
        for num_steps in range(spec.num_steps + 1) if depth is None else (depth,):
            carry = jax.lax.while_loop(
                functools.partial(should_keep_depth, num_steps=num_steps),
                functools.partial(advance, spec=spec.at_depth(num_steps)),
                carry,
            )
        return carry

    return jax.lax.while_loop(should_continue, run_chosen_depth, (state, max_rounds))[0]


@one_graph(static_argnames=("model", "drafter", "spec"), donate_argnames=("state",))
def decode(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Decodes a whole batch in one compiled call: prefill, then rounds until every row is done.

    The host takes no part between the first and the last token; on a ROCm GPU it reads the loop's condition
    (`mtpjax.decoding.gpu_graph`).

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: B requests with empty caches (`start_rows`); donated.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.

    Returns:
        The state with every row done.
    """

    def run(params: dict, draft_params: Any, state: DecodeState) -> DecodeState:
        # Work that depends only on parameters, such as gathering a reduced head, runs once here, not in every round.
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        state = prefill(params, prepared, state, model=model, drafter=drafter, spec=spec)
        return run_rounds(params, prepared, state, model=model, drafter=drafter, spec=spec)

    return run_in_parts(run, model.config, params, draft_params, state)
