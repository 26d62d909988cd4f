"""Which implementation of an op runs: the one asked for, or the one that measured fastest on this kind of device."""

import contextlib
import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

MEASURED = pathlib.Path(__file__).with_name("measured.json")
NEAR = 2.0  # a measurement speaks for shapes up to this factor away in every size
_questions: list[tuple[str, dict[str, Any]]] | None = None  # see `recorded`


def choose(
    op: str,
    implementation: str,
    offered: Sequence[str],
    shape: Mapping[str, int | str],
    *,
    unfit: str | None = None,
) -> str:
    """The implementation to run, one of `offered`; also "interpreted", the Triton kernel without a GPU, for tests.

    "auto" is what `measured.json` (written by `experiments/bench_kernels.py`) says was fastest for `op` on this device,
    at the nearest sizes of the same kind: in `shape`, numbers are sizes and names, such as dtypes, are kinds. It is
    "xla", the plain reference, where nothing near was measured, and where the kernel is `unfit` for the arguments: the
    reason. It is "xla" too, whatever was asked for, over a mesh that XLA partitions by itself: it cannot split a
    kernel, and would gather the operands. Raises `ValueError` for an implementation that the op does not have, and with
    the reason where an unfit kernel is asked for by name.
    """
    if _questions is not None:
        _questions.append((op, dict(shape)))
    named = [*offered, *(["interpreted"] if "triton" in offered else [])]
    if implementation not in ("auto", *named):
        raise ValueError(f"{op} has no implementation {implementation!r}: it is one of auto, {', '.join(named)}")
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if any(kind is not AxisType.Manual and mesh.shape[name] > 1 for name, kind in kinds):
        return "xla"
    if implementation != "auto":
        if unfit and implementation != "xla":
            raise ValueError(unfit)
        return implementation
    if unfit or jax.default_backend() != "gpu":
        return "xla"
    fastest = _fastest(_measured().get(jax.devices()[0].device_kind, {}).get(op, ()), shape)
    return fastest if fastest in offered else "xla"


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The questions that `choose` is asked within: op and shape, as `measured.json` has them."""
    global _questions
    _questions = []
    try:
        yield _questions
    finally:
        _questions = None


def _fastest(cells: Sequence[Mapping], shape: Mapping[str, int | str]) -> str:
    """Of the cells `{"shape": {name: size or kind}, "milliseconds": {implementation: time}}`, what the nearest says."""

    def distance(one: int | str, other: int | str) -> float:
        if isinstance(one, str) or isinstance(other, str):
            return 1.0 if one == other else math.inf
        return max(one / other, other / one)

    def ratio(cell: Mapping) -> float:
        if set(cell["shape"]) != set(shape):
            return math.inf
        return max(distance(size, cell["shape"][name]) for name, size in shape.items())

    near = min(cells, key=ratio, default=None)
    if near is None or ratio(near) > NEAR:
        return "xla"
    return min(near["milliseconds"], key=near["milliseconds"].get)


@functools.cache
def _measured() -> dict[str, dict[str, list]]:
    """Device kind -> op -> cells."""
    return json.loads(MEASURED.read_text())
