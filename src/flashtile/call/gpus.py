"""GPUs by name, for which kernels are built on a machine that need not have one: see ``warm_up``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashtile.core.errors import InvalidInputError, shown

# A100, A10, L40S, H100, B200, RTX PRO 6000, MI300X, MI355X.
_MULTIPROCESSORS: dict[int | str, int] = {
    80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 188, "gfx942": 304, "gfx950": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, in Triton's words.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``.
        arch: ``90`` or ``"gfx942"``.
        warp_size: Threads of a warp.
    """

    backend: str
    arch: int | str
    warp_size: int

    @property
    def multiprocessors(self) -> int:
        """Those of the usual device of the architecture; of one that is not known here as many as an H100 has."""
        return _MULTIPROCESSORS.get(self.arch, 132)

    @property
    def capability(self) -> tuple[int, int] | None:
        """``(major, minor)`` as problems have it, None for AMD."""
        return divmod(self.arch, 10) if isinstance(self.arch, int) else None


def gpu_of(name: object) -> Gpu:
    """The GPU of an architecture's name.

    Raises:
        InvalidInputError: It is not one.
    """
    text = name if isinstance(name, str) else ""
    if found := re.fullmatch(r"sm_?(\d{2,3})a?", text):
        return Gpu("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", text):
        return Gpu("hip", text, 64 if text.startswith("gfx9") else 32)
    raise InvalidInputError("gpu", f"is {shown(name)}, must be an architecture, like 'sm_90' or 'gfx942'")
