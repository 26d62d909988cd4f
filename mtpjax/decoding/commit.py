"""Commit: append the accepted tokens, keep their cache entries, end rows, and update the depth policy."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from mtpjax.decoding.depth_policy import observe
from mtpjax.decoding.drafters.base import Draft, Drafter
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState
from mtpjax.decoding.verify import Acceptance, Verified
from mtpjax.models.cache import commit as commit_cache
from mtpjax.models.cache import gather_path, write_rows
from mtpjax.models.model import MTPModel

Carry = TypeVar("Carry")


def commit(
    state: DecodeState,
    draft: Draft,
    verified: Verified,
    accepted: Acceptance,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    """Ends a round.

    Args:
        state: the rows before the round, with the drafter's state after drafting.
        draft: the verified nodes.
        verified: the trunk's pass over them.
        accepted: the accepted path.
        model: the model.
        drafter: the draft method.
        spec: the shape of the round.

    Returns:
        The state for the next round. Rows that were done are unchanged, except for scratch space.
    """
    length, is_running, K = state.length, ~state.done, spec.num_steps
    trunk, logits, states = verified.trunk, verified.logits, verified.states
    # 1. In a tree the accepted nodes are scattered over the slots: move them next to each other.
    path = accepted.path
    if path is not None:
        trunk = gather_path(trunk, length - 1, path, draft.tokens.shape[1])

        def along_path(leaf: jax.Array) -> jax.Array:
            index = path.reshape(*path.shape, *(1 for _ in leaf.shape[2:]))
            return jnp.take_along_axis(leaf, index, axis=1)

        logits = None if logits is None else along_path(logits)
        states = jax.tree.map(along_path, states)
    # 2. Count. `proposed` and `accepted` have the columns of the deepest round of an adaptive call.
    levels = jnp.arange(1, K + 2)[None, :]
    was_accepted = (levels[:, :-1] <= accepted.count[:, None]) & is_running[:, None]
    was_proposed = jnp.broadcast_to(is_running[:, None], was_accepted.shape)
    unused = ((0, 0), (0, state.proposed.shape[1] - K))
    state = state.replace(
        steps=state.steps + is_running,
        proposed=state.proposed + jnp.pad(was_proposed.astype(jnp.int32), unused),
        accepted=state.accepted + jnp.pad(was_accepted.astype(jnp.int32), unused),
        # A token's origin is its draft level, 0 for the bonus token.
        origin=write_rows(state.origin, jnp.where(levels <= accepted.count[:, None], levels, 0), length),
    )
    # 3. The drafter keeps the hidden states that it processes next.
    state = state.replace(drafter=drafter.commit(state, states, accepted, model=model, spec=spec))
    # 4. Append the tokens up to the first stop sequence or the row's limit.
    state, num_appended = append_tokens(state, accepted.tokens, accepted.count + 1, logits)
    cut_off = jnp.where(is_running, accepted.count + 1 - num_appended, 0)
    # 5. The trunk's cache keeps every token but the newest, which is pending again.
    state = state.replace(discarded=state.discarded + cut_off, trunk=commit_cache(trunk, state.length - 1))
    # 6. An adaptive call chooses the depth of the next round from what was accepted.
    if state.policy is not None:
        learn = functools.partial(
            observe,
            depth=K,
            count=accepted.count,
            took_part=is_running,
            active=~state.done,
            remaining=state.settings.limit - state.length,
        )
        on_cpu = functools.partial(run_as_loop, learn, is_running.any())
        state = state.replace(policy=jax.lax.platform_dependent(state.policy, cpu=on_cpu, default=learn))
    return state


def append_tokens(
    state: DecodeState, tokens: jax.Array, count: jax.Array, logits: jax.Array | None
) -> tuple[DecodeState, jax.Array]:
    """Appends new tokens to the rows that are not done, and ends rows at stop sequences and limits.

    Args:
        state: the rows.
        tokens: `[B, W]` new tokens.
        count: `[B]` how many of them are meant.
        logits: `[B, W, V]` unmodified logits that each token came from; read only if log-probabilities are recorded.

    Returns:
        The state, and how many tokens each row took, `[B]` int32.
    """
    W = tokens.shape[1]
    # The first of: all tokens, the one that completes a stop sequence, the last one that the limit allows.
    is_end = _completes_stop(state, tokens)
    up_to_stop = jnp.where(is_end.any(axis=1), jnp.argmax(is_end, axis=1) + 1, W + 1)
    taken = jnp.minimum(jnp.minimum(count, up_to_stop), state.settings.limit - state.length)
    taken = jnp.where(state.done, 0, taken).astype(jnp.int32)
    length = state.length + taken
    stopped = state.stopped | (~state.done & (up_to_stop <= taken))
    # Log-probabilities are those of the trunk's unmodified logits.
    logprobs, history = state.logprobs, state.history
    if logprobs.shape[1]:
        assert logits is not None
        chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
        logprobs = write_rows(logprobs, chosen - jax.nn.logsumexp(logits, axis=-1), state.length)
    # Penalties count the tokens that were taken.
    if state.settings.sampling.counts_tokens:
        is_new = (jnp.arange(W)[None, :] < taken[:, None]).astype(jnp.int32)
        counts = jax.vmap(lambda counts, tokens, new: counts.at[tokens].add(new))(history.counts, tokens, is_new)
        history = history.replace(counts=counts)
    # Tokens past `length` are garbage that the next round overwrites, so all W are written.
    return state.replace(
        tokens=write_rows(state.tokens, tokens, state.length),
        logprobs=logprobs,
        history=history,
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.settings.limit),
    ), taken


def _completes_stop(state: DecodeState, tokens: jax.Array) -> jax.Array:
    """Returns `[B, W]` whether a stop sequence ends with each of `tokens [B, W]`, which follow the committed text."""
    stops = state.settings.stops  # [B, N, Z]
    W, Z = tokens.shape[1], stops.shape[2]
    # The last Z-1 committed tokens precede the new ones. Tokens of the prompt match nothing.
    place = state.length[:, None] - (Z - 1) + jnp.arange(Z - 1)[None, :]
    tail = jnp.take_along_axis(state.tokens, jnp.maximum(place, 0), axis=1)
    tail = jnp.where(place >= state.settings.prompt_length[:, None], tail, -2)
    joined = jnp.concatenate([tail, tokens], axis=1)
    # Compare the Z tokens that end at each new token with every sequence; -1 pads shorter sequences.
    windows = joined[:, jnp.arange(W)[:, None] + jnp.arange(Z)[None, :]]  # [B, W, Z]
    is_same = (windows[:, :, None] == stops[:, None]) | (stops == -1)[:, None]
    is_used = (stops != -1).any(axis=-1)[:, None]
    is_end = (is_same.all(axis=-1) & is_used).any(axis=-1)
    if state.settings.sampling.features.min_new:
        num_new = (state.length - state.settings.prompt_length)[:, None] + jnp.arange(W)[None, :]
        is_end &= num_new >= state.settings.sampling.min_new[:, None]
    return is_end


def run_as_loop(function: Callable[[Carry], Carry], is_wanted: jax.Array, carry: Carry) -> Carry:
    """Computes `function(carry)` if `is_wanted`, as a loop that runs once.

    Inside a loop that moves large arrays, XLA's CPU backend hands even tiny operations to its thread pool, and waking a
    thread costs more than the whole depth policy. A loop over small arrays runs in one thread. XLA must not be able to
    prove that `is_wanted` holds, or it removes the loop.

    Args:
        function: a function of one tree of arrays.
        is_wanted: `[]` bool.
        carry: its argument.

    Returns:
        The function's result, or `carry`.
    """
    return jax.lax.while_loop(lambda turn: turn[1], lambda turn: (function(turn[0]), ~turn[1]), (carry, is_wanted))[0]
