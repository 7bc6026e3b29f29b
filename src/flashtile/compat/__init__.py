"""The interfaces of other packages, mapped onto flashtile's own.

``flashtile.compat.flash_attn_2`` carries the functions of flash-attn 2, ``flash_attn_3`` those of FlashAttention-3;
``install`` lets other code import them by those packages' own names.
"""

from flashtile.compat._install import install

__all__ = ["install"]
