"""Fails for sentences of comments and docstrings in src that begin with "Of", and for four phrases.

A sentence has a subject and a plain verb, and calls each thing by its name. A sentence that begins with "Of" leaves its
subject out, and ``PHRASES`` point at things where they could name them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHRASES = re.compile(r"\b(?:whose|of\s+which|those\s+of|that\s+of)\b", re.IGNORECASE)
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


def found_in(text: str) -> list[tuple[int, str]]:
    """Line and words of each sentence of a module that begins with "Of", and of each phrase."""
    return [
        (line + words.count("\n", 0, found.start()), " ".join(found[0].split())[:60])
        for line, words in prose(text)
        for pattern in (_FRAGMENT, PHRASES)
        for found in pattern.finditer(words)
    ]


def complaints(root: Path = ROOT) -> Iterator[str]:
    """One line for each."""
    for path in sorted((root / "src").rglob("*.py")):
        for line, words in found_in(path.read_text()):
            yield f"{path.relative_to(root).as_posix()}:{line}: {words}"


if __name__ == "__main__":
    found = list(complaints())
    print("\n".join(found))
    sys.exit(bool(found))
