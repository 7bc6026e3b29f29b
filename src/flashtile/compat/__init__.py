"""The interfaces of other packages, mapped onto flashtile's.

``flashtile.compat.flash_attn_2`` has flash-attn 2's functions, and ``flash_attn_3`` has FlashAttention-3's. ``install``
lets other code import them by those packages' own names.
"""

from flashtile.compat._install import install

__all__ = ["install"]
