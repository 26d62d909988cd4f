"""Four plain JAX forms of `grouped_matmul`.

`grouped_matmul_reference` defines the meaning of the others and of the kernels.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dequantise import dequantise
from pallas_kernels.row_product import row_times_matrix


def grouped_matmul_reference(x, ids, weights, gate_up, down):
    """Runs every token through every expert and combines by weight, which defines the meaning."""
    E = gate_up.shape[0]
    combine = _combine_weights(ids, weights, E).astype(x.dtype)
    # Repeat x, so that each product is one batched matmul over E, which a GPU computes without a copy. Otherwise, XLA
    # would first transpose the stacks.
    outputs = jax.vmap(_swiglu)(jnp.broadcast_to(x, (E, *x.shape)), gate_up, down)
    return jnp.einsum("En,EnD->nD", combine, outputs)


def grouped_matmul_by_expert(x, ids, weights, gate_up, down, gate_up_scales=None, down_scales=None, block=128):
    """Runs all tokens through each active expert, and reads only the weights of active experts.

    fp8 experts are dequantised one at a time, so at most one is held in x's dtype.

    XLA first copies each expert out of its stack; on a CPU, the copy stays in cache. A conditional per expert or a loop
    over slices would also copy, and gathering the weights `gate_up[ids]` would move even more data. Code size and
    compile time do not depend on the number of experts. Not differentiable in reverse mode, because the number of loop
    steps is dynamic.
    """
    combine = _combine_weights(ids, weights, gate_up.shape[0]).astype(x.dtype)
    # Sort the active experts to the front, so that the loop runs only over them.
    is_active = jax.nn.one_hot(ids, gate_up.shape[0], dtype=jnp.int32).sum(axis=(0, 1)) > 0
    active_first = jnp.argsort(~is_active, stable=True)

    def add_expert(index, total):
        expert = active_first[index]
        gate_up_matrix = _read_expert(gate_up, gate_up_scales, expert, block, x.dtype)
        down_matrix = _read_expert(down, down_scales, expert, block, x.dtype)
        return total + combine[expert][:, None] * _swiglu(x, gate_up_matrix, down_matrix)

    return jax.lax.fori_loop(0, is_active.sum(), add_expert, jnp.zeros_like(x))


def grouped_matmul_by_pair(x, ids, weights, gate_up, down, gate_up_scales=None, down_scales=None, block=128):
    """Runs each (token, expert) pair separately, in a loop of static length, for few tokens on a GPU.

    On a GPU, a loop whose length depends on data returns to the host after every step, and `grouped_matmul_by_expert`
    moves three times an expert's bytes, because it copies the expert. `row_times_matrix` reads weights once, as they
    are stored. Pairs that chose the same expert read it again. Sums are float32.
    """
    E = gate_up.shape[0]
    k = ids.shape[1]
    flat_ids, flat_weights = ids.reshape(-1), weights.reshape(-1).astype(jnp.float32)

    def add_pair(pair, total):
        token, expert = pair // k, jnp.minimum(flat_ids[pair], E - 1)
        gate_up_matrix = _read_expert(gate_up, gate_up_scales, expert, block, jnp.float32)
        products = row_times_matrix(x[token], gate_up_matrix.reshape(x.shape[1], -1))
        gate, up = jnp.split(products.astype(x.dtype), 2)
        hidden = jax.lax.optimization_barrier(jax.nn.silu(gate) * up)
        output = row_times_matrix(hidden, _read_expert(down, down_scales, expert, block, jnp.float32))
        # A pair without an expert runs through the last expert with weight 0.
        return total.at[token].add(jnp.where(flat_ids[pair] < E, flat_weights[pair] * output, 0.0))

    zeros = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.fori_loop(0, ids.size, add_pair, zeros).astype(x.dtype)


def _read_expert(stack, scales, expert, block, dtype):
    """Returns one expert's matrix in `dtype`, dequantised if the stack has scales."""
    if scales is None:
        return stack[expert].astype(dtype)
    return dequantise(stack[expert], scales[expert], block, axis=0).astype(dtype)


def blocks_of_rows(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """Returns the rows per block of `grouped_matmul_many_tokens`, and the maximum number of blocks.

    Args:
        num_pairs: pairs of a token and an expert.
        num_experts: E.
    """
    # A block holds at most the mean number of rows per expert, so that little padding is multiplied. Each block has a
    # copy of its expert's weights, so with many rows about a quarter of the mean bounds the copies to 7 per expert.
    mean = num_pairs // num_experts
    block = max(8, min(64, mean), mean // 4 // 32 * 32)
    return block, num_pairs // block + num_experts


def grouped_matmul_many_tokens(x, ids, weights, gate_up, down):
    """Sorts rows by expert, pads each expert's rows to blocks, and computes one product per block; drops no token.

    Differentiable. Shapes are static, because there are at most `n k / block + E` blocks for any choice of experts.
    """
    n, k = ids.shape
    E = gate_up.shape[0]
    block, num_blocks = blocks_of_rows(n * k, E)
    # Sort the pairs (token, choice) by expert. Each expert's rows start at a multiple of the block.
    flat_ids = ids.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    pair_expert = flat_ids[order]
    counts = jnp.bincount(flat_ids, length=E)  # drops ids of E or more
    ends = jnp.cumsum(-(-counts // block) * block)
    expert_starts = jnp.pad(ends, (1, 0))[:E]
    # The slot of each sorted pair is the expert's first slot plus the pair's rank within the expert. Pairs without an
    # expert get a slot beyond the end, which the scatters drop.
    rank = jnp.arange(n * k) - (jnp.cumsum(counts) - counts)[jnp.minimum(pair_expert, E - 1)]
    slot = jnp.where(pair_expert < E, expert_starts[jnp.minimum(pair_expert, E - 1)] + rank, num_blocks * block)
    # Find the token of each slot (n, a zero row, for padding) and the expert of each block.
    token = jnp.full(num_blocks * block, n).at[slot].set(order // k, mode="drop")
    expert_of_block = jnp.searchsorted(ends, jnp.arange(num_blocks) * block, side="right", method="compare_all").clip(
        max=E - 1
    )
    # Compute one batched product per block, then add each row to its token with the router's weight.
    rows = jnp.pad(x, ((0, 1), (0, 0)))[token].reshape(num_blocks, block, -1)
    outputs = jax.vmap(_swiglu)(rows, gate_up[expert_of_block], down[expert_of_block]).reshape(num_blocks * block, -1)
    weight = weights.reshape(-1)[order].astype(x.dtype)
    weight = jnp.zeros(num_blocks * block, x.dtype).at[slot].set(weight, mode="drop")
    return jnp.zeros_like(x).at[token].add(outputs * weight[:, None], mode="drop")


def _combine_weights(ids, weights, num_experts):
    """Returns the weight of each expert for each token, `[E, n]`."""
    return jnp.einsum("nkE,nk->En", jax.nn.one_hot(ids, num_experts, dtype=weights.dtype), weights)


def _swiglu(x, gate_up, down):
    """Runs x [n, D] through one expert, gate_up [D, 2, F] and down [F, D]; gate and up are one product."""
    gate, up = jnp.split(x @ gate_up.reshape(x.shape[-1], -1), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down
