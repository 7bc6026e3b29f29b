"""A results folder that stays small: few files, none large, logs packed into one."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

MOST_BYTES = 16 * 2**20
LEFT_OUT = "left out of"
# A log in the archive keeps its head and its tail.
_LOG_BYTES = 2 * 2**20


def replace(path: Path, text: str) -> None:
    """Writes a file such that a reader, or the next run after a kill, finds the old or the new one, never a half."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", delete=False) as file:
        file.write(text)
    _put(Path(file.name), path)


def _put(made: Path, path: Path) -> None:
    """Moves a finished file to its place; across file systems by a name beside it."""
    partial = path.with_name(f".{path.name}")
    shutil.move(made, partial)
    partial.chmod(0o644)
    partial.replace(path)


def unpack(archive: Path, folder: Path) -> None:
    """The logs of earlier runs, so that packing again keeps them."""
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")


def pack(folder: Path, archive: Path) -> list[str]:
    """Packs a folder, long files cut in their middle, the largest left out if the archive is still too large.

    Files may grow or go while they are packed.

    Returns:
        A note for each file that was left out.
    """
    contents = {
        path.relative_to(folder).as_posix(): _read(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    notes: list[str] = []
    while True:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as packed:
                for name, data in contents.items():
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mtime = len(data), time.time()
                    packed.addfile(entry, io.BytesIO(data))
            size = file.tell()
        if size <= MOST_BYTES or not contents:
            _put(Path(file.name), archive)
            return notes
        os.unlink(file.name)
        largest = max(contents, key=lambda name: len(contents[name]))
        del contents[largest]
        notes.append(f"{LEFT_OUT} {archive.name}: {largest}")


def _read(path: Path) -> bytes:
    """A file, or its head and its tail; a sentence in place of one that is gone."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= 2 * _LOG_BYTES:
                return file.read(2 * _LOG_BYTES)
            head = file.read(_LOG_BYTES)
            file.seek(size - _LOG_BYTES)
            return head + f"\n... {size - 2 * _LOG_BYTES} bytes left out ...\n".encode() + file.read(_LOG_BYTES)
    except OSError as error:
        return f"could not be read: {error}\n".encode()


def tidy(folder: Path, known: Collection[str], work: Path) -> list[str]:
    """Moves whatever stages left in the results folder to where it will be packed.

    Args:
        folder: The results folder.
        known: Files that belong there, or that were there before.
        work: The folder that is packed.

    Returns:
        A note for each file that is too large.
    """
    for path in list(folder.iterdir()):
        if path.name not in known and not path.name.startswith("."):
            (work / "strays").mkdir(exist_ok=True)
            shutil.move(path, work / "strays" / path.name)
    return [f"over 16 MiB: {p.name}" for p in folder.iterdir() if p.is_file() and p.stat().st_size > MOST_BYTES]
