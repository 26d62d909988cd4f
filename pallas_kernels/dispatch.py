"""Chooses an op's implementation, which is the requested one or the fastest one measured on this kind of device."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from pallas_kernels import measurements
from pallas_kernels.backend import triton
from pallas_kernels.case import Case, Shape, difference_from_xla

MAX_SIZE_RATIO = 2.0  # a measurement applies to shapes in which every size differs by at most this factor
MIN_PAGED_ROWS = 32  # minimum rows for which paged attention runs its kernel by default
# Ops that run their kernel on a GPU if nothing similar was measured, because XLA would read experts several times,
# write fp8 weights out in a wider dtype, write attention scores to memory, or copy all pages of a cache in every layer.
# On an H100, the paged-attention kernel reduced the time of a round with 64 rows to two thirds; with one row in a
# contiguous cache, XLA was faster than all kernels together. Nothing in between was measured, so the rule starts at 32
# rows, half of 64. Other ops run in XLA until they are measured.
_KERNEL_BY_RULE: Mapping[str, Callable[[Mapping[str, int | str]], bool]] = {
    "grouped_matmul": lambda shape: True,
    "route_tokens": lambda shape: True,
    "prefill_attention": lambda shape: True,
    "range_attention": lambda shape: True,
    "verify_attention": lambda shape: (
        shape["layout"] == "pages" and shape["reads"] == "all" and int(shape["batch"]) >= MIN_PAGED_ROWS
    ),
    "block_scaled_matmul": lambda shape: str(shape["weights"]).startswith("float8"),
    "gated_matmul": lambda shape: str(shape["weights"]).startswith("float8"),
}


@dataclasses.dataclass
class _Process:
    """This process's state, with past comparisons, recorded calls, and the times measured on its device."""

    # Keyed by op, implementation and dtypes.
    agreed: dict[tuple[str, ...], bool] = dataclasses.field(default_factory=dict)
    kernel_by_rule: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_KERNEL_BY_RULE))
    recorded_calls: list[tuple[str, dict[str, Any]]] | None = None  # filled inside `record_choices`

    @functools.cached_property
    def measured(self) -> dict[str, list]:
        """The cells with the times measured on this device, keyed by op."""
        return measurements.read()


_process = _Process()


def choose(
    op: str,
    implementation: str,
    offered: Sequence[str],
    shape: Mapping[str, int | str],
    *,
    unsupported_reason: str | None = None,
    make_case: Callable[[Shape], Case] | None = None,
    check: Callable[[str], float] | None = None,
) -> str:
    """Returns the implementation to run, which is one of `offered` or "interpreted".

    "auto" selects the implementation that was measured to be fastest for this op, on this device, at the nearest
    measured shape (`mtpjax tune`, `pallas_kernels.measurements`). If nothing similar was measured, experts, fp8
    weights, attention over ranges and in prefill, and paged attention over many rows run their kernel on a GPU. In all
    other cases, and whenever the kernel does not support the arguments or there is no GPU, "auto" selects "xla", the
    plain reference. Before its first use of a kernel, "auto" compares the kernel with the reference on this device; if
    the results differ, it logs a warning and selects "xla" from then on.

    On a mesh that XLA partitions automatically, the result is always "xla", because XLA cannot split a kernel and would
    gather its operands on every device.

    Args:
        op: Name of the op in the measurements file.
        offered: Implementations that the op has, "triton" before "jax_triton".
        shape: Describes the call. Numbers are sizes; strings, such as dtypes, are kinds and must match exactly.
        unsupported_reason: The reason why the kernel does not support these arguments, or None if it does.
        make_case: Makes arrays of a shape, on which the kernel is compared with "xla". None: no comparison.
        check: Custom comparison, which returns an implementation's largest difference divided by its bound; more than 1
            is a failure.

    Raises:
        ValueError: The op does not have the implementation, or the kernel that was requested by name does not support
            the arguments.
    """
    if _process.recorded_calls is not None:
        _process.recorded_calls.append((op, dict(shape)))
    named = [*offered, *(["interpreted"] if "triton" in offered else [])]
    if implementation not in ("auto", *named):
        raise ValueError(f"{op} has no implementation {implementation!r}; supported: auto, {', '.join(named)}")
    if triton is None:
        if implementation in ("triton", "interpreted"):
            raise ValueError(f"jax {jax.__version__} lacks Pallas's Triton backend, which the kernels need: use xla")
        offered = [name for name in offered if name != "triton"]
    # Partitioning is automatic if an axis with several devices is not under shard_map ("Manual").
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if any(kind is not AxisType.Manual and mesh.shape[name] > 1 for name, kind in kinds):
        return "xla"
    # An implementation requested by name runs as requested, and raises an error if it cannot.
    if implementation != "auto":
        if unsupported_reason and implementation != "xla":
            raise ValueError(unsupported_reason)
        return implementation
    # With "auto", kernels need a GPU.
    if unsupported_reason or jax.default_backend() != "gpu":
        return "xla"
    # Use the fastest implementation that was measured on this kind of device, or else the default rule.
    measured = _fastest(_process.measured.get(op, ()), shape)
    kernels = [name for name in offered if name != "xla"]  # Pallas kernel first
    by_rule = kernels[0] if kernels and op in _process.kernel_by_rule and _process.kernel_by_rule[op](shape) else "xla"
    chosen = measured if measured and measured in offered else by_rule
    if check is None and make_case is not None:
        check = functools.partial(difference_from_xla, make_case, shape)
    if chosen != "xla" and check is not None and not _agrees(op, shape, chosen, check):
        return "xla"
    return chosen


def _agrees(op: str, shape: Mapping[str, int | str], implementation: str, check: Callable[[str], float]) -> bool:
    """Returns whether an implementation matches the reference on this device; tests it once per op and dtypes."""
    key = (op, implementation, *(value for value in shape.values() if isinstance(value, str)))
    if key not in _process.agreed:
        # The caller is being traced, but the comparison must run now. Use a thread, because JAX traces per thread.
        # (`jax.ensure_compile_time_eval` would also evaluate values that a kernel's trace must keep.)
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                difference = thread.submit(check, implementation).result()
        # If a kernel cannot run for any reason, use the reference instead.
        except Exception as error:
            difference, why = math.inf, f"fails: {str(error).partition(chr(10))[0][:200]}"
        else:
            why = f"differs from its reference: {difference:.3g} times the bound"
        _process.agreed[key] = difference <= 1
        if not _process.agreed[key]:
            warnings.warn(
                f"the {implementation} kernel of {op} ({', '.join(key[2:])}) {why}; 'auto' uses xla", stacklevel=3
            )
    return _process.agreed[key]


@contextlib.contextmanager
def record_choices() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collects the op and shape of every call of `choose` inside the context, in the format of the measurements file.

    Yields:
        A list of (op, shape), which grows with each call.
    """
    _process.recorded_calls = []
    try:
        yield _process.recorded_calls
    finally:
        _process.recorded_calls = None


def _fastest(cells: Sequence[Mapping], shape: Mapping[str, int | str]) -> str | None:
    """Returns the fastest implementation in the cell with the nearest shape, or None if no cell is near enough.

    A cell is `{"shape": {name: size or kind}, "milliseconds": {implementation: time}}`.
    """

    # The factor between two sizes; kinds are either equal or infinitely far apart.
    def size_ratio(one: int | str, other: int | str) -> float:
        if isinstance(one, str) or isinstance(other, str):
            return 1.0 if one == other else math.inf
        return max(one / other, other / one)

    # A cell is as far away as its largest size ratio; a cell with other dimension names belongs to a different kind of
    # call.
    def cell_ratio(cell: Mapping) -> float:
        if set(cell["shape"]) != set(shape):
            return math.inf
        return max(size_ratio(size, cell["shape"][name]) for name, size in shape.items())

    nearest = min(cells, key=cell_ratio, default=None)
    if nearest is None or cell_ratio(nearest) > MAX_SIZE_RATIO:
        return None
    return min(nearest["milliseconds"], key=nearest["milliseconds"].get)
