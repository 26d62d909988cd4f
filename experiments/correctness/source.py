"""Reads the library's files, their syntax trees and their imports, for the reports about the code."""

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from experiments.common import ROOT

PACKAGES = ("mtpjax", "pallas_kernels", "conversion")


@dataclasses.dataclass(frozen=True)
class Figure:
    name: str
    value: Any
    bar: str
    passes: bool
    details: list[str] = dataclasses.field(default_factory=list)


def read_modules() -> dict[str, pathlib.Path]:
    """Returns the file of each module of the library."""
    modules = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


@functools.cache
def parse(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yields (module, name) of each import, including imports in functions but not imports for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        yield from imported_names(node)
