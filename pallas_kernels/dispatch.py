"""Which implementation of an op runs: the one asked for, or the one that measured fastest on this kind of device."""

import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType

MEASURED = pathlib.Path(__file__).with_name("measured.json")
NEAR = 2.0  # a measurement speaks for shapes up to this factor away in every size


def choose(op: str, implementation: str, offered: Sequence[str], **sizes: int) -> str:
    """The implementation to run, one of `offered`; also "interpreted", the Triton kernel without a GPU, for tests.

    "auto" is what `measured.json` (written by `experiments/bench_kernels.py`) says was fastest for `op` on this device,
    at the nearest sizes; "xla", the plain reference, where nothing near was measured. It is "xla" too, whatever was
    asked for, over a mesh that XLA partitions by itself: it cannot split a kernel, and would gather the operands.
    Raises `ValueError` for an implementation that the op does not have.
    """
    named = [*offered, *(["interpreted"] if "triton" in offered else [])]
    if implementation not in ("auto", *named):
        raise ValueError(f"{op} has no implementation {implementation!r}: it is one of auto, {', '.join(named)}")
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if any(kind is AxisType.Auto and mesh.shape[name] > 1 for name, kind in kinds):
        return "xla"
    if implementation != "auto":
        return implementation
    if jax.default_backend() != "gpu":
        return "xla"
    fastest = _fastest(_measured().get(jax.devices()[0].device_kind, {}).get(op, ()), sizes)
    return fastest if fastest in offered else "xla"


def _fastest(cells: Sequence[Mapping], sizes: Mapping[str, int]) -> str:
    """Of the cells `{"sizes": {name: size}, "milliseconds": {implementation: time}}`, what the nearest one says."""

    def ratio(cell: Mapping) -> float:
        if set(cell["sizes"]) != set(sizes):
            return math.inf
        return max(max(size / cell["sizes"][name], cell["sizes"][name] / size) for name, size in sizes.items())

    near = min(cells, key=ratio, default=None)
    if near is None or ratio(near) > NEAR:
        return "xla"
    return min(near["milliseconds"], key=near["milliseconds"].get)


@functools.cache
def _measured() -> dict[str, dict[str, list]]:
    """Device kind -> op -> cells."""
    return json.loads(MEASURED.read_text())
