"""One token per pass, in Python: what the loop must reproduce, kept as plain as can be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.sampling import History, Sampling, adjust, distribution, draw_target
from mtpjax.models.cache import commit, empty_cache
from mtpjax.models.layers.attend import cached_view
from mtpjax.models.model import MTPModel, bind


def plain_generate(
    params: dict,
    prompt: list[int],
    *,
    model: MTPModel,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    sampling: Sampling | None = None,
) -> list[int]:
    """Continuation of one prompt; ends after `max_new_tokens` or with a stop token or sequence, which is returned.

    `sampling` is one row's; None is the arg-max.
    """
    capacity = len(prompt) + max_new_tokens
    cache = empty_cache(model.config, model.config.trunk_kinds, 1, capacity, params["embedding"].dtype)
    step = functools.partial(_step, params, model=model, capacity=capacity)
    logits, cache = step(jnp.asarray([prompt], jnp.int32), cache)
    if sampling is None:
        sampling = Sampling.greedy(1)
    new: list[int] = []
    stops = [(token,) for token in stop_token_ids] + list(stop_sequences)
    singles = np.array([stop[0] for stop in stops if len(stop) == 1] + [-1], np.int32)
    V = model.config.vocab_size
    is_prompt = jnp.asarray(np.bincount(prompt, minlength=V)[None] > 0)
    least = 0 if sampling.min_new is None else int(sampling.min_new[0])
    while True:
        counts = jnp.asarray(np.bincount(np.array(new, int), minlength=V)[None], jnp.int32)
        history = History(is_prompt, counts)
        new.append(int(_pick(logits, sampling, history, len(new), len(prompt) + len(new), singles, model=model)))
        is_stopped = any(tuple(new[-len(stop) :]) == stop for stop in stops) and len(new) > least
        if is_stopped or len(new) == max_new_tokens:
            return new
        logits, cache = step(jnp.asarray([new[-1:]], jnp.int32), cache)


@functools.partial(jax.jit, static_argnames="model")
def _pick(logits, sampling: Sampling, history: History, num_new, position, stop_ids, *, model: MTPModel) -> jax.Array:
    """Adjusts, filters and draws: the token for `position`, behind `num_new` new ones."""
    adjusted = adjust(
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
def _step(params, tokens, cache, *, model, capacity):
    """Takes in `tokens [1, T]`; returns the logits after them `[V]`, and the cache."""
    T = tokens.shape[1]
    view = cached_view(model.config, cache.length, T, capacity, taken=jnp.full(1, T, jnp.int32))
    apply = bind(model, params)
    hidden, _, cache = apply(tokens, view, cache, method="run_trunk")
    return apply(hidden[0, -1], method="logits"), commit(cache, cache.length + T)
