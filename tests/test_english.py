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
    assert sorted(english.found_in(PLANTED)) == [
        (1, "Of a module"),
        (6, "of which"),
        (7, "Of the next line there is more, that of a comment"),
        (8, "that of"),
        (16, "Of a call; those of others too"),
        (16, "those of"),
    ]


def test_the_source_keeps_the_rule(english: ModuleType, tmp_path: Path) -> None:
    assert not list(english.complaints())
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("# A thing whose name is missing.\n")
    assert list(english.complaints(tmp_path)) == ["src/x.py:1: whose"]
