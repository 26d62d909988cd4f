"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import rms_norm, verify_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. `run(*make(key), implementation=...)` is a call of it."""

    op: str  # its name in `pallas_kernels`
    name: str  # the shape in words
    sizes: Mapping[str, int]  # as the op gives them to `pallas_kernels.dispatch.choose`
    run: Callable[..., Any]
    make: Callable[[jax.Array], tuple]  # random arrays; `jax.eval_shape` of it gives the shapes alone
    bytes: int  # each input that is needed read once, each output written once
    operations: int  # multiplications and additions, two for a product
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # others' forms of `run`

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def cases() -> list[Case]:
    """All of them, op by op."""
    return [*_rms_norm(), *_verify_attention()]


def _rms_norm() -> Iterator[Case]:
    for rows, width in ((4, 7168), (4096, 7168)):

        def make(key, rows=rows, width=width):
            x, scale = jax.random.split(key)
            return jax.random.normal(x, (rows, width), jnp.bfloat16), jax.random.normal(scale, (width,), jnp.bfloat16)

        yield Case(
            op="rms_norm",
            name=f"{rows} rows of {width}, bfloat16",
            sizes={"rows": rows, "width": width},
            run=rms_norm,
            make=make,
            bytes=2 * (2 * rows * width + width),
            operations=4 * rows * width,
        )


FP8 = jnp.float8_e4m3fn
# batch, key heads, tokens, query heads to each, key width; then what is not 8192 slots of bfloat16 in a chain.
_ATTENTION: list[tuple[tuple[int, int, int, int, int], dict]] = [
    ((1, 8, 4, 4, 128), {}),
    ((16, 8, 4, 8, 128), {}),
    ((64, 8, 4, 4, 128), {}),
    ((64, 8, 4, 4, 128), {"is_ragged": True}),
    ((1, 8, 1, 4, 128), {"slots": 32768}),
    ((4, 8, 16, 12, 128), {"behind": 40}),
    ((16, 8, 4, 4, 64), {}),
    ((16, 4, 4, 4, 192), {}),
    ((16, 4, 4, 4, 256), {}),
    ((4, 4, 16, 8, 256), {"behind": 64}),
    ((16, 8, 4, 4, 128), {"cache": FP8}),
    ((16, 8, 4, 4, 128), {"window": (512, 4)}),
    ((1, 8, 4, 4, 128), {"dtype": jnp.float32}),
    ((1, 1, 4, 128, 576), {}),
    ((16, 1, 4, 128, 576), {}),
    ((64, 1, 1, 128, 576), {}),
    ((16, 1, 4, 16, 576), {}),
    ((16, 1, 1, 16, 576), {}),
    ((16, 1, 2, 16, 576), {}),
    ((16, 1, 4, 128, 576), {"cache": FP8}),
    ((16, 1, 1, 16, 576), {"cache": FP8}),
    ((4, 1, 16, 16, 576), {"behind": 40}),
    ((1, 1, 4, 16, 576), {"dtype": jnp.float32}),
]


def _verify_attention() -> Iterator[Case]:
    return (_attention_case(*sizes, **changes) for sizes, changes in _ATTENTION)


def _attention_case(
    B, K, T, G, H, *, slots=8192, behind=None, window=None, dtype=jnp.bfloat16, cache=None, is_ragged=False
) -> Case:
    """A width of 576 is a latent, of which 512 are the values; a tree's tokens see about half of what is behind."""
    X = behind or T
    latent = 512 if H == 576 else None
    kept = jnp.dtype(cache or dtype)
    lengths = [(slots - X) * (row + 1) // B if is_ragged else slots - X for row in range(B)]

    def make(key):
        keys = jax.random.split(key, 4)
        shapes = [(B, K, T, G, H), (B, K, slots, H), (B, K, slots, H)][: 2 if latent else 3]
        q, *caches = (jax.random.normal(one, shape, dtype) for one, shape in zip(keys, shapes, strict=False))
        caches = [array.astype(kept) for array in caches] + [None] * bool(latent)
        base = jnp.array(lengths, jnp.int32)
        sees = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
        if behind:
            sees = jax.random.bernoulli(keys[3], 0.5, (B, T, X))
        begin = None if window is None else base[:, None] + jnp.arange(T)[None, :] - window[0] + 1
        return q, *caches, base, sees, begin

    run = functools.partial(verify_attention, scale=H**-0.5, sinks=window[1] if window else 0, value_width=latent)
    read = sum(lengths) + B * X if window is None else B * (sum(window) + X)
    kinds = [f"{jnp.dtype(dtype)}, {kept} cache", "ragged", f"tree of {behind}", f"window {window}"]
    is_named = [True, is_ragged, behind, window]
    has_peers = not latent and not behind and not window and not cache and dtype != jnp.float32
    return Case(
        op="verify_attention",
        name=f"{B} rows x {T} tokens, {K * G} heads / {K} of {H}, {slots} slots, "
        + ", ".join(kind for kind, is_kind in zip(kinds, is_named, strict=True) if is_kind),
        sizes={"batch": B, "heads": K, "queries": T * G, "width": H, "slots": slots},
        run=run,
        make=make,
        bytes=K * read * kept.itemsize * (H if latent else 2 * H)
        + B * K * T * G * (H + (latent or H)) * jnp.dtype(dtype).itemsize,
        operations=2 * K * T * G * read * (H + (latent or H)),
        peers={
            f"jax.nn, {name}": functools.partial(_dot_product_attention, scale=H**-0.5, implementation=name)
            for name in ("cudnn", "xla")
            if has_peers
        },
    )


def _dot_product_attention(q, keys, values, base, sees, begin, *, scale, implementation):
    """jax.nn's, for tokens that follow each other. Each key head as a row of its own: so its layout is the cache's."""
    del sees, begin
    B, K, T, G, H = q.shape
    S = keys.shape[2]
    lengths = jnp.repeat(base, K)[:, None] + jnp.arange(1, T + 1)[None, :]
    given: dict[str, Any] = {"key_value_seq_lengths": lengths[:, 0]}
    if T > 1:
        given = {"mask": (jnp.arange(S)[None, None, :] < lengths[:, :, None])[:, None]}
    found = jax.nn.dot_product_attention(
        q.reshape(B * K, T, G, H),
        keys.reshape(B * K, S, 1, H),
        values.reshape(B * K, S, 1, H),
        scale=scale,
        implementation=implementation,
        **given,
    )
    return found.reshape(B, K, T, G, H)
