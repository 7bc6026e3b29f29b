"""The size limits see what is over them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "limits.py"


@pytest.fixture
def limits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("limits", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function(parameters: int, lines: int = 2, before: str = "", first: str = "") -> str:
    names = ", ".join([first] * bool(first) + [f"a{n}" for n in range(parameters)])
    return f"{before}def f({names}):\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("src/flashtile/a.py", _function(12, 80), []),
        ("src/flashtile/a.py", _function(13), ["src/flashtile/a.py:1 f: 13 parameters, at most 12"]),
        ("src/flashtile/a.py", _function(12, 81), ["src/flashtile/a.py:1 f: 81 lines, at most 80"]),
        ("src/flashtile/a.py", "class C:\n  " + _function(12, first="self"), []),
        ("src/flashtile/a.py", _function(11, first="x, /, *y"), ["src/flashtile/a.py:1 f: 13 parameters, at most 12"]),
        ("src/flashtile/api/attention.py", _function(20), []),
        ("src/flashtile/compat/a.py", _function(20), []),
        ("src/flashtile/a.py", _function(13, before="@triton.jit\n"),
         ["src/flashtile/a.py:2 f: 13 parameters, at most 12"]),
        ("src/flashtile/a.py", "\n" * 501, ["src/flashtile/a.py: 501 lines, at most 500"]),
        ("src/flashtile/backends/hopper/forward/a.py", "\n" * 700, []),
        ("src/flashtile/ops/host.py", "\n" * 501, ["src/flashtile/ops/host.py: 501 lines, at most 500"]),
        ("benchmarks/a.py", _function(13), ["benchmarks/a.py:1 f: 13 parameters, at most 12"]),
    ],
)  # fmt: skip
def test_what_is_over_a_limit_is_said(limits: ModuleType, name: str, text: str, found: list[str]) -> None:
    assert list(limits.of_file(name, text)) == found


def test_features_have_files_and_are_worth_a_row(limits: ModuleType) -> None:
    source = limits.ROOT / "src" / "flashtile"
    for feature in limits.FEATURES:
        assert all(any(source.glob(pattern)) for pattern in feature.files), feature.name
        assert limits.lines_of(feature) > 200, feature.name
