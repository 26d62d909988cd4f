"""Calls of the ops at the shapes that they ask `dispatch.choose` about, on random arrays, to time them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.append_heads import Heads, append_heads
from pallas_kernels.append_latents import append_latents
from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.router import Routing, route_tokens
from pallas_kernels.verify_attention import MIN_PAGE, verify_attention

Shape = Mapping[str, Any]
Call = tuple[Callable[..., Any], tuple]  # an op that takes `implementation`, and its arrays


def make_call(op: str, shape: Shape) -> Call | None:
    """Makes the call of an op that asks `choose` about a shape.

    Args:
        op: Name of the op.
        shape: The shape that the op gives to `choose`.

    Returns:
        A function of arrays, which takes `implementation`, and the arrays; None for an op without a form here.
    """
    make = _CALLS.get(op)
    return None if make is None else make(shape, iter(jax.random.split(jax.random.key(0), 16)))


def implementations_of(op: str) -> tuple[str, ...]:
    """Returns the implementations of an op that can be timed here, on a GPU."""
    return ("xla", "triton", *(["jax_triton"] if op == "block_scaled_matmul" and HAS_JAX_TRITON else []))


def difference_from_xla(op: str, shape: Shape, implementation: str) -> float:
    """Compares an implementation of an op with "xla", on small arrays of the dtypes and widths of a call.

    Args:
        op: Name of the op.
        shape: The shape that the op gives to `choose`.
        implementation: One of the op.

    Returns:
        The largest difference over its bound: more than 1 means that the numbers are wrong. 0 for an op without a form
        here.
    """
    # Shrink the sizes that do not change the kernel's code, and compare every output.
    small = {name: min(size, _MOST[name]) if name in _MOST else size for name, size in shape.items()}
    made = make_call(op, small)
    if made is None:
        return 0.0
    run, arrays = made
    found = run(*arrays, implementation=implementation)
    with jax.default_matmul_precision("highest"):
        expected = run(*arrays, implementation="xla")
    # The bound is relative to the largest number of an output, within the rounding of the dtype.
    bound = 1e-4 if shape.get("dtype") == "float32" else 3e-2
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            one, other = one.astype(jnp.float32), other.astype(jnp.float32)
            worst = max(worst, float(jnp.abs(one - other).max() / (bound * jnp.maximum(jnp.abs(other).max(), 1e-6))))
    return worst


# Sizes that a comparison does not need whole.
_MOST = {"rows": 3, "batch": 2, "slots": 256, "vocabulary": 1024, "outputs": 512, "tokens": 5}
_MOST |= {"queries": 256, "experts": 16}


def _normal(keys, shape, dtype="float32") -> jax.Array:
    return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)


def _sums(keys, parts, shape, dtype) -> PartialSums:
    return PartialSums(_normal(keys, (parts, *shape), "float32" if parts > 1 else dtype), jnp.dtype(dtype))


def _matmul(op, shape, keys) -> Call:
    D, F = shape["inputs"], shape["outputs"]
    arrays = [_normal(keys, (shape["rows"], D), shape["dtype"]), _normal(keys, (D, F), shape["weights"])]
    if shape["weights"].startswith("float8"):
        arrays.append(jnp.ones((-(-D // 128), F)))
    return op, tuple(arrays)


def _experts(shape, keys) -> Call:
    n, k, E, D, F = (shape[name] for name in ("tokens", "chosen", "experts", "width", "expert_width"))
    ids = jax.random.randint(next(keys), (n, k), 0, E)
    arrays = [_normal(keys, (n, D), shape["dtype"]), ids, jnp.ones((n, k)) / k]
    arrays += [_normal(keys, size, shape["weights"]) for size in ((E, D, 2, F), (E, F, D))]
    run = functools.partial(grouped_matmul, inference=shape["use"] == "inference")
    if not shape["weights"].startswith("float8"):
        return run, tuple(arrays)
    # fp8 experts have scales, which `grouped_matmul` takes by keyword.
    scales = jnp.ones((E, -(-D // 128), 2, F)), jnp.ones((E, -(-F // 128), D))

    def with_scales(*arrays, implementation):
        *rest, gate_up, down = arrays
        return run(*rest, gate_up_scales=gate_up, down_scales=down, implementation=implementation)

    return with_scales, (*arrays, *scales)


def _attention(op, shape, keys) -> Call:
    """Makes queries of one head each, so `verify_attention` takes them as tokens; the cost depends on their product."""
    B, K, S, H = (shape[name] for name in ("batch", "heads", "slots", "width"))
    is_prefill = op is prefill_attention
    tokens = shape["queries"] if is_prefill else next(t for t in range(16, 0, -1) if shape["queries"] % t == 0)
    tokens = min(tokens, S)
    q = _normal(keys, (B, K, tokens, shape["queries"] // tokens, H), shape["dtype"])
    caches = [_normal(keys, (B, K, S, H), shape["cache"]) for _ in range(2)]
    # The tokens are the last ones of a full cache; a window covers a quarter of the slots.
    start = jnp.full(B, S - tokens, jnp.int32)
    window = start[:, None] + jnp.arange(tokens)[None, :] - S // 4 if shape["reads"] == "a window" else None
    run = functools.partial(op, scale=H**-0.5)
    if is_prefill:
        return run, (q, *caches, start, window)
    mask = jnp.broadcast_to(jnp.tri(tokens, dtype=bool)[None], (B, tokens, tokens))
    if shape["layout"] == "rows":
        return run, (q, *caches, start, mask, window)
    # Pages of the smallest size, whose order in the pool differs from that of the rows.
    num_pages = S // MIN_PAGE
    pools = [cache.reshape(B, K, num_pages, MIN_PAGE, H).swapaxes(1, 2) for cache in caches]
    pools = [pool.reshape(B * num_pages, K, MIN_PAGE, H) for pool in pools]
    table = jnp.arange(B * num_pages, dtype=jnp.int32)[::-1].reshape(B, num_pages)
    return run, (q, *pools, start, mask, window, table)


def _head(shape, keys) -> Call:
    arrays = _normal(keys, (shape["rows"], shape["width"]), shape["dtype"])
    head = _normal(keys, (shape["width"], shape["vocabulary"]), shape["dtype"])
    return functools.partial(head_top_k, k=shape["k"]), (arrays, head)


def _router(shape, keys) -> Call:
    # The shape says only that there are groups: take four, if they divide the experts.
    groups = 4 if shape["scoring"].endswith("in groups") and shape["experts"] % 4 == 0 else 1
    scoring = shape["scoring"].split()[0]
    routing = Routing(k=shape["chosen"], scoring=scoring, num_groups=groups, num_kept_groups=groups)
    arrays = [_normal(keys, (shape["rows"], shape["inputs"]), shape["dtype"])]
    arrays += [_normal(keys, (shape["inputs"], shape["experts"])), jnp.zeros(shape["experts"])]
    return functools.partial(route_tokens, routing=routing), tuple(arrays)


def _add_norm(shape, keys) -> Call:
    size = (shape["rows"], shape["width"])
    update = _sums(keys, shape["parts"], size, shape["dtype"])
    return add_rms_norm, (_normal(keys, size, shape["dtype"]), update, _normal(keys, size[1:]))


def _heads(shape, keys) -> Call:
    rows, K, per_key, H = (shape[name] for name in ("rows", "heads", "per_key", "width"))
    projected = _sums(keys, shape["parts"], (1, rows, K, per_key, H), shape["dtype"])
    angles = (jnp.ones((1, rows, H // 2)),) * 2
    caches = [_normal(keys, (1, K, 256, H), shape["cache"]) for _ in range(2)]
    run = functools.partial(append_heads, heads=Heads(), group_size=per_key - 2)
    return run, (projected, angles, *caches, jnp.zeros(1, jnp.int32))


def _latents(shape, keys) -> Call:
    rows, N, C, R = (shape[name] for name in ("rows", "heads", "content", "latent"))
    P = shape["width"] - C
    queries = _sums(keys, shape["parts"], (1, rows, N, C + P), shape["dtype"])
    latents = _sums(keys, shape["parts"], (1, rows, R + P), shape["dtype"])
    arrays = (_normal(keys, (R,)), _normal(keys, (N, C, R), shape["dtype"]), (jnp.ones((1, rows, P // 2)),) * 2)
    cache = _normal(keys, (1, 256, R + P), shape["cache"])
    return append_latents, (queries, latents, *arrays, cache, jnp.zeros(1, jnp.int32))


_CALLS: dict[str, Callable[..., Call]] = {
    "block_scaled_matmul": functools.partial(_matmul, block_scaled_matmul),
    "gated_matmul": functools.partial(_matmul, gated_matmul),
    "grouped_matmul": _experts,
    "verify_attention": functools.partial(_attention, verify_attention),
    "prefill_attention": functools.partial(_attention, prefill_attention),
    "head_top_k": _head,
    "route_tokens": _router,
    "add_rms_norm": _add_norm,
    "append_heads": _heads,
    "append_latents": _latents,
}
