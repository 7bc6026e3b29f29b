"""What tensor operations cannot say, in PTX: a hint to the assembler, a vote, a skipped product, a wait for memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _rescale_ptx(pack):
    """Multiplies ``pack`` elements ($pack ...) by their factors ($2 * pack ...) unless the flag ($3 * pack) is 0."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * pack + i}; " for i in range(pack))
    return f"{{ .reg .pred p; setp.eq.s32 p, ${3 * pack}, 0; @p bra DONE; {products} DONE: }}"


@gluon.constexpr_function
def _rescale_constraints(pack):
    return ",".join(["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * pack + ["r"] * pack)


_VOTE = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; or.pred p, p, q; "
    "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }"
)
_HOLD = gl.constexpr("{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000; @p nanosleep.u32 0; mov.b32 $0, $1; }")


@gluon.jit
def hold(x):
    """X >= 0, computed before any wgmma wait that follows: a sleep that is never taken, which ptxas does not move.

    Otherwise ptxas hoists the wait for the product with the values above the exponentials that should run under it.
    """
    return gl.inline_asm_elementwise(_HOLD, "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def after_stores(x):
    """X, behind every TMA store of this thread: it is in memory, where others may overwrite it.

    Gluon's wait ends when the stores have read their source.
    """
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def rescale(acc, factor, WIDTH: gl.constexpr):
    """``acc * factor`` by rows, skipped by each warp in which every factor is 1.

    Args:
        acc: [64, WIDTH] float32 in the layout of a WGMMA accumulator of one warpgroup: WIDTH / 2 elements a thread.
        factor: [64] float32 in the same layout's rows: 2 elements a thread.
        WIDTH: Columns, a power of two from 32 on.

    Returns:
        The product. Each warp decides for itself, which tensor operations cannot express; a factor of 1 changes
        nothing, so what a row gets does not depend on its warp.
    """
    needed = gl.inline_asm_elementwise(_VOTE, "=r,=r,r,r", [factor], dtype=gl.int32, is_pure=True, pack=2)
    # Elements of one assembly; a thread of a wide tile runs it several times.
    PACK: gl.constexpr = min(WIDTH // 2, 64)
    return gl.inline_asm_elementwise(
        _rescale_ptx(PACK), _rescale_constraints(PACK), [acc, factor[:, None], needed[:, None]],
        dtype=gl.float32, is_pure=True, pack=PACK,
    )  # fmt: skip
