"""Compares draft depths with the trunk across the borders of chunks, if the mesh splits rows by tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtpjax.models.context import begins_after, is_context_split, split_chunks
from mtpjax.models.forward import DepthsOutput
from mtpjax.training.position_losses import PositionTerms


def chunk_terms(
    compute: Callable[[DepthsOutput, jax.Array], PositionTerms], output: DepthsOutput, targets: jax.Array
) -> PositionTerms:
    """Computes the terms of this device's tokens. Whole rows are computed as they are.

    Depth k is compared with the trunk k positions later, so each chunk becomes a row that also has the trunk's states
    and logits of the next K positions, for K depths. They get no gradient there, because the trunk's distribution gets
    none.

    Args:
        compute: computes the terms of rows, as `chunked_terms` does, from their output and targets.
        output: logits and hidden states of this device's tokens.
        targets: `[1 + depths, B, T]` int32, of the same tokens.
    """
    num_depths = len(targets) - 1
    if not is_context_split() or not num_depths:
        return compute(output, targets)

    def extend(states: jax.Array) -> jax.Array:
        chunks = split_chunks(states)
        return jnp.concatenate([chunks, jax.lax.stop_gradient(begins_after(chunks, num_depths))], axis=1)

    def pad(states: jax.Array) -> jax.Array:
        chunks = split_chunks(states)
        return jnp.pad(chunks, ((0, 0), (0, num_depths), *((0, 0),) * (chunks.ndim - 2)))

    longer = DepthsOutput(
        logits=extend(output.logits),
        hidden=extend(output.hidden),
        mtp_logits=tuple(map(pad, output.mtp_logits)),
        mtp_hidden=tuple(map(pad, output.mtp_hidden)),
    )
    terms = compute(longer, jax.vmap(pad)(targets))
    return jax.tree.map(lambda term: term[..., :-num_depths].reshape(len(term), *targets.shape[1:]), terms)
