"""Every name that the documentation imports from the project exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = "mtpjax|conversion|pallas_kernels|experiments"
IMPORT = re.compile(
    rf"^(from (?:{PACKAGES})[\w.]* import (?:\([^)]*\)|[^\n(]+)|import (?:{PACKAGES})[\w.]*.*)$", re.MULTILINE
)
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_there_are_imports_to_check():
    assert sum(len(IMPORT.findall((ROOT / page).read_text())) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_imports_exists(page):
    for line in IMPORT.findall((ROOT / page).read_text()):
        exec(line, {})
