"""Pallas kernels for JAX, each beside a plain JAX reference that defines its meaning.

Each op is one function that picks the kernel or the reference (`pallas_kernels.dispatch`). The kernels use Pallas's
Triton backend: it compiles for CUDA and ROCm, and its interpreter runs them on any machine. The package imports nothing
from mtpjax.

| op | what limits it on a GPU |
|---|---|
| `rms_norm` | bytes of the rows, read once and written once |
| `add_rms_norm`, `append_heads`, `append_latents`, `route_tokens` | at decoding's few rows, the launch |
| `block_scaled_matmul`, `gated_matmul`, `head_top_k` | bytes of the weights, each read once |
| `grouped_matmul` | few tokens: bytes of the chosen experts; many tokens: multiplications |
| `verify_attention` | bytes of the KV cache; multiplications for latent attention with many heads |
| `prefill_attention` | multiplications |
| `gated_delta_verify`, `gated_delta_steps` | bytes of the recurrent state; from about 5 tokens on, arithmetic |
| `gated_delta` | latency of the small products of one chunk after the other |
| `linear_cross_entropy`, `linear_total_variation` | multiplications |
"""

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.append_heads import append_heads
from pallas_kernels.append_latents import append_latents
from pallas_kernels.batch_invariance import batch_invariant
from pallas_kernels.block_scaled_matmul import block_scaled_matmul, partial_matmul, partial_matmuls
from pallas_kernels.gated_delta import gated_delta, gated_delta_replay, gated_delta_steps, gated_delta_verify
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.head_top_k import head_top_k, top_k
from pallas_kernels.linear_cross_entropy import linear_cross_entropy, linear_total_variation
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.op_cases import difference_from_xla
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.router import route_tokens
from pallas_kernels.verify_attention import verify_attention

dispatch.compare_by(difference_from_xla)

__all__ = [
    "PartialSums",
    "add_rms_norm",
    "append_heads",
    "append_latents",
    "batch_invariant",
    "block_scaled_matmul",
    "gated_delta",
    "gated_delta_replay",
    "gated_delta_steps",
    "gated_delta_verify",
    "gated_matmul",
    "grouped_matmul",
    "head_top_k",
    "linear_cross_entropy",
    "linear_total_variation",
    "partial_matmul",
    "partial_matmuls",
    "prefill_attention",
    "rms_norm",
    "route_tokens",
    "top_k",
    "verify_attention",
]
