"""What the analyses share: options, the numbers in them, and how answers are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from flashtile.cli.tables import number_table

# Above these, products exceed the floats that tables print.
MAX_SEQLEN = 2**40
MAX_SIZE = 2**24

HeadDim = Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Width of one head.")]
Dtype = Annotated[str, typer.Option(help="float64, float32, float16, bfloat16 or float8.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]

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


def positive_int(text: str, option: str) -> int:
    """A whole number as it was written, 4096 or 4k."""
    factor = 1024 if text.endswith(("k", "K")) else 1
    digits = text[:-1] if factor > 1 else text
    try:
        value = int(digits) * factor
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is not a whole number (4096, or 4k)") from None
    if not 1 <= value <= MAX_SEQLEN:
        raise typer.BadParameter(f"{option}: must be from 1 to {MAX_SEQLEN}, got {text}")
    return value


def integers(texts: Sequence[str], option: str = "--seqlen") -> list[int]:
    """Whole numbers of an option that is repeated, or has commas."""
    return [positive_int(part.strip(), option) for text in texts for part in text.split(",")]


def units(unit: float, digits: int) -> Callable[[float], str]:
    """How numbers are written in a unit, with so many digits after the point."""
    return lambda number: f"{number / unit:,.{digits}f}"


def facts(record: Any, *properties: str) -> dict[str, Any]:
    """A result's fields and the named properties as a dictionary."""
    return {**asdict(record), **{name: getattr(record, name) for name in properties}}
