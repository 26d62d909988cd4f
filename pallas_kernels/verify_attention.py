"""Attention of a few queries per row against a long, ragged KV cache (flash decoding): op, kernel, reference.

Limit: the bytes of the cache, each read once. Latent attention (MLA) with many heads shares each slot among all of
them, so there multiplications limit.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import loads_from_l2
from pallas_kernels.dispatch import choose

MOST_QUERIES = 16  # tokens per row that the kernel supports
MOST_BEHIND = 64  # slots behind the committed text: two 32-bit words of the ancestor mask
_NOTHING = -1e30  # score of a masked slot; unlike -inf, differences of it stay finite
_NUM_PROCESSORS = 132  # SMs of an H100; each holds at least eight warps of these kernels


def verify_attention(
    q, keys, values, base, sees, begin=None, *, scale, sinks=0, value_width=None, implementation="auto"
) -> jax.Array:
    """Computes softmax attention of T tokens per row against the row's KV cache.

    The committed text is in slots 0 .. base - 1. Each token sees all of it, or with `begin` (a sliding window) the
    slots from `begin` on and the first `sinks` slots. Behind the text each token sees the slots that its ancestor mask
    selects: a lower triangle for a chain, the ancestors in a draft tree. A token that sees nothing gets zeros. Slots
    that no token of the row sees are not read and may hold NaN.

    Scores and sums are float32. In the kernel the order of sums, and so the last bits, depends on B, T and S, because
    they decide into how many shares the slots are split.

    Args:
        q: [B, K, T, G, H] floating: G query heads for each of K key heads.
        keys: [B, K, S, H], of any floating dtype, fp8 included; converted to q's dtype.
        values: [B, K, S, Hv], likewise; None: the first `value_width` columns of the keys, as in absorbed latent
            attention (DeepSeek-V2, 2405.04434).
        base: [B] int32 number of committed slots.
        sees: [B, T, X] bool ancestor mask: token t sees slot base + x.
        begin: [B, T] int32 first slot of each token's window, or None for all slots.
        scale: Factor of the scores.
        sinks: Number of first slots that stay visible outside the window.
        value_width: Hv if `values` is None.
        implementation: "xla" (the reference), "triton" (the kernel, on CUDA and ROCm), "interpreted" (the kernel in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`. More than 16 tokens or 64
            slots behind the text always run the reference.

    Returns:
        [B, K, T, G, Hv] in q's dtype.

    Raises:
        ValueError: The implementation is unknown, shapes do not fit, or the kernel was requested for a cache of 2^31 or
            more one-byte elements, which exceed its 32-bit offsets.
    """
    B, K, T, _, H = q.shape
    S, X = keys.shape[2], sees.shape[2]
    if (values is None) == (value_width is None):
        raise ValueError("pass either values or value_width, the columns of the keys that hold them")
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
    """Returns the implementation that `verify_attention` runs for arrays of these shapes.

    Args:
        q: As in `verify_attention`.
        keys: As in `verify_attention`.
        sees: As in `verify_attention`.
        implementation: The requested implementation.
        is_windowed: `begin` is given.

    Returns:
        "xla", "triton" or "interpreted".
    """
    B, K, T, G, H = q.shape
    is_few, unfit = T <= MOST_QUERIES and sees.shape[2] <= MOST_BEHIND, None
    if is_few and keys.dtype.itemsize == 1 and keys.size >= 2**31:
        unfit = f"a cache {keys.shape} of {keys.dtype} has 2^31 elements or more: split it"
    shape = {"batch": B, "heads": K, "queries": T * G, "width": H, "slots": keys.shape[2]}
    shape |= {"dtype": str(q.dtype), "cache": str(keys.dtype), "reads": "a window" if is_windowed else "all"}
    chosen = choose("verify_attention", implementation, ("xla", "triton"), shape, unfit=unfit)
    return chosen if is_few else "xla"


def verify_attention_reference(q, keys, values, base, sees, begin=None, *, scale, sinks=0, value_width=None):
    """Computes `verify_attention` in plain JAX with all scores at once, which defines its meaning."""
    values = keys[..., :value_width] if values is None else values
    slot = jnp.arange(keys.shape[2])[None, None, :]
    # The mask [B, T, S]: the committed text, within the window or among the sinks ...
    is_seen = slot < base[:, None, None]
    if begin is not None:
        is_seen &= (slot >= begin[:, :, None]) | (slot < sinks)
    # ... and behind it the slots of the ancestor mask, indexed from `base`.
    behind = jnp.broadcast_to(slot - base[:, None, None], is_seen.shape)
    size = sees.shape[2]
    is_tree = jnp.take_along_axis(sees, jnp.clip(behind, 0, size - 1), axis=2) & (behind >= 0) & (behind < size)
    mask = jnp.broadcast_to(is_seen, is_tree.shape) | is_tree  # [B, T, S]
    # Zero the slots that no token sees: their weight is 0, but 0 times NaN is NaN.
    values = jnp.where(mask.any(axis=1)[:, None, :, None], values.astype(q.dtype), 0)
    scores = jnp.einsum("BKTGH,BKSH->BKTGS", q, keys.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    # A second `where` after the softmax gives zeros to tokens that see nothing.
    mask = mask[:, None, :, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, _NOTHING), axis=-1), 0)
    return jnp.einsum("BKTGS,BKSH->BKTGH", weights.astype(q.dtype), values)


def _verify_attention_triton(q, keys, values, base, sees, begin, scale, sinks, value_width, interpret):
    """Calls `_run` with the tiles of the platform that the computation is lowered for."""
    caches = (keys,) if values is None else (keys, values)
    run = functools.partial(_run, scale=scale, sinks=sinks, value_width=value_width, interpret=interpret)
    operands = (q, caches, base, sees, begin)
    if interpret:
        return run(*operands, platform="cuda")
    cuda, rocm = (functools.partial(run, platform=platform) for platform in ("cuda", "rocm"))
    return jax.lax.platform_dependent(*operands, rocm=rocm, default=cuda)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Sizes of a program: query rows, and slots per step, both powers of two; and its warps and stages."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int
    halves: bool = False  # a latent's value columns are split between two programs


def _tiles(num_rows: int, width: int, is_latent: bool, itemsize: int, platform: str) -> _Tiles:
    """Chooses the largest tiles that spill no registers, found by compiling for sm_90 and gfx942.

    On sm_90 two or three stages of loads are in flight, 32 KB or more per program. On gfx942 q stays in registers, and
    its 64 KB of shared memory hold one stage. On sm_90 float32 runs without tensor cores: exact, not fast.

    Args:
        num_rows: Query rows per key head, T * G.
        width: Columns of the values.
        is_latent: The values are columns of the keys.
        itemsize: Bytes per element of q.
        platform: "cuda" or "rocm".
    """
    is_cuda = platform == "cuda"
    rows = min(max(16, pl.next_power_of_2(num_rows)), 128)
    if itemsize == 4:
        return _Tiles(16, 16, 8 if is_cuda else 4, 2)
    if not is_latent:
        return _Tiles(rows, 64 if width <= (192 if is_cuda else 128) else 32, max(4, rows // 16), 3 if is_cuda else 2)
    if not is_cuda:
        return _Tiles(min(rows, 32), 16, 4, 2)
    # The float32 outputs of this many rows and columns exceed the registers: split the columns between two programs.
    if rows * width > 2**14 and width % 32 == 0:
        return _Tiles(rows, 32, max(4, rows // 16), 2, halves=True)
    return _Tiles(rows, 32, 8, 3)


def _run(q, caches, base, sees, begin, *, scale, sinks, value_width, interpret, platform):
    """Runs the kernel over [row blocks, splits, K, B] and combines the splits.

    A program attends from a block of a key head's T * G query rows to one of `splits` equal shares of the slots that
    the row sees, so programs of a short row do little work and read nothing else. The row blocks of one share are
    neighbours in the grid: they run at the same time, and all but the first find the share in the L2 cache.
    """
    B, K, T, G, H = q.shape
    S, R = caches[0].shape[2], T * G
    is_latent = len(caches) == 1
    width = value_width if is_latent else caches[1].shape[3]
    tiles = _tiles(R, width, is_latent, q.dtype.itemsize, platform)
    parts = 2 if tiles.halves else 1
    num_blocks = pl.cdiv(R, tiles.rows) * parts
    # Splits: enough programs for the device. A share has at least 256 slots, or 512 with more rows, because each
    # program's sums are written and read again; and at most 4096, so that one long row does not take all the time.
    splits = pl.cdiv(_NUM_PROCESSORS * 8 // tiles.num_warps, B * K * num_blocks)
    splits = max(min(splits, pl.cdiv(S, 256 if tiles.rows == 16 else 512)), pl.cdiv(S, 4096))
    rows, tokens = _tables(base, sees, begin, S)
    # Triton arrays have power-of-two sizes, so columns are cut into pieces: a latent's keys into value columns (in
    # halves if split) and the rest.
    own = width // parts
    value_pieces = _pieces(own)
    key_pieces = _pieces(*range(own, width + 1, own), H) if is_latent else _pieces(H)
    # Widths of blocks, which exceed the array where its last piece is padded; masks cover the excess.
    output_width, *cache_widths = [
        max(begin + padded for begin, _, padded in pieces)
        for pieces in (_pieces(width), key_pieces, *([] if is_latent else [value_pieces]))
    ]
    # Bytes for the cost estimate: the cache once per row block, the partial results, and small operands from L2.
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
    # Combine the shares: each result is an average, and `weight` the base-2 logarithm of its softmax sum. Each half of
    # the columns has its own, because the two programs' sums may differ in the last bit.
    weight = jnp.exp2(weight - weight.max(axis=3, keepdims=True))
    weight = jnp.repeat(jnp.moveaxis(weight, 0, -1), own, axis=-1)
    joined = (weight * output).sum(axis=2) / weight.sum(axis=2)
    return joined.astype(q.dtype).reshape(B, K, T, G, width)


def _tables(base, sees, begin, num_slots) -> tuple[jax.Array, jax.Array]:
    """Packs what rows and tokens see into int32 words for the kernel.

    Bit x of the two mask words says that slot base + x is seen, by the token, or by any token of the row.

    Returns:
        Per row `[B, 4]`: base, first slot that any token sees, two mask words. Per token `[B, T, 3]`: begin, two words.
    """
    B, T, X = sees.shape
    begin = jnp.zeros((B, T), jnp.int32) if begin is None else begin.astype(jnp.int32)
    # Clear slots beyond the capacity here, so that the kernel need not check for them.
    base = jnp.minimum(base, num_slots).astype(jnp.int32)
    sees = sees & (base[:, None] + jnp.arange(X)[None, :] < num_slots)[:, None]
    # Append the row's own mask, the union of its tokens', and pack 32 slots into a word.
    sees = jnp.concatenate([sees, sees.any(axis=1, keepdims=True)], axis=1)
    bits = jnp.pad(sees, ((0, 0), (0, 0), (0, MOST_BEHIND - X))).reshape(B, T + 1, 2, 32)
    words = jnp.left_shift(bits.astype(jnp.int32), jnp.arange(32)[None, None, None, :]).sum(axis=-1)
    rows = jnp.concatenate([base[:, None], begin.min(axis=1, keepdims=True), words[:, T]], axis=1)
    return rows, jnp.concatenate([begin[:, :, None], words[:, :T]], axis=2)


def _pieces(*ends: int) -> list[tuple[int, int, int]]:
    """Cuts the columns up to each end into pieces (begin, width, padded): `padded` is a power of two of 16 or more."""
    pieces, begin = [], 0
    for end in ends:
        while begin < end:
            padded = min(256, max(16, pl.next_power_of_2(end - begin + 1) // 2))
            width = min(padded, end - begin)
            pieces.append((begin, width, padded))
            begin += width
    return pieces


def _mask(row_mask, piece):
    """Combines `row_mask` (None: all rows) with the valid columns of a piece; None if everything is valid."""
    _, width, padded = piece
    masks = [] if row_mask is None else [row_mask[:, None]]
    if width < padded:
        masks.append((jnp.arange(padded) < width)[None, :])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref, rows, row_mask, piece, dtype):
    """Loads rows of one piece of the columns as `dtype`, zero where the mask is false."""
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
    """Attends from a block of query rows to one share of a row's slots; `_tables` describes the first two refs."""
    *cache_refs, output_ref, weight_ref = refs
    # What the row sees, and per query row (token t, head g, numbered t * G + g) what its token sees.
    base, first, *seen = [row_ref[index] for index in range(4)]
    row = pl.program_id(0) // (2 if tiles.halves else 1) * tiles.rows + jnp.arange(tiles.rows)
    is_row = row < num_rows if num_rows % tiles.rows else None
    token = jnp.minimum(row, num_rows - 1) // group
    begin, *sees = [token_ref[token, index] for index in range(3)]
    # With halves, swap the pieces so that this program's half of the value columns comes first. Scores need all pieces
    # in any order; outputs use the first ones. The code adds offsets, because after a remainder (`%`) the compiler
    # cannot prove that loads are wide.
    if tiles.halves:
        half = width // 2
        own = pl.program_id(0) % 2 * half
        turns = [own if begin < half else -own if begin < width else 0 for begin, *_ in key_pieces]
        key_pieces = [(begin + turn, *sizes) for (begin, *sizes), turn in zip(key_pieces, turns, strict=True)]
    # Queries stay in registers or shared memory for the whole loop, in their own dtype.
    q = [_load(q_ref, slice(None), is_row, piece, q_ref.dtype) for piece in key_pieces]
    dot = functools.partial(
        jnp.dot,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None,
    )

    # The row's blocks of slots: those of the sinks, then those from the first slot that a token sees. This program
    # takes an equal share of them.
    far = pl.cdiv(sinks, tiles.slots)
    near = jnp.maximum(first // tiles.slots, far)
    count = far + jnp.maximum(pl.cdiv(jnp.minimum(base + behind, cache_refs[0].shape[0]), tiles.slots) - near, 0)
    share = pl.cdiv(count, splits)
    lower = pl.program_id(1) * share
    upper = jnp.minimum(lower + share, count)

    def is_seen(slot, begin, words):
        """Returns whether slots are seen: committed text inside the window, or by their bit of the mask."""
        place = slot - base
        word = words[0] if behind <= 32 else jnp.where(place < 32, *words)
        bit = jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, place & 31)) & 1
        is_text = place < 0
        if is_windowed:
            is_text &= (slot >= begin) | (slot < sinks)
        return is_text | ((place >= 0) & (place < behind) & (bit == 1))

    def body(index, carry):
        outputs, highest, total = carry
        # Slots of this step: blocks `far` and up continue at the window's first block.
        start = jnp.where(index < far, index, index - far + near) * tiles.slots
        slot = start + jnp.arange(tiles.slots)
        rows = pl.ds(start, tiles.slots)
        # Load only slots that some token of the row sees; the others may hold NaN and become 0.
        is_loaded = is_seen(slot, first, seen)
        mask = is_seen(slot[None, :], begin[:, None], [word[:, None] for word in sees])
        # Scores in float32, base 2: `scale` includes log2(e), because exp2 is one instruction.
        keys = [_load(cache_refs[0], rows, is_loaded, piece, q_ref.dtype) for piece in key_pieces]
        scores = scale * sum(dot(one, key.T) for one, key in zip(q, keys, strict=True))
        # Online softmax: when the highest score rises, older sums fade by the same factor.
        peak = jnp.maximum(highest, jnp.max(jnp.where(mask, scores, _NOTHING), axis=1))
        weights = jnp.where(mask, jnp.exp2(scores - peak[:, None]), 0.0)
        fading = jnp.exp2(highest - peak)
        # A latent's values are the first pieces of its keys, which are loaded already.
        values = keys
        if len(cache_refs) == 2:
            values = [_load(cache_refs[1], rows, is_loaded, piece, q_ref.dtype) for piece in value_pieces]
        outputs = [
            fading[:, None] * output + dot(weights.astype(value.dtype), value)
            for output, value in zip(outputs, values, strict=False)  # a latent has more key pieces than value pieces
        ]
        return outputs, peak, fading * total + jnp.sum(weights, axis=1)

    # Run the share with float32 sums in registers.
    outputs = [jnp.zeros((tiles.rows, padded), jnp.float32) for _, _, padded in value_pieces]
    highest = jnp.full(tiles.rows, _NOTHING, jnp.float32)
    outputs, highest, total = jax.lax.fori_loop(lower, upper, body, (outputs, highest, jnp.zeros_like(highest)))
    # A row that saw nothing gets zeros with the least weight. Store the average and the logarithm of its weight.
    total = jnp.where(total > 0, total, 1.0)
    if len(cache_refs) == 1:
        value_pieces = key_pieces[: len(outputs)]
    for output, piece in zip(outputs, value_pieces, strict=True):
        columns = pl.ds(piece[0], output.shape[1])
        plt.store(output_ref.at[:, columns], output / total[:, None], mask=_mask(is_row, piece))
    plt.store(weight_ref, highest + jnp.log2(total), mask=is_row)
