"""Every line that installs mtpjax works without a package index that has it, and names extras that exist."""

import pathlib
import re
import tomllib

import pytest

from mtpjax.errors import install_extra

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOLDERS = ("docs", "mtpjax", "conversion", "pallas_kernels", "experiments")
SUFFIXES = (".md", ".py", ".ipynb", ".Dockerfile")
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FILES += sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
INSTALLED = re.compile(r"pip install [^#\n]*?(?<![\w-])(mtpjax|\.)(?:\[([\w,{}-]+)\])?(?=['\"\s]|$)(.{0,20})")


LINES = [
    pytest.param(source, extras, rest, id=f"{path.relative_to(ROOT)}: {source}[{extras}]")
    for path in FILES
    for source, extras, rest in INSTALLED.findall(path.read_text())
]


@pytest.mark.parametrize("source, extras, rest", LINES)
def test_an_install_line_names_a_source_and_extras_that_exist(source, extras, rest):
    if source == "mtpjax":
        assert rest.startswith(" @ git+CLONE_URL"), "mtpjax is on no package index"
    assert not set(filter(None, extras.split(","))) - {*EXTRAS, "{name}"}


def test_the_lines_are_found():
    assert len(LINES) > 20 and any(param.values[0] == "mtpjax" for param in LINES)


def test_messages_about_missing_packages_name_extras_that_exist():
    asked = {name for path in FILES for name in re.findall(r"install_extra\(['\"](\w+)['\"]\)", path.read_text())}
    assert asked == {"gguf", "parquet", "plots", "serve", "train"} <= set(EXTRAS)
    assert "pip install -e '.[serve]'" in install_extra("serve")
