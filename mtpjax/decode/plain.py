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
    cache = empty_cache(model.config, model.config.num_hidden_layers, 1, capacity, params["embedding"].dtype)
    token, cache = _step(params, jnp.asarray([prompt], jnp.int32), cache, model=model)
    new = [int(token)]
    while len(new) < max_new_tokens and new[-1] not in stop_token_ids:
        token, cache = _step(params, token[None, None], cache, model=model)
        new.append(int(token))
    return new


@functools.partial(jax.jit, static_argnames="model")
def _step(params, tokens, cache, *, model):
    """Takes in `tokens [1, T]`; returns the arg-max after them, a scalar, and the cache."""
    view = cached_view(
        model.config, cache.length, tokens.shape[1], cache.layers[0][next(iter(cache.layers[0]))].shape[-2]
    )
    apply = bind(model, params)
    hidden, _, cache = apply(tokens, view, cache, method="run_trunk")
    logits = apply(hidden[0, -1], method="logits")
    return jnp.argmax(logits).astype(jnp.int32), commit(cache, cache.length + tokens.shape[1])
