"""Every environment variable that flashtile reads, in one table.

A variable is read at each use, so a test or a notebook may change it between two calls.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        name: The variable.
        default: Its value when unset.
        meaning: One sentence for the docs.
    """

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        """The variable's value now, or its default."""
        return os.environ.get(self.name, self.default)

    @cached_property
    def _key(self) -> object:
        return os.environ.encodekey(self.name)

    def raw(self) -> object:
        """A value that changes whenever the setting does, for use in cache keys.

        ``os.environ.get`` encodes and decodes, which takes 1.2 us; reading the mapping beneath takes 0.05 us.
        """
        data = getattr(os.environ, "_data", None)
        return self.get() if data is None else data.get(self._key)

    def enabled(self) -> bool:
        """Whether the value is one of 1, true, yes, on (in any case)."""
        return self.get().strip().lower() in {"1", "true", "yes", "on"}


CHECK = Setting("FLASHTILE_CHECK", "0", "1 also checks what costs a device synchronisation (cu_seqlens monotonic).")
BACKEND = Setting("FLASHTILE_BACKEND", "", "Forces a backend for calls that name none; it is refused, never replaced.")
TRITON_INTERPRET = Setting(
    "TRITON_INTERPRET", "0", "Triton's own: 1, before Triton is imported, runs portable kernels on CPU tensors, slowly."
)

LAUNCHER = Setting(
    "FLASHTILE_LAUNCHER", "", "triton: NVIDIA kernels are launched by Triton itself, for comparison; read once."
)

SETTINGS: tuple[Setting, ...] = (CHECK, BACKEND, TRITON_INTERPRET, LAUNCHER)
