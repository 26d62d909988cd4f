"""One token per pass, in Python: what the loop must reproduce, kept as plain as can be."""

import functools

import jax
import jax.numpy as jnp

from mtpjax.cache import commit, empty_cache
from mtpjax.layers.attend import cached_view
from mtpjax.model import MTPModel, bind


def plain_generate(
    params: dict, prompt: list[int], *, model: MTPModel, max_new_tokens: int, stop_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """Greedy continuation of one prompt; ends after `max_new_tokens` or with a stop token, which is returned."""
    capacity = len(prompt) + max_new_tokens
    cache = empty_cache(model.config, model.config.trunk_kinds, 1, capacity, params["embedding"].dtype)
    step = functools.partial(_step, params, model=model, capacity=capacity)
    token, cache = step(jnp.asarray([prompt], jnp.int32), cache)
    new = [int(token)]
    while len(new) < max_new_tokens and new[-1] not in stop_token_ids:
        token, cache = step(token[None, None], cache)
        new.append(int(token))
    return new


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _step(params, tokens, cache, *, model, capacity):
    """Takes in `tokens [1, T]`; returns the arg-max after them, a scalar, and the cache."""
    T = tokens.shape[1]
    view = cached_view(model.config, cache.length, T, capacity, taken=jnp.full(1, T, jnp.int32))
    apply = bind(model, params)
    hidden, _, cache = apply(tokens, view, cache, method="run_trunk")
    logits = apply(hidden[0, -1], method="logits")
    return jnp.argmax(logits).astype(jnp.int32), commit(cache, cache.length + T)
