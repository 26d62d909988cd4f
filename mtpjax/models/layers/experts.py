"""Feed-forward layers: SwiGLU, and a mixture of routed and shared experts."""

import functools
import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.clamped_experts import activate, mix_clamped_experts
from mtpjax.models.parallel import (
    add_parts,
    all_rows,
    expert_axes,
    has_decoding_layout,
    is_split,
    num_shards,
    own_size,
)
from mtpjax.models.quantized import gated_product, is_scaled, partial_product
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.router import Routing, route_tokens


class SwiGLU(nn.Module):
    """The dense feed-forward layer `(silu(x Wg) * (x Wu)) Wd`, `[..., D] -> [..., D]`, with gate and up in one matmul.

    Returns partial sums, which the norm of the next layer adds.
    """

    width: int
    implementation: str = "auto"
    is_summed_outside: bool = False  # the caller sums over devices
    limit: float = 0.0  # clamp limit of gate and up (`activate`); 0: no limit

    @nn.compact
    def __call__(self, x: jax.Array) -> PartialSums:
        D = x.shape[-1]
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
        width = own_size(self.width, "tensor")
        gate_up = self.param("gate_up", initial, (D, 2, width))
        down = self.param("down", nn.initializers.lecun_normal(), (width, D))
        if self.limit:
            pair = partial_product(x, gate_up, implementation=self.implementation).total()
            gated = activate(*jnp.split(pair, 2, axis=-1), limit=self.limit)
        else:
            gated = gated_product(x, gate_up, implementation=self.implementation)
        product = partial_product(gated, down, implementation=self.implementation)
        return product if self.is_summed_outside else add_parts(product, self.width, "tensor")


def mix_experts(x, ids, weights, gate_up, down, *, inference: bool, implementation: str) -> jax.Array:
    """Runs the chosen experts with `grouped_matmul`, and returns the weighted sums `[n, D]` over each token's experts.

    Args:
        x: `[n, D]` tokens.
        ids: `[n, k]` experts chosen by each token; ids of E or more are skipped.
        weights: `[n, k]` float32 weights.
        gate_up: `[E, D, 2, F]`, an array or `BlockScaled`, like `down [E, F, D]`.
        inference: True if no gradient is needed.
    """
    # Pass fp8 stacks with equal block sizes to the kernel with their scales; cast other stacks first.
    scales = {}
    if is_scaled(gate_up) and is_scaled(down) and gate_up.block == down.block:
        assert (gate_up.axis, down.axis) == (-3, -2)
        scales = {"gate_up_scales": gate_up.scales, "down_scales": down.scales, "block": gate_up.block}
        gate_up, down = gate_up.values, down.values
    else:
        gate_up, down = gate_up.astype(x.dtype), down.astype(x.dtype)
    return grouped_matmul(x, ids, weights, gate_up, down, **scales, inference=inference, implementation=implementation)


def choose_slots(ids: jax.Array, placement: Mapping[str, jax.Array]) -> jax.Array:
    """Chooses a slot `[n, k]` for each expert in `ids [n, k]`, rotating tokens through the expert's copies.

    `placement` has `slots_of_expert [E, C]` and `num_slots [E]`, as `mtpjax.models.expert_placement` makes them.
    """
    turn = jnp.arange(len(ids))[:, None] % placement["num_slots"][ids]
    return placement["slots_of_expert"][ids, turn]


def routing(config: ModelConfig) -> Routing:
    """Returns the expert routing that the config specifies."""
    return Routing(
        k=config.num_experts_per_tok,
        scoring=config.scoring_func,
        num_groups=config.n_group,
        num_kept_groups=config.topk_group,
        normalises=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )


class Experts(nn.Module):
    """Routed and shared experts, `[B, T, D] -> [B, T, D]`, returned as `PartialSums` with one part.

    `cached` marks a decoding pass, which needs no gradient. Tokens for which `is_used [B, T]` is False are not routed
    to experts; `all_used` is the same mask for the rows of all devices.
    """

    config: ModelConfig
    implementation: str = "auto"
    limit: float = 0.0  # clamp limit in routed experts (`activate`); 0: no limit
    shared_limit: float = 0.0  # clamp limit in shared experts; 0: no limit

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        cached: bool = False,
        is_used: jax.Array | None = None,
        all_used: jax.Array | None = None,
    ) -> PartialSums:
        config = self.config
        B, T, D = x.shape
        E, F = config.n_routed_experts, config.moe_intermediate_size
        # The stacks have one slot per expert, or several if `expert_placement` copied the expert.
        placement = self.get_variable("params", "placement")
        num_slots = E if placement is None else placement["expert_of_slot"].shape[0]
        router = self.param("router", nn.initializers.lecun_normal(), (D, E))
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=(2, 3), batch_axis=0)
        # A pass over whole rows either trains, or scores texts in the decoding layout.
        decodes = cached or has_decoding_layout()
        (over, over_rows), own_width = expert_axes(num_slots, decodes=decodes), own_size(F, "tensor")
        own_experts = num_slots // math.prod(map(num_shards, over))
        gate_up = self.param("gate_up", initial, (own_experts, D, 2, own_width))
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        down = self.param("down", initial, (own_experts, own_width, D))
        gate_up, down = (stack if is_scaled(stack) else stack.astype(x.dtype) for stack in (gate_up, down))
        biases = None
        if config.expert_bias:
            zeros = nn.initializers.zeros
            down_bias = self.param("down_bias", zeros, (own_experts, D))
            if is_split(F, "tensor"):
                # The devices' products are summed, so only one device adds the output bias.
                down_bias = jnp.where(jax.lax.axis_index("tensor") == 0, down_bias, 0)
            biases = self.param("gate_up_bias", zeros, (own_experts, 2, own_width)), down_bias
        bias = None
        if config.router_correction_bias:
            bias = jax.lax.stop_gradient(self.param("correction_bias", nn.initializers.zeros, (E,)))

        # Route every token, run its experts, and add the shared experts, which process every token. If an axis splits
        # both rows and experts, each device runs its experts for all rows, and the sums are scattered to the devices
        # that own the rows.
        flat = all_rows(x.reshape(B * T, D), over_rows)
        used = all_used if over_rows else is_used
        routed, implementation = flat, self.implementation if cached else "xla"
        if config.expert_bias:
            # Implement the bias on the logits as an additional router row whose input is always 1.
            row = self.param("router_bias", nn.initializers.zeros, (E,))
            routed = jnp.concatenate([flat, jnp.ones((len(flat), 1), flat.dtype)], axis=1)
            router, implementation = jnp.concatenate([router, row[None].astype(router.dtype)]), "xla"
        ids, weights = route_tokens(
            routed,
            router,
            bias,
            routing(config),
            is_used=None if used is None else used.reshape(-1),
            implementation=implementation,
        )
        self.sow("router", "ids", ids)  # kept if the caller requests it (`count_expert_tokens`)
        if placement is not None:
            ids = jnp.where(ids < E, choose_slots(jnp.minimum(ids, E - 1), placement), num_slots)
        form = functools.partial(mix_experts, inference=cached, implementation=self.implementation)
        if self.limit or config.expert_bias or config.swiglu_alpha:
            form = functools.partial(mix_clamped_experts, biases=biases, limit=self.limit, alpha=config.swiglu_alpha)
            gate_up, down = gate_up.astype(x.dtype), down.astype(x.dtype)
        # Inside `shard_map`, replace ids of other devices' experts with the number of local experts, which is skipped.
        if over:
            first = jax.lax.axis_index(over) * own_experts
            ids = jnp.where((ids >= first) & (ids < first + own_experts), ids - first, own_experts)
        if over_rows and not cached:
            # In training, a device processes one device's rows at a time and recomputes them for the gradient, because
            # all rows at once would need too much memory.
            num_parts_of_rows = len(flat) // (B * T)
            rows = (part.reshape(num_parts_of_rows, B * T, -1) for part in (flat, ids, weights))
            again = jax.checkpoint(lambda rows: form(rows[0], rows[1], rows[2], gate_up, down))
            output = jax.lax.map(again, tuple(rows)).reshape(flat.shape)
        else:
            output = form(flat, ids, weights, gate_up, down)
        if over_rows:
            output = jax.lax.psum_scatter(output, over_rows, scatter_dimension=0, tiled=True)
        return self._add_shared(x, output.reshape(B, T, D), tuple(axis for axis in over if axis not in over_rows))

    def _add_shared(self, x: jax.Array, output: jax.Array, summed: tuple[str, ...]) -> PartialSums:
        """Adds the shared experts, and sums the routed experts' results over the mesh axes `summed` and `tensor`."""
        config = self.config
        summed += ("tensor",) * is_split(config.moe_intermediate_size, "tensor")
        if config.shared_width:
            # If shared and routed experts are summed over the same devices, one sum covers both.
            is_one_sum = bool(summed) and is_split(config.shared_width, "tensor") == ("tensor" in summed)
            swiglu = SwiGLU(config.shared_width, self.implementation, is_one_sum, self.shared_limit, name="shared")
            shared = swiglu(x).total()
            if config.shared_expert_gate:
                gate = self.param("shared_gate", nn.initializers.lecun_normal(), (x.shape[-1], 1))
                shared = shared * jax.nn.sigmoid(x @ gate.astype(x.dtype))
            if not is_one_sum:
                output, summed = jax.lax.psum(output, summed) if summed else output, ()
            elif "expert" in summed:
                # All devices along this axis computed the same shared experts, so only one device adds them.
                shared = jnp.where(jax.lax.axis_index("expert") == 0, shared, 0)
            output = output + shared
        return PartialSums((jax.lax.psum(output, summed) if summed else output)[None], output.dtype)
