"""The token-by-token kernel of `gated_delta_verify` and `gated_delta_steps`."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.gated_delta.masked_load import bounds_mask, load_in_bounds, num_bytes


def gated_delta_steps_triton(q, k, v, log_decay, beta, state, *, is_committed, interpret):
    """Runs the token-by-token kernel; returns the outputs, and the last state if committed or else the corrections.

    Each program keeps some columns of one head's state in registers through all tokens.
    """
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    padded = pl.next_power_of_2(P)
    # The columns of a state are independent, so split them over programs. With 32 float32 columns, loads have 128
    # bytes, and several programs fit on an SM. Every split reads all queries and keys again.
    columns = min(pl.next_power_of_2(Q), 32)
    num_splits = pl.cdiv(Q, columns)
    per_split = J // K * num_bytes(q, k) + num_bytes(log_decay, beta)
    # The grid is (column splits, value heads, rows). A value head reads the queries and keys of its key head.
    keys = pl.BlockSpec((None, T, None, padded), lambda part, j, b: (b, 0, j // (J // K), 0))
    values = pl.BlockSpec((None, T, None, columns), lambda part, j, b: (b, 0, j, part))
    scalars = pl.BlockSpec((None, T, None), lambda part, j, b: (b, 0, j))
    states = pl.BlockSpec((None, None, padded, columns), lambda part, j, b: (b, j, 0, part))
    out_shape = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (v, state if is_committed else v)]
    return pl.pallas_call(
        functools.partial(_steps_kernel, width=P, value_width=Q, is_committed=is_committed),
        out_shape=out_shape,
        grid=(num_splits, J, B),
        in_specs=[keys, keys, values, scalars, scalars, states],
        out_specs=[values, states if is_committed else values],
        # Update the state in place, so that a loop that carries it does not copy it.
        input_output_aliases={5: 1} if is_committed else {},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=7 * B * T * J * P * Q,
            transcendentals=num_splits * B * T * J,
            bytes_accessed=num_splits * per_split + num_bytes(v, state, *out_shape),
        ),
        interpret=interpret,
        name="gated_delta_steps" if is_committed else "gated_delta_verify",
    )(q, k, v, log_decay, beta, state)


def _steps_kernel(
    q_ref,
    k_ref,
    v_ref,
    log_decay_ref,
    beta_ref,
    state_ref,
    out_ref,
    state_or_corrections_ref,
    *,
    width,
    value_width,
    is_committed,
):
    """Applies all tokens to some columns of one head's state.

    q_ref and k_ref are [T, padded], v_ref and out_ref [T, columns], and state_ref [padded, columns].
    state_or_corrections_ref gets the last state [padded, columns] or the corrections [T, columns].

    Calculated bottleneck for one token on an H100 with heads of 128 x 128: moving the state. Each further token adds 4
    operations per element of the state, so arithmetic may dominate from about 5 tokens on. At batch 1, there are too
    few programs to fill the memory pipeline, so the time is the latency of one load plus T steps.
    """
    (num_tokens, padded), columns = q_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns
    limits, value_mask = (width, num_columns), bounds_mask((columns,), (num_columns,))

    def load(t):
        """Loads one token's q and k [padded, 1], v [columns], log_decay and beta, in float32."""
        q, k = (load_in_bounds(ref.at[t], (padded,), (width,)).astype(jnp.float32)[:, None] for ref in (q_ref, k_ref))
        v = load_in_bounds(v_ref.at[t], (columns,), (num_columns,)).astype(jnp.float32)
        return q, k, v, plt.load(log_decay_ref.at[t]), plt.load(beta_ref.at[t])

    def step(t, state, token):
        q, k, v, log_decay, beta = token
        # Apply the package docstring's rule to [padded, columns] in float32: decay, correct, add k u^T, read with q.
        state = state * jnp.exp(log_decay)
        correction = (v - jnp.sum(state * k, axis=0)) * beta
        state = state + k * correction[None, :]
        plt.store(out_ref.at[t], jnp.sum(state * q, axis=0), mask=value_mask)
        if not is_committed:
            plt.store(state_or_corrections_ref.at[t], correction, mask=value_mask)
        return state

    def step_and_load(t, carry):
        # Start the loads of the next token before computing this one, so that their latency overlaps.
        next_token = load(t + 1)
        return step(t, *carry), next_token

    # Load the state once, run all tokens on it in registers, and write it only if the tokens are committed. The
    # last token runs outside the loop because no token follows to be loaded.
    last = jnp.int32(num_tokens - 1)
    carry = (load_in_bounds(state_ref, (padded, columns), limits), load(jnp.int32(0)))
    carry = jax.lax.fori_loop(jnp.int32(0), last, step_and_load, carry)
    state = step(last, *carry)
    if is_committed:
        plt.store(state_or_corrections_ref, state, mask=bounds_mask((padded, columns), limits))
