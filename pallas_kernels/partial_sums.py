"""A matrix product whose parts are not added yet, for the op that reads it next."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The parts of a split sum (split-K). Their sum, rounded to `dtype`, is the value.

    A kernel that splits a sum over many programs writes one part each. The op that reads the product adds them while it
    loads, which saves the launch that would add them first.

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
        """Adds the parts in a fixed order, so that results repeat bit for bit: [..., F] in `dtype`."""
        return sum_of_parts(lambda part: self.parts[part], len(self.parts), self.dtype)

    def reshape(self, *shape: int) -> "PartialSums":
        """Reshapes the value."""
        return dataclasses.replace(self, parts=self.parts.reshape(len(self.parts), *shape))


def sum_of_parts(load: Callable[[int], jax.Array], num_parts: int, dtype) -> jax.Array:
    """Adds `num_parts` parts in order and rounds the sum to `dtype`; kernels pass how they load a part."""
    return functools.reduce(jnp.add, map(load, range(num_parts))).astype(dtype)
