"""The layout that readers rely on: imports go one way, without circles, and the code of a round is near its caller."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures():
    """The figures of `python -m experiments.correctness.code_report`, by name."""
    command = [sys.executable, "-m", "experiments.correctness.code_report", "--json"]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # exits 1 if any figure misses its bar
    return {figure["name"]: figure for figure in json.loads(report.stdout)}


@pytest.mark.parametrize(
    "name",
    [
        "median file, lines",
        "90th percentile of files, lines",
        "import circles, imports inside functions included",
        "imports that point up",
        "files that may not import experiments and do",
        "longest import chain, packages that each import the next",
        "files opened from speculative_generate to the function that commits",
        "questions for a draft method's classes outside its folder",
        "tables of draft methods",
        "functions with more than 8 parameters, outside pallas_kernels",
        "functions of more than 80 lines, outside pallas_kernels",
        "functions of more than 150 lines, outside pallas_kernels",
        "files of more than 400 lines, outside pallas_kernels",
        "modules that mtpjax.decoding.spec loads",
        "lines of docstrings",
    ],
)
def test_the_figure_meets_its_bar(name, figures):
    figure = figures[name]
    assert figure["passes"], f"{name}: {figure['value']}, bar {figure['bar']}: {figure['details']}"


@pytest.mark.parametrize("module, most", [("mtpjax.decoding.spec", 20), ("pallas_kernels", 1)])
def test_an_import_loads_few_modules(module, most):
    """Static settings need no layer and no kernel, and the package of kernels loads none before it is used."""
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.split(".")[0] in ("mtpjax", "pallas_kernels", "conversion")]
    assert len(loaded) <= most, loaded


def test_only_the_table_knows_the_draft_methods():
    """A method's folder is imported by itself, by the table of all methods, and by a method that extends it."""
    methods = [record.parent.name for record in sorted((ROOT / "mtpjax" / "drafters").glob("*/method.py"))]
    assert len(methods) >= 6
    arrows = set()
    for file in sorted((ROOT / "mtpjax").rglob("*.py")):
        imported = {name for name in methods if f"mtpjax.drafters.{name}." in file.read_text()}
        home = file.parent.name if file.parent.name in methods else str(file.relative_to(ROOT))
        arrows |= {(home, name) for name in imported - {file.parent.name}}
    allowed = {("mtpjax/drafters/methods.py", name) for name in methods} | {("dspark", "dflash")}
    assert arrows <= allowed, arrows - allowed
