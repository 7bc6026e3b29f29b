"""Tables of numbers on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def number_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **style: Any) -> Table:
    """The first column on the left and never broken, the others on the right; ``style`` is of rich's ``Table``."""
    table = Table(title=title, title_justify="left", **style)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table
