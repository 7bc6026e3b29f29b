"""Writes flashtile as a kernel repository of the Hugging Face hub, to be uploaded: ``python tools/hub.py FOLDER``.

The ``kernels`` package imports such a repository by a name that its metadata give it, beside other versions of the same
kernel and beside what is installed. So each variant is the package with that name in place of its own: imports are
relative, and modules, operators and attributes that are named in strings begin with it. The name holds a digest of the
sources. Triton is imported as in the package, in device code alone: where there is a GPU, PyTorch brings it.

Left out: the command line, and the integrations, which import packages that a kernel may not. A wheel of kernels that
were built ahead is not looked for: they are of the installed sources, byte for byte.

Source: huggingface/kernels 0.17, docs/source/kernel-requirements.md, and its checks in nix-builder/pkgs.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "flashtile"
BACKENDS = ("cpu", "cuda", "rocm")
LEFT_OUT = ("__main__.py", "cli", "integrations")
# The hub's major version, a branch v1 there: it changes where a name of ``__all__`` changes or goes.
VERSION = 1
# Of the kernels package: what the tests load this with.
OLDEST_KERNELS = "0.17.2"
# Any NVIDIA GPU from this compute capability on; AMD's have no order, and a call says what it runs on.
OLDEST_CUDA = "8.0+PTX"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

# A string that is a name of ours as a whole, or the first part of one; others are texts for people.
_NAME = re.compile(r"_?flashtile[\w.:]*")
_OWN = re.compile(rb"_?flashtile")
_IMPORT = re.compile(rb"from\s+flashtile\.?")
# Modules that are printed while a program runs name in full what they import.
_PRINTED = re.compile(r"^from flashtile\.", re.MULTILINE)


def rewritten(text: str, path: str, name: str) -> str:
    """A module's text with relative imports, and with another name of the package in all else.

    Args:
        text: What the module's file holds.
        path: Of the file, in the package.
        name: What the package is imported as.

    Raises:
        ValueError: The module has an import that cannot be made relative.
    """
    source, starts = text.encode(), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, edits = ast.parse(text), dict[int, tuple[int, str]]()
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        pattern, by = _OWN, name
        match node:
            case ast.Import(names=names) if any(each.name.partition(".")[0] == "flashtile" for each in names):
                raise ValueError(f"{path}: {ast.unparse(node)} has no relative form: write from flashtile import ...")
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == "flashtile":
                pattern, by = _IMPORT, "from " + "." * (path.count("/") + 1)
            case (
                ast.Attribute(attr="_flashtile")
                | ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="ops"), attr="flashtile")
            ):
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                edits[end - len(node.attr)] = end, by
                continue
            case ast.JoinedStr(values=[ast.Constant(value=str(value)), *_]) if _NAME.fullmatch(value):
                pass
            case ast.Constant(value=str(value)) if id(node) not in parts and _NAME.fullmatch(value):
                pass
            case _:
                continue
        found = pattern.search(source, starts[node.lineno - 1] + node.col_offset)
        assert found is not None
        edits[found.start()] = found.end(), by
    made, at = "", 0
    for start, (end, by) in sorted(edits.items()):
        made, at = made + source[at:start].decode() + by, end
    return _PRINTED.sub(f"from {name}.", made + source[at:].decode())


def sources() -> dict[str, bytes]:
    """The package's files that a kernel has, by their paths in it."""
    paths = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    names = {path: path.relative_to(PACKAGE) for path in paths}
    return {name.as_posix(): path.read_bytes() for path, name in names.items() if name.parts[0] not in LEFT_OUT}


def first(text: str) -> str:
    """The package's own text, once rewritten, as a kernel's: what it demands at the top, flash-attn's functions below.

    Metadata can name neither Python's version nor PyTorch's. A Python that is too old reads this module alone.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    python, torch = (each.rpartition(">=")[2] for each in (project["requires-python"], project["dependencies"][0]))
    docstring, rest = text.split("\n", 1)
    return f"""{docstring}

import sys as _sys

import torch as _torch

for _what, _is, _needs in (("Python", _sys.version, "{python}"), ("PyTorch", _torch.__version__, "{torch}")):
    if [int(_each) for _each in _is.split(".")[:2]] < [int(_each) for _each in _needs.split(".")]:
        raise ImportError(f"flashtile needs {{_what}} {{_needs}} or later, this is {{_is}}")
{rest}

from .compat.flash_attn_2 import {", ".join(FUNCTIONS)}

__all__ += {list(FUNCTIONS)}
"""


def kernel(name: str) -> dict[str, bytes]:
    """The files of a kernel that is imported by a name, by their paths in it."""
    made = sources()
    for path, content in made.items():
        if path.endswith(".py"):
            text = rewritten(content.decode(), path, name)
            made[path] = (first(text) if path == "__init__.py" else text).encode()
    return made | {"LICENSE": (ROOT / "LICENSE").read_bytes()}


def metadata(backend: str, name: str, files: Mapping[str, bytes]) -> bytes:
    """What the ``kernels`` package reads of a variant before it imports it."""
    hashes = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in files.items()}
    found = {
        "name": "flashtile",
        "id": name,
        "version": VERSION,
        "kernels-minver": OLDEST_KERNELS,
        "license": "apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend} | ({"archs": [OLDEST_CUDA]} if backend == "cuda" else {}),
        "digest": {"algorithm": "sha256", "files": dict(sorted(hashes.items()))},
    }
    return json.dumps(found, indent=2).encode()


def card() -> str:
    """The repository's page: this project's on the hub, without links to its other pages."""
    text = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^]]+)\]\([\w-]+\.md[^)]*\)", r"\1", text)
    return f"---\nlibrary_name: kernels\nlicense: apache-2.0\ntags: [kernels, attention]\n---\n\n{text}"


def write(into: Path, backends: Sequence[str] = BACKENDS) -> None:
    """Writes the repository, in place of what ``into`` held of an earlier one."""
    state = hashlib.sha256(Path(__file__).read_bytes())
    for path, content in sources().items():
        state.update(f"{path} {len(content)}\n".encode() + content)
    # All variants are one text but for their names.
    name = f"_flashtile_{{}}_{state.hexdigest()[:10]}"
    files = kernel(name)
    shutil.rmtree(into / "build", ignore_errors=True)
    for backend in backends:
        own = name.format(backend)
        made = {path: content.replace(name.encode(), own.encode()) for path, content in files.items()}
        for path, content in {**made, "metadata.json": metadata(backend, own, made)}.items():
            place = into / "build" / f"torch-{backend}" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    (into / "build" / "CARD.md").write_text(card(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
