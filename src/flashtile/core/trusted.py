"""Files that decide which code runs: opened only if no other user can have written them, and replaced atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class UntrustedError(ValueError):
    """The file may not be used; the text says why."""


def opened(place: str | os.PathLike[str], owners: tuple[int, ...] = ()) -> BinaryIO:
    """Opens for reading a regular file that this user, or one of ``owners``, owns and that no other user may write.

    The open file is checked, because another file may take its name. Opening does not block, as a pipe would.

    Raises:
        OSError: The file cannot be opened.
        UntrustedError: The file is of another kind, owner or mode.
    """
    file = os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    about = os.fstat(file.fileno())
    why = ""
    if not stat.S_ISREG(about.st_mode):
        why = "is no regular file"
    elif about.st_uid not in (os.getuid(), *owners):
        why = f"belongs to user {about.st_uid}, you are {os.getuid()}"
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"may be written by others, its mode is {about.st_mode & 0o777:o}: chmod go-w {Path(place).name}"
    if why:
        file.close()
        raise UntrustedError(why)
    return file


def replace(place: str | os.PathLike[str], parts: Iterable[bytes], mode: int) -> None:
    """Writes a new file and renames it over the old one, so that no reader sees a part of it.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    with tempfile.NamedTemporaryFile("wb", dir=Path(place).parent, delete=False) as file:
        try:
            file.writelines(parts)
            file.close()
            os.chmod(file.name, mode)
            os.replace(file.name, place)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise
