"""Log-probabilities of a given text, for `echo` and for clients that compare answers by their likelihood."""

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.distributed import gather_processes
from mtpjax.models.forward import forward
from mtpjax.models.model import MTPModel
from mtpjax.serving.request import Scores
from mtpjax.serving.sizes import bucket, fractions_of

MAX_TOP = 20  # alternatives per token


def score_sizes(max_length: int) -> tuple[int, ...]:
    """Returns the lengths that texts are padded to, ascending; each has its own program."""
    return fractions_of(8, max_length, 64)


def check_text(tokens: list[int], num_top: int, *, vocab_size: int, max_length: int) -> None:
    """Checks the arguments of `score_text`.

    Args:
        tokens: the text.
        num_top: alternatives per token.
        vocab_size: ids are 0 .. vocab_size - 1.
        max_length: most tokens of a text.

    Raises:
        ValueError: for an empty or too long text, ids outside the vocabulary, or too many alternatives.
    """
    if not 1 <= len(tokens) <= max_length:
        raise ValueError(f"a text to score must have 1..{max_length} tokens, got {len(tokens)}")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(f"the text holds a token id outside 0..{vocab_size - 1}")
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"num_top must be within 0..{MAX_TOP}, got {num_top}")


def score_text(params: dict, tokens: list[int], num_top: int, *, model: MTPModel, max_length: int) -> Scores:
    """Scores a text with the trunk.

    Args:
        params: model parameters.
        tokens: the text.
        num_top: alternatives per token, at most `MAX_TOP`.
        model: the model.
        max_length: most tokens of a text.

    Returns:
        The log-probability of each token, given those before it.

    Raises:
        ValueError: for an empty or too long text, ids outside the vocabulary, or too many alternatives.
    """
    check_text(tokens, num_top, vocab_size=model.config.vocab_size, max_length=max_length)
    padded = np.zeros((1, bucket(len(tokens), score_sizes(max_length))), np.int32)
    padded[0, : len(tokens)] = tokens
    scored = score(params, padded, np.array([len(tokens)], np.int32), model=model)
    logprobs, ids, top = jax.device_get(gather_processes(scored))
    count = len(tokens) - 1
    return Scores(
        logprobs=[None, *logprobs[0, :count].tolist()],
        top_ids=[[], *ids[0, :count, :num_top].tolist()],
        top_logprobs=[[], *top[0, :count, :num_top].tolist()],
    )


@one_graph(static_argnames=("model",))
def score(
    params: dict, tokens: jax.Array, lengths: jax.Array, *, model: MTPModel
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities of tokens 1.. `[1, T-1]`, and ids and log-probabilities of the best ones."""
    logits = forward(params, tokens, model=model, lengths=lengths, num_depths=0).logits[:, :-1]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    values, ids = jax.lax.top_k(logprobs, min(MAX_TOP, logprobs.shape[-1]))
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0], ids, values
