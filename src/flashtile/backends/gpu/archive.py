"""Archives of kernels that were built ahead: what a launch needs of each, found and loaded without Triton.

An archive is one file: a head, a sorted index of keys, a table of sources, then groups of builds, each compressed as a
whole: builds of one kernel differ so little that a group takes half of what they would take one by one.
A key is a hash of the architecture and of ``launch.text_of``: the kernel's name, the compiler's options, each type and
each constant. A build is used only where every source file that it was made of is, byte for byte, the one that is
installed here, so no version number is trusted; anything else is compiled.

What is in an archive will run: ``core.trusted`` says which files are opened, and each build's digest is checked.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import struct
import warnings
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashtile.backends.gpu import driver
from flashtile.core import settings, trusted

# The last byte but one is the form's number.
MAGIC = b"FTKERN1\n"
# The magic; the digest of index and table; how many entries there are; bytes of the table, compressed.
HEAD = struct.Struct("<8s32sII")
# Key; the compressed group: its digest, where it begins, its bytes, its bytes before compression; the build in the
# group: where it begins, its bytes.
ENTRY = struct.Struct("<32s32sQIIII")
# The package that is kernels alone, and what its files are called.
WHEEL, SUFFIX = "flashtile_kernels", ".ftk"
PACKAGE = Path(__file__).parents[2]
# None in a Python that was built without it.
lzma: Any = importlib.import_module("lzma") if importlib.util.find_spec("_lzma") is not None else None
# No build has more; a damaged number must not make a process take all memory.
_MOST_BYTES = 64 * 2**20
# What reading a file that anything may stand in raises.
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error,
)  # fmt: skip
# Variables that do not change what a build is. Any other of Triton's may, so archives are off beside it.
_HARMLESS = {
    "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_CACHE_MANAGER",
    "TRITON_REMOTE_CACHE_BACKEND", "TRITON_DISABLE_LINE_INFO", "TRITON_PRINT_AUTOTUNING", "TRITON_LIBCUDA_PATH",
    "TRITON_CUDACRT_PATH", "TRITON_CUDART_PATH", "TRITON_STORE_BINARY_ONLY", "TRITON_ALWAYS_COMPILE",
}  # fmt: skip
# A thread block has no more.
_MOST_WARPS = 32
_NO_CHANGE = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_INTERPRET": "0", "TRITON_DEBUG": "0"}


class Found(NamedTuple):
    """A build of an archive.

    Attributes:
        about: What a launch must know of it, see ``build.about_of``.
        code: The driver's.
        place: Path of the archive, empty for what is not in one yet.
    """

    about: dict[str, Any]
    code: bytes
    place: str = ""


def key_of(arch: str, text: str) -> bytes:
    """The key of a build for an architecture, like ``"sm_90"``, from the text of its launch."""
    return hashlib.sha256(f"{arch}\n{text}".encode()).digest()


@functools.cache
def digest_of(file: str) -> str:
    """The SHA-256 of a source file, by its path in the package; empty if it is not there."""
    try:
        return hashlib.sha256((PACKAGE / file).read_bytes()).hexdigest()
    except OSError:
        return ""


class Archive:
    """An archive that is open."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        """Opens a file.

        Raises:
            OSError: It cannot be read.
            ValueError: It may not be used, or it is damaged; the text says why.
        """
        self.place = Path(place)
        if lzma is None:
            raise ValueError("needs Python's module lzma, without which this Python was built")
        # Read, not mapped: a file that is cut while it is mapped ends the process.
        with trusted.opened(place, owners=(0,)) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        head = self._read(0, HEAD.size)
        if len(head) < HEAD.size:
            raise ValueError("is no archive of kernels: it is too short")
        magic, digest, self.count, table_size = HEAD.unpack(head)
        if magic != MAGIC:
            same = magic[:6] == MAGIC[:6]
            raise ValueError("is an archive of another form" if same else "is no archive of kernels")
        at = self.count * ENTRY.size
        self._index = self._read(HEAD.size, at + table_size)
        if len(self._index) < at + table_size:
            raise ValueError("is cut off: its index ends past the file")
        if hashlib.sha256(self._index).digest() != digest:
            raise ValueError("is damaged: its index has another digest")
        self.about: dict[str, Any] = json.loads(_inflated(self._index[at:], _MOST_BYTES, zlib.decompressobj()))
        self.archs = tuple(map(str, self.about["archs"]))
        self._sources = list(self.about["sources"].items())
        self._last: tuple[object, bytes] = (None, b"")

    def _read(self, at: int, size: int) -> bytes:
        """As many bytes as are there."""
        if size > _MOST_BYTES:
            raise ValueError(f"is damaged: a part of it would have {size} bytes")
        return os.pread(self._file, size, at)

    def __iter__(self) -> Iterator[bytes]:
        """All keys, in the order of their builds."""
        entries = sorted(map(self._entry, range(self.count)), key=lambda entry: (entry[2], entry[5]))
        return (key for key, *_ in entries)

    def _entry(self, number: int) -> tuple[bytes, bytes, int, int, int, int, int]:
        found: tuple[bytes, bytes, int, int, int, int, int] = ENTRY.unpack_from(self._index, number * ENTRY.size)
        return found

    def _group(self, digest: bytes, at: int, size: int, raw: int) -> bytes:
        """The builds of a group; the last one is kept, as a call's kernels are often among each other."""
        key = digest, at, size, raw
        if self._last[0] != key:
            packed = self._read(at, size)
            if hashlib.sha256(packed).digest() != digest:
                raise ValueError("is damaged: a build has another digest")
            self._last = key, _inflated(packed, raw, lzma.LZMADecompressor(memlimit=2 * _MOST_BYTES))
        return self._last[1]

    def find(self, key: bytes) -> Found | None:
        """A build, whatever its sources; None if it is not here.

        Raises:
            ValueError: It is damaged.
        """
        number = bisect.bisect_left(range(self.count), key, key=lambda n: self._entry(n)[0])
        if number == self.count or (found := self._entry(number))[0] != key:
            return None
        _, digest, at, size, raw, start, own = found
        text = self._group(digest, at, size, raw)[start : start + own]
        if len(text) < own:
            raise ValueError("is damaged: a build ends past its group")
        (length,) = struct.unpack_from("<I", text)
        about = json.loads(text[4 : 4 + length])
        about["files"] = [self._sources[n][0] for n in about["files"]]
        if about["key"] != key.hex():
            raise ValueError("is damaged: a build lies under another's key")
        _check(about)
        return Found(about, text[4 + length :], str(self.place))

    def changed(self, found: Found) -> str:
        """A source file that is not the one that a build was made of; empty if there is none."""
        made_of = self.about["sources"]
        return next((file for file in found.about["files"] if digest_of(file) != (made_of[file] or "gone")), "")


def _check(about: dict[str, Any]) -> None:
    """Raises what ``DAMAGE`` has, unless numbers and names are such that a launch may use them."""
    name, warps, shared = about["name"], about["num_warps"], about["shared"]
    if type(name) is not str or type(warps) is not int or type(shared) is not int or not about["files"]:
        raise TypeError
    if not (0 < warps <= _MOST_WARPS and 0 <= shared < 2**20):
        raise ValueError(f"is damaged: {name} would have {warps} warps and {shared} bytes of shared memory")
    driver.layout(dict(about["leaves"]))
    for box, swizzle, size in about["maps"]:
        if not all(type(each) is int and 0 <= each < 2**16 for each in (*box, swizzle, size)):
            raise TypeError


def _inflated(packed: bytes, most: int, inflate: Any) -> bytes:
    if most > _MOST_BYTES:
        raise ValueError(f"is damaged: a part of it would have {most} bytes")
    try:
        text: bytes = inflate.decompress(packed, most + 1)
    except (zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"is damaged: {error}") from error
    if len(text) > most or not inflate.eof:
        raise ValueError("is damaged: a part of it has another length")
    return text


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)


@functools.cache
def why_off() -> str:
    """Why this process uses no archive though some are named or installed; empty if it may."""
    for name, value in os.environ.items():
        changes = (
            name.startswith("TRITON_") and name not in _HARMLESS and value.strip() not in ("", _NO_CHANGE.get(name))
        )
        if changes or name in ("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT"):
            return f"{name} is set, which may change what kernels are"
    return ""


@functools.cache
def archives(arch: str = "") -> tuple[Archive, ...]:
    """The archives that this process looks into, opened once: those that a setting names, else the installed ones.

    One file is installed for each architecture. It opens the files for the GPUs that are here, or for ``arch``.
    """
    places = [*named()] or [
        file for file in installed() if (file.stem.rstrip("a") == arch if arch else _is_for_a_device(file.stem))
    ]
    if places and why_off():
        _warn_once(f"archives of kernels are not used: {why_off()}")
        return ()
    found = []
    for place in places:
        try:
            found.append(opened(place))
        except ValueError as error:
            warnings.warn(f"{place}, an archive of kernels, is not used: it {error}", stacklevel=2)
    return tuple(found)


def opened(place: Path) -> Archive:
    """An archive that calls may use.

    Raises:
        ValueError: It is none; the text says why.
    """
    try:
        if not place.is_absolute():
            raise ValueError("is not an absolute path")
        return Archive(place)
    except DAMAGE as error:
        raise ValueError(_reason(error)) from error


class Listed(NamedTuple):
    """What is said of an archive.

    Attributes:
        place: Its path.
        why_not: Why it is not used, empty if it is; if it cannot be read nothing else is known of it.
        archs: Architectures that it has kernels for.
        entries: Kernels.
        stale: Kernels that were made of other sources than those that are installed.
        damaged: Kernels that cannot be read.
        size: Bytes.
    """

    place: str
    why_not: str
    archs: tuple[str, ...] = ()
    entries: int = 0
    stale: int = 0
    damaged: int = 0
    size: int = 0


def listed() -> list[Listed]:
    """All archives that are named or installed."""
    return [_listed(place) for place in (*named(), *installed())]


def _listed(place: Path) -> Listed:
    try:
        archive = opened(place)
    except ValueError as error:
        return Listed(str(place), str(error))
    stale, damaged = 0, 0
    for key in archive:
        try:
            found = archive.find(key)
            stale += found is not None and archive.changed(found) != ""
        except DAMAGE:
            damaged += 1
    why_not = why_off() or ("" if any(map(_is_for_a_device, archive.archs)) else "no such GPU is here")
    return Listed(str(place), why_not, archive.archs, archive.count, stale, damaged, place.stat().st_size)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error) if type(error) in (ValueError, trusted.UntrustedError) else f"is damaged: {type(error).__name__}"


def named() -> list[Path]:
    """What ``FLASHTILE_KERNELS`` names."""
    text = settings.KERNELS.text()
    return [Path(each).expanduser() for each in text.split(os.pathsep) if each] if text.lower() != "off" else []


def installed() -> list[Path]:
    """The files of the package that is kernels alone, for whatever GPU; none if the setting is there."""
    if settings.KERNELS.text() or (spec := importlib.util.find_spec(WHEEL)) is None:
        return []
    # What lies in the folder that somebody happens to work in was not installed.
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    found = [folder for folder in folders if folder.is_absolute() and folder.parent != Path.cwd()]
    return sorted(file for folder in found for file in folder.glob(f"*{SUFFIX}"))


@functools.cache
def _is_for_a_device(stem: str) -> bool:
    """Whether a file of the installed package is for a GPU that is here; its stem is an architecture."""
    count = torch.cuda.device_count()
    return any(stem.rstrip("a") == _arch(device) for device in range(count))


@functools.cache
def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def look_up(text: str | None, device: int) -> Found | None:
    """The build of a launch with this text, None for a launch without one, on a device."""
    return None if text is None else look_up_in(archives(), _arch(device), text)


def look_up_in(among: tuple[Archive, ...], arch: str, text: str) -> Found | None:
    """The build of a launch with this text for an architecture; a damaged or a stale one is a warning and none."""
    key = key_of(arch, text)
    for each in among:
        try:
            found = each.find(key)
            changed = each.changed(found) if found is not None else ""
        except DAMAGE as error:
            _warn_once(f"{each.place}: a kernel is compiled instead: the archive {_reason(error)}")
            continue
        if found is None:
            continue
        if not changed:
            return found
        _warn_once(f"{each.place}: what is made of {changed} is compiled anew, since that file has changed")
    if among and not any(arch in each.archs for each in among):
        held = "; ".join(f"{each.place} is for {', '.join(each.archs) or 'none'}" for each in among)
        _warn_once(f"no archive of kernels is for this GPU, {arch}: {held}")
    return None


_MAX_THREADS, _STATIC_SHARED, _MOST_SHARED, _OPT_IN_SHARED = 0, 1, 8, 97
_PREFER_SHARED, _USUAL_SHARED = 1, 48 * 1024


def load(found: Found, device: int) -> Any:
    """Loads a build's code as Triton does; returns what ``build.LoadedKernel`` keeps of a compiled kernel.

    Raises:
        DriverError: The driver does not take it, or the device has too little for it.
    """
    about, cuda = found.about, driver.library()
    module, function, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()

    def attribute(number: int) -> int:
        driver.check(cuda.cuFuncGetAttribute(ctypes.byref(value), number, function), "cuFuncGetAttribute")
        return value.value

    with torch.cuda.device(device):
        driver.ensure_context(device)
        driver.check(cuda.cuModuleLoadData(ctypes.byref(module), found.code), "cuModuleLoadData")
        status = cuda.cuModuleGetFunction(ctypes.byref(function), module, about["name"].encode())
        driver.check(status, "cuModuleGetFunction")
        driver.check(cuda.cuDeviceGetAttribute(ctypes.byref(value), _OPT_IN_SHARED, device), "cuDeviceGetAttribute")
        most, shared = value.value, about["shared"]
        if shared > most:
            raise driver.DriverError(f"{about['name']} needs {shared} bytes of shared memory, there are {most}")
        if 32 * about["num_warps"] > attribute(_MAX_THREADS):
            raise driver.DriverError(f"{about['name']} has too many threads for its registers")
        if shared > _USUAL_SHARED and most > _USUAL_SHARED:
            driver.check(cuda.cuFuncSetCacheConfig(function, _PREFER_SHARED), "cuFuncSetCacheConfig")
            left = most - attribute(_STATIC_SHARED)
            driver.check(cuda.cuFuncSetAttribute(function, _MOST_SHARED, left), "cuFuncSetAttribute")
    return SimpleNamespace(function=function.value, module=module)
