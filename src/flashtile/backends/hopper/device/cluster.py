"""Clusters of two programs: PTX for what Gluon has no operation for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import seen_as

_SYNC = gl.constexpr("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;")
# Each word of shared memory gets its own address, four at once, and two that are left at the end. Threads of the first
# warpgroup alone run it.
_FILL = gl.constexpr(
    "{ .reg .u32 a, b, c, d, e, f; .reg .pred p, q; mov.u32 a, global_smem; mov.u32 e, %dynamic_smem_size; "
    "add.u32 e, e, a; and.b32 f, e, -16; mov.u32 $0, %tid.x; setp.eq.u32 q, $0, 0; mad.lo.u32 a, $0, 16, a; "
    "FILL: setp.lt.u32 p, a, f; add.u32 b, a, 4; add.u32 c, a, 8; add.u32 d, a, 12; "
    "@p st.shared.v4.u32 [a], {a, b, c, d}; add.u32 a, a, 2048; @p bra FILL; "
    "setp.lt.and.u32 p, f, e, q; add.u32 b, f, 4; @p st.shared.v2.u32 [f], {f, b}; mov.b32 $0, $1; }"
)
# p: whether this is the first thread of a warpgroup.
_IS_FIRST = "mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
_ARRIVE = gl.constexpr(
    "{ .reg .u32 t, r; .reg .pred p; " + _IS_FIRST + "mapa.shared::cluster.u32 r, $1, $2; "
    "@p mbarrier.arrive.shared::cluster.b64 _, [r]; mov.b32 $0, $1; }"
)
_COPY = gl.constexpr(
    "{ .reg .u32 t, d, b; .reg .pred p; " + _IS_FIRST + "mapa.shared::cluster.u32 d, $1, $4; "
    "mapa.shared::cluster.u32 b, $3, $4; "
    "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [$2], $5, [b]; mov.b32 $0, $1; }"
)


@gluon.constexpr_function
def _multicast_ptx(kernel, number):
    return (
        "{ .reg .u32 t; .reg .u64 m; .reg .b16 w; .reg .pred p; "
        + _IS_FIRST
        + f"mov.u64 m, {kernel}_param_{number}; cvta.param.u64 m, m; mov.b16 w, 3; "
        "@p cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$1], [m, {$3, $4, $5, $6}], [$2], w; mov.b32 $0, $1; }"
    )


@gluon.jit
def _run(ptx: gl.constexpr, constraints: gl.constexpr, args):
    return gl.inline_asm_elementwise(ptx, constraints, args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_sync():
    """All threads of both programs wait for one another; every warp of each calls it."""
    _run(_SYNC, "=r,r", [gl.to_tensor(0)])


@gluon.jit
def fill_with_addresses():
    """Each word of shared memory becomes its own address; the warps of the first partition call it."""
    _run(_FILL, "=&r,r", [gl.to_tensor(0)])


@gluon.jit
def _first_word(view):
    one = view.slice(0, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(one, 0)


@gluon.jit
def address_of(buffers):
    """The address of the first of several buffers, once shared memory is filled with addresses."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return _first_word(seen_as(buffers.index(0), gl.int32, [32], plain))


@gluon.jit
def barrier_address(barriers):
    """``address_of`` for barriers."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return _first_word(seen_as(barriers.index(0), gl.int32, [2], plain))


@gluon.jit
def arrive_at_other(address, rank):
    """One arrival of a warpgroup at a barrier of program ``rank``, at an address in its own shared memory."""
    _run(_ARRIVE, "=r,r,r", [address, rank])


@gluon.jit
def copy_to_other(to, source, barrier, rank, BYTES: gl.constexpr):
    """Starts a copy of bytes into the shared memory of program ``rank``, which signals a barrier there."""
    _run(_COPY, "=r,r,r,r,r,r", [to, source, barrier, rank, gl.to_tensor(BYTES)])


@gluon.jit
def multicast_box(desc, MAP: gl.constexpr, KERNEL: gl.constexpr, to, barrier, at):
    """Starts the load of a box of ``desc`` into both programs' shared memory, which signals a barrier in each.

    MAP: the number of the kernel's parameter that is the tensor's map. at: The box's four coordinates.
    """
    b, row, head, col = at
    args = [to, barrier, gl.to_tensor(col), head, gl.to_tensor(row), b]
    _run(_multicast_ptx(KERNEL, MAP), "=r,r,r,r,r,r,r", args)
