"""The whole model: trunk, MTP modules, shared embedding and head, and the teacher-forced pass."""

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
    """A trunk with MTP modules: a static, hashable description without parameters.

    The parameters are a pytree beside it, from `init_params` or `load`.

    Args:
        config: the architecture.
        scan_layers: use stacked trunk layers in one scan, the form for training (`mtpjax.models.trunk.stack_layers`).
            False: unrolled layers, the form for decoding.
        remat: keep only the input of each trunk layer and module for the backward pass.
        dtype: dtype that layers compute in; None takes the embedding's. Layers cast their weights to it.
        implementation: "xla", "triton" or "auto" for every kernel (`pallas_kernels.dispatch`). Over a mesh only the
            experts' kernels run, on each device's own experts.

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
        layer_cache: Entries | Recycled | None = None,
        *,
        index: int,
        is_valid: jax.Array | None = None,
    ):
        """Runs one MTP module.

        Args:
            hidden: `[B, T, D]` hidden states, of the trunk or of the module before.
            tokens: `[B, T]` int32, the token after each hidden state's position (one later per module).
            view: positions and masks.
            layer_cache: the module's layer of a cache; `Recycled` for a recycled depth over whole rows; None for a
                pass over whole rows.
            index: which module, from 0.
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
        return after, after if self.config.mtp_chain_post_norm else before, entries

    def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # The cast follows the look-up, so that the gradient sums over tokens in the table's dtype.
        return table[tokens] if self.dtype is None else table[tokens].astype(self.dtype)

    def head_matrix(self, *, index: int | None = None) -> jax.Array:
        """Returns the head `[D, V]`: the trunk's, or the own one of module `index`."""
        if index is not None and self.config.mtp_own_head:
            return self.mtp_head[index]
        return self.embedding.T if self.config.tie_word_embeddings else self.head

    def logits(self, hidden: jax.Array, *, index: int | None = None) -> jax.Array:
        """Applies the head to normalised hidden states.

        Args:
            hidden: `[..., D]`.
            index: takes the own head of this module, if it has one. None: the trunk's head.

        Returns:
            Logits `[..., V]` float32.
        """
        head = self.head_matrix(index=index)
        return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def top_tokens(self, hidden: jax.Array, *, k: int, index: int | None = None):
        """Computes the `k` best logits without keeping all of them.

        Ids that only pad the tables are left out.

        Args:
            hidden: `[..., D]` normalised hidden states.
            k: number of tokens.
            index: takes the own head of this module, if it has one.

        Returns:
            The k best logits `[..., k]` float32, their tokens `[..., k]` int32, and the log-sum-exp of all logits
            `[...]` float32.
        """
        # A tied embedding is read in its own layout [V, D]: a transpose would copy it.
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
    """Draws random parameters: embedding with variance 1, matrices with variance 1 / inputs, norms at identity.

    Args:
        model: the model; `scan_layers` decides between stacked and unrolled layers.
        key: a `jax.random` key.

    Returns:
        The parameters, float32.

    Example:
        >>> import jax
        >>> from mtpjax import MTPModel, init_params, presets
        >>> params = init_params(MTPModel(presets["tiny"]), jax.random.key(0))
        >>> sorted(params)
        ['embedding', 'head', 'mtp_0', 'norm_final', 'trunk']
    """
    # Draw stacked layers, and unstack them afterwards: only one layer is compiled.
    stacked = model.clone(scan_layers=True, implementation="xla")
    params = _draw_params(stacked, key)
    return params if model.scan_layers else unstack_layers(params, model.config)


@functools.partial(jax.jit, static_argnums=0)
def _draw_params(model: MTPModel, key: jax.Array) -> dict:
    return dict(model.init(key, jnp.zeros((1, 2), jnp.int32))["params"])


@functools.cache  # commands ask for the same model repeatedly, and tracing it takes time
def param_shapes(config: ModelConfig, scan_layers: bool = False) -> dict:
    """Returns the shapes and dtypes of a model's parameters without allocating any.

    Args:
        config: the model's config.
        scan_layers: True for stacked trunk layers, as in `MTPModel(scan_layers=True)`.

    Returns:
        A tree of `jax.ShapeDtypeStruct` with the structure of `init_params`.
    """
    model = MTPModel(config, scan_layers=scan_layers)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def add_mtp_modules(model: MTPModel, params: dict, num_modules: int, key: jax.Array) -> tuple[MTPModel, dict]:
    """Adds untrained MTP modules to a model, to train them.

    A new module starts as a copy of the module before it (looped extension, 2603.23911). The first module of a model
    starts with random projections and a copy of the trunk's last decoder layer, if that layer is of the same kind. All
    new modules share the trunk's embedding and head.

    Args:
        model: a model with or without MTP modules.
        params: its parameters, with unrolled layers.
        num_modules: number of modules to add.
        key: a `jax.random` key for the first module.

    Returns:
        The model with `num_modules` more modules, and its parameters. New ones have the embedding's dtype.

    Raises:
        ValueError: for num_modules < 1, or if the existing modules have embeddings or heads of their own.

    Example:
        >>> import dataclasses, jax
        >>> from mtpjax import MTPModel, add_mtp_modules, init_params, presets
        >>> trunk = MTPModel(dataclasses.replace(presets["tiny"], num_mtp_modules=0))
        >>> params = init_params(trunk, jax.random.key(0))
        >>> model, params = add_mtp_modules(trunk, params, 2, jax.random.key(1))
        >>> model.config.num_mtp_modules
        2
    """
    config = model.config
    if num_modules < 1:
        raise ValueError(f"num_modules must be at least 1, not {num_modules}")
    if config.mtp_own_embedding or config.mtp_own_head:
        raise ValueError("cannot add MTP modules: the existing ones have their own embedding or head")
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
    """Binds parameters to a model: `bind(model, params)(tokens, view, method="run_trunk")` calls a method of it."""
    return functools.partial(model.apply, {"params": params})


class DepthsOutput(flax.struct.PyTreeNode):
    """A teacher-forced pass over `[B, T]` tokens.

    Row i of depth k (index k-1) predicts t[i+k+1]. Rows from T-k on have no input and hold garbage.
    """

    logits: jax.Array  # [B, T, V] float32
    hidden: jax.Array  # [B, T, D] after the final norm
    mtp_logits: tuple[jax.Array, ...]  # per depth [B, T, V] float32
    mtp_hidden: tuple[jax.Array, ...]  # per depth [B, T, D], after the module's norm


class ForwardOutput(DepthsOutput):
    """Output of `forward`: `DepthsOutput`, and the trunk's hidden states before the final norm."""

    hidden_prenorm: jax.Array  # [B, T, D]


def is_of_modules(name: str) -> bool:
    """Returns whether a top-level parameter belongs to the MTP modules alone."""
    return name.startswith("mtp_")


def detach_trunk(params: dict) -> dict:
    """Stops the gradients of all parameters except the MTP modules' own."""
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
    """Runs the trunk and the MTP depths teacher-forced over whole rows.

    Args:
        params: parameters of `model`.
        tokens: `[B, T]` int32 true tokens.
        model: the model.
        segment_ids: `[B, T]` int32 documents of packed rows; 0 is padding. None: one document per row.
        lengths: `[B]` int32 lengths of right-padded rows, instead of `segment_ids`.
        num_depths: MTP depths, at most or beyond the number of modules; None: the number of modules. Further depths
            recycle the last module on its own output.
        attention_layout: what a recycled depth attends to. "ttt": true entries of the prefix and its own drafts, as
            decoding does (training-time test, EAGLE-3, 2503.01840). "stream": the entries of its own depth.
        is_detached: stop the gradients from the depths to the trunk, and to the embedding and head they share.

    Returns:
        Logits and hidden states of the trunk and of each depth.

    Raises:
        ValueError: for shapes that do not fit, an unknown layout, or depths without modules.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mtpjax import MTPModel, forward, init_params, presets
        >>> model = MTPModel(presets["tiny"])
        >>> params = init_params(model, jax.random.key(0))
        >>> output = forward(params, jnp.arange(8)[None], model=model, num_depths=2)
        >>> output.logits.shape, len(output.mtp_logits)
        ((1, 8, 256), 2)
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
    """Runs the trunk alone over whole rows.

    Args:
        params: parameters of `model`.
        tokens: `[B, T]` int32.
        segment_ids: `[B, T]` int32 documents; 0 is padding.
        model: the model.

    Returns:
        The hidden states `[B, T, D]` that the MTP modules read; `forward_depths` continues from them.
    """
    return _trunk_pass(params, tokens, segment_ids, model)[0]


def _trunk_pass(params, tokens, segment_ids, model) -> tuple[jax.Array, jax.Array]:
    """Returns the states that the modules read and those before the final norm, each `[B, T, D]`."""
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
    """Runs the head and the MTP depths over hidden states of the trunk.

    Args:
        params: parameters of `model`.
        mtp_hidden: `[B, T, D]` from `trunk_states`.
        tokens: `[B, T]` int32, the tokens of those states.
        segment_ids: `[B, T]` int32 documents; 0 is padding.
        model: the model.
        num_depths: as in `forward`.
        attention_layout: as in `forward`.
        is_detached: as in `forward`.

    Returns:
        Logits and hidden states of the trunk and of each depth.

    Raises:
        ValueError: for an unknown layout, or depths without modules.
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
        # Depth k reads the embedding of the token k positions further, within the same document.
        index = min(depth, modules) - 1
        shifted, is_valid = shift_left(tokens, depth), segment_ids == shift_left(segment_ids, depth)
        recycled = None
        if depth <= modules:
            # A module reads the trunk's states, or those of the module before it.
            source = mtp_hidden if config.mtp_chaining == "trunk" else chained_hidden
        else:
            # A recycled depth reads its own output. Its draft sits one position further per level.
            source = chained_hidden
            if attention_layout == "ttt":
                view = full_view(config, segment_ids, shift=depth - modules)
                recycled = Recycled(base, levels)
        output, chained_hidden, entries = apply(
            source, shifted, view, recycled, index=index, is_valid=is_valid, method="run_module"
        )
        # Later levels attend to the last module's true entries, and to each recycled level's own.
        if depth == modules:
            base = entries
        elif recycled is not None:
            levels = (*levels, entries)
        mtp_logits.append(apply(output, index=index, method="logits"))
        mtp_outputs.append(output)
    return DepthsOutput(logits, hidden, tuple(mtp_logits), tuple(mtp_outputs))


def shift_left(rows: jax.Array, count: int) -> jax.Array:
    """Moves `rows [B, T, ...]` by `count` places to the left and fills up with zeros."""
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
