"""The network of a DFlash drafter (2602.06036), in which a block of slots attends to projected trunk states.

A block's slots hold the pending token, called the anchor, and the mask tokens after it. They pass through the layers
together. Each layer attends to the keys and values of the block itself and of the context, which consists of the
trunk's states at all positions before the anchor.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import LayersConfig
from mtpjax.messages import require
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.experts import SwiGLU
from mtpjax.models.layers.grouped_attention import GroupedAttention
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.layers.rotary import rotary_angles
from mtpjax.models.masks import segment_positions
from mtpjax.models.quantized import matrix_product
from mtpjax.models.view import Entries, View
from pallas_kernels.range_attention import KeyRanges, OwnKeys, range_attention
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rotation import rotate

# Maximum number of a layer's feed-forward activations in memory at once (64 MiB in float32).
MAX_ACTIVATIONS = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayersConfig):
    """The architecture of a DFlash drafter and the trunk states that it reads; X is the number of slots in a block.

    Args:
        block_size: number of slots in a block, X.
        mask_token_id: the token in the slots after the anchor.
        windows: per layer, the number of newest positions that a slot attends to (0: all); () means 0 in every layer.
        is_causal: per layer, whether a slot attends only to itself and earlier slots; () means False in every layer.
        window_from_anchor: if True, all slots' windows count back from the anchor and do not limit the block
            (speculators). If False, they count back from each slot and include the slot (z-lab).
        sample_from_anchor: if True, slot j drafts the token after its position, so a block has X drafts. If False, slot
            j drafts the token at its position, and the anchor's slot does not draft.

    Raises:
        ValueError: the values are inconsistent.
    """

    block_size: int
    mask_token_id: int
    windows: tuple[int, ...] = ()
    is_causal: tuple[bool, ...] = ()
    window_from_anchor: bool = False
    sample_from_anchor: bool = False

    def __post_init__(self):
        super().__post_init__()
        block, count = self.block, self.block.num_hidden_layers
        object.__setattr__(self, "windows", tuple(self.windows) or (0,) * count)
        object.__setattr__(self, "is_causal", tuple(self.is_causal) or (False,) * count)
        for name in ("windows", "is_causal"):
            require(len(getattr(self, name)) == count, f"{len(getattr(self, name))} {name} for {count} layers")
        require(min(self.windows) >= 0, f"windows must be at least 0, got {list(self.windows)}")
        require(self.block_size >= 2, f"block_size must be at least 2, got {self.block_size}")
        require(
            0 <= self.mask_token_id < block.vocab_size,
            f"mask_token_id {self.mask_token_id} is not within the vocabulary of {block.vocab_size}",
        )
        require(
            block.attention == "grouped" and block.use_qk_norm and not block.is_moe and not block.attention_bias,
            "DFlash layers must be dense Qwen3 layers, whose grouped attention has query and key norms and no bias",
        )

    @property
    def num_drafts(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size - (not self.sample_from_anchor)


class DFlash(nn.Module):
    """The drafter's network. `features` are n concatenated trunk states, `[B, T, n * D]`."""

    config: DFlashConfig
    implementation: str = "auto"

    def setup(self):
        config, block = self.config, self.config.block
        D, matrix = block.hidden_size, nn.initializers.lecun_normal()
        settings = (block.rms_norm_eps, False, self.implementation)
        self.fc = self.param("fc", matrix, (config.features_size, D))
        self.norm_context = RMSNorm(*settings)
        self.layer = [DFlashLayer(block, self.implementation) for _ in range(block.num_hidden_layers)]
        self.norm_final = AddRMSNorm(*settings)
        if config.own_embedding:
            self.embedding = self.param("embedding", nn.initializers.normal(1.0), (block.vocab_size, D))
        if config.own_head:
            self.head = self.param("head", matrix, (D, config.draft_vocab_size))

    def __call__(self, features: jax.Array, embedded: jax.Array, view: View) -> jax.Array:
        """Uses every parameter once, so that `init` creates all of them."""
        self.context(features)
        return self.run(embedded, (view,) * len(self.layer))[0]

    def context(self, features: jax.Array) -> jax.Array:
        """Projects trunk states `[B, T, n * D]` to `[B, T, D]`, from which every layer computes its keys and values."""
        return self.norm_context(matrix_product(features, self.fc, implementation=self.implementation))

    def run(
        self, embedded: jax.Array, views: tuple[View, ...], layers: tuple[Entries, ...] | None = None
    ) -> tuple[jax.Array, tuple[Entries, ...]]:
        """Runs the layers over a block.

        Args:
            embedded: `[B, X, D]` embedded anchor and mask tokens.
            views: positions and masks of each layer.
            layers: each layer's cache, which holds the context; None if there is no context.

        Returns:
            The states that the head reads, `[B, X, D]`, and the cache with the block's entries after the context.
        """
        # Layers may differ in their window and in whether slots attend to later slots, so each has its own view.
        x, update, entries = embedded, None, []
        for index, layer in enumerate(self.layer):
            x, update, kept = layer(x, update, views[index], None if layers is None else layers[index])
            entries.append(kept)
        return self.norm_final(x, update)[1], tuple(entries)


class DFlashLayer(nn.Module):
    """A Qwen3 decoder layer. Like `Block`, it returns the residual stream and an update that is not added yet."""

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array, update: Any, view: View, layer_cache: Entries | None):
        config = self.config
        settings = (config.rms_norm_eps, False, self.implementation)
        x, normed = AddRMSNorm(*settings, name="norm_attention")(x, update)
        attention = GroupedAttention(config, self.implementation, name="attention")
        attended, entries, _ = attention(normed, view, layer_cache)
        x, normed = AddRMSNorm(*settings, name="norm_feed_forward")(x, attended)
        return x, SwiGLU(config.intermediate_size, self.implementation, name="dense")(normed), entries


def context_entries(
    attention: dict[str, Any], context: jax.Array, angles: tuple[jax.Array, jax.Array], config: ModelConfig
) -> Entries:
    """Computes a layer's keys and values for the context, without a norm before the projection.

    Args:
        attention: the layer's attention parameters.
        context: `[B, T, D]` from `DFlash.context`.
        angles: cosines and sines of the T positions.
        config: sizes of the drafter's layers.

    Returns:
        `key` (normalised and rotated) and `value`, each `[B, K, T, H]`.
    """
    # The last two heads of a group in `qkv [D, K, G + 2, H]` are its key and its value.
    projected = jnp.einsum("BTD,DKPH->PBTKH", context, attention["qkv"][:, :, -2:].astype(context.dtype))
    # Rotate by the trunk's positions, so that a block sees the context at its true distance.
    key = rms_norm_reference(projected[0], attention["norm_k"]["scale"], eps=config.rms_norm_eps)
    key = rotate(key, angles, interleaved=config.rope_interleave)
    return {"key": key.swapaxes(1, 2), "value": projected[1].swapaxes(1, 2)}


def block_states(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    embedding: jax.Array,
    *,
    config: DFlashConfig,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Runs one block after each anchor, teacher-forced.

    The block of an anchor at position a attends to the trunk states at positions before a in the same document, and to
    its own slots. Blocks do not attend to each other. If all blocks together have more than `MAX_ACTIVATIONS`
    feed-forward activations, one group of anchors runs at a time, and the backward pass recomputes each group.

    Args:
        params: parameters of `DFlash`, or of a network that extends it.
        features: `[B, T, n * D]` concatenated trunk states.
        tokens: `[B, T]` int32 tokens at these positions.
        anchors: `[B, A]` int32 positions of the anchors, below T.
        embedding: `[V, D]` embedding of the drafter or the trunk.
        config: the architecture.
        segment_ids: `[B, T]` int32 document ids in packed rows; 0 is padding. None means one document per row.
        implementation: which kernel implementation to use.

    Returns:
        The states that the head reads, `[B, A, X, D]`.
    """
    (B, A), block = anchors.shape, config.block
    segments = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    positions = segment_positions(segments)
    # 1. Compute the context's keys and values, once for all blocks.
    context: Any = DFlash(config, implementation).apply({"params": params}, features, method="context")
    angles = rotary_angles(block, positions)
    entries = tuple(
        context_entries(params[f"layer_{index}"]["attention"], context, angles, block)
        for index in range(block.num_hidden_layers)
    )

    # 2. Run the blocks of one group of anchors `[B, a]`.
    def run(anchors: jax.Array) -> jax.Array:
        first = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
        ids = jnp.pad(first, ((0, 0), (0, 0), (0, config.block_size - 1)), constant_values=config.mask_token_id)
        z = embedding[ids].astype(context.dtype)
        first_position = jnp.take_along_axis(positions, anchors, axis=1)
        for index, kept in enumerate(entries):
            masks = _visible_keys(config, index, anchors, first_position)
            z = _block_layer(params[f"layer_{index}"], z, kept, masks, first_position, config, implementation)
        return rms_norm_reference(z, params["norm_final"]["scale"], eps=block.rms_norm_eps)

    size = max(1, MAX_ACTIVATIONS // (B * config.block_size * block.intermediate_size))
    if size >= A:
        return run(anchors)
    # Pad the last group by repeating the last anchor.
    groups = jnp.pad(anchors, ((0, 0), (0, -A % size)), mode="edge").reshape(B, -1, size).swapaxes(0, 1)
    hidden = jax.lax.map(jax.checkpoint(run), groups)  # [groups, B, size, X, D]
    return hidden.swapaxes(0, 1).reshape(B, -1, *hidden.shape[3:])[:, :A]


def _block_layer(
    layer: dict[str, Any],
    z: jax.Array,
    context: Entries,
    masks: tuple[KeyRanges, jax.Array],
    first_position: jax.Array,
    config: DFlashConfig,
    implementation: str,
) -> jax.Array:
    """Runs a layer over blocks.

    Args:
        layer: the layer's parameters.
        z: `[B, A, X, D]` states of the slots.
        context: the layer's keys and values of the context, from `context_entries`.
        masks: from `_visible_keys`.
        first_position: `[B, A]` int32 position of each anchor.
        config: the architecture.
        implementation: of `range_attention`.

    Returns:
        `[B, A, X, D]`.
    """
    block, attention = config.block, layer["attention"]
    B, A, X, _ = z.shape
    N, H = block.num_attention_heads, block.head_dim
    slots = (first_position[:, :, None] + jnp.arange(X)[None, None]).reshape(B, A * X)

    def norm(x: jax.Array, scale: dict[str, Any]) -> jax.Array:
        return rms_norm_reference(x, scale["scale"], eps=block.rms_norm_eps)

    def turn(x: jax.Array) -> jax.Array:
        flat = x.reshape(B, A * X, -1, H)
        return rotate(flat, rotary_angles(block, slots), interleaved=block.rope_interleave).reshape(x.shape)

    # 1. Compute the slots' queries, keys and values.
    projected = jnp.einsum("BAXD,DKPH->BAXKPH", norm(z, layer["norm_attention"]), attention["qkv"].astype(z.dtype))
    query = turn(norm(projected[..., :-2, :], attention["norm_q"]))
    key, value = turn(norm(projected[..., -2, :], attention["norm_k"])), projected[..., -1, :]
    # 2. Attend to the context and, as keys that no other block attends to, to the block.
    by_head = lambda x: jnp.moveaxis(x, 3, 1)  # `[B, A, X, K, ...]` to `[B, K, A, X, ...]`
    query = by_head(query)
    output = range_attention(
        query.reshape(B, -1, A * X, *query.shape[4:]),
        context["key"],
        context["value"],
        masks[0],
        scale=block.softmax_scale(H),
        own=OwnKeys(by_head(key), by_head(value), masks[1]),
        implementation=implementation,
    )
    # 3. Apply the output projection and the feed-forward layer.
    output = jnp.moveaxis(output, 1, 2)
    z += output.reshape(B, A, X, N * H) @ attention["output"].reshape(N * H, -1).astype(z.dtype)
    dense = jax.tree.map(lambda matrix: matrix.astype(z.dtype), layer["dense"])
    gated = jnp.einsum("BAXD,DPF->PBAXF", norm(z, layer["norm_feed_forward"]), dense["gate_up"])
    return z + (jax.nn.silu(gated[0]) * gated[1]) @ dense["down"]


def _visible_keys(
    config: DFlashConfig, index: int, anchors: jax.Array, position: jax.Array
) -> tuple[KeyRanges, jax.Array]:
    """Returns the context's keys that each slot attends to `[B, A * X, 1]`, and a mask of slots `[B, A * X, X]`.

    `position [B, A]` is the position of each anchor in its document.
    """
    window, anchor = config.windows[index], anchors[:, :, None]
    slots = jnp.arange(config.block_size)
    distance = slots[:, None] - slots[None, :]
    sees_block = distance >= 0 if config.is_causal[index] else jnp.ones_like(distance, bool)
    # The context begins with the anchor's document, or with the window.
    first = jnp.broadcast_to(anchor - position[:, :, None], (*anchors.shape, config.block_size))
    if window and config.window_from_anchor:
        first = jnp.maximum(first, anchor - window)
    elif window:
        first = jnp.maximum(first, anchor + slots[None, None] - window + 1)
        sees_block &= jnp.abs(distance) < window
    last = jnp.broadcast_to(anchor - 1, first.shape)
    ranges = KeyRanges(*(each.reshape(len(anchors), -1, 1) for each in (first, last)))
    return ranges, jnp.tile(sees_block, (*anchors.shape, 1))
