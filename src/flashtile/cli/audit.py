"""``flashtile audit``: which attention runs in each layer of a model, and whether it is right."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import flashtile
from flashtile.core.errors import InvalidInputError

# Arguments of ``flashtile.audit`` with other names than the flags and the argument here.
_NAMES = {"window_size": "--window", "model": "FUNCTION", "inputs": "FUNCTION"}


def audit(
    where: Annotated[
        str,
        typer.Argument(
            metavar="PLACE:FUNCTION",
            help="A file or a module, and a function in it that takes nothing and returns (model, inputs).",
        ),
    ],
    causal: Annotated[
        bool | None, typer.Option("--causal/--not-causal", help="What all layers are meant to be.", show_default=False)
    ] = None,
    window: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="LEFT RIGHT", help="Keys that rows are meant to see before and after their own."),
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="The scores' factor; head_dim ** -0.5 if left out.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page, too.", show_default=False)] = None,
) -> None:
    """Which attention runs in each layer of a model, and whether it is right.

    Inputs are a tensor, a tuple of arguments, or a dict of keywords. The exit code is 1 if something is wrong, or if
    nothing could be compared.
    """
    make = function_of(where)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise InvalidInputError(where, f"is called without arguments: {error}") from None
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise InvalidInputError(where, f"returned a {type(made).__name__}, must return (model, inputs)")
    try:
        found = flashtile.audit(*made, causal=causal, window_size=window, softmax_scale=scale)
    except InvalidInputError as error:
        raise error.renamed(_NAMES) from None
    typer.echo(str(found))
    if html is not None:
        found.save(html)
        typer.echo(f"\nwritten: {html}")
    if found.findings or not found.compared:
        raise typer.Exit(1)


def function_of(where: str, option: str = "PLACE:FUNCTION") -> Callable[..., Any]:
    """The function that an option's ``PLACE:FUNCTION`` names."""
    place, _, name = where.rpartition(":")
    if not place or not name.isidentifier():
        raise InvalidInputError(option, f"is {where!r}, must be such as model.py:make or package.module:make")
    is_file = place.endswith(".py")
    sys.path.insert(0, str(Path(place).resolve().parent if is_file else Path.cwd()))
    if is_file and not Path(place).is_file():
        raise InvalidInputError(option, f"there is no file {place}")
    try:
        found = runpy.run_path(place) if is_file else vars(importlib.import_module(place))
    except ModuleNotFoundError as error:
        # What the module itself lacks is its own affair.
        if error.name != place:
            raise
        raise InvalidInputError(option, f"there is no module {place}") from None
    if not callable(found.get(name)):
        raise InvalidInputError(option, f"{place} has no function {name}")
    function: Callable[..., Any] = found[name]
    return function
