"""Parameter trees as flat names: nested dicts of arrays become `{"trunk/layer_0/attention/qkv": array}` and back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from mtpjax.io.array_files import StreamedArray, stream_parts
from mtpjax.models.quantized import BlockScaled, is_scaled


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Builds nested dicts from flat names.

    Args:
        leaves: values by name, with "/" between the keys, such as `{"a/b": value}`.

    Returns:
        The nested dicts, such as `{"a": {"b": value}}`.
    """
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Lists the leaves of nested dicts by flat name.

    Args:
        tree: nested dicts whose keys are non-empty strings without "/" and ".".

    Returns:
        The leaves by name. An empty dict below the root is a leaf.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"params must be nested dicts of arrays, not {type(tree).__name__}")
    leaves = {}
    for key, value in tree.items():
        # Keys become names of folders and files.
        if not isinstance(key, str) or not key or "/" in key or "." in key:  # Orbax joins names with "."
            raise ValueError(f"params key {key!r} under {prefix!r} must be a non-empty string without '/' and '.'")
        # An empty dict has no arrays to descend to; `flatten_arrays` rejects it with its name.
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}/")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def flatten_arrays(params: Any) -> dict[str, np.ndarray | jax.Array | StreamedArray]:
    """Flattens parameters to save, and rejects leaves that would not restore to the same bits.

    Args:
        params: nested dicts of jax or numpy arrays, or of `StreamedArray`.

    Returns:
        Arrays of this process and streamed arrays by flat name. Arrays that a mesh splits are streamed.
    """
    arrays = {}
    for name, leaf in flatten(params).items():
        # PRNG keys are arrays too, but their bits are meaningless without their implementation.
        is_array = isinstance(leaf, (jax.Array, np.ndarray, StreamedArray))
        if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"params[{name!r}] is a {type(leaf).__name__}; a checkpoint holds jax or numpy arrays")
        if not math.prod(leaf.shape):
            raise ValueError(f"params[{name!r}] has shape {leaf.shape}; Orbax cannot store an array without elements")
        # JAX converts foreign byte orders and, by default, 64-bit types, so these would not restore to the same bits.
        dtype = np.dtype(leaf.dtype)
        if not dtype.isnative or not _is_jax_dtype(dtype):
            raise ValueError(f"params[{name!r}] has dtype {dtype.str} ({dtype}); JAX would not restore it")
        # Arrays stay on their devices until they are written; of several copies, one is written.
        if isinstance(leaf, jax.Array):
            leaf = leaf.addressable_data(0) if leaf.is_fully_replicated else stream_parts(leaf)
        arrays[name] = leaf
    if not arrays:
        raise ValueError("params hold no array")
    return arrays


def split_scaled(params: Any) -> tuple[Any, dict[str, list[int]]]:
    """Replaces quantized leaves by plain arrays, which is the form that is stored.

    Returns `(params, scaled)`: the tree with `{"values": ..., "scales": ...}` instead of each `BlockScaled`, and
    `[axis, block]` of each by flat name.
    """
    scaled = {}

    def split(path, leaf):
        if not is_scaled(leaf):
            return leaf
        scaled["/".join(path)] = [leaf.axis, leaf.block]
        return {"values": leaf.values, "scales": leaf.scales}

    return _map_leaves(split, params), scaled


def join_scaled(params: dict[str, Any], scaled: Mapping[str, list[int]]) -> dict[str, Any]:
    """Rebuilds the quantized leaves that `split_scaled` took apart, in place.

    Args:
        scaled: `[axis, block]` by flat name.
    """
    for name, (axis, block) in scaled.items():
        # Walk to the dict that holds the parameter, and replace its two arrays.
        *folders, last = name.split("/")
        node = params
        for folder in folders:
            node = node[folder]
        node[last] = BlockScaled(**node[last], axis=axis, block=block)
    return params


def _map_leaves(function: Callable[[tuple[str, ...], Any], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Applies `function(path, leaf)` to the leaves of nested dicts."""
    if not isinstance(tree, Mapping):
        return function(path, tree)
    return {key: _map_leaves(function, value, (*path, key)) for key, value in tree.items()}


def _is_jax_dtype(dtype) -> bool:
    """Returns whether JAX keeps the dtype; float64 only does so under jax_enable_x64."""
    # `canonicalize_dtype` returns the dtype that JAX would store instead, if it cannot keep this one.
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
