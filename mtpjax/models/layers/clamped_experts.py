"""Experts with a clamped activation or biases (gpt-oss, Step-3.5), in plain XLA."""

import jax
import jax.numpy as jnp

from mtpjax.messages import require
from pallas_kernels.batch_invariance import is_batch_invariant


def activate(gate: jax.Array, up: jax.Array, *, limit: float, alpha: float = 0.0) -> jax.Array:
    """Applies a gated activation to `gate` and `up`, `[..., F]` each, and clamps values to `limit` unless it is 0.

    Step-3.5 clamps after the activation and computes `min(silu(gate), limit) * clip(up, -limit, limit)`. With `alpha`
    (gpt-oss), the inputs are clamped first, and the result is `(up + 1) * gate * sigmoid(alpha * gate)`.
    """
    bound = limit or jnp.inf
    up = jnp.clip(up, -bound, bound)
    if alpha:
        gate = jnp.minimum(gate, bound)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    return jnp.minimum(jax.nn.silu(gate), bound) * up


def mix_clamped_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    biases: tuple[jax.Array, jax.Array] | None,
    *,
    limit: float,
    alpha: float = 0.0,
) -> jax.Array:
    """Runs each token `x [n, D]` through its chosen experts and sums their weighted outputs; differentiable.

    Arguments are as in `mix_experts` and `activate`. `biases` is (gate and up `[E, 2, F]`, output `[E, D]`).

    Raises:
        ValueError: within `pallas_kernels.batch_invariant`, which XLA does not support.
    """
    require(not is_batch_invariant(), "deterministic decoding needs an expert kernel, but clamped experts run in XLA")
    E, D, _, F = gate_up.shape
    k = ids.shape[1]
    # Sort the (token, expert) pairs by expert; pairs without an expert come last, after all groups.
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert, token, sizes = flat[order], order // k, jnp.bincount(flat, length=E).astype(jnp.int32)
    is_used = (expert < E)[:, None]
    own = jnp.minimum(expert, E - 1)
    # One matmul per expert over its rows; every row gets its expert's bias.
    products = jax.lax.ragged_dot(x[token], gate_up.reshape(E, D, 2 * F), sizes)
    products = products.reshape(-1, 2, F) + (0 if biases is None else biases[0].astype(x.dtype)[own])
    hidden = activate(products[:, 0], products[:, 1], limit=limit, alpha=alpha)
    output = jax.lax.ragged_dot(hidden, down, sizes) + (0 if biases is None else biases[1].astype(x.dtype)[own])
    # Rows without an expert come after all groups and hold garbage, so replace them with zeros.
    weighted = jnp.where(is_used, output * weights.reshape(-1)[order][:, None].astype(x.dtype), 0)
    return jnp.zeros_like(x).at[token].add(weighted)
