"""Computes latent attention's absorbed queries, and appends latents to the cache in place.

Bottleneck: the launch, because decoding has few rows. One kernel replaces up to seven, which add the parts of two
projections, normalise the latent, apply two rotations, multiply by the keys' up-projection, and write the cache.
"""

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


def append_latents(
    queries: PartialSums,
    latents: PartialSums,
    norm,
    key_up,
    angles,
    cache,
    start,
    places=None,
    *,
    eps=1e-6,
    interleaved=False,
    implementation="auto",
) -> tuple[jax.Array, jax.Array]:
    """Computes the absorbed queries of latent attention (DeepSeek-V2, 2405.04434), and appends to its cache.

    An absorbed query is `[q_content key_up, rotated q_rope]`, and a cache entry is `[norm(latent), rotated k_rope]`.
    Not differentiable, because it is meant for passes with a cache.

    Args:
        queries: [B, T, N, C + P], each head's content channels followed by its channels to rotate.
        latents: [B, T, R + P], the latent followed by the key to rotate, which all heads share.
        norm: [R] scale of the latent's RMSNorm.
        key_up: [N, C, R] in the dtype of the queries.
        angles: Cosines and sines [B, T, P / 2] float32.
        cache: [B, S, R + P], which is updated in place and must not be used after the call.
        start: [B] int32 slot of each row's first token. All T slots from this slot on must exist.
        places: Each token's page and offset within the page, both [B, T] int32, for a paged cache [P, size, R + P].
            `start` is then ignored, and entries whose page is outside the pool are dropped. None: the cache is
            contiguous.
        eps: Added to the mean square in the norm.
        interleaved: Rotated pairs are channels (2j, 2j+1); False: channels (j, j+P/2).
        implementation: As for every op. With more than 64 rows, the reference always runs.

    Returns:
        Queries [B, T, N, R + P], and the cache with the new slots written.
    """
    B, T, N, width = queries.shape
    C, R = key_up.shape[1:]
    P = width - C
    # A query has C content and P rotated channels; a cache entry has R latent and P rotated channels.
    fits = latents.shape == (B, T, R + P) and cache.shape[2] == R + P and start.shape == (B,)
    fits &= len(cache) == B if places is None else all(one.shape == (B, T) for one in places)
    if not fits or len(key_up) != N or norm.shape != (R,) or any(one.shape != (B, T, P // 2) for one in angles):
        raise ValueError(
            f"queries {queries.shape}, latents {latents.shape}, norm {norm.shape}, key_up {key_up.shape}, angles"
            f" {angles[0].shape}, cache {cache.shape} and start {start.shape} do not fit each other"
        )
    chosen = choose_implementation(queries, key_up, cache, implementation)
    operands = (queries, latents, norm, key_up, angles, cache, start, places)
    if chosen == "xla":
        return append_latents_reference(*operands, eps=eps, interleaved=interleaved)
    return _append_latents_triton(*operands, eps, interleaved, interpret=chosen == "interpreted")


def choose_implementation(queries: PartialSums, key_up, cache, implementation: str) -> str:
    """Returns the implementation that `append_latents` runs for arrays of these shapes."""
    B, T, N, width = queries.shape
    shape = {"rows": B * T, "heads": N, "content": key_up.shape[1], "width": width, "latent": key_up.shape[2]}
    shape |= {"parts": len(queries.parts), "dtype": str(queries.dtype), "cache": str(cache.dtype)}
    chosen = choose("append_latents", implementation, ("xla", "triton"), shape, make_case=make_case)
    # Within `batch_invariant`, use XLA for any number of rows.
    return chosen if B * T <= MAX_ROWS and not is_batch_invariant() else "xla"


def make_case(shape: Shape) -> Case:
    keys, (rows, N, C, R) = random_keys(), (shape[name] for name in ("rows", "heads", "content", "latent"))
    P, dtype = shape["width"] - C, shape["dtype"]
    queries = PartialSums(random_parts(keys, shape["parts"], (1, rows, N, C + P), dtype), jnp.dtype(dtype))
    latents = PartialSums(random_parts(keys, shape["parts"], (1, rows, R + P), dtype), jnp.dtype(dtype))
    arrays = (random_normal(keys, (R,)), random_normal(keys, (N, C, R), dtype), (jnp.ones((1, rows, P // 2)),) * 2)
    cache = random_normal(keys, (1, 256, R + P), shape["cache"])
    return append_latents, (queries, latents, *arrays, cache, jnp.zeros(1, jnp.int32))


def append_latents_reference(
    queries, latents, norm, key_up, angles, cache, start, places=None, *, eps=1e-6, interleaved=False
):
    """Computes `append_latents` in plain JAX, which defines its meaning."""
    C, R = key_up.shape[1:]
    q_content, q_rope = jnp.split(queries.total(), [C], axis=-1)
    latent, k_rope = jnp.split(latents.total(), [R], axis=-1)
    q_rope = rotate(q_rope, angles, interleaved=interleaved)
    k_rope = rotate(k_rope[:, :, None], angles, interleaved=interleaved)[:, :, 0]
    new = jnp.concatenate([rms_norm_reference(latent, norm, eps=eps), k_rope], axis=-1)
    cache = append_entries(cache, new, start, places)
    absorbed = jnp.einsum("BTNC,NCR->BTNR", q_content, key_up)
    return jnp.concatenate([absorbed, q_rope], axis=-1), cache


def _append_latents_triton(
    queries, latents, norm, key_up, angles, cache, start, places, eps, interleaved, *, interpret
):
    """Runs one program for each head and slice of the latent's columns, and one for each token's entry."""
    B, T, N, width = queries.shape
    C, R = key_up.shape[1:]
    n, P = B * T, width - C
    # All tokens form one tile of at least 16 rows, the minimum for tensor cores. The latent's columns are split to get
    # more programs.
    rows = max(16, pl.next_power_of_2(n))
    columns = min(64, max(16, pl.next_power_of_2(R)))
    slices = pl.cdiv(R, columns)
    dtype = jnp.dtype(queries.dtype)
    positions = [start] if places is None else list(places)
    # Positions are the first slot of each row, or each token's page and offset.
    operands = [
        *positions,
        *(one.reshape(n, P // 2) for one in angles),
        queries.parts.reshape(-1, n, N * width),
        latents.parts.reshape(-1, n, R + P),
        norm,
        key_up,
    ]
    absorbed, cache = pl.pallas_call(
        functools.partial(
            _append_latents_kernel,
            tile=(rows, columns),
            slices=slices,
            num_tokens=T,
            dtypes=(dtype, latents.dtype),
            eps=eps,
            interleaved=interleaved,
        ),
        out_shape=[jax.ShapeDtypeStruct((n, N, R + P), dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        # The grid has the programs that absorb first, then one program per token, which appends the token's entry.
        grid=(N * slices + n,),
        input_output_aliases={len(operands): 1},  # the cache is updated in place
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * N * C * R,
            transcendentals=n,
            bytes_accessed=key_up.nbytes
            + queries.parts.nbytes // width * (slices * C + P)
            + latents.parts.nbytes
            + n * (norm.nbytes + 4 * len(positions) + (N + 1) * P * 4)
            + n * N * (R + P) * dtype.itemsize
            + n * (R + P) * cache.dtype.itemsize,
        ),
        metadata=loads_from_l2(
            (queries.parts.nbytes // width * C, slices),
            (norm.nbytes, n),
            *((one.nbytes, n // one.size) for one in positions),
            *((one.nbytes, N + 1) for one in angles),
        ),
        interpret=interpret,
        name="append_latents",
    )(*operands, cache)
    return absorbed.reshape(B, T, N, R + P), cache


def _append_latents_kernel(*refs, tile, slices, num_tokens, dtypes, eps, interleaved):
    """Absorbs a slice of one head's queries, or appends one token's entry."""
    *place_refs, cos_ref, sin_ref, queries_ref, latents_ref, norm_ref, key_up_ref, _, absorbed_ref, cache_ref = refs
    program = pl.program_id(0)
    num_heads, C, R = (int(size) for size in key_up_ref.shape)
    n, pairs = (int(size) for size in cos_ref.shape)
    num_absorbing = num_heads * slices
    # Channels of the first and second half of each rotated pair.
    pair = jnp.arange(pl.next_power_of_2(pairs))
    is_pair = pair < pairs
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)

    def load_parts(ref, row, is_row, column, is_column, dtype):
        """Loads rows and columns, and adds their parts; returns [rows, columns] in `dtype`."""
        index = jnp.broadcast_arrays(row[:, None], column[None, :])
        mask = is_row[:, None] & is_column[None, :]
        return load_sum(ref, index, mask, dtype)

    def rotated(ref, row, is_row, begin, dtype):
        """Loads the pairs from column `begin` on, and rotates them; returns two arrays [rows, pairs]."""
        one, two = (
            load_parts(ref, row, is_row, begin + half, is_pair, dtype).astype(jnp.float32) for half in (first, second)
        )
        index = jnp.broadcast_arrays(row[:, None], pair[None, :])
        mask = is_row[:, None] & is_pair[None, :]
        cos, sin = (plt.load(angle.at[*index], mask=mask, other=0.0) for angle in (cos_ref, sin_ref))
        return tuple(half.astype(dtype) for half in rotate_pairs(one, two, cos, sin))

    def store(ref, outer, row, is_row, column, is_column, x):
        """Stores rows and columns at `ref[row, *outer, column]`."""
        row_index, column_index = jnp.broadcast_arrays(row[:, None], column[None, :])
        plt.store(
            ref.at[row_index, *outer, column_index], as_stored(x, ref.dtype), mask=is_row[:, None] & is_column[None, :]
        )

    @pl.when(program < num_absorbing)
    def absorb():
        # Handle one head and one slice of columns for all tokens.
        head, part = jax.lax.div(program, slices), jax.lax.rem(program, slices)
        row, column = jnp.arange(tile[0]), part * tile[1] + jnp.arange(tile[1])
        is_row, is_column = row < n, column < R
        # Multiply the content by the head's up-projection.
        content = jnp.arange(max(16, pl.next_power_of_2(C)))
        begin = head * (C + 2 * pairs)
        q = load_parts(queries_ref, row, is_row, begin + content, content < C, dtypes[0])
        index = jnp.broadcast_arrays(content[:, None], column[None, :])
        up = plt.load(key_up_ref.at[head, *index], mask=(content < C)[:, None] & is_column[None, :], other=0.0)
        absorbed = jnp.dot(q, up, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        store(absorbed_ref, (head,), row, is_row, column, is_column, absorbed)

        # The rotated part follows the content; the first slice writes it.
        @pl.when(part == 0)
        def write_rotated():
            for half, x in enumerate(rotated(queries_ref, row, is_row, begin + C, dtypes[0])):
                store(absorbed_ref, (head,), row, is_row, R + half * pairs + pair, is_pair, x)

    @pl.when(program >= num_absorbing)
    def append():
        token = program - num_absorbing
        batch, place = jax.lax.div(token, num_tokens), jax.lax.rem(token, num_tokens)
        page, slot, is_kept = find_entry(place_refs, cache_ref, batch, place)
        one = jnp.arange(1)
        is_one, is_kept, column = one == 0, (one == 0) & is_kept, jnp.arange(pl.next_power_of_2(R))
        is_column = column < R
        # Write the normalised latent, then the rotated key.
        latent = load_parts(latents_ref, token + one, is_one, column, is_column, dtypes[1]).astype(jnp.float32)
        scale = plt.load(norm_ref.at[column], mask=is_column, other=0.0).astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.sum(latent * latent, axis=1) / R + eps)
        latent = (latent * inverse[:, None] * scale[None, :]).astype(dtypes[1])
        store(cache_ref, (slot,), page + one, is_kept, column, is_column, latent)
        for half, x in enumerate(rotated(latents_ref, token + one, is_one, R, dtypes[1])):
            store(cache_ref, (slot,), page + one, is_kept, R + half * pairs + pair, is_pair, x)
