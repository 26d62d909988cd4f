"""The programs of an engine: their keys, the order in which they are compiled, and the choice for each call.

A program is compiled for a number of rows, a width of the page table, the options of its rows and a depth. A program
for more rows, a wider table or more options computes the same for fewer, but slower. So a server can start with three
programs for one row at full width: until the others are compiled, calls use a larger one, or are split into calls of
fewer rows.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from mtpjax.serving.sizes import EngineSizes

# Sampling options over so few logits cost nothing that could be measured on a CPU, so that greedy rows need no programs
# of their own.
SMALL_VOCABULARY = 1024
Row = TypeVar("Row")


class ProgramKey(NamedTuple):
    """What distinguishes a program from the others of an engine.

    Attributes:
        kind: "admit", "prefill", "advance", "clear" or "score"; for rows with a grammar, "masked prefill" and "masked
            round" (`draft_round` and `verify_round`).
        size: rows of each shard.
        width: pages per row.
        plain: every row is greedy and without options.
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


class ProgramSet:
    """The programs that calls may use.

    Args:
        on_missing: called with the program that a call would have used, if it used another.

    Attributes:
        ready: the compiled ones; None: all of them may be used, and a call compiles its own at the first use.
    """

    def __init__(self, on_missing: Callable[[ProgramKey], None] = lambda key: None):
        self.ready: set[ProgramKey] | None = None
        self.on_missing = on_missing

    def choose(self, wanted: ProgramKey) -> ProgramKey:
        """Chooses the program of a call: the wanted one if it is ready, else the smallest ready one that covers it.

        If none has so many rows, it is the one with the most rows: the call must then be split.
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


def first_programs(sizes: EngineSizes) -> list[ProgramKey]:
    """Returns the programs that serve every request without a grammar, row by row."""
    size, width = sizes.batch_sizes[0], sizes.table_widths[-1]
    return [
        ProgramKey("admit", size),
        ProgramKey("prefill", sizes.prefill_sizes[0], width),
        ProgramKey("advance", size, width, False, sizes.depths[0]),
    ]


def all_programs(sizes: EngineSizes, *, has_grammars: bool, has_plain: bool) -> list[ProgramKey]:
    """Returns all programs that requests may need, in the order in which they are compiled.

    Args:
        sizes: of the engine.
        has_grammars: requests may have grammars.
        has_plain: greedy rows have programs of their own.
    """
    widest = sizes.table_widths[-1]
    # One row and many rows gain most, and rows without drafts or with a grammar are rare.
    rows = [sizes.batch_sizes[0], *reversed(sizes.batch_sizes[1:])]
    kinds = (True, False) if has_plain else (False,)
    keys = [*first_programs(sizes), *(ProgramKey("admit", size) for size in sizes.batch_sizes)]
    keys += [ProgramKey("prefill", *each) for each in itertools.product(sizes.prefill_sizes, sizes.table_widths)]
    for depth, size, width, plain in itertools.product(sizes.depths, rows, sizes.table_widths, kinds):
        keys.append(ProgramKey("advance", size, width, plain, depth))
    keys.append(ProgramKey("clear"))
    # Rows with a grammar have programs for the widest table only.
    if has_grammars:
        keys += [ProgramKey("masked prefill", size, widest) for size in sizes.prefill_sizes]
        rounds = itertools.product(sizes.depths, rows)
        keys += [ProgramKey("masked round", size, widest, False, depth) for depth, size in rounds]
    keys += [ProgramKey("score", 1, width) for width in sizes.table_widths]
    return list(dict.fromkeys(keys))


def split_rows(rows: list[Row], size: int, shard_of: Callable[[Row], int]) -> list[list[Row]]:
    """Splits the rows of a call into calls of at most `size` rows of each shard of the mesh, in their order."""
    counts: dict[int, int] = {}
    groups: list[list[Row]] = []
    for row in rows:
        shard = shard_of(row)
        number, counts[shard] = counts.get(shard, 0) // size, counts.get(shard, 0) + 1
        groups += [[] for _ in range(number + 1 - len(groups))]
        groups[number].append(row)
    return groups
