"""What is told of calls: lines in the log, and which kernels were compiled and for what."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from torch.utils.hooks import RemovableHandle

from flashtile.call.backend import ASKED
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, shown

_hooks: OrderedDict[int, Callable[[Compilation], object]] = OrderedDict()


class Compilation(NamedTuple):
    """A kernel that was compiled because a call needed it, or ``warm_up`` did.

    Attributes:
        kernel: The kernel's name.
        seconds: How long whoever asked had to wait for it.
        call: The kind of the call, as lines of ``flashtile.log`` have it. For a kernel beside attention, such as
            ``merge_states``'s, the line of the program that needed it. Empty if neither is known.
    """

    kernel: str
    seconds: float
    call: str


def on_compile(f: Callable[[Compilation], object]) -> RemovableHandle:
    """Has a function called after each kernel that this process compiles for its GPU: a metric of a server.

    What an archive or Triton's cache on the disk has is not compiled. ``f`` runs in the thread that compiled, before
    that goes on; threads that wait for the same kernel call nothing. What it raises is logged and goes no further.

    Args:
        f: Called with a ``Compilation``.

    Returns:
        A handle with ``remove()``, which is also a context that removes it at its end.

    Raises:
        InvalidInputError: f is not callable.
    """
    if not callable(f):
        raise InvalidInputError("f", f"is {shown(f)}, must be a function of a Compilation")
    handle = RemovableHandle(_hooks)
    _hooks[handle.id] = f
    return handle


def wanted() -> set[str]:
    """Which of ``settings.LOGGED`` are wanted."""
    parts = {*settings.LOG.parts()}
    return parts & {*settings.LOGGED} | ({"calls"} if parts & {*settings.ON} else set())


def compiled(kernel: str, seconds: float) -> None:
    """Warns of a compile and calls the functions of ``on_compile``."""
    is_wanted = "compiles" in wanted()
    if not is_wanted and not _hooks:
        return
    asked = ASKED.get()
    made = Compilation(kernel, seconds, _caller() if asked is None else asked())
    if is_wanted:
        write(logging.WARNING, f"compiled {kernel} in {seconds:.1f} s" + (made.call and f" for {made.call}"))
    for hook in [*_hooks.values()]:
        try:
            hook(made)
        except Exception:  # a metric that fails must not fail the call
            logging.getLogger("flashtile").exception("a function given to on_compile raised")


def _caller() -> str:
    """The line of the program that is running; empty in a thread that has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("flashtile", "torch"):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") in ("threading", "concurrent.futures.thread"):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def write(level: int, line: str) -> None:
    """A line for Python's logger ``flashtile``; on stderr, unless the program has a handler for it or for all."""
    logger = logging.getLogger("flashtile")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s[%(process)d] %(levelname)s: %(message)s"))
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.log(level, line)
