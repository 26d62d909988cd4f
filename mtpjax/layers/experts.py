"""Feed-forward layers: SwiGLU, and a mixture of routed and shared experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mtpjax.config import ModelConfig
from mtpjax.quantized import matrix_product


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`(silu(x Wg) * (x Wu)) Wd` for `x [n, D]`, `gate_up [D, 2, F]`, `down [F, D]`: one product for gate and up.

    Flattened, because an einsum that keeps the axis of two makes a pass over two rows on a CPU 10 % slower.
    """
    gate, up = jnp.split(x @ gate_up.reshape(x.shape[-1], -1), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


class SwiGLU(nn.Module):
    """The dense feed-forward, `[..., D] -> [..., D]`."""

    width: int
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D = x.shape[-1]
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
        gate_up = self.param("gate_up", initial, (D, 2, self.width))
        down = self.param("down", nn.initializers.lecun_normal(), (self.width, D))
        gate, up = jnp.split(matrix_product(x, gate_up, implementation=self.implementation), 2, axis=-1)
        return matrix_product(jax.nn.silu(gate) * up, down, implementation=self.implementation)


def route(logits: jax.Array, bias: jax.Array | None, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Chooses experts: `logits [n, E]` float32 -> ids and weights `[n, k]`.

    DeepSeek-V3 (2412.19437, 2.1.2): score plus `bias [E]` chooses, first the groups (by the sum of their best two),
    then the experts within; the weights are the scores without bias, normalised, times `routed_scaling_factor`.
    """
    n, E = logits.shape
    scores = jax.nn.sigmoid(logits) if config.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias[None, :]
    if config.n_group > 1:
        grouped = choice.reshape(n, config.n_group, -1)
        best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, kept = jax.lax.top_k(best_two, config.topk_group)
        is_kept = jax.nn.one_hot(kept, config.n_group).sum(axis=1) > 0
        choice = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(n, E)
    _, ids = jax.lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * config.routed_scaling_factor


# Three forms of one sum, `y[t] = sum_j weights[t, j] * swiglu(x[t]; expert ids[t, j])`, all over `x [n, D]`,
# `ids, weights [n, k]`, `gate_up [E, D, 2, F]`, `down [E, F, D]`. An id of E or more stands for no expert.


def experts_reference(x, ids, weights, gate_up, down):
    """Every token through every expert: the meaning of the others."""
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    every = jax.vmap(swiglu, in_axes=(None, 0, 0))(x, gate_up, down)
    return jnp.einsum("En,EnD->nD", combine, every)


def experts_for_few(x, ids, weights, gate_up, down):
    """All tokens through each expert that any of them chose: reads those experts' weights once and no others'.

    XLA copies each expert out of its stack first. On a CPU the copy stays in the processor's cache and costs 15 to 40 %
    over experts in arrays of their own, the only form found without it: a conditional per expert, slices taken block by
    block, choices unrolled and slices fused into a sum were no faster, gathered weights 2 to 3 times slower. Code and
    compile time do not depend on the number of experts.
    """
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    is_active = jax.nn.one_hot(ids, gate_up.shape[0], dtype=jnp.int32).sum(axis=(0, 1)) > 0
    active_first = jnp.argsort(~is_active, stable=True)

    def add_one(index, total):
        expert = active_first[index]
        return total + combine[expert][:, None] * swiglu(x, gate_up[expert], down[expert])

    return jax.lax.fori_loop(0, is_active.sum(), add_one, jnp.zeros_like(x))


def experts_for_many(x, ids, weights, gate_up, down):
    """Rows sorted by expert and padded to blocks, each block one product; differentiable, drops nothing."""
    n, k = ids.shape
    E = gate_up.shape[0]
    block = max(8, min(64, n * k // E))
    num_blocks = n * k // block + E
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    counts = jnp.bincount(flat, length=E)  # drops ids beyond
    ends = jnp.cumsum(-(-counts // block) * block)
    begins = jnp.pad(ends, (1, 0))[:E]
    rank = jnp.arange(n * k) - (jnp.cumsum(counts) - counts)[jnp.minimum(expert, E - 1)]
    slot = jnp.where(expert < E, begins[jnp.minimum(expert, E - 1)] + rank, num_blocks * block)
    token = jnp.full(num_blocks * block, n).at[slot].set(order // k, mode="drop")
    owner = jnp.searchsorted(ends, jnp.arange(num_blocks) * block, side="right").clip(max=E - 1)
    rows = jnp.pad(x, ((0, 1), (0, 0)))[token].reshape(num_blocks, block, -1)
    made = jax.vmap(swiglu)(rows, gate_up[owner], down[owner]).reshape(num_blocks * block, -1)
    weight = weights.reshape(-1)[order].astype(x.dtype)
    weight = jnp.zeros(num_blocks * block, x.dtype).at[slot].set(weight, mode="drop")
    return jnp.zeros_like(x).at[token].add(made * weight[:, None], mode="drop")


def _combine(ids, weights, num_experts):
    """Weight of each expert for each token, `[E, n]`."""
    return jnp.einsum("nkE,nk->En", jax.nn.one_hot(ids, num_experts, dtype=weights.dtype), weights)


# Up to here reading weights costs more than multiplying rows that an expert did not get. On a CPU, with 8 and with 64
# experts of 512 x 512, top 2: 1.4 to 2.7 times as fast as `experts_for_many` at 64 tokens, 1.1 to 1.9 times at 128.
FEW_TOKENS = 128


class Experts(nn.Module):
    """Routed and shared experts, `[B, T, D] -> [B, T, D]`. `cached` tells a decoding pass, which needs no gradient."""

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array, *, cached: bool = False) -> jax.Array:
        config = self.config
        B, T, D = x.shape
        E, F = config.n_routed_experts, config.moe_intermediate_size
        router = self.param("router", nn.initializers.lecun_normal(), (D, E))
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=(2, 3), batch_axis=0)
        gate_up = self.param("gate_up", initial, (E, D, 2, F)).astype(x.dtype)
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        down = self.param("down", initial, (E, F, D)).astype(x.dtype)
        bias = None
        if config.router_correction_bias:
            bias = self.param("correction_bias", nn.initializers.zeros, (E,)).astype(jnp.float32)
            bias = jax.lax.stop_gradient(bias)

        flat = x.reshape(B * T, D)
        logits = flat.astype(jnp.float32) @ router.astype(jnp.float32)
        ids, weights = route(logits, bias, config)
        form = experts_for_few if cached and B * T <= FEW_TOKENS else experts_for_many
        output = _over_mesh(form, E, F)(flat, ids, weights, gate_up, down).reshape(B, T, D)
        if config.shared_width:
            shared = SwiGLU(config.shared_width, self.implementation, name="shared")(x)
            if config.shared_expert_gate:
                gate = self.param("shared_gate", nn.initializers.lecun_normal(), (D, 1))
                shared = shared * jax.nn.sigmoid(x @ gate.astype(x.dtype))
            output = output + shared
        return output


def _over_mesh(form, num_experts: int, width: int):
    """`form` on each device's own experts and columns, tokens replicated, and one sum, where a mesh splits them."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {"expert": num_experts, "tensor": width}
    many = [] if mesh.empty else [axis for axis in sizes if mesh.shape.get(axis, 1) > 1]
    split = [axis for axis in many if sizes[axis] % mesh.shape[axis] == 0]
    if not split:
        return form
    expert, tensor = (axis if axis in split else None for axis in ("expert", "tensor"))

    def local(x, ids, weights, gate_up, down):
        own = gate_up.shape[0]
        first = jax.lax.axis_index(expert) * own if expert else 0
        is_own = (ids >= first) & (ids < first + own)
        return jax.lax.psum(form(x, jnp.where(is_own, ids - first, own), weights, gate_up, down), tuple(split))

    everywhere = PartitionSpec()
    specs = (
        everywhere,
        everywhere,
        everywhere,
        PartitionSpec(expert, None, None, tensor),
        PartitionSpec(expert, tensor),
    )
    return jax.shard_map(local, in_specs=specs, out_specs=everywhere, check_vma=False)
