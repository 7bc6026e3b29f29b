"""Every environment variable that flashtile reads, in one table.

A variable is read when it is asked for, so a test or a notebook may change it between two calls.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


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

    def enabled(self) -> bool:
        """Whether the value is one of 1, true, yes, on (in any case)."""
        return self.get().strip().lower() in {"1", "true", "yes", "on"}


CHECK = Setting("FLASHTILE_CHECK", "0", "1 also checks what costs a device synchronisation (cu_seqlens monotonic).")
BACKEND = Setting("FLASHTILE_BACKEND", "", "Forces a backend for calls that name none; it is refused, never replaced.")
TRITON_INTERPRET = Setting(
    "TRITON_INTERPRET", "0", "Triton's own: 1, before Triton is imported, runs portable kernels on CPU tensors, slowly."
)

SETTINGS: tuple[Setting, ...] = (CHECK, BACKEND, TRITON_INTERPRET)
