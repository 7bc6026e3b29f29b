"""Where TMA finds the rows of one head of one sequence, dense or packed."""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate

# TMA bounds every dimension of a tensor, but knows nothing of the sequences packed into one. A descriptor of a packed
# tensor has two dimensions more, whose strides cancel modulo 2**64, so that the row coordinate runs into its bound,
# PACKED_ROWS, exactly where the sequence ends: loads are filled with zeros there and stores are dropped.
PACKED_ROWS = gl.constexpr(2**30)


@aggregate
class HeadRows:
    """Rows of one head of one sequence; ``start`` and ``length`` are read only if sequences are packed (``varlen``)."""

    b: gl.tensor
    head: gl.tensor
    start: gl.tensor
    length: gl.tensor
    varlen: gl.constexpr

    @gluon.jit
    def at(self, row, col):
        """TMA coordinates of a row and column."""
        if self.varlen:
            return PACKED_ROWS, self.start + self.length, PACKED_ROWS - self.length + row, self.head, col
        else:
            return self.b, row, self.head, col
