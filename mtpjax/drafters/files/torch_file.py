"""Reads tensors from PyTorch's `.pt` files without unpickling them.

Such a file is a zip archive, in which `data.pkl` is a pickle that describes the tensors and `data/N` holds the bytes of
storage N. Pickles are unsafe, because Python's unpickler imports and calls any function that a pickle refers to. This
interpreter supports only dicts, tuples, numbers and three kinds of globals, none of which it imports. These are the
function that rebuilds a tensor, `OrderedDict`, and the storage types. It rejects anything else.
"""

import math
import os
import pathlib
import pickletools
import zipfile
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from conversion.safetensors_header import TensorInfo
from mtpjax.errors import CheckpointFileError, printable
from mtpjax.safe_open import allowed_root, open_inside

MAX_PICKLE_BYTES = 16 << 20  # each tensor's description has about 100 bytes
STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
}


class _Name(NamedTuple):
    """A global in the pickle. It is compared with the known names and never imported."""

    module: str
    name: str


class _Storage(NamedTuple):
    """A storage, which the pickle references by key."""

    dtype: np.dtype
    key: str
    size: int  # elements


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]


_REBUILD, _ORDERED_DICT = _Name("torch._utils", "_rebuild_tensor_v2"), _Name("collections", "OrderedDict")
_MARK = object()


class TorchFile:
    """The tensors of a `.pt` file, with the parts of the `CheckpointFiles` interface that reading parameters needs.

    Attributes:
        path: the file.
        tensors: dtype and shape of each tensor, by name.
    """

    def __init__(self, path):
        """Opens the file and checks its tensor descriptions.

        Args:
            path: the file.

        Raises:
            CheckpointFileError: the file is damaged, or holds something other than a dict of tensors.
        """
        self.path = pathlib.Path(path)
        self._stream = os.fdopen(open_inside(self.path, allowed_root(self.path.parent)), "rb")
        try:
            self._places = self._describe()
        except BaseException:
            self._stream.close()
            raise
        self.tensors = {
            name: TensorInfo(name, self.path.name, tensor.storage.dtype, tensor.shape, 0, 0)
            for name, tensor in self._places.items()
        }

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_):
        self._stream.close()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads a tensor or some of its rows; see `CheckpointFiles.read` for the arguments."""
        tensor = self._places[name]
        count, itemsize = math.prod(tensor.shape), tensor.storage.dtype.itemsize
        with self._zip.open(f"{self._folder}/data/{tensor.storage.key}") as stream:
            stream.seek(tensor.offset * itemsize)
            content = stream.read(count * itemsize)
        if len(content) != count * itemsize:
            raise CheckpointFileError(f"{self.path}: the bytes of tensor {printable(name, 200)} are incomplete")
        return np.frombuffer(bytearray(content), tensor.storage.dtype).reshape(tensor.shape)[begin:end]

    def read_checked(self, name: str, begin: int, end: int) -> np.ndarray:
        """Reads rows of a tensor and rejects infinite and NaN elements."""
        rows = self.read(name, begin, end)
        if not np.isfinite(rows.astype(np.float32)).all():
            raise CheckpointFileError(f"{self.path}: tensor {printable(name, 200)} has infinite or NaN elements")
        return rows

    def _describe(self) -> dict[str, _Tensor]:
        """Opens the archive, and returns the storage and shape of each tensor."""
        try:
            self._zip = zipfile.ZipFile(self._stream)
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise CheckpointFileError(
                f"{self.path} is not a zip archive, PyTorch's format since 1.6: save it again, or as safetensors"
            ) from error
        entries = {entry.filename: entry for entry in self._zip.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        # Require stored (uncompressed) entries, so that none is larger than the file.
        if len(entries) != len(self._zip.infolist()) or any(entry.compress_type for entry in entries.values()):
            raise CheckpointFileError(f"{self.path} has compressed or repeated entries, which PyTorch does not write")
        if len(pickles) != 1 or entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise CheckpointFileError(f"{self.path} is not a file of tensors: it has {len(pickles)} data.pkl files")
        self._folder = pickles[0].partition("/")[0]
        order = f"{self._folder}/byteorder"
        if order in entries and self._zip.read(order) != b"little":
            raise CheckpointFileError(f"{self.path} is not little-endian")
        found = self._run(self._zip.read(pickles[0]))
        if not isinstance(found, dict) or not found:
            raise CheckpointFileError(f"{self.path} does not hold a dict of tensors")
        for name, tensor in found.items():
            if not isinstance(name, str) or not name.isprintable() or not isinstance(tensor, _Tensor):
                raise CheckpointFileError(f"{self.path} holds {printable(name, 200)!r}, which is not a tensor")
            entry = entries.get(f"{self._folder}/data/{tensor.storage.key}")
            size = tensor.storage.size * tensor.storage.dtype.itemsize
            if entry is None or entry.file_size < size or tensor.offset + math.prod(tensor.shape) > tensor.storage.size:
                raise CheckpointFileError(f"{self.path}: tensor {name[:200]} does not fit into its storage")
        return found

    def _run(self, content: bytes) -> Any:
        """Interprets the pickle."""
        try:
            return _interpret(content)
        # Malformed pickles fail in many ways, but they only run code in this file.
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointFileError(
                f"{self.path} is not supported: {printable(error, 300)}. Only dicts of tensors work; use safetensors"
            ) from error


def _interpret(content: bytes) -> Any:
    """Runs the opcodes that tensors need, and returns the value on top of the stack."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def pop_mark() -> list[Any]:
        place = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def pop(count: int) -> tuple[Any, ...]:
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return items

    push = stack.append
    operations: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), push),
        "NONE": lambda _: push(None),
        "NEWTRUE": lambda _: push(True),
        "NEWFALSE": lambda _: push(False),
        "EMPTY_DICT": lambda _: push({}),
        "EMPTY_TUPLE": lambda _: push(()),
        "MARK": lambda _: push(_MARK),
        "MEMOIZE": lambda _: memo.update({len(memo): stack[-1]}),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda key: memo.update({key: stack[-1]})),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda key: push(memo[key])),
        "TUPLE": lambda _: push(tuple(pop_mark())),
        **{f"TUPLE{count}": lambda _, count=count: push(pop(count)) for count in (1, 2, 3)},
        "GLOBAL": lambda text: push(_known(_Name(*str(text).split(" ")))),
        "STACK_GLOBAL": lambda _: push(_known(_Name(*pop(2)))),
        "BINPERSID": lambda _: push(_storage(stack.pop())),
        "REDUCE": lambda _: push(_rebuild(*pop(2))),
        "SETITEM": lambda _: _update(pop(2), stack),
        "SETITEMS": lambda _: _update(pop_mark(), stack),
    }
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            return stack[-1]
        if opcode.name not in operations:
            raise ValueError(f"the pickle has the opcode {opcode.name}, which tensors do not need")
        operations[opcode.name](argument)
    raise ValueError("the pickle does not end")


def _known(name: _Name) -> _Name:
    """Returns a name that tensors need; raises an error for any other name."""
    if name in (_REBUILD, _ORDERED_DICT) or (name.module == "torch" and name.name in STORAGES):
        return name
    raise ValueError(f"the pickle uses {name.module}.{name.name}, which is never imported")


def _storage(reference: Any) -> _Storage:
    """Parses a storage reference of the form ("storage", type, key, device, number of elements)."""
    kind, storage, key, _, size = reference
    if kind != "storage" or not isinstance(storage, _Name) or storage.module != "torch" or not str(key).isdecimal():
        raise ValueError("the pickle refers to something other than a storage")
    return _Storage(STORAGES[storage.name], str(key), _count(size))


def _rebuild(function: Any, arguments: Any) -> Any:
    """Interprets the two calls that occur in tensor descriptions."""
    if function == _ORDERED_DICT and arguments == ():
        return {}
    if function != _REBUILD:
        raise ValueError("the pickle calls something other than the function that rebuilds a tensor")
    storage, offset, shape, strides = arguments[:4]
    shape = tuple(map(_count, shape))
    contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if not isinstance(storage, _Storage) or tuple(strides) != contiguous:
        raise ValueError(f"a tensor of shape {shape} is not contiguous")
    return _Tensor(storage, _count(offset), shape)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a size")
    return value


def _update(items: Sequence[Any], stack: list[Any]) -> None:
    target = stack[-1]
    if type(target) is not dict or len(items) % 2 or not all(isinstance(key, Hashable) for key in items[::2]):
        raise ValueError("the pickle sets items of something other than a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if key in target:
            raise ValueError(f"the pickle contains the key {key!r} twice")
        target[key] = value
