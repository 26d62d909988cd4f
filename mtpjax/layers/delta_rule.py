"""The gated delta rule behind a short causal convolution: the linear attention of Qwen3-Next and Qwen3.5."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.cache import read_rows
from mtpjax.config import ModelConfig
from mtpjax.layers.attend import Entries, Masks, View
from mtpjax.quantized import matrix_product
from pallas_kernels import rms_norm

CHUNK = 64  # tokens that one step of `chunked_delta_rule` takes in at once
FEW_TOKENS = 16  # up to here one token after the other; a drafted run is never longer than this in practice


class DeltaRule(nn.Module):
    """`[B, T, D] -> [B, T, D]` with a state of fixed size (Gated DeltaNet, 2412.06464, as Qwen3-Next has it).

    Keeps, for J value heads, `state [B, J, P, Q]` float32 from keys to values, and `conv [B, C-1, K, channels]`, the
    last inputs of the convolution. Where tokens may yet be rejected it keeps `states`, after each of them, and all
    `inputs`; `mtpjax.cache.commit` picks. Value head j reads key head j // (J / K): a key head with its value heads
    splits over a mesh whole.
    """

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, memory: Entries | None = None, chosen: Masks | None = None
    ) -> tuple[jax.Array, Entries, Masks | None]:
        config = self.config
        B, T, D = x.shape
        K, J = config.linear_num_key_heads, config.linear_num_value_heads
        P, Q, G = config.linear_key_head_dim, config.linear_value_head_dim, J // K

        def product(name: str, width: int) -> jax.Array:
            initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
            kernel = self.param(name, initial, (D, K, width))
            return matrix_product(x, kernel, implementation=self.implementation).reshape(B, T, K, width)

        made, gate = jnp.split(product("qkvz", 2 * P + 2 * G * Q), [2 * P + G * Q], axis=-1)
        write, decay = jnp.split(product("ba", 2 * G).astype(jnp.float32), 2, axis=-1)
        channels = made.shape[-1]
        initial = nn.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
        taps = self.param("conv", initial, (K, channels, config.linear_conv_kernel_dim)).astype(x.dtype)
        log_rate = self.param("log_rate", nn.initializers.zeros, (J,)).astype(jnp.float32)
        rate_bias = self.param("rate_bias", nn.initializers.zeros, (J,)).astype(jnp.float32)

        before = memory["conv"] if memory else jnp.zeros((B, taps.shape[-1] - 1, K, channels), x.dtype)
        state = memory["state"] if memory else jnp.zeros((B, J, P, Q), jnp.float32)
        inputs = jnp.concatenate([before.astype(x.dtype), made], axis=1)
        mixed = jax.nn.silu(_convolve(inputs, taps, view.segment_ids)).astype(jnp.float32)
        q, k, v = jnp.split(mixed, [P, 2 * P], axis=-1)
        q, k = (jnp.repeat(_unit(part), G, axis=2) for part in (q, k))
        v = v.reshape(B, T, J, Q)
        beta = jax.nn.sigmoid(write).reshape(B, T, J)
        log_decay = -jnp.exp(log_rate)[None, None] * jax.nn.softplus(decay.reshape(B, T, J) + rate_bias[None, None])
        if view.taken is not None:  # the tokens behind leave the state as it is
            is_taken = (jnp.arange(T)[None, :] < view.taken[:, None])[:, :, None]
            beta, log_decay = jnp.where(is_taken, beta, 0), jnp.where(is_taken, log_decay, 0)

        rule = (q * P**-0.5, k, v, log_decay, beta, state)
        if memory is None or (view.taken is not None and T > FEW_TOKENS):
            output, state = chunked_delta_rule(*rule, segment_ids=view.segment_ids)
            states = state[None]
        else:
            output, states = stepwise_delta_rule(*rule)
        if view.taken is None:
            entries = {"states": states, "inputs": inputs}
        else:
            entries = {"state": states[-1], "conv": read_rows(inputs, view.taken, before.shape[1])}
        scale = self.param("norm", nn.initializers.ones, (Q,))
        squash = jax.nn.sigmoid if config.linear_output_gate == "sigmoid" else jax.nn.silu
        output = rms_norm(output, scale, eps=config.rms_norm_eps).reshape(B, T, K, G * Q)
        output = (output * squash(gate.astype(jnp.float32))).astype(x.dtype)
        project = self.param("output", nn.initializers.lecun_normal(), (J * Q, D))
        output = output.reshape(B, T, J * Q)
        return matrix_product(output, project, implementation=self.implementation), entries, chosen


def _unit(x: jax.Array) -> jax.Array:
    """`x` over its length along the last axis (eps 1e-6 inside the root)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _convolve(inputs: jax.Array, taps: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Causal convolution of each channel: `inputs [B, C-1+T, K, channels]`, `taps [K, channels, C]` -> `[B, T, …]`.

    With `segment_ids [B, T]` nothing is taken from another document.
    """
    C = taps.shape[-1]
    T = inputs.shape[1] - C + 1
    total = jnp.zeros((), inputs.dtype)
    for place in range(C):
        part = inputs[:, place : place + T] * taps[None, None, :, :, place]
        if segment_ids is not None and place < C - 1:
            back = C - 1 - place
            there = jnp.pad(segment_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :T]
            part = jnp.where((there == segment_ids)[:, :, None, None], part, 0)
        total = total + part
    return total


def stepwise_delta_rule(q, k, v, log_decay, beta, state) -> tuple[jax.Array, jax.Array]:
    """One token after the other: outputs `[B, T, J, Q]` and the states before and after each, `[T+1, B, J, P, Q]`.

    `S <- exp(log_decay) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q` (2412.06464, equation 10), for queries and
    keys `[B, T, J, P]`, values `[B, T, J, Q]`, `log_decay` and `beta` `[B, T, J]`, `state [B, J, P, Q]`, all float32.
    """

    def step(state, token):
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)[:, :, None, None]
        error = (v - jnp.einsum("BJPQ,BJP->BJQ", state, k)) * beta[:, :, None]
        state = state + k[:, :, :, None] * error[:, :, None, :]
        return state, (jnp.einsum("BJPQ,BJP->BJQ", state, q), state)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, log_decay, beta))
    _, (output, states) = jax.lax.scan(step, state, tokens, unroll=min(q.shape[1], FEW_TOKENS))
    return output.swapaxes(0, 1), jnp.concatenate([state[None], states])


def chunked_delta_rule(
    q, k, v, log_decay, beta, state, *, segment_ids: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The same by chunks, whose tokens are taken in at once: outputs, and the last state only.

    Within a chunk the corrections `u_i = beta_i (v_i - S_i^T k_i)` solve a unit lower triangular system (the WY form of
    2406.06484 with the decays of 2412.06464). With `segment_ids [B, T]` each document starts from an empty state.
    """
    B, T, J, _ = q.shape
    C = min(CHUNK, T)
    pad = -T % C
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def chunks(x, mode="constant"):
        """`[B, T, J, …]` -> `[chunks, B, J, C, …]`."""
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])), mode=mode)
        x = x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)
        return x.swapaxes(2, 3) if x.ndim > 3 else x

    segment = chunks(segment_ids, "edge")  # [chunks, B, C]
    before = jnp.concatenate([segment[:1, :, :1], segment[:-1, :, -1:]])  # the segment of the state that comes in
    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    index = jnp.arange(C)
    sees = (segment[:, :, :, None] == segment[:, :, None, :]) & (index[:, None] >= index[None, :])[None, None]
    is_before = (index[:, None] > index[None, :])[None, None, None]
    # Each sum by itself: as a difference of running sums it would drown in what was forgotten before.
    steps = jnp.where(is_before, log_decay[..., :, None], 0)
    decay = jnp.exp(jnp.where(sees[:, :, None], jnp.cumsum(steps, axis=-2), -jnp.inf))  # from token j to i: [.., i, j]
    from_state = jnp.where((segment == before)[:, :, None], jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0)
    to_state = decay[..., -1, :]

    system = jnp.where(is_before, beta[..., None] * decay * jnp.einsum("nBJIP,nBJKP->nBJIK", k, k), 0)
    given = beta[..., None] * jnp.concatenate([v, from_state[..., None] * k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, given, lower=True, unit_diagonal=True)
    update, correction = jnp.split(solved, [v.shape[-1]], axis=-1)
    within = decay * jnp.einsum("nBJIP,nBJKP->nBJIK", q, k)

    def step(state, chunk):
        update, correction, within, q, k, keeps = chunk
        update = update - correction @ state
        output = q @ state + within @ update
        return keeps[:, :, None, None] * state + jnp.einsum("BJCP,BJCQ->BJPQ", k, update), output

    chunk = (update, correction, within, q * from_state[..., None], k * to_state[..., None], from_state[..., -1])
    state, output = jax.lax.scan(step, state, chunk)
    return output.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, J, -1)[:, :T], state
