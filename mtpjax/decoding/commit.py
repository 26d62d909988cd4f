"""Commits a round: appends the accepted tokens, keeps their cache entries, ends rows, and updates the depth policy."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.depth_policy import update_policy
from mtpjax.decoding.state import Acceptance, DecodeState, Draft, VerifyOutput
from mtpjax.models.cache import commit as commit_cache
from mtpjax.models.cache import gather_path
from mtpjax.models.parallel import all_rows, over_rows
from mtpjax.models.view import write_rows
from mtpjax.models.vocabulary import Vocabulary

Carry = TypeVar("Carry")


def commit(
    decoder: Decoder, state: DecodeState, draft: Draft, verified: VerifyOutput, accepted: Acceptance
) -> DecodeState:
    """Ends a round by keeping the nodes that the rule accepted and dropping the others.

    Args:
        state: the rows before the round, with the drafter's state after drafting.
        draft: the verified nodes.
        verified: the outputs of the trunk's pass over the nodes.
        accepted: the accepted path and the tokens to append.

    Returns:
        The state for the next round. Rows that were already done change only in the scratch space after their text.
    """
    length, is_running, K = state.length, ~state.done, decoder.spec.num_steps
    trunk, logits, states = verified.trunk, verified.logits, verified.states
    # 1. In a tree the accepted nodes are scattered over W cache slots. Move them next to each other, so that slot i
    #    holds position i again. In a chain they are already in place.
    path = accepted.path
    if path is not None:
        trunk = gather_path(trunk, length - 1, path, draft.tokens.shape[1], state.storage.running(state.done))

        def along_path(leaf: jax.Array) -> jax.Array:
            index = path.reshape(*path.shape, *(1 for _ in leaf.shape[2:]))
            return jnp.take_along_axis(leaf, index, axis=1)

        logits = None if logits is None else along_path(logits)
        states = jax.tree.map(along_path, states)
    # 2. Count proposed and accepted drafts per level. The counters have one column for each level of the deepest round.
    #    In an adaptive call, a shallower round leaves the columns of deeper levels unchanged.
    levels = jnp.arange(1, K + 2)[None, :]
    was_accepted = (levels[:, :-1] <= accepted.num_accepted[:, None]) & is_running[:, None]
    was_proposed = jnp.broadcast_to(is_running[:, None], was_accepted.shape)
    if draft.num_drafted is not None:
        was_proposed &= levels[:, :-1] <= draft.num_drafted[:, None]
    padding = ((0, 0), (0, state.proposed.shape[1] - K))
    state = state.replace(
        rounds=state.rounds + is_running.astype(jnp.int32),
        proposed=state.proposed + jnp.pad(was_proposed.astype(jnp.int32), padding),
        accepted=state.accepted + jnp.pad(was_accepted.astype(jnp.int32), padding),
    )
    # 3. The drafter keeps the trunk states of the accepted nodes, and processes them in the next round (draft extend).
    state = state.replace(drafter=decoder.drafter.commit(decoder, state, states, accepted))
    # 4. Append the tokens up to the first stop sequence or the row's limit. The rest counts as discarded. A token's
    #    origin is the draft level that proposed it, or 0 for the bonus token.
    origins = jnp.where(levels <= accepted.num_accepted[:, None], levels, 0)
    state, num_appended = append_tokens(decoder, state, accepted.tokens, origins, accepted.num_accepted + 1, logits)
    cut_off = jnp.where(is_running, accepted.num_accepted + 1 - num_appended, 0)
    # 5. Commit the trunk's cache except for the newest token, which becomes the pending token because the trunk has not
    #    processed it. Entries of rejected nodes stay in the later slots until the next round overwrites them.
    state = state.replace(discarded=state.discarded + cut_off, trunk=commit_cache(trunk, state.length - 1))
    # 6. An adaptive call chooses the depth of the next round from the acceptance counts.
    if state.policy is not None:
        update = functools.partial(
            update_policy,
            depth=K,
            num_accepted=all_rows(accepted.num_accepted),
            was_active=all_rows(is_running),
            is_active=all_rows(~state.done),
            remaining=all_rows(state.settings.limit - state.length),
        )
        on_cpu = functools.partial(cond_as_while_loop, update, over_rows(jnp.any, is_running))
        state = state.replace(policy=jax.lax.platform_dependent(state.policy, cpu=on_cpu, default=update))
    return state


def append_tokens(
    decoder: Decoder,
    state: DecodeState,
    tokens: jax.Array,
    origins: jax.Array,
    num_valid: jax.Array,
    logits: jax.Array | None,
) -> tuple[DecodeState, jax.Array]:
    """Appends new tokens to the rows that are not done, and ends rows at stop sequences and limits.

    Args:
        decoder: the decoder, which provides the vocabulary.
        tokens: `[B, W]` int32 new tokens, valid up to `num_valid`.
        origins: `[B, W]` int32 draft level that proposed each token; 0 if no draft did.
        num_valid: `[B]` int32 number of valid tokens per row.
        logits: `[B, W, V]` unmodified logits for each token; read only if log-probabilities are recorded.

    Returns:
        The state, and the number of tokens that each row appended, `[B]` int32.
    """
    W = tokens.shape[1]
    # 1. Cut each row after the first token that completes a stop sequence, and at the row's limit. Rows that are done
    #    append nothing.
    is_end = _completes_stop(state, tokens)
    up_to_stop = jnp.where(is_end.any(axis=1), jnp.argmax(is_end, axis=1) + 1, W + 1)
    num_appended = jnp.minimum(jnp.minimum(num_valid, up_to_stop), state.settings.limit - state.length)
    num_appended = jnp.where(state.done, 0, num_appended).astype(jnp.int32)
    length = state.length + num_appended
    stopped = state.stopped | (~state.done & (up_to_stop <= num_appended))
    # 2. Record log-probabilities under the trunk's unmodified logits, before temperature, penalties and bans.
    logprobs, history = state.logprobs, state.history
    if logprobs.shape[1]:
        assert logits is not None
        vocabulary = Vocabulary.of(decoder.vocab_size)
        read = lambda columns: jnp.take_along_axis(logits, columns[:, :, None], axis=2)[:, :, 0]
        chosen = vocabulary.look_up(read, tokens, logits.shape[2])
        logprobs = write_rows(logprobs, chosen - vocabulary.logsumexp(logits), state.length)
    # 3. Count the appended tokens for the penalties.
    if state.settings.sampling.has_penalties:
        is_new = (jnp.arange(W)[None, :] < num_appended[:, None]).astype(jnp.int32)
        counts = jax.vmap(lambda counts, tokens, new: counts.at[tokens].add(new))(history.counts, tokens, is_new)
        history = history.replace(counts=counts)
    # 4. Write all W tokens, which keeps the shape static. Tokens from `length` on are garbage that the next round
    #    overwrites.
    return state.replace(
        tokens=write_rows(state.tokens, tokens, state.length),
        origin=write_rows(state.origin, origins, state.length),
        logprobs=logprobs,
        history=history,
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.settings.limit),
    ), num_appended


def _completes_stop(state: DecodeState, tokens: jax.Array) -> jax.Array:
    """Returns `[B, W]` bool, True where one of the new `tokens [B, W]` completes a stop sequence."""
    stops = state.settings.stops  # [B, N, Z]
    W, Z = tokens.shape[1], stops.shape[2]
    # 1. Prepend the last Z-1 committed tokens, since a stop sequence may span two rounds. Stop sequences apply to new
    #    tokens only, so prompt tokens become -2, which matches no entry of `stops`.
    position = state.length[:, None] - (Z - 1) + jnp.arange(Z - 1)[None, :]
    tail = jnp.take_along_axis(state.tokens, jnp.maximum(position, 0), axis=1)
    tail = jnp.where(position >= state.settings.prompt_length[:, None], tail, -2)
    joined = jnp.concatenate([tail, tokens], axis=1)
    # 2. Compare the Z tokens that end at each new token with every sequence. -1 pads shorter sequences on the left and
    #    matches any token; rows of `stops` that contain only -1 are unused.
    windows = joined[:, jnp.arange(W)[:, None] + jnp.arange(Z)[None, :]]  # [B, W, Z]
    is_same = (windows[:, :, None] == stops[:, None]) | (stops == -1)[:, None]
    is_used = (stops != -1).any(axis=-1)[:, None]
    is_end = (is_same.all(axis=-1) & is_used).any(axis=-1)
    # 3. A row with fewer than `min_new` tokens does not end at a stop sequence.
    if state.settings.sampling.features.min_new:
        num_new = (state.length - state.settings.prompt_length)[:, None] + jnp.arange(W)[None, :]
        is_end &= num_new >= state.settings.sampling.min_new[:, None]
    return is_end


def cond_as_while_loop(function: Callable[[Carry], Carry], predicate: jax.Array, carry: Carry) -> Carry:
    """Computes `function(carry)` if `predicate` is True, in a loop that runs once.

    Inside a loop that moves large arrays, XLA's CPU backend runs even tiny operations in its thread pool, and waking a
    thread costs more than the whole depth policy. A loop that carries only small arrays runs in one thread. `predicate`
    must be a value that XLA cannot evaluate at compile time, or XLA removes the loop.

    Args:
        function: returns a pytree with the same shapes as its argument.
        predicate: `[]` bool.
        carry: the argument of `function`, which is returned if `predicate` is False.
    """

    def run_once(loop_carry):
        carry, predicate = loop_carry
        return function(carry), ~predicate

    return jax.lax.while_loop(lambda loop_carry: loop_carry[1], run_once, (carry, predicate))[0]
