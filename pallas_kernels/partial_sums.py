"""`PartialSums`, the parts of a matmul's result, which are added by the op that reads them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import triton as plt


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The parts of a split sum (split-K). Their sum, rounded to `dtype`, is the value.

    A kernel that splits a sum over many programs writes one part per program. The op that reads the product adds the
    parts while it loads them, which saves a separate launch.

    Attributes:
        parts: [P, ..., F], float32; a single part may have `dtype`.
        dtype: Dtype of the value.
    """

    parts: jax.Array
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value, [..., F]."""
        return self.parts.shape[1:]

    def total(self) -> jax.Array:
        """Adds the parts in a fixed order, so that repeated runs give the same bits; returns [..., F] in `dtype`."""
        return functools.reduce(jnp.add, list(self.parts)).astype(self.dtype)

    def plus(self, bias: jax.Array) -> "PartialSums":
        """Adds a bias [F] to the value; the result has one part."""
        bias = bias.astype(self.dtype).reshape((1,) * (len(self.shape) - 1) + bias.shape)
        return PartialSums((self.total() + bias)[None], self.dtype)

    def reshape(self, *shape: int) -> "PartialSums":
        """Reshapes the value."""
        return dataclasses.replace(self, parts=self.parts.reshape(len(self.parts), *shape))


def load_sum(ref, index, mask, dtype) -> jax.Array:
    """Loads the parts at `ref[part, *index]` inside a kernel, with zeros where the mask is false, and adds them.

    Args:
        ref: [P, ...].
        index: Index after the part axis; () for everything.
        mask: Bool mask of the elements to load.
    """
    parts = (plt.load(ref.at[np.int32(part), *index], mask=mask, other=0.0) for part in range(int(ref.shape[0])))
    return functools.reduce(jnp.add, parts).astype(dtype)
