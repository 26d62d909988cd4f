"""Parameters -> the tensors of Hugging Face files, block by block: `names.py` read backwards."""

from collections.abc import Callable, Iterator

import numpy as np

from conversion.load import E4M3, dequantise, scale_leaf
from conversion.names import Leaf, Piece
from conversion.shards import Entry

Read = Callable[[str, tuple[slice, ...]], np.ndarray]  # path of an array and index -> that part of it


class Assembly:
    """Tensors made from parameters.

    `read` gives parts of arrays; those of a leaf in `scaled` (path -> axis, block) are `path/values` and `path/scales`.
    `tied` names copies of tensors, `scales` the tensor of the scales of an fp8 tensor, `block` its rows and columns.
    """

    def __init__(
        self,
        leaves: dict[str, Leaf],
        read: Read,
        *,
        scaled: dict[str, list[int]],
        scales: dict[str, str],
        tied: dict[str, str],
        block: tuple[int, int] | None,
    ):
        self.read, self.scaled, self.tied, self.block = read, scaled, tied, block
        self.scale_of = {scale: name for name, scale in scales.items()}
        self.parts: dict[str, list[tuple[str, Leaf, Piece]]] = {}
        for path, leaf in leaves.items():
            for piece in leaf.pieces:
                self.parts.setdefault(piece.name, []).append((path, leaf, piece))

    def blocks(self, entry: Entry) -> Iterator[np.ndarray]:
        """The rows of a tensor, block by block, in `entry`'s dtype."""
        name = self.tied.get(entry.name, entry.name)
        if name in self.scale_of:
            yield self._scales(self.scale_of[name], entry)
            return
        groups: dict[tuple[int, int], list[tuple[str, Leaf, Piece]]] = {}
        for part in self.parts[name]:
            groups.setdefault(part[2].rows, []).append(part)
        for _, group in sorted(groups.items()):
            parts = [piece.blocks(entry.dtype.itemsize) for _, _, piece in group]  # cut alike: alike split
            for pieces in zip(*parts, strict=True):
                begin, end = pieces[0].rows
                rows = np.empty((end - begin, *entry.shape[1:]), entry.dtype)
                for (path, leaf, _), piece in zip(group, pieces, strict=True):
                    piece.write(rows, self._values(path, leaf, piece, entry.dtype))
                yield rows

    def _values(self, path: str, leaf: Leaf, piece: Piece, dtype: np.dtype) -> np.ndarray:
        index, kept = _index(piece, leaf.shape)
        if path not in self.scaled:
            return self.read(path, index)[kept].astype(dtype, copy=False)
        values = self.read(f"{path}/values", index)
        if dtype == E4M3:
            return values[kept]
        axis, side = self.scaled[path]
        whole = list(index)
        whole[axis] = slice(0, -(-leaf.shape[axis] // side))
        scales = self.read(f"{path}/scales", tuple(whole))
        return dequantise(values, scales, axis % len(leaf.shape), side, index[axis].start)[kept].astype(dtype)

    def _scales(self, name: str, entry: Entry) -> np.ndarray:
        """A tensor of scales: those of its parts are written out along rows, and every `block[0]`-th row is kept."""
        assert self.block is not None
        rows = np.empty((self.parts[name][0][2].shape[0], entry.shape[1]), np.float32)
        for path, leaf, piece in self.parts[name]:
            index, kept = _index(piece, scale_leaf(leaf, self.block).shape)
            piece.write(rows[slice(*piece.rows)], self.read(f"{path}/scales", index)[kept])
        return rows[:: self.block[0]].astype(entry.dtype)


def _index(piece: Piece, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[int | slice, ...]]:
    """Where a piece lies in its leaf: as slices, and what drops the axes along which it has one place."""
    index = tuple(
        slice(*place.indices(size)[:2]) if isinstance(place, slice) else slice(place, place + 1)
        for place, size in zip(piece.place, shape, strict=True)
    )
    return index, tuple(slice(None) if isinstance(place, slice) else 0 for place in piece.place)
