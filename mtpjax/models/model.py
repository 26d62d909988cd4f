"""The whole model as a linen module: trunk, MTP modules, shared embedding and head."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.cache import Cache
from mtpjax.models.config import Implementation, ModelConfig
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.masks import full_view
from mtpjax.models.model import MTPModule, Trunk
from mtpjax.models.parallel import own_size
from mtpjax.models.quantized import is_scaled
from mtpjax.models.view import Entries, Recycled, View
from mtpjax.models.vocabulary import Vocabulary
from pallas_kernels.batch_invariance import is_batch_invariant, map_row_blocks
from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.top_k import top_k


class TrunkOutput(flax.struct.PyTreeNode):
    """A pass of the trunk over `[B, T]` tokens."""

    hidden: jax.Array  # [B, T, D] after the final norm: the head reads it
    prenorm: jax.Array  # [B, T, D] before the final norm
    states: tuple[jax.Array, ...]  # [B, T, D] each: input states of the requested layers
    cache: Cache | None  # with the tokens appended


class MTPModel(nn.Module):
    """A trunk with MTP modules: a static, hashable description without parameters.

    The parameters are a separate pytree, from `init_params` or `load`.

    Args:
        config: the architecture.
        scan_layers: use stacked trunk layers in one scan, the form for training (`mtpjax.models.trunk.stack_layers`).
            False: unrolled layers, the form for decoding.
        remat: keep only the input of each trunk layer and module for the backward pass.
        dtype: dtype that layers compute in; None takes the embedding's. Layers cast their weights to it.
        implementation: "xla", "triton" or "auto" for every kernel (`pallas_kernels.dispatch`).

    Returns:
        The linen module.

    Example:
        >>> import jax
        >>> from mtpjax import MTPModel, init_params, presets
        >>> model = MTPModel(presets["tiny"])
        >>> params = init_params(model, jax.random.key(0))
        >>> params["embedding"].shape
        (256, 64)
    """

    config: ModelConfig
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    implementation: Implementation = "auto"

    def setup(self):
        config = self.config
        table = nn.initializers.normal(1.0)
        matrix = nn.initializers.lecun_normal()
        vocab_size = own_size(config.vocab_size, "tensor")
        self.embedding = self.param("embedding", table, (vocab_size, config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = self.param("head", matrix, (config.hidden_size, vocab_size))
        self.trunk = Trunk(config, self.scan_layers, self.remat, self.implementation)
        self.norm_final = RMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation)
        modules = range(config.num_mtp_modules)
        module = nn.remat(MTPModule) if self.remat else MTPModule
        self.mtp = [module(config, self.implementation) for _ in modules]
        if config.mtp_own_embedding:
            shape = (vocab_size, config.hidden_size)
            self.mtp_embedding = [self.param(f"mtp_embedding_{index}", table, shape) for index in modules]
        if config.mtp_own_head:
            shape = (config.hidden_size, vocab_size)
            self.mtp_head = [self.param(f"mtp_head_{index}", matrix, shape) for index in modules]

    def __call__(self, tokens: jax.Array) -> None:
        """Uses every parameter once, so that `init` makes it."""
        view = full_view(self.config, jnp.ones_like(tokens))
        chained_hidden = self.mtp_input_hidden(self.run_trunk(tokens, view))
        for index in range(self.config.num_mtp_modules):
            chained_hidden, _, _ = self.run_module(chained_hidden, tokens, view, index=index)

    def run_trunk(
        self, tokens: jax.Array, view: View, cache: Cache | None = None, *, layer_ids: tuple[int, ...] = ()
    ) -> TrunkOutput:
        """Runs the trunk.

        Args:
            tokens: `[B, T]` int32.
            cache: the trunk's cache; None for a pass over whole rows.
            layer_ids: layers whose input states are returned as well.
        """
        prenorm, cache, states = self.trunk(self._embed(self.embedding, tokens), view, cache, layer_ids=layer_ids)
        return TrunkOutput(self.norm_final(prenorm), prenorm, states, cache)

    def mtp_input_hidden(self, output: TrunkOutput) -> jax.Array:
        """Picks the hidden states `[B, T, D]` that the MTP modules read, by the family's convention."""
        return output.hidden if self.config.mtp_hidden_post_norm else output.prenorm

    def head_input_hidden(self, mtp_hidden: jax.Array) -> jax.Array:
        """Computes the hidden states that the head reads from those that the MTP modules read."""
        return mtp_hidden if self.config.mtp_hidden_post_norm else self.norm_final(mtp_hidden)

    def run_module(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        view: View,
        layer_cache: Entries | Recycled | None = None,
        *,
        index: int,
        is_valid: jax.Array | None = None,
    ):
        """Runs MTP module `index`, from 0.

        Args:
            hidden: `[B, T, D]` hidden states, of the trunk or of the previous module.
            tokens: `[B, T]` int32, the token after each hidden state's position (one later per module).
            layer_cache: the module's layer of a cache; `Recycled` for a recycled depth over whole rows; None for a
                pass over whole rows.
            is_valid: `[B, T]` bool; embeddings of other tokens count as zero. None: all are valid.

        Returns:
            The states that the head reads `[B, T, D]`, the states that the next depth reads `[B, T, D]`, and the
            attention entries.
        """
        table = self.mtp_embedding[index] if self.config.mtp_own_embedding else self.embedding
        embedding = self._embed(table, tokens)
        if is_valid is not None:
            embedding = jnp.where(is_valid[:, :, None], embedding, 0)
        if self.config.mtp_mask_first:
            is_first = view.angles[1][:, :, :1] == 0  # the sine of position 0
            embedding = jnp.where(is_first, 0, embedding)
        after, before, entries = self.mtp[index](hidden, embedding, view, layer_cache)
        if self.config.mtp_output_norm == "trunk":
            after = self.norm_final(before)
        return after, after if self.config.mtp_chain_post_norm else before, entries

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the trunk's embedding: `[B, T]` tokens to `[B, T, D]`."""
        return self._embed(self.embedding, tokens)

    def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # The cast follows the look-up, so that the gradient sums over tokens in the table's dtype.
        rows = Vocabulary.of(self.config.vocab_size).look_up(lambda columns: table[columns], tokens, len(table))
        return rows if self.dtype is None else rows.astype(self.dtype)

    def head_matrix(self, *, index: int | None = None) -> jax.Array:
        """Returns the head `[D, V]`: the trunk's, or that of module `index` if it has one."""
        if index is not None and self.config.mtp_own_head:
            return self.mtp_head[index]
        return self.embedding.T if self.config.tie_word_embeddings else self.head

    def logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Applies the head of module `index`, or the trunk's, to normalised states `[..., D]`: `[..., V]` float32."""
        return Vocabulary.of(self.config.vocab_size).gather(self.own_logits(hidden, index=index))

    def own_logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Computes the logits of this device's shard of the vocabulary, `[..., local V]` float32."""
        return multiply_head(hidden, self.head_matrix(index=index))

    def top_tokens(self, hidden: jax.Array, *, k: int, index: int | None = None):
        """Computes the `k` best logits without storing all of them; padding ids are left out.

        Returns:
            The k best logits `[..., k]` float32, their tokens `[..., k]` int32, and the log-sum-exp of all logits
            `[...]` float32.
        """
        # A tied embedding is read in its own layout [V, D]: a transpose would copy it.
        config = self.config
        is_tied = config.tie_word_embeddings and not (index is not None and config.mtp_own_head)
        head = self.embedding if is_tied else self.head_matrix(index=index)
        num_tokens, own_tokens = config.num_tokens or config.vocab_size, own_size(config.vocab_size, "tensor")
        vocabulary = Vocabulary.of(config.vocab_size)
        if k > own_tokens:
            logits = self.logits(hidden, index=index)[..., :num_tokens]
            return *top_k(logits, k), jax.nn.logsumexp(logits, axis=-1)
        if own_tokens < config.vocab_size and num_tokens < config.vocab_size:
            # The number of ids that only pad the table differs between devices, but is a constant in the kernel.
            token = vocabulary.ids(own_tokens)
            own_logits = jnp.where(token < num_tokens, self.own_logits(hidden, index=index), -jnp.inf)
            values, tokens, logsumexp = *top_k(own_logits, k), jax.nn.logsumexp(own_logits, axis=-1)
        else:
            values, tokens, logsumexp = head_top_k(
                hidden,
                head.astype(hidden.dtype) if is_scaled(head) else head,
                k=k,
                num_tokens=num_tokens if own_tokens == config.vocab_size else own_tokens,
                is_transposed=is_tied,
                implementation=self.implementation,
            )
        return *vocabulary.merge_top(values, tokens, own_tokens), vocabulary.merge_logsumexp(logsumexp)


def multiply_head(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Multiplies hidden states `[..., D]` by a head `[D, V]`: logits `[..., V]` float32."""
    head = head.astype(hidden.dtype)
    if not is_batch_invariant():
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = map_row_blocks(lambda rows: jnp.matmul(rows, head, preferred_element_type=jnp.float32), rows)
    return logits.reshape(*hidden.shape[:-1], -1)


def bind(model: MTPModel, params: dict) -> Callable[..., Any]:
    """Binds parameters to a model: `bind(model, params)(tokens, view, method="run_trunk")` calls a method of it."""
    return functools.partial(model.apply, {"params": params})
