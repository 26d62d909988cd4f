"""Tables for the terminal."""

import rich.box
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
        title=title,
        title_style="",
        title_justify="left",
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
