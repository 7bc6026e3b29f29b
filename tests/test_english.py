"""The rule of English finds what is planted, and nothing in code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "english.py"
PLANTED = '''"""Of a module.

``Of code`` and `that of code` are no English.
"""

x = "Of a string, whose text is not read"  # of which the comment is
# A comment goes on. Of the
# next line there is more, that
# of a comment.


def f() -> str:
    """Returns a string.

    Returns:
        text: Of a call; those
            of others too.
    """
    return "Of a string"
'''


@pytest.fixture
def english() -> ModuleType:
    spec = importlib.util.spec_from_file_location("english", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_planted_sentences_are_found(english: ModuleType) -> None:
    found = [
        (1, "Of a module"),
        (7, "Of the next line there is more, that of a comment"),
        (16, "Of a call; those of others too"),
    ]
    assert sorted(english.fragments(PLANTED)) == found
    assert english.phrases(PLANTED) == 3


def test_a_folder_over_its_ceiling_is_said(
    english: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x.py", "a/b/x.py", "ab/x.py"):
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# Of one, whose name is missing.\n")
    ceilings = {"src": (1, 1), "src/a": (0, 2), "src/a/b": (1, 0)}
    monkeypatch.setattr(english, "CEILINGS", ceilings)
    assert list(english.complaints(tmp_path)) == [
        "src/a/x.py:1: Of one, whose name is missing",
        "src/a: 1 sentences that begin with Of, at most 0",
        "src/a: 1 phrases, the ceiling is 2: lower it",
        "src/a/b: 1 phrases, at most 0",
    ]


def test_the_source_keeps_the_rule(english: ModuleType) -> None:
    assert not [each for each in english.complaints() if "lower it" not in each]
