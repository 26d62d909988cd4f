"""Maps a Hugging Face checkpoint's tensors to parameters.

A parameter (`ParamSpec`) is assembled from `TensorSlice`s. A slice reshapes, indexes and transposes some rows of a
tensor, and assigns them to a part of a parameter. No arithmetic is involved, so the same slices can write the parameter
back to the tensor with the same bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from mtpjax.safe_open import BLOCK_BYTES

ALL = slice(None)
TILE_BYTES = 1 << 20  # size of a tile that XLA transposes at once


class TensorSlice(NamedTuple):
    """`param[target] = tensor[begin:end].reshape(split)[select].transpose(axes)`.

    Rows along the tensor's first axis are contiguous in the file, so slices are read and written by row ranges. The
    first factor of `split` divides the rows into units, the smallest parts that are read at once.
    """

    name: str  # the tensor's name
    shape: tuple[int, ...]  # the whole tensor's shape
    rows: tuple[int, int]  # begin, end along its first axis
    split: tuple[int, ...]  # the shape of the rows with factored axes; the last axis is not factored
    select: tuple[int | slice, ...]  # one entry per factor; an integer drops the axis
    axes: tuple[int, ...]  # the transposition
    target: tuple[int | slice, ...]  # one entry per axis of the parameter

    @property
    def rows_axis(self) -> int | None:
        """The parameter's axis along which the units are arranged, or `None` if the slice is a single unit."""
        if self.select[0] != ALL or len(self.split) == 1:
            return None
        # Follow the first factor through the selection and the transposition to its axis of the parameter.
        kept = [factor for factor, cut in enumerate(self.select) if isinstance(cut, slice)]
        slices = [axis for axis, place in enumerate(self.target) if isinstance(place, slice)]
        return slices[self.axes.index(kept.index(0))]

    @property
    def units(self) -> int:
        """The number of units."""
        return 1 if self.rows_axis is None else self.split[0]

    def narrowed(self, begin: int, end: int) -> "TensorSlice":
        """Cuts the slice along its rows.

        Returns:
            The slice of only these units, with fewer rows and a smaller target.
        """
        # A slice of a single unit cannot be cut.
        axis = self.rows_axis
        if axis is None:
            return self
        # A unit is some rows of the tensor and one index along the parameter's axis, so cut both in the same way.
        first, rows_per_unit = self.rows[0], (self.rows[1] - self.rows[0]) // self.split[0]
        along = self.target[axis]
        assert isinstance(along, slice)
        start = along.start or 0
        target = (*self.target[:axis], slice(start + begin, start + end), *self.target[axis + 1 :])
        rows = (first + begin * rows_per_unit, first + end * rows_per_unit)
        return self._replace(rows=rows, split=(end - begin, *self.split[1:]), target=target)

    def blocks(self, itemsize: int) -> Iterator["TensorSlice"]:
        """Cuts the slice so that each part fits in memory.

        Yields:
            Slices of at most `BLOCK_BYTES`, or of a single unit if a unit is larger.
        """
        # Take as many units at a time as fit into a block of memory, in steps of nearly equal size.
        step = even_step(self.units, BLOCK_BYTES // max(math.prod(self.split) // self.units * itemsize, 1))
        for begin in range(0, self.units, step):
            yield self.narrowed(begin, min(begin + step, self.units))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Arranges rows of the tensor in the same way as in the parameter.

        Args:
            rows: the rows of the tensor that the slice covers. The last axis is shorter for block scales.

        Returns:
            A view of `rows`, to be assigned to `param[target]`.
        """
        return rows.reshape(*self.split[:-1], -1)[self.select].transpose(self.axes)

    def write(self, rows: np.ndarray, part: np.ndarray) -> None:
        """Inverts `read`.

        Args:
            part: `param[target]`.
        """
        copy_into(rows.reshape(*self.split[:-1], -1)[self.select], part.transpose(np.argsort(self.axes)))


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A parameter's shape, and the tensor slices from which it is assembled."""

    shape: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    in_axis: int = -1  # negative index of the tensors' last axis in the parameter; block scales are shorter along it

    def chunks(self, itemsize: int) -> tuple[int, ...]:
        """Chooses the chunks in which the parameter is converted, so that memory use is bounded.

        Chunks are cut between experts, which are separate tensors, and along the tensors' rows, so that reading a chunk
        reads only its bytes.

        Returns:
            The shape of a chunk. A chunk has at most `BLOCK_BYTES` if cuts along these two axes suffice.
        """
        # Cut the expert axis first, because each expert is a separate tensor. Then cut along the rows.
        shape = list(self.shape)
        has_experts = not isinstance(self.slices[0].target[0], slice)
        for axis in (0 if has_experts else None, self.slices[0].rows_axis):
            if axis is not None:
                unit = math.prod(shape) // shape[axis] * itemsize
                shape[axis] = even_step(shape[axis], BLOCK_BYTES // unit)
        return tuple(shape)


def tensor_slice(name: str, shape, target, *, rows=None, split=None, select=(), axes=None) -> TensorSlice:
    """Makes a `TensorSlice` with defaults for omitted arguments.

    Args:
        target: one index per axis of the parameter.
        rows: begin and end along the tensor's first axis; by default, all rows.
        split: the factored shape of these rows; by default, they are not factored.
        select: indices into the factors; omitted indices are `slice(None)`.
        axes: the transposition; by default, there is none.
    """
    # By default, the slice has all rows, which are not factored, selected from or transposed.
    begin, end = rows or (0, shape[0])
    split = split or (end - begin, *shape[1:])
    assert math.prod(split) == (end - begin) * math.prod(shape[1:]), (name, shape, split)
    select = tuple(select) + (ALL,) * (len(split) - len(select))
    # Integers in `select` drop their axes, so only slices are left to be transposed.
    left = sum(isinstance(index, slice) for index in select)
    return TensorSlice(
        name, tuple(shape), (begin, end), tuple(split), select, tuple(axes or range(left)), tuple(target)
    )


def prefixed(prefix: str, specs: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Prepends a prefix, such as "trunk/layer_0/", to parameter names."""
    return {f"{prefix}{path}": spec for path, spec in specs.items()}


def slices_under(prefix: str, specs: Mapping[str, ParamSpec]) -> dict[str, TensorSlice]:
    """Returns one slice per tensor, by tensor name, for the parameters whose names start with a prefix."""
    return {piece.name: piece for path, spec in specs.items() if path.startswith(prefix) for piece in spec.slices}


def copied(name: str, *shape: int) -> ParamSpec:
    """Describes a parameter that is an unchanged tensor, such as a norm's scale or the embedding."""
    return ParamSpec(shape, (tensor_slice(name, shape, (ALL,) * len(shape)),))


def linear(name: str, inputs: int, outputs: int) -> ParamSpec:
    """Describes a linear layer, which PyTorch stores as `[out, in]` and mtpjax as `[in, out]`."""
    return ParamSpec((inputs, outputs), (tensor_slice(name, (outputs, inputs), (ALL, ALL), axes=(1, 0)),), in_axis=-2)


def gate_up(prefix: str, D: int, F: int) -> ParamSpec:
    """Describes the gate and up projections of a SwiGLU layer, which mtpjax stores as one array `[D, 2, F]`."""
    parts = [
        tensor_slice(f"{prefix}{name}_proj.weight", (F, D), (ALL, place, ALL), axes=(1, 0))
        for place, name in enumerate(("gate", "up"))
    ]
    return ParamSpec((D, 2, F), tuple(parts), in_axis=-3)


def even_step(size: int, largest: int) -> int:
    """Chooses a step that cuts an axis into as few parts as `largest` allows, with nearly equal sizes.

    Args:
        size: length of the axis.
        largest: the maximum length of a part; values below 1 count as 1.
    """
    # Compute the number of parts, rounded up, and then their length, so that 10 in steps of at most 6 is cut into 5 and
    # 5, not into 6 and 4.
    count = -(-size // max(1, largest))
    return -(-size // max(count, 1))


def copy_into(out: np.ndarray, view: np.ndarray) -> None:
    """Assigns `out[...] = view`. XLA copies transposed views, because it is several times as fast as NumPy."""
    # NumPy copies contiguous and small arrays as fast as the memory allows.
    if view.flags.c_contiguous or view.nbytes < TILE_BYTES // 4 or _cpu() is None:
        out[...] = view
        return
    # Use small tiles, whose memory is reused, because touching fresh memory would cost more than the copy.
    axis = int(np.argmax(view.strides))
    step = max(1, TILE_BYTES * view.shape[axis] // view.nbytes)
    for begin in range(0, view.shape[axis], step):
        tile = (ALL,) * axis + (slice(begin, begin + step),)
        out[tile] = np.asarray(jax.device_put(view[tile], _cpu()))


@functools.cache
def _cpu():
    """Returns JAX's CPU device, or `None` if JAX_PLATFORMS excludes it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
