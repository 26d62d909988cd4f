"""The gated delta rule, a linear attention with one recurrent state per head: ops, kernels and references.

Per token `S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q` (2412.06464, equation 10). u is
the token's correction.

| op | use | limit on a GPU |
|---|---|---|
| `gated_delta_verify` | a few draft tokens: outputs and corrections u, no state | bytes: reads the state |
| `gated_delta_replay` | the state after the accepted ones | bytes: XLA reads and writes the state, no kernel |
| `gated_delta_steps` | a few committed tokens: outputs and the last state | bytes: reads and writes the state |
| `gated_delta` | prefill and training, by chunks: outputs and the last state | latency, see the kernels |

Verify plus replay move the state three times, for any number W of draft tokens. Keeping a state after each token would
move it W + 4 times (read, W written; two read and one written to select one) and would hold W states of every layer
until the tokens are accepted.

Shapes in all ops: q and k `[B, T, K, P]` for K key heads, v `[B, T, J, Q]` for J value heads, all of one floating
dtype. Value head j reads key head j // (J / K). log_decay (at most 0) and beta are `[B, T, J]` float32, the state `[B,
J, P, Q]` float32. Outputs and corrections are `[B, T, J, Q]` float32.
"""

from pallas_kernels.gated_delta.ops import gated_delta, gated_delta_replay, gated_delta_steps, gated_delta_verify
from pallas_kernels.gated_delta.reference import gated_delta_reference, gated_delta_steps_reference

__all__ = [
    "gated_delta",
    "gated_delta_reference",
    "gated_delta_replay",
    "gated_delta_steps",
    "gated_delta_steps_reference",
    "gated_delta_verify",
]
