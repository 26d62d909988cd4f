"""Attention from a few queries per row to a long, ragged KV cache (flash decoding), with a kernel and a reference.

Bottleneck: reading the cache once. In latent attention (MLA), all heads share each slot, so with many heads the
bottleneck is multiplications.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import attention_blocks as blocks
from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import SHARE_SLOTS, is_batch_invariant, map_row_blocks
from pallas_kernels.case import Case, Shape, random_attention, random_keys
from pallas_kernels.combine_shares import MAX_LATENT_ROWS, combine_latents, combine_shares
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform, die_order, num_processors
from pallas_kernels.dispatch import choose
from pallas_kernels.fp8 import is_converted_by_integers
from pallas_kernels.paged import gather_pages

MAX_QUERY_TOKENS = 16  # tokens per row that the kernel supports
MAX_DRAFT_SLOTS = 64  # slots after the committed slots; their ancestor mask fits into two 32-bit words
MIN_PAGE = 16  # minimum positions per page; a block of slots is within one page


def verify_attention(
    q,
    keys,
    values,
    num_committed,
    ancestor_mask,
    window_start=None,
    page_table=None,
    *,
    scale,
    sinks=0,
    value_width=None,
    value_up=None,
    page_shift=0,
    implementation="auto",
) -> jax.Array:
    """Computes softmax attention of T tokens per row against the row's KV cache.

    The committed tokens are in slots 0 .. num_committed - 1. Each token attends to all of them, or with `window_start`
    (a sliding window) to the slots from `window_start` on and the first `sinks` slots. After the committed tokens, it
    attends to the slots that its ancestor mask selects (a lower triangle for a chain, ancestors in a draft tree). A
    token that attends to nothing gets zeros. Slots that no token of the row attends to are not read and may hold NaN.

    Scores and sums are float32. In the kernel, the order of sums and so the last bits depend on B, T and S, which
    determine how many shares the slots are split into. On ROCm, NaN in a visible slot of a float8_e4m3fn cache counts
    as 480 (`pallas_kernels.fp8`).

    Args:
        q: [B, K, T, G, H] floating, with G query heads for each of K key heads.
        keys: [B, K, S, H] of any floating dtype, including fp8; converted to q's dtype.
        values: [B, K, S, Hv], like `keys`; None: the first `value_width` columns of the keys, as in absorbed latent
            attention (DeepSeek-V2, 2405.04434).
        num_committed: [B] int32 number of committed slots.
        ancestor_mask: [B, T, X] bool: token t attends to slot num_committed + x.
        window_start: [B, T] int32 first slot of each token's window, or None for all slots.
        page_table: [B, N] int32 for a paged cache with keys [P, K, size, H] and values [P, K, size, Hv]. With p = s +
            page_shift, slot s of a row is at offset p % size in page `page_table[row, p // size]`. None: the cache is
            contiguous.
        scale: Factor that multiplies the scores.
        sinks: Number of slots at the start that stay visible outside the window.
        value_width: Hv if `values` is None.
        value_up: [G, Hv, V] in q's dtype, one matrix per head that multiplies the head's output, as in absorbed latent
            attention; requires K = 1. For up to 64 tokens in the batch, the kernel applies it while it combines the
            shares. None: no matrix.
        page_shift: Positions before slot 0 in a paged cache.
        implementation: "xla" (the reference), "triton" (the kernel, on CUDA and ROCm), "interpreted" (the kernel in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`. With more than 16 tokens, or
            more than 64 slots after the text, the reference always runs.

    Returns:
        [B, K, T, G, Hv] in q's dtype, or [B, 1, T, G, V] with `value_up`.

    Raises:
        ValueError: The kernel was requested for pages whose size is not a power of two of at least 16, or for a cache
            of 2^31 or more one-byte elements, or a pool of 2^31 or more elements, which exceed its 32-bit offsets.
    """
    B, _, T, G, _ = q.shape
    tail = lambda array: () if array is None else array.shape[-1:]
    others = {
        "num_committed": (num_committed, (B,)),
        "ancestor_mask": (ancestor_mask, (B, T, ancestor_mask.shape[2])),
        "window_start": (window_start, (B, T)),
        "value_up": (value_up, (G, value_width, *tail(value_up))),
        "page_table": (page_table, (B, *tail(page_table))),
    }
    num_entries = B if page_table is None else len(keys)
    blocks.check(q, keys, values, value_width, others, num_entries=num_entries)
    shape = {
        "is_windowed": window_start is not None,
        "pages_per_row": None if page_table is None else page_table.shape[1],
    }
    chosen = choose_implementation(q, keys, ancestor_mask, implementation, **shape)
    operands = (q, keys, values, num_committed, ancestor_mask, window_start, page_table)
    settings = {"scale": scale, "sinks": sinks, "value_width": value_width, "page_shift": page_shift}
    if chosen == "xla" or q.size == 0:
        return verify_attention_reference(*operands, **settings, value_up=value_up)
    # Run the kernel with the tiles for the platform that the computation is lowered for.
    caches, interpret = (keys,) if values is None else (keys, values), chosen == "interpreted"
    run = functools.partial(_run_kernel, **settings, interpret=interpret)
    return call_by_platform(run, q, caches, *operands[3:], value_up, interpret=interpret)


def choose_implementation(
    q, keys, ancestor_mask, implementation: str, *, is_windowed: bool, pages_per_row: int | None = None
) -> str:
    """Returns the implementation that `verify_attention` runs for arrays of these shapes.

    `pages_per_row` is N of `page_table`, or None for a contiguous cache.
    """
    fits_kernel = q.shape[2] <= MAX_QUERY_TOKENS and ancestor_mask.shape[2] <= MAX_DRAFT_SLOTS
    reason = None
    if fits_kernel and keys.dtype.itemsize == 1 and keys.size >= 2**31:
        reason = f"a cache {keys.shape} of {keys.dtype} has 2^31 elements or more: split it"
    size = keys.shape[2]
    if fits_kernel and pages_per_row is not None:
        if size < MIN_PAGE or size & (size - 1):
            reason = f"pages have {size} positions: use a power of two of at least {MIN_PAGE}"
        elif keys.size >= 2**31:
            reason = f"a pool {keys.shape} has 2^31 elements or more: use fewer pages"
    shape = blocks.describe(q, keys, is_windowed=is_windowed)
    shape |= {"slots": size * (pages_per_row or 1), "layout": "rows" if pages_per_row is None else "pages"}
    chosen = choose(
        "verify_attention", implementation, ("xla", "triton"), shape, unsupported_reason=reason, make_case=make_case
    )
    return chosen if fits_kernel else "xla"


def make_case(shape: Shape) -> Case:
    # Count a key head's queries as tokens, up to the kernel's maximum, because the cost depends only on T * G.
    tokens = next(t for t in range(MAX_QUERY_TOKENS, 0, -1) if shape["queries"] % t == 0)
    q, *caches, start, window = random_attention(random_keys(), shape, tokens)
    B, K, T, _, H = q.shape
    mask = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
    run = functools.partial(verify_attention, scale=H**-0.5)
    if shape["layout"] == "rows":
        return run, (q, *caches, start, mask, window)
    # Use pages of the smallest size, in an order that differs from the order of the rows.
    num_pages = shape["slots"] // MIN_PAGE
    pools = [cache.reshape(B, K, num_pages, MIN_PAGE, H).swapaxes(1, 2) for cache in caches]
    pools = [pool.reshape(B * num_pages, K, MIN_PAGE, H) for pool in pools]
    table = jnp.arange(B * num_pages, dtype=jnp.int32)[::-1].reshape(B, num_pages)
    return run, (q, *pools, start, mask, window, table)


def verify_attention_reference(
    q,
    keys,
    values,
    num_committed,
    ancestor_mask,
    window_start=None,
    page_table=None,
    *,
    scale,
    sinks=0,
    value_width=None,
    value_up=None,
    page_shift=0,
):
    """Computes `verify_attention` in plain JAX with all scores at once, which defines its meaning."""
    if page_table is not None:
        keys = gather_pages(keys, page_table, shift=page_shift)
        values = None if values is None else gather_pages(values, page_table, shift=page_shift)
    values = keys[..., :value_width] if values is None else values
    slot = jnp.arange(keys.shape[2])[None, None, :]
    # The mask [B, T, S] selects the committed slots, within the window or among the sinks ...
    is_committed = slot < num_committed[:, None, None]
    if window_start is not None:
        is_committed &= (slot >= window_start[:, :, None]) | (slot < sinks)
    # ... and, after them, the slots of the ancestor mask, which are indexed from `num_committed`.
    draft_slot = jnp.broadcast_to(slot - num_committed[:, None, None], is_committed.shape)
    num_draft_slots = ancestor_mask.shape[2]
    is_draft = (
        jnp.take_along_axis(ancestor_mask, jnp.clip(draft_slot, 0, num_draft_slots - 1), axis=2)
        & (draft_slot >= 0)
        & (draft_slot < num_draft_slots)
    )
    mask = jnp.broadcast_to(is_committed, is_draft.shape) | is_draft  # [B, T, S]
    outputs = blocks.reference(q, keys, values, mask, scale)
    return outputs if value_up is None else jnp.einsum("BKTGR,GRV->BKTGV", outputs, value_up)


def _choose_tiles(num_rows: int, width: int, is_latent: bool, itemsize: int, platform: str) -> blocks.Tiles:
    """Chooses the largest tiles that do not spill registers, which were found by compiling for sm_90 and gfx942.

    On sm_90, two or three stages of loads are in flight, 32 KB or more per program. On gfx942, q stays in registers,
    and the 64 KB of shared memory hold one stage. float32 on sm_90 runs without tensor cores, which is exact but slow.

    Args:
        num_rows: Query rows per key head, T * G.
        width: Columns of the values.
        is_latent: The values are columns of the keys.
        itemsize: Bytes per element of q.
    """
    is_cuda = platform == "cuda"
    rows = min(max(16, pl.next_power_of_2(num_rows)), 128)
    if itemsize == 4:
        return blocks.Tiles(16, 16, 8 if is_cuda else 4, 2)
    if not is_latent:
        return blocks.Tiles(
            rows, 64 if width <= (192 if is_cuda else 128) else 32, max(4, rows // 16), 3 if is_cuda else 2
        )
    if not is_cuda:
        return blocks.Tiles(min(rows, 32), 16, 4, 2)
    # The float32 outputs of this many rows and columns exceed the registers, so split the columns over two programs.
    if rows * width > 2**14 and width % 32 == 0:
        return blocks.Tiles(rows, 32, max(4, rows // 16), 2, is_column_split=True)
    return blocks.Tiles(rows, 32, 8, 3)


def _run_kernel(
    q,
    caches,
    num_committed,
    ancestor_mask,
    window_start,
    page_table,
    value_up,
    *,
    scale,
    sinks,
    value_width,
    page_shift,
    interpret,
    platform,
):
    """Runs the kernel over [row blocks, splits, K, B] and combines the splits.

    A program processes a block of a key head's T * G query rows, for one of `num_splits` equal shares of the slots that
    the row attends to. Programs for a short row therefore do little work and read no other slots. The row blocks of one
    share are neighbours in the grid, so they run at the same time, and all but the first find the share in L2.
    """
    B, K, T, G, H = q.shape
    S, R = caches[0].shape[2], T * G
    page_size = S
    if page_table is not None:
        # From here on, slots are positions. The first `page_shift` positions are outside all windows and are not sinks.
        S *= page_table.shape[1]
        num_committed = num_committed + page_shift
        window_start = None if window_start is None else window_start + page_shift
    is_latent = len(caches) == 1
    width = value_width if is_latent else caches[1].shape[3]
    # Inside `batch_invariant`, a tile has the rows of one token, so that it does not depend on the depth of drafts.
    is_invariant = is_batch_invariant()
    tiles = _choose_tiles(G if is_invariant else R, width, is_latent, q.dtype.itemsize, platform)
    if page_table is not None:
        tiles = dataclasses.replace(tiles, slots=min(tiles.slots, page_size))
    num_parts = 2 if tiles.is_column_split else 1
    num_row_blocks = pl.cdiv(R, tiles.rows) * num_parts
    # Make enough splits to fill the processors, which can each hold at least eight warps of these kernels. A share has
    # at least 256 slots, or 512 with more rows, because each program's sums are written and read again. It has at most
    # 4096 slots, so that one long row does not dominate the time.
    num_splits = pl.cdiv(num_processors() * 8 // tiles.num_warps, B * K * num_row_blocks)
    num_splits = max(min(num_splits, pl.cdiv(S, 256 if tiles.rows == 16 else 512)), pl.cdiv(S, 4096))
    num_splits = pl.cdiv(S, SHARE_SLOTS) if is_invariant else num_splits
    # On ROCm, if a share has several programs, they run on one die.
    grid = (num_row_blocks, num_splits, K, B)
    has_shared_slots = platform == "rocm" and num_row_blocks > 1
    place = functools.partial(die_order, grid=grid, is_reordered=has_shared_slots)
    placed = lambda index_map: lambda *ids: index_map(*place(*ids))
    row_table, token_table = _pack_masks(num_committed, ancestor_mask, window_start, S)
    # Triton arrays have power-of-two sizes, so columns are cut into slices. A latent's keys are cut into its value
    # columns (in `num_parts` parts) and the rest.
    columns_per_part = width // num_parts
    value_slices = blocks.column_slices(columns_per_part)
    key_ends = range(columns_per_part, width + 1, columns_per_part) if is_latent else ()
    key_slices = blocks.column_slices(*key_ends, H)
    # A block is wider than the array if the array's last slice is padded; masks cover the excess.
    output_width, *cache_widths = [
        max(start + padded for start, _, padded in slices)
        for slices in (blocks.column_slices(width), key_slices, *([] if is_latent else [value_slices]))
    ]
    # The cost estimate counts the cache once per row block, the partial results, and small operands from L2.
    bytes_moved = num_row_blocks * B * S * sum(cache.nbytes // (cache.shape[0] * cache.shape[2]) for cache in caches)
    bytes_moved += 4 * B * K * num_splits * R * (width + num_parts)
    repeated_loads = (
        (row_table.nbytes, num_splits * num_row_blocks * K),
        (token_table.nbytes, num_splits * num_parts * K),
        (q.nbytes, num_splits * num_parts),
    )
    bytes_moved += sum(nbytes * times for nbytes, times in repeated_loads)
    if page_table is not None:
        bytes_moved += 4 * num_row_blocks * K * B * pl.cdiv(S, tiles.slots)  # a page for each block of slots
    # A program gets its row of a contiguous cache, or the whole pool and its row of the page table.
    tables = [] if page_table is None else [page_table]
    cache_specs = [
        pl.BlockSpec(
            (None if page_table is None else caches[0].shape[0], None, page_size, size),
            placed(lambda i, z, k, b: (b if page_table is None else 0, k, 0, 0)),
        )
        for size in cache_widths
    ]
    is_integer_fp8 = is_converted_by_integers(caches[0].dtype, platform)
    outputs, log_sums = pl.pallas_call(
        functools.partial(
            _verify_attention_kernel,
            program=blocks.Program(tiles, key_slices, value_slices, scale, is_integer_fp8),
            group_size=G,
            num_rows=R,
            num_splits=num_splits,
            is_invariant=is_invariant,
            is_windowed=window_start is not None,
            sinks=sinks + page_shift if sinks else 0,
            num_draft_slots=ancestor_mask.shape[2],
            width=width,
            place=place,
            num_slots=S,
            is_paged=page_table is not None,
            page_shift=page_shift,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, num_splits, R, width), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, B, K, num_splits, R), jnp.float32),
        ],
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, *row_table.shape[1:]), placed(lambda i, z, k, b: (b, 0))),
            pl.BlockSpec((None, *token_table.shape[1:]), placed(lambda i, z, k, b: (b, 0, 0))),
            pl.BlockSpec(
                (None, None, tiles.rows, cache_widths[0]), placed(lambda i, z, k, b: (b, k, i // num_parts, 0))
            ),
            *(pl.BlockSpec((None, table.shape[1]), placed(lambda i, z, k, b: (b, 0))) for table in tables),
            *cache_specs,
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, tiles.rows, output_width), placed(lambda i, z, k, b: (b, k, z, i // num_parts, 0))
            ),
            pl.BlockSpec(
                (None, None, None, None, tiles.rows),
                placed(lambda i, z, k, b: (i % num_parts, b, k, z, i // num_parts)),
            ),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * K * R * S * (num_parts * H + width),
            transcendentals=B * K * R * S * num_parts,
            bytes_accessed=bytes_moved,
        ),
        metadata=loads_from_l2(*repeated_loads),
        interpret=interpret,
        name=f"verify_attention_{platform}",
    )(row_table, token_table, q.reshape(B, K, R, H), *tables, *caches)
    # Combine the shares. The kernel writes tokens before heads, as the caller's next product reads them, so that XLA
    # cancels this transposition against the caller's.
    outputs = outputs.reshape(B, K, num_splits, T, G, width)
    if value_up is not None and B * T <= MAX_LATENT_ROWS and not is_invariant:
        combined = combine_latents(outputs, log_sums, value_up, dtype=q.dtype, interpret=interpret)
        return combined[:, None]
    combined = combine_shares(outputs, log_sums, dtype=q.dtype, interpret=interpret).swapaxes(1, 2)
    return combined if value_up is None else project_values(combined, value_up)


def project_values(outputs, value_up) -> jax.Array:
    """Multiplies latent attention's outputs [B, 1, T, G, R] by head matrices [G, R, V]; returns [B, 1, T, G, V]."""
    rows = outputs.reshape(-1, *outputs.shape[3:])
    product = map_row_blocks(lambda rows: jnp.einsum("nGR,GRV->nGV", rows, value_up), rows)
    return product.reshape(*outputs.shape[:4], -1)


def _pack_masks(num_committed, ancestor_mask, window_start, num_slots) -> tuple[jax.Array, jax.Array]:
    """Packs the ancestor masks of rows and tokens into int32 words for the kernel.

    Bit x of the two mask words is set if slot num_committed + x is visible to the token, or to any token of the row.

    Returns:
        A row table `[B, 4]` with num_committed, the first slot of any token's window and two mask words, and a token
        table `[B, T, 3]` with window_start and two mask words.
    """
    B, T, X = ancestor_mask.shape
    window_start = jnp.zeros((B, T), jnp.int32) if window_start is None else window_start.astype(jnp.int32)
    # Clear slots beyond the capacity here, so that the kernel need not check for them.
    num_committed = jnp.minimum(num_committed, num_slots).astype(jnp.int32)
    ancestor_mask = ancestor_mask & (num_committed[:, None] + jnp.arange(X)[None, :] < num_slots)[:, None]
    # Append the row's own mask, which is the union of its tokens' masks, and pack 32 slots into a word.
    ancestor_mask = jnp.concatenate([ancestor_mask, ancestor_mask.any(axis=1, keepdims=True)], axis=1)
    bits = jnp.pad(ancestor_mask, ((0, 0), (0, 0), (0, MAX_DRAFT_SLOTS - X))).reshape(B, T + 1, 2, 32)
    words = jnp.left_shift(bits.astype(jnp.int32), jnp.arange(32)[None, None, None, :]).sum(axis=-1)
    row_table = jnp.concatenate([num_committed[:, None], window_start.min(axis=1, keepdims=True), words[:, T]], axis=1)
    return row_table, jnp.concatenate([window_start[:, :, None], words[:, :T]], axis=2)


def _verify_attention_kernel(
    row_ref,
    token_ref,
    q_ref,
    *refs,
    program,
    group_size,
    num_rows,
    num_splits,
    is_invariant,
    is_windowed,
    sinks,
    num_draft_slots,
    width,
    place,
    num_slots,
    is_paged,
    page_shift,
):
    """Attends from a block of query rows to one share of a row's slots; `_pack_masks` describes the first two refs."""
    *cache_refs, output_ref, log_sum_ref = refs
    tiles, key_slices, value_slices = program.tiles, program.key_slices, program.value_slices
    table_ref = cache_refs.pop(0) if is_paged else None
    # Read the row's table and, for each query row (t * G + g for token t and head g), its token's table.
    num_committed, first_visible, *row_words = [row_ref[index] for index in range(4)]
    block, split, *_ = place(*(pl.program_id(axis) for axis in range(4)))
    row = block // (2 if tiles.is_column_split else 1) * tiles.rows + jnp.arange(tiles.rows)
    is_row = row < num_rows if num_rows % tiles.rows else None
    token = jnp.minimum(row, num_rows - 1) // group_size
    window_start, *token_words = [token_ref[token, index] for index in range(3)]
    # If the columns are split, swap the slices so that this program's half of the value columns comes first. Scores
    # need all slices, in any order; outputs use the first slices. The code adds offsets, because after a remainder
    # (`%`) the compiler cannot prove that loads are wide.
    if tiles.is_column_split:
        half = width // 2
        own_half = block % 2 * half
        offsets = [own_half if start < half else -own_half if start < width else 0 for start, *_ in key_slices]
        key_slices = [(start + offset, *sizes) for (start, *sizes), offset in zip(key_slices, offsets, strict=True)]
    # Queries stay in registers or shared memory for the whole loop, in their own dtype.
    q = [blocks.load_slice(q_ref, slice(None), is_row, part, q_ref.dtype) for part in key_slices]

    # The row's blocks of slots are the sinks' blocks, then the blocks from the first slot that a token attends to. This
    # program processes an equal share of them.
    num_sink_blocks = pl.cdiv(sinks, tiles.slots)
    first_window_block = jnp.maximum(first_visible // tiles.slots, num_sink_blocks)
    end_slot = jnp.minimum(num_committed + num_draft_slots, num_slots)
    num_blocks = num_sink_blocks + jnp.maximum(pl.cdiv(end_slot, tiles.slots) - first_window_block, 0)
    if is_invariant:
        # A share is a fixed range of slots. The block count excludes the blocks between sinks and window.
        def count_blocks(slot):
            before = slot // tiles.slots
            return jnp.minimum(before, num_sink_blocks) + jnp.maximum(before - first_window_block, 0)

        begin_block = count_blocks(split * SHARE_SLOTS)
        end_block = jnp.minimum(count_blocks((split + 1) * SHARE_SLOTS), num_blocks)
    else:
        blocks_per_split = pl.cdiv(num_blocks, num_splits)
        begin_block = split * blocks_per_split
        end_block = jnp.minimum(begin_block + blocks_per_split, num_blocks)

    def is_visible(slot, window_start, words):
        """Returns whether slots are visible, that is, committed and inside the window, or set in the mask."""
        draft_slot = slot - num_committed
        word = words[0] if num_draft_slots <= 32 else jnp.where(draft_slot < 32, *words)
        bit = jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, draft_slot & 31)) & 1
        is_committed = draft_slot < 0
        if is_windowed:
            is_committed &= (slot >= window_start) | (slot < sinks)
        if page_shift:
            is_committed &= slot >= page_shift
        return is_committed | ((draft_slot >= 0) & (draft_slot < num_draft_slots) & (bit == 1))

    def find_slots(index):
        # After the sinks' blocks, continue at the window's first block.
        start = jnp.where(index < num_sink_blocks, index, index - num_sink_blocks + first_window_block) * tiles.slots
        slot = start + jnp.arange(tiles.slots)
        # Load only slots that some token of the row attends to.
        is_loaded = is_visible(slot, first_visible, row_words)
        mask = is_visible(slot[None, :], window_start[:, None], [word[:, None] for word in token_words])
        slots = pl.ds(start, tiles.slots)
        if table_ref is not None:
            # The block is within one page. Pages outside the row's table are not loaded.
            num_pages, page_size, _ = cache_refs[0].shape
            page = jnp.minimum(table_ref[start // page_size], num_pages - 1)
            slots = page, pl.ds(start % page_size, tiles.slots)
        return slots, is_loaded, mask

    program = dataclasses.replace(program, key_slices=key_slices)
    outputs, highest, total = blocks.attend_blocks([(begin_block, end_block, find_slots)], q, cache_refs, program)
    # Store the average over this share and the logarithm of its weight.
    if len(cache_refs) == 1:
        value_slices = key_slices[: len(outputs)]
    for output, column_slice in zip(outputs, value_slices, strict=True):
        columns = pl.ds(column_slice[0], output.shape[1])
        plt.store(output_ref.at[:, columns], output / total[:, None], mask=blocks.slice_mask(is_row, column_slice))
    plt.store(log_sum_ref, highest + jnp.log2(total), mask=is_row)
