"""The gated delta rule in plain JAX, both token by token, which defines the meaning, and in chunks."""

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens per chunk of `gated_delta`
MAX_UNROLLED_TOKENS = 16  # plain JAX unrolls the loop over at most this many tokens


def _repeat_for_value_heads(q, k, v):
    """Converts to float32 and repeats each key head's queries and keys for its value heads."""
    groups = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (q, k))
    return q, k, v.astype(jnp.float32)


def gated_delta_steps_reference(q, k, v, log_decay, beta, state):
    """Computes outputs, corrections and the last state token by token; this defines the meaning of every op here."""

    def step(state, token):
        q, k, v, log_decay, beta = token
        # Decay the state, correct it where it predicts v wrongly for this key, then read it with the query.
        state = state * jnp.exp(log_decay)[:, :, None, None]
        correction = (v - jnp.einsum("BJPQ,BJP->BJQ", state, k)) * beta[:, :, None]
        state = state + k[:, :, :, None] * correction[:, :, None, :]
        return state, (jnp.einsum("BJPQ,BJP->BJQ", state, q), correction)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (*_repeat_for_value_heads(q, k, v), log_decay, beta))
    state, outputs = jax.lax.scan(step, state, tokens, unroll=q.shape[1] <= MAX_UNROLLED_TOKENS)
    return *(x.swapaxes(0, 1) for x in outputs), state


def gated_delta_reference(q, k, v, log_decay, beta, state, segment_ids=None):
    """Computes `gated_delta` in chunks in plain JAX; returns the outputs and the last state.

    Within a chunk the corrections `u_i = beta_i (v_i - S_i^T k_i)` solve a unit lower triangular system (the WY form of
    2406.06484 with the decays of 2412.06464).
    """
    q, k, v = _repeat_for_value_heads(q, k, v)
    B, T, J, _ = q.shape
    C = min(CHUNK, T)
    pad = -T % C
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def chunks(x, mode="constant"):
        """Splits `[B, T, J, ...]` into `[chunks, B, J, C, ...]`, and pads the last chunk."""
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])), mode=mode)
        x = x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)
        return x.swapaxes(2, 3) if x.ndim > 3 else x

    # Split into chunks. Padding has k, v, beta and log_decay 0, so it changes neither outputs nor state.
    segment = chunks(segment_ids, "edge")  # [chunks, B, C]
    incoming_segment = jnp.concatenate([segment[:1, :, :1], segment[:-1, :, -1:]])
    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    index = jnp.arange(C)
    is_visible = (segment[:, :, :, None] == segment[:, :, None, :]) & (index[:, None] >= index[None, :])[None, None]
    is_earlier = (index[:, None] > index[None, :])[None, None, None]
    # Decay from token j to token i, [.., i, j]; 0 across documents. Compute each sum separately, because a difference
    # of running sums would lose its digits to the large sums of earlier decays.
    steps = jnp.where(is_earlier, log_decay[..., :, None], 0)
    decay = jnp.exp(jnp.where(is_visible[:, :, None], jnp.cumsum(steps, axis=-2), -jnp.inf))
    # Decay from the incoming state to each token, and from each token to the outgoing state.
    decay_from_state = jnp.where((segment == incoming_segment)[:, :, None], jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0)
    decay_to_state = decay[..., -1, :]

    # Solve the triangular system for all chunks at once. The incoming state is not known yet, so solve for both parts
    # of `u = from_values - from_incoming @ state` separately.
    system = jnp.where(is_earlier, beta[..., None] * decay * jnp.einsum("nBJIP,nBJKP->nBJIK", k, k), 0)
    right_hand_side = beta[..., None] * jnp.concatenate([v, decay_from_state[..., None] * k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, right_hand_side, lower=True, unit_diagonal=True)
    from_values, from_incoming = jnp.split(solved, [v.shape[-1]], axis=-1)
    # The attention within the chunk weights each correction's contribution to each output.
    attention = decay * jnp.einsum("nBJIP,nBJKP->nBJIK", q, k)

    def step(state, chunk):
        # Only this part is sequential, because the state passes from chunk to chunk through four products.
        from_values, from_incoming, attention, q, k, chunk_decay = chunk
        corrections = from_values - from_incoming @ state
        output = q @ state + attention @ corrections
        return chunk_decay[:, :, None, None] * state + jnp.einsum("BJCP,BJCQ->BJPQ", k, corrections), output

    chunk = (
        from_values,
        from_incoming,
        attention,
        q * decay_from_state[..., None],
        k * decay_to_state[..., None],
        decay_from_state[..., -1],
    )
    state, output = jax.lax.scan(step, state, chunk)
    return output.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, J, -1)[:, :T], state
