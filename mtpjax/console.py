"""Tables for the terminal."""

from collections.abc import Iterable

import rich.box
import rich.console
import rich.table


def narrow_table(title: str | None = None) -> rich.table.Table:
    """Makes a table that fits 80 columns, the width that `rich` takes for pipes.

    Args:
        title: a line above the table.

    Returns:
        A table without columns and rows.
    """
    # A ruled header and one column of padding: outer borders would take the width of two more columns.
    return rich.table.Table(
        title=title, title_style="", title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def print_parts(console: rich.console.Console, parts: Iterable[rich.table.Table | str]) -> None:
    """Prints tables, and lines as they are: neither wrapped, nor coloured, nor read as markup.

    Args:
        console: where to print.
        parts: tables and lines.
    """
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)
