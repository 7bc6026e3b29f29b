"""What tensor operations cannot say in the Hopper forward of 8-bit tensors, in PTX."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TO_E4M3 = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
_AS_BYTES = gl.constexpr("// four registers are 16 bytes")


@gluon.constexpr_function
def _wait_ptx(group):
    """bar.sync, then adds an opaque zero to $2 and $3, so that ptxas cannot move their users above the barrier.

    The zero is the upper two bits of the 64-bit clock.
    """
    return (
        f"{{ .reg .b32 high; bar.sync {15 - group}, 256; mov.u32 high, %clock_hi; shr.u32 high, high, 30; "
        "add.s32 $0, $2, high; add.s32 $1, $3, high; }"
    )


@gluon.constexpr_function
def _arrive_ptx(group):
    """bar.arrive under a predicate that $2 and $3 always satisfy, so that it follows their computation."""
    return (
        "{ .reg .pred p, q; setp.lt.f32 p, $2, 0fBF800000; setp.lt.f32 q, $3, 0fBF800000; or.pred p, p, q; "
        f"@!p bar.arrive {15 - group}, 256; mov.b32 $0, $2; mov.b32 $1, $3; }}"
    )


@gluon.jit
def pingpong_wait(x, GROUP: gl.constexpr):
    """X, unchanged, two float32 a thread, after warpgroup GROUP's ping-pong barrier; also orders arithmetic on x.

    ``inline_ptx.pingpong_wait`` orders WGMMAs alone, which ptxas keeps in place.
    """
    return gl.inline_asm_elementwise(_wait_ptx(GROUP), "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def pingpong_arrive(x, GROUP: gl.constexpr):
    """X >= 0, unchanged, two elements a thread: lets warpgroup GROUP past its ping-pong barrier once x is computed."""
    return gl.inline_asm_elementwise(_arrive_ptx(GROUP), "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def packed(e):
    """[M, N] probabilities -> [M, N // 16, 4] int32: e4m3 numbers of a thread, in the order of ``blocks.ORDER``.

    Words, since LLVM unpacks and repacks bytes that a loop carries.
    """
    first, second = gl.split(e.reshape([e.shape[0], e.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand(words, WIDTH: gl.constexpr):
    """``packed`` words as WGMMA's left operand [M, N] of a product of WIDTH columns, with no data movement.

    The assembly takes four words of a thread, which differ in the half of 16 rows (b0) and in the lowest bit of the
    number of 16 keys (b1), for the 16 bytes of four tensors. So dimension 6 of ``z`` is b0, 7 is b1, and 4 and 1 tell
    the bytes of a word.
    """
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = 16 * words.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    y = gl.inline_asm_elementwise(
        _AS_BYTES, "=r,=r,=r,=r,0,1,2,3", [words], is_pure=True, pack=4,
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
    )  # fmt: skip
    z = gl.join(gl.join(y[0], y[1]), gl.join(y[2], y[3]))
    z = z.reshape([M // 16, 2, 8, N // 32, 2, 4, 2, 2]).permute((0, 6, 2, 3, 7, 5, 4, 1)).reshape([M, N])
    return gl.convert_layout(z, gl.DotOperandLayout(0, acc_layout, 4), assert_trivial=True)


@gluon.jit
def plus(acc, factor, t):
    """The accumulator, its rows times their factors, plus a product.

    Not pure: LLVM would sink it behind the next block's barriers, where all products are live at once.
    """
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, factor, t], dtype=gl.float32, is_pure=False, pack=1
    )


_IN_PLACE = gl.constexpr(
    "{ .reg .pred p; setp.eq.s32 p, $16, 0x7FABCDEF; @!p bra DONE; nanosleep.u32 0; bar.warp.sync -1; DONE: }"
)
_TIED = gl.constexpr(",".join(["=r"] * 16 + [str(i) for i in range(16)]))


@gluon.jit
def in_place(x):
    """``compute_before_wait`` for 16 elements a thread: the branch tests for a NaN that no operation makes.

    Else ptxas delays all sums until all products are complete, and live.
    """
    return gl.inline_asm_elementwise(_IN_PLACE, _TIED, [x], dtype=gl.float32, is_pure=False, pack=16)
