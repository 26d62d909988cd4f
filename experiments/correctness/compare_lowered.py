"""Compares the StableHLO to which two checkouts lower the same calls, to see whether a code change altered it.

    JAX_DUMP_IR_TO=OLD pytest -q -n 0 FILES     # in the old checkout
    JAX_DUMP_IR_TO=NEW pytest -q -n 0 FILES     # in the new one, with the same version of JAX
    python -m experiments.correctness.compare_lowered OLD NEW [--functions REGEX]

JAX writes every module that it compiles to the folder. With FILES =

    tests/decoding/test_{generate,rounds,drafters,block_drafters,trained_drafters,depth_policy,acceptance}.py
    tests/equalities/test_mesh.py tests/training/test_{step,train_drafters,train_blocks,trained_parts}.py
    tests/equalities/test_golden_{forward,drafters,dflash}.py tests/conversion/test_matrix.py
    tests/decoding/test_{last_layer_state,kv_cache_dtype,reused_slots}.py tests/training/test_trainer.py

the modules are `decode` for every kind of attention, drafter and acceptance rule in the tests, and `train_step` for
every objective and draft architecture. Only one process may write to a folder (`-n 0`), because JAX numbers the files.
Subfolders are read too.

Modules are compared as graphs, not as text. Two modules are the same if each result is the same expression of the
arguments and both have the same number of each operation. So names, source locations, inlining of functions, and the
order of independent operations and of loop variables do not count. Arguments are identified by their type and by their
order among the arguments of that type. If only that order differs, a module counts as reordered.

Prints a row for each jitted function, then the differences. The exit code is 1 if a program in one folder is missing in
the other; how often a program was compiled does not count.
"""

import argparse
import collections
import dataclasses
import difflib
import functools
import hashlib
import pathlib
import re
import sys
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

FILE_NAME = re.compile(r"jax_ir\d+_(.*)_compile\.mlir")
# Names of Python values, source locations, and numbers that a process gives to its callbacks.
IGNORED_ATTRIBUTES = {"sym_name", "sym_visibility", "function_type", "callee", "res_attrs", "arg_attrs"}
CALLBACK = "callback"
REFINEMENTS = 3  # passes over a loop's body to distinguish its variables
MAX_DIFFERENCES, MAX_LINES = 3, 12
Counts = collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module's name and file, and the hashes of its graph with and without the order of its arguments."""

    function: str
    file: pathlib.Path
    ordered: str
    unordered: str
    operations: Counts


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation without names. Values are numbers, one for each value in its function."""

    name: str
    attributes: str  # a hash
    callee: str
    operands: list[int]
    results: list[int]
    blocks: list["Block"]


@dataclasses.dataclass(frozen=True)
class Block:
    arguments: list[int]
    types: list[str]
    operations: list[Operation]


def _hash(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def read_block(block: ir.Block, numbers: dict[Any, int]) -> Block:
    """Reads a block and its inner blocks. Adds the block's values to `numbers`, which has those of the outer blocks."""
    number = lambda values: [numbers.setdefault(value, len(numbers)) for value in values]
    arguments, types = number(block.arguments), [str(each.type) for each in block.arguments]
    operations = []
    for operation in (each.operation for each in block.operations):
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        callee = ir.FlatSymbolRefAttr(attributes["callee"]).value if "callee" in attributes else ""
        if CALLBACK in str(attributes.get("call_target_name", "")):  # contains the address of a Python function
            attributes.pop("backend_config", None)
            attributes.pop("mhlo.backend_config", None)
        kept = sorted((name, str(each)) for name, each in attributes.items() if name not in IGNORED_ATTRIBUTES)
        hashed = _hash(kept, [str(each.type) for each in operation.results])
        operands, results = number(operation.operands), number(operation.results)
        blocks = [read_block(inner, numbers) for region in operation.regions for inner in region.blocks]
        operations.append(Operation(operation.name, hashed, callee, operands, results, blocks))
    return Block(arguments, types, operations)


class Graph:
    """Labels every value of a module with the hash of the expression that computes it."""

    def __init__(self, text: str):
        """Reads the module's functions."""
        self.functions: dict[str, Block] = {}
        self.arguments: list[str] = []
        self.others = []  # meshes
        self.called: dict[tuple, list[str]] = {}
        self.counted: dict[str, Counts] = {}
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            for operation in (each.operation for each in module.body.operations):
                if operation.name != "func.func":
                    self.others.append(str(operation))
                    continue
                name = ir.StringAttr(operation.attributes["sym_name"]).value
                self.functions[name] = read_block(operation.regions[0].blocks[0], {})
                if name == "main":
                    self.arguments = _argument_types(operation, self.functions[name])

    def label(self, is_ordered: bool) -> str:
        """Returns the hash of the module's results."""
        self.called.clear()
        seen: Counts = collections.Counter()
        labels = []
        for argument in self.arguments:
            labels.append(_hash(argument, seen[argument] if is_ordered else 0))
            seen[argument] += 1
        return _hash(sorted(self.others), sorted(labels), sorted(self._call("main", labels)))

    def count_operations(self, function: str = "main") -> Counts:
        """Counts the operations by name, including those of called functions at each call."""
        if function not in self.counted:
            counts: Counts = collections.Counter()
            waiting = [self.functions[function]]
            while waiting:
                for operation in waiting.pop().operations:
                    waiting += operation.blocks
                    if operation.callee:
                        counts += self.count_operations(operation.callee)
                    elif not operation.name.endswith("return"):
                        counts[operation.name] += 1
            self.counted[function] = counts
        return self.counted[function]

    def _call(self, function: str, labels: list[str]) -> list[str]:
        key = (function, *labels)
        if key not in self.called:
            self.called[key] = self._run(self.functions[function], labels, {})
        return self.called[key]

    def _run(self, block: Block, labels: list[str], values: dict[int, str]) -> list[str]:
        """Labels the values in a block; returns the labels of its results."""
        values.update(zip(block.arguments, labels, strict=True))
        for operation in block.operations:
            operands = [values[each] for each in operation.operands]
            if operation.name.endswith("return"):
                return operands
            values.update(zip(operation.results, self._results(operation, operands, values), strict=True))
        return []

    def _results(self, operation: Operation, operands: list[str], values: dict[int, str]) -> list[str]:
        name, attributes, blocks = operation.name, operation.attributes, operation.blocks
        if operation.callee:
            return self._call(operation.callee, operands)
        if name == "stablehlo.while":
            condition, body = blocks
            return self._loop(condition, body, operands, values)
        if name == "stablehlo.case":  # each result depends only on the corresponding value of each branch
            branches = zip(*(self._run(block, [], values) for block in blocks), strict=True)
            return [_hash(name, operands, branch) for branch in branches]
        if name == "sdy.manual_computation":  # the body of a `shard_map`
            labels = [_hash("shard", each) for each in operands]
            return [_hash(name, attributes, each) for each in self._run(blocks[0], labels, values)]
        # Other regions have few arguments, whose order is significant.
        inner = [self._run(block, [_hash(i, type) for i, type in enumerate(block.types)], values) for block in blocks]
        common = _hash(name, attributes, operands, inner)
        return [f"{common} {i}" for i in range(len(operation.results))]

    def _loop(self, condition: Block, body: Block, operands: list[str], values: dict[int, str]) -> list[str]:
        """Labels a loop's variables by their initial values, then by how each pass computes them from the others."""
        labels = [_hash("variable", operand) for operand in operands]
        for _ in range(REFINEMENTS):
            labels = [_hash(*pair) for pair in zip(labels, self._run(body, labels, values), strict=True)]
        loop = _hash("loop", sorted(labels), self._run(condition, labels, values))
        return [_hash(loop, label) for label in labels]


def _argument_types(function: ir.Operation, block: Block) -> list[str]:
    """Returns the type of each argument with its sharding, and whether it is donated."""
    if "arg_attrs" not in function.attributes:
        return block.types
    attributes = map(str, ir.ArrayAttr(function.attributes["arg_attrs"]))
    donated = [re.sub(r"aliasing_output = [0-9]+", "donated", each) for each in attributes]
    return [f"{type} {each}" for type, each in zip(block.types, donated, strict=True)]


def read_programs(folder: pathlib.Path, functions: str) -> list[Program]:
    """Returns the programs in a folder whose function name fully matches `functions`."""
    programs = []
    for file in sorted(folder.rglob("*.mlir")):
        name = FILE_NAME.fullmatch(file.name)
        if name is None or not re.fullmatch(functions, name[1].removeprefix("jit_")):
            continue
        with mlir.make_ir_context():
            text = str(ir.Module.parse(file.read_text()))  # without locations
        programs.append(Program(name[1].removeprefix("jit_"), file, *fingerprint(text)))
    return programs


@functools.cache  # most modules are in both folders
def fingerprint(text: str) -> tuple[str, str, Counts]:
    """Returns a module's hashes, with and without the order of its arguments, and the number of each operation."""
    graph = Graph(text)
    counts = graph.count_operations()
    ordered, unordered = (_hash(sorted(counts.items()), graph.label(is_ordered)) for is_ordered in (True, False))
    return ordered, unordered, counts


@dataclasses.dataclass
class Row:
    """The distinct programs of one function that are in both folders or in only one of them."""

    function: str
    num_old: int
    num_new: int
    same: int
    reordered: int
    only_old: list[Program]
    only_new: list[Program]


def compare(old: list[Program], new: list[Program]) -> list[Row]:
    """Returns a row for each function."""
    return [
        _row(function, *([each for each in programs if each.function == function] for programs in (old, new)))
        for function in sorted({each.function for each in [*old, *new]})
    ]


def _row(function: str, old: list[Program], new: list[Program]) -> Row:
    distinct_old, distinct_new = ({each.ordered: each for each in programs} for programs in (old, new))
    same = distinct_old.keys() & distinct_new.keys()
    left_old = [each for label, each in distinct_old.items() if label not in same]
    left_new = [each for label, each in distinct_new.items() if label not in same]
    reordered = {each.unordered for each in left_old} & {each.unordered for each in left_new}
    only_old, only_new = ([each for each in left if each.unordered not in reordered] for left in (left_old, left_new))
    return Row(function, len(old), len(new), len(same), len(reordered), only_old, only_new)


def describe_difference(program: Program, others: list[Program]) -> list[str]:
    """Returns lines about a program and the most similar program in the other folder, if any."""
    lines = [f"{program.function}: {program.file}"]
    if not others:
        return [*lines, "  the other folder has no such program"]
    distance = lambda other: sum(
        ((program.operations - other.operations) + (other.operations - program.operations)).values()
    )
    other = min(others, key=distance)
    lines.append(f"  most similar: {other.file}")
    for sign, counts in (("-", program.operations - other.operations), ("+", other.operations - program.operations)):
        lines += [f"  {sign} {number} {name}" for name, number in sorted(counts.items())]
    changes = difflib.unified_diff(_plain_lines(program.file), _plain_lines(other.file), n=0, lineterm="")
    changed = [line for line in changes if not line.startswith(("---", "+++", "@@"))]
    lines += [f"  {line[:200]}" for line in changed[:MAX_LINES]]
    return lines + [f"  ... {len(changed) - MAX_LINES} more lines"] * (len(changed) > MAX_LINES)


def _plain_lines(file: pathlib.Path) -> list[str]:
    """Returns a module's lines without locations or names."""
    text = re.sub(r" ?loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()]|\([^()]*\))*\))*\)", "", file.read_text())
    text = re.sub(r"%[\w#]+|@\w+|jax\.result_info = \"[^\"]*\"", "%", text)
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#loc")]


def print_table(rows: list[Row]) -> None:
    """Prints a row for each function."""
    header = ("function", "modules old", "new", "same", "reordered", "only old", "only new")
    cells = [
        (row.function, row.num_old, row.num_new, row.same, row.reordered, len(row.only_old), len(row.only_new))
        for row in rows
    ]
    widths = [max(len(str(each)) for each in column) for column in zip(header, *cells, strict=True)]
    for cell in [header, *cells]:
        first, *others = (
            f"{each:<{width}}" if i == 0 else f"{each:>{width}}"
            for i, (each, width) in enumerate(zip(cell, widths, strict=True))
        )
        print("  ".join([first, *others]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path, help="folder of the old checkout")
    parser.add_argument("new", type=pathlib.Path, help="folder of the new checkout")
    parser.add_argument(
        "--functions", default="decode|train_step", help="regular expression for the names of jitted functions"
    )
    options = parser.parse_args(argv)
    old, new = (read_programs(folder, options.functions) for folder in (options.old, options.new))
    if not old or not new:
        parser.error(f"no module of {options.functions!r} in {options.new if old else options.old}")
    rows = compare(old, new)
    print_table(rows)
    for row in rows:
        for program in row.only_old[:MAX_DIFFERENCES]:
            print("\nonly old:", *describe_difference(program, row.only_new), sep="\n")
        if not row.only_old:
            for program in row.only_new[:MAX_DIFFERENCES]:
                print("\nonly new:", *describe_difference(program, []), sep="\n")
    return int(any(row.only_old or row.only_new for row in rows))


if __name__ == "__main__":
    sys.exit(main())
