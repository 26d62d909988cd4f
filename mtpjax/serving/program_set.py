"""The programs of an engine, their keys, and the choice of a program for each call.

A program is compiled for a number of rows, a page-table width, the options of its rows and a depth. A program for more
rows, a wider table or more options gives the same results, but more slowly. So a server can start with three programs
for one row at full width. Until the others are compiled, a call uses a larger program, or is split into calls with
fewer rows.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from mtpjax.decoding.gpu_graph import OneGraph

Row = TypeVar("Row")


class ProgramKey(NamedTuple):
    """Identifies a program of an engine.

    Attributes:
        kind: "admit", "prefill", "advance", "clear" or "score"; for rows with a grammar, "masked prefill" and "masked
            round" (`draft_round` and `verify_round`).
        size: rows per shard.
        width: pages per row.
        plain: whether every row is greedy and uses no options.
        depth: draft levels.
    """

    kind: str
    size: int = 0
    width: int = 0
    plain: bool = False
    depth: int = 0

    def covers(self, other: "ProgramKey") -> bool:
        """Returns whether this program can replace the other, possibly more slowly."""
        return (
            (self.kind, self.depth) == (other.kind, other.depth)
            and self.size >= other.size
            and self.width >= other.width
            and self.plain <= other.plain
        )


class PendingCall(NamedTuple):
    """A call that has not been dispatched yet.

    Attributes:
        program: a program from `mtpjax.decoding.session` or `mtpjax.serving.scoring`.
        arrays: its arguments after the state.
        key: selects its static arguments, and so the compiled program.
    """

    program: OneGraph
    arrays: tuple[Any, ...]
    key: ProgramKey


class ProgramSet:
    """The programs that calls may use.

    Args:
        on_missing: called with the program that a call needs, if the call has to use a different one.

    Attributes:
        ready: the compiled programs; if None, all programs may be used, and a call compiles its program at first use.
    """

    def __init__(self, on_missing: Callable[[ProgramKey], None] = lambda key: None):
        self.ready: set[ProgramKey] | None = None
        self.on_missing = on_missing

    def choose(self, wanted: ProgramKey) -> ProgramKey:
        """Returns the wanted program if it is ready, otherwise the smallest ready program that covers it.

        If no ready program has enough rows, returns the one with the most rows; the call must then be split.
        """
        if self.ready is None or wanted in self.ready:
            return wanted
        self.on_missing(wanted)
        able = self._able(wanted)
        if not able:
            return wanted
        enough = [key for key in able if key.size >= wanted.size]
        if enough:
            return min(enough, key=lambda key: (key.size * key.width, not key.plain))
        return max(able, key=lambda key: (key.size, -key.width, key.plain))

    def missing(self, needed: Iterable[ProgramKey]) -> list[ProgramKey]:
        """Returns the needed programs that no ready one can replace, even row by row."""
        return [] if self.ready is None else [key for key in needed if not self._able(key)]

    def _able(self, wanted: ProgramKey) -> list[ProgramKey]:
        one_row = wanted._replace(size=min(wanted.size, 1))
        return [key for key in self.ready or () if key.covers(one_row)]


def split_rows(rows: list[Row], size: int, shard_of: Callable[[Row], int]) -> list[list[Row]]:
    """Splits the rows of a call into calls of at most `size` rows per shard of the mesh, in order."""
    counts: dict[int, int] = {}
    groups: list[list[Row]] = []
    for row in rows:
        shard = shard_of(row)
        number, counts[shard] = counts.get(shard, 0) // size, counts.get(shard, 0) + 1
        groups += [[] for _ in range(number + 1 - len(groups))]
        groups[number].append(row)
    return groups
