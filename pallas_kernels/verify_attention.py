"""Attention of the few queries of a pass against a long, ragged cache (flash decoding): op, kernel, reference."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import loads_from_l2
from pallas_kernels.dispatch import choose

MOST_QUERIES = 16  # tokens per row that the kernel takes
MOST_BEHIND = 64  # slots behind the text: two words of bits
_NOTHING = -1e30  # a score, in place of -inf: differences stay finite
_NUM_PROCESSORS = 132  # of an H100; each holds eight warps of these kernels or more


def verify_attention(
    q, keys, values, base, sees, begin=None, *, scale, sinks=0, value_width=None, implementation="auto"
) -> jax.Array:
    """Softmax attention of T tokens per row against the row's cache, of which each sees what a few numbers say.

    q [B, K, T, G, H]: G query heads for each of K key heads; keys [B, K, S, H], values [B, K, S, Hv]. Without values
    (None) they are the keys' first `value_width` columns: absorbed latent attention (DeepSeek-V2, 2405.04434). q is
    floating; the cache may be of another floating type, fp8 included, and is converted to q's. The result is
    [B, K, T, G, Hv] in q's dtype; scores and sums are float32.

    The text lies in slots 0 .. base - 1, base [B] int32, and token t sees all of it, or with begin [B, T] int32 (a
    window) what lies from slot `begin` on or before `sinks`. Of the slots behind the text it sees base + x where
    sees [B, T, X] bool: the lower triangle for tokens that follow each other, ancestors in a tree. A token that sees
    nothing gets zeros. Slots that no token of the row sees are not read, and may hold NaN. In the kernel the order of
    sums, so the last bits, depends on B, T and S: they decide into how many shares the slots are split.

    `implementation` is "xla" (the reference), "triton" (the kernel: CUDA and ROCm), "interpreted" (the kernel on any
    machine, slowly) or "auto", see `pallas_kernels.dispatch`; more than 16 tokens or 64 slots behind the text take the
    reference. Raises ValueError for other implementations, for shapes that do not fit, and for a cache of one-byte
    numbers with 2^31 of them or more, which the kernel cannot address.
    """
    B, K, T, _, H = q.shape
    S, X = keys.shape[2], sees.shape[2]
    if (values is None) == (value_width is None):
        raise ValueError("either values or the value_width of keys that hold them is needed")
    wanted = [(keys, (B, K, S, H)), (base, (B,)), (sees, (B, T, X))]
    wanted += [] if values is None else [(values, (B, K, S, values.shape[-1]))]
    wanted += [] if begin is None else [(begin, (B, T))]
    if any(array.shape != shape for array, shape in wanted) or not 0 < (value_width or 1) <= H:
        found = ", ".join(str(array.shape) for array, _ in wanted)
        raise ValueError(f"q {q.shape} does not fit keys, base, sees, values, begin of shapes {found}, {value_width=}")
    chosen = choose_for(q, keys, sees, implementation, is_windowed=begin is not None)
    if chosen == "xla" or q.size == 0:
        return verify_attention_reference(
            q, keys, values, base, sees, begin, scale=scale, sinks=sinks, value_width=value_width
        )
    return _verify_attention_triton(
        q, keys, values, base, sees, begin, scale, sinks, value_width, chosen == "interpreted"
    )


def choose_for(q, keys, sees, implementation: str, *, is_windowed: bool) -> str:
    """Which implementation `verify_attention` takes for arrays of these shapes."""
    B, K, T, G, H = q.shape
    is_few, unfit = T <= MOST_QUERIES and sees.shape[2] <= MOST_BEHIND, None
    if is_few and keys.dtype.itemsize == 1 and keys.size >= 2**31:
        unfit = f"a cache {keys.shape} of {keys.dtype} has 2^31 elements or more: split it"
    shape = {"batch": B, "heads": K, "queries": T * G, "width": H, "slots": keys.shape[2]}
    shape |= {"dtype": str(q.dtype), "cache": str(keys.dtype), "reads": "a window" if is_windowed else "all"}
    chosen = choose("verify_attention", implementation, ("xla", "triton"), shape, unfit=unfit)
    return chosen if is_few else "xla"


def verify_attention_reference(q, keys, values, base, sees, begin=None, *, scale, sinks=0, value_width=None):
    """What `verify_attention` means."""
    values = keys[..., :value_width] if values is None else values
    slot = jnp.arange(keys.shape[2])[None, None, :]
    is_seen = slot < base[:, None, None]
    if begin is not None:
        is_seen &= (slot >= begin[:, :, None]) | (slot < sinks)
    behind = jnp.broadcast_to(slot - base[:, None, None], is_seen.shape)
    size = sees.shape[2]
    is_tree = jnp.take_along_axis(sees, jnp.clip(behind, 0, size - 1), axis=2) & (behind >= 0) & (behind < size)
    mask = jnp.broadcast_to(is_seen, is_tree.shape) | is_tree  # [B, T, S]
    values = jnp.where(mask.any(axis=1)[:, None, :, None], values.astype(q.dtype), 0)
    scores = jnp.einsum("BKTGH,BKSH->BKTGS", q, keys.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    mask = mask[:, None, :, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, _NOTHING), axis=-1), 0)
    return jnp.einsum("BKTGS,BKSH->BKTGH", weights.astype(q.dtype), values)


def _verify_attention_triton(q, keys, values, base, sees, begin, scale, sinks, value_width, interpret):
    """`_run` with the tiles of the platform that this is lowered for."""
    caches = (keys,) if values is None else (keys, values)
    run = functools.partial(_run, scale=scale, sinks=sinks, value_width=value_width, interpret=interpret)
    operands = (q, caches, base, sees, begin)
    if interpret:
        return run(*operands, platform="cuda")
    cuda, rocm = (functools.partial(run, platform=platform) for platform in ("cuda", "rocm"))
    return jax.lax.platform_dependent(*operands, rocm=rocm, default=cuda)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Sizes of a program: query rows and slots at a time, both powers of two, and how it runs."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int
    halves: bool = False  # a latent's value columns are cut in two, each half for a program of its own


def _tiles(num_rows: int, width: int, is_latent: bool, itemsize: int, platform: str) -> _Tiles:
    """The largest that spill no registers, by compiling for sm_90 and gfx942; `itemsize` is q's, `width` the values'.

    Two or three stages of loads are under way on sm_90, 32 KB and more a program. On gfx942 q stays in registers, and
    64 KB of shared memory hold one stage. float32 is multiplied without matrix units on sm_90: exact, not fast.
    """
    is_cuda = platform == "cuda"
    rows = min(max(16, pl.next_power_of_2(num_rows)), 128)
    if itemsize == 4:
        return _Tiles(16, 16, 8 if is_cuda else 4, 2)
    if not is_latent:
        return _Tiles(rows, 64 if width <= (192 if is_cuda else 128) else 32, max(4, rows // 16), 3 if is_cuda else 2)
    if not is_cuda:
        return _Tiles(min(rows, 32), 16, 4, 2)
    if rows * width > 2**14 and width % 32 == 0:  # halves in powers of two, 16 or more
        return _Tiles(rows, 32, max(4, rows // 16), 2, halves=True)
    return _Tiles(rows, 32, 8, 3)


def _run(q, caches, base, sees, begin, *, scale, sinks, value_width, interpret, platform):
    """The kernel over [row blocks, splits, K, B], and the sum of the splits.

    A program takes a block of a key head's T * G query rows against one of `splits` equal shares of the slots that the
    row really sees: a short row's programs have little to do, and read nothing else. The row blocks of one share stand
    next to each other in the grid, so they run at the same time and all but the first find it in the L2 cache.
    """
    B, K, T, G, H = q.shape
    S, R = caches[0].shape[2], T * G
    is_latent = len(caches) == 1
    width = value_width if is_latent else caches[1].shape[3]
    tiles = _tiles(R, width, is_latent, q.dtype.itemsize, platform)
    parts = 2 if tiles.halves else 1
    num_blocks = pl.cdiv(R, tiles.rows) * parts
    # Enough programs for the device; of 256 slots or more each, or of 512 for more rows, since a program's sums are
    # written and read again; and of 4096 at most, for one long row's sake.
    splits = pl.cdiv(_NUM_PROCESSORS * 8 // tiles.num_warps, B * K * num_blocks)
    splits = max(min(splits, pl.cdiv(S, 256 if tiles.rows == 16 else 512)), pl.cdiv(S, 4096))
    rows, tokens = _tables(base, sees, begin, S)
    own = width // parts
    value_pieces = _pieces(own)
    key_pieces = _pieces(*range(own, width + 1, own), H) if is_latent else _pieces(H)
    output_width, *cache_widths = [  # of blocks: beyond the array where its last piece is padded
        max(begin + padded for begin, _, padded in pieces)
        for pieces in (_pieces(width), key_pieces, *([] if is_latent else [value_pieces]))
    ]
    moved = num_blocks * sum(cache.nbytes for cache in caches) + 4 * B * K * splits * R * (width + parts)
    loads = (rows.nbytes, splits * num_blocks * K), (tokens.nbytes, splits * parts * K), (q.nbytes, splits * parts)
    moved += sum(nbytes * times for nbytes, times in loads)

    output, weight = pl.pallas_call(
        functools.partial(
            _verify_attention_kernel,
            tiles=tiles,
            group=G,
            num_rows=R,
            splits=splits,
            is_windowed=begin is not None,
            sinks=sinks,
            behind=sees.shape[2],
            scale=scale * math.log2(math.e),
            width=width,
            key_pieces=key_pieces,
            value_pieces=value_pieces,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits, R, width), jnp.float32),
            jax.ShapeDtypeStruct((parts, B, K, splits, R), jnp.float32),
        ],
        grid=(num_blocks, splits, K, B),
        in_specs=[
            pl.BlockSpec((None, *rows.shape[1:]), lambda i, z, k, b: (b, 0)),
            pl.BlockSpec((None, *tokens.shape[1:]), lambda i, z, k, b: (b, 0, 0)),
            pl.BlockSpec((None, None, tiles.rows, cache_widths[0]), lambda i, z, k, b: (b, k, i // parts, 0)),
            *(pl.BlockSpec((None, None, S, size), lambda i, z, k, b: (b, k, 0, 0)) for size in cache_widths),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tiles.rows, output_width), lambda i, z, k, b: (b, k, z, i // parts, 0)),
            pl.BlockSpec((None, None, None, None, tiles.rows), lambda i, z, k, b: (i % parts, b, k, z, i // parts)),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * K * R * S * (parts * H + width),
            transcendentals=B * K * R * S * parts,
            bytes_accessed=moved,
        ),
        metadata=loads_from_l2(*loads),
        interpret=interpret,
        name=f"verify_attention_{platform}",
    )(rows, tokens, q.reshape(B, K, R, H), *caches)
    # Each share's result is an average with a weight, of which `weight` is the logarithm: one for each half of the
    # columns, since they need not be the same to the last bit.
    weight = jnp.exp2(weight - weight.max(axis=3, keepdims=True))
    weight = jnp.repeat(jnp.moveaxis(weight, 0, -1), own, axis=-1)
    joined = (weight * output).sum(axis=2) / weight.sum(axis=2)
    return joined.astype(q.dtype).reshape(B, K, T, G, width)


def _tables(base, sees, begin, num_slots) -> tuple[jax.Array, jax.Array]:
    """What rows and tokens see, in 32-bit words: `[B, 4]` base, first slot seen, bits; `[B, T, 3]` begin and bits.

    Bit x of the two words: slot base + x is seen, by a token, or by any token of the row.
    """
    B, T, X = sees.shape
    begin = jnp.zeros((B, T), jnp.int32) if begin is None else begin.astype(jnp.int32)
    base = jnp.minimum(base, num_slots).astype(jnp.int32)
    sees = sees & (base[:, None] + jnp.arange(X)[None, :] < num_slots)[:, None]  # so the kernel need not look
    sees = jnp.concatenate([sees, sees.any(axis=1, keepdims=True)], axis=1)  # the row's own behind its tokens'
    bits = jnp.pad(sees, ((0, 0), (0, 0), (0, MOST_BEHIND - X))).reshape(B, T + 1, 2, 32)
    words = jnp.left_shift(bits.astype(jnp.int32), jnp.arange(32)[None, None, None, :]).sum(axis=-1)
    rows = jnp.concatenate([base[:, None], begin.min(axis=1, keepdims=True), words[:, T]], axis=1)
    return rows, jnp.concatenate([begin[:, :, None], words[:, :T]], axis=2)


def _pieces(*ends: int) -> list[tuple[int, int, int]]:
    """Column 0 up to each end in parts: begin, width, and the power of two, 16 or more, that a kernel's array has."""
    pieces, begin = [], 0
    for end in ends:
        while begin < end:
            padded = min(256, max(16, pl.next_power_of_2(end - begin + 1) // 2))
            width = min(padded, end - begin)
            pieces.append((begin, width, padded))
            begin += width
    return pieces


def _mask(row_mask, piece):
    """The rows of `row_mask` (None: all) and the true columns of a piece; None where that is everything."""
    _, width, padded = piece
    masks = [] if row_mask is None else [row_mask[:, None]]
    if width < padded:
        masks.append((jnp.arange(padded) < width)[None, :])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref, rows, row_mask, piece, dtype):
    """Rows of one piece of the columns, as `dtype`; zeros where the mask says no."""
    begin, _, padded = piece
    mask = _mask(row_mask, piece)
    other = None if mask is None else 0.0
    return plt.load(ref.at[rows, pl.ds(begin, padded)], mask=mask, other=other).astype(dtype)


def _verify_attention_kernel(
    row_ref,
    token_ref,
    q_ref,
    *refs,
    tiles,
    group,
    num_rows,
    splits,
    is_windowed,
    sinks,
    behind,
    scale,
    width,
    key_pieces,
    value_pieces,
):
    """A block of query rows against one share of a row's slots; see `_tables` for the first two."""
    *cache_refs, output_ref, weight_ref = refs
    base, first, *seen = [row_ref[index] for index in range(4)]
    row = pl.program_id(0) // (2 if tiles.halves else 1) * tiles.rows + jnp.arange(tiles.rows)
    is_row = row < num_rows if num_rows % tiles.rows else None
    token = jnp.minimum(row, num_rows - 1) // group
    begin, *sees = [token_ref[token, index] for index in range(3)]
    if tiles.halves:  # a program's own half of the value columns comes first; no remainders: loads would be narrow
        half = width // 2
        own = pl.program_id(0) % 2 * half
        turns = [own if begin < half else -own if begin < width else 0 for begin, *_ in key_pieces]
        key_pieces = [(begin + turn, *sizes) for (begin, *sizes), turn in zip(key_pieces, turns, strict=True)]
    q = [_load(q_ref, slice(None), is_row, piece, q_ref.dtype) for piece in key_pieces]
    dot = functools.partial(
        jnp.dot,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None,
    )

    # The row's blocks of slots: those of the sinks, then those from the first slot that a token sees.
    far = pl.cdiv(sinks, tiles.slots)
    near = jnp.maximum(first // tiles.slots, far)
    count = far + jnp.maximum(pl.cdiv(jnp.minimum(base + behind, cache_refs[0].shape[0]), tiles.slots) - near, 0)
    share = pl.cdiv(count, splits)
    lower = pl.program_id(1) * share
    upper = jnp.minimum(lower + share, count)

    def is_seen(slot, begin, words):
        """Of the row's text, or by its bit."""
        place = slot - base
        word = words[0] if behind <= 32 else jnp.where(place < 32, *words)
        bit = jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, place & 31)) & 1
        is_text = place < 0
        if is_windowed:
            is_text &= (slot >= begin) | (slot < sinks)
        return is_text | ((place >= 0) & (place < behind) & (bit == 1))

    def body(index, carry):
        outputs, highest, total = carry
        start = jnp.where(index < far, index, index - far + near) * tiles.slots
        slot = start + jnp.arange(tiles.slots)
        rows = pl.ds(start, tiles.slots)
        is_loaded = is_seen(slot, first, seen)
        mask = is_seen(slot[None, :], begin[:, None], [word[:, None] for word in sees])
        keys = [_load(cache_refs[0], rows, is_loaded, piece, q_ref.dtype) for piece in key_pieces]
        scores = scale * sum(dot(one, key.T) for one, key in zip(q, keys, strict=True))
        peak = jnp.maximum(highest, jnp.max(jnp.where(mask, scores, _NOTHING), axis=1))
        weights = jnp.where(mask, jnp.exp2(scores - peak[:, None]), 0.0)
        fading = jnp.exp2(highest - peak)
        values = keys
        if len(cache_refs) == 2:
            values = [_load(cache_refs[1], rows, is_loaded, piece, q_ref.dtype) for piece in value_pieces]
        outputs = [
            fading[:, None] * output + dot(weights.astype(value.dtype), value)
            for output, value in zip(outputs, values, strict=False)  # a latent has keys behind its values
        ]
        return outputs, peak, fading * total + jnp.sum(weights, axis=1)

    outputs = [jnp.zeros((tiles.rows, padded), jnp.float32) for _, _, padded in value_pieces]
    highest = jnp.full(tiles.rows, _NOTHING, jnp.float32)
    outputs, highest, total = jax.lax.fori_loop(lower, upper, body, (outputs, highest, jnp.zeros_like(highest)))
    total = jnp.where(total > 0, total, 1.0)  # of a row that saw nothing: zeros, of the least weight
    if len(cache_refs) == 1:
        value_pieces = key_pieces[: len(outputs)]
    for output, piece in zip(outputs, value_pieces, strict=True):
        columns = pl.ds(piece[0], output.shape[1])
        plt.store(output_ref.at[:, columns], output / total[:, None], mask=_mask(is_row, piece))
    plt.store(weight_ref, highest + jnp.log2(total), mask=is_row)
