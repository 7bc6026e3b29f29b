"""The checks of plain arguments, one by one: each returns the value as a call's options hold it, or raises."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.settings import BACKENDS
from flashtile.core.sizes import holds

# Kernels get numbers as float32, here without those of fewer digits, and lengths as int32.
_SMALLEST, _GREATEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LONGEST = torch.iinfo(torch.int32).max


def finite(name: str, value: Any) -> float:
    """Checks a number and returns it as a float; raises InvalidInputError."""
    # Comparisons instead of math.isfinite, which torch.compile cannot trace on a symbolic number. NaN fails them.
    is_number = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if not is_number or not -_GREATEST <= value <= _GREATEST:
        raise InvalidInputError(name, f"is {shown(value)}, must be a finite number in float32's range")
    return float(value)


def scale(name: str, value: object) -> float | None:
    """Checks softmax_scale."""
    return None if value is None else finite(name, value)


def softcap(name: str, value: object) -> float:
    """Checks the softcap; 0 for none."""
    cap = 0.0 if value is None else finite(name, value)
    if cap != 0 and cap < _SMALLEST:
        raise InvalidInputError(
            name, f"is {shown(value)}, must be 0 or None (none) or positive, and not below {_SMALLEST:.1g}"
        )
    return cap


def probability(name: str, value: object) -> float:
    """Checks the probability of dropping and returns it as a float; raises InvalidInputError."""
    share = finite(name, value)
    if not 0 <= share < 1:
        raise InvalidInputError(name, f"is {shown(value)}, must be at least 0 and less than 1")
    return share


def flag(name: str, value: object) -> bool:
    """Checks a bool and returns it; raises InvalidInputError."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, f"is {shown(value)}, must be a Python bool, True or False")
    return value


def length(name: str, value: Any) -> Any:
    """Checks a longest length."""
    if value is None or isinstance(value, torch.SymInt):
        return value
    return integer(name, value, 0, " or None")


def integer(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Checks a number of things and returns it as an int.

    Raises:
        InvalidInputError: If it is no integer, less than ``least``, or more than an int32 holds.
    """
    found = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
    if holds(found < least) or holds(found > LONGEST):
        most = ", at most 2**31 - 1" if holds(found > LONGEST) else ""
        raise InvalidInputError(name, f"is {shown(value)}, must be an integer >= {least}{otherwise}{most}")
    return found


def chunk(name: str, value: Any) -> int | None:
    """Checks attention_chunk; None for none."""
    return None if value is None or (value == 0 and value is not False) else integer(name, value, 1, ", or 0 or None")


def backend(name: str, value: object) -> str:
    """Checks the name of a backend; empty for none."""
    if value is not None and not (isinstance(value, str) and value in BACKENDS):
        raise InvalidInputError(name, f"is {shown(value)}, must be one of {', '.join(BACKENDS)}, or None to choose")
    return value or ""
