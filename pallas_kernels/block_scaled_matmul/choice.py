"""Checks, choice and comparison of the ops that multiply a few rows by matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.block_scaled_matmul.kernel import MAX_ROWS, find_unsupported_reason
from pallas_kernels.dispatch import choose


def check_matrix(x, weights, scales, block: int, *, layout: str = "[D, F]", multiple: int = 1) -> None:
    """Raises ValueError for weights and scales that do not fit x.

    Args:
        x: [..., D].
        weights: [D, F].
        scales: [ceil(D / block), F] or None.
        block: Number of neighbouring inputs that share a scale.
        layout: The weights' shape in the words of the error.
        multiple: F must be a multiple of it.
    """
    if x.ndim == 0 or weights.ndim != 2 or x.shape[-1] != weights.shape[0] or weights.shape[1] % multiple:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape}: they are [..., D] and {layout}")
    if scales is not None and scales.shape != (pl.cdiv(len(weights), block), weights.shape[1]):
        raise ValueError(f"scales {scales.shape} do not fit weights {weights.shape} in blocks of {block} inputs")


def choose_for_few_rows(
    op: str,
    implementation: str,
    x,
    matrices: Sequence[tuple[Any, Any]],
    *,
    block: int,
    dtype,
    check: Callable[[str], float],
    has_jax_triton_form: bool = False,
) -> str:
    """Returns the implementation that an op runs: "xla" for no rows, or for more rows than the kernels take.

    Args:
        op: Name of the op.
        implementation: The requested implementation.
        x: [..., D].
        matrices: Pairs of weights [D, F] and scales or None, all of one kind.
        block: Number of neighbouring inputs that share a scale.
        dtype: Dtype of the products.
        check: As in `pallas_kernels.dispatch.choose`.
        has_jax_triton_form: The op also has a kernel for the package jax_triton.

    Returns:
        "xla", "triton", "interpreted" or "jax_triton".

    Raises:
        ValueError: The implementation is unknown, or a kernel was requested that does not take these arrays.
    """
    D, F = x.shape[-1], sum(weights.shape[1] for weights, _ in matrices)
    rows = x.size // D if D else 0
    # The kernels take few rows, and any number within `batch_invariant`.
    has_few_rows = 0 < rows <= (rows if is_batch_invariant() else MAX_ROWS) and F > 0
    reasons = (find_unsupported_reason(*matrix, block=block) for matrix in matrices) if has_few_rows else ()
    shape = {"rows": rows, "inputs": D, "outputs": F, "dtype": str(dtype), "weights": str(matrices[0][0].dtype)}
    reason = next(filter(None, reasons), None)
    offered = ["xla", "triton"]
    # jax_triton is optional, and of the fp8 dtypes its kernel reads only float8_e4m3fn.
    if has_jax_triton_form:
        weights_dtype = matrices[0][0].dtype
        obstacle = None
        if not HAS_JAX_TRITON:
            obstacle = "the packages jax_triton and triton are not installed"
        elif weights_dtype.itemsize == 1 and weights_dtype != jnp.float8_e4m3fn:
            obstacle = f"the kernel of jax_triton takes no weights of {weights_dtype}"
        if obstacle is None:
            offered.append("jax_triton")
        elif implementation == "jax_triton":
            raise ValueError(obstacle)
    # Many rows run XLA, but a request for an unknown implementation is still an error.
    chosen = choose(op, implementation, offered, shape, unsupported_reason=reason, check=check)
    return chosen if has_few_rows else "xla"


def compare_with_reference(op, reference, implementation: str, *, dtype, weights_dtype, has_scales: bool) -> float:
    """Compares an implementation of an op with its reference on small arrays.

    Args:
        op: `block_scaled_matmul`, or another op of its signature.
        reference: The op's reference.
        implementation: One of the op.
        dtype: Dtype of x.
        weights_dtype: Dtype of the weights.
        has_scales: Weights with scales.

    Returns:
        The largest difference over its bound: more than 1 means that the numbers are wrong.
    """
    n, D, F, block = 3, 256, 256, 64
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, D), dtype)
    weights = (jax.random.normal(keys[1], (D, F)) * 0.1).astype(weights_dtype)
    scales = jax.random.uniform(keys[2], (D // block, F)) if has_scales else None
    found = op(x, weights, scales, block=block, implementation=implementation)
    expected = reference(x.astype(jnp.float32), weights, scales, block=block)
    bound = (1e-4 if dtype == jnp.float32 else 3e-2) * jnp.abs(expected).max()
    return float(jnp.abs(found.astype(jnp.float32) - expected).max() / bound)
