"""Tables for the terminal, narrow enough for 80 columns, which is what a pipe gets."""

import rich.box
import rich.table


def narrow_table(title: str | None = None) -> rich.table.Table:
    """One without columns yet."""
    return rich.table.Table(
        title=title, title_style="", title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
