"""What ``make test`` leaves to other runs: cases that cost much and differ little from those that stay."""

from __future__ import annotations

import dataclasses
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


def one_of_each(values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``, long but for the first and a few that together have all that the others have.

    Args:
        values: Cases, which are dataclasses, and what ``slow_but`` has marked.
    """
    values = list(values)
    features = {at: _features(case) for at, case in enumerate(values) if dataclasses.is_dataclass(case)}
    stay = {next(iter(features))}
    while missing := set().union(*features.values()) - set().union(*(features.get(at, set()) for at in stay)):
        stay.add(max(features, key=lambda at: (len(features[at] & missing), -at)))
    return [x if at in stay or at not in features else pytest.param(x, marks=pytest.mark.long)
            for at, x in enumerate(values)]  # fmt: skip


def _features(case: Any) -> set[str]:
    """The fields that have another value than by default, and several groups of heads."""
    found = {each.name for each in dataclasses.fields(case) if getattr(case, each.name) != each.default}
    return found | ({"several groups"} if case.heads > case.kv_heads > 1 else set())


def named(*names: str) -> Callable[[Any], bool]:
    """Whether a value is one of those with these names, as it prints itself."""
    return lambda value: str(value) in names
