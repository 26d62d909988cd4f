"""Tables of numbers that the commands print."""

from collections.abc import Sequence

import rich.table

from mtpjax.console import narrow_table


def number_table(title: str, headings: Sequence[str], name: str | None = None) -> rich.table.Table:
    """Makes a table 80 columns wide with right-aligned numbers.

    Args:
        title: the title.
        headings: the headings of the number columns, whose cells do not wrap.
        name: the heading of a first column with names, which may wrap; None: no such column.
    """
    table = narrow_table(title)
    if name is not None:
        table.add_column(name, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
