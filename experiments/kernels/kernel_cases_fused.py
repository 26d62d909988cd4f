"""The shapes of the kernels that save launches by combining what XLA does in several kernels around a product."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.kernels.kernel_case import Case
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.append_heads import Heads, append_heads
from pallas_kernels.append_latents import append_latents
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.router import Routing, route_tokens


def cases() -> list[Case]:
    """Returns all cases, op by op."""
    return [
        *_add_rms_norm(),
        *_gated_matmul(),
        *_append_heads(),
        *_append_latents(),
        *_prefill_attention(),
        *_route_tokens(),
    ]


def _add_rms_norm() -> Iterator[Case]:
    for rows, width, parts in ((1, 2048, 8), (4, 4096, 8), (32, 7168, 4)):

        def make(key, rows=rows, width=width, parts=parts):
            keys = jax.random.split(key, 3)
            update = PartialSums(jax.random.normal(keys[1], (parts, rows, width)), jnp.bfloat16)
            scale = jax.random.normal(keys[2], (width,), jnp.bfloat16)
            return jax.random.normal(keys[0], (rows, width), jnp.bfloat16), update, scale

        yield Case(
            op="add_rms_norm",
            name=f"{rows} rows of {width}, {parts} parts, bfloat16",
            run=add_rms_norm,
            make=make,
            bytes=rows * width * (4 * parts + 3 * 2) + 2 * width,
            operations=rows * width * (parts + 4),
        )


def _gated_matmul() -> Iterator[Case]:
    """Yields DeepSeek-V3's dense layer and shared expert (fp8), an 8B Llama's layer, and 16B-A2.4B's shared experts."""
    fp8, plain = ((7168, 18432), (7168, 2048)), ((4096, 14336), (2048, 2816))
    for D, F, rows, is_fp8 in (
        *((*shape, rows, True) for shape in fp8 for rows in (1, 4, 64)),
        *((*shape, rows, False) for shape in plain for rows in (1, 4, 64)),
        (1024, 4096, 4, None),
    ):

        def make(key, D=D, F=F, rows=rows, is_fp8=is_fp8):
            keys = jax.random.split(key, 3)
            dtype = jnp.float32 if is_fp8 is None else jnp.bfloat16
            x = jax.random.normal(keys[0], (rows, D), dtype)
            weights = jax.random.normal(keys[1], (D, 2 * F), dtype)
            if not is_fp8:
                return x, weights
            return x, weights.astype(jnp.float8_e4m3fn), jax.random.uniform(keys[2], (D // 128, 2 * F))

        kind, itemsize = {None: ("float32", 4), False: ("bfloat16", 2), True: ("fp8", 1 + 4 / 128)}[is_fp8]
        yield Case(
            op="gated_matmul",
            name=f"{rows} rows, {D} x 2 x {F}, {kind}",
            run=gated_matmul,
            make=make,
            bytes=int(2 * D * F * itemsize) + 2 * rows * (D + F),
            operations=4 * rows * D * F,
        )


def _append_heads() -> Iterator[Case]:
    """Yields Llama 3.1 8B, an fp8 cache, and Qwen3-Next's full attention with norms, a gate and partial rotation."""
    slots = 8192
    for B, T, K, G, H, P, has_norms, num_gates, cache in (
        (1, 1, 8, 4, 128, 64, False, 0, jnp.bfloat16),
        (16, 4, 8, 4, 128, 64, False, 0, jnp.float8_e4m3fn),
        (4, 4, 2, 8, 256, 32, True, 8, jnp.bfloat16),
    ):

        def make(key, B=B, T=T, K=K, G=G, H=H, P=P, has_norms=has_norms, num_gates=num_gates, cache=cache):
            keys = jax.random.split(key, 4)
            projected = jax.random.normal(keys[0], (4, B, T, K, G + 2 + num_gates, H))
            angle = jax.random.normal(keys[1], (B, T, P))
            caches = [jax.random.normal(one, (B, K, slots, H), jnp.bfloat16).astype(cache) for one in keys[2:]]
            norms = (jnp.ones(H), jnp.ones(H)) if has_norms else None
            start = jnp.full(B, slots // 2, jnp.int32)
            return PartialSums(projected, jnp.bfloat16), (jnp.cos(angle), jnp.sin(angle)), *caches, start, norms

        def run(projected, angles, keys, values, start, norms, *, implementation, G=G):
            heads = Heads(norms=norms)
            return append_heads(
                projected, angles, keys, values, start, heads, group_size=G, implementation=implementation
            )

        elements = B * T * K * (G + 2) * H
        yield Case(
            op="append_heads",
            name=f"{B} rows x {T} tokens, {K * G} heads / {K} of {H}, {P} pairs, {jnp.dtype(cache)} cache",
            run=run,
            make=make,
            bytes=elements * (4 * 4 + 2) + 8 * B * T * P,
            operations=elements * 12,
        )


def _append_latents() -> Iterator[Case]:
    """Yields latent attention of 16B-A2.4B, and of DeepSeek-V3 with a bfloat16 and an fp8 cache."""
    slots, C, R, P = 4096, 128, 512, 64
    for B, T, N, cache in ((1, 1, 16, jnp.bfloat16), (16, 4, 128, jnp.bfloat16), (4, 4, 128, jnp.float8_e4m3fn)):

        def make(key, B=B, T=T, N=N, cache=cache):
            keys = jax.random.split(key, 5)
            sizes = ((B, T, N, C + P), (B, T, R + P))
            sums = [
                PartialSums(jax.random.normal(one, (4, *size)), jnp.bfloat16)
                for one, size in zip(keys, sizes, strict=False)
            ]
            key_up = jax.random.normal(keys[2], (N, C, R), jnp.bfloat16)
            angle = jax.random.normal(keys[3], (B, T, P // 2))
            kept = jax.random.normal(keys[4], (B, slots, R + P), jnp.bfloat16).astype(cache)
            start = jnp.full(B, slots // 2, jnp.int32)
            return *sums, jnp.ones(R), key_up, (jnp.cos(angle), jnp.sin(angle)), kept, start

        rows = B * T
        yield Case(
            op="append_latents",
            name=f"{B} rows x {T} tokens, {N} heads, {jnp.dtype(cache)} cache",
            run=append_latents,
            make=make,
            bytes=2 * N * C * R
            + rows * (16 * (N * (C + P) + R + P) + 2 * N * (R + P) + (R + P) * jnp.dtype(cache).itemsize),
            operations=2 * rows * N * C * R,
        )


def _prefill_attention() -> Iterator[Case]:
    """Yields prefill chunks: Llama 3.1 8B, an fp8 cache, a window, wide heads, latents, expanded latents, a mask."""
    calls: list[tuple[int, int, int, int, int, int, int, dict[str, Any]]] = [
        (1, 8, 2048, 4, 128, 128, 8192, {}),
        (4, 8, 512, 4, 64, 64, 2048, {"cache": jnp.float8_e4m3fn}),
        (1, 8, 512, 4, 128, 128, 8192, {"window": 1024}),
        (1, 2, 512, 8, 256, 256, 4096, {}),
        (1, 1, 128, 16, 576, 512, 4096, {}),
        (1, 16, 512, 1, 192, 128, 4096, {}),
        (1, 1, 128, 128, 576, 512, 4096, {"has_mask": True}),
        (1, 2, 64, 2, 64, 64, 1024, {"dtype": jnp.float32}),
    ]
    for B, K, T, G, H, width, slots, options in calls:
        dtype = options.get("dtype", jnp.bfloat16)
        cache, window = options.get("cache", dtype), options.get("window")
        is_latent = width == 512

        def make(key, sizes=(B, K, T, G, H, width, slots), options=options, dtype=dtype, cache=cache, window=window):
            B, K, T, G, H, width, slots = sizes
            keys = jax.random.split(key, 4)
            q = jax.random.normal(keys[0], (B, K, T, G, H), dtype)
            k, v = (
                jax.random.normal(one, (B, K, slots, size), dtype).astype(cache)
                for one, size in zip(keys[1:], (H, width), strict=False)
            )
            start = jnp.full(B, slots - T, jnp.int32)
            begin = None if window is None else start[:, None] + jnp.arange(T)[None, :] - window + 1
            mask = jax.random.bernoulli(keys[3], 0.5, (B, T, slots)) if "has_mask" in options else None
            return q, k, None if width == 512 else v, start, begin, mask

        seen = (slots - T / 2) if window is None else window
        yield Case(
            op="prefill_attention",
            name=f"{B} rows x {T} tokens, {K * G} heads / {K} of {H}, {slots} slots, {jnp.dtype(cache)} cache"
            + ("" if window is None else f", window {window}")
            + ", selected" * ("has_mask" in options),
            run=functools.partial(prefill_attention, scale=H**-0.5, value_width=512 if is_latent else None),
            make=make,
            bytes=B * K * slots * (H if is_latent else H + width) * jnp.dtype(cache).itemsize
            + B * K * T * G * (H + width) * jnp.dtype(dtype).itemsize,
            operations=int(2 * B * K * T * G * seen * (H + width)),
        )


def _route_tokens() -> Iterator[Case]:
    """Yields the routers of DeepSeek-V3 and 16B-A2.4B, and a router of 160 experts in groups of 20."""
    deepseek_v3 = Routing(k=8, num_groups=8, num_kept_groups=4, factor=2.5)
    lite = Routing(k=6, scoring="softmax", normalises=False)
    odd = Routing(k=6, scoring="softmax", num_groups=8, num_kept_groups=3, normalises=False, factor=16.0)
    for rows, D, E, routing, dtype in (
        (1, 7168, 256, deepseek_v3, jnp.bfloat16),
        (64, 7168, 256, deepseek_v3, jnp.bfloat16),
        (1, 2048, 64, lite, jnp.bfloat16),
        (4, 5120, 160, odd, jnp.float32),
    ):

        def make(key, rows=rows, D=D, E=E, dtype=dtype):
            keys = jax.random.split(key, 3)
            x, router = jax.random.normal(keys[0], (rows, D), dtype), jax.random.normal(keys[1], (D, E), dtype)
            return x, router / dtype(D**0.5), jax.random.normal(keys[2], (E,))

        def run(x, router, bias, *, implementation, routing=routing):
            return route_tokens(x, router, bias, routing, implementation=implementation)

        yield Case(
            op="route_tokens",
            name=f"{rows} rows of {D}, {routing.k} of {E} experts, {jnp.dtype(dtype)}",
            run=run,
            make=make,
            bytes=jnp.dtype(dtype).itemsize * D * (E + rows) + 4 * E + 8 * rows * routing.k,
            operations=2 * rows * D * E,
        )
