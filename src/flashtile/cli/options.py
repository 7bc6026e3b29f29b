"""Options of commands, and the numbers in them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

# Above this number, products exceed the floats that tables print.
MOST = 2**40

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
# The input dtypes, as PyTorch calls them.
DtypeName = enum.StrEnum("DtypeName", ["float16", "bfloat16", "float32", "float64"])
# The device of the tensors; auto is a GPU if this machine has one.
DeviceType = enum.StrEnum("DeviceType", ["auto", "cpu", "cuda"])


def positive_int(text: str, option: str) -> int:
    """Parses a whole number, such as 4096 or 4k."""
    factor = 1024 if text.endswith(("k", "K")) else 1
    digits = text[:-1] if factor > 1 else text
    try:
        value = int(digits) * factor
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is not a whole number (4096, or 4k)") from None
    if not 1 <= value <= MOST:
        raise typer.BadParameter(f"{option}: must be from 1 to {MOST}, got {text}")
    return value


def integers(texts: Sequence[str], option: str = "--seqlen") -> list[int]:
    """Parses whole numbers from an option that is repeated, or has commas."""
    return [positive_int(part.strip(), option) for text in texts for part in text.split(",")]
