"""The ops that can be timed separately, each with a function that makes a case for a shape from `dispatch.choose`."""

from collections.abc import Callable

from pallas_kernels import (
    add_rms_norm,
    append_heads,
    append_latents,
    block_scaled_matmul,
    gated_matmul,
    grouped_matmul,
    head_top_k,
    prefill_attention,
    range_attention,
    router,
    verify_attention,
)
from pallas_kernels.backend import HAS_JAX_TRITON
from pallas_kernels.case import Case, Shape

CASES: dict[str, Callable[[Shape], Case]] = {
    "block_scaled_matmul": block_scaled_matmul.make_case,
    "gated_matmul": gated_matmul.make_case,
    "grouped_matmul": grouped_matmul.make_case,
    "verify_attention": verify_attention.make_case,
    "prefill_attention": prefill_attention.make_case,
    "range_attention": range_attention.make_case,
    "head_top_k": head_top_k.make_case,
    "route_tokens": router.make_case,
    "add_rms_norm": add_rms_norm.make_case,
    "append_heads": append_heads.make_case,
    "append_latents": append_latents.make_case,
}


def implementations_of(op: str) -> tuple[str, ...]:
    """Returns the implementations of an op that can be timed on this GPU."""
    return ("xla", "triton", *(["jax_triton"] if op == "block_scaled_matmul" and HAS_JAX_TRITON else []))
