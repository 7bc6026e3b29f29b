"""Every environment variable that flashtile reads, in one table.

A variable is read at each use, so a test or a notebook may change it between two calls.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from flashtile.core.errors import InvalidInputError

# Fastest first: a call that names no backend uses the first one that can run it.
BACKENDS: tuple[str, ...] = ("hopper", "portable", "cpu")
ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# What can be logged.
LOGGED = ("calls", "compiles", "ranges")


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        name: The variable.
        default: The value when the variable is unset.
        meaning: One sentence for the docs.
        values: The allowed values, in upper or lower case; empty for another program's variable. It may also be unset.
        several: Whether it may have several of them, with commas between.
    """

    name: str
    default: str
    meaning: str
    values: tuple[str, ...] = ()
    several: bool = False

    def text(self) -> str:
        """The variable's present value, as it was written, or its default."""
        return os.environ.get(self.name, "").strip() or self.default

    def get(self) -> str:
        """The variable's present value in lower case, or its default.

        Raises:
            InvalidInputError: The value is not one of the allowed values. Names the variable.
        """
        value = self.text().lower()
        if self.values and not {*self._parts(value)} <= {*self.values, self.default}:
            more = ", several with commas between" if self.several else ""
            raise InvalidInputError(self.name, f"is {value!r}, must be {' or '.join(self.values)}{more}, or unset")
        return value

    def parts(self) -> list[str]:
        """The present values of a variable that may have several; raises as ``get``."""
        return self._parts(self.get())

    def _parts(self, value: str) -> list[str]:
        return value.replace(" ", "").split(",") if self.several else [value]

    @cached_property
    def _key(self) -> object:
        return os.environ.encodekey(self.name)

    def raw(self) -> object:
        """A value that changes whenever the setting does, for use in cache keys.

        ``os.environ.get`` encodes and decodes, which takes 1.2 us; reading the underlying mapping takes 0.05 us.
        """
        data = getattr(os.environ, "_data", None)
        return self.get() if data is None else data.get(self._key)

    def enabled(self) -> bool:
        """Whether the value is one of 1, true, yes, on (in any case)."""
        return self.get() in ON


CHECK = Setting(
    "FLASHTILE_CHECK",
    "0",
    "1 also checks what costs a device synchronisation: the values of cu_seqlens, scales, cache lengths and pages.",
    (*ON, *_OFF),
)
BACKEND = Setting(
    "FLASHTILE_BACKEND", "", "Forces a backend for calls that name none; it is refused, never replaced.", BACKENDS
)
STRICT = Setting(
    "FLASHTILE_STRICT",
    "0",
    "1 refuses a call that names no backend and would go to a slower one, because its GPU's fastest lacks something;"
    " warn warns of it; read where a kind of call is new.",
    ("warn", *ON, *_OFF),
)
TRITON_INTERPRET = Setting(
    "TRITON_INTERPRET", "0", "Triton's own: 1, before Triton is imported, runs portable kernels on CPU tensors, slowly."
)

LAUNCHER = Setting(
    "FLASHTILE_LAUNCHER",
    "",
    "triton: NVIDIA kernels are launched by Triton itself, for comparison; read once.",
    ("triton",),
)

COPIES = Setting(
    "FLASHTILE_COPIES",
    "auto",
    "Copy engines carry distributed.attention's keys among a host's GPUs: 0 never, auto where they can, 1 always.",
    (*ON, *_OFF, "auto"),
)

TILES = Setting(
    "FLASHTILE_TILES",
    "",
    "The file in which flashtile tune saves tiles and calls find them, or off for none; read once.",
)
CONFIG_HOME = Setting(
    "XDG_CONFIG_HOME",
    "~/.config",
    "The system's own: unless FLASHTILE_TILES names another, the file is flashtile/tiles.json there.",
)

KERNELS = Setting(
    "FLASHTILE_KERNELS",
    "",
    "Archives of kernels that were built ahead, absolute paths with colons between them, instead of those that are"
    " installed; off for none; read once.",
)
RECORD = Setting(
    "FLASHTILE_RECORD",
    "",
    "A file to which each kernel that has to be compiled adds a line, which flashtile build takes.",
)

LOG = Setting(
    "FLASHTILE_LOG",
    "0",
    "What is said of calls while they run, as of flashtile.log; 1 is calls; read where a kind of call is new.",
    (*LOGGED, *ON, *_OFF),
    several=True,
)

SETTINGS: tuple[Setting, ...] = (
    CHECK, BACKEND, STRICT, TRITON_INTERPRET, LAUNCHER, COPIES, TILES, CONFIG_HOME, KERNELS, RECORD, LOG,
)  # fmt: skip


def validate() -> None:
    """Raises InvalidInputError if a variable has a value that is not allowed, even if this machine never reads it."""
    for setting in SETTINGS:
        setting.get()
