"""Pallas kernels for JAX, each with a plain JAX reference that defines its meaning.

Each op is one function, in the module with the same name. Its `implementation` argument chooses the kernel or the
reference: "xla" (plain JAX, the reference or a faster form with the same meaning), "triton" (the kernel, on CUDA and
ROCm), "interpreted" (the kernel in Pallas's interpreter, on any machine) or "auto" (`pallas_kernels.dispatch`). Ops
raise `ValueError` for an unknown implementation and for inconsistent shapes or dtypes. In the functions that ops call,
`interpret` runs a kernel in the interpreter, `platform` is "cuda" or "rocm", and `block` is the number of neighbouring
inputs that share a scale. The package imports nothing from mtpjax.

| op | what limits it on a GPU |
|---|---|
| `rms_norm` | bytes of the rows, each read and written once |
| `add_rms_norm`, `append_heads`, `append_latents`, `route_tokens` | the launch, because decoding has few rows |
| `block_scaled_matmul`, `gated_matmul`, `head_top_k` | bytes of the weights, each read once |
| `grouped_matmul` | bytes of the chosen experts with few tokens; multiplications with many tokens |
| `verify_attention` | bytes of the KV cache; multiplications for latent attention with many heads |
| `prefill_attention` | multiplications |
| `range_attention` | multiplications, and with 64 columns exponentials as much |
| `gated_delta_verify`, `gated_delta_steps` | bytes of the recurrent state; from about 5 tokens on, arithmetic |
| `gated_delta` | latency of the small sequential matmuls of each chunk |
| `linear_cross_entropy`, `linear_total_variation` | multiplications |
"""
