"""Parameter trees as flat names: nested dicts of arrays become `{"trunk/layer_0/attention/qkv": array}` and back."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util

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
