"""A class's name stands for one thing in all of src."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "flashtile"
_DEVICE = "the device's record for what the host's class describes"
_BACKENDS = "the same concept in two backends that never meet"
_KERNELS = "the same part of several kernels, each in its kernel's folder"
_TWO = "two things"
# Name -> how many classes have it, and why they still do. It only shrinks.
SHARED = {
    "Alibi": (2, _BACKENDS),
    "Backend": (3, "also the word of vLLM and of SGLang for the class that they load"),
    "Band": (2, _DEVICE),
    "Block": (2, _TWO),
    "Bounds": (2, _TWO),
    "Build": (2, _DEVICE),
    "Cache": (2, _DEVICE),
    "Call": (2, _DEVICE),
    "Channels": (4, _KERNELS),
    "Gradients": (2, _DEVICE),
    "HeadRows": (2, _BACKENDS),
    "Metadata": (2, "the word of vLLM and of SGLang for a step's record"),
    "Mods": (2, _BACKENDS),
    "Output": (2, _BACKENDS),
    "Partial": (2, _TWO),
    "Place": (3, _KERNELS),
    "Results": (2, _KERNELS),
    "Rings": (2, _KERNELS),
    "RotaryEmbedding": (2, "flash-attn's own name, in the module that stands for flash-attn's"),
    "Rows": (2, _TWO),
    "Scale": (2, _DEVICE),
    "Scales": (3, _BACKENDS),
    "Schedule": (3, _KERNELS),
    "ScoreTensor": (2, _BACKENDS),
    "Shape": (2, _TWO),
    "Splitting": (2, _DEVICE),
    "State": (3, _KERNELS),
    "Tiles": (3, _KERNELS),
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
