"""Files that decide what runs here: opened only if nobody else can have written them, and replaced at once."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class UntrustedError(ValueError):
    """The file is not such as may be used; the text says why."""


def opened(place: str | os.PathLike[str], owners: tuple[int, ...] = ()) -> BinaryIO:
    """A regular file of this user's, or of further owners', that others may not write, open for reading.

    The open file is judged, since its name may come to stand for another. To open a pipe would wait.

    Raises:
        OSError: It cannot be opened.
        UntrustedError: It is not such a file.
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
    """Writes a file beside another and gives it that one's name, so that no reader sees a part of it.

    Raises:
        OSError: It cannot be written; the other is as it was.
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
