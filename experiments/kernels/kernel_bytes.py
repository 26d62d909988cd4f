"""Finds the bytes that Pallas kernels declare (`pl.CostEstimate`), and the bytes that they load and store.

To run a kernel, its jaxpr is interpreted program by program on concrete arrays, and the distinct elements under the
mask of every load and store are counted. This is slow and suits only small shapes. An access outside its array raises
an error, whereas Pallas's interpreter pads.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of each array


@dataclasses.dataclass(frozen=True)
class Declared:
    """A kernel call in a jaxpr."""

    name: str
    operands: Shapes
    results: Shapes
    nbytes: int | None  # None: the kernel declares none
    from_l2: int = 0  # of these, loads from the L2 cache (`pallas_kernels.cost.loads_from_l2`)


@dataclasses.dataclass
class Traced:
    """A kernel call that was run."""

    declared: Declared
    read: int = 0
    written: int = 0
    again: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # repeated bytes
    loaded: dict[int, set[int]] = dataclasses.field(default_factory=dict)  # loaded indices, by operand


def declared_calls(function, *arguments) -> Iterator[Declared]:
    """Yields the kernel calls that a function makes; shapes suffice as arguments."""
    yield from _calls(jax.make_jaxpr(function)(*arguments).jaxpr)


def _calls(jaxpr) -> Iterator[Declared]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield _declared(equation)
            continue
        inner = list(equation.params.values())
        if platforms := equation.params.get("branches_platforms"):  # only the branch that is lowered for an H100
            [inner] = [
                branch
                for branch, names in zip(equation.params["branches"], platforms, strict=True)
                if "cuda" in (names or ("cuda",))
            ]
        for value in jax.tree.leaves(inner, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _calls(inner)


def _declared(equation) -> Declared:
    cost = equation.params["cost_estimate"]
    operands, results = (
        tuple((str(variable.aval.dtype), variable.aval.shape) for variable in variables)
        for variables in (equation.invars, equation.outvars)
    )
    from_l2 = int(dict(equation.params["metadata"] or {}).get("from_l2", 0))
    return Declared(equation.params["name"], operands, results, cost and cost.bytes_accessed, from_l2)


def run_counted(function, *arguments) -> tuple[Any, list[Traced]]:
    """Returns the results of a function, and its kernel calls in order, each interpreted and counted."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    traced: list[Traced] = []
    results = _Run(traced).evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results), traced


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A block of an array, which a kernel gets as an argument."""

    operand: int  # index of the array among the kernel's arrays
    array: np.ndarray
    starts: tuple[int, ...]  # start of the block in the array, by axis
    is_axis: tuple[bool, ...]  # whether the block has each of the array's axes

    def places(self, shape: Sequence[int], indexers: Sequence) -> np.ndarray:
        """Returns the flat indices of the accessed elements in the array; -1 for elements outside it."""
        assert len(indexers) < 2, "Triton's lowering takes no more"
        indices = list(indexers[0].indices) if indexers else [slice(0, size) for size in shape]
        indices = [_numbers(index) for index in indices]
        integers = np.broadcast_shapes(*(index.shape for index, is_slice in indices if not is_slice))
        wheres = [axis for axis, (_, is_slice) in enumerate(indices) if not is_slice]
        is_together = all(b - a == 1 for a, b in itertools.pairwise(wheres))
        before = sum(is_slice for _, is_slice in indices[: wheres[0]]) if wheres and is_together else 0
        num_slices = len(indices) - len(wheres)
        place, is_inside, nth = np.zeros((), np.int64), np.ones((), bool), 0
        coordinates = iter(indices)
        for axis, size in enumerate(self.array.shape):
            coordinate = np.zeros((), np.int64)
            if self.is_axis[axis]:
                coordinate, is_slice = next(coordinates)
                if is_slice:
                    num_after = num_slices - 1 - nth + (len(integers) if nth < before else 0)
                    coordinate, nth = coordinate.reshape(-1, *(1,) * num_after), nth + 1
                elif coordinate.ndim:
                    coordinate = coordinate.reshape(*coordinate.shape, *(1,) * (num_slices - before))
            coordinate = coordinate + self.starts[axis]
            is_inside = is_inside & (coordinate >= 0) & (coordinate < size)
            place = place * size + coordinate
        return np.where(is_inside, place, -1)


def _numbers(index) -> tuple[np.ndarray, bool]:
    """Returns the coordinates that an index selects, and whether it is a slice."""
    if isinstance(index, slice):
        return np.arange(index.start, index.stop), True
    if hasattr(index, "stride"):
        return int(index.start) + index.stride * np.arange(int(index.size)), True
    return np.asarray(index, np.int64), False


class _Run:
    """Evaluates jaxprs. Inside a kernel, `ids` are the program ids, and `traced` has the kernel's call."""

    def __init__(self, traced: list[Traced], ids: Sequence[int] = (), grid: Sequence[int] = ()):
        self.traced, self.ids, self.grid = traced, ids, grid

    def evaluate(self, jaxpr, consts: Sequence, arguments: Sequence) -> list:
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def value(variable):
            return variable.val if isinstance(variable, Literal) else known[variable]

        for equation in jaxpr.eqns:
            results = self.apply(equation, [value(variable) for variable in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def closed(self, closed, arguments: Sequence) -> list:
        """Evaluates a jaxpr with or without its constants."""
        return self.evaluate(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), arguments)

    def apply(self, equation: Any, values: list) -> list:
        name, params = equation.primitive.name, equation.params
        if hasattr(self, f"_{name}"):
            return getattr(self, f"_{name}")(values, params, equation)
        if name in _CALLS:
            return self.closed(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], values)
        results = equation.primitive.bind(*values, **params)
        return results if equation.primitive.multiple_results else [results]

    # Control flow. It carries refs, which are not arrays, so JAX's own evaluation cannot run it.

    def _while(self, values, params, equation) -> list:
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_condition, of_body, carry = values[: split[0]], values[split[0] : split[1]], values[split[1] :]
        while self.closed(params["cond_jaxpr"], [*of_condition, *carry])[0]:
            carry = self.closed(params["body_jaxpr"], [*of_body, *carry])
        return carry

    def _scan(self, values, params, equation) -> list:
        num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
        consts, carry, rows = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
        order = range(length)[::-1] if params["reverse"] else range(length)
        made = {}
        for turn in order:
            results = self.closed(params["jaxpr"], [*consts, *carry, *(row[turn] for row in rows)])
            carry, made[turn] = results[:num_carry], results[num_carry:]
        return [*carry, *(jnp.stack(column) for column in zip(*(made[turn] for turn in range(length)), strict=True))]

    def _cond(self, values, params, equation) -> list:
        branches = params["branches"]
        return self.closed(branches[int(np.clip(values[0], 0, len(branches) - 1))], values[1:])

    # Kernels, and primitives that occur only in kernels.

    def _pallas_call(self, values, params, equation) -> list:
        traced = Traced(_declared(equation))
        self.traced.append(traced)
        mapping = params["grid_mapping"]
        shared = {out: place for place, out in params["input_output_aliases"]}
        arrays = [np.array(value) for value in values]
        for out, aval in enumerate(params["out_avals"]):
            arrays.append(arrays[shared[out]] if out in shared else _garbage(aval))
        grid = tuple(int(size) for size in mapping.grid)
        own = [axis for axis in range(len(grid)) if axis not in mapping.vmapped_dims]
        for step in np.ndindex(*grid):
            program = _Run([traced], [step[axis] for axis in own], [grid[axis] for axis in own])
            blocks = enumerate(zip(arrays, mapping.block_mappings, strict=True))
            program.evaluate(params["jaxpr"], (), [_block(place, *pair, step) for place, pair in blocks])
        return [jnp.asarray(array) for array in arrays[len(values) :]]

    def _program_id(self, values, params, equation) -> list:
        return [jnp.int32(self.ids[params["axis"]])]

    def _num_programs(self, values, params, equation) -> list:
        return [jnp.int32(self.grid[params["axis"]])]

    def _multiple_of(self, values, params, equation) -> list:
        return values

    _max_contiguous = _multiple_of

    def _debug_barrier(self, values, params, equation) -> list:
        return []

    def _get(self, values, params, equation) -> list:
        return [self._load(values[0], params["tree"].unflatten(values[1:]), None, None, equation)]

    def _masked_load(self, values, params, equation) -> list:
        ref, indexers, mask, other = params["args_tree"].unflatten(values)
        return [self._load(ref, indexers, mask, other, equation)]

    def _swap(self, values, params, equation) -> list:
        return self._store(values[0], params["tree"].unflatten(values[2:]), values[1], None, equation)

    def _masked_swap(self, values, params, equation) -> list:
        ref, indexers, value, mask = params["args_tree"].unflatten(values)
        return self._store(ref, indexers, value, mask, equation)

    def _addupdate(self, values, params, equation) -> list:
        ref, indexers = values[0], params["tree"].unflatten(values[2:])
        self._store(ref, indexers, values[1] + self._load(ref, indexers, None, None, equation), None, equation)
        return []

    def _load(self, ref: _Ref, indexers, mask, other, equation) -> jax.Array:
        places, mask = self._access(ref, indexers, mask, equation, "read")
        fill = np.zeros((), ref.array.dtype) if other is None else np.asarray(other).astype(ref.array.dtype)
        return jnp.asarray(np.where(mask, ref.array.reshape(-1)[np.where(mask, places, 0)], fill))

    def _store(self, ref: _Ref, indexers, value, mask, equation) -> list:
        """Stores a value. Returns zeros in place of a swap's result, which is never used."""
        places, mask = self._access(ref, indexers, mask, equation, "written")
        value = np.broadcast_to(np.asarray(value), places.shape)
        ref.array.reshape(-1)[places[mask]] = value[mask]
        return [jnp.zeros(places.shape, ref.array.dtype)]

    def _access(self, ref: _Ref, indexers, mask, equation, kind: str) -> tuple[np.ndarray, np.ndarray]:
        places = ref.places(equation.invars[0].aval.shape, indexers)
        mask = np.broadcast_to(True if mask is None else np.asarray(mask), places.shape)
        if (places[mask] < 0).any():
            raise IndexError(f"{self.traced[0].declared.name}, program {tuple(self.ids)}: {equation} is out of bounds")
        traced, touched, itemsize = self.traced[0], set(places[mask].tolist()), ref.array.dtype.itemsize
        setattr(traced, kind, getattr(traced, kind) + len(touched) * itemsize)
        if kind == "read":
            loaded = traced.loaded.setdefault(ref.operand, set())
            traced.again[ref.operand] += len(touched & loaded) * itemsize
            loaded |= touched
        return places, mask


def _block(operand: int, array: np.ndarray, mapping, step: tuple[int, ...]) -> _Ref:
    """Returns the block of an array that the program at `step` of the grid gets."""
    index = mapping.index_map_jaxpr
    places = _Run([]).closed(index, [jnp.int32(axis) for axis in step])
    starts = []
    for place, block in zip(places, mapping.block_shape, strict=True):
        kind = type(block).__name__
        assert kind in ("Blocked", "Squeezed", "Element"), f"a block of the kind {kind}"
        starts.append(int(place) * (block.block_size if kind == "Blocked" else 1))
    return _Ref(
        operand, array, tuple(starts), tuple(type(block).__name__ != "Squeezed" for block in mapping.block_shape)
    )


def _garbage(aval) -> np.ndarray:
    """Returns the content of an output before it is written."""
    return np.full(aval.shape, np.nan if jnp.issubdtype(aval.dtype, jnp.floating) else -1).astype(aval.dtype)
