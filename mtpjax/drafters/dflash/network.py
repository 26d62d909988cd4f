"""The network of a DFlash drafter (2602.06036): a block of slots that attends to projected trunk states.

The slots of a block are the pending token, called the anchor, and mask tokens after it. They pass through the layers
together. Each layer attends to the keys and values of the block itself and of the context, which is the trunk's states
of all positions before the anchor.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import TrunkSizes, check_draft_vocabulary, check_layer_ids
from mtpjax.messages import require
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.experts import SwiGLU
from mtpjax.models.layers.grouped_attention import GroupedAttention
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.quantized import matrix_product
from mtpjax.models.view import Entries, View
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rotation import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """The architecture of a DFlash drafter and the trunk states that it reads.

    Letters: D width, n trunk states, V vocabulary, R draft vocabulary, X slots of a block.

    Args:
        block: sizes of the drafter's own layers, of which it has `num_hidden_layers`; `vocab_size` is V.
        layer_ids: the n trunk layers whose input states are read, in the order of the projection's inputs. The number
            of trunk layers means the output of the last one, before the final norm, and one more that of this norm.
        num_target_layers: layers of the trunk.
        block_size: slots of a block, X.
        mask_token_id: the token of the slots after the anchor.
        windows: per layer the newest positions that a slot attends to; 0: all. (): all positions in every layer.
        is_causal: per layer True if a slot attends only to itself and the slots before it. (): to all slots.
        window_from_anchor: windows count back from the anchor for every slot, and do not limit the block
            (speculators). False: from each slot, itself included (z-lab).
        sample_from_anchor: slot j drafts the token after its own position, so that a block has X drafts. False: the
            token at its position, and the anchor's slot drafts nothing.
        draft_vocab_size: tokens that can be drafted, R; 0: V.
        own_embedding: the drafter has an embedding; else it uses the trunk's.
        own_head: the drafter has a head [D, R]; else it uses the trunk's.

    Raises:
        ValueError: for values that do not fit together.
    """

    block: ModelConfig
    layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    windows: tuple[int, ...] = ()
    is_causal: tuple[bool, ...] = ()
    window_from_anchor: bool = False
    sample_from_anchor: bool = False
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self):
        block, count = self.block, self.block.num_hidden_layers
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        object.__setattr__(self, "windows", tuple(self.windows) or (0,) * count)
        object.__setattr__(self, "is_causal", tuple(self.is_causal) or (False,) * count)
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or block.vocab_size)
        check_layer_ids(self.layer_ids, self.num_target_layers)
        for name in ("windows", "is_causal"):
            require(len(getattr(self, name)) == count, f"{len(getattr(self, name))} {name} for {count} layers")
        require(min(self.windows) >= 0, f"windows must not be negative, got {list(self.windows)}")
        require(self.block_size >= 2, f"block_size must be at least 2, got {self.block_size}")
        require(
            0 <= self.mask_token_id < block.vocab_size,
            f"mask_token_id {self.mask_token_id} is not within the vocabulary of {block.vocab_size}",
        )
        check_draft_vocabulary(self.draft_vocab_size, block.vocab_size, own_head=self.own_head)
        require(
            block.attention == "grouped" and block.use_qk_norm and not block.is_moe and not block.attention_bias,
            "DFlash layers are Qwen3's: grouped attention with query and key norms and no bias, dense",
        )

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the drafter is for."""
        return TrunkSizes(self.block.vocab_size, self.block.hidden_size, self.num_target_layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the drafter's layers."""
        return self.block.trunk_kinds

    @property
    def features_size(self) -> int:
        """Width of the n trunk states side by side."""
        return len(self.layer_ids) * self.block.hidden_size

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - (not self.sample_from_anchor)


class DFlash(nn.Module):
    """The drafter's network. `features` are n trunk states side by side, `[B, T, n * D]`."""

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
        """Uses every parameter once, so that `init` makes it."""
        self.context(features)
        return self.run(embedded, (view,) * len(self.layer))[0]

    def context(self, features: jax.Array) -> jax.Array:
        """Projects trunk states to the input of every layer's keys and values: `[B, T, n * D]` to `[B, T, D]`."""
        return self.norm_context(matrix_product(features, self.fc, implementation=self.implementation))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the drafter's own embedding: `[B, T]` tokens to `[B, T, D]`."""
        return self.embedding[tokens]

    def run(
        self, embedded: jax.Array, views: tuple[View, ...], layers: tuple[Entries, ...] | None = None
    ) -> tuple[jax.Array, tuple[Entries, ...]]:
        """Runs the layers over a block.

        Args:
            embedded: `[B, X, D]` embedded anchor and mask tokens.
            views: positions and masks of each layer.
            layers: each layer's cache, which holds the context; None: no context.

        Returns:
            The states that the head reads, `[B, X, D]`, and the cache with the block's entries after the context.
        """
        # Layers may differ in their window and in whether slots attend to later ones, so each has its own view.
        x, update, entries = embedded, None, []
        for index, layer in enumerate(self.layer):
            x, update, kept = layer(x, update, views[index], None if layers is None else layers[index])
            entries.append(kept)
        return self.norm_final(x, update)[1], tuple(entries)


class DFlashLayer(nn.Module):
    """A decoder layer of Qwen3; like `Block`, it returns the stream and the update that is not added yet."""

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
    """Computes a layer's keys and values of the context. No norm and no residual comes before the projection.

    Args:
        attention: the layer's attention parameters.
        context: `[B, T, D]` from `DFlash.context`.
        angles: cosines and sines of the T positions.
        config: sizes of the drafter's layers.

    Returns:
        `key` and `value`, `[B, K, T, H]`, keys normalised and rotated.
    """
    # The last two heads of a group in `qkv [D, K, G + 2, H]` are its key and its value.
    projected = jnp.einsum("BTD,DKPH->PBTKH", context, attention["qkv"][:, :, -2:].astype(context.dtype))
    # The rotation is that of the trunk's position, so a block finds the context at its true distance.
    key = rms_norm_reference(projected[0], attention["norm_k"]["scale"], eps=config.rms_norm_eps)
    key = rotate(key, angles, interleaved=config.rope_interleave)
    return {"key": key.swapaxes(1, 2), "value": projected[1].swapaxes(1, 2)}
