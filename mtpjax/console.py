"""Tables and progress bars for the terminal."""

from collections.abc import Iterable, Iterator

import rich.box
import rich.console
import rich.progress
import rich.table


def narrow_table(title: str | None = None) -> rich.table.Table:
    """Makes a table that fits 80 columns, the width that `rich` assumes for pipes."""
    # Use a ruled header and one character of padding, because outer borders would need two more characters.
    return rich.table.Table(
        title=title,
        title_style="",
        title_justify="left",
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def split_columns(table: rich.table.Table, width: int) -> Iterator[rich.table.Table]:
    """Splits a table with many columns, such as one per run, so that names and numbers do not wrap.

    Args:
        table: a table from `narrow_table`, with row names in its first column and text in its cells.

    Yields:
        Tables with the first column and as many other columns as fit; the table itself if all columns fit.
    """
    # Longer cells, such as lists of settings, may wrap.
    widths = [min(max(len(str(cell)) for cell in (column.header, *column.cells)), 24) + 2 for column in table.columns]
    names, others = table.columns[0], table.columns[1:]
    count = max(1, (width - 1 - widths[0]) // max(widths[1:]))
    if count >= len(others):
        yield table
        return
    for begin in range(0, len(others), count):
        shown = (names, *others[begin : begin + count])
        part = narrow_table(str(table.title))
        for column in shown:
            part.add_column(column.header, justify=column.justify, overflow=column.overflow)
        for cells in zip(*(column.cells for column in shown), strict=True):
            part.add_row(*cells)
        yield part


def print_parts(console: rich.console.Console, parts: Iterable[rich.table.Table | str]) -> None:
    """Prints tables and lines of text. Lines are not wrapped, highlighted or parsed as markup."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)


def progress_bar(*columns: rich.progress.ProgressColumn, is_shown: bool = True) -> rich.progress.Progress:
    """Makes a progress bar on stderr, shown only on a terminal and removed at the end; `is_shown=False` hides it."""
    # stdout carries only the command's results, so that they can be piped.
    console = rich.console.Console(stderr=True)
    return rich.progress.Progress(
        *columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)
    )
