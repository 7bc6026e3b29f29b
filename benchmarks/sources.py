"""A digest of the library's code that a suite times, which rows carry: it says later whether that code has changed.

Machine code would be the best judge and takes minutes: ``tools/same_code.py`` compiles every kernel of two commits. A
digest of syntax trees takes two seconds on a CPU, needs neither Triton nor git, and covers what compiled kernels do
not show: which tiles and which kernel the host chooses for a call. Comments, docstrings and layout are no part of it,
nor imports, nor in which file or order functions stand. Versions of Triton and PyTorch stand in a row by themselves. A
rewritten line whose kernels stay the same changes it all the same: then ``same_code.py`` says so, and ``SAME`` in
``benchmarks/measured.py`` keeps its verdict.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "src" / "flashtile"

_BACKENDS = ("gpu", "hopper", "portable")
# Folders, with ``/**`` all below them too.
_SHARED = tuple(f"backends/{name}{folder}" for name in _BACKENDS for folder in ("", "/device"))
_FORWARD = (*_SHARED, "backends/hopper/forward", "backends/portable/forward")
_BOTH = (*_FORWARD, "backends/hopper/backward", "backends/portable/backward", "backends/portable/short")
_CACHED = (*_SHARED, "backends/gpu/decode", "backends/hopper/decode", "backends/hopper/forward/**")
_BITS = tuple(f"backends/{name}" for name in ("hopper/quantized", "portable/quantized", "portable/rounding"))
_ALL = ("api", "call", "core", "mods", "ops", "serving", *(f"backends/{name}/**" for name in _BACKENDS))
# Suite -> what of the library it times; where the host's time counts, its modules too.
TIMED = {
    "forward": _FORWARD,
    "ablations": _FORWARD,
    "backward": _BOTH,
    "models": _BOTH,
    "models-portable": _BOTH,
    "varlen": _BOTH,
    "uses": (*_BOTH, "backends/gpu/decode", "backends/hopper/decode"),
    "mods": (*_BOTH, "mods"),
    "big-heads": (*_BOTH, "backends/hopper/big_heads", "backends/hopper/big_backward"),
    "fp8": (*_FORWARD, *_BITS),
    "decode": _CACHED,
    "serving": _CACHED,
    "mla": (*_CACHED, "backends/hopper/latent"),
    "selected": (*_BOTH, *_CACHED, "backends/hopper/latent"),
    "distributed": (*_BOTH, "distributed"),
    "host": _ALL,
    "loop": _ALL,
    "first_call": _ALL,
}


def digest(suite: str, library: Path = LIBRARY) -> str:
    """Twelve digits for the code that a suite times; empty for a suite that times none of ``TIMED``'s."""
    files = {path for part in TIMED.get(suite, ()) for path in _files(library, part)}
    parts = sorted(part for path in files for part in _statements(path))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12] if parts else ""


def _files(library: Path, part: str) -> Iterator[Path]:
    folder, below = part.removesuffix("/**"), part.endswith("/**")
    return (library / folder).rglob("*.py") if below else (library / folder).glob("*.py")


@functools.cache
def _statements(path: Path) -> list[str]:
    """A digest of each of a module's statements, imports and docstrings aside."""
    found = []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not _is_text(statement):
            words: list[str] = []
            _collect(statement, words)
            found.append(hashlib.sha256("\0".join(words).encode()).hexdigest())
    return found


def _is_text(statement: object) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _collect(node: object, words: list[str]) -> None:
    """Types and values of a tree, without what newer Pythons add empty: ``ast.dump`` differs between them."""
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in ("ctx", "kind", "type_comment"):
                words.append(name)
                _collect(value, words)
    elif isinstance(node, list):
        words.append("[")
        for each in node:
            if not _is_text(each):
                _collect(each, words)
        words.append("]")
    else:
        words.append(repr(node))
