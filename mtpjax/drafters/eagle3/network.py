"""The network of an EAGLE-3 drafter (2503.01840), with the options of EAGLE-3.1.

Like an MTP module, row i reads the states of three trunk layers at position i and the embedding of token i+1, and
predicts token i+2. Each later level reads the network's output instead of the trunk's states, one position further.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import LayersConfig, TrunkSizes
from mtpjax.drafters.trained import DraftLevels
from mtpjax.messages import require
from mtpjax.models.config import ModelConfig
from mtpjax.models.forward import shift_left
from mtpjax.models.layers.experts import SwiGLU
from mtpjax.models.layers.grouped_attention import GroupedAttention
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.masks import full_view
from mtpjax.models.model import multiply_head
from mtpjax.models.quantized import matrix_product
from mtpjax.models.view import Entries, Recycled, View
from pallas_kernels.partial_sums import PartialSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayersConfig):
    """The architecture of an EAGLE-3 drafter and the trunk states that it reads; Dt is the trunk's width.

    Args:
        target_hidden_size: width of the trunk, Dt.
        norm_before_residual: whether the first layer's residual is the normalised hidden state.
        norm_before_fc: whether one norm over all n states precedes the projection.
        fc_norm: whether each of the n states has a separate norm (EAGLE-3.1).
        norm_output: whether the next level reads the output after the final norm (EAGLE-3.1).

    Raises:
        ValueError: the values are inconsistent.
    """

    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        block = self.block
        require(
            block.attention == "grouped" and not block.is_moe, "EAGLE-3 layers must be dense, with grouped attention"
        )
        require(
            block.hidden_size == self.target_hidden_size or (self.own_embedding and self.own_head),
            f"a drafter of width {block.hidden_size} needs its own embedding and head: "
            f"the trunk's have width {self.target_hidden_size}",
        )

    @property
    def trunk(self) -> TrunkSizes:
        """The trunk that the drafter is for."""
        return TrunkSizes(self.block.vocab_size, self.target_hidden_size, self.num_target_layers)


class Eagle3(nn.Module):
    """The drafter's network. `features` are n concatenated trunk states, `[B, T, n * Dt]`."""

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

    def __call__(self, features: jax.Array, embedded: jax.Array, view: View) -> None:
        """Uses every parameter once, so that `init` creates all of them."""
        self.run(self.fuse(features), embedded, view)

    def fuse(self, features: jax.Array) -> jax.Array:
        """Projects the trunk's states `[B, T, n * Dt]` to the drafter's width, `[B, T, D]`."""
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.config.layer_ids), axis=-1)
            features = jnp.concatenate([norm(x) for norm, x in zip(self.norm_state, parts, strict=True)], axis=-1)
        if self.config.norm_before_fc:
            features = self.norm_features(features)
        return matrix_product(features, self.fc, implementation=self.implementation)

    def run(
        self, hidden: jax.Array, embedding: jax.Array, view: View, layers: tuple[Entries | Recycled, ...] | None = None
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs the drafter's layers.

        Args:
            hidden: `[B, T, D]` from `fuse` or, for later levels, this function's second result.
            embedding: `[B, T, D]` of the token after each hidden state's position.
            view: positions and masks.
            layers: the cache, with one entry per layer. Passes over whole rows use None at the first level, and
                `Recycled` at later levels.

        Returns:
            The states that the head reads and the states that the next level reads, both `[B, T, D]`, and the attention
            entries of each layer.
        """
        # The residual stream starts as the hidden state; the embedding only enters the first layer's attention.
        x, update, entries = hidden, None, []
        for index, layer in enumerate(self.layer):
            x, update, kept = layer(x, embedding, view, None if layers is None else layers[index], update)
            entries.append(kept)
        # EAGLE-3.1 passes the normalised state to the next level; EAGLE-3 passes the state before the norm.
        before, after = self.norm_final(x, update)
        return after, after if self.config.norm_output else before, tuple(entries)


class Eagle3Layer(nn.Module):
    """A decoder layer. The first layer's attention reads the embedding and the hidden state, concatenated.

    Like `Block`, it returns the residual stream and the feed-forward update, which is not added yet.
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


def eagle3_levels(
    params: Any,
    features: jax.Array,
    tokens: jax.Array,
    embedding: jax.Array,
    *,
    config: Eagle3Config,
    num_levels: int,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> DraftLevels:
    """Runs the levels that decoding drafts, teacher-forced (EAGLE-3's training-time test, 2503.01840).

    Level 1 reads the trunk's states. Each later level reads the previous level's output. As in decoding, row i attends
    to the entries of level 1 up to row i, and to the entries of row i in later levels.

    Args:
        params: parameters of `Eagle3`, where "head" is the drafter's head or the trunk's.
        features: `[B, T, n * Dt]` concatenated trunk states.
        tokens: `[B, T]` int32 tokens at these positions.
        embedding: `[V, D]` embedding of the drafter or the trunk.
        config: the architecture.
        num_levels: number of levels to run.
        segment_ids: `[B, T]` int32 document ids in packed rows; 0 is padding. None means one document per row.
        implementation: which kernel implementation to use.

    Returns:
        The outputs of every level. At level k, the rows from T-k on contain garbage.
    """

    def apply(*arguments: Any, method: str) -> Any:
        return Eagle3(config, implementation).apply({"params": params}, *arguments, method=method)

    segments = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    hidden = apply(features, method="fuse")
    base: tuple[Entries, ...] = ()
    levels: list[tuple[Entries, ...]] = []
    logits, inputs = [], []
    for level in range(1, num_levels + 1):
        # Level k reads the token that is k positions later, with the rotary position of its slot.
        view = full_view(config.block, segments, shift=level - 1)
        embedded = embedding[shift_left(tokens, level)]
        layers = None
        if level > 1:
            layers = tuple(Recycled(kept, tuple(each[index] for each in levels)) for index, kept in enumerate(base))
        output, hidden, entries = apply(hidden, embedded, view, layers, method="run")
        if level == 1:
            base = entries
        else:
            levels.append(entries)
        logits.append(multiply_head(output, params["head"]))
        inputs.append(output)
    return DraftLevels(tuple(logits), tuple(inputs))
