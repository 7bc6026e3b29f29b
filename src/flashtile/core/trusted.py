"""Files that decide what runs here: opened only if nobody else can have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def opened(place: str | os.PathLike[str], owners: tuple[int, ...] = ()) -> BinaryIO:
    """A regular file of this user's, or of further owners', that others may not write, open for reading.

    The open file is judged, since its name may come to stand for another. To open a pipe would wait.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is not such a file; the text says why.
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
        raise ValueError(why)
    return file
