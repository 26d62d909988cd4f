"""Tables of numbers that the commands print."""

from collections.abc import Sequence

import rich.table

from mtpjax.console import narrow_table


def number_table(title: str, headings: Sequence[str], name: str | None = None) -> rich.table.Table:
    """Makes a table of 80 columns with right-aligned numbers.

    Args:
        title: the title.
        headings: the columns of numbers, whose cells do not break.
        name: the heading of a first column of names, which may break; None: the table has no such column.
    """
    table = narrow_table(title)
    if name is not None:
        table.add_column(name, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
