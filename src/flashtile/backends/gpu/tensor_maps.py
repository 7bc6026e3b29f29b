"""How TMA sees a tensor of rows, packed or not."""

from __future__ import annotations

from flashtile.backends.gpu.device.sequence import PACKED_ROWS

# The two extra dimensions of a packed tensor's map, in elements: see PACKED_ROWS. The first stride times the
# coordinate PACKED_ROWS is 2**64 minus PACKED_ROWS rows, and addresses wrap.
_ANY = 0x7FFF0000
_WRAP = 2**34


def geometry(shape: tuple[int, ...], strides: tuple[int, ...], varlen: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor's map, in elements.

    A dimension of size 1 may come with any stride, and TMA takes multiples of 16 bytes only: head_dim is one.
    """
    if 1 in shape or strides[-1] != 1:
        head_dim = shape[-1]
        own = [head_dim if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        strides = (*own[:-1], 1)
    if not varlen:
        return shape, strides
    row = strides[0]
    return (_ANY, _ANY, PACKED_ROWS.value, *shape[1:]), (_WRAP - row, row, row, strides[1], 1)
