"""The whole model: trunk, MTP modules, shared embedding and head; and its teacher-forced pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.cache import Cache
from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.norm import RMSNorm
from mtpjax.models.masks import Entries, Recycled, View, full_view
from mtpjax.models.mtp import MTPModule
from mtpjax.models.quantized import is_scaled
from mtpjax.models.trunk import Trunk, unstack_layers
from pallas_kernels import head_top_k


class TrunkOutput(flax.struct.PyTreeNode):
    """A pass of the trunk over `[B, T]` tokens."""

    hidden: jax.Array  # [B, T, D] after the final norm: the head reads it
    prenorm: jax.Array  # [B, T, D] before the final norm
    states: tuple[jax.Array, ...]  # [B, T, D] each: states that enter the layers which were asked for
    cache: Cache | None  # with the tokens appended


class MTPModel(nn.Module):
    """Trunk and MTP modules. A static description: parameters are a pytree beside it, from `init_params` or `load`.

    `scan_layers` is the form for training, with stacked trunk layers (`mtpjax.models.trunk.stack_layers`); there
    `remat` keeps
    no more than the input of each trunk layer and module for the backward pass, and `dtype` is what layers compute in,
    by default the embedding's: each casts its weights to its input's. `implementation` is every kernel's
    (`pallas_kernels.dispatch`); over a mesh only the experts' run, on each device's own, and norms are always XLA's.
    """

    config: ModelConfig
    scan_layers: bool = False
    remat: bool = False
    dtype: str | None = None
    implementation: str = "auto"

    def setup(self):
        config = self.config
        table = nn.initializers.normal(1.0)
        matrix = nn.initializers.lecun_normal()
        self.embedding = self.param("embedding", table, (config.vocab_size, config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = self.param("head", matrix, (config.hidden_size, config.vocab_size))
        self.trunk = Trunk(config, self.scan_layers, self.remat, self.implementation)
        self.norm_final = RMSNorm(config.rms_norm_eps, config.zero_centred_norm)
        modules = range(config.num_mtp_modules)
        module = nn.remat(MTPModule) if self.remat else MTPModule
        self.mtp = [module(config, self.implementation) for _ in modules]
        if config.mtp_own_embedding:
            shape = (config.vocab_size, config.hidden_size)
            self.mtp_embedding = [self.param(f"mtp_embedding_{index}", table, shape) for index in modules]
        if config.mtp_own_head:
            shape = (config.hidden_size, config.vocab_size)
            self.mtp_head = [self.param(f"mtp_head_{index}", matrix, shape) for index in modules]

    def __call__(self, tokens: jax.Array) -> None:
        """Touches every parameter once, for `init`."""
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
            view: positions and masks (`mtpjax.models.masks`).
            cache: the trunk's cache; None for a pass over whole rows.
            layer_ids: layers whose input states are returned as well.

        Returns:
            Hidden states and the cache.
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
        memory: Entries | Recycled | None = None,
        *,
        index: int,
        is_valid: jax.Array | None = None,
    ):
        """MTP module `index` (0-based) over hidden `[B, T, D]` and the tokens `[B, T]` that go with it.

        `is_valid [B, T]` zeroes other embeddings. Returns the output for the head, the hidden that is passed on, and
        the attention entries.
        """
        table = self.mtp_embedding[index] if self.config.mtp_own_embedding else self.embedding
        embedding = self._embed(table, tokens)
        if is_valid is not None:
            embedding = jnp.where(is_valid[:, :, None], embedding, 0)
        if self.config.mtp_mask_first:
            is_first = view.angles[1][:, :, :1] == 0  # the sine of position 0
            embedding = jnp.where(is_first, 0, embedding)
        after, before, entries = self.mtp[index](hidden, embedding, view, memory)
        return after, after if self.config.mtp_chain_post_norm else before, entries

    def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Cast behind the look-up, whose gradient sums over tokens in the table's own dtype."""
        return table[tokens] if self.dtype is None else table[tokens].astype(self.dtype)

    def head_matrix(self, *, index: int | None = None) -> jax.Array:
        """The head `[D, V]`; of module `index` if that has its own."""
        if index is not None and self.config.mtp_own_head:
            return self.mtp_head[index]
        return self.embedding.T if self.config.tie_word_embeddings else self.head

    def logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Head over hidden `[..., D]` (after its norm): float32 `[..., V]`; of module `index` if that has its own."""
        head = self.head_matrix(index=index)
        return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def top_tokens(self, hidden: jax.Array, *, k: int, index: int | None = None):
        """Of the logits over hidden `[..., D]`: the `k` best tokens' `[..., k]`, those tokens, log-sum-exp `[...]`.

        Ids that only pad the tables count nowhere. A tied embedding is read as it lies.
        """
        config = self.config
        is_tied = config.tie_word_embeddings and not (index is not None and config.mtp_own_head)
        head = self.embedding if is_tied else self.head_matrix(index=index)
        return head_top_k(
            hidden,
            head.astype(hidden.dtype) if is_scaled(head) else head,
            k=k,
            num_tokens=config.num_tokens or config.vocab_size,
            is_transposed=is_tied,
            implementation=self.implementation,
        )


def init_params(model: MTPModel, key: jax.Array) -> dict:
    """Random parameters: embedding with unit variance, matrices with variance 1 / inputs, norms at identity."""
    stacked = model.clone(scan_layers=True, implementation="xla")  # one layer to compile, however many there are
    params = _draw_params(stacked, key)
    return params if model.scan_layers else unstack_layers(params, model.config)


@functools.partial(jax.jit, static_argnums=0)
def _draw_params(model: MTPModel, key: jax.Array) -> dict:
    return dict(model.init(key, jnp.zeros((1, 2), jnp.int32))["params"])


@functools.cache  # the same models come again and again, and tracing one takes a third of a second
def param_shapes(config: ModelConfig, scan_layers: bool = False) -> dict:
    """Returns the shapes and dtypes of a model's parameters without allocating any.

    Args:
        config: The model's configuration.
        scan_layers: Whether the layers of the trunk are stacked, as `MTPModel(scan_layers=True)` has them.

    Returns:
        A tree of `jax.ShapeDtypeStruct` with the structure of `init_params`.
    """
    model = MTPModel(config, scan_layers=scan_layers)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def add_mtp_modules(model: MTPModel, params: dict, num_modules: int, key: jax.Array) -> tuple[MTPModel, dict]:
    """`model` with `num_modules` MTP modules more, new ones behind those that it has, in the embedding's dtype.

    For fine-tuning a trunk that came without. Each begins as a copy of the module before it (looped extension,
    2603.23911); the first as random, but for its decoder layer, a copy of the trunk's last one where that is of the
    same kind. All share the trunk's embedding and head. `params` have unrolled layers. Raises `ValueError` where
    modules that are there have their own.
    """
    config = model.config
    if num_modules < 1:
        raise ValueError(f"num_modules must be at least 1, not {num_modules}")
    if config.mtp_own_embedding or config.mtp_own_head:
        raise ValueError("modules that are there have an embedding or a head of their own: new ones would have none")
    view = full_view(config, jnp.ones((1, 2), jnp.int32))
    hidden = jnp.zeros((1, 2, config.hidden_size))
    first, dtype = config.num_mtp_modules, params["embedding"].dtype

    def copy(tree):
        return jax.tree.map(lambda leaf: jnp.copy(leaf.astype(dtype)), tree, is_leaf=is_scaled)

    def shapes(tree):
        return jax.tree.map(jnp.shape, tree)

    params = dict(params)
    for index in range(first, first + num_modules):
        if index:
            params[f"mtp_{index}"] = copy(params[f"mtp_{index - 1}"])
            continue
        new = copy(jax.jit(MTPModule(config).init)(key, hidden, hidden, view)["params"])
        last = copy(params["trunk"][f"layer_{config.num_hidden_layers - 1}"])
        params["mtp_0"] = {**new, "block": last} if shapes(last) == shapes(new["block"]) else new
    config = dataclasses.replace(config, num_mtp_modules=first + num_modules)
    return model.clone(config=config), params


def bind(model: MTPModel, params: dict) -> Callable[..., Any]:
    """`model` with its parameters: `apply(tokens, view, method="run_trunk")` calls one of its methods."""
    return functools.partial(model.apply, {"params": params})


class DepthsOutput(flax.struct.PyTreeNode):
    """A teacher-forced pass over `[B, T]` tokens. Row i of depth k (index k-1) predicts t[i+k+1]; from T-k: garbage."""

    logits: jax.Array  # [B, T, V] float32
    hidden: jax.Array  # [B, T, D] after the final norm
    mtp_logits: tuple[jax.Array, ...]  # per depth [B, T, V] float32
    mtp_hidden: tuple[jax.Array, ...]  # per depth [B, T, D], after the module's norm


class ForwardOutput(DepthsOutput):
    """`DepthsOutput` of a pass that had the trunk before it."""

    hidden_prenorm: jax.Array  # [B, T, D]


def is_of_modules(name: str) -> bool:
    """Whether a top-level parameter is the modules' own, not the trunk's or shared with it."""
    return name.startswith("mtp_")


def detach_trunk(params: dict) -> dict:
    """The parameters, without gradients for what is not the modules' own."""
    return {name: leaf if is_of_modules(name) else jax.lax.stop_gradient(leaf) for name, leaf in params.items()}


@functools.partial(jax.jit, static_argnames=("model", "num_depths", "attention_layout", "is_detached"))
def forward(
    params: dict,
    tokens: jax.Array,
    *,
    model: MTPModel,
    segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    num_depths: int | None = None,
    attention_layout: str = "ttt",
    is_detached: bool = False,
) -> ForwardOutput:
    """Trunk and MTP depths over whole rows of true tokens `[B, T]`: its pass, then `forward_depths`.

    `segment_ids [B, T]` (0 is padding) keep packed documents apart; `lengths [B]` marks right-padded rows instead.
    Raises `ValueError` for shapes or choices that do not fit.
    """
    _check_rows(tokens, segment_ids, lengths)
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
        if lengths is not None:
            segment_ids = (jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]).astype(jnp.int32)
    mtp_hidden, prenorm = _trunk_pass(params, tokens, segment_ids, model)
    output = forward_depths(
        params,
        mtp_hidden,
        tokens,
        segment_ids,
        model=model,
        num_depths=num_depths,
        attention_layout=attention_layout,
        is_detached=is_detached,
    )
    return ForwardOutput(**vars(output), hidden_prenorm=prenorm)


@functools.partial(jax.jit, static_argnames="model")
def trunk_states(params: dict, tokens: jax.Array, segment_ids: jax.Array, *, model: MTPModel) -> jax.Array:
    """The trunk's pass alone: `[B, T, D]`, the state that enters the modules, from which `forward_depths` goes on."""
    return _trunk_pass(params, tokens, segment_ids, model)[0]


def _trunk_pass(params, tokens, segment_ids, model) -> tuple[jax.Array, jax.Array]:
    """The state that enters the modules, and the one before the final norm."""
    output = bind(model, params)(tokens, full_view(model.config, segment_ids), method="run_trunk")
    return model.mtp_input_hidden(output), output.prenorm


def forward_depths(
    params: dict,
    mtp_hidden: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    num_depths: int | None = None,
    attention_layout: str = "ttt",
    is_detached: bool = False,
) -> DepthsOutput:
    """Runs the head and the MTP depths over the trunk's states `mtp_hidden [B, T, D]` (`trunk_states`) of its tokens.

    `num_depths` (default: the number of modules) may go beyond the modules, whose last is then recycled: under `ttt` a
    recycled row sees the true entries of its prefix and its own drafts, as decoding does; under `stream` the entries of
    its own depth. With `is_detached` no gradient goes from the depths to the trunk, nor to the embedding and head that
    they share with it. Raises `ValueError` for choices that do not fit.
    """
    config = model.config
    modules = config.num_mtp_modules
    num_depths = modules if num_depths is None else num_depths
    _check_depths(modules, num_depths, attention_layout)
    apply = bind(model, params)
    view = full_view(config, segment_ids)
    hidden = apply(mtp_hidden, method="head_input_hidden")
    logits, mtp_logits, mtp_outputs = apply(hidden, method="logits"), [], []
    if is_detached:
        mtp_hidden = jax.lax.stop_gradient(mtp_hidden)
        apply = bind(model, detach_trunk(params))
    chained_hidden = mtp_hidden
    base: Entries = {}
    levels: tuple[Entries, ...] = ()
    for depth in range(1, num_depths + 1):
        index = min(depth, modules) - 1
        shifted, is_valid = shift_left(tokens, depth), segment_ids == shift_left(segment_ids, depth)
        memory = None
        if depth <= modules:
            source = mtp_hidden if config.mtp_chaining == "trunk" else chained_hidden
        else:
            source = chained_hidden
            if attention_layout == "ttt":
                view = full_view(config, segment_ids, shift=depth - modules)
                memory = Recycled(base, levels)
        output, chained_hidden, entries = apply(
            source, shifted, view, memory, index=index, is_valid=is_valid, method="run_module"
        )
        if depth == modules:
            base = entries
        elif memory is not None:
            levels = (*levels, entries)
        mtp_logits.append(apply(output, index=index, method="logits"))
        mtp_outputs.append(output)
    return DepthsOutput(logits, hidden, tuple(mtp_logits), tuple(mtp_outputs))


def shift_left(rows: jax.Array, count: int) -> jax.Array:
    """`rows [B, T, ...]` moved `count` places to the left, zeros behind."""
    return jnp.pad(rows, ((0, 0), (0, count), *((0, 0),) * (rows.ndim - 2)))[:, count:]


def _check_rows(tokens, segment_ids, lengths):
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T], not of shape {tokens.shape}")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids {segment_ids.shape} do not match tokens {tokens.shape}")
    if lengths is not None and lengths.shape != tokens.shape[:1]:
        raise ValueError(f"lengths {lengths.shape} do not match the batch of {tokens.shape[0]}")


def _check_depths(modules, num_depths, attention_layout):
    if num_depths < 0 or (num_depths and not modules):
        raise ValueError(f"num_depths {num_depths} is not possible with {modules} MTP modules")
    if attention_layout not in ("ttt", "stream"):
        raise ValueError(f"attention_layout '{attention_layout}' is not one of ttt, stream")
