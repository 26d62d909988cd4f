"""A mixture of SwiGLU experts: each token through the experts that its router chose.

Limit: for few tokens, the bytes of the chosen experts' weights, each read once; for many tokens, multiplications. The
kernels read only weights of experts that some token chose. XLA's `ragged_dot` and dense products read all experts.
"""

from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference

__all__ = ["grouped_matmul", "grouped_matmul_reference"]
