"""What ``make test`` leaves to ``make test-all``: cases that cost much and differ little from those that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Values for ``parametrize``, tuples for several arguments, marked slow but for those that ``is_quick`` says."""
    return [
        value
        if is_quick(value)
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


def named(*names: str) -> Callable[[Any], bool]:
    """Whether a value is one of those with these names, as it prints itself."""
    return lambda value: str(value) in names
