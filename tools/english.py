"""Finds sentences of comments and docstrings that begin with "Of", and counts four phrases; fails on too many.

A sentence has a subject and a plain verb, and calls each thing by its name. A sentence that begins with "Of" leaves its
subject out, and ``PHRASES`` point at things where they could name them. Ceilings only go down.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folder -> the most sentences that begin with "Of", and the most phrases. A file counts for its longest folder here.
CEILINGS = {
    "src/flashtile": (0, 0),
    "src/flashtile/api": (0, 0),
    "src/flashtile/call": (0, 0),
    "src/flashtile/ops": (0, 0),
    "src/flashtile/backends/gpu": (0, 0),
    "src/flashtile/backends/gpu/device": (0, 0),
    "src/flashtile/backends/hopper": (0, 0),
    "src/flashtile/backends/hopper/device": (0, 0),
    "src/flashtile/backends/portable": (0, 0),
    "src/flashtile/backends/portable/device": (0, 0),
}
PHRASES = re.compile(r"\b(?:whose|of which|those of|that of)\b", re.IGNORECASE)
# "Of" has a capital only where a sentence begins. Code between backticks is no English.
_FRAGMENT = re.compile(r"(?<![\w.])Of\s[^.]*")
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, and of each run of comments on lines of their own, in a module's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, _CODE.sub("``", node.value.value)
    run: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, alone = token.start[0], not token.line[: token.start[1]].strip()
        if run and not (alone and row == last + 1):
            yield first, _CODE.sub("``", "\n".join(run))
            run = []
        first, last = first if run else row, row if alone else -1
        run.append(token.string.removeprefix("#").strip())
    if run:
        yield first, _CODE.sub("``", "\n".join(run))


def fragments(text: str) -> list[tuple[int, str]]:
    """Line and beginning of each sentence of a module that begins with "Of"."""
    return [
        (line + words.count("\n", 0, found.start()), " ".join(found[0].split())[:60])
        for line, words in prose(text)
        for found in _FRAGMENT.finditer(words)
    ]


def phrases(text: str) -> int:
    """How many of ``PHRASES`` a module has."""
    return sum(len(PHRASES.findall(" ".join(words.split()))) for _, words in prose(text))


def complaints(root: Path = ROOT) -> Iterator[str]:
    """One line for each sentence or count over its folder's ceiling, and for each ceiling that is too high."""
    begun: dict[str, list[str]] = {folder: [] for folder in CEILINGS}
    counts = Counter[str]()
    for path in sorted((root / "src").rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        folder = max((each for each in CEILINGS if name.startswith(f"{each}/")), key=len)
        begun[folder] += [f"{name}:{line}: {words}" for line, words in fragments(text)]
        counts[folder] += phrases(text)
    for folder, (most_begun, most_phrases) in CEILINGS.items():
        if len(begun[folder]) > most_begun:
            yield from begun[folder]
        found = (
            ("sentences that begin with Of", len(begun[folder]), most_begun),
            ("phrases", counts[folder], most_phrases),
        )
        for what, count, most in found:
            if count != most:
                should = f"at most {most}" if count > most else f"the ceiling is {most}: lower it"
                yield f"{folder}: {count} {what}, {should}"


if __name__ == "__main__":
    found = list(complaints())
    print("\n".join(found))
    sys.exit(bool(found))
