"""Attention from many new tokens per row to the KV cache, without scores in memory (flash attention).

Bottleneck: multiplications. A program keeps a block of queries and iterates over the slots that they attend to, so the
scores `[B, heads, T, S]`, which XLA writes and reads several times, never leave the processor (FlashAttention-2,
2307.08691).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import attention_blocks as blocks
from pallas_kernels.backend import triton as plt
from pallas_kernels.case import Case, Shape, random_attention, random_keys
from pallas_kernels.cost import loads_from_l2
from pallas_kernels.device import call_by_platform
from pallas_kernels.dispatch import choose
from pallas_kernels.fp8 import is_converted_by_integers


def prefill_attention(
    q, keys, values, start, window_start=None, mask=None, *, scale, sinks=0, value_width=None, implementation="auto"
) -> jax.Array:
    """Computes causal softmax attention of T new tokens per row against the row's KV cache.

    The tokens are in slots start .. start + T - 1, and token t attends to the slots up to start + t. With
    `window_start` it attends only to slots from `window_start` on and to the first `sinks` slots; with `mask`, only to
    slots where the mask is true. A token that attends to nothing gets zeros. Slots after the row's tokens are not read
    and may hold NaN. Scores and sums are float32. Not differentiable, because it is meant for passes with a cache.

    Args:
        q: [B, K, T, G, H] floating, with G query heads for each of K key heads.
        keys: [B, K, S, H] of any floating dtype, including fp8; converted to q's dtype.
        values: [B, K, S, Hv], like `keys`; None: the first `value_width` columns of the keys, as in absorbed latent
            attention (DeepSeek-V2, 2405.04434).
        start: [B] int32 slot of each row's first token.
        window_start: [B, T] int32 first slot of each token's window, increasing with t, or None for all slots.
        mask: [B, T, S] bool, such as the selection of a sparse indexer, or None.
        scale: Factor that multiplies the scores.
        sinks: Number of slots at the start that stay visible outside the window.
        value_width: Hv if `values` is None.

    Returns:
        [B, K, T, G, Hv] in q's dtype.

    Raises:
        ValueError: The kernel was requested for a cache of 2^31 or more one-byte elements, which exceed its 32-bit
            offsets.
    """
    B, _, T, _, _ = q.shape
    others = {"start": (start, (B,)), "window_start": (window_start, (B, T)), "mask": (mask, (B, T, keys.shape[2]))}
    blocks.check(q, keys, values, value_width, others, num_entries=B)
    chosen = choose_implementation(q, keys, implementation, is_windowed=window_start is not None)
    operands = (q, keys, values, start, window_start, mask)
    settings: dict[str, Any] = {"scale": scale, "sinks": sinks, "value_width": value_width}
    if chosen == "xla" or q.size == 0:
        return prefill_attention_reference(*operands, **settings)
    interpret = chosen == "interpreted"
    run = functools.partial(_run_kernel, **settings, interpret=interpret)
    return call_by_platform(run, *operands, interpret=interpret)


def choose_implementation(q, keys, implementation: str, *, is_windowed: bool) -> str:
    """Returns the implementation that `prefill_attention` runs for arrays of these shapes."""
    reason = None
    if keys.dtype.itemsize == 1 and keys.size >= 2**31:
        reason = f"a cache {keys.shape} of {keys.dtype} has 2^31 elements or more: split it"
    offered, shape = ("xla", "triton"), blocks.describe(q, keys, is_windowed=is_windowed)
    return choose("prefill_attention", implementation, offered, shape, unsupported_reason=reason, make_case=make_case)


def make_case(shape: Shape) -> Case:
    q, *caches, start, window = random_attention(random_keys(), shape, shape["queries"])
    return functools.partial(prefill_attention, scale=shape["width"] ** -0.5), (q, *caches, start, window)


def prefill_attention_reference(
    q, keys, values, start, window_start=None, mask=None, *, scale, sinks=0, value_width=None
):
    """Computes `prefill_attention` in plain JAX with all scores at once, which defines its meaning."""
    T, S = q.shape[2], keys.shape[2]
    values = keys[..., :value_width] if values is None else values
    slot = jnp.arange(S)[None, None, :]
    is_visible = slot <= (start[:, None] + jnp.arange(T)[None, :])[:, :, None]
    if window_start is not None:
        is_visible &= (slot >= window_start[:, :, None]) | (slot < sinks)
    if mask is not None:
        is_visible &= mask
    return blocks.reference(q, keys, values, is_visible, scale)


def _choose_tiles(width: int, is_latent: bool, itemsize: int, platform: str) -> blocks.Tiles:
    """Chooses the largest tiles that do not spill registers, which were found by compiling for sm_90 and gfx942."""
    is_cuda = platform == "cuda"
    if itemsize == 4:
        return blocks.Tiles(16, 16, 4, 2)
    if is_latent:
        return blocks.Tiles(32, 32 if is_cuda else 16, 8 if is_cuda else 4, 2)
    if width <= 128:
        return blocks.Tiles(64, 64 if is_cuda else 32, 4, 2)
    return blocks.Tiles(64 if is_cuda else 32, 32 if is_cuda else 16, 4, 2)


def _run_kernel(
    q, keys, values, start, window_start, mask, *, scale, sinks, value_width, interpret, platform
) -> jax.Array:
    """Runs the kernel over [row blocks, K, B]; blocks of late queries, which attend to the most slots, start first."""
    B, K, T, G, H = q.shape
    S, R = keys.shape[2], T * G
    is_latent = values is None
    width = value_width if is_latent else values.shape[3]
    tiles = _choose_tiles(width, is_latent, q.dtype.itemsize, platform)
    # Triton arrays have power-of-two sizes, so columns are cut into slices. A latent's keys are cut into value columns
    # and the rest.
    value_slices = blocks.column_slices(width)
    key_slices = blocks.column_slices(*((width,) if is_latent else ()), H)
    num_blocks = pl.cdiv(R, tiles.rows)
    # A block is wider than the array if the array's last slice is padded; masks cover the excess.
    output_width, *cache_widths = [
        max(begin + padded for begin, _, padded in slices)
        for slices in (value_slices, key_slices, *([] if is_latent else [value_slices]))
    ]
    # Late queries attend to the most slots, so their blocks start first and the short ones run last.
    block_of = lambda i: num_blocks - 1 - i
    caches = [keys] if is_latent else [keys, values]
    # The windows and the mask (as bytes) are optional inputs.
    options = [] if window_start is None else [window_start.astype(jnp.int32)]
    options += [] if mask is None else [mask.astype(jnp.int8)]
    is_integer_fp8 = is_converted_by_integers(keys.dtype, platform)
    output = pl.pallas_call(
        functools.partial(
            _prefill_attention_kernel,
            program=blocks.Program(tiles, key_slices, value_slices, scale, is_integer_fp8),
            group_size=G,
            num_rows=R,
            has_window=window_start is not None,
            has_mask=mask is not None,
            sinks=sinks,
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, R, width), q.dtype),
        grid=(num_blocks, K, B),
        in_specs=[
            *(pl.BlockSpec(one.shape, lambda i, k, b, n=one.ndim: (0,) * n) for one in (start, *options)),
            pl.BlockSpec((None, None, tiles.rows, cache_widths[0]), lambda i, k, b: (b, k, block_of(i), 0)),
            *(pl.BlockSpec((None, None, S, size), lambda i, k, b: (b, k, 0, 0)) for size in cache_widths),
        ],
        out_specs=pl.BlockSpec((None, None, tiles.rows, output_width), lambda i, k, b: (b, k, block_of(i), 0)),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * K * R * S * (H + width),
            transcendentals=B * K * R * S,
            bytes_accessed=q.nbytes
            + num_blocks * sum(cache.nbytes for cache in caches)
            + B * K * R * width * q.dtype.itemsize
            + sum(option.nbytes * K * G for option in options),
        ),
        metadata=loads_from_l2(*((option.nbytes, K * G) for option in options)),
        interpret=interpret,
        name=f"prefill_attention_{platform}",
    )(start.astype(jnp.int32), *options, q.reshape(B, K, R, H), *caches)
    return output.reshape(B, K, T, G, width)


def _prefill_attention_kernel(start_ref, *refs, program, group_size, num_rows, has_window, has_mask, sinks):
    """Attends from one block of query rows (row t * G + g for token t and head g) to all their visible slots."""
    refs, tiles = list(refs), program.tiles
    window_ref = refs.pop(0) if has_window else None
    mask_ref = refs.pop(0) if has_mask else None
    q_ref, *cache_refs, output_ref = refs
    block, batch = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(2)
    num_slots = int(cache_refs[0].shape[0])
    row = block * tiles.rows + jnp.arange(tiles.rows)
    is_row = row < num_rows
    token = jnp.minimum(row, num_rows - 1) // group_size
    start = plt.load(start_ref.at[batch])
    last_slot = start + token  # of each query row
    # Load the queries once, in their own dtype.
    q = [blocks.load_slice(q_ref, slice(None), is_row, part, q_ref.dtype) for part in program.key_slices]

    # Find the blocks of slots that at least one query attends to, which are the sinks' blocks, then the blocks from the
    # first window to the last query.
    end_slot = jnp.minimum(jnp.max(last_slot, axis=0) + 1, num_slots)
    window_start = None
    num_sink_blocks, first_block = 0, 0
    if window_ref is not None:
        window_start = plt.load(window_ref.at[batch, token])
        first_visible = jnp.min(window_start, axis=0)
        num_sink_blocks = pl.cdiv(sinks, tiles.slots)
        first_block = jnp.maximum(first_visible // tiles.slots, num_sink_blocks)
    num_blocks = num_sink_blocks + jnp.maximum(pl.cdiv(end_slot, tiles.slots) - first_block, 0)

    def find_slots(index):
        # After the sinks' blocks, continue at the first block of the window.
        begin = index * tiles.slots
        if window_ref is not None:
            begin = jnp.where(index < num_sink_blocks, index, index - num_sink_blocks + first_block) * tiles.slots
        slot = begin + jnp.arange(tiles.slots)
        # Load only slots that hold tokens.
        is_loaded = slot < end_slot
        is_visible = (slot[None, :] <= last_slot[:, None]) & is_loaded[None, :]
        if window_start is not None:
            is_visible &= (slot[None, :] >= window_start[:, None]) | (slot[None, :] < sinks)
        if mask_ref is not None:
            where = jnp.broadcast_arrays(token[:, None], slot[None, :])
            is_visible &= plt.load(mask_ref.at[batch, *where], mask=is_visible, other=0) != 0
        return pl.ds(begin, tiles.slots), is_loaded, is_visible

    passes = [(jnp.int32(0), num_blocks.astype(jnp.int32), find_slots)]
    outputs, _, total = blocks.attend_blocks(passes, q, cache_refs, program)
    # Divide by the sums of the weights, and store without padded rows and columns.
    for output, part in zip(outputs, program.value_slices, strict=True):
        target = output_ref.at[:, pl.ds(part[0], output.shape[1])]
        plt.store(target, (output / total[:, None]).astype(output_ref.dtype), mask=blocks.slice_mask(is_row, part))
