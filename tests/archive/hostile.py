"""Archives that are damaged or hostile: what makes each of a good one, and what the warning about it says."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashtile.backends.gpu import archive
from flashtile.backends.gpu.ahead import Recorder
from flashtile.backends.gpu.archive import ENTRY, HEAD, MAGIC, Archive

Spoil = Callable[[Path, bytes], object]


def forget() -> None:
    """What this process knows of archives."""
    for name in ("archives", "_warn_once", "why_off", "digest_of", "_arch", "_is_for_a_device"):
        if hasattr(cached := getattr(archive, name), "cache_clear"):
            cached.cache_clear()


def _bytes(change: Callable[[bytearray], object]) -> Spoil:
    def spoil(place: Path, given: bytes) -> None:
        data = bytearray(given)
        found = change(data)
        place.write_bytes(bytes(found) if isinstance(found, (bytes, bytearray)) else bytes(data))

    return spoil


def _sealed(count: int, index: bytes, table: bytes, rest: bytes) -> bytes:
    """An archive whose index has the right digest."""
    digest = hashlib.sha256(index + table).digest()
    return HEAD.pack(MAGIC, digest, count, len(table)) + index + table + rest


def _parts(data: bytes) -> tuple[int, bytes, bytes, bytes]:
    _, _, count, size = HEAD.unpack_from(data)
    end = HEAD.size + count * ENTRY.size
    return count, data[HEAD.size : end], data[end : end + size], data[end + size :]


def _index(change: Callable[[list[list[Any]]], object]) -> Spoil:
    """Changes entries: key; digest, place, bytes, bytes before compression of a group; place and bytes in it."""

    def spoil(data: bytearray) -> bytes:
        count, index, table, rest = _parts(data)
        entries = [list(each) for each in ENTRY.iter_unpack(index)]
        change(entries)
        return _sealed(count, b"".join(ENTRY.pack(*each) for each in entries), table, rest)

    return _bytes(spoil)


def _all(field: int, change: Callable[[int], int]) -> Spoil:
    return _index(lambda entries: [entry.__setitem__(field, change(entry[field])) for entry in entries])


def _table(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Changes the table, in which no build's place depends on its length."""

    def spoil(data: bytearray) -> bytes:
        count, index, table, rest = _parts(data)
        about = json.loads(zlib.decompress(table))
        given = change(about)
        new = given if isinstance(given, bytes) else zlib.compress(json.dumps(about).encode())
        return _sealed(count, index, new, rest)

    return _bytes(spoil)


def _about(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Changes what is said of each build, with digests that are right."""

    def spoil(place: Path, given: bytes) -> None:
        place.write_bytes(given)
        recorder = Recorder()
        recorder.take(Archive(place))
        for found in recorder.builds.values():
            change(found.about)
        recorder.write(place)

    return spoil


def _flip(at: int) -> Spoil:
    return _bytes(lambda data: data.__setitem__(at, data[at] ^ 16))


def _exchanged(entries: list[list[Any]]) -> None:
    """Each build under the key of another."""
    moved = [entry[1:] for entry in entries]
    for entry, other in zip(entries, [*moved[1:], moved[0]], strict=True):
        entry[1:] = other


def _written_by_others(place: Path, given: bytes) -> None:
    place.write_bytes(given)
    place.chmod(0o666)


def _linked(place: Path, given: bytes) -> None:
    place.symlink_to(place.parent / "elsewhere")
    _written_by_others(place.parent / "elsewhere", given)


_BOMB = zlib.compress(bytes(2**27))

WHOLE: dict[str, tuple[Spoil, str]] = {
    "cut in the index": (_bytes(lambda data: data[:200]), "is cut off"),
    "cut in the head": (_bytes(lambda data: data[:9]), "is too short"),
    "empty": (_bytes(lambda data: b""), "is too short"),
    "a bit of the head": (_flip(9), "its index has another digest"),
    "a bit of the count": (_flip(43), "a part of it would have 2"),
    "a bit of the index": (_flip(100), "its index has another digest"),
    "wrong magic": (_bytes(lambda data: b"PK" + data[2:]), "is no archive of kernels"),
    "another form": (_bytes(lambda data: data.replace(MAGIC, b"FTKERN9\n", 1)), "is an archive of another form"),
    "a table without sources": (_table(lambda about: about.pop("sources")), "is damaged: KeyError"),
    "a table with a list of sources": (_table(lambda about: about.update(sources=[])), "is damaged: AttributeError"),
    "a table that is no JSON": (_table(lambda about: zlib.compress(b"{")), "is damaged: JSONDecodeError"),
    "a table that inflates": (_table(lambda about: _BOMB), "is damaged: a part of it has another length"),
    "written by others": (_written_by_others, "written by others"),
    "a link to such a file": (_linked, "written by others"),
    "a folder": (lambda place, given: place.mkdir(), "cannot be read: Is a directory"),
    "a pipe": (lambda place, given: os.mkfifo(place), "no regular file"),
    "a device": (lambda place, given: place.symlink_to("/dev/zero"), "no regular file"),
    "nothing": (lambda place, given: None, "cannot be read: No such file"),
}
EACH: dict[str, tuple[Spoil, str]] = {
    "a place past the end": (_all(2, lambda at: 2**40), "is damaged: a build has another digest"),
    "a place past all ends": (_all(2, lambda at: 2**64 - 1), "is damaged: OverflowError"),
    "a build too long": (_all(4, lambda size: 2**31), "would have 2147483648 bytes"),
    "a compressed build too long": (_all(3, lambda size: 2**31), "would have 2147483648 bytes"),
    "a build that inflates": (_all(4, lambda size: size - 1), "a part of it has another length"),
    "a build past its group": (_all(6, lambda size: size + 2**20), "is damaged: a build ends past its group"),
    "a build amid another": (_all(5, lambda start: start + 4), "is damaged: "),
    "another kernel's place": (_index(_exchanged), "a build lies under another's key"),
    "no files": (_about(lambda about: about.update(files=[])), "is damaged: TypeError"),
    "no warps": (_about(lambda about: about.update(num_warps=0)), "would have 0 warps"),
    "999 warps": (_about(lambda about: about.update(num_warps=999)), "would have 999 warps"),
    "warps as text": (_about(lambda about: about.update(num_warps="4")), "is damaged: TypeError"),
    "less than no memory": (_about(lambda about: about.update(shared=-1)), "-1 bytes of shared memory"),
    "a number for a name": (_about(lambda about: about.update(name=7)), "is damaged: TypeError"),
    "a name from elsewhere": (_about(lambda about: about.update(name="other")), "cuModuleGetFunction"),
    "no shared": (_about(lambda about: about.pop("shared")), "is damaged: KeyError"),
    "no leaves": (_about(lambda about: about.pop("leaves")), "is damaged: KeyError"),
    "leaves of unknown types": (_about(lambda about: about["leaves"][0].__setitem__(1, "i3")), "is damaged: KeyError"),
    "a leaf less": (_about(lambda about: about["leaves"].pop()), "arguments"),
    "boxes of text": (_about(lambda about: about.update(maps=[[["x"], 3, 2]])), "is damaged: TypeError"),
}  # fmt: skip
# One build of four is damaged, the others are used.
IN_PART: dict[str, tuple[Spoil, str]] = {
    "cut in the builds": (_bytes(lambda data: data[:-100]), "is damaged: a build has another digest"),
    "a bit of a build": (_flip(-100), "is damaged: a build has another digest"),
}
HOSTILE = WHOLE | EACH | IN_PART
