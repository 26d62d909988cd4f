"""The network of an EAGLE-3 drafter (2503.01840), with the options of EAGLE-3.1.

Row i reads states of three trunk layers at position i and the embedding of token i+1, and predicts token i+2, as an MTP
module does. It can read its own output instead of the trunk's states, one position further each time.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import TrunkSizes, check_draft_vocabulary, check_layer_ids
from mtpjax.messages import require
from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.layers.experts import SwiGLU
from mtpjax.models.layers.grouped_attention import GroupedAttention
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.model import multiply_head
from mtpjax.models.quantized import matrix_product
from mtpjax.models.view import Entries, Recycled, View
from pallas_kernels.partial_sums import PartialSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The architecture of an EAGLE-3 drafter and the trunk states that it reads.

    Letters: D width of the drafter, Dt width of the trunk, n trunk states, V vocabulary, R draft vocabulary.

    Args:
        block: sizes of the drafter's own layers, of which it has `num_hidden_layers`; `vocab_size` is V.
        layer_ids: the n trunk layers whose input states are read, in the order of the projection's inputs. The number
            of trunk layers means the output of the last one, before the final norm, and one more that of this norm.
        num_target_layers: layers of the trunk.
        target_hidden_size: width of the trunk, Dt.
        draft_vocab_size: tokens that can be drafted, R.
        norm_before_residual: the first layer's residual is the normalised hidden state.
        norm_before_fc: one norm over all n states before the projection.
        fc_norm: a separate norm for each of the n states (EAGLE-3.1).
        norm_output: the next level reads the output after the final norm (EAGLE-3.1).
        own_embedding: the drafter has an embedding; else it uses the trunk's.
        own_head: the drafter has a head [D, R]; else it uses the trunk's.

    Raises:
        ValueError: for values that do not fit together.
    """

    block: ModelConfig
    layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True

    def __post_init__(self):
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        block = self.block
        check_layer_ids(self.layer_ids, self.num_target_layers)
        require(
            block.attention == "grouped" and not block.is_moe, "EAGLE-3 layers have grouped attention and are dense"
        )
        require(
            block.hidden_size == self.target_hidden_size or (self.own_embedding and self.own_head),
            f"a drafter of width {block.hidden_size} needs its own embedding and head: "
            f"the trunk's have width {self.target_hidden_size}",
        )
        check_draft_vocabulary(self.draft_vocab_size, block.vocab_size, own_head=self.own_head)

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the drafter is for."""
        return TrunkSizes(self.block.vocab_size, self.target_hidden_size, self.num_target_layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the drafter's layers."""
        return self.block.trunk_kinds

    @property
    def features_size(self) -> int:
        """Width of the n trunk states side by side."""
        return len(self.layer_ids) * self.target_hidden_size


class Eagle3(nn.Module):
    """The drafter's network. `features` are n trunk states side by side, `[B, T, n * Dt]`."""

    config: Eagle3Config
    implementation: str = "auto"

    def setup(self):
        config, block = self.config, self.config.block
        D, matrix = block.hidden_size, nn.initializers.lecun_normal()
        settings = (block.rms_norm_eps, False, self.implementation)
        if config.fc_norm:
            self.norm_state = [RMSNorm(*settings) for _ in config.layer_ids]
        if config.norm_before_fc:
            self.norm_features = RMSNorm(*settings)
        self.fc = self.param("fc", matrix, (config.features_size, D))
        self.layer = [
            Eagle3Layer(block, index == 0, config.norm_before_residual, self.implementation)
            for index in range(block.num_hidden_layers)
        ]
        self.norm_final = AddRMSNorm(*settings)
        if config.own_embedding:
            self.embedding = self.param("embedding", nn.initializers.normal(1.0), (block.vocab_size, D))
        if config.own_head:
            self.head = self.param("head", matrix, (D, config.draft_vocab_size))

    def __call__(self, features: jax.Array, tokens: jax.Array, view: View) -> None:
        """Uses every parameter once, so that `init` makes it."""
        D = self.config.block.hidden_size
        embedded = self.embed(tokens) if self.config.own_embedding else jnp.zeros((*tokens.shape, D))
        self.run(self.fuse(features), embedded, view)

    def fuse(self, features: jax.Array) -> jax.Array:
        """Projects the trunk's states to the drafter's width: `[B, T, n * Dt]` to `[B, T, D]`."""
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.config.layer_ids), axis=-1)
            features = jnp.concatenate([norm(x) for norm, x in zip(self.norm_state, parts, strict=True)], axis=-1)
        if self.config.norm_before_fc:
            features = self.norm_features(features)
        return matrix_product(features, self.fc, implementation=self.implementation)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the drafter's own embedding: `[B, T]` tokens to `[B, T, D]`."""
        return self.embedding[tokens]

    def run(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        view: View,
        layers: tuple[Entries | Recycled, ...] | None = None,
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs the drafter's layers.

        Args:
            hidden: `[B, T, D]` from `fuse`, or this function's second result, to draft on.
            embedding: `[B, T, D]` of the token after each hidden state's position.
            view: positions and masks.
            layers: the cache, an entry per layer; `Recycled` for a recycled level over whole rows; None for the first
                level over whole rows.

        Returns:
            The states that the head reads and those that the next level reads, both `[B, T, D]`, and the attention
            entries per layer.
        """
        # The residual stream starts at the hidden state; the embedding enters the first layer's attention only.
        x, update, entries = hidden, None, []
        for index, layer in enumerate(self.layer):
            x, update, kept = layer(x, embedding, view, None if layers is None else layers[index], update)
            entries.append(kept)
        # EAGLE-3.1 passes the normalised state to the next level, EAGLE-3 the one before the norm.
        before, after = self.norm_final(x, update)
        return after, after if self.config.norm_output else before, tuple(entries)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Applies the drafter's own head: `[..., D]` to `[..., R]` float32."""
        return multiply_head(hidden, self.head)


class Eagle3Layer(nn.Module):
    """A decoder layer. The first one's attention reads the embedding and the hidden state side by side.

    Like `Block`, it returns the residual stream and the update of the feed-forward layer, which is not added yet.
    """

    config: ModelConfig
    is_first: bool
    norm_before_residual: bool
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        embedding: jax.Array,
        view: View,
        layer_cache: Entries | Recycled | None,
        update: PartialSums | None,
    ) -> tuple[jax.Array, PartialSums, Entries]:
        config = self.config
        settings = (config.rms_norm_eps, False, self.implementation)
        if self.is_first:
            # Each input has its own norm; the embedding comes first.
            normed = RMSNorm(*settings, name="norm_hidden")(x)
            inputs = jnp.concatenate([RMSNorm(*settings, name="norm_embedding")(embedding), normed], axis=-1)
            x = normed if self.norm_before_residual else x
        else:
            x, inputs = AddRMSNorm(*settings, name="norm_attention")(x, update)
        attention = GroupedAttention(config, self.implementation, config.hidden_size, name="attention")
        attended, entries, _ = attention(inputs, view, layer_cache)
        x, normed = AddRMSNorm(*settings, name="norm_feed_forward")(x, attended)
        return x, SwiGLU(config.intermediate_size, self.implementation, name="dense")(normed), entries
