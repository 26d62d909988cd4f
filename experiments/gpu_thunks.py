"""Reads what XLA runs of a module that is compiled for a GPU: its kernels, copies, loops and CUDA graphs.

XLA has no interface for this, but writes it to a file when it is asked to dump a module.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping

import jax

_LINE = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+) +\[[^\]]*\] ?(?P<name>[^ ]*)")


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of a compiled module.

    Attributes:
        kind: XLA's name of the kind, such as "kCustomKernel", "kCopy", "kWhile" or "kCommandBuffer" (a CUDA graph).
        name: the kernel's name; empty for steps that hold others.
        inner: the steps inside; those of a loop are its condition and its body.
    """

    kind: str
    name: str
    inner: "tuple[Thunk, ...]" = ()

    def walk(self) -> "Iterator[Thunk]":
        """Yields this step and all steps inside of it."""
        yield self
        for thunk in self.inner:
            yield from thunk.walk()


def compile_thunks(lowered: jax.stages.Lowered, options: Mapping[str, str] | None = None) -> tuple[Thunk, ...]:
    """Compiles a lowered function and returns its steps.

    Args:
        lowered: a function that is lowered for a GPU, such as one of `compat.h100_devices`.
        options: compiler options.

    Returns:
        The steps of the module, in order.

    Raises:
        RuntimeError: XLA wrote no such file.
    """
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile({**(options or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        files = list(pathlib.Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt"))
        if len(files) != 1:
            raise RuntimeError(f"XLA wrote {len(files)} thunk sequences, expected 1")
        return parse(files[0].read_text())


def parse(text: str) -> tuple[Thunk, ...]:
    """Parses XLA's text of a thunk sequence.

    Args:
        text: the text; steps inside of others are indented.

    Returns:
        The steps at the top level.
    """
    # Steps by depth, the innermost last: (indent, kind, name, steps inside).
    found: list[tuple[int, str, str, list]] = []
    top: list = []
    for match in filter(None, map(_LINE.match, text.splitlines())):
        indent, kind = len(match["indent"]), match["kind"]
        while found and found[-1][0] >= indent:
            found.pop()
        step = (indent, kind, match["name"], [])
        (found[-1][3] if found else top).append(step)
        found.append(step)
    return tuple(map(_freeze, top))


def _freeze(step: tuple[int, str, str, list]) -> Thunk:
    _, kind, name, inner = step
    return Thunk(kind, name, tuple(map(_freeze, inner)))
