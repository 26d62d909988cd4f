"""Prefill runs the trunk and the drafter over prompts, chunk by chunk, and commits each row's first new token."""

import jax
import jax.numpy as jnp

from mtpjax.decoding.commit import append_tokens
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.logits import adjust_logits, draw_target
from mtpjax.decoding.sampling import distribution
from mtpjax.decoding.state import DecodeState, view_pass
from mtpjax.models.cache import commit
from mtpjax.models.model import bind
from mtpjax.models.parallel import over_rows
from mtpjax.models.view import read_rows
from mtpjax.models.vocabulary import Vocabulary


def prefill(
    decoder: Decoder,
    weights: Weights,
    state: DecodeState,
    start: jax.Array | None = None,
    *,
    end: jax.Array | None = None,
    max_chunks: int | None = None,
    first_token: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> DecodeState:
    """Processes the prompts from `start` on and commits the first new token of each row.

    Args:
        state: rows whose committed text is the prompt.
        start: `[B]` int32 first position to process; the caches cover the positions before it. None: 0 for every row.
        end: `[B]` int32 position before which a row's chunks end; None: the end of the prompt. A row that stops before
            the end of its prompt gets no token, and a later call continues where this one stops.
        max_chunks: maximum number of chunks; longer rows continue in a later call, as with `end`. None: no limit.
        first_token: `[B]` int32, the first new token if it is already known (after a preemption), else -1. None: -1 for
            all rows.
        allowed: `[B, ceil(V/32)]` int32 bit mask of the allowed first new tokens, as in `adjust_logits`; None: all.

    Returns:
        The state before the first round. Each row has one new token, which is pending because no cache contains it yet.
    """
    # All rows run as many chunks as the row with the most tokens to process. The number of chunks is dynamic, so new
    # prompt lengths do not recompile.
    model, drafter = decoder.model, decoder.drafter
    apply = bind(model, weights.params)
    chunk_width, length = decoder.spec.prefill_chunk, state.length
    B, dtype = len(length), weights.params["embedding"].dtype
    last = length if end is None else jnp.minimum(length, end)
    num_to_process = last if start is None else jnp.maximum(last - start, 0)
    num_chunks = (over_rows(jnp.max, num_to_process) + chunk_width - 1) // chunk_width
    if max_chunks is not None:
        num_chunks = jnp.minimum(num_chunks, max_chunks)

    def process_chunk(carry):
        index, trunk, draft_state, last_hidden = carry
        # 1. Take each row's next tokens. Rows of different lengths share the passes. A row that is complete or has
        # reached its `end` processes garbage in the slots after its text, which later passes overwrite. Without
        # `start`, the position is the same for all rows, so XLA computes masks and rotary angles only once.
        if start is None:
            chunk_start = jnp.full_like(length, index * chunk_width)
        else:
            chunk_start = jnp.minimum(start + index * chunk_width, last)
        num_valid = jnp.clip(last - chunk_start, 0, chunk_width)
        view = view_pass(state, model.config, chunk_start, chunk_width, num_used=num_valid, num_valid=num_valid)
        tokens = read_rows(state.tokens, chunk_start, chunk_width)
        # 2. Run the trunk, then the drafter over the same positions with the trunk's hidden states. The drafter's cache
        #    must cover the whole prompt, or its drafts are accepted less often.
        output = apply(tokens, view, trunk, layer_ids=drafter.layer_ids, method="run_trunk")
        states = drafter.select_states(decoder, output)
        draft_state = drafter.extend(decoder, weights, state.replace(drafter=draft_state), states, chunk_start)
        # 3. Keep the hidden state of each row's last prompt token, which may be in any chunk.
        offset = length - 1 - chunk_start
        hidden = read_rows(output.hidden, jnp.clip(offset, 0, chunk_width - 1), 1)
        is_in_chunk = (offset >= 0) & (offset < chunk_width)
        return index + 1, output.cache, draft_state, jnp.where(is_in_chunk[:, None, None], hidden, last_hidden)

    carry = (0, state.trunk, state.drafter, jnp.zeros((B, 1, model.config.hidden_size), dtype))
    _, trunk, draft_state, last_hidden = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, process_chunk, carry)
    first, logits, is_nan = _choose_first(decoder, weights, state, last_hidden, allowed)
    if first_token is not None:
        first = jnp.where(first_token[:, None] >= 0, first_token[:, None], first)
    # Append the token as pending, because the trunk's cache covers only the tokens before it.
    processed = last
    if max_chunks is not None:
        begin = 0 if start is None else start
        processed = jnp.minimum(last, begin + num_chunks * chunk_width)
    is_complete = processed == length
    state = state.replace(trunk=trunk, drafter=draft_state)
    if is_nan is not None:
        has_failed = is_complete & is_nan & ~state.done
        state = state.replace(failed=state.failed | has_failed, done=state.done | has_failed)
    no_draft = jnp.zeros_like(first)
    state, _ = append_tokens(decoder, state, first, no_draft, is_complete.astype(jnp.int32), logits)
    return state.replace(trunk=commit(trunk, processed))


def _choose_first(
    decoder: Decoder, weights: Weights, state: DecodeState, last_hidden: jax.Array, allowed: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Chooses each row's first new token from the trunk's output at the last prompt token.

    Returns:
        The tokens `[B, 1]`; the unmodified logits `[B, 1, V]`, or None if the arg-max is enough; and `[B]` bool, True
        where a logit is NaN, or None unless `spec.check_nan` is set.
    """
    spec, sampling, length = decoder.spec, state.settings.sampling, state.length
    apply = bind(decoder.model, weights.params)
    # The draw is keyed by the token's position, so plain decoding with the same seed draws the same token. As in
    # verification, no logits are stored if the arg-max is enough.
    if spec.is_greedy and not sampling.changes_logits and not spec.logprobs:
        assert allowed is None
        values, tokens, _ = apply(last_hidden, k=1, method="top_tokens")
        return tokens[:, :, 0], None, jnp.isnan(values[:, 0, 0]) if spec.check_nan else None
    logits, vocabulary = apply(last_hidden, method="own_logits"), Vocabulary.of(decoder.vocab_size)
    is_nan = jnp.isnan(vocabulary.logsumexp(logits)[:, 0]) if spec.check_nan else None
    num_new, masks = jnp.zeros_like(length)[:, None], None if allowed is None else allowed[:, None]
    adjusted = adjust_logits(logits, state, None, num_new, decoder.model, masks)
    if spec.is_greedy:
        return vocabulary.argmax(adjusted), logits, is_nan
    probabilities = distribution(adjusted, sampling, vocabulary)
    return draw_target(probabilities, sampling, length[:, None], vocabulary), logits, is_nan
