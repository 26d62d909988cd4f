"""Decodes one token per trunk pass in plain Python, as a reference for the compiled loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.logits import draw_target
from mtpjax.decoding.sampling import SamplingArrays, TokenHistory, apply_penalties_and_bias, distribution
from mtpjax.models.cache import Cache, commit, empty_cache
from mtpjax.models.masks import cached_view
from mtpjax.models.model import MTPModel, bind


def plain_generate(
    params: dict,
    prompt: list[int],
    *,
    model: MTPModel,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    sampling: SamplingArrays | None = None,
) -> list[int]:
    """Continues one prompt, one token per pass. Tests check that the compiled loop returns the same tokens.

    With rule `greedy` or `sample` and the same seed, `speculative_generate` returns these tokens, since the target's
    draws are keyed only by seed and position.

    Args:
        prompt: token ids.
        max_new_tokens: maximum number of new tokens.
        stop_token_ids: the text ends after any of these tokens, and includes it.
        stop_sequences: the text ends after any of these sequences, and includes it.
        sampling: one row's parameters; None picks the arg-max.

    Returns:
        The new tokens.
    """
    capacity = len(prompt) + max_new_tokens
    cache = empty_cache(model.config, model.config.trunk_kinds, 1, capacity, params["embedding"].dtype)
    step = functools.partial(_step, params, model=model, capacity=capacity)
    # 1. Prefill in one pass, without chunks.
    logits, cache = step(jnp.asarray([prompt], jnp.int32), cache)
    if sampling is None:
        sampling = SamplingArrays.greedy(1)
    # 2. Choosing a token needs not only the logits, but also the single stop tokens, which `min_new` bans, and the
    # prompt's tokens, to which the repetition penalty applies.
    new_tokens: list[int] = []
    stops = [(token,) for token in stop_token_ids] + list(stop_sequences)
    single_stops = jnp.array([[stop[0] for stop in stops if len(stop) == 1] + [-1]], jnp.int32)
    V = model.config.vocab_size
    is_prompt = jnp.asarray(np.bincount(prompt, minlength=V)[None] > 0)
    min_new_tokens = int(sampling.min_new[0])
    while True:
        # 3. Choose the next token from the newest logits. Penalties count all tokens so far.
        counts = jnp.asarray(np.bincount(np.array(new_tokens, int), minlength=V)[None], jnp.int32)
        history = TokenHistory(is_prompt, counts)
        num_new, position = len(new_tokens), len(prompt) + len(new_tokens)
        token = _choose_token(logits, sampling, history, num_new, position, single_stops, model=model)
        new_tokens.append(int(token))
        # 4. End the text at a stop sequence or at the limit; otherwise pass the token through the trunk.
        is_stopped = any(tuple(new_tokens[-len(stop) :]) == stop for stop in stops) and len(new_tokens) > min_new_tokens
        if is_stopped or len(new_tokens) == max_new_tokens:
            return new_tokens
        logits, cache = step(jnp.asarray([new_tokens[-1:]], jnp.int32), cache)


@functools.partial(jax.jit, static_argnames="model")
def _choose_token(
    logits: jax.Array,
    sampling: SamplingArrays,
    history: TokenHistory,
    num_new: int,
    position: int,
    stop_ids: jax.Array,
    *,
    model: MTPModel,
) -> jax.Array:
    """Chooses the token at `position`, after `num_new` new tokens, as the compiled loop does."""
    adjusted = apply_penalties_and_bias(
        logits[None, None],
        sampling,
        history,
        path=None,
        num_new=jnp.reshape(num_new, (1, 1)),
        stop_ids=stop_ids,
        num_tokens=model.config.num_tokens or model.config.vocab_size,
    )
    return draw_target(distribution(adjusted, sampling), sampling, jnp.reshape(position, (1, 1)))[0, 0]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _step(params: dict, tokens: jax.Array, cache: Cache, *, model: MTPModel, capacity: int) -> tuple[jax.Array, Cache]:
    """Runs the trunk over `tokens [1, T]`; returns the logits `[V]` after the last token, and the cache."""
    T = tokens.shape[1]
    view = cached_view(model.config, cache.length, T, capacity, num_valid=jnp.full(1, T, jnp.int32))
    apply = bind(model, params)
    output = apply(tokens, view, cache, method="run_trunk")
    return apply(output.hidden[0, -1], method="logits"), commit(output.cache, cache.length + T)
