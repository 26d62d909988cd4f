"""Checks and choice of the ops that multiply a few rows by matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.dispatch import choose

MAX_ROWS = 64  # with more rows, multiplying takes longer than reading


def check_matrix(x, weights, scales, block: int, *, layout: str = "[D, F]", multiple: int = 1) -> None:
    """Raises ValueError for weights [D, F] and scales [ceil(D / block), F] or None that do not fit x [..., D].

    The message calls the weights' shape `layout`; `multiple` must divide F.
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
    make_case: Callable[[Shape], Case],
    has_jax_triton_form: bool = False,
) -> str:
    """Returns the implementation that an op runs: "xla" for no rows, or for more rows than the kernels take.

    Args:
        x: [..., D].
        matrices: Pairs of weights [D, F] and scales or None, all of one kind.
        has_jax_triton_form: The op also has a kernel for the package jax_triton.
    """
    D, F = x.shape[-1], sum(weights.shape[1] for weights, _ in matrices)
    rows = x.size // D if D else 0
    # The kernels take few rows, and any number within `batch_invariant`.
    has_few_rows = 0 < rows <= (rows if is_batch_invariant() else MAX_ROWS) and F > 0
    reasons = (_find_unsupported_reason(*matrix, block=block) for matrix in matrices) if has_few_rows else ()
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
    chosen = choose(op, implementation, offered, shape, unsupported_reason=reason, make_case=make_case)
    return chosen if has_few_rows else "xla"


def _find_unsupported_reason(weights, scales, block: int) -> str | None:
    """Returns why the kernels of few rows cannot take these weights, or None if they can.

    Args:
        weights: [D, F].
        scales: [blocks, F] or None.
    """
    # A tile must fit into a block of inputs, and Pallas uses 32-bit offsets for any array of at most 2^32 bytes.
    if scales is not None and (block < 16 or block & (block - 1)):
        return f"the kernel takes blocks of 16 inputs, 32, 64 and so on, not of {block}"
    if weights.dtype.itemsize == 1 and weights.size >= 2**31:
        return f"weights {weights.shape} are 2^31 elements or more, which exceed 32-bit offsets"
    return None


def make_matrix_case(op: Callable[..., Any], shape: Shape) -> Case:
    """Makes a case of an op whose arguments are rows, a matrix and its scales."""
    keys, D, F = random_keys(), shape["inputs"], shape["outputs"]
    arrays = random_normal(keys, (shape["rows"], D), shape["dtype"]), random_normal(keys, (D, F), shape["weights"])
    return op, (*arrays, jnp.ones((-(-D // 128), F))) if shape["weights"].startswith("float8") else arrays
