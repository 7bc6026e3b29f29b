"""Mods: users' functions of one score or one pair, which are traced into graphs.

Ready-made functions for ``score_mod`` and ``mask_mod`` of ``flashtile.attention`` are here: ``mods.causal``,
``mods.t5`` and so on. ``and_masks`` and ``or_masks`` combine masks. ``source`` shows the kernel code of a function.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtile.mods.library import (
        alibi,
        and_masks,
        block_diffusion,
        causal,
        chunked,
        dilated,
        documents,
        graphormer,
        neighbourhood_2d,
        neighbourhood_3d,
        or_masks,
        prefix_lm,
        relative,
        shared_prefix,
        softcap,
        source,
        t5,
        temperature,
        tree,
        window,
    )

__all__ = [
    "alibi",
    "and_masks",
    "block_diffusion",
    "causal",
    "chunked",
    "dilated",
    "documents",
    "graphormer",
    "neighbourhood_2d",
    "neighbourhood_3d",
    "or_masks",
    "prefix_lm",
    "relative",
    "shared_prefix",
    "softcap",
    "source",
    "t5",
    "temperature",
    "tree",
    "window",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `import flashtile` stays fast.
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("flashtile.mods.library"), name)
    raise AttributeError(f"module 'flashtile.mods' has no attribute {name!r}")
