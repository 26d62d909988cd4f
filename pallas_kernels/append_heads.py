"""Splits a projection into heads, normalises and rotates them, and appends keys and values to the cache in place.

Bottleneck: the launch, because decoding has few rows. One kernel replaces five, which add the parts of the projection,
normalise and rotate, write two caches, and transpose the queries.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.case import Case, Shape, random_keys, random_normal, random_parts
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.dispatch import choose
from pallas_kernels.fp8 import as_stored
from pallas_kernels.paged import append_entries, find_entry
from pallas_kernels.partial_sums import PartialSums, load_sum
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rotation import rotate, rotate_pairs

MAX_ROWS = 64  # with more rows, XLA's fusions are cheap compared with the products around them


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bias", "norms"], meta_fields=["eps", "zero_centred", "interleaved"]
)
@dataclasses.dataclass(frozen=True)
class Heads:
    """The bias, norms and rotation of each head of the projection.

    Attributes:
        bias: [K, G + 2, H] added to the projection; None: no bias.
        norms: RMSNorm scales [H] for queries and for keys; None: no norm.
        eps: Added to the mean square in the norms.
        zero_centred: The norms multiply by `1 + scale`.
        interleaved: Rotated pairs are channels (2j, 2j+1); False: channels (j, j+P).
    """

    bias: jax.Array | None = None
    norms: tuple[jax.Array, jax.Array] | None = None
    eps: float = 1e-6
    zero_centred: bool = False
    interleaved: bool = False


def append_heads(
    projected: PartialSums, angles, keys, values, start, heads: Heads, places=None, *, group_size, implementation="auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries, keys and values from a projection, and appends the keys and values to the cache.

    Not differentiable, because it is meant for passes with a cache.

    Args:
        projected: [B, T, K, G + 2 or more, H]. Each of the K key heads has G queries, a key, a value, and possibly
            entries that this op ignores.
        angles: Cosines and sines [B, T, P] float32; the first 2 P channels of queries and keys are rotated.
        keys: [B, K, S, H], the key cache, which is updated in place and must not be used after the call.
        values: [B, K, S, H], the value cache, like `keys`.
        start: [B] int32 slot of each row's first token. All T slots from this slot on must exist.
        heads: Bias, norms and rotation of the heads.
        places: Each token's page and offset within the page, both [B, T] int32, for a paged cache [P, K, size, H].
            `start` is then ignored, and entries whose page is outside the pool are dropped. None: the cache is
            contiguous.
        group_size: G.
        implementation: As for every op. With more than 64 rows, the reference always runs.

    Returns:
        Queries [B, K, T, G, H], and the cache's keys and values with the new slots written.
    """
    K, H = keys.shape[1], keys.shape[3]
    B, T = projected.shape[:2]
    fits = projected.shape[:3] == (B, T, K) and projected.shape[4:] == (H,) and projected.shape[3] >= group_size + 2
    fits &= len(keys) == B if places is None else all(one.shape == (B, T) for one in places)
    if not fits or values.shape != keys.shape or start.shape != (B,) or any(a.shape[:2] != (B, T) for a in angles):
        raise ValueError(
            f"a projection {projected.shape} does not fit keys {keys.shape}, values {values.shape}, start {start.shape}"
            f" and angles {angles[0].shape}"
        )
    chosen = choose_implementation(projected, keys, implementation)
    if chosen == "xla":
        return append_heads_reference(projected, angles, keys, values, start, heads, places, group_size=group_size)
    return _append_heads_triton(
        projected, angles, keys, values, start, heads, places, group_size, interpret=chosen == "interpreted"
    )


def choose_implementation(projected: PartialSums, keys, implementation: str) -> str:
    """Returns the implementation that `append_heads` runs for arrays of these shapes."""
    B, T, K, heads_per_key, H = projected.shape
    shape = {"rows": B * T, "heads": K, "per_key": heads_per_key, "width": H, "parts": len(projected.parts)}
    shape |= {"dtype": str(projected.dtype), "cache": str(keys.dtype)}
    chosen = choose("append_heads", implementation, ("xla", "triton"), shape, make_case=make_case)
    return chosen if B * T <= MAX_ROWS or is_batch_invariant() else "xla"


def make_case(shape: Shape) -> Case:
    keys, (rows, K, per_key, H) = random_keys(), (shape[name] for name in ("rows", "heads", "per_key", "width"))
    projected = PartialSums(
        random_parts(keys, shape["parts"], (1, rows, K, per_key, H), shape["dtype"]), jnp.dtype(shape["dtype"])
    )
    angles = (jnp.ones((1, rows, H // 2)),) * 2
    caches = [random_normal(keys, (1, K, 256, H), shape["cache"]) for _ in range(2)]
    run = functools.partial(append_heads, heads=Heads(), group_size=per_key - 2)
    return run, (projected, angles, *caches, jnp.zeros(1, jnp.int32))


def split_heads(projected, angles, heads: Heads, *, group_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits a projection [B, T, K, G + 2 or more, H] into heads, adds the bias, normalises and rotates, in plain JAX.

    Returns queries [B, T, K, G, H], keys and values [B, T, K, H].
    """
    B, T, K, _, H = projected.shape
    G = group_size
    projected = projected[:, :, :, : G + 2]
    if heads.bias is not None:
        projected = projected + heads.bias[None, None].astype(projected.dtype)
    q, k, v = jnp.split(projected, [G, G + 1], axis=3)
    q, k = q.reshape(B, T, K * G, H), k.reshape(B, T, K, H)
    if heads.norms is not None:
        norm = functools.partial(rms_norm_reference, eps=heads.eps, zero_centred=heads.zero_centred)
        q, k = (norm(one, scale) for one, scale in zip((q, k), heads.norms, strict=True))
    q, k = (rotate(one, angles, interleaved=heads.interleaved) for one in (q, k))
    return q.reshape(B, T, K, G, H), k, v.reshape(B, T, K, H)


def append_heads_reference(
    projected: PartialSums, angles, keys, values, start, heads: Heads, places=None, *, group_size: int
):
    """Computes `append_heads` in plain JAX, which defines its meaning."""
    q, k, v = split_heads(projected.total(), angles, heads, group_size=group_size)
    return q.swapaxes(1, 2), append_entries(keys, k, start, places), append_entries(values, v, start, places)


def _append_heads_triton(projected, angles, keys, values, start, heads, places, group_size, *, interpret):
    """Runs one program for each token and key head."""
    B, T, K, per_key, H = projected.shape
    num_parts, P = len(projected.parts), angles[0].shape[2]
    parts = projected.parts.reshape(num_parts, B * T, K * per_key * H)
    extra = [] if heads.bias is None else [heads.bias]
    extra += [] if heads.norms is None else list(heads.norms)
    # Positions are the first slot of each row, or each token's page and offset.
    positions = [start] if places is None else list(places)
    operands = [*positions, *angles, parts, *extra]
    # Each program loads the angles twice, for its queries and its key.
    num_programs, new_elements = B * T * K, B * T * K * (group_size + 2) * H
    q, keys, values = pl.pallas_call(
        functools.partial(
            _append_heads_kernel,
            has_bias=heads.bias is not None,
            has_norms=heads.norms is not None,
            eps=heads.eps,
            zero_centred=heads.zero_centred,
            interleaved=heads.interleaved,
            dtype=projected.dtype,
            group_size=group_size,
            per_key=per_key,
            num_tokens=T,
            is_paged=places is not None,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, T, group_size, H), projected.dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        grid=(B * T, K),
        # The caches are updated in place.
        input_output_aliases={len(operands): 1, len(operands) + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=new_elements * (num_parts + 8),
            transcendentals=0,
            bytes_accessed=new_elements * num_parts * parts.dtype.itemsize
            + num_programs
            * (4 * len(positions) + 2 * 8 * P + sum(one.nbytes // (K if one.ndim == 3 else 1) for one in extra))
            + num_programs * H * (group_size * jnp.dtype(projected.dtype).itemsize + 2 * keys.dtype.itemsize),
        ),
        metadata=loads_from_l2(
            *((one.nbytes, num_programs // one.size) for one in positions),
            *((angle.nbytes, 2 * K) for angle in angles),
            *((one.nbytes, B * T * (1 if one.ndim == 3 else K)) for one in extra),
        ),
        interpret=interpret,
        name="append_heads",
    )(*operands, keys, values)
    return q, keys, values


def _append_heads_kernel(
    *refs, has_bias, has_norms, eps, zero_centred, interleaved, dtype, group_size, per_key, num_tokens, is_paged
):
    """Handles one key head, with its queries and its value, for one token.

    A head's channels form up to three groups, which are the first and the second channels of rotated pairs, and the
    unrotated channels.
    """
    *refs, _, _, q_ref, keys_ref, values_ref = refs
    *place_refs, cos_ref, sin_ref, parts_ref = refs[: 5 if is_paged else 4]
    refs = refs[5 if is_paged else 4 :]
    # Optional inputs have a fixed order, which is the bias, then the norms of queries and of keys.
    bias_ref = refs.pop(0) if has_bias else None
    norm_refs = refs if has_norms else (None, None)
    G, H, P = group_size, int(q_ref.shape[4]), int(cos_ref.shape[2])
    token, key_head = pl.program_id(0), pl.program_id(1)
    row, place = jax.lax.div(token, num_tokens), jax.lax.rem(token, num_tokens)
    # (channels, mask) from which each group is read, and to which it is written after rotation.
    pair, rest = jnp.arange(pl.next_power_of_2(P)), jnp.arange(pl.next_power_of_2(max(H - 2 * P, 1)))
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + P)
    unrotated = [(rest + 2 * P, rest < H - 2 * P)] if H > 2 * P else []
    groups = [(first, pair < P), (second, pair < P), *unrotated]
    rotated_groups = [(pair, pair < P), (pair + P, pair < P), *unrotated]

    def load(head, is_head):
        """Loads heads, and adds the parts and the bias; returns [heads, channels] for each group, in `dtype`."""
        loaded = []
        for channel, is_channel in groups:
            mask = is_head[:, None] & is_channel[None, :]
            column = (key_head * per_key + head[:, None]) * H + channel[None, :]
            x = load_sum(parts_ref, (token, column), mask, dtype)
            if bias_ref is not None:
                index = jnp.broadcast_arrays(head[:, None], channel[None, :])
                bias = plt.load(bias_ref.at[key_head, *index], mask=mask, other=0.0)
                x = (x.astype(jnp.float32) + bias.astype(dtype).astype(jnp.float32)).astype(dtype)
            loaded.append(x)
        return loaded

    def normalise_and_rotate(x, norm_ref):
        """Normalises each head over all of its channels, and rotates the pairs; rounds after each step."""
        x = [one.astype(jnp.float32) for one in x]
        if norm_ref is not None:
            inverse = jax.lax.rsqrt(sum(jnp.sum(one * one, axis=1) for one in x) / H + eps)[:, None]
            for index, (channel, is_channel) in enumerate(groups):
                scale = plt.load(norm_ref.at[channel], mask=is_channel, other=0.0).astype(jnp.float32)
                normed = x[index] * inverse * (scale + (1.0 if zero_centred else 0.0))[None, :]
                x[index] = normed.astype(dtype).astype(jnp.float32)
        cos, sin = (plt.load(ref.at[row, place, pair], mask=pair < P, other=0.0)[None, :] for ref in (cos_ref, sin_ref))
        x[:2] = rotate_pairs(x[0], x[1], cos, sin)
        return [one.astype(dtype) for one in x]

    def store(ref, outer, index, is_row, x, channels):
        """Stores each group's rows [heads, channels] at `ref[*outer, index, channel]`."""
        for one, (channel, is_channel) in zip(x, channels, strict=True):
            target = ref.at[*outer, *jnp.broadcast_arrays(index[:, None], channel[None, :])]
            plt.store(target, as_stored(one, ref.dtype), mask=is_row[:, None] & is_channel[None, :])

    # 1. Queries.
    head = jnp.arange(pl.next_power_of_2(G))
    q = normalise_and_rotate(load(head, head < G), norm_refs[0])
    store(q_ref, (row, key_head, place), head, head < G, q, rotated_groups)
    # 2. Write the key and the value to the token's cache slot; the value is not normalised or rotated.
    one = jnp.arange(1)
    page, slot, is_kept = find_entry(place_refs, keys_ref, row, place)
    key = normalise_and_rotate(load(one + G, one == 0), norm_refs[1])
    store(keys_ref, (page, key_head), slot + one, (one == 0) & is_kept, key, rotated_groups)
    store(values_ref, (page, key_head), slot + one, (one == 0) & is_kept, load(one + (G + 1), one == 0), groups)
