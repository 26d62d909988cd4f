"""The rows of `code_report` about draft methods, the sizes of functions and files, and the numbers of lines.

A draft method is a folder in `mtpjax/drafters` with a network, a drafter and the code for its files. Code outside the
folder never checks which method it handles, and a single table lists the methods.
"""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from experiments.common import ROOT
from experiments.correctness.source import PACKAGES, Figure, parse

METHODS = "mtpjax.drafters"
NOT_METHODS = {"files"}  # folders with code that methods share
MAX_PARAMETERS, MAX_LINES, LONGEST, MAX_FILE = 8, 80, 150, 400
LIGHT, MAX_LOADED = "mtpjax.decoding.spec", 20
MAX_CODE, MAX_DOCSTRINGS = 41_800, 13_500
Modules = dict[str, pathlib.Path]
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def method_of(module: str) -> str | None:
    """Returns the draft method whose folder contains a module."""
    rest = module.removeprefix(f"{METHODS}.").split(".")
    return rest[0] if module.startswith(f"{METHODS}.") and len(rest) > 1 and rest[0] not in NOT_METHODS else None


def find_questions(modules: Modules) -> list[str]:
    """Returns the places outside a method's folder that check for one of the method's classes."""
    homes = {
        node.name: method
        for module, file in modules.items()
        if (method := method_of(module))
        for node in parse(file).body
        if isinstance(node, ast.ClassDef)
    }
    found = []
    for module, file in modules.items():
        for line, name in _questions(parse(file)):
            if name in homes and homes[name] != method_of(module):
                found.append(f"{file.relative_to(ROOT)}:{line}: {name}")
    return found


def _questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and class of each `isinstance`, `issubclass`, `type(x) is C` and `case C()`."""
    for node in ast.walk(tree):
        classes: list[ast.expr] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            classes = node.args[1:]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            classes = node.comparators if getattr(node.left.func, "id", "") == "type" else []
        elif isinstance(node, ast.MatchClass):
            classes = [node.cls]
        for each in (inner for one in classes for inner in ast.walk(one)):
            if isinstance(each, ast.Name | ast.Attribute):
                yield each.lineno, each.id if isinstance(each, ast.Name) else each.attr


def find_tables(modules: Modules) -> list[str]:
    """Returns the literal tables that list three or more draft methods, as strings or names from their folders."""
    methods = {method for module in modules if (method := method_of(module))}
    found = []
    for file in modules.values():
        tree = parse(file)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        homes = {
            each.asname or each.name: method_of(f"{node.module}.{each.name}.")
            for node in imports
            for each in node.names
        }
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                parts = node.keys if isinstance(node, ast.Dict) else node.elts
                named = {each.value for each in parts if isinstance(each, ast.Constant)} & methods
                values = node.values if isinstance(node, ast.Dict) else node.elts
                used = {each.id for value in values for each in ast.walk(value) if isinstance(each, ast.Name)}
                if len(named) >= 3 or len({homes[name] for name in used & set(homes)} & methods) >= 3:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
                    continue
            waiting += ast.iter_child_nodes(node)
    return sorted(found)


def with_imports_by_string(graph: dict[str, set[str]], modules: Modules) -> dict[str, set[str]]:
    """Adds the modules that appear in strings to the graph, as "mtpjax.module" or "mtpjax.module:NAME".

    A name after "-m" does not count, because that module runs in its own process.
    """
    found = {module: set(targets) for module, targets in graph.items()}
    for module, file in modules.items():
        processes: set[ast.AST] = set()
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.List | ast.Tuple):
                pairs = zip(node.elts, node.elts[1:], strict=False)
                processes |= {b for a, b in pairs if isinstance(a, ast.Constant) and a.value == "-m"}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in processes:
                found[module] |= {node.value.split(":")[0]} & (set(modules) - {module, *PACKAGES})
    return found


def num_parameters(function: Functions) -> int:
    """Counts a function's parameters without `self` and `cls`."""
    arguments = function.args
    positional = [each.arg for each in arguments.posonlyargs + arguments.args]
    count = len(positional) + len(arguments.kwonlyargs) + bool(arguments.vararg) + bool(arguments.kwarg)
    return count - (positional[:1] in (["self"], ["cls"]))


def count_lines(file: pathlib.Path) -> tuple[int, int]:
    """Returns the numbers of code lines (no docstrings, comments or blank lines) and of docstring lines."""
    documented: set[int] = set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Module | ast.ClassDef | Functions) and ast.get_docstring(node, clean=False) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, file.read_text().splitlines()), start=1)
    code = sum(number not in documented and bool(line) and not line.startswith("#") for number, line in lines)
    return code, len(documented)


def loaded_modules(module: str) -> list[str]:
    """Returns the library modules that importing `module` loads, determined in a separate process."""
    program = f"import sys, {module}; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if name.split(".")[0] in PACKAGES)


def measure(modules: Modules) -> list[Figure]:
    """Returns the figures, each with its limit."""
    own = {module: file for module, file in modules.items() if module.split(".")[0] != "pallas_kernels"}
    functions = [
        (f"{file.relative_to(ROOT)}: {node.name}", node)
        for file in own.values()
        for node in ast.walk(parse(file))
        if isinstance(node, Functions)
    ]
    length = lambda node: (node.end_lineno or 0) - node.lineno + 1
    many = [f"{name}, {num_parameters(node)}" for name, node in functions if num_parameters(node) > MAX_PARAMETERS]
    long = [f"{name}, {length(node)}" for name, node in functions if length(node) > MAX_LINES]
    longest = [f"{name}, {length(node)}" for name, node in functions if length(node) > LONGEST]
    sizes = {file: len(file.read_text().splitlines()) for file in own.values()}
    large = [f"{file.relative_to(ROOT)}, {size}" for file, size in sizes.items() if size > MAX_FILE]
    code, docstrings = (sum(counts) for counts in zip(*map(count_lines, modules.values()), strict=True))
    loaded, questions, tables = loaded_modules(LIGHT), find_questions(modules), find_tables(modules)
    few = lambda name, found, bar: Figure(name, len(found), f"<= {bar}" if bar else "0", len(found) <= bar, found)
    return [
        few("questions for a draft method's classes outside its folder", questions, 0),
        Figure("tables of draft methods", len(tables), "1", len(tables) == 1, tables),
        few(f"functions with more than {MAX_PARAMETERS} parameters, outside pallas_kernels", many, 10),
        few(f"functions of more than {MAX_LINES} lines, outside pallas_kernels", long, 8),
        few(f"functions of more than {LONGEST} lines, outside pallas_kernels", longest, 0),
        few(f"files of more than {MAX_FILE} lines, outside pallas_kernels", large, 0),
        Figure(f"modules that {LIGHT} loads", len(loaded), "1 to 20", 0 < len(loaded) <= MAX_LOADED, loaded),
        Figure("lines of code", code, f"<= {MAX_CODE}", code <= MAX_CODE),
        Figure("lines of docstrings", docstrings, f"<= {MAX_DOCSTRINGS}", docstrings <= MAX_DOCSTRINGS),
    ]
