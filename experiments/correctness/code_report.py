"""Measures comments, docstrings, sizes, imports and draft methods in the code, and prints each figure with its limit.

    python -m experiments.correctness.code_report [--json]

Reads the source with the standard library, and imports one module in a separate process. The exit code is 1 if a figure
misses its limit.
"""

import argparse
import ast
import dataclasses
import functools
import io
import json
import pathlib
import statistics
import sys
import tokenize
from collections import deque

from experiments.common import ROOT
from experiments.correctness import code_limits
from experiments.correctness.source import PACKAGES, Figure, imported_names, parse, read_modules

COMMENTED = ("mtpjax", "pallas_kernels")
# A package imports only packages of a lower rank. Modules at the root of mtpjax are "base"; mtpjax itself has the
# highest rank.
RANK = {
    "base": 0,
    "pallas_kernels": 0,
    "models": 1,
    "conversion": 2,
    "io": 3,
    "data": 4,
    "decoding": 4,
    "drafters": 5,
    "inference": 6,
    "evaluation": 7,
}
RANK |= {"training": 8, "ablation": 9, "serving": 9, "cli": 10, "mtpjax": 11}
Graph = dict[str, set[str]]


def own_line_comments(text: str) -> int:
    """Counts lines that hold only a comment. Works on tokens, so a "#" inside a string does not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() for token in tokens)


def import_graph(modules: dict[str, pathlib.Path]) -> Graph:
    """Returns the library modules that each module imports."""
    graph: Graph = {}
    for module, file in modules.items():
        targets = {
            f"{home}.{name}" if f"{home}.{name}" in modules else home for home, name in imported_names(parse(file))
        }
        graph[module] = (targets & set(modules)) - {module}
    return graph


def package_of(module: str) -> str:
    """Returns the folder of mtpjax or the top-level package that a module belongs to."""
    first, *rest = module.split(".")
    if first != "mtpjax" or not rest:
        return first
    return rest[0] if (ROOT / "mtpjax" / rest[0]).is_dir() else "base"


def find_circles(graph: Graph) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or through others."""
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def _reachable(graph: Graph, start: str) -> set[str]:
    found, waiting = set(), list(graph[start])
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += graph[module]
    return found


def find_arrows_up(graph: Graph) -> list[str]:
    """Returns the imports of packages that are not below the importing package."""
    pairs = [(a, b) for a, targets in graph.items() for b in targets if package_of(a) != package_of(b)]
    return sorted(f"{a} -> {b}" for a, b in pairs if RANK[package_of(a)] <= RANK[package_of(b)])


def package_graph(graph: Graph) -> Graph:
    packages: Graph = {package_of(module): set() for module in graph}
    for module, targets in graph.items():
        packages[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    return packages


def longest_chain(graph: Graph) -> list[str]:
    """Returns the longest chain of imports; empty if there are cycles."""
    if find_circles(graph):
        return []

    @functools.cache
    def chain_from(node: str) -> tuple[str, ...]:
        return (node, *max((chain_from(target) for target in sorted(graph[node])), key=len, default=()))

    return list(max(map(chain_from, sorted(graph)), key=len))


def experiment_imports() -> list[str]:
    """Returns the files that import experiments but must not, which are library files and tests of other code."""
    files = [file for folder in (*PACKAGES, "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
    allowed = ROOT / "tests" / "experiments"
    files = [file for file in files if allowed not in file.parents]
    is_experiment = lambda file: any(home.split(".")[0] == "experiments" for home, _ in imported_names(parse(file)))
    return [str(file.relative_to(ROOT)) for file in files if is_experiment(file)]


def call_path(modules: dict[str, pathlib.Path], start: str, function: str, goal: str) -> list[str]:
    """Returns the files on the shortest path from `function` in module `start` to a function called `goal`.

    Follows each name in the body of a function or class that is defined in its file or imported there.
    """
    waiting, seen = deque([(start, function, [start])]), set()
    while waiting:
        module, name, path = waiting.popleft()
        if (module, name) in seen:
            continue
        seen.add((module, name))
        tree = parse(modules[module])
        definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if name not in definitions:
            continue
        if name == goal:
            return [str(modules[each].relative_to(ROOT)) for each in path]
        homes = {name: home for home, name in imported_names(tree) if name and home in modules}
        used = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
        waiting.extendleft((module, each, path) for each in sorted(used & set(definitions)))  # opens no other file
        waiting.extend((homes[each], each, [*path, homes[each]]) for each in sorted(used & set(homes)))
    return []


def assigned_values(tree: ast.Module) -> dict[str, ast.expr]:
    return {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}


def public_homes(tree: ast.Module) -> dict[str, str]:
    """Returns the module that defines each public name in `mtpjax` or `mtpjax.training`, from its table or imports."""
    table = assigned_values(tree).get("_HOMES")
    if table is None:
        return {name: home for home, name in imported_names(tree) if name is not None}
    return {name: f"mtpjax.{home}" for home, names in ast.literal_eval(table).items() for name in names}


def public_docstrings(modules: dict[str, pathlib.Path]) -> dict[str, list[str]]:
    """Returns the sections that are missing in the docstrings of public names in mtpjax and mtpjax.training."""
    lacking = {}
    for package in ("mtpjax", "mtpjax.training"):
        tree = parse(modules[package])
        assigned, homes = assigned_values(tree), public_homes(tree)
        lacking |= {
            f"{package}.{name}": _lacking_sections(modules, homes[name], name) if name in homes else []
            for name in ast.literal_eval(assigned["__all__"])
            if not name.startswith("__")
        }
    return lacking


def _lacking_sections(modules: dict[str, pathlib.Path], home: str, name: str) -> list[str]:
    tree = parse(modules[home])
    node = next((n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name), None)
    if node is None:  # the name is imported, or a value
        further = next((home for home, imported in imported_names(tree) if imported == name and home in modules), None)
        return _lacking_sections(modules, further, name) if further else []
    text = ast.get_docstring(node) or ""
    has = lambda *titles: any(f"\n{title}:" in text for title in titles)
    lacking = [] if has("Example", "Examples") else ["Example"]
    if isinstance(node, ast.ClassDef):
        # A class that exists to be subclassed may have neither fields nor arguments.
        is_plain = not any(isinstance(n, ast.AnnAssign) or getattr(n, "name", "") == "__init__" for n in node.body)
        return lacking + ([] if is_plain or has("Args", "Attributes", "Fields") else ["Args"])
    arguments = node.args
    if (arguments.posonlyargs or arguments.args or arguments.kwonlyargs) and not has("Args"):
        lacking.append("Args")
    returns_nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
    return lacking + ([] if returns_nothing or has("Returns", "Yields") else ["Returns"])


def measure() -> list[Figure]:
    """Returns all figures, each with its limit."""
    modules = read_modules()
    texts = {module: file.read_text() for module, file in modules.items()}
    commented = [text for module, text in texts.items() if module.split(".")[0] in COMMENTED]
    num_lines = sum(len(text.splitlines()) for text in commented)
    comments = 1000 * sum(map(own_line_comments, commented)) / num_lines
    sizes = sorted(len(text.splitlines()) for text in texts.values())
    median, p90 = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    lacking = {name: sections for name, sections in public_docstrings(modules).items() if sections}
    graph = import_graph(modules)
    circles, up, imports = find_circles(graph), find_arrows_up(graph), experiment_imports()
    packages, single = (
        longest_chain(package_graph(graph)),
        longest_chain(code_limits.with_imports_by_string(graph, modules)),
    )
    path = call_path(
        modules, public_homes(parse(modules["mtpjax"]))["speculative_generate"], "speculative_generate", "commit"
    )
    return [
        Figure(
            "own-line comments per 1000 lines, mtpjax and pallas_kernels", round(comments, 1), ">= 35", comments >= 35
        ),
        Figure(
            "public names of mtpjax and mtpjax.training without Args, Returns or Example",
            len(lacking),
            "0",
            not lacking,
            [f"{name}: {', '.join(sections)}" for name, sections in lacking.items()],
        ),
        Figure("median file, lines", median, "<= 160", median <= 160),
        Figure("90th percentile of files, lines", p90, "<= 320", p90 <= 320),
        Figure(
            "import circles, imports inside functions included", len(circles), "0", not circles, [*map(str, circles)]
        ),
        Figure("imports that point up", len(up), "0", not up, up),
        Figure("files that may not import experiments and do", len(imports), "0", not imports, imports),
        Figure(
            "longest import chain, packages that each import the next",
            len(packages),
            "1 to 10",
            0 < len(packages) <= 10,
            [" -> ".join(packages)],
        ),
        Figure(
            "longest import chain, single modules, imports by string counted",
            len(single),
            "1 to 26",
            0 < len(single) <= 26,
            [" -> ".join(single)],
        ),
        Figure(
            "files opened from speculative_generate to the function that commits",
            len(path),
            "1 to 3",
            0 < len(path) <= 3,
            [" -> ".join(path)],
        ),
        *code_limits.measure(modules),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    figures = measure()
    if options.json:
        print(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=2))
    else:
        for figure in figures:
            print(f"{'ok  ' if figure.passes else 'FAIL'} {figure.name}: {figure.value} (bar: {figure.bar})")
            for line in figure.details:
                print(f"       {line}")
    return 0 if all(figure.passes for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
