"""Pallas's Triton backend, or None in a version of JAX without it.

JAX has announced that it will remove the backend. Without it every op runs in plain JAX.
"""

from typing import Any

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None
