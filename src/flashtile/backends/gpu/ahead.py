"""Makes archives of kernels: compiles launches for an architecture, and writes what ``archive`` reads."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from flashtile.backends.gpu import archive, build
from flashtile.backends.gpu.archive import Archive, Found
from flashtile.backends.gpu.functions import PrintedModule, module_of
from flashtile.backends.gpu.launch import (
    Captured,
    Const,
    Launch,
    Pointer,
    TensorMap,
    compile_kernel,
    lower,
    specialise,
    text_of,
)
from flashtile.backends.gpu.named import DeviceFunction, DeviceModule, device_code
from flashtile.core import trusted
from flashtile.core.errors import InvalidInputError, UnsupportedError

# How arguments become parameters, whatever the kernel; and how users' functions are printed.
_ALWAYS = ("backends/gpu/launch.py",)
# A group has at most so many before compression: larger groups take fewer bytes in all, and longer to load.
_GROUP_BYTES = 3 * 2**20
_NO_LINES = "TRITON_DISABLE_LINE_INFO"
_PRINTS = ("flashtile.mods.printed", "flashtile.mods.graph", "flashtile.mods.places")


class Failed(str):
    """Why a kernel did not compile."""

    __slots__ = ()


class Recorder:
    """Collects builds for an archive; several threads may add to it.

    Attributes:
        builds: By key.
        asked: The keys of all that was asked for, here or not.
        launches: With ``lists``, those that are to be compiled, by key.
        left_out: What cannot be in an archive, and why.
    """

    def __init__(self, *, lists: bool = False) -> None:
        """Empty; with ``lists`` what is asked for is not compiled yet."""
        self.builds: dict[bytes, Found] = {}
        self.asked: set[bytes] = set()
        self.launches: dict[bytes, Launch] = {}
        self.left_out: list[str] = []
        self._lists, self._lock = lists, threading.Lock()
        for file in archive.PACKAGE.rglob("*.py"):
            archive.digest_of(file.relative_to(archive.PACKAGE).as_posix())  # as the sources are now, see ``_digest``

    def take(self, other: Archive) -> int:
        """Adds an archive's builds that were made of the installed sources; returns how many."""
        fresh = {key: found for key in other if (found := other.find(key)) is not None and not other.changed(found)}
        self.builds |= fresh
        return len(fresh)

    def build(self, launch: Launch, target: Any) -> None:
        """Compiles a launch for a ``GPUTarget``, unless it is here already."""
        text = text_of(lower(launch)[0]) if target.backend == "cuda" else None
        if text is None:
            self.left_out.append(f"{launch.kernel.__name__}: only code for NVIDIA GPUs is kept")
            return
        key = archive.key_of(f"sm_{target.arch}", text)
        self.asked.add(key)
        if key in self.builds:
            return
        if self._lists:
            self.launches[key] = launch
        else:
            self.add(key, compiled(key, launch, target))

    def add(self, key: bytes, found: Found | str) -> None:
        """A build, or why there is none."""
        with self._lock:
            if isinstance(found, str):
                self.left_out.append(found)
            else:
                self.builds[key] = found

    def write(self, place: str | os.PathLike[str]) -> int:
        """Replaces the file at once; returns its bytes.

        Raises:
            InvalidInputError: Naming the file, if it cannot be written.
        """
        files = sorted({file for found in self.builds.values() for file in found.about["files"]})
        numbers, blobs, at = {file: n for n, file in enumerate(files)}, list[bytes](), 0
        index: list[tuple[Any, ...]] = []
        for group in _groups(self.builds):
            raw, places = b"", []
            for key in group:
                about, code, _ = self.builds[key]
                text = _json({**about, "files": [numbers[file] for file in about["files"]]})
                places.append((key, len(raw), 4 + len(text) + len(code)))
                raw += struct.pack("<I", len(text)) + text + code
            blobs.append(archive.lzma.compress(raw))
            of_all = hashlib.sha256(blobs[-1]).digest(), at, len(blobs[-1]), len(raw)
            index += [(key, *of_all, *place) for key, *place in places]
            at += len(blobs[-1])
        index.sort()
        archs = sorted({found.about["arch"] for found in self.builds.values()})
        table = zlib.compress(_json({"archs": archs, "sources": {file: _digest(file) for file in files}}), 9)
        start = archive.HEAD.size + len(index) * archive.ENTRY.size + len(table)
        front = b"".join(archive.ENTRY.pack(k, d, start + at, *sizes) for k, d, at, *sizes in index) + table
        head = archive.HEAD.pack(archive.MAGIC, hashlib.sha256(front).digest(), len(index), len(table))
        try:
            trusted.replace(place, (head, front, *blobs), 0o644)
        except OSError as error:
            raise InvalidInputError("into", f"{str(place)!r} cannot be written: {error.strerror}") from None
        return start + at


def _digest(file: str) -> str:
    """The digest of a source; empty, which no source has, if it has changed since the recorder was made."""
    now = archive.digest_of.__wrapped__(file)
    return now if now == archive.digest_of(file) else ""


def _groups(builds: Mapping[bytes, Found]) -> list[list[bytes]]:
    """Keys of builds that are alike, in groups; see ``_GROUP_BYTES``."""
    found: list[list[bytes]] = []
    kernel, size = None, 0
    for key in sorted(builds, key=lambda key: (*_likeness(builds[key]), key)):
        about, code, _ = builds[key]
        if about["kernel"] != kernel or size + len(code) > _GROUP_BYTES:
            found.append([])
            kernel, size = about["kernel"], 0
        found[-1].append(key)
        size += len(code)
    return found


def _likeness(found: Found) -> tuple[Any, ...]:
    """What builds with much code in common share: kernel, warps, the first tensor's dtype, shared memory, length."""
    about, code, _ = found
    dtype = next((kind for _, kind in about.get("leaves", ())), "")
    return about["kernel"], about.get("num_warps"), dtype, about.get("shared"), len(code)


def compiled(key: bytes, launch: Launch, target: Any) -> Found | str:
    """A build, or why an archive cannot have it."""
    what = specialise(launch)
    made = compile_kernel(launch.kernel, what, launch.options, target)
    if (why := build.why_unknown(what, made)) is not None:
        return f"{launch.kernel.__name__}: {why}"
    files = sorted({*_ALWAYS, *(file for module in _modules(lower(launch)[0]) for file in files_of(module))})
    names = {"key": key.hex(), "arch": f"sm_{target.arch}", "kernel": repr(launch.kernel)}
    about = {**names, **build.about_of(what, made), "files": files}
    return Found(about, made.asm["cubin"])


def compiled_line(line: str, arch: int) -> tuple[bytes, Found | str]:
    """``compiled`` from ``as_json``, for a process of its own; with the key."""
    from triton.backends.compiler import GPUTarget

    os.environ[_NO_LINES] = "1"
    launch = from_json(line)
    key = archive.key_of(f"sm_{arch}", str(text_of(lower(launch)[0])))
    try:
        return key, compiled(key, launch, GPUTarget("cuda", arch, 32))
    except Exception as error:  # Triton raises many kinds; the other kernels of a build are not lost for one
        return key, Failed(f"{launch.kernel.__name__} did not compile: {type(error).__name__}: {error}")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


RECORDER: ContextVar[Recorder | None] = ContextVar("RECORDER", default=None)


@contextmanager
def into(place: str | os.PathLike[str], *, lists: bool = False) -> Iterator[Recorder]:
    """Within, what ``build.builds`` makes is added to an archive, which is written at the end.

    With ``lists`` the kernels are listed alone, and the caller adds them.

    Raises:
        InvalidInputError: The file is no archive, or cannot be written.
        UnsupportedError: This Python cannot compress what is written.
    """
    if archive.lzma is None:
        raise UnsupportedError("archives of kernels need Python's module lzma, without which this Python was built")
    recorder = Recorder(lists=lists)
    if os.path.exists(place):
        try:
            recorder.take(Archive(place))
        except archive.DAMAGE as error:
            raise InvalidInputError("into", f"{str(place)!r} is there already, and {error}") from None
    token, before = RECORDER.set(recorder), os.environ.get(_NO_LINES)
    # Which lines of a source instructions come from takes a third of the code's bytes.
    os.environ[_NO_LINES] = "1"
    try:
        yield recorder
    finally:
        RECORDER.reset(token)
        os.environ.pop(_NO_LINES) if before is None else os.environ.__setitem__(_NO_LINES, before)
        recorder.write(place)  # also what was done before an error or an interruption


def _modules(key: Any) -> set[Any]:
    """The modules of the functions and records in what ``lower`` says a build depends on."""
    if isinstance(key, DeviceFunction):
        return {key.module if isinstance(key.module, PrintedModule) else key.module.name}
    if isinstance(key, type):
        return {key.__module__} - {"builtins"}
    return {name for each in key for name in _modules(each)} if isinstance(key, tuple) else set()


@functools.cache
def files_of(module: str | PrintedModule) -> frozenset[str]:
    """The source files of a module and of all that it imports from this package, by their paths in it."""
    seen: set[str] = set()
    todo = [module] if isinstance(module, str) else [*_PRINTS, *_imports(module.source)]
    while todo:
        name = todo.pop()
        if name not in seen and name.startswith("flashtile."):
            seen.add(name)
            todo += _imported_by(name)
    return frozenset(_path(name).relative_to(archive.PACKAGE).as_posix() for name in seen)


def _path(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


@functools.cache
def _imported_by(name: str) -> tuple[str, ...]:
    place = _path(name)
    package = name if place.name == "__init__.py" else name.rpartition(".")[0]
    return tuple(_imports(place.read_text(encoding="utf-8"), package))


def _imports(text: str, package: str = "") -> Iterator[str]:
    """The modules that a text imports; relative ones, as ``tools/hub.py`` writes them, from a package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield module
            names = (f"{module}.{each.name}" for each in node.names)
            yield from (name for name in names if name.startswith("flashtile.") and _is_module(name))


def _is_module(name: str) -> bool:
    place = archive.PACKAGE.joinpath(*name.split(".")[1:])
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


# -- launches as text ------------------------------------------------------------------------------------------------

_LEAVES: dict[str, Any] = {each.__name__: each for each in (Pointer, TensorMap, Const, Captured)}


def as_json(launch: Launch) -> str:
    """A launch in one line, from which ``from_json`` makes the same: what a run missed, for the next archive."""
    return _json([_encoded(launch.kernel), launch.programs, _pairs(launch.arguments), _pairs(launch.options)]).decode()


def from_json(line: str) -> Launch:
    """The inverse of ``as_json``.

    Raises:
        ValueError: It is no such line, or of other records than those that are installed.
    """
    try:
        kernel, programs, arguments, options = json.loads(line)
        made = {name: _decoded(value) for name, value in arguments}
        return Launch(_decoded(kernel), programs, made, dict(options))
    except (KeyError, TypeError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(f"is no launch of this release: {error}") from error


def _pairs(given: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, _encoded(value)] for name, value in given.items()]


def _encoded(value: Any) -> Any:
    """Plain values as they are, all others as a list that begins with what they are."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is DeviceFunction:
        return ["function", *_place_of(value.module), value.__name__]
    if kind in (tuple, torch.Size):
        return ["tuple", *map(_encoded, value)]
    if kind.__name__ in _LEAVES and kind is _LEAVES[kind.__name__]:
        return ["leaf", kind.__name__, *map(_encoded, value)]
    return ["record", kind.__module__, kind.__qualname__, *map(_encoded, value)]


def _place_of(module: DeviceModule) -> tuple[Any, ...]:
    return (module.text, module.has_table) if isinstance(module, PrintedModule) else (module.name, None)


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "dtype":
        return getattr(torch, rest[0])
    if kind == "function":
        return _function(*rest)
    if kind == "tuple":
        return tuple(map(_decoded, rest))
    if kind == "leaf":
        return _LEAVES[rest[0]](*map(_decoded, rest[1:]))
    if kind != "record":
        raise KeyError(kind)
    record = getattr(importlib.import_module(_ours(rest[0])), rest[1])
    if not (isinstance(record, type) and issubclass(record, tuple) and hasattr(record, "_fields")):
        raise TypeError(rest[1])  # no other function is called because of a line
    return record(*map(_decoded, rest[2:]))


def _function(place: str, has_table: bool | None, name: str) -> Any:
    if has_table is not None:
        return getattr(module_of(place, has_table), name)
    return getattr(device_code(_ours(place)), name)


def _ours(module: str) -> str:
    if not module.startswith("flashtile.backends."):
        raise KeyError(module)
    return module
