"""A mixture of SwiGLU experts: each token through the experts that its router chose. Kernels: `grouped_products.py`.

Limit: for few tokens, the bytes of the chosen experts' weights, each read once; for many tokens, multiplications. The
kernels read no weight of an expert that no token chose. XLA's `ragged_dot` and dense products read all experts.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dequantise import dequantise
from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_products import ROWS, outer, product, route_few, route_many

# Plain JAX passes up to this many tokens through every active expert: reading the weights costs more than multiplying
# rows that an expert was not chosen for. Measured on a CPU.
FEW_TOKENS = 128
# The kernels use `route_few` up to this many tokens. With more, each program's scan of all ids costs too much.
FEW_TOKENS_OF_KERNEL = 64


def grouped_matmul(
    x,
    ids,
    weights,
    gate_up,
    down,
    *,
    gate_up_scales=None,
    down_scales=None,
    block=128,
    inference=False,
    implementation="auto",
) -> jax.Array:
    """Runs each token through its chosen experts and sums their weighted outputs.

    `y[t] = sum_j weights[t, j] * ((silu(x[t] Wg) * (x[t] Wu)) Wd)` with the weights of expert `ids[t, j]`.

    fp8 stacks follow DeepSeek-V3 (2412.19437, section 3.3.2), with the scales of its 128 x 128 blocks repeated along
    the outputs. The kernels read them as fp8; "xla" dequantises first. In the kernels sums are float32, and a row's
    bits do not depend on other rows while there are at most 64. The kernels are differentiable in reverse mode, except
    for fp8.

    Args:
        x: [n, D] float32 or bfloat16; "xla" takes any floating dtype.
        ids: [n, k] integer expert ids. An id of E or more selects no expert.
        weights: [n, k] floating, the router's weights.
        gate_up: [E, D, 2, F] in x's dtype, or float8_e4m3fn.
        down: [E, F, D] in the dtype of `gate_up`.
        gate_up_scales: [E, ceil(D / block), 2, F] float32 for fp8, else None.
        down_scales: [E, ceil(F / block), D] float32 for fp8, else None.
        block: Number of neighbouring inputs that share a scale.
        inference: Promises that no gradient is taken, so "xla" may use a loop without a reverse mode.
        implementation: "xla" (plain JAX), "triton" (the kernels, on CUDA and ROCm), "interpreted" (the kernels in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`.

    Returns:
        [n, D] in x's dtype.

    Raises:
        ValueError: The implementation is unknown, shapes or dtypes do not fit, a gradient of fp8 kernels was requested,
            or the kernels were requested for another dtype of x, or for fp8 with odd D or F or a block that is not a
            multiple of 16.
    """
    _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block)
    E, D, _, F = gate_up.shape
    n, k = ids.shape
    # The kernels' limits: dtypes with a tensor-core form here, and for fp8 pairs of columns and tiles within a block.
    unfit = None
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        unfit = f"the kernels take float32 and bfloat16, not {x.dtype}"
    elif gate_up_scales is not None and (D % 2 or F % 2 or block % ROWS):
        unfit = f"fp8 experts of an odd width ({D} or {F}) or in blocks of {block}, not a multiple of {ROWS}"
    shape = {"tokens": n, "chosen": k, "experts": E, "width": D, "expert_width": F}
    shape |= {"dtype": str(x.dtype), "weights": str(down.dtype), "use": "inference" if inference else "training"}
    chosen = choose("grouped_matmul", implementation, ("xla", "triton"), shape, unfit=unfit)
    ids = ids.astype(jnp.int32)
    if chosen == "xla" or 0 in (n, k, E):
        # Plain JAX: dequantise the stacks, then choose the form by the number of tokens.
        if gate_up_scales is not None:
            gate_up = dequantise(gate_up, gate_up_scales, block, axis=1).astype(x.dtype)
            down = dequantise(down, down_scales, block, axis=1).astype(x.dtype)
        form = experts_for_few if inference and n <= FEW_TOKENS else experts_for_many
        return form(x, ids, weights, gate_up, down)
    return _experts(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, chosen == "interpreted")


def _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block):
    """Raises ValueError for shapes and dtypes that do not fit together."""
    E, F, D = down.shape
    if x.shape[1:] != (D,) or gate_up.shape != (E, D, 2, F):
        raise ValueError(f"x {x.shape}, gate_up {gate_up.shape} and down {down.shape} do not fit each other")
    if ids.shape != weights.shape or ids.ndim != 2 or len(ids) != len(x):
        raise ValueError(f"ids {ids.shape} and weights {weights.shape} must have a row for each of {len(x)} tokens")
    wanted = x.dtype if gate_up_scales is None else jnp.float8_e4m3fn
    if not gate_up.dtype == down.dtype == wanted:
        raise ValueError(f"gate_up {gate_up.dtype} and down {down.dtype} must be {jnp.dtype(wanted)}")
    shapes = None if gate_up_scales is None else ((E, -(-D // block), 2, F), (E, -(-F // block), D))
    found = None if gate_up_scales is None else (gate_up_scales.shape, jnp.shape(down_scales))
    if found != shapes:
        raise ValueError(f"scales {found} for blocks of {block} must be {shapes}")


# Three plain forms of the same function. The first defines the meaning of the others and of the kernels.


def grouped_matmul_reference(x, ids, weights, gate_up, down):
    """Computes every token through every expert and combines by weight; this defines the meaning."""
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    every = jax.vmap(_swiglu, in_axes=(None, 0, 0))(x, gate_up, down)
    return jnp.einsum("En,EnD->nD", combine, every)


def experts_for_few(x, ids, weights, gate_up, down):
    """Runs all tokens through each active expert, and reads only the weights of active experts.

    XLA copies each expert out of its stack first, where on a CPU it stays in cache. A conditional per expert and slices
    taken block by block also copy; gathered weights `gate_up[ids]` move more. Code size and compile time do not depend
    on the number of experts. Not differentiable in reverse mode, because the number of loop steps is dynamic.
    """
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    # Sort the active experts to the front, so that the loop runs over them alone.
    is_active = jax.nn.one_hot(ids, gate_up.shape[0], dtype=jnp.int32).sum(axis=(0, 1)) > 0
    active_first = jnp.argsort(~is_active, stable=True)

    def add_one(index, total):
        expert = active_first[index]
        return total + combine[expert][:, None] * _swiglu(x, gate_up[expert], down[expert])

    return jax.lax.fori_loop(0, is_active.sum(), add_one, jnp.zeros_like(x))


def experts_for_many(x, ids, weights, gate_up, down):
    """Sorts rows by expert, pads each expert's rows to blocks, and computes one product per block; drops no token.

    Differentiable. Shapes are static: there are at most `n k / block + E` blocks, whatever the router chose.
    """
    n, k = ids.shape
    E = gate_up.shape[0]
    # A block holds about the mean number of rows per expert, so that little padding is multiplied.
    block = max(8, min(64, n * k // E))
    num_blocks = n * k // block + E
    # Sort the pairs (token, choice) by expert. Each expert's rows begin at a multiple of the block.
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    counts = jnp.bincount(flat, length=E)  # drops ids beyond
    ends = jnp.cumsum(-(-counts // block) * block)
    begins = jnp.pad(ends, (1, 0))[:E]
    # Slot of each sorted pair: its rank within its expert, after the expert's first slot. Pairs of no expert get a slot
    # beyond the end, which the scatters drop.
    rank = jnp.arange(n * k) - (jnp.cumsum(counts) - counts)[jnp.minimum(expert, E - 1)]
    slot = jnp.where(expert < E, begins[jnp.minimum(expert, E - 1)] + rank, num_blocks * block)
    # Token of each slot (n, a zero row, for padding) and the expert that owns each block.
    token = jnp.full(num_blocks * block, n).at[slot].set(order // k, mode="drop")
    owner = jnp.searchsorted(ends, jnp.arange(num_blocks) * block, side="right").clip(max=E - 1)
    # One batched product per block, then add each row to its token with the router's weight.
    rows = jnp.pad(x, ((0, 1), (0, 0)))[token].reshape(num_blocks, block, -1)
    made = jax.vmap(_swiglu)(rows, gate_up[owner], down[owner]).reshape(num_blocks * block, -1)
    weight = weights.reshape(-1)[order].astype(x.dtype)
    weight = jnp.zeros(num_blocks * block, x.dtype).at[slot].set(weight, mode="drop")
    return jnp.zeros_like(x).at[token].add(made * weight[:, None], mode="drop")


def _combine(ids, weights, num_experts):
    """Returns the weight of each expert for each token, `[E, n]`."""
    return jnp.einsum("nkE,nk->En", jax.nn.one_hot(ids, num_experts, dtype=weights.dtype), weights)


def _swiglu(x, gate_up, down):
    """x [n, D], gate_up [D, 2, F], down [F, D] -> [n, D]; gate and up are one product."""
    gate, up = jnp.split(x @ gate_up.reshape(x.shape[-1], -1), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _experts(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    """Runs two kernels: gate and up with SwiGLU, then down. Little moves besides weights: [n * k, F] and [n * k, D]."""
    num_experts = len(down)
    is_few = len(x) <= FEW_TOKENS_OF_KERNEL
    route = route_few(ids, num_experts) if is_few else _route_many(ids, down, x.dtype)[0]
    # Hidden rows are rounded to x's dtype for the second product. Few tokens keep float32 outputs until the weighted
    # sum.
    made = functools.partial(product, route, block=block, interpret=interpret)
    hidden = made(x, gate_up, scales=gate_up_scales, out_dtype=x.dtype)
    answers = made(hidden, down, scales=down_scales, out_dtype=jnp.float32 if is_few else x.dtype)
    return _weighted_sum(ids, weights, answers, num_experts).astype(x.dtype)


def _route_many(ids, down, dtype):
    """Routes sorted pairs, with as many rows per product as fit the registers for this dtype."""
    is_fp8 = down.dtype != dtype
    return route_many(ids, len(down), most_rows=32 if dtype == jnp.float32 else 64 if is_fp8 else 128)


def _weighted_sum(ids, weights, answers, num_experts):
    """Sums each token's expert outputs in the order of its choices: answers [n * k, D] -> [n, D] float32.

    The fixed order keeps a token's bits independent of other tokens.
    """
    n, k = ids.shape
    answers = answers.reshape(n, k, -1)
    total = jnp.zeros((n, answers.shape[-1]), jnp.float32)
    for choice in range(k):
        made = weights[:, choice, None].astype(jnp.float32) * answers[:, choice].astype(jnp.float32)
        # The kernels do not write rows of pairs without an expert, so their memory may hold anything.
        total += jnp.where(ids[:, choice, None] < num_experts, made, 0.0)
    return total


def _forward(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    del block
    if gate_up_scales is not None or down_scales is not None:
        raise ValueError("the kernels have no gradient for fp8 experts: dequantise the weights first")
    # As in `_experts`, but keep the gate and up products for the backward pass.
    route, _ = _route_many(ids, down, x.dtype)
    hidden, factors = product(route, x, gate_up, out_dtype=x.dtype, keep=True, interpret=interpret)
    answers = product(route, hidden, down, out_dtype=x.dtype, interpret=interpret)
    y = _weighted_sum(ids, weights, answers, len(down)).astype(x.dtype)
    return y, (x, ids, weights, gate_up, down, factors)


def _backward(block, interpret, residuals, gradient):
    """Differentiates the experts with four grouped products and elementwise code on [n * k, F].

    With `h = silu(g) u` and `q = dy Wd^T` per pair, the gradient of the pair's weight is `h . q`, and that of h is
    `weight * q`.
    """
    del block
    x, ids, weights, gate_up, down, factors = residuals
    E, D, _, F = gate_up.shape
    route, begins = _route_many(ids, down, x.dtype)
    made = functools.partial(product, route, transposed=True, interpret=interpret)
    summed = functools.partial(outer, route, begins, out_dtype=gate_up.dtype, interpret=interpret)
    is_own = ids.reshape(-1, 1) < E
    gate, up = (factors[:, part].astype(jnp.float32) for part in range(2))
    # Product 1: q, the output gradient pulled back through the down projection.
    pulled = made(gradient, down, out_dtype=x.dtype).astype(jnp.float32)
    weight = weights.reshape(-1, 1).astype(jnp.float32)
    # Elementwise: gradients of the router weights, and of gate and up through `silu(g) = g sigmoid(g)`.
    share = jax.nn.sigmoid(gate)
    hidden = gate * share * up
    d_weights = jnp.where(is_own, hidden * pulled, 0.0).sum(axis=1).reshape(weights.shape)
    d_gate = weight * pulled * up * share * (1 + gate * (1 - share))
    d_up = weight * pulled * gate * share
    d_factors = jnp.concatenate([d_gate, d_up], axis=1).astype(x.dtype)
    # Product 2: back through gate and up, summed over each token's choices with weight 1.
    d_x = _weighted_sum(
        ids, jnp.ones_like(weights), made(d_factors, gate_up.reshape(E, D, 2 * F), out_dtype=x.dtype), E
    )
    # Products 3 and 4: outer products summed per expert, the gradients of the weights.
    d_gate_up = summed(x, d_factors).reshape(gate_up.shape)
    d_down = summed((weight * hidden).astype(x.dtype), gradient)
    return d_x.astype(x.dtype), None, d_weights.astype(weights.dtype), d_gate_up, d_down, None, None


_experts.defvjp(_forward, _backward)
