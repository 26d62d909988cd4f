"""Counts the bytes that each instruction in a compiled module reads and writes, from the module's text.

An instruction reads its operands and writes its results once. Data that a later instruction finds in the L2 cache still
counts, and data that an XLA kernel reads twice counts once. If an operand is sliced or gathered, only that part is
read; an update in place writes only the update; views cost nothing.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping

VIEWS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
SLICES = {"slice", "dynamic-slice", "gather"}
LIBRARY = ("__cublas$", "__cudnn$", "__cub$")  # their last result is scratch memory if its items are bytes


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0]) // 8

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    results: tuple[Array, ...]  # including those of nested tuples
    parts: tuple[int, ...]  # how many results each element of the outermost tuple has
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called(self, attribute: str) -> str:
        return re.findall(rf"\b{attribute}=%?([\w.-]+)", self.attributes)[0]

    @property
    def target(self) -> str:
        return (re.findall(r'custom_call_target="([^"]*)"', self.attributes) or [""])[0]

    @property
    def aliases(self) -> dict[int, int]:
        """Maps each result that is written into an operand to the index of this operand."""
        found = re.findall(r"output_to_operand_aliasing=\{(.*?)\)\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", found[0]) if found else []
        return {int(result or 0): int(operand) for result, operand in pairs}

    @property
    def source(self) -> str:
        """The instruction's location in the Python program."""
        return (re.findall(r'op_name="([^"]*)"', self.attributes) or [""])[0]


@dataclasses.dataclass(frozen=True)
class Computation:
    instructions: Mapping[str, Instruction]  # in a valid order of execution
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        found = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return sorted(found, key=lambda one: int(one.operands[0]))


@dataclasses.dataclass(frozen=True)
class Moved:
    """The bytes that one instruction moves per execution."""

    instruction: Instruction
    times: int  # how often it runs
    loops: tuple[str, ...]  # the sources of the enclosing loops, outermost first
    read: Mapping[str, float]  # bytes, by operand
    written: float
    origins: Mapping[str, int | None]  # operand -> the entry computation's parameter that it equals, or None

    @property
    def total(self) -> int:
        return round(self.times * (sum(self.read.values()) + self.written))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a compiled module, and the name of its entry computation."""
    computations: dict[str, Computation] = {}
    entry, name, body, root = "", None, {}, ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.$-]+) \(.*\{$", line):
            name, body = header[2], {}
            entry = name if header[1] else entry
        elif line == "}" and name:
            computations[name] = Computation(body, root)
            name = None
        elif name and (found := re.match(r"\s+(ROOT )?%?([\w.$-]+) = ", line)):
            one = _instruction(found[2], line[found.end() :])
            body[one.name] = one
            root = one.name if found[1] else root
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    kind, rest = _cut(text) if text.startswith("(") else text.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    inside, attributes = _cut("(" + rest)
    parts = [kind]
    if kind.startswith("("):
        parts, depth = [""], 0
        for sign in kind[1:-1]:
            depth += (sign in "([{") - (sign in ")]}")
            parts = [*parts, ""] if sign == "," and not depth else [*parts[:-1], parts[-1] + sign]
    arrays = [_arrays(part) for part in parts]
    operands = re.findall(r"%([\w.$-]+)", inside) if opcode != "parameter" else [inside.strip("()")]
    results = tuple(itertools.chain(*arrays))
    return Instruction(name, results, tuple(map(len, arrays)), opcode, tuple(operands), attributes)


def _arrays(kind: str) -> list[Array]:
    found = re.findall(r"([a-z]\w*)\[([\d,]*)\]", kind)
    return [Array(dtype, tuple(int(size) for size in shape.split(",") if size)) for dtype, shape in found]


def _cut(text: str) -> tuple[str, str]:
    """Splits a text after the parenthesis that closes the first one."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


class Counter:
    """Counts the bytes of everything that one computation runs.

    `declared(instruction, operands)` returns what a Triton kernel declares that it reads and writes;
    `turns(instruction)` returns the trip count of a loop if XLA does not know it.
    """

    def __init__(
        self,
        computations: Mapping[str, Computation],
        declared: Callable[[Instruction, list[Array]], int],
        turns: Callable[[Instruction], int],
    ):
        self.computations, self.declared, self.turns = computations, declared, turns

    def moved(
        self, name: str, origins: list[int | None], times: int = 1, loops: tuple[str, ...] = ()
    ) -> Iterator[Moved]:
        """Yields what computation `name` moves, in order. `origins` has one entry per element of its parameters."""
        computation = self.computations[name]
        known: dict[str, list[int | None]] = {}  # instruction -> where each of its results comes from
        rest = list(origins)
        for one in computation.parameters:
            known[one.name], rest = rest[: len(one.results)], rest[len(one.results) :]
        for one in computation.instructions.values():
            if one.opcode == "parameter":
                continue
            known[one.name] = self._origins(computation, one, known)
            inner = [origin for operand in one.operands for origin in known[operand]]
            if one.opcode == "while":
                found = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.attributes)
                turns = times * (int(found[1]) if found else self.turns(one))
                body = one.called("body")
                for attribute in ("body", "condition"):
                    origins = self._unchanging(body, inner)
                    yield from self.moved(one.called(attribute), origins, turns, (*loops, one.source))
            elif one.opcode == "call":
                yield from self.moved(one.called("to_apply"), inner, times, loops)
            elif one.opcode == "async-start":
                yield from self.moved(one.called("calls"), inner, times, loops)
            elif one.opcode == "conditional":  # the branch that moves the most bytes
                several = re.findall(r"branch_computations=\{(.*?)\}", one.attributes)
                names = (
                    re.findall(r"[\w.$-]+", several[0])
                    if several
                    else [one.called("true_computation"), one.called("false_computation")]
                )
                taken = zip(names, one.operands[1:], strict=True)
                branches = [list(self.moved(name, known[operand], times, loops)) for name, operand in taken]
                yield from max(branches, key=lambda branch: sum(each.total for each in branch))
            elif one.opcode not in VIEWS | {"async-done", "async-update"}:
                read, written = self._bytes(computation, one)
                places = {operand: known[operand][0] if known[operand] else None for operand in one.operands}
                yield Moved(one, times, loops, read, written, places)

    def _origins(
        self, computation: Computation, one: Instruction, known: Mapping[str, list[int | None]]
    ) -> list[int | None]:
        of = [known[operand] for operand in one.operands if operand in known]
        if one.opcode == "get-tuple-element":
            place = int(re.findall(r"\bindex=(\d+)", one.attributes)[0])
            parts = computation.instructions[one.operands[0]].parts
            return of[0][sum(parts[:place]) : sum(parts[: place + 1])]
        if one.opcode == "tuple":
            return [origin for origins in of for origin in origins]
        if one.opcode == "bitcast":
            return of[0]
        if one.opcode == "while":
            return self._unchanging(one.called("body"), of[0])
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return of[0][:1]
        if one.opcode == "custom-call":
            return [of[one.aliases[place]][0] if place in one.aliases else None for place in range(len(one.results))]
        if one.opcode == "fusion":
            inside = self.computations[one.called("calls")]
            roots = self._roots(inside)
            if len(roots) == len(one.results):  # else its root is a reduction of several arrays
                updated = [self._updated(inside, root)[0] for root in roots]
                return [None if place is None else of[place][0] for place in updated]
        return [None] * len(one.results)

    def _unchanging(self, body: str, origins: list[int | None]) -> list[int | None]:
        """Returns a loop's `origins`, with None for values that an iteration replaces."""
        computation = self.computations[body]
        parameter, root = computation.parameters[0], computation.instructions[computation.root]
        if root.opcode != "tuple":
            return [None] * len(origins)
        known: dict[str, list[int | None]] = {parameter.name: list(range(len(origins)))}
        for one in computation.instructions.values():
            if one.opcode != "parameter":
                known[one.name] = self._origins(computation, one, known)
        made = [origin for operand in root.operands for origin in known[operand]]
        return [origin if made[place] == place else None for place, origin in enumerate(origins)]

    def _bytes(self, computation: Computation, one: Instruction) -> tuple[Mapping[str, float], float]:
        names = [name for name in one.operands if len(computation.instructions[name].results) == 1]
        operands = [computation.instructions[name].results[0] for name in names]
        if one.opcode == "custom-call" and "triton" in one.target:
            # The kernel declares its bytes. Those that are not written are read, and are divided among the operands by
            # size.
            whole = self.declared(one, operands)
            made = [result.nbytes for place, result in enumerate(one.results) if place not in one.aliases]
            written = min(sum(made), whole)
            share = (whole - written) / (sum(operand.nbytes for operand in operands) or 1)
            shares: dict[str, float] = dict.fromkeys(names, 0.0)
            for name, operand in zip(names, operands, strict=True):
                shares[name] += share * operand.nbytes
            return shares, written
        if one.opcode == "fusion":
            return self._fusion_bytes(one)
        results = list(one.results)
        if one.opcode == "custom-call" and one.target.startswith(LIBRARY) and results[-1].itemsize == 1:
            results.pop()
        read = {name: operand.nbytes for name, operand in zip(names, operands, strict=True)}
        written = sum(result.nbytes for result in results)
        if one.opcode in SLICES:
            read[one.operands[0]] = min(written, read[one.operands[0]])
        elif one.opcode == "dynamic-update-slice":
            written = read[one.operands[1]]
            read[one.operands[0]] = 0
        elif one.opcode == "scatter":
            written = read[one.operands[-1]]
            read[one.operands[0]] = min(written, read[one.operands[0]])
        return read, written

    def _fusion_bytes(self, one: Instruction) -> tuple[dict[str, int], int]:
        inside = self.computations[one.called("calls")]
        needed = self._needed(inside)
        read: dict[str, int] = {}
        for operand, parameter in zip(one.operands, inside.parameters, strict=True):
            read[operand] = read.get(operand, 0) + needed[parameter.name] * parameter.results[0].itemsize
        return read, sum(self._updated(inside, root)[1] for root in self._roots(inside))

    def _roots(self, computation: Computation) -> list[str]:
        roots = [computation.root]
        while any(computation.instructions[name].opcode == "tuple" for name in roots):
            nested = (computation.instructions[name] for name in roots)
            roots = [name for one in nested for name in (one.operands if one.opcode == "tuple" else [one.name])]
        return roots

    def _updated(self, computation: Computation, root: str) -> tuple[int | None, int]:
        """Returns the parameter that a fusion updates in place, or None, and the bytes written."""
        made = computation.instructions[root]
        one = self._behind_views(computation, root)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            buffer = self._behind_views(computation, one.operands[0])
            if buffer.opcode == "parameter":
                update = computation.instructions[one.operands[1 if one.opcode == "dynamic-update-slice" else -1]]
                return int(buffer.operands[0]), update.results[0].nbytes
        return None, sum(result.nbytes for result in made.results)

    def _behind_views(self, computation: Computation, name: str) -> Instruction:
        one = computation.instructions[name]
        while one.opcode == "bitcast":
            one = computation.instructions[one.operands[0]]
        return one

    def _needed(self, computation: Computation, wanted: float = math.inf) -> dict[str, int]:
        """Returns how many elements of each instruction a fusion computes for `wanted` elements of its root."""
        need = dict.fromkeys(computation.instructions, 0)

        def ask(name: str, count: float) -> None:
            size = sum(result.size for result in computation.instructions[name].results)
            need[name] = math.ceil(min(size, need[name] + count))

        for root in self._roots(computation):
            ask(root, wanted)
        for one in reversed(list(computation.instructions.values())):
            count = need[one.name]
            if not count or one.opcode in ("parameter", "constant", "iota"):
                continue
            size = sum(result.size for result in one.results)
            sizes = [sum(array.size for array in computation.instructions[name].results) for name in one.operands]
            if one.opcode in ("dynamic-update-slice", "scatter"):
                is_update = one.opcode == "dynamic-update-slice"
                update = sizes[1 if is_update else -1]
                in_place = self._behind_views(computation, one.operands[0]).opcode == "parameter"
                # An update in place does not read the buffer, except for the elements that a scatter may add to.
                ask(one.operands[0], (0 if is_update else update) if in_place else count - update)
                for name in one.operands[1:]:
                    ask(name, math.inf)
            elif one.opcode == "fusion":
                inside = self.computations[one.called("calls")]
                inner = self._needed(inside, count)
                for name, parameter in zip(one.operands, inside.parameters, strict=True):
                    ask(name, inner[parameter.name])
            elif one.opcode in SLICES:
                ask(one.operands[0], count)
                for name in one.operands[1:]:
                    ask(name, math.inf)
            elif one.opcode in ("reduce", "concatenate", "reduce-window"):
                for name, other in zip(one.operands, sizes, strict=True):
                    ask(name, other * count / size)
            elif one.opcode in ("dot", "sort", "custom-call"):
                for name in one.operands:
                    ask(name, math.inf)
            else:  # element by element, a broadcast, a transpose, a pad
                for name in one.operands:
                    ask(name, count)
        return need
