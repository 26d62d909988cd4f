"""Ops, kernels and references for the gated delta rule, a linear attention with one recurrent state per head.

Per token `S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q` (2412.06464, equation 10). u is
the token's correction.

| op | use | limit on a GPU |
|---|---|---|
| `gated_delta_verify` | outputs and corrections u for a few draft tokens, no state | bytes of the state, read once |
| `gated_delta_replay` | the state after the accepted tokens | bytes of the state, read and written by XLA (no kernel) |
| `gated_delta_steps` | outputs and the last state for a few committed tokens | bytes of the state, read and written |
| `gated_delta` | outputs and the last state in chunks, for prefill and training | latency, see the kernels |

Verify and replay together move the state three times, for any number W of draft tokens. Keeping the state after each
token would move it W + 4 times (one read and W writes, then two reads and one write to select one of the states), and
would hold W states of every layer until the tokens are accepted.

In all ops, q and k are `[B, T, K, P]` for K key heads and v is `[B, T, J, Q]` for J value heads, all of the same
floating dtype. Value head j reads key head j // (J / K). log_decay (at most 0) and beta are `[B, T, J]` float32, and
the state is `[B, J, P, Q]` float32. Outputs and corrections are `[B, T, J, Q]` float32.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.gated_delta.chunk_kernels import gated_delta_triton
from pallas_kernels.gated_delta.reference import MAX_UNROLLED_TOKENS, gated_delta_reference, gated_delta_steps_reference
from pallas_kernels.gated_delta.step_kernel import gated_delta_steps_triton


def gated_delta_verify(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Computes outputs and corrections of draft tokens in order, without changing the state.

    `gated_delta_replay` computes the state after the accepted tokens. All arithmetic is float32 and in the same order
    for any T, so a token's result does not depend on the tokens after it. The kernel has no gradient.
    """
    shape = _checked_sizes(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_verify", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, corrections, _ = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, corrections
    return gated_delta_steps_triton(
        q, k, v, log_decay, beta, state, is_committed=False, interpret=chosen == "interpreted"
    )


def gated_delta_steps(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Computes outputs of committed tokens in order, and the state after the last one.

    The kernel updates the state in place.
    """
    shape = _checked_sizes(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_steps", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, _, state = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, state
    return gated_delta_steps_triton(
        q, k, v, log_decay, beta, state, is_committed=True, interpret=chosen == "interpreted"
    )


def gated_delta_replay(k, log_decay, corrections, state, num_accepted) -> jax.Array:
    """Computes the state after the accepted tokens from the corrections of `gated_delta_verify`.

    The result may differ from the state that `gated_delta_steps` computes in the last bit, because compilers may or may
    not round between product and sum. XLA reads the state once and writes it in place.

    Args:
        state: The state before the draft tokens.
        num_accepted: `[B]` integer, number of accepted tokens per row.
    """
    (B, J, P, Q), (T, K) = state.shape, k.shape[1:3]
    # Rejected tokens get decay 1 and correction 0, so their steps leave the state unchanged. All rows run T steps.
    is_accepted = (jnp.arange(T)[None, :] < num_accepted[:, None])[:, :, None]
    decay = jnp.exp(jnp.where(is_accepted, log_decay, 0.0)).reshape(B, T, K, J // K, 1, 1)
    corrections = jnp.where(is_accepted[..., None], corrections, 0.0).reshape(B, T, K, J // K, 1, Q)
    k = k.astype(jnp.float32).reshape(B, T, K, 1, P, 1)

    def step(state, token):
        decay, k, correction = token
        return state * decay + k * correction, None

    # Without q and v, a step needs no product with the state; it only decays the state and adds a rank-one update.
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (decay, k, corrections))
    replayed, _ = jax.lax.scan(step, state.reshape(B, K, J // K, P, Q), tokens, unroll=T <= MAX_UNROLLED_TOKENS)
    return replayed.reshape(state.shape)


def gated_delta(
    q, k, v, log_decay, beta, state, *, segment_ids=None, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Processes many tokens in chunks, for prefill and training.

    The kernel multiplies in float32 if v is float32. Otherwise it rounds the factors of each product to v's dtype,
    except in the triangular systems, and accumulates in float32. Differentiable in reverse mode; the backward pass
    differentiates the reference and recomputes the forward pass.

    Args:
        segment_ids: `[B, T]` int32 document ids, or None. The first document starts from `state`, later documents from
            an empty state.
    """
    shape = _checked_sizes(q, k, v, log_decay, beta, state, segment_ids)
    chosen = choose("gated_delta", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        return gated_delta_reference(q, k, v, log_decay, beta, state, segment_ids=segment_ids)
    return gated_delta_triton(q, k, v, log_decay, beta, state, segment_ids, chosen == "interpreted")


def _checked_sizes(q, k, v, log_decay, beta, state, segment_ids=None) -> dict[str, int | str]:
    """Returns the sizes that the dispatcher uses; raises ValueError for inconsistent arguments."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape} and v {v.shape} are not [batch, tokens, heads, width]")
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    # Every other shape follows from q and v.
    expected = {"k": (k, (B, T, K, P)), "v": (v, (B, T, J, Q)), "log_decay": (log_decay, (B, T, J))}
    expected |= {"beta": (beta, (B, T, J)), "state": (state, (B, J, P, Q))}
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (B, T))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} {array.shape} does not fit q {q.shape} and v {v.shape}: it should be {shape}")
    if J % K:
        raise ValueError(f"{J} value heads are not a multiple of {K} key heads")
    if B * T == 0:
        raise ValueError(f"q {q.shape} contains no tokens")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, but must have the same floating dtype")
    for name, array in {"log_decay": log_decay, "beta": beta, "state": state}.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}, not float32")
    return {"rows": B, "tokens": T, "heads": J, "state": P * Q, "dtype": str(v.dtype)}
