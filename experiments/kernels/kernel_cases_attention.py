"""The shapes of `verify_attention` (decoding and verification over several kinds of caches) and `range_attention`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.kernels.kernel_case import Case
from mtpjax.models.layers.attend import attend
from pallas_kernels.range_attention import KeyRanges, range_attention, range_attention_reference, with_gradients
from pallas_kernels.verify_attention import verify_attention

FP8 = jnp.float8_e4m3fn
# Batch, key heads, tokens, query heads per key head, key width; then changes to a chain with 8192 bfloat16 slots.
_ATTENTION: list[tuple[tuple[int, int, int, int, int], dict]] = [
    ((1, 8, 4, 4, 128), {}),
    ((16, 8, 4, 8, 128), {}),
    ((64, 8, 4, 4, 128), {}),
    ((64, 8, 4, 4, 128), {"is_ragged": True}),
    ((1, 8, 1, 4, 128), {"slots": 32768}),
    ((4, 8, 16, 12, 128), {"num_draft_slots": 40}),
    ((16, 8, 4, 4, 64), {}),
    ((16, 4, 4, 4, 192), {}),
    ((16, 4, 4, 4, 256), {}),
    ((4, 4, 16, 8, 256), {"num_draft_slots": 64}),
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
    ((4, 1, 16, 16, 576), {"num_draft_slots": 40}),
    ((1, 1, 4, 16, 576), {"dtype": jnp.float32}),
    ((1, 1, 1, 16, 576), {"value_up": 128}),
    ((16, 1, 4, 128, 576), {"value_up": 128}),
]
# Key heads, tokens, query heads per key head, key and value width of one row; then changes to gradients in bfloat16.
_RANGES: list[tuple[tuple[int, int, int, int, int], dict]] = [
    ((8, 4096, 4, 64, 64), {}),
    ((8, 4096, 4, 128, 128), {}),
    ((16, 4096, 1, 192, 128), {}),
    ((8, 4096, 4, 64, 64), {"has_gradients": False}),
    ((8, 32768, 4, 64, 64), {}),
    ((8, 32768, 4, 64, 64), {"has_gradients": False}),
    ((8, 32768, 4, 128, 128), {}),
    ((4, 4096, 4, 256, 256), {}),
    ((8, 4100, 6, 96, 96), {}),
    ((8, 4096, 4, 128, 128), {"num_ranges": 2}),
    ((8, 1024, 4, 64, 64), {"dtype": jnp.float32}),
    ((8, 1024, 4, 192, 128), {"dtype": jnp.float32}),
]


def cases() -> list[Case]:
    """Returns all cases."""
    return [
        *(attention_case(*sizes, **changes) for sizes, changes in _ATTENTION),
        *(range_case(*sizes, **changes) for sizes, changes in _RANGES),
    ]


def range_case(K, T, G, H, V, *, has_gradients=True, num_ranges=1, dtype=jnp.bfloat16) -> Case:
    """Makes a causal case over one document, whose text is cut into `num_ranges` ranges of keys."""
    settings = {"scale": H**-0.5}

    def make(key):
        keys = jax.random.split(key, 4)
        shapes = (1, K, T, G, H), (1, K, T, H), (1, K, T, V), (1, K, T, G, V)
        *arrays, gradient = (jax.random.normal(one, shape, dtype) for one, shape in zip(keys, shapes, strict=True))
        cuts = jnp.arange(1, T + 1)[None, :, None] * jnp.arange(num_ranges + 1)[None, None] // num_ranges
        ranges = KeyRanges(cuts[..., :-1].astype(jnp.int32), cuts[..., 1:].astype(jnp.int32) - 1)
        return *arrays, ranges, gradient

    def run(q, key, value, ranges, gradient, *, implementation):
        if has_gradients:
            return with_gradients(q, key, value, ranges, gradient, **settings, implementation=implementation)
        return range_attention(q, key, value, ranges, **settings, implementation=implementation)

    def peer(attention, q, key, value, ranges, gradient):
        output, pull = jax.vjp(lambda *arrays: attention(*arrays, ranges), q, key, value)
        return (output, pull(gradient)) if has_gradients else output

    peers = {"all scores": functools.partial(range_attention_reference, **settings)}
    if H == V and dtype != jnp.float32:
        peers["jax.nn, cudnn"] = functools.partial(_causal_attention, **settings)
    pairs, itemsize = K * G * T * (T + 1) // 2, jnp.dtype(dtype).itemsize
    queries, keys = K * T * G * (H + V), K * T * (H + V)
    kinds = str(jnp.dtype(dtype)), *(["gradients"] * has_gradients), *([f"{num_ranges} ranges"] * (num_ranges > 1))
    return Case(
        op="range_attention",
        name=f"{T} tokens, {K * G} heads / {K} of {H} and {V}, {', '.join(kinds)}",
        run=run,
        make=make,
        # The backward pass also reads the output and its gradient.
        bytes=itemsize * (queries + keys + has_gradients * (2 * queries + 2 * keys + K * T * G * V)),
        operations=2 * pairs * (H + V + has_gradients * (3 * H + 2 * V)),
        peers={name: functools.partial(peer, attention) for name, attention in peers.items()},
    )


def _causal_attention(q, key, value, ranges, *, scale):
    """Runs cuDNN's causal attention, which takes heads after tokens and knows no ranges."""
    del ranges
    B, K, T, G, H = q.shape
    output = jax.nn.dot_product_attention(
        q.transpose(0, 2, 1, 3, 4).reshape(B, T, K * G, H),
        *(each.swapaxes(1, 2) for each in (key, value)),
        scale=scale,
        is_causal=True,
        implementation="cudnn",
    )
    return output.reshape(B, T, K, G, H).swapaxes(1, 2)


def attention_case(
    B,
    K,
    T,
    G,
    H,
    *,
    slots=8192,
    num_draft_slots=None,
    window=None,
    dtype=jnp.bfloat16,
    cache=None,
    is_ragged=False,
    value_up=0,
) -> Case:
    """Makes a case. A width of 576 is a latent with 512 values; a tree's tokens attend to about half of the slots.

    `value_up` is the width that each head's matrix projects the values to.
    """
    X = num_draft_slots or T
    latent = 512 if H == 576 else None
    kept = jnp.dtype(cache or dtype)
    lengths = [(slots - X) * (row + 1) // B if is_ragged else slots - X for row in range(B)]

    def make(key):
        keys = jax.random.split(key, 4)
        shapes = [(B, K, T, G, H), (B, K, slots, H), (B, K, slots, H)][: 2 if latent else 3]
        q, *caches = (jax.random.normal(one, shape, dtype) for one, shape in zip(keys, shapes, strict=False))
        caches = [array.astype(kept) for array in caches] + [None] * bool(latent)
        num_committed = jnp.array(lengths, jnp.int32)
        ancestor_mask = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
        if num_draft_slots:
            ancestor_mask = jax.random.bernoulli(keys[3], 0.5, (B, T, X))
        window_start = None if window is None else num_committed[:, None] + jnp.arange(T)[None, :] - window[0] + 1
        arrays = q, *caches, num_committed, ancestor_mask, window_start
        return (*arrays, jax.random.normal(keys[0], (G, 512, value_up), dtype)) if value_up else arrays

    settings = {"scale": H**-0.5, "sinks": window[1] if window else 0, "value_width": latent}

    def run(*arrays, implementation):
        matrix = {"value_up": arrays[6]} if value_up else {}
        return verify_attention(*arrays[:6], **settings, **matrix, implementation=implementation)

    read = sum(lengths) + B * X if window is None else B * (sum(window) + X)
    kinds = [f"{jnp.dtype(dtype)}, {kept} cache", "ragged", f"tree of {num_draft_slots}", f"window {window}"]
    kinds += [f"projected to {value_up}"]
    is_named = [True, is_ragged, num_draft_slots, window, value_up]
    has_peers = not latent and not num_draft_slots and not window and not cache and dtype != jnp.float32
    return Case(
        op="verify_attention",
        name=f"{B} rows x {T} tokens, {K * G} heads / {K} of {H}, {slots} slots, "
        + ", ".join(kind for kind, is_kind in zip(kinds, is_named, strict=True) if is_kind),
        run=run,
        make=make,
        bytes=K * read * kept.itemsize * (H if latent else 2 * H)
        + B * K * T * G * (H + (value_up or latent or H)) * jnp.dtype(dtype).itemsize
        + G * 512 * value_up * jnp.dtype(dtype).itemsize,
        operations=2 * K * T * G * read * (H + (latent or H)) + 2 * B * T * G * 512 * value_up,
        plain=None if value_up else functools.partial(_attend, scale=H**-0.5, window=window, value_width=latent),
        peers={
            f"jax.nn, {name}": functools.partial(_dot_product_attention, scale=H**-0.5, implementation=name)
            for name in ("cudnn", "xla")
            if has_peers
        },
    )


def _attend(q, keys, values, num_committed, ancestor_mask, window_start, *, scale, window, value_width):
    """Attends as `mtpjax.models.layers` does. Cuts out a window's slots first, and slices a latent's values last."""
    values = keys if values is None else values
    slot = jnp.broadcast_to(jnp.arange(keys.shape[2])[None, :], (len(q), keys.shape[2]))
    if window is not None:
        size = window[0] + q.shape[2]
        first = jnp.clip(num_committed + 1 - window[0], 0, keys.shape[2] - size)
        slot = first[:, None] + jnp.arange(size)[None, :]

        def cut(cache):
            near = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axis=1))(cache, first)
            return jnp.concatenate([cache[:, :, : window[1]], near], axis=2)

        sinks = jnp.broadcast_to(jnp.arange(window[1])[None, :], (len(q), window[1]))
        slot = jnp.concatenate([sinks, slot], axis=1)
        keys, values = cut(keys), cut(values)
    draft_slot = slot - num_committed[:, None]
    is_draft = (draft_slot >= 0) & (draft_slot < ancestor_mask.shape[2])
    mask = (
        jnp.take_along_axis(ancestor_mask, jnp.clip(draft_slot, 0, ancestor_mask.shape[2] - 1)[:, None], axis=2)
        & is_draft[:, None]
    )
    is_committed = jnp.broadcast_to((draft_slot < 0)[:, None], mask.shape)
    if window is not None:
        is_committed &= (slot[:, None] >= window_start[:, :, None]) | (slot < window[1])[:, None]
    source = (keys.astype(q.dtype), values.astype(q.dtype))
    return attend(q, [source], (mask | is_committed,), scale=scale)[..., :value_width]


def _dot_product_attention(q, keys, values, num_committed, ancestor_mask, window_start, *, scale, implementation):
    """Runs jax.nn's attention on a chain. Each key head is a separate row, so that the layout is the cache's."""
    del ancestor_mask, window_start
    B, K, T, G, H = q.shape
    S = keys.shape[2]
    lengths = jnp.repeat(num_committed, K)[:, None] + jnp.arange(1, T + 1)[None, :]
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
