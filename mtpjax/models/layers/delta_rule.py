"""The gated delta rule behind a short causal convolution: the linear attention of Qwen3-Next and Qwen3.5."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.cache import read_rows
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import Entries, Masks, View
from mtpjax.models.quantized import matrix_product
from pallas_kernels import gated_delta, gated_delta_steps, gated_delta_verify, rms_norm

FEW_TOKENS = 16  # of a pass whose tokens stay: up to here one after the other, beyond by chunks


class DeltaRule(nn.Module):
    """`[B, T, D] -> [B, T, D]` with a state of fixed size (Gated DeltaNet, 2412.06464, as Qwen3-Next has it).

    Keeps, for J value heads, `state [B, J, P, Q]` float32 from keys to values, and `conv [B, C-1, K, channels]`, the
    last inputs of the convolution. Where tokens may yet be rejected `state` stays as it was before them, beside what
    each of them would do to it (`keys`, `log_decay`, `corrections`) and all `inputs`; `mtpjax.models.cache.commit`
    takes in
    those accepted. Value head j reads key head j // (J / K): a key head with its value heads splits over a mesh whole.
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
        q, k = _unit(q) * P**-0.5, _unit(k)
        v = v.reshape(B, T, J, Q)
        beta = jax.nn.sigmoid(write).reshape(B, T, J)
        log_decay = -jnp.exp(log_rate)[None, None] * jax.nn.softplus(decay.reshape(B, T, J) + rate_bias[None, None])
        if view.num_valid is not None:  # the tokens behind leave the state as it is
            is_valid = (jnp.arange(T)[None, :] < view.num_valid[:, None])[:, :, None]
            beta, log_decay = jnp.where(is_valid, beta, 0), jnp.where(is_valid, log_decay, 0)

        q, k, v = (part.astype(x.dtype) for part in (q, k, v))
        rule, implementation = (q, k, v, log_decay, beta, state), self.implementation
        if memory is not None and view.num_valid is None:
            output, corrections = gated_delta_verify(*rule, implementation=implementation)
            entries = {"state": state, "keys": k, "log_decay": log_decay, "corrections": corrections, "inputs": inputs}
        else:
            if memory is None or T > FEW_TOKENS:
                output, state = gated_delta(*rule, segment_ids=view.segment_ids, implementation=implementation)
            else:
                output, state = gated_delta_steps(*rule, implementation=implementation)
            num_valid = jnp.full(B, T) if view.num_valid is None else view.num_valid
            entries = {"state": state, "conv": read_rows(inputs, num_valid, before.shape[1])}
        scale = self.param("norm", nn.initializers.ones, (Q,))
        squash = jax.nn.sigmoid if config.linear_output_gate == "sigmoid" else jax.nn.silu
        output = rms_norm(output, scale, eps=config.rms_norm_eps, implementation="xla").reshape(B, T, K, G * Q)
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
