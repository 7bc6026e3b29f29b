"""What tensor operations cannot say, in PTX: a hint to ptxas, warp votes, conditional rescale, named barriers."""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _rescale_ptx(pack):
    """Multiplies ``pack`` elements ($pack ...) by their factors ($2 * pack ...) where flags ($3 * pack ...) are not 0.

    Elements come in pairs of neighbours, of a thread's one row and its other one in turn.
    """
    products = ["", ""]
    for i in range(pack):
        products[i // 2 % 2] += f"mul.f32 ${i}, ${i}, ${2 * pack + i}; "
    return (
        f"{{ .reg .pred p, q; setp.eq.s32 p, ${3 * pack}, 0; setp.eq.s32 q, ${3 * pack + 2}, 0; "
        f"@p bra OTHER; {products[0]} OTHER: @q bra DONE; {products[1]} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(pack):
    return ",".join(["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * pack + ["r"] * pack)


_VOTE = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; "
    "vote.sync.any.pred p, p, 0xffffffff; vote.sync.any.pred q, q, 0xffffffff; "
    "selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, q; }"
)
_NOT_BELOW_MINUS_1 = gl.constexpr(
    "{ .reg .pred p, q; setp.lt.f32 p, $2, 0fBF800000; setp.lt.f32 q, $3, 0fBF800000; or.pred p, p, q; "
    "@p nanosleep.u32 0; mov.b32 $0, $2; mov.b32 $1, $3; }"
)


@gluon.jit
def compute_before_wait(x):
    """X >= 0, two elements a thread, unchanged: a branch never taken stops ptxas from hoisting wgmma.wait above it.

    Else the wait for the product with the values would come before the exponentials that should run under it.
    """
    return gl.inline_asm_elementwise(_NOT_BELOW_MINUS_1, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


_NO_SUCH_NAN = gl.constexpr(
    "{ .reg .pred p, q; setp.eq.s32 p, $2, 0x7FABCDEF; setp.eq.s32 q, $3, 0x7FABCDEF; or.pred p, p, q; "
    "@p nanosleep.u32 0; mov.b32 $0, $2; mov.b32 $1, $3; }"
)


@gluon.jit
def compute_before_barrier(x):
    """``compute_before_wait`` for float32 x of either sign and a barrier: it tests for a NaN that never occurs."""
    return gl.inline_asm_elementwise(_NO_SUCH_NAN, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def compute_before_fence(x):
    """Any bfloat16 x: keeps its conversion ahead of the next wgmma fence, behind which LLVM would move it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


_WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@gluon.jit
def widen(x):
    """Numbers as float32: of bfloat16, where the compiler takes three operations for two numbers, in one each."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.constexpr_function
def _least_ptx(count):
    """$0 = min($4, $6, ...), $1 = min($5, $7, ...), ``count`` integers each, if the warp has a negative $2 or $3."""

    def chain(result, first):
        others = (f"min.s32 {result}, {result}, ${first + 2 * i}; " for i in range(1, count))
        return f"mov.b32 {result}, ${first}; " + "".join(others)

    return (
        "{ .reg .pred p, q; mov.b32 $0, 0; mov.b32 $1, 0; "
        "setp.lt.f32 p, $2, 0f00000000; setp.lt.f32 q, $3, 0f00000000; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {chain('$0', 4)} {chain('$1', 5)} DONE: }}"
    )


@gluon.jit
def least_integers(numbers, signs):
    """The least of several int32 tensors, element by element, computed only by a warp with a negative one of ``signs``.

    All of one shape, with two elements a thread.
    """
    return gl.inline_asm_elementwise(
        _least_ptx(len(numbers)), "=&r,=&r" + ",r" * (2 * len(numbers) + 2), (signs,) + numbers,  # noqa: RUF005
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _pingpong_ptx(operation, group):
    """A named barrier per warpgroup, from 15 down: Triton numbers its own from 0 up."""
    return f"bar.{operation} {15 - group}, 256; mov.b32 $0, $2; mov.b32 $1, $3;"


@gluon.jit
def pingpong_wait(x, GROUP: gl.constexpr):
    """[64] float32 x, unchanged, after warpgroup GROUP's ping-pong barrier: its predecessor has issued its products."""
    return gl.inline_asm_elementwise(
        _pingpong_ptx("sync", GROUP), "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def pingpong_arrive(x, GROUP: gl.constexpr):
    """[64] float32 x, unchanged: lets warpgroup GROUP past its ping-pong barrier, after everything issued so far."""
    return gl.inline_asm_elementwise(
        _pingpong_ptx("arrive", GROUP), "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.constexpr_function
def _keep_ptx(bits):
    return f"{{ .reg .pred p; .reg .b32 a; and.b32 a, $2, {bits}; setp.ne.u32 p, a, 0; selp.f32 $0, $1, $3, p; }}"


@gluon.jit
def keep(x, words, fill, BITS: gl.constexpr):
    """Float32 x, ``fill`` where ``words & BITS`` is 0: here two instructions, from the compiler three."""
    return gl.inline_asm_elementwise(_keep_ptx(BITS), "=f,f,r,f", [x, words, fill], gl.float32, True, 1)


@gluon.jit
def rescale(acc, factor, WIDTH: gl.constexpr):
    """``acc * factor`` by rows; each warp skips those of its upper and of its lower 8 rows of which every factor is 1.

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
