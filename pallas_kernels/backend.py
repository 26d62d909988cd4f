"""Pallas's Triton backend (None in JAX versions without it), and whether jax_triton is installed.

JAX has announced that it will remove the backend. Without it, every op runs in plain JAX, or in jax_triton if the op
supports jax_triton.
"""

import importlib.util
from typing import Any

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

HAS_JAX_TRITON = all(importlib.util.find_spec(name) for name in ("jax_triton", "triton"))  # needs Python 3.12
