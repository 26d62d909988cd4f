"""Linear attention of Qwen3-Next and Qwen3.5, which applies the gated delta rule after a short causal convolution."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.context import (
    all_chunks,
    choose_own,
    continues_before,
    ends_before,
    is_context_split,
    own_chunks,
    split_chunks,
)
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.parallel import add_parts, own_size
from mtpjax.models.quantized import matrix_product, partial_product
from mtpjax.models.view import Entries, Masks, View, read_rows
from pallas_kernels.gated_delta import gated_delta, gated_delta_replay, gated_delta_steps, gated_delta_verify
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.rms_norm import rms_norm

MAX_STEPWISE_TOKENS = 16  # a fully committed pass of up to this many tokens runs token by token, a longer one in chunks


class DeltaRule(nn.Module):
    """Gated DeltaNet (2412.06464) as arranged in Qwen3-Next, `[B, T, D] -> [B, T, D]` with a fixed-size state.

    For J value heads, the layer keeps `state [B, J, P, Q]` float32, which maps keys to values, and
    `conv [B, C-1, K, channels]`, the last inputs of the convolution. A pass whose tokens may be rejected does not
    change `state`. Its entries also hold the change that each token would make (`keys`, `log_decay`, `corrections`)
    and all convolution `inputs`; `commit_states` applies the accepted tokens.

    Value head j reads key head j // (J / K). On a mesh, a key head is always on the same device as its value heads.
    """

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, layer_cache: Entries | None = None, selection: Masks | None = None
    ) -> tuple[PartialSums, Entries, Masks | None]:
        config, shape = self.config, x.shape
        # If the mesh splits rows by tokens, each of the device's chunks is a row here.
        x = split_chunks(x) if layer_cache is None else x
        B, T, D = x.shape
        P, Q = config.linear_key_head_dim, config.linear_value_head_dim
        G = config.linear_num_value_heads // config.linear_num_key_heads
        K = own_size(config.linear_num_key_heads, "tensor")
        J = K * G

        def product(name: str, width: int) -> jax.Array:
            initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
            kernel = self.param(name, initial, (D, K, width))
            return matrix_product(x, kernel, implementation=self.implementation).reshape(B, T, K, width)

        # 1. Project to each key head's query, key, values and output gates, and to the write strengths and decay
        # inputs.
        conv_inputs, gate = jnp.split(product("qkvz", 2 * P + 2 * G * Q), [2 * P + G * Q], axis=-1)
        write, decay = jnp.split(product("ba", 2 * G).astype(jnp.float32), 2, axis=-1)
        channels = conv_inputs.shape[-1]
        initial = nn.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
        taps = self.param("conv", initial, (K, channels, config.linear_conv_kernel_dim)).astype(x.dtype)
        log_rate = self.param("log_rate", nn.initializers.zeros, (J,)).astype(jnp.float32)
        rate_bias = self.param("rate_bias", nn.initializers.zeros, (J,)).astype(jnp.float32)

        # 2. Convolve over time, continuing from the cached inputs; whole rows start with zeros.
        C = taps.shape[-1]
        before = layer_cache["conv"] if layer_cache else ends_before(conv_inputs, C - 1)
        state = layer_cache["state"] if layer_cache else jnp.zeros((B, J, P, Q), jnp.float32)
        inputs = jnp.concatenate([before.astype(x.dtype), conv_inputs], axis=1)
        documents = None if view.segment_ids is None else own_chunks(view.segment_ids, before=C - 1, fill=-1)
        mixed = jax.nn.silu(_convolve(inputs, taps, documents)).astype(jnp.float32)

        # 3. Normalise queries and keys to unit length; compute write strengths in (0, 1) and the log decay per token.
        q, k, v = jnp.split(mixed, [P, 2 * P], axis=-1)
        q, k = _unit(q) * P**-0.5, _unit(k)
        v = v.reshape(B, T, J, Q)
        beta = jax.nn.sigmoid(write).reshape(B, T, J)
        log_decay = -jnp.exp(log_rate)[None, None] * jax.nn.softplus(decay.reshape(B, T, J) + rate_bias[None, None])
        if view.num_valid is not None:
            # Padding after the valid tokens neither writes to the state nor decays it.
            is_valid = (jnp.arange(T)[None, :] < view.num_valid[:, None])[:, :, None]
            beta, log_decay = jnp.where(is_valid, beta, 0), jnp.where(is_valid, log_decay, 0)

        # 4. Apply the rule with a deferred commit, in chunks, or token by token.
        q, k, v = (part.astype(x.dtype) for part in (q, k, v))
        rule, implementation = (q, k, v, log_decay, beta, state), self.implementation
        if layer_cache is not None and view.num_valid is None:
            output, corrections = gated_delta_verify(*rule, implementation=implementation)
            entries = {"state": state, "keys": k, "log_decay": log_decay, "corrections": corrections, "inputs": inputs}
        else:
            if layer_cache is None and is_context_split():
                output, state = _rule_over_chunks(rule, view.segment_ids, implementation)
            elif layer_cache is None or T > MAX_STEPWISE_TOKENS:
                output, state = gated_delta(*rule, segment_ids=view.segment_ids, implementation=implementation)
            else:
                output, state = gated_delta_steps(*rule, implementation=implementation)
            num_valid = jnp.full(B, T) if view.num_valid is None else view.num_valid
            entries = {"state": state, "conv": read_rows(inputs, num_valid, before.shape[1])}

        # 5. Normalise each value head, gate, and project back to the model width.
        scale = self.param("norm", nn.initializers.ones, (Q,))
        gate_function = jax.nn.sigmoid if config.linear_output_gate == "sigmoid" else jax.nn.silu
        output = rms_norm(output, scale, eps=config.rms_norm_eps, implementation="xla").reshape(B, T, K, G * Q)
        output = (output * gate_function(gate.astype(jnp.float32))).astype(x.dtype)
        project = self.param("output", nn.initializers.lecun_normal(), (J * Q, D))
        output = output.reshape(*shape[:2], J * Q)
        projected = partial_product(output, project, implementation=self.implementation)
        return add_parts(projected, config.linear_num_key_heads, "tensor"), entries, selection


def _rule_over_chunks(
    rule: tuple[jax.Array, ...], segment_ids: jax.Array | None, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """Computes `gated_delta` for this device's chunks of rows that the mesh splits by tokens.

    The rule is linear in the state: a chunk maps the state S before it to `A S + E`, where E is the last state of a
    chunk that starts from zeros. All devices therefore work at once. They exchange E and A of every chunk, J P (P + Q)
    float32 numbers, and then go through the chunks in order. Compared with `gated_delta`, the rule has P more columns.
    Devices that wait for each other's states would not need them, but would take 2n times as long.

    Args:
        rule: the arguments of `gated_delta`, whose rows are the chunks; the state is ignored.
        segment_ids: `[B, T]` int32 document ids of whole rows.

    Returns:
        The outputs, and the state after each chunk.
    """
    assert segment_ids is not None
    q, k, v, log_decay, beta, state = rule
    rows, J, P, Q = state.shape
    # 1. Run each chunk from zeros. The other columns start from the identity and write nothing, so that they end as A.
    # Their outputs are the products with which the queries read the state before the chunk.
    columns = jnp.broadcast_to(jnp.eye(P, Q + P, Q, dtype=state.dtype), (rows, J, P, Q + P))
    wide = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], P), v.dtype)], axis=-1)
    settings = {"segment_ids": own_chunks(segment_ids), "implementation": implementation}
    output, ends = gated_delta(q, k, wide, log_decay, beta, columns, **settings)
    output, reads = jnp.split(output, [Q], axis=-1)

    # 2. Pass the states on. A chunk that begins with a new document starts from zeros.
    def step(state, chunk):
        end, continues = chunk
        before = jnp.where(continues[:, None, None, None], state, 0)
        return end[..., :Q] + end[..., Q:] @ before, before

    chunks = all_chunks(ends), continues_before(segment_ids)
    _, before = jax.lax.scan(step, jnp.zeros((len(segment_ids), J, P, Q)), chunks)

    # 3. Add what the queries read from the state before their chunk.
    before = choose_own(before)
    return output + jnp.einsum("BTJP,BJPQ->BTJQ", reads, before), ends[..., :Q] + ends[..., Q:] @ before


def _unit(x: jax.Array) -> jax.Array:
    """Divides `x` by its length along the last axis (eps 1e-6 inside the root)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _convolve(inputs: jax.Array, taps: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Convolves `inputs [B, C-1+T, K, channels]` causally with `taps [K, channels, C]`; returns `[B, T, K, channels]`.

    With `segment_ids [B, C-1+T]`, inputs of other documents count as zero.
    """
    C = taps.shape[-1]
    T = inputs.shape[1] - C + 1
    total = jnp.zeros((), inputs.dtype)
    for place in range(C):
        part = inputs[:, place : place + T] * taps[None, None, :, :, place]
        if segment_ids is not None and place < C - 1:
            # Tap `place` reads C - 1 - place tokens back; keep it only if that token is in the same document.
            there = segment_ids[:, place : place + T]
            part = jnp.where((there == segment_ids[:, C - 1 :])[:, :, None, None], part, 0)
        total = total + part
    return total


def _empty_entries(config: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype: Any) -> Entries:
    K, J = config.linear_num_key_heads, config.linear_num_value_heads
    P, Q, C = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return {
        "state": jnp.zeros((batch, J, P, Q), jnp.float32),
        "conv": jnp.zeros((batch, C - 1, K, 2 * P + J // K * Q), dtype),
    }


def commit_states(entries: Entries, num_committed: jax.Array) -> Entries:
    """Advances the state over the first `num_committed [B]` tokens of the last pass.

    Entries have no `corrections` if the number of valid tokens was known; their state has already advanced.
    """
    if "corrections" not in entries:
        return entries
    keys, log_decay, corrections, inputs = (entries[name] for name in ("keys", "log_decay", "corrections", "inputs"))
    state = gated_delta_replay(keys, log_decay, corrections, entries["state"], num_committed)
    # The convolution needs the last inputs before the next token.
    return {"state": state, "conv": read_rows(inputs, num_committed, inputs.shape[1] - keys.shape[1])}


def _zero_rows(entries: Entries, is_new: jax.Array) -> Entries:
    return {
        name: jnp.where(is_new.reshape(-1, *(1 for _ in kept.shape[1:])), jnp.zeros((), kept.dtype), kept)
        for name, kept in entries.items()
    }


DELTA = AttentionKind(
    scope="delta",
    module=lambda config, kind, implementation, name: DeltaRule(config, implementation, name=name),
    empty_entries=_empty_entries,
    cache_axes={"state": ("batch", "heads", None, None), "conv": ("batch", None, "heads", None)},
    split_sizes=("linear_num_key_heads",),
    param_axes=(
        (r"delta/(qkvz|ba)$", ("embed", "heads", None)),
        (r"delta/conv$", ("heads", None, None)),
        (r"delta/(log_rate|rate_bias)$", ("heads",)),
        (r"delta/output$", ("heads", "embed")),
    ),
    commit=commit_states,
    reset=_zero_rows,
    is_recurrent=True,
)
