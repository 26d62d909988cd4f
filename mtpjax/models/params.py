"""Initialises and describes model parameters, adds MTP modules, and identifies the modules' parameters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mtpjax.compat import library_settings
from mtpjax.errors import UsageError
from mtpjax.messages import require
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import (
    align_blocks,
    check_divisible,
    copy_key_value_heads,
    fit_config,
    part_specs,
    refuse_uneven_layers,
)
from mtpjax.models.expert_placement import num_expert_slots
from mtpjax.models.masks import full_view
from mtpjax.models.model import MTPModel, MTPModule
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import param_shardings, path_name
from mtpjax.models.trunk import unstack_layers

# Top-level keys in the trunk's parameters for a drafter's network and for the token ids of its head's columns.
DRAFTER, DRAFT_IDS = "drafter", "draft_ids"


@library_settings()
def init_params(model: MTPModel, key: jax.Array, mesh: Mesh | None = None) -> dict:
    """Draws random parameters with variance 1 in embeddings and 1 / fan-in in matrices; norms are the identity.

    Args:
        model: the model; `scan_layers` decides between stacked and unrolled layers.
        key: a `jax.random` key.
        mesh: mesh on which to create the parameters, sharded as for training; None: one device.

    Returns:
        The float32 parameters.

    Example:
        >>> import jax
        >>> from mtpjax import MTPModel, init_params, presets
        >>> params = init_params(MTPModel(presets["tiny"]), jax.random.key(0))
        >>> sorted(params)
        ['embedding', 'head', 'mtp_0', 'norm_final', 'trunk']
    """
    # Draw stacked layers and unstack them afterwards, so that only one layer is compiled.
    stacked = model.clone(scan_layers=True, implementation="xla")
    params = _draw_params(stacked, key, mesh)
    return params if model.scan_layers else unstack_layers(params, model.config)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _draw_params(model: MTPModel, key: jax.Array, mesh: Mesh | None) -> dict:
    params = dict(model.init(key, jnp.zeros((1, 2), jnp.int32))["params"])
    return params if mesh is None else jax.lax.with_sharding_constraint(params, param_shardings(params, mesh))


@functools.cache  # commands use the same model repeatedly, and tracing takes time
def param_shapes(config: ModelConfig, scan_layers: bool = False) -> dict:
    """Returns the shapes and dtypes of a model's parameters without allocating any.

    Args:
        scan_layers: True for stacked trunk layers, as in `MTPModel(scan_layers=True)`.

    Returns:
        A tree of `jax.ShapeDtypeStruct` with the structure of `init_params`.
    """
    model = MTPModel(config, scan_layers=scan_layers)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def check_params(params: dict, model: MTPModel) -> None:
    """Checks that a tree has the structure and shapes of a model's parameters.

    Raises:
        UsageError: a parameter is missing or unexpected, or has a different shape. The message names the first.
    """
    found, wanted = _shapes(params), _shapes(param_shapes(model.config, model.scan_layers))
    for name in [*wanted, *found]:
        if found.get(name) == wanted.get(name):
            continue
        shapes = " instead of ".join(f"shape {of[name]}" if name in of else "nothing" for of in (found, wanted))
        # A common mistake is to pass layers in the wrong form.
        form = "stacked" if model.scan_layers else "unrolled"
        hint = f"; the model expects {form} layers (scan_layers={model.scan_layers})" if "trunk/" in name else ""
        raise UsageError(f"the parameters do not match the model: {name} has {shapes}{hint}")


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}


def add_mtp_modules(model: MTPModel, params: dict, num_modules: int, key: jax.Array) -> tuple[MTPModel, dict]:
    """Adds untrained MTP modules to a model, so that they can be trained.

    A new module starts as a copy of the module before it (looped extension, 2603.23911). The first module of a model
    starts with random projections and, if the trunk's last decoder layer has the same kind as the module's layer, with
    a copy of that layer. All new modules share the trunk's embedding and head.

    Args:
        model: a model with or without MTP modules.
        params: its parameters, with unrolled layers.
        num_modules: number of modules to add.
        key: a `jax.random` key for the first module.

    Returns:
        The model with `num_modules` more modules, and its parameters. New parameters have the embedding's dtype.

    Raises:
        ValueError: for num_modules < 1, or if the existing modules have separate embeddings or heads.

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
    require(num_modules >= 1, f"num_modules must be at least 1, not {num_modules}")
    if config.mtp_own_embedding or config.mtp_own_head:
        raise ValueError("cannot add MTP modules: the existing ones have a separate embedding or head")
    # Inputs with the shapes that `init` needs; their values do not matter.
    view = full_view(config, jnp.ones((1, 2), jnp.int32))
    hidden = jnp.zeros((1, 2, config.hidden_size))
    first, dtype = config.num_mtp_modules, params["embedding"].dtype

    def copy(tree):
        return jax.tree.map(lambda leaf: jnp.copy(leaf.astype(dtype)), tree, is_leaf=is_scaled)

    def shapes(tree):
        return jax.tree.map(jnp.shape, tree)

    params = dict(params)
    for index in range(first, first + num_modules):
        # A new module copies the module before it.
        if index:
            params[f"mtp_{index}"] = copy(params[f"mtp_{index - 1}"])
            continue
        # The first module gets random projections, around a copy of the trunk's last layer if that has the same shapes.
        new = copy(jax.jit(MTPModule(config).init)(key, hidden, hidden, view)["params"])
        last = copy(params["trunk"][f"layer_{config.num_hidden_layers - 1}"])
        params["mtp_0"] = {**new, "block": last} if shapes(last) == shapes(new["block"]) else new
    config = dataclasses.replace(config, num_mtp_modules=first + num_modules)
    return model.clone(config=config), params


def shard_for_decoding(
    model: MTPModel, params: dict, mesh: Mesh, *, allow_copies: bool = False
) -> tuple[MTPModel, dict]:
    """Shards parameters over a mesh for decoding, so that decoding calls do not move them.

    Args:
        model: the model.
        params: its parameters, with unrolled layers.
        mesh: the mesh.
        allow_copies: replicate arrays along an axis that does not divide their size.

    Returns:
        The model and the parameters to decode with, which give the same results. If `tensor` has more devices than
        there are key/value heads, heads are copied so that each device has one. fp8 blocks may become smaller, as in
        `align_blocks`.

    Raises:
        ValueError: an axis of the mesh does not divide a size of the model.

    Example:
        >>> import jax, mtpjax
        >>> from mtpjax.compat import make_mesh
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])
        >>> params = mtpjax.init_params(model, jax.random.key(0))
        >>> model, params = mtpjax.shard_for_decoding(model, params, make_mesh({"data": 1, "tensor": 1}))
    """
    model, params = fit_to_mesh(model, params, mesh.shape, allow_copies=allow_copies)
    params = align_blocks(params, model.config, mesh.shape)
    specs = part_specs(params, model.config, mesh.shape)
    return model, jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)


def fit_to_mesh(
    model: MTPModel, params: dict, sizes: Mapping[str, int], *, allow_copies: bool = False
) -> tuple[MTPModel, dict]:
    """Checks that a mesh divides a model's sizes, and copies key/value heads so that each `tensor` device has one.

    Raises:
        ValueError: without `allow_copies`, an axis of the mesh does not divide a size of the model.
    """
    refuse_uneven_layers(model.config, sizes)
    if not allow_copies:
        check_divisible(model.config, sizes, num_expert_slots(params))
    config = fit_config(model.config, sizes)
    if config == model.config:
        return model, params
    return model.clone(config=config), copy_key_value_heads(params, model.config, config.num_key_value_heads)


def is_of_modules(name: str) -> bool:
    """Returns whether a top-level parameter name belongs to the MTP modules or to a separate drafter."""
    return name.startswith("mtp_") or name == DRAFTER


def detach_trunk(params: dict) -> dict:
    """Stops the gradients of all parameters except those of the MTP modules."""
    return {name: leaf if is_of_modules(name) else jax.lax.stop_gradient(leaf) for name, leaf in params.items()}
