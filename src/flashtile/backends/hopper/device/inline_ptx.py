"""PTX for what tensor operations cannot express: ptxas hints, votes, conditional rescale, named barriers, 8 bits."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _rescale_ptx(pack):
    """Multiplies ``pack`` elements ($pack ...) by their factors ($2 * pack ...) where flags ($3 * pack ...) are not 0.

    Elements come in pairs of neighbours, in turn from a thread's first row and from its other row.
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

    Otherwise the wait for the product with values would come before the exponentials that should run during it.
    """
    return gl.inline_asm_elementwise(_NOT_BELOW_MINUS_1, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


_NO_SUCH_NAN = gl.constexpr(
    "{ .reg .pred p, q; setp.eq.s32 p, $2, 0x7FABCDEF; setp.eq.s32 q, $3, 0x7FABCDEF; or.pred p, p, q; "
    "@p nanosleep.u32 0; mov.b32 $0, $2; mov.b32 $1, $3; }"
)


@gluon.jit
def compute_before_barrier(x):
    """``compute_before_wait`` for float32 x of either sign and a barrier; it tests for a NaN that never occurs."""
    return gl.inline_asm_elementwise(_NO_SUCH_NAN, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def compute_before_fence(x):
    """Any x of 16 bits, unchanged: keeps its conversion before the next wgmma fence; LLVM would move it behind."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


_SELECT_AT_LEAST = gl.constexpr("{ .reg .pred p; setp.ge.u32 p, $2, $3; selp.f32 $0, $1, $4, p; }")


@gluon.jit
def select_at_least(x, words, limit, fill):
    """X where words >= limit as unsigned, else fill; x float32.

    If results are packed into 16 bits each, LLVM would turn a plain select into one of the packed halves.
    """
    return gl.inline_asm_elementwise(
        _SELECT_AT_LEAST, "=f,f,r,r,f", [x, words, limit, fill], dtype=gl.float32, is_pure=True, pack=1
    )


_WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@gluon.jit
def widen(x):
    """Numbers as float32. For bfloat16 it takes one operation a number; the compiler takes three for two numbers."""
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

    All tensors have one shape, with two elements a thread.
    """
    return gl.inline_asm_elementwise(
        _least_ptx(len(numbers)), "=&r,=&r" + ",r" * (2 * len(numbers) + 2), (signs,) + numbers,  # noqa: RUF005
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _wait_ptx(group, strict):
    """bar.sync on a named barrier for each warpgroup, from 15 down, because Triton numbers its own from 0 up.

    If strict, it adds an opaque zero, the upper two bits of the 64-bit clock, so that ptxas cannot move uses of the
    results above the barrier.
    """
    if not strict:
        return f"bar.sync {15 - group}, 256; mov.b32 $0, $2; mov.b32 $1, $3;"
    return (
        f"{{ .reg .b32 high; bar.sync {15 - group}, 256; mov.u32 high, %clock_hi; shr.u32 high, high, 30; "
        "add.s32 $0, $2, high; add.s32 $1, $3, high; }"
    )


@gluon.constexpr_function
def _arrive_ptx(group, strict):
    """bar.arrive; if strict, under a predicate that $2 and $3 always satisfy, so that it follows their computation."""
    if not strict:
        return f"bar.arrive {15 - group}, 256; mov.b32 $0, $2; mov.b32 $1, $3;"
    return (
        "{ .reg .pred p, q; setp.lt.f32 p, $2, 0fBF800000; setp.lt.f32 q, $3, 0fBF800000; or.pred p, p, q; "
        f"@!p bar.arrive {15 - group}, 256; mov.b32 $0, $2; mov.b32 $1, $3; }}"
    )


@gluon.jit
def pingpong_wait(x, GROUP: gl.constexpr, STRICT: gl.constexpr = False):
    """Float32 x, two a thread, unchanged, after the ping-pong barrier of warpgroup GROUP: the one before has arrived.

    This orders WGMMAs, which ptxas does not move; with STRICT it also orders arithmetic on x.
    """
    ptx: gl.constexpr = _wait_ptx(GROUP, STRICT)
    return gl.inline_asm_elementwise(ptx, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def pingpong_arrive(x, GROUP: gl.constexpr, STRICT: gl.constexpr = False):
    """Float32 x, two a thread, unchanged: lets warpgroup GROUP past its ping-pong barrier, after all that was issued.

    STRICT: also after x is computed; x must then be >= 0.
    """
    ptx: gl.constexpr = _arrive_ptx(GROUP, STRICT)
    return gl.inline_asm_elementwise(ptx, "=r,=r,r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.constexpr_function
def _keep_ptx(bits):
    return f"{{ .reg .pred p; .reg .b32 a; and.b32 a, $2, {bits}; setp.ne.u32 p, a, 0; selp.f32 $0, $1, $3, p; }}"


@gluon.jit
def keep(x, words, fill, BITS: gl.constexpr):
    """Float32 x, ``fill`` where ``words & BITS`` is 0, in two instructions; the compiler would take three."""
    return gl.inline_asm_elementwise(_keep_ptx(BITS), "=f,f,r,f", [x, words, fill], gl.float32, True, 1)


@gluon.constexpr_function
def _bits_ptx(count, fill):
    """Selections by bit, row after row, from the lowest bit: ptxas then moves seven bits to predicates at once."""
    lines = ["{ .reg .pred p; .reg .b32 a;"]
    for row in range(2):
        for n in range(count // 2):
            e, word = 2 * row + n // 2 * 4 + n % 2, 2 * count + 2 * row
            lines.append(f"and.b32 a, ${word}, {1 << n}; setp.ne.s32 p, a, 0; selp.f32 ${e}, ${count + e}, {fill}, p;")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _bits_constraints(count):
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * count)


@gluon.jit
def keep_by_bits(t, words, COUNT: gl.constexpr, FILL: gl.constexpr):
    """[M, COUNT // 4, 4, 2], an accumulator ``by_thread``, with FILL (given as bits) where a bit is 0.

    ``words`` [M, 4] have a bit for each element in a thread's row.
    """
    return gl.inline_asm_elementwise(
        _bits_ptx(COUNT, FILL), _bits_constraints(COUNT), [t, words[:, None, :, None]], gl.float32, True, COUNT
    )


@gluon.jit
def rescale(acc, factor, WIDTH: gl.constexpr):
    """``acc * factor`` by rows. Each warp skips its upper or lower 8 rows if all their factors are 1.

    Args:
        acc: [64, WIDTH] float32 in the layout of one warpgroup's WGMMA accumulator: WIDTH / 2 elements a thread.
        factor: [64] float32 in the same layout's rows: 2 elements a thread.
        WIDTH: Columns, a power of two from 32 on.

    Returns:
        The product. Each warp decides separately, which tensor operations cannot express. A factor of 1 changes
        nothing, so a row's result does not depend on its warp.
    """
    needed = gl.inline_asm_elementwise(_VOTE, "=r,=r,r,r", [factor], dtype=gl.int32, is_pure=True, pack=2)
    # Elements of one assembly block; for a wide tile a thread runs the block several times.
    PACK: gl.constexpr = min(WIDTH // 2, 64)
    return gl.inline_asm_elementwise(
        _rescale_ptx(PACK), _rescale_constraints(PACK), [acc, factor[:, None], needed[:, None]],
        dtype=gl.float32, is_pure=True, pack=PACK,
    )  # fmt: skip


_FROM_E4M3 = gl.constexpr(
    "{ .reg .b16 low, high, x0, x1, x2, x3; .reg .b32 first, second; mov.b32 {low, high}, $4; "
    "cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high; "
    "mov.b32 {x0, x1}, first; mov.b32 {x2, x3}, second; "
    "cvt.f32.f16 $0, x0; cvt.f32.f16 $1, x1; cvt.f32.f16 $2, x2; cvt.f32.f16 $3, x3; }"
)


@gluon.jit
def from_e4m3(x):
    """8-bit numbers as float32; a thread holds four neighbours."""
    return gl.inline_asm_elementwise(_FROM_E4M3, "=f,=f,=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=4)


_TO_E4M3 = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
_AS_BYTES = gl.constexpr("// four registers are 16 bytes")


@gluon.jit
def packed(e):
    """[M, N] probabilities -> [M, N // 16, 4] int32: e4m3 numbers of a thread, in the order of ``blocks.ORDER``.

    The results are words, since LLVM unpacks and repacks bytes that a loop carries.
    """
    first, second = gl.split(e.reshape([e.shape[0], e.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def packed_operand(words, WIDTH: gl.constexpr):
    """``packed`` words as WGMMA's left operand [M, N] for a product of WIDTH columns, without data movement.

    The assembly takes four words of a thread, for the 16 bytes of four tensors. The words differ in the half of 16 rows
    (b0), and in the lowest bit of the number of 16 keys (b1). So dimension 6 of ``z`` is b0 and 7 is b1; dimensions 4
    and 1 distinguish the bytes of a word.
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
    """The accumulator, with rows multiplied by their factors, plus a product.

    It is not declared pure: LLVM would move it behind the next block's barriers, where all products are live at once.
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
    """``compute_before_wait`` for 16 elements a thread; the branch tests for a NaN that no operation makes.

    Otherwise ptxas delays all sums until all products are complete and live.
    """
    return gl.inline_asm_elementwise(_IN_PLACE, _TIED, [x], dtype=gl.float32, is_pure=False, pack=16)
