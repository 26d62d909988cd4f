"""A mixture of SwiGLU experts, which runs each token through the experts that the router chose for it.

Bottleneck: with few tokens, reading the chosen experts' weights once; with many tokens, multiplications. The kernels
read only the weights of experts that at least one token chose. XLA's `ragged_dot` and dense products read all experts.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.dequantise import dequantise
from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_matmul.matmul_kernel import grouped_matmul_kernel
from pallas_kernels.grouped_matmul.outer_product_kernel import grouped_outer_product
from pallas_kernels.grouped_matmul.reference import (
    grouped_matmul_by_expert,
    grouped_matmul_by_pair,
    grouped_matmul_many_tokens,
    grouped_matmul_reference,
)
from pallas_kernels.grouped_matmul.route import MIN_ROWS, route_few_tokens, route_many_tokens

# Plain JAX passes up to this many tokens through every active expert, because reading the weights costs more than the
# unnecessary products (measured on a CPU).
MAX_FEW_TOKENS = 128
# The kernels use `route_few_tokens` up to this many tokens. With more tokens, each program's scan of all ids is slow.
MAX_ROUTE_FEW_TOKENS = 64


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

    fp8 stacks follow DeepSeek-V3 (2412.19437, section 3.3.2), with the scales of 128 x 128 blocks repeated along the
    outputs. The kernels read them as fp8; "xla" dequantises first. The kernels sum in float32, and a row's bits do not
    depend on other rows if there are at most 64 rows. The kernels are differentiable in reverse mode, except for fp8.

    Args:
        x: [n, D] float32 or bfloat16; "xla" supports any floating dtype.
        ids: [n, k] integer expert ids. Ids of E or more select no expert.
        weights: [n, k] floating, the router's weights.
        gate_up: [E, D, 2, F] in x's dtype, or float8_e4m3fn.
        down: [E, F, D] in the dtype of `gate_up`.
        gate_up_scales: [E, ceil(D / block), 2, F] float32 for fp8, else None.
        down_scales: [E, ceil(F / block), D] float32 for fp8, else None.
        block: Number of neighbouring inputs that share a scale.
        inference: Promises that no gradient is needed, so "xla" may use a loop that has no reverse mode.

    Returns:
        [n, D] in x's dtype.

    Raises:
        ValueError: A gradient of the fp8 kernels was requested, or the kernels were requested for an unsupported dtype
            of x, or for fp8 with odd D or F or with a block that is not a multiple of 16.
    """
    _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block)
    E, D, _, F = gate_up.shape
    n, k = ids.shape
    # The kernels support float32 and bfloat16. For fp8, columns must form pairs, and tiles must fit into blocks.
    reason = None
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        reason = f"the kernels support float32 and bfloat16, not {x.dtype}"
    elif gate_up_scales is not None and (D % 2 or F % 2 or block % MIN_ROWS):
        reason = f"fp8 experts need even widths and blocks that are a multiple of {MIN_ROWS}, got {D}, {F} and {block}"
    shape = {"tokens": n, "chosen": k, "experts": E, "width": D, "expert_width": F}
    shape |= {"dtype": str(x.dtype), "weights": str(down.dtype), "use": "inference" if inference else "training"}
    is_fp8, offered = gate_up_scales is not None, ("xla", "triton")
    check = functools.partial(difference_from_reference, dtype=x.dtype, is_fp8=is_fp8, inference=inference)
    chosen = choose("grouped_matmul", implementation, offered, shape, unsupported_reason=reason, check=check)
    ids = ids.astype(jnp.int32)
    if chosen == "xla" or 0 in (n, k, E):
        return _grouped_matmul_xla(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, inference)
    return _grouped_matmul_triton(
        x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, chosen == "interpreted"
    )


def make_case(shape: Shape) -> Case:
    names = ("tokens", "chosen", "experts", "width", "expert_width")
    keys, (n, k, E, D, F) = random_keys(), (shape[name] for name in names)
    x, ids = random_normal(keys, (n, D), shape["dtype"]), jax.random.randint(next(keys), (n, k), 0, E)
    arrays = x, ids, jnp.ones((n, k)) / k
    stacks = [random_normal(keys, size, shape["weights"]) for size in ((E, D, 2, F), (E, F, D))]
    # Only fp8 experts have scales.
    if shape["weights"].startswith("float8"):
        stacks += [jnp.ones((E, -(-D // 128), 2, F)), jnp.ones((E, -(-F // 128), D))]

    def run(*arrays, implementation):
        scales = dict(zip(("gate_up_scales", "down_scales"), arrays[5:], strict=False))
        is_inference = shape["use"] == "inference"
        return grouped_matmul(*arrays[:5], **scales, inference=is_inference, implementation=implementation)

    return run, (*arrays, *stacks)


def difference_from_reference(implementation: str, *, dtype, is_fp8: bool, inference: bool) -> float:
    """Compares the output and, without `inference`, the gradients with the plain sum over experts, on small arrays."""
    n, k, E, D, F, block = 5, 2, 4, 128, 64, 32
    keys = iter(jax.random.split(jax.random.key(0), 7))
    x = jax.random.normal(next(keys), (n, D), dtype)
    ids, weights = jax.random.randint(next(keys), (n, k), 0, E), jax.random.uniform(next(keys), (n, k))
    # The reference gets the dequantised fp8 values, so that only the arithmetic is compared.
    stacks = [jax.random.normal(next(keys), shape) * 0.1 for shape in ((E, D, 2, F), (E, F, D))]
    scales = {}
    if is_fp8:
        stacks = [stack.astype(jnp.float8_e4m3fn) for stack in stacks]
        shapes = {"gate_up_scales": (E, D // block, 2, F), "down_scales": (E, F // block, D)}
        scales = {name: jax.random.uniform(next(keys), shape) for name, shape in shapes.items()}
        meant = [dequantise(*pair, block, axis=1) for pair in zip(stacks, scales.values(), strict=True)]
    else:
        stacks = [stack.astype(dtype) for stack in stacks]
        meant = stacks

    def run(x, gate_up, down):
        options = {"block": block, "inference": inference, "implementation": implementation}
        return grouped_matmul(x, ids, weights, gate_up, down, **scales, **options).astype(jnp.float32)

    def expect(x, gate_up, down):
        wide = (array.astype(jnp.float32) for array in (x, gate_up, down))
        with jax.default_matmul_precision("highest"):
            x, gate_up, down = wide
            return grouped_matmul_reference(x, ids, weights, gate_up, down)

    # For training, also compare the gradients.
    def results(function, arrays):
        if inference:
            return (function(*arrays),)
        output, pull_back = jax.vjp(function, *arrays)
        return output, *pull_back(jnp.ones_like(output))

    bound = 1e-4 if dtype == jnp.float32 else 3e-2
    pairs = zip(results(run, (x, *stacks)), results(expect, (x, *meant)), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs) / bound


def _check(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block):
    """Raises ValueError for inconsistent shapes and dtypes."""
    E, F, D = down.shape
    if x.shape[1:] != (D,) or gate_up.shape != (E, D, 2, F):
        raise ValueError(f"x {x.shape}, gate_up {gate_up.shape} and down {down.shape} do not fit each other")
    if ids.shape != weights.shape or ids.ndim != 2 or len(ids) != len(x):
        raise ValueError(f"ids {ids.shape} and weights {weights.shape} must have a row for each of {len(x)} tokens")
    if (gate_up_scales is None) != (down_scales is None):
        raise ValueError("pass both gate_up_scales and down_scales, or neither")
    expected = x.dtype if gate_up_scales is None else jnp.float8_e4m3fn
    if not gate_up.dtype == down.dtype == expected:
        raise ValueError(f"gate_up {gate_up.dtype} and down {down.dtype} must be {jnp.dtype(expected)}")
    shapes = None if gate_up_scales is None else ((E, -(-D // block), 2, F), (E, -(-F // block), D))
    found = None if gate_up_scales is None else (gate_up_scales.shape, jnp.shape(down_scales))
    if found != shapes:
        raise ValueError(f"scales {found} for blocks of {block} must be {shapes}")


def _grouped_matmul_xla(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, inference):
    """Chooses a plain JAX form for the number of tokens and the platform that the call is lowered for."""
    experts = (gate_up, down, gate_up_scales, down_scales)
    if not inference or len(x) > MAX_FEW_TOKENS:
        if gate_up_scales is not None:
            gate_up = dequantise(gate_up, gate_up_scales, block, axis=1).astype(x.dtype)
            down = dequantise(down, down_scales, block, axis=1).astype(x.dtype)
        return grouped_matmul_many_tokens(x, ids, weights, gate_up, down)

    by_expert = functools.partial(grouped_matmul_by_expert, x, ids, weights, *experts, block=block)
    # With more pairs than experts, nearly all experts are active, so a GPU reads all of them in place.
    if ids.size <= len(down):
        on_gpu = functools.partial(grouped_matmul_by_pair, x, ids, weights, *experts, block=block)
    elif gate_up_scales is None:
        on_gpu = functools.partial(grouped_matmul_reference, x, ids, weights, gate_up, down)
    else:
        on_gpu = by_expert  # all experts in x's dtype would take too much memory
    return jax.lax.platform_dependent(cpu=by_expert, default=on_gpu)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _grouped_matmul_triton(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    """Runs two kernels, gate and up with SwiGLU, then down. Apart from weights, only [n * k, F] and [n * k, D] move."""
    num_experts = len(down)
    has_few_tokens = len(x) <= MAX_ROUTE_FEW_TOKENS
    route = route_few_tokens(ids, num_experts) if has_few_tokens else _route_many(ids, down, x.dtype)[0]
    # Hidden rows are rounded to x's dtype for the second product. With few tokens, the outputs stay float32 until the
    # weighted sum.
    multiply = functools.partial(grouped_matmul_kernel, route, block=block, interpret=interpret)
    hidden = multiply(x, gate_up, scales=gate_up_scales, out_dtype=x.dtype)
    keeps_float32 = has_few_tokens or is_batch_invariant()
    expert_outputs = multiply(hidden, down, scales=down_scales, out_dtype=jnp.float32 if keeps_float32 else x.dtype)
    return _weighted_sum(ids, weights, expert_outputs, num_experts).astype(x.dtype)


def _route_many(ids, down, dtype):
    """Routes sorted pairs, with as many rows per matmul as fit into the registers for this dtype."""
    if is_batch_invariant():
        return route_many_tokens(ids, len(down), max_rows=MIN_ROWS)
    is_fp8 = down.dtype != dtype
    return route_many_tokens(ids, len(down), max_rows=32 if dtype == jnp.float32 else 64 if is_fp8 else 128)


def _weighted_sum(ids, weights, expert_outputs, num_experts):
    """Sums each token's weighted expert outputs [n * k, D] in choice order; returns [n, D] float32.

    The fixed order keeps a token's bits independent of other tokens.
    """
    n, k = ids.shape
    expert_outputs = expert_outputs.reshape(n, k, -1)
    total = jnp.zeros((n, expert_outputs.shape[-1]), jnp.float32)
    for choice in range(k):
        weighted = weights[:, choice, None].astype(jnp.float32) * expert_outputs[:, choice].astype(jnp.float32)
        # The kernels do not write rows for pairs without an expert, so these rows may hold anything.
        total += jnp.where(ids[:, choice, None] < num_experts, weighted, 0.0)
    return total


def _forward(x, ids, weights, gate_up, down, gate_up_scales, down_scales, block, interpret):
    del block
    if gate_up_scales is not None or down_scales is not None:
        raise ValueError("the kernels have no gradient for fp8 experts: dequantise the weights first")
    # As in `_grouped_matmul_triton`, but keep the gate and up products for the backward pass.
    route, _ = _route_many(ids, down, x.dtype)
    hidden, gate_up_products = grouped_matmul_kernel(
        route, x, gate_up, out_dtype=x.dtype, return_products=True, interpret=interpret
    )
    expert_outputs = grouped_matmul_kernel(route, hidden, down, out_dtype=x.dtype, interpret=interpret)
    y = _weighted_sum(ids, weights, expert_outputs, len(down)).astype(x.dtype)
    return y, (x, ids, weights, gate_up, down, gate_up_products)


def _backward(block, interpret, residuals, gradient):
    """Differentiates the experts with four grouped products and elementwise code on [n * k, F].

    With `h = silu(g) u` and `q = dy Wd^T` per pair, the gradient of the pair's weight is `h . q`, and the gradient of h
    is `weight * q`.
    """
    del block
    x, ids, weights, gate_up, down, gate_up_products = residuals
    E, D, _, F = gate_up.shape
    route, expert_starts = _route_many(ids, down, x.dtype)
    multiply = functools.partial(grouped_matmul_kernel, route, transposed=True, interpret=interpret)
    sum_outer_products = functools.partial(
        grouped_outer_product, route, expert_starts, out_dtype=gate_up.dtype, interpret=interpret
    )
    has_expert = ids.reshape(-1, 1) < E
    gate, up = (gate_up_products[:, part].astype(jnp.float32) for part in range(2))
    # Product 1 is q, the output gradient pulled back through the down projection.
    unweighted_d_hidden = multiply(gradient, down, out_dtype=x.dtype).astype(jnp.float32)
    weight = weights.reshape(-1, 1).astype(jnp.float32)
    # Elementwise, compute gradients of the router weights, and of gate and up through `silu(g) = g sigmoid(g)`.
    sigmoid_gate = jax.nn.sigmoid(gate)
    hidden = gate * sigmoid_gate * up
    d_weights = jnp.where(has_expert, hidden * unweighted_d_hidden, 0.0).sum(axis=1).reshape(weights.shape)
    d_gate = weight * unweighted_d_hidden * up * sigmoid_gate * (1 + gate * (1 - sigmoid_gate))
    d_up = weight * unweighted_d_hidden * gate * sigmoid_gate
    d_gate_up_products = jnp.concatenate([d_gate, d_up], axis=1).astype(x.dtype)
    # Product 2 goes back through gate and up, and is summed over each token's choices with weight 1.
    d_x = _weighted_sum(
        ids, jnp.ones_like(weights), multiply(d_gate_up_products, gate_up.reshape(E, D, 2 * F), out_dtype=x.dtype), E
    )
    # Products 3 and 4 are outer products summed per expert, which are the gradients of the expert weights.
    d_gate_up = sum_outer_products(x, d_gate_up_products).reshape(gate_up.shape)
    d_down = sum_outer_products((weight * hidden).astype(x.dtype), gradient)
    return d_x.astype(x.dtype), None, d_weights.astype(weights.dtype), d_gate_up, d_down, None, None


_grouped_matmul_triton.defvjp(_forward, _backward)
