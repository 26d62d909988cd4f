"""The law of sampled texts: the second new token of many rows against its distribution by enumeration."""

import jax
import numpy as np

from mtpjax import SamplingParams, forward, speculative_generate


def first_token_law(sampled: np.ndarray, expected: np.ndarray) -> float:
    """Largest distance between a frequency and its probability, in standard errors."""
    share = np.bincount(sampled, minlength=len(expected)) / len(sampled)
    return float(np.max(np.abs(share - expected) / np.sqrt(expected * (1 - expected) / len(sampled))))


def second_tokens(model, params, config, draft_params=None, batch=4096, **sampling):
    """Second new token of rows that share a prompt and differ in their seeds; the first round verifies it."""
    rows = np.tile([[1, 2, 3, 1, 2, 3, 1]], (batch, 1))
    args = {
        "model": model,
        "config": config,
        "sampling": SamplingParams(temperature=1.0, **sampling),
        "key": jax.random.key(5),
    }
    result = speculative_generate(params, rows, **args, draft_params=draft_params)
    return result.tokens[:, 1], result


def second_token_law(model, params):
    """`[V]`: probability of the second token, summed over the first one."""
    V = model.config.vocab_size
    prompt = [1, 2, 3, 1, 2, 3, 1]
    rows = np.concatenate([np.tile(prompt, (V, 1)), np.arange(V)[:, None]], axis=1)
    probabilities = np.asarray(jax.nn.softmax(forward(params, rows, model=model, num_depths=0).logits))
    return probabilities[0, -2] @ probabilities[:, -1]
