"""A class's name stands for one thing in all of src."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "flashtile"
_BACKENDS = "the same concept in two backends that never meet"
# Name -> how many classes have it, and why they still do. It only shrinks.
SHARED = {
    "Backend": (3, "also the word of vLLM and of SGLang for the class that they load"),
    "HeadRows": (2, _BACKENDS),
    "Metadata": (2, "the word of vLLM and of SGLang for a step's record"),
    "Mods": (2, _BACKENDS),
    "Output": (2, _BACKENDS),
    "RotaryEmbedding": (2, "flash-attn's own name, in the module that stands for flash-attn's"),
    "Scales": (2, _BACKENDS),
    "ScoreTensor": (2, _BACKENDS),
}


def shared(texts: Iterable[str]) -> dict[str, int]:
    """How many top-level classes of some modules have a name, if several do."""
    names = (node.name for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {name: count for name, count in Counter(names).items() if count > 1}


def test_a_name_of_two_classes_is_found() -> None:
    assert shared(["class A: ...\nclass B:\n    class C: ...\n", "class C: ...\nclass A: ...\n", "A = B = 1\n"]) == {
        "A": 2
    }


def test_no_class_has_the_name_of_another() -> None:
    found = shared(path.read_text() for path in SRC.rglob("*.py"))
    assert found == {name: count for name, (count, _) in SHARED.items()}
