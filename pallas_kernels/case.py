"""Cases, which are calls of ops on random arrays, for comparing and timing implementations.

Each op has a `make_case`, which makes a case from the shape that `pallas_kernels.dispatch.choose` uses.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Shape = Mapping[str, Any]
Case = tuple[Callable[..., Any], tuple]  # an op that takes `implementation`, and its arrays

# Caps for sizes that do not affect a kernel's code; larger values add nothing to a numerical comparison.
_MAX_COMPARED = {"rows": 3, "batch": 2, "slots": 256, "vocabulary": 1024, "outputs": 512, "tokens": 5}
_MAX_COMPARED |= {"queries": 256, "keys": 256, "experts": 16}


def difference_from_xla(make_case: Callable[[Shape], Case], shape: Shape, implementation: str) -> float:
    """Compares an implementation of an op with "xla", on small arrays with the dtypes and widths of a call.

    Returns:
        The largest difference divided by its bound; more than 1 means that the results are wrong.
    """
    run, arrays = make_case({name: min(size, _MAX_COMPARED.get(name, size)) for name, size in shape.items()})
    found = run(*arrays, implementation=implementation)
    with jax.default_matmul_precision("highest"):
        expected = run(*arrays, implementation="xla")
    # The bound is relative to an output's largest value and depends on the dtype's rounding error.
    bound = 1e-4 if shape.get("dtype") == "float32" else 3e-2
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            one, other = one.astype(jnp.float32), other.astype(jnp.float32)
            worst = max(worst, float(jnp.abs(one - other).max() / (bound * jnp.maximum(jnp.abs(other).max(), 1e-6))))
    return worst


def random_keys() -> Iterator[jax.Array]:
    return iter(jax.random.split(jax.random.key(0), 16))


def random_normal(keys: Iterator[jax.Array], shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)


def random_parts(keys: Iterator[jax.Array], parts: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Draws the parts `[P, *shape]` of `PartialSums`, in float32 or, for a single part, in `dtype`."""
    return random_normal(keys, (parts, *shape), "float32" if parts > 1 else dtype)


def random_attention(keys: Iterator[jax.Array], shape: Shape, tokens: int) -> tuple:
    """Draws queries `[B, K, T, G, H]` for a full cache's last tokens, its keys and values, and a start and window.

    A window covers a quarter of the slots.
    """
    B, K, S, H = (shape[name] for name in ("batch", "heads", "slots", "width"))
    tokens = min(tokens, S)
    q = random_normal(keys, (B, K, tokens, shape["queries"] // tokens, H), shape["dtype"])
    caches = (random_normal(keys, (B, K, S, H), shape["cache"]) for _ in range(2))
    start = jnp.full(B, S - tokens, jnp.int32)
    window = start[:, None] + jnp.arange(tokens)[None, :] - S // 4 if shape["reads"] == "a window" else None
    return q, *caches, start, window
