"""A mixture of experts: each token through those that it chose, few tokens or many. Kernels: `grouped_products.py`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dequantise import dequantise
from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_products import ROWS, outer, product, route_few, route_many

# Up to here reading weights costs more than multiplying rows that an expert did not get.
# The plain forms on a CPU, with 8 and with 64 experts of 512 x 512, top 2: 1.4 to 2.7 times as fast as
# `experts_for_many` at 64 tokens, 1.1 to 1.9 times at 128.
FEW_TOKENS = 128
# The kernels: from here on a block's look at all ids is no longer small beside its product.
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
    """`y[t] = sum_j weights[t, j] * ((silu(x[t] Wg) * (x[t] Wu)) Wd)` with the weights of expert `ids[t, j]`.

    x [n, D], ids [n, k] int32 and weights [n, k], gate_up [E, D, 2, F] and down [E, F, D] -> [n, D] in x's dtype. An id
    of E or more stands for no expert. The stacks are of x's dtype; or both are float8_e4m3fn with float32 scales
    [E, ceil(D / block), 2, F] and [E, ceil(F / block), D]: DeepSeek-V3's 128 x 128 blocks (2412.19437, 3.3.2) written
    out along the output, which costs 3 % of the values' bytes and serves any grid there. The kernels read them as fp8.

    `implementation` is "xla" (dense products of chosen or of sorted experts, after `value * scale` for fp8), "triton"
    (the kernels: CUDA and ROCm), "interpreted" (the kernels on any machine, slowly) or "auto", see
    `pallas_kernels.dispatch`. `inference` promises "xla" that no gradient will be asked; the kernels are differentiable
    in reverse mode, but for fp8, where a gradient is a ValueError. In the kernels sums are float32, a row's bits do not
    depend on other rows of up to 64 in all, and no weight of an expert that nobody chose is read.

    Raises ValueError for shapes and dtypes that do not fit. The kernels take x in float32 and bfloat16, and fp8 where D
    and F are even and the block is a multiple of 16.
    """
    _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block)
    E, D, _, F = gate_up.shape
    n, k = ids.shape
    unfit = None
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        unfit = f"the kernels take float32 and bfloat16, not {x.dtype}"
    elif gate_up_scales is not None and (D % 2 or F % 2 or block % ROWS):
        unfit = f"fp8 experts of an odd width ({D} or {F}) or in blocks of {block}, no multiple of {ROWS}"
    shape = {"tokens": n, "chosen": k, "experts": E, "width": D, "expert_width": F}
    shape |= {"dtype": str(x.dtype), "weights": str(down.dtype), "use": "inference" if inference else "training"}
    chosen = choose("grouped_matmul", implementation, ("xla", "triton"), shape, unfit=unfit)
    ids = ids.astype(jnp.int32)
    if chosen == "xla" or 0 in (n, k, E):
        if gate_up_scales is not None:
            gate_up = dequantise(gate_up, gate_up_scales, block, axis=1).astype(x.dtype)
            down = dequantise(down, down_scales, block, axis=1).astype(x.dtype)
        form = experts_for_few if inference and n <= FEW_TOKENS else experts_for_many
        return form(x, ids, weights, gate_up, down)
    return _experts(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, chosen == "interpreted")


def _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block):
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


# The plain forms, all over the same arguments; the first is the meaning of the others and of the kernels.


def grouped_matmul_reference(x, ids, weights, gate_up, down):
    """Every token through every expert."""
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    every = jax.vmap(_swiglu, in_axes=(None, 0, 0))(x, gate_up, down)
    return jnp.einsum("En,EnD->nD", combine, every)


def experts_for_few(x, ids, weights, gate_up, down):
    """All tokens through each expert that any of them chose: reads those experts' weights once and no others'.

    XLA copies each expert out of its stack first. On a CPU the copy stays in the processor's cache and costs 15 to 40 %
    over experts in arrays of their own, the only form found without it: a conditional per expert, slices taken block by
    block, choices unrolled and slices fused into a sum were no faster, gathered weights 2 to 3 times slower. Code and
    compile time do not depend on the number of experts.
    """
    combine = _combine(ids, weights, gate_up.shape[0]).astype(x.dtype)
    is_active = jax.nn.one_hot(ids, gate_up.shape[0], dtype=jnp.int32).sum(axis=(0, 1)) > 0
    active_first = jnp.argsort(~is_active, stable=True)

    def add_one(index, total):
        expert = active_first[index]
        return total + combine[expert][:, None] * _swiglu(x, gate_up[expert], down[expert])

    return jax.lax.fori_loop(0, is_active.sum(), add_one, jnp.zeros_like(x))


def experts_for_many(x, ids, weights, gate_up, down):
    """Rows sorted by expert and padded to blocks, each block one product; differentiable, drops nothing."""
    n, k = ids.shape
    E = gate_up.shape[0]
    block = max(8, min(64, n * k // E))
    num_blocks = n * k // block + E
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    counts = jnp.bincount(flat, length=E)  # drops ids beyond
    ends = jnp.cumsum(-(-counts // block) * block)
    begins = jnp.pad(ends, (1, 0))[:E]
    rank = jnp.arange(n * k) - (jnp.cumsum(counts) - counts)[jnp.minimum(expert, E - 1)]
    slot = jnp.where(expert < E, begins[jnp.minimum(expert, E - 1)] + rank, num_blocks * block)
    token = jnp.full(num_blocks * block, n).at[slot].set(order // k, mode="drop")
    owner = jnp.searchsorted(ends, jnp.arange(num_blocks) * block, side="right").clip(max=E - 1)
    rows = jnp.pad(x, ((0, 1), (0, 0)))[token].reshape(num_blocks, block, -1)
    made = jax.vmap(_swiglu)(rows, gate_up[owner], down[owner]).reshape(num_blocks * block, -1)
    weight = weights.reshape(-1)[order].astype(x.dtype)
    weight = jnp.zeros(num_blocks * block, x.dtype).at[slot].set(weight, mode="drop")
    return jnp.zeros_like(x).at[token].add(made * weight[:, None], mode="drop")


def _combine(ids, weights, num_experts):
    """Weight of each expert for each token, `[E, n]`."""
    return jnp.einsum("nkE,nk->En", jax.nn.one_hot(ids, num_experts, dtype=weights.dtype), weights)


def _swiglu(x, gate_up, down):
    """x [n, D], gate_up [D, 2, F], down [F, D]: one product for gate and up."""
    gate, up = jnp.split(x @ gate_up.reshape(x.shape[-1], -1), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _experts(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    """The kernels. Beside the weights little moves: the hidden rows [n * k, F] and the experts' answers [n * k, D]."""
    num_experts = len(down)
    is_few = len(x) <= FEW_TOKENS_OF_KERNEL
    route = route_few(ids, num_experts) if is_few else _route_many(ids, down, x.dtype)[0]
    made = functools.partial(product, route, block=block, interpret=interpret)
    hidden = made(x, gate_up, scales=gate_up_scales, out_dtype=x.dtype)
    answers = made(hidden, down, scales=down_scales, out_dtype=jnp.float32 if is_few else x.dtype)
    return _weighted_sum(ids, weights, answers, num_experts).astype(x.dtype)


def _route_many(ids, down, dtype):
    """As many rows to a product as fit the registers."""
    is_fp8 = down.dtype != dtype
    return route_many(ids, len(down), most_rows=32 if dtype == jnp.float32 else 64 if is_fp8 else 128)


def _weighted_sum(ids, weights, answers, num_experts):
    """Over each token's choices in their order, whatever other tokens chose: answers [n * k, D] -> [n, D] float32."""
    n, k = ids.shape
    answers = answers.reshape(n, k, -1)
    total = jnp.zeros((n, answers.shape[-1]), jnp.float32)
    for choice in range(k):
        made = weights[:, choice, None].astype(jnp.float32) * answers[:, choice].astype(jnp.float32)
        total += jnp.where(ids[:, choice, None] < num_experts, made, 0.0)  # of no expert there is no answer
    return total


def _forward(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    del block
    if gate_up_scales is not None or down_scales is not None:
        raise ValueError("experts in fp8 have no gradient in the kernels: pass weights that `dequantise` gave")
    route, _ = _route_many(ids, down, x.dtype)
    hidden, factors = product(route, x, gate_up, out_dtype=x.dtype, keep=True, interpret=interpret)
    answers = product(route, hidden, down, out_dtype=x.dtype, interpret=interpret)
    y = _weighted_sum(ids, weights, answers, len(down)).astype(x.dtype)
    return y, (x, ids, weights, gate_up, down, factors)


def _backward(block, interpret, residuals, gradient):
    """Four grouped products; between them `h = silu(g) u` and its derivative, on [n * k, F].

    With `q = dy Wd^T` of a pair: its weight's gradient is `h . q`, and that of h is `weight * q`.
    """
    del block
    x, ids, weights, gate_up, down, factors = residuals
    E, D, _, F = gate_up.shape
    route, begins = _route_many(ids, down, x.dtype)
    made = functools.partial(product, route, transposed=True, interpret=interpret)
    summed = functools.partial(outer, route, begins, out_dtype=gate_up.dtype, interpret=interpret)
    is_own = ids.reshape(-1, 1) < E
    gate, up = (factors[:, part].astype(jnp.float32) for part in range(2))
    pulled = made(gradient, down, out_dtype=x.dtype).astype(jnp.float32)
    weight = weights.reshape(-1, 1).astype(jnp.float32)
    share = jax.nn.sigmoid(gate)
    hidden = gate * share * up
    d_weights = jnp.where(is_own, hidden * pulled, 0.0).sum(axis=1).reshape(weights.shape)
    d_gate = weight * pulled * up * share * (1 + gate * (1 - share))
    d_up = weight * pulled * gate * share
    d_factors = jnp.concatenate([d_gate, d_up], axis=1).astype(x.dtype)
    d_x = _weighted_sum(
        ids, jnp.ones_like(weights), made(d_factors, gate_up.reshape(E, D, 2 * F), out_dtype=x.dtype), E
    )
    d_gate_up = summed(x, d_factors).reshape(gate_up.shape)
    d_down = summed((weight * hidden).astype(x.dtype), gradient)
    return d_x.astype(x.dtype), None, d_weights.astype(weights.dtype), d_gate_up, d_down, None, None


_experts.defvjp(_forward, _backward)
