"""Shared test settings."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator

# Workers of pytest-xdist share the cores, so several threads per worker would slow each other down.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tiles that somebody measured on this machine are not what is tested.
os.environ["FLASHTILE_TILES"] = "off"

import pytest
from hypothesis import settings

# No deadline, because an example's duration is not a fault; a fixed seed makes a failing run repeatable.
settings.register_profile("flashtile", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("flashtile")


# What modules and collected cases are made of stays: to look through it for garbage again and again takes longer than
# the tests that make some.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def left_out(config: pytest.Config) -> set[str]:
    """The marks that no case of this run may have, where it is asked for by nothing but these."""
    asked = (config.option.markexpr or "").split(" and ")
    return {each[4:] for each in asked} if all(re.fullmatch(r"not \w+", each) for each in asked) else set()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that this run leaves out whole has one case made, and not its thousand."""
    definition = metafunc.definition
    if left_out(metafunc.config).isdisjoint(mark.name for mark in definition.iter_markers()):
        return
    for at, mark in enumerate(definition.own_markers):
        if mark.name == "parametrize":
            names, values, *rest = mark.args
            keywords = {name: x for name, x in mark.kwargs.items() if name != "ids"}
            definition.own_markers[at] = pytest.mark.parametrize(names, list(values)[:1], *rest, **keywords).mark


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first of every ``n`` cases of a test marked ``one_in(n)`` stay in ``make test``; the others are long."""
    num_cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if num_cases[test] % mark.args[0]:
            item.add_marker(pytest.mark.long)
        num_cases[test] += 1


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="session", autouse=INTERPRETED)
def quick_interpreter() -> Iterator[None]:
    from tests.interpreter import without_needless_work

    with without_needless_work():
        yield
