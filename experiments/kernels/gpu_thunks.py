"""Reads which kernels, copies, loops and CUDA graphs XLA runs for a module that was compiled for a GPU.

XLA has no interface for this, but it writes the steps to a file when it dumps a module.
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
        name: the kernel's name; empty for steps that contain other steps.
        inner: the steps inside; for a loop, its condition and its body.
    """

    kind: str
    name: str
    inner: "tuple[Thunk, ...]" = ()

    def walk(self) -> "Iterator[Thunk]":
        """Yields this step and all steps inside it."""
        yield self
        for thunk in self.inner:
            yield from thunk.walk()


def compile_thunks(lowered: jax.stages.Lowered, options: Mapping[str, str] | None = None) -> tuple[Thunk, ...]:
    """Compiles a lowered function and returns its steps.

    Args:
        lowered: a function that was lowered for a GPU, such as a device from `compat.h100_devices`.
        options: compiler options.

    Returns:
        The steps of the module, in order.

    Raises:
        RuntimeError: XLA did not write the file.
    """
    return compile_and_read(lowered, options)[0]


def compile_and_read(
    lowered: jax.stages.Lowered, options: Mapping[str, str] | None = None
) -> tuple[tuple[Thunk, ...], dict[str, list[str]]]:
    """Compiles a lowered function and returns its steps, and the options that XLA compiled it with.

    Args:
        lowered: as for `compile_thunks`.
        options: compiler options in addition to those of the function.

    Returns:
        The steps of the module, and the values of each option that is not XLA's default.

    Raises:
        RuntimeError: XLA did not write the files.
    """
    with tempfile.TemporaryDirectory() as name:
        lowered.compile({**(options or {}), "xla_dump_to": name, "xla_dump_hlo_as_text": True})
        folder = pathlib.Path(name)
        # If no pass has changed the sequence, there is only the first file.
        changed = list(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))
        sequences = changed or list(folder.glob("*.thunk_sequence.txt"))
        settings = list(folder.glob("*.debug_options"))
        if len(sequences) != 1 or len(settings) != 1:
            raise RuntimeError(
                f"XLA wrote {len(sequences)} thunk sequences and {len(settings)} options, expected 1 each"
            )
        found: dict[str, list[str]] = {}
        for line in settings[0].read_text().splitlines():
            option, _, value = line.partition(": ")
            found.setdefault(option, []).append(value)
        return parse(sequences[0].read_text()), found


def parse(text: str) -> tuple[Thunk, ...]:
    """Parses XLA's text of a thunk sequence.

    Args:
        text: the text, in which inner steps are indented.

    Returns:
        The steps at the top level.
    """
    # Open steps, innermost last: (indent, kind, name, steps inside).
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
