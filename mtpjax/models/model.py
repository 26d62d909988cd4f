"""The whole model as a Flax linen module, with trunk, MTP modules, and shared embedding and head."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.cache import Cache
from mtpjax.models.config import Implementation, ModelConfig, Remat
from mtpjax.models.layers.block import Block
from mtpjax.models.layers.norm import AddRMSNorm, RMSNorm
from mtpjax.models.masks import empty_selection, full_view
from mtpjax.models.parallel import num_shards, own_size
from mtpjax.models.quantized import is_scaled, partial_product
from mtpjax.models.sharding import gather_layers
from mtpjax.models.trunk import layer_groups
from mtpjax.models.view import Entries, Masks, Recycled, View
from mtpjax.models.vocabulary import Vocabulary
from pallas_kernels.batch_invariance import is_batch_invariant, map_row_blocks
from pallas_kernels.gradients import KEPT_RESULT
from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.row_product import multiply_rows, transposed
from pallas_kernels.top_k import top_k


class TrunkOutput(flax.struct.PyTreeNode):
    """Output of a trunk pass over `[B, T]` tokens."""

    hidden: jax.Array  # [B, T, D] after the final norm; the head's input
    prenorm: jax.Array  # [B, T, D] before the final norm
    states: tuple[jax.Array, ...]  # [B, T, D] each: input states of the requested layers
    cache: Cache | None  # with the tokens appended


class Trunk(nn.Module):
    """The decoder layers, unrolled or scanned. `stack_layers` and `unstack_layers` convert the parameters.

    Each unrolled layer has parameters `layer_i` and a cache. Decoding uses this form, because a scan would copy every
    weight in each step. With `scanned`, layers whose kinds repeat are stacked and scanned over whole rows, without a
    cache. Training uses this form, because XLA then compiles one layer instead of all. For the backward pass a scanned
    layer keeps what `remat` says (`MTPModel`).
    """

    config: ModelConfig
    scanned: bool = False
    remat: Remat = "none"
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, x: jax.Array, view: View, cache: Cache | None = None, *, layer_ids: tuple[int, ...] = ()
    ) -> tuple[jax.Array, Cache | None, tuple[jax.Array, ...]]:
        """Runs all layers over embedded tokens `[B, T, D]`.

        Returns the states before the final norm, the cache with the tokens appended, and the states that enter the
        unrolled layers `layer_ids`.

        Raises:
            ValueError: for a layer id out of range, or layer_ids with scanned layers.
        """
        config = self.config
        if layer_ids and (self.scanned or not all(0 <= layer < config.num_hidden_layers for layer in layer_ids)):
            raise ValueError(
                f"layer_ids {layer_ids} need unrolled layers and ids within 0..{config.num_hidden_layers - 1}"
            )
        selection: Masks | None = None
        if self.scanned:
            # Use one scan for each run of repeating kinds. The carry needs a constant structure, so it starts with a
            # placeholder selection, which the first layer's indexer replaces.
            if config.index_topk:
                selection = empty_selection(view, config)
            period_type = _Period
            if max(map(num_shards, ("fsdp", "context"))) > 1:
                # Gather inside the rematerialised part, so that the backward pass gathers again instead of keeping
                # whole layers.
                gather = functools.partial(gather_layers, config=config)
                period_type = nn.map_variables(_Period, "params", trans_in_fn=gather)
            stretch = nn.remat(period_type, prevent_cse=False, policy=_POLICIES[self.remat])
            for name, (first, period, repeats) in layer_groups(config).items():
                scan = nn.scan(
                    lambda stack, carry, view: (stack(*carry, view), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                    length=repeats,
                )
                period_layers = stretch(config, first, period, self.implementation, name=name)
                (x, selection), _ = scan(period_layers, (x, selection), view)
            return x, None, ()
        # Unrolled layers each have their own parameters and their own part of the cache.
        layers, states, update, block_type = [], {}, None, Block
        is_sharded = max(map(num_shards, ("fsdp", "context"))) > 1
        for index, kind in enumerate(config.trunk_kinds):
            if index in layer_ids:
                states[index] = x if update is None else x + update.total()
            if is_sharded:
                # A separate drafter trains. A layer is gathered after the previous layer's attention. Without this
                # dependency, XLA may gather all layers at once.
                gather = lambda params, x=x: gather_layers(jax.lax.optimization_barrier((params, x))[0], config)
                block_type = nn.map_variables(Block, "params", trans_in_fn=gather)
            block = block_type(config, kind, self.implementation, name=f"layer_{index}")
            x, update, entries, selection = block(x, view, cache.layers[index] if cache else None, selection, update)
            layers.append(entries)
        cache = cache.replace(layers=tuple(layers)) if cache else None
        return x if update is None else x + update.total(), cache, tuple(states[layer] for layer in layer_ids)


class _Period(nn.Module):
    """The `period` layers from layer `first` on, which a scan repeats with different parameters."""

    config: ModelConfig
    first: int
    period: int
    implementation: str

    @nn.compact
    def __call__(self, x: jax.Array, selection: Masks | None, view: View) -> tuple[jax.Array, Masks | None]:
        for place in range(self.period):
            kind = self.config.layer_kind(self.first + place)
            block = Block(self.config, kind, self.implementation, name=f"layer_{place}")
            x, update, _, selection = block(x, view, None, selection)
            x = x + update.total()
        return x, selection


_keep_attention = jax.checkpoint_policies.save_only_these_names(KEPT_RESULT)


def _keep_matmuls(primitive, *avals, **settings) -> bool:
    """Returns whether a scanned layer keeps a result: weight matmuls, and attention that marks its result.

    Norms, activations and the scores of attention are recomputed. Attention matmuls are recognised by their two batch
    axes, rows and heads. Keeping everything would take more memory, which costs more time than the recomputation.
    """
    if primitive.name != "dot_general":
        return bool(_keep_attention(primitive, *avals, **settings))
    _, (batch, _) = settings["dimension_numbers"]
    return len(batch) < 2


_POLICIES = {"none": _keep_matmuls, "attention": _keep_attention, "layers": None}


class MTPModule(nn.Module):
    """An MTP module, which maps `hidden [B, T, D]` and the next tokens' `embedding [B, T, D]` to `[B, T, D]`.

    Follows DeepSeek-V3 (2412.19437, equations 21-23), with the embedding first, as in its checkpoints. Position i of
    module k reads the embedding of t[i+k] and predicts t[i+k+1]. Returns the output after the module's final norm
    (which the head reads), the output before that norm, and the attention entries. Without a final norm
    (`mtp_output_norm`), the two outputs are the same.
    """

    config: ModelConfig
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self, hidden: jax.Array, embedding: jax.Array, view: View, layer_cache: Entries | Recycled | None = None
    ) -> tuple[jax.Array, jax.Array, Entries]:
        config = self.config.of_modules

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation, name=name)

        # Normalise both inputs, join them in the checkpoint's order, and project back to the model width.
        pair = [norm("norm_embedding")(embedding), norm("norm_hidden")(hidden)]
        if config.mtp_input == "hidden_embedding":
            pair.reverse()
        project = self.param("project", nn.initializers.lecun_normal(), (2 * config.hidden_size, config.hidden_size))
        projected = partial_product(jnp.concatenate(pair, axis=-1), project, implementation=self.implementation)
        # One decoder layer, and the module's final norm if it has one.
        block = Block(config, config.mtp_kind, self.implementation, name="block")
        x, update, entries, _ = block(None, view, layer_cache, update=projected)
        if config.mtp_output_norm != "own":
            output = x + update.total()
            return output, output, entries
        norm_output = AddRMSNorm(config.rms_norm_eps, config.zero_centred_norm, self.implementation, name="norm_output")
        before, after = norm_output(x, update)
        return after, before, entries


class MTPModel(nn.Module):
    """A static, hashable description of a trunk with MTP modules, without parameters.

    The parameters are a separate pytree, from `init_params` or `load`.

    Args:
        config: the architecture.
        scan_layers: stack and scan the trunk layers, as training does (`mtpjax.models.trunk.stack_layers`). False:
            unroll the layers, as decoding does.
        remat: what a pass keeps for its backward pass, which computes the rest again. "none": all results of a module,
            and the results of weight matmuls and of attention by blocks of a scanned layer. "attention": the input of
            each trunk layer and module, and the results of attention by blocks. "layers": only the inputs.
        dtype: dtype that layers compute in, to which they cast their weights; None: the embedding's dtype.
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
    remat: Remat = "none"
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
        module = MTPModule if self.remat == "none" else nn.remat(MTPModule, policy=_POLICIES[self.remat])
        self.mtp = [module(config, self.implementation) for _ in modules]
        if config.mtp_own_embedding:
            shape = (vocab_size, config.hidden_size)
            self.mtp_embedding = [self.param(f"mtp_embedding_{index}", table, shape) for index in modules]
        if config.mtp_own_head:
            shape = (config.hidden_size, vocab_size)
            self.mtp_head = [self.param(f"mtp_head_{index}", matrix, shape) for index in modules]

    def __call__(self, tokens: jax.Array) -> None:
        """Uses every parameter once, so that `init` creates all of them."""
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
            layer_ids: layers whose input states are also returned.
        """
        prenorm, cache, states = self.trunk(self._embed(self.embedding, tokens), view, cache, layer_ids=layer_ids)
        return TrunkOutput(self.norm_final(prenorm), prenorm, states, cache)

    def mtp_input_hidden(self, output: TrunkOutput) -> jax.Array:
        """Picks the hidden states `[B, T, D]` that the MTP modules read, following the family's convention."""
        return output.hidden if self.config.mtp_hidden_post_norm else output.prenorm

    def head_input_hidden(self, mtp_hidden: jax.Array) -> jax.Array:
        """Converts the hidden states that the MTP modules read into those that the head reads."""
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
        """Runs MTP module `index`; indices start at 0.

        Args:
            hidden: `[B, T, D]` hidden states of the trunk or of the previous module.
            tokens: `[B, T]` int32; module k reads the token k + 1 positions after each hidden state.
            layer_cache: the module's layer of a cache; over whole rows, `Recycled` for a recycled depth and None for
                other depths.
            is_valid: `[B, T]` bool; embeddings of invalid tokens are zero. None: all are valid.

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
        """Looks up `[B, T]` tokens in the trunk's embedding; returns `[B, T, D]`."""
        return self._embed(self.embedding, tokens)

    def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # Cast after the look-up, so that the gradient sums over tokens in the table's dtype.
        rows = Vocabulary.of(self.config.vocab_size).look_up(lambda columns: table[columns], tokens, len(table))
        return rows if self.dtype is None else rows.astype(self.dtype)

    def head_matrix(self, *, index: int | None = None) -> jax.Array:
        """Returns module `index`'s head `[D, V]` if it has a separate head, and otherwise the trunk's head."""
        if index is not None and self.config.mtp_own_head:
            return self.mtp_head[index]
        return transposed(self.embedding) if self.config.tie_word_embeddings else self.head

    def logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Applies module `index`'s or the trunk's head to normalised states `[..., D]`; returns `[..., V]` float32."""
        return Vocabulary.of(self.config.vocab_size).gather(self.own_logits(hidden, index=index))

    def own_logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Computes the logits of this device's shard of the vocabulary, `[..., local V]` float32."""
        return multiply_head(hidden, self.head_matrix(index=index))

    def top_tokens(self, hidden: jax.Array, *, k: int, index: int | None = None):
        """Computes the `k` largest logits without storing all logits; ids that only pad the table are excluded.

        Returns:
            The k largest logits `[..., k]` float32, their tokens `[..., k]` int32, and the log-sum-exp of all logits
            `[...]` float32.
        """
        # Read a tied embedding in its original layout [V, D], because a transpose would copy it.
        config = self.config
        is_tied = config.tie_word_embeddings and not (index is not None and config.mtp_own_head)
        head = self.embedding if is_tied else self.head_matrix(index=index)
        num_tokens, own_tokens = config.num_tokens or config.vocab_size, own_size(config.vocab_size, "tensor")
        vocabulary = Vocabulary.of(config.vocab_size)
        if k > own_tokens:
            logits = self.logits(hidden, index=index)[..., :num_tokens]
            return *top_k(logits, k), jax.nn.logsumexp(logits, axis=-1)
        if own_tokens < config.vocab_size and num_tokens < config.vocab_size:
            # The number of ids that only pad the table differs between devices, but the kernel needs a constant.
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
    """Multiplies hidden states `[..., D]` by a head `[D, V]`; returns logits `[..., V]` float32."""
    head = head.astype(hidden.dtype)
    if not is_batch_invariant():
        return multiply_rows(hidden, head, jnp.float32)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = map_row_blocks(lambda rows: jnp.matmul(rows, head, preferred_element_type=jnp.float32), rows)
    return logits.reshape(*hidden.shape[:-1], -1)


def bind(model: MTPModel, params: dict) -> Callable[..., Any]:
    """Binds parameters to a model; `bind(model, params)(tokens, view, method="run_trunk")` calls `run_trunk`."""
    return functools.partial(model.apply, {"params": params})
