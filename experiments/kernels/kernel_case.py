"""One shape of one kernel: what is lowered, compiled and timed."""

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
    make: Callable[[jax.Array], tuple]  # random arrays; `jax.eval_shape` of it gives the shapes alone
    bytes: int  # each input that is needed read once, each output written once
    operations: int  # multiplications and additions, two for a product
    plain: Callable[..., Any] | None = None  # what a model runs where not the kernel; None: `run` with "xla"
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # other implementations of `run`
    carried: int | None = None  # the argument that the last result replaces, in its place

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def forms(self) -> dict[str, Callable[..., Any]]:
        """The kernel ("triton"), what runs in its place ("xla"), and the peers."""
        kernel, xla = (functools.partial(self.run, implementation=name) for name in ("triton", "xla"))
        return {"triton": kernel, "xla": self.plain or xla, **self.peers}

    def shape(self) -> dict[str, Any]:
        """As the op gives it to `pallas_kernels.dispatch.choose`."""
        with record_choices() as calls:
            jax.eval_shape(lambda key: self.run(*self.make(key), implementation="xla"), jax.random.key(0))
        return next(shape for op, shape in calls if op == self.op)
