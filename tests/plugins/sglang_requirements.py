"""Prints what SGLang requires, one a line, but for what is for GPUs alone: in an environment that has SGLang itself."""

from __future__ import annotations

import re
from importlib.metadata import requires

# By how names begin: libraries of kernels, packages that need them, and PyTorch's, which come as builds for CPUs.
FOR_GPUS = (
    "cuda", "deepseek", "flash", "humming", "nvidia", "nvshmem", "quack", "sgl", "smg", "tilelang", "timm", "tml",
    "torch",
)  # fmt: skip


def wanted() -> list[str]:
    """The requirements that are installed."""
    found = []
    for each in requires("sglang") or []:
        requirement, _, condition = each.partition(";")
        if "extra ==" not in condition and "arm64" not in condition and not each.startswith(FOR_GPUS):
            found.append(re.sub(r"\s", "", requirement))
    return found


if __name__ == "__main__":
    print("\n".join(wanted()))
