"""The interfaces of other packages, mapped onto flashtile's own.

``flashtile.compat.flash_attn_2`` carries the functions of flash-attn 2; ``install`` lets other code import them by
that package's own name.
"""

from flashtile.compat._install import install

__all__ = ["install"]
