"""Reports the changes that a session's call made to its rows, as one array for the host."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


class RowReport(NamedTuple):
    """A row of a `Report`, as Python values."""

    tokens: list[int]
    origins: list[int]
    logprobs: np.ndarray  # [n] float32
    done: bool
    stopped: bool
    failed: bool
    counts: list[int]  # [1 + 2 K]: rounds, and proposed and accepted drafts per level
    num_final: int


class Report(NamedTuple):
    """The changes that a call made to each of its R = P * b rows, with up to n new tokens and K draft levels."""

    tokens: Any  # [R, n] int32, valid up to num_new
    origins: Any  # [R, n] int32
    logprobs: Any  # [R, n] float32; [R, 0] for a state without log-probabilities
    num_new: Any  # [R] int32
    done: Any  # [R] bool
    stopped: Any  # [R] bool
    failed: Any  # [R] bool
    rounds: Any  # [R] int32, as in `DecodeState`
    proposed: Any  # [R, K] int32
    accepted: Any  # [R, K] int32
    num_final: Any  # [R] int32 number of initial positions whose cache entries will not change

    def rows(self) -> Iterator[RowReport]:
        """Yields the rows of a report on the host. Converts whole arrays, because reading single elements is slower."""
        counts = np.concatenate([self.rounds[:, None], self.proposed, self.accepted], axis=1)
        flags = (self.done, self.stopped, self.failed)
        columns = (self.tokens, self.origins, self.num_new, *flags, counts, self.num_final)
        lists = zip(*(column.tolist() for column in columns), strict=True)
        for logprobs, (tokens, origins, num_new, *rest) in zip(self.logprobs, lists, strict=True):
            yield RowReport(tokens[:num_new], origins[:num_new], logprobs[:num_new], *rest)


class PackedReport(flax.struct.PyTreeNode):
    """A `Report` as one array, because every array that the host reads costs a separate copy.

    Attributes:
        values: `[R, C]` int32, all fields concatenated along the columns, with log-probabilities reinterpreted bitwise.
        widths: number of columns of each field.
    """

    values: jax.Array
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def pack(cls, report: Report) -> "PackedReport":
        """Packs arrays on the device."""
        bits = report._replace(logprobs=jax.lax.bitcast_convert_type(report.logprobs, jnp.int32))
        columns = [field.astype(jnp.int32).reshape(len(field), -1) for field in bits]
        return cls(jnp.concatenate(columns, axis=1), tuple(column.shape[1] for column in columns))

    def read(self) -> Report:
        """Waits for the call and returns host arrays."""
        # This is the only copy from the device. The fields are views of it.
        fields = Report(*np.split(jax.device_get(self.values), np.cumsum(self.widths)[:-1], axis=1))
        flat = {name: getattr(fields, name)[:, 0] for name in ("num_new", "rounds", "num_final")}
        flags = {name: getattr(fields, name)[:, 0].astype(bool) for name in ("done", "stopped", "failed")}
        return fields._replace(logprobs=fields.logprobs.view(np.float32), **flat, **flags)
