"""Checks the links of the repository's Markdown files, without a network.

python docs/check_links.py prints each broken link and exits with 1 if there is one. The file of a relative link must
exist, and an anchor must be the name that GitHub and Sphinx give to a heading. For other links only the syntax is
checked.
"""

import functools
import pathlib
import re
import sys
import urllib.parse
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "experiments/*.md", "tests/**/*.md")

FENCE = re.compile(r"^ *(`{3,}|~{3,}|:{3,})")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^()\s>]*(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s+\"[^\"]*\")?\s*$", re.MULTILINE)


def prose(text: str) -> str:
    """Removes fenced blocks and comments; keeps line breaks, so that line numbers stay correct."""
    kept, fence = [], ""
    for line in text.split("\n"):
        match = FENCE.match(line)
        # A colon fence holds Markdown; only its own line is removed.
        if match and match[1][0] != ":":
            if not fence:
                fence = match[1]
            elif line.strip().startswith(fence) and not line.strip(" `~"):
                fence = ""
            kept.append("")
        else:
            kept.append("" if fence or match else line)
    return re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), "\n".join(kept), flags=re.DOTALL)


def without_code(text: str) -> str:
    """Removes inline code, where brackets are not links."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)


def slug(heading: str) -> str:
    """Returns the anchor of a heading according to GitHub's rule."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[`*]|<[^>]+>", "", text).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def anchors(path: pathlib.Path) -> frozenset[str]:
    """Returns the anchors of a page; a repeated heading gets a number."""
    found: dict[str, int] = {}
    names = set()
    text = prose(path.read_text())
    for heading in re.findall(r"^ {0,3}#{1,6}\s+(.+?)\s*#*$", text, flags=re.MULTILINE):
        name = slug(heading)
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    # A page that includes another file has its headings as well.
    for included in re.findall(r"^```\{include\} (\S+)$", path.read_text(), flags=re.MULTILINE):
        names |= anchors((path.parent / included).resolve())
    names |= set(re.findall(r"^\(([\w-]+)\)=\s*$", text, flags=re.MULTILINE))
    return frozenset(names | set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text)))


def links(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and target of every link and image on a page."""
    text = without_code(prose(path.read_text()))
    for pattern in (LINK, REFERENCE):
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[1]


def problem(path: pathlib.Path, target: str) -> str | None:
    """Returns the problem with a link on a page, or None."""
    parts = urllib.parse.urlsplit(target)
    if parts.scheme:
        if parts.scheme == "mailto":
            return None if "@" in parts.path else "no address"
        is_url = parts.scheme in ("http", "https") and "." in parts.netloc
        return None if is_url else "not a URL"
    place = path if not parts.path else (path.parent / urllib.parse.unquote(parts.path)).resolve()
    if not place.is_relative_to(ROOT):
        return "leaves the repository"
    if not place.exists():
        return "no such file"
    if parts.fragment and place.suffix == ".md" and parts.fragment not in anchors(place):
        return f"no heading '{parts.fragment}' in {place.relative_to(ROOT)}"
    return None


def main() -> int:
    """Checks all pages; returns the exit code."""
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    count, broken = 0, 0
    for path in pages:
        for line, target in links(path):
            count += 1
            if fault := problem(path, target):
                broken += 1
                print(f"{path.relative_to(ROOT)}:{line}: {target}: {fault}")
    print(f"{count} links in {len(pages)} pages, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
