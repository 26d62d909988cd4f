"""One shape of one kernel, which is lowered, compiled and timed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.dispatch import record_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. `run(*make(key), implementation=...)` is a call of it."""

    op: str  # its name in `pallas_kernels`
    name: str  # the shape in words
    run: Callable[..., Any]
    make: Callable[[jax.Array], tuple]  # makes random arrays; `jax.eval_shape` gives only their shapes
    bytes: int  # minimum: each needed input is read once, and each output is written once
    operations: int  # a multiplication and an addition count as two
    plain: Callable[..., Any] | None = None  # what a model runs instead of the kernel; None: `run` with "xla"
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # other implementations of `run`
    carried: int | None = None  # the argument that the last result replaces

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def forms(self) -> dict[str, Callable[..., Any]]:
        """Returns the kernel ("triton"), what a model runs instead ("xla"), and the peers."""
        kernel, xla = (functools.partial(self.run, implementation=name) for name in ("triton", "xla"))
        return {"triton": kernel, "xla": self.plain or xla, **self.peers}

    def shape(self) -> dict[str, Any]:
        """Returns the shape that the op passes to `pallas_kernels.dispatch.choose`."""
        with record_choices() as calls:
            jax.eval_shape(lambda key: self.run(*self.make(key), implementation="xla"), jax.random.key(0))
        return next(shape for op, shape in calls if op == self.op)
