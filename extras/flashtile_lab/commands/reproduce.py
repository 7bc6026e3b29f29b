"""``flashtile-lab reproduce``: published figures beside ours."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flashtile.core.errors import InvalidInputError
from flashtile_lab import reproduce as figures

Name = Annotated[str | None, typer.Argument(help="An entry (A1) or a section (softmax); all if left out.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the page of the docs.")]


def reproduce(name: Name = None, markdown: Markdown = False) -> None:
    """Published figures about attention, computed again: theirs, ours, and a verdict with its reason.

    Exits with 1 if a verdict that should hold does not.
    """
    if markdown and name is not None:
        raise InvalidInputError("--markdown", "prints the whole page and takes no NAME")
    good, console = True, Console()
    for title, results in figures.reproduce(name):
        good = good and all(result.good for result in results)
        if not markdown:
            table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2, 0, 0))
            for name_of, *texts in (result.cells() for result in results):
                for label, text in zip(("", "published", "ours", "verdict"), texts, strict=True):
                    table.add_row("" if label else escape(name_of), label, escape(text))
            console.print(f"\n{title}", style="bold", highlight=False)
            console.print(table)
    if markdown:
        typer.echo(figures.markdown())
    elif name is None:
        console.print(figures.live() if torch.cuda.is_available() else "No GPU here: speeds are saved rows.")
    if not good:
        raise typer.Exit(1)
