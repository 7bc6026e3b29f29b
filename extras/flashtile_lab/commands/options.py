"""What the analyses share: options, and how answers are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

# Above it, products exceed the floats that tables print.
MAX_SIZE = 2**24

HeadDim = Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Width of one head.")]
Dtype = Annotated[str, typer.Option(help="float64, float32, float16, bfloat16 or float8.")]

Records = Sequence[dict[str, Any]]


def show(
    as_json: bool, title: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], records: Records
) -> None:
    """Prints an answer: the table's texts and cells, or the same facts as records."""
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    console = Console()
    console.print(number_table(title, columns, rows))
    console.print(caption, style="dim", highlight=False)


def number_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **style: Any) -> Table:
    """The first column on the left and never broken, the others on the right; ``style`` is of rich's ``Table``."""
    table = Table(title=title, title_justify="left", **style)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def units(unit: float, digits: int) -> Callable[[float], str]:
    """How numbers are written in a unit, with so many digits after the point."""
    return lambda number: f"{number / unit:,.{digits}f}"


def facts(record: Any, *properties: str) -> dict[str, Any]:
    """A result's fields and the named properties as a dictionary."""
    return {**asdict(record), **{name: getattr(record, name) for name in properties}}
