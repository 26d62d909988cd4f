"""The speculation loop: draft, verify, accept, commit, in one `lax.while_loop`."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import commit
from mtpjax.decoding.drafters.base import Drafter
from mtpjax.decoding.prefill import insert_rows
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows
from mtpjax.decoding.verify import accept, verify
from mtpjax.models.model import MTPModel

Carry = tuple[DecodeState, jax.Array | None]  # the state, and the rounds left if they are limited


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

    Args:
        params: model parameters.
        state: the rows.
        model: the model.
        drafter: the draft method.
        spec: the shape of the round.
        prepared: the drafter's prepared parameters.

    Returns:
        The new state.
    """
    # 1. Draft: extend the drafter over what the last round committed, then propose W nodes.
    draft, state = drafter.propose(prepared, state, model=model, spec=spec)
    # 2. Verify: one trunk pass scores every node under its ancestor mask.
    verified = verify(params, state, draft, model=model, drafter=drafter, spec=spec)
    # 3. Accept: the rule picks a path and draws one bonus token after it.
    accepted = accept(state, draft, verified, model=model, spec=spec)
    # 4. Commit: keep the path's cache entries, append its tokens, end finished rows.
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
) -> DecodeState:
    """Runs rounds until the rows have ended.

    An adaptive depth is an outer loop around one loop per depth, each of which runs as long as the policy keeps its
    depth. One loop that switches between depths inside would copy the caches in every round.

    Args:
        params: model parameters.
        prepared: the drafter's prepared parameters.
        state: the rows.
        max_rounds: `[]` int32, most rounds to run; None: no limit.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.
        until: "all" stops when every row is done, "any" when one of the running rows is done.

    Returns:
        The new state.
    """
    was_running = ~state.done
    round_ = functools.partial(run_round, params, model=model, drafter=drafter, prepared=prepared)

    def goes_on(carry: Carry) -> jax.Array:
        state, left = carry
        is_needed = ~state.done.all()
        if until == "any":
            is_needed &= ~(state.done & was_running).any()
        return is_needed if left is None else is_needed & (left > 0)

    def advance(carry: Carry, spec: DecodeSpec) -> Carry:
        state, left = carry
        return round_(state, spec=spec), None if left is None else left - 1

    if not spec.is_adaptive:
        return jax.lax.while_loop(goes_on, functools.partial(advance, spec=spec), (state, max_rounds))[0]

    def chosen_depth(state: DecodeState) -> jax.Array:
        assert state.policy is not None
        return jnp.where(state.drafting_disabled, 0, state.policy.depth)

    def keeps_depth(carry: Carry, num_steps: int) -> jax.Array:
        state, _ = carry
        has_room = drafter.has_room(state, num_steps, model=model, spec=spec)
        return goes_on(carry) & has_room & (chosen_depth(state) == num_steps)

    def run_chosen_depth(carry: Carry) -> Carry:
        state, left = carry
        # Before the depth changes, the drafter may have to process positions that waited during plain rounds.
        carry = drafter.make_room(prepared, state, chosen_depth(state), model=model, spec=spec), left
        for num_steps in range(spec.num_steps + 1):
            carry = jax.lax.while_loop(
                functools.partial(keeps_depth, num_steps=num_steps),
                functools.partial(advance, spec=spec.at_depth(num_steps)),
                carry,
            )
        return carry

    return jax.lax.while_loop(goes_on, run_chosen_depth, (state, max_rounds))[0]


@functools.partial(jax.jit, static_argnames=("model", "drafter", "spec"), donate_argnames=("state",))
def decode(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    rows: NewRows,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Decodes a whole batch in one compiled call, without a trip to the host: insert, then run.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: an empty state of B slots; donated.
        rows: B requests.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.

    Returns:
        The state with every row done.
    """
    prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
    state = insert_rows(params, prepared, state, rows, model=model, drafter=drafter, spec=spec)
    return run_rounds(params, prepared, state, model=model, drafter=drafter, spec=spec)
