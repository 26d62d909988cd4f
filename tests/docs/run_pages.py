"""Runs the examples of the documentation: every bash and Python fence of the pages, in order.

    python tests/docs/run_pages.py                                  # all pages
    python tests/docs/run_pages.py docs/tutorials/quickstart.md     # some pages, and the pages that they build on

All pages of a call share one new folder, which holds copies of `tests/golden`, `tests/helpers` and `experiments` and is
removed at the end. A bash fence runs under `bash -euo pipefail`. The Python fences of a page share one process and its
names. A fence below the comment `<!-- not executed: REASON -->` is skipped. A page with the comment `<!-- after: PAGE
-->` needs the files that another page makes, so that page runs first. Fences of other languages are text.

Exit code 1 means that a fence failed; its page, line and output are printed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Pages in reading order, and the languages to run. Commands of the README and of older guides have placeholders, or
# repeat what the tutorials run.
PAGES = {
    "docs/get_started.md": ("bash", "python"),
    "README.md": ("python",),
    "docs/tutorials/quickstart.md": ("bash", "python"),
    "docs/tutorials/text_to_text.md": ("bash", "python"),
    "docs/tutorials/engine.md": ("bash", "python"),
    "docs/tutorials/fine_tune_mtp.md": ("bash", "python"),
    "docs/tutorials/convert_and_merge.md": ("bash", "python"),
    "docs/tutorials/choose_settings.md": ("bash", "python"),
    "docs/tutorials/own_training_loop.md": ("bash", "python"),
    "docs/tutorials/smollm2.md": ("bash", "python"),
    "docs/guides/usage.md": ("python",),
    "docs/guides/own_architectures.md": ("bash", "python"),
    "docs/guides/own_training.md": ("bash", "python"),
    "docs/guides/acceptance_rules.md": ("bash", "python"),
    "docs/guides/meshes.md": ("bash", "python"),
    "docs/guides/kernels.md": ("bash", "python"),
    "docs/guides/adding_a_family.md": ("bash", "python"),
    "docs/guides/trained_drafters.md": ("bash", "python"),
    "docs/guides/adding_a_drafter.md": ("bash", "python"),
    "docs/guides/adding_a_kernel.md": ("bash", "python"),
}
SHOWN_LINES = 60  # of a failed fence's output
# The examples spend most of their time compiling. LLVM's optimisations would only make that longer.
QUICK_COMPILE = " ".join(
    [
        "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # Later versions have no other emitters.
        *["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jaxlib").startswith("0.10."),
    ]
)
# The Python process of a page: runs one fence per line of stdin, and answers on the descriptor that it is given.
PYTHON_SIDE = """
import json, sys, traceback
answers, names = open(int(sys.argv[1]), "w", buffering=1), {"__name__": "__main__"}
for line in sys.stdin:
    page, first, source = json.loads(line)
    try:
        # Empty lines in front give tracebacks the page's own line numbers.
        exec(compile("\\n" * (first - 1) + source, page, "exec"), names)
        failed = False
    except BaseException:
        traceback.print_exc()
        failed = True
    sys.stdout.flush(), sys.stderr.flush()
    print("failed" if failed else "done", file=answers)
"""


@dataclasses.dataclass(frozen=True)
class Fence:
    """One code block of a page."""

    language: str
    line: int  # of its first line of code, from 1
    source: str
    skipped: str | None  # the reason why it is not executed


@dataclasses.dataclass(frozen=True)
class Page:
    """A parsed page."""

    path: pathlib.Path
    fences: list[Fence]
    after: list[pathlib.Path]  # pages that run before this one


def parse(path: pathlib.Path) -> Page:
    """Reads the fences of a page.

    Raises:
        ValueError: a fence has no end, or a comment for a fence is followed by none.
    """
    fences, after, reason, opened = [], [], None, None
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if opened is not None:
            indent, ticks, language, first, code = opened
            if re.fullmatch(rf" *`{{{len(ticks)},}}\s*", line):
                fences.append(Fence(language, first, "\n".join(code) + "\n", reason))
                opened = reason = None
            else:
                code.append(line.removeprefix(indent))
        elif match := re.match(r"( *)(`{3,})([\w{}-]*)", line):
            opened = (match[1], match[2], match[3], number + 1, [])
        elif match := re.search(r"<!-- not executed: (.+?) -->", line):
            reason = match[1]
        elif match := re.search(r"<!-- after: (\S+) -->", line):
            after.append((path.parent / match[1]).resolve())
        elif line.strip() and reason is not None:
            raise ValueError(f"{path}:{number}: 'not executed' must be followed by a code block")
    if opened is not None:
        raise ValueError(f"{path}:{opened[3] - 1}: the code block has no end")
    return Page(path, fences, after)


def in_order(paths: list[pathlib.Path]) -> list[Page]:
    """Parses pages and sorts each behind those that it names in `after`."""
    pages: dict[pathlib.Path, Page] = {}

    def add(path: pathlib.Path) -> None:
        if path in pages:
            return
        page = parse(path)
        for before in page.after:
            add(before)
        pages[path] = page

    for path in paths:
        add(path)
    return list(pages.values())


class PythonProcess:
    """A Python process that runs fences one after the other and keeps their names."""

    def __init__(self, folder: pathlib.Path, environment: dict[str, str], output):
        reading, writing = os.pipe()
        command = [sys.executable, "-c", PYTHON_SIDE, str(writing)]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def run(self, path: pathlib.Path, fence: Fence) -> bool:
        """Runs a fence. Returns False if it raised, or ended the process."""
        assert self._process.stdin is not None
        print(json.dumps([str(path), fence.line, fence.source]), file=self._process.stdin, flush=True)
        return self._answers.readline() == "done\n"

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()


def run_fence(
    page: Page, fence: Fence, folder: pathlib.Path, environment, python: PythonProcess | None, output
) -> bool:
    """Runs one fence. Returns whether it succeeded."""
    if fence.language == "python":
        assert python is not None
        return python.run(page.path, fence)
    command = ["bash", "-euo", "pipefail", "-c", fence.source]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    return done.returncode == 0


def run_page(page: Page, languages: tuple[str, ...], folder: pathlib.Path, environment, *, verbose: bool) -> bool:
    """Runs a page's fences and prints a line for each. Returns whether all succeeded."""
    name = os.path.relpath(page.path, ROOT)
    chosen = [fence for fence in page.fences if fence.language in languages]
    begin, cpu, python = time.perf_counter(), cpu_seconds(), None
    with tempfile.TemporaryFile("w+") as log:
        output = None if verbose else log
        if any(fence.language == "python" and fence.skipped is None for fence in chosen):
            python = PythonProcess(folder, environment, output)
        try:
            for fence in chosen:
                label = f"  {name}:{fence.line} {fence.language}"
                if fence.skipped is not None:
                    print(f"{label}: not executed: {fence.skipped}", flush=True)
                    continue
                log.seek(0)
                log.truncate()
                started = time.perf_counter()
                if not run_fence(page, fence, folder, environment, python, output):
                    log.seek(0)
                    print("".join(log.readlines()[-SHOWN_LINES:]), end="")
                    print(f"{label}: FAILED", flush=True)
                    return False
                print(f"{label}: {time.perf_counter() - started:.1f} s", flush=True)
        finally:
            if python is not None:
                python.close()
    wall, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    print(f"{name}: {wall:.1f} s, {cpu:.1f} s of one core", flush=True)
    return True


def cpu_seconds() -> float:
    """Returns the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Runs the pages of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=pathlib.Path, help="Markdown files (default: all pages)")
    parser.add_argument("--verbose", action="store_true", help="show the output of every fence")
    parser.add_argument("--list", action="store_true", help="list the fences and run nothing")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.pages] or [ROOT / path for path in PAGES]
    pages = in_order(paths)
    if options.list:
        for page in pages:
            for fence in page.fences:
                print(f"{os.path.relpath(page.path, ROOT)}:{fence.line} {fence.language or '-'} {fence.skipped or ''}")
        return 0
    begin, cpu = time.perf_counter(), cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="mtpjax-pages-") as temporary:
        folder = pathlib.Path(temporary) / "run"
        for name in ("tests/golden", "tests/helpers", "experiments"):  # what a page takes from a clone
            shutil.copytree(ROOT / name, folder / name)
        environment = {
            **os.environ,
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "XLA_FLAGS": f"{QUICK_COMPILE} {os.environ.get('XLA_FLAGS', '')}",
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            # Programs that one fence compiled serve the next.
            "JAX_COMPILATION_CACHE_DIR": f"{temporary}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
            "MPLBACKEND": "agg",
        }
        for page in pages:
            languages = PAGES.get(os.path.relpath(page.path, ROOT), ("bash", "python"))
            if not run_page(page, languages, folder, environment, verbose=options.verbose):
                return 1
    print(f"{len(pages)} pages: {time.perf_counter() - begin:.0f} s, {cpu_seconds() - cpu:.0f} s of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
