"""Assembles tensors for Hugging Face files from parameters, block by block, which is the inverse of loading."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from conversion.read_params import ScaleMap, dequantize, encode_scales, scale_spec
from conversion.safetensors_header import E4M3
from conversion.shards import TensorEntry
from conversion.tensor_slice import ParamSpec, TensorSlice

ReadParam = Callable[[str, tuple[slice, ...]], np.ndarray]  # (name of a stored array, index) -> that part of it


class TensorAssembler:
    """Assembles tensors from parameters that are read in parts."""

    def __init__(
        self,
        specs: Mapping[str, ParamSpec],
        read: ReadParam,
        *,
        scaled: Mapping[str, list[int]],
        scales: ScaleMap,
        tied: Mapping[str, str],
    ):
        """Indexes the slices of each tensor.

        Args:
            read: reads a part of a stored array. A quantized parameter is stored as `path/values` and `path/scales`.
            scaled: `[axis, block]` by flat name, for the parameters that are stored quantized.
        """
        self.read, self.scaled, self.tied, self.scales = read, scaled, tied, scales
        self.fp8_tensor = {scale: name for name, scale in scales.names.items()}
        self.parts: dict[str, list[tuple[str, ParamSpec, TensorSlice]]] = {}
        # Loading maps each parameter to its slices. Exporting needs the inverse, a map from each tensor to its slices.
        for path, spec in specs.items():
            for piece in spec.slices:
                self.parts.setdefault(piece.name, []).append((path, spec, piece))

    def blocks(self, entry: TensorEntry) -> Iterator[np.ndarray]:
        """Yields a tensor's rows in blocks, in order and in the entry's dtype."""
        # A copy, such as a module's embedding, is made from its original.
        name = self.tied.get(entry.name, entry.name)
        if name in self.fp8_tensor:
            yield self._scale_tensor(self.fp8_tensor[name], entry)
            return
        # Several slices, such as the query and the gate in `q_proj`, can share rows of a tensor. Cut them at the same
        # rows, and yield a block once all of them have filled it.
        groups: dict[tuple[int, int], list[tuple[str, ParamSpec, TensorSlice]]] = {}
        for part in self.parts[name]:
            groups.setdefault(part[2].rows, []).append(part)
        for _, group in sorted(groups.items()):
            parts = [piece.blocks(entry.dtype.itemsize) for _, _, piece in group]
            for pieces in zip(*parts, strict=True):
                begin, end = pieces[0].rows
                rows = np.empty((end - begin, *entry.shape[1:]), entry.dtype)
                for (path, spec, _), piece in zip(group, pieces, strict=True):
                    piece.write(rows, self._values(path, spec, piece, entry.dtype))
                yield rows

    def _values(self, path: str, spec: ParamSpec, piece: TensorSlice, dtype: np.dtype) -> np.ndarray:
        """Reads the part of a parameter that a slice covers. Dequantizes it unless the tensor is fp8 too."""
        index, kept = _index(piece, spec.shape)
        if path not in self.scaled:
            return self.read(path, index)[kept].astype(dtype, copy=False)
        # If the parameter and the tensor are both fp8, copy the values. `_scale_tensor` makes the scales.
        values = self.read(f"{path}/values", index)
        if dtype == E4M3:
            return values[kept]
        # Read all scales along the input axis, because a part may start inside a block.
        axis, block = self.scaled[path]
        whole = list(index)
        whole[axis] = slice(0, -(-spec.shape[axis] // block))
        scales = self.read(f"{path}/scales", tuple(whole))
        return dequantize(values, scales, axis % len(spec.shape), block, index[axis].start)[kept].astype(dtype)

    def _scale_tensor(self, name: str, entry: TensorEntry) -> np.ndarray:
        """Makes an fp8 tensor's scales. The parameter repeats them along rows, so only one row per block is kept."""
        # Assemble one row of scales per row of the weight, as in the parameter.
        rows = np.empty((self.parts[name][0][2].shape[0], entry.shape[1]), np.float32)
        for path, spec, piece in self.parts[name]:
            index, kept = _index(piece, scale_spec(spec, self.scales).shape)
            piece.write(rows[slice(*piece.rows)], self.read(f"{path}/scales", index)[kept])
        return encode_scales(rows[:: self.scales.block[0]], entry.dtype)


def _index(piece: TensorSlice, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[int | slice, ...]]:
    """Returns the slice's target with slices instead of integers, and an index that drops the axes of the integers."""
    index = tuple(
        slice(*place.indices(size)[:2]) if isinstance(place, slice) else slice(place, place + 1)
        for place, size in zip(piece.target, shape, strict=True)
    )
    return index, tuple(slice(None) if isinstance(place, slice) else 0 for place in piece.target)
