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
