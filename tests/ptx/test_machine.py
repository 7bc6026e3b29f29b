"""The interpreter on programs of a few instructions: what it computes, and what it must not let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx.bulk import TensorMap, swizzled
from tests.ptx.products import fragment
from tests.ptx.programs import run
from tests.ptx.text import PtxError

LANES = torch.arange(32, dtype=torch.int32)


def _result(body: str, threads: int = 32, seed: int = 0) -> torch.Tensor:
    out = torch.full((threads,), -1, dtype=torch.int32)
    run(body + "\n st.global.b32 [%rd3], %r9;", out, threads=threads, seed=seed)
    return out


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """The codes of numbers, saturated."""
    return x.float().clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8).int()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r9, %r1, -3;", LANES - 3),
        ("sub.s32 %r2, %r1, 9; max.relu.s32 %r9, %r2, -4;", (LANES - 9).clamp(min=0)),
        ("mul.hi.s32 %r9, %r1, -2147483648;", -((LANES + 1) // 2)),
        ("sub.s32 %r2, %r1, 16; shr.s32 %r9, %r2, 1;", (LANES - 16) >> 1),
        ("sub.s32 %r2, %r1, 16; div.s32 %r9, %r2, 3;", torch.div(LANES - 16, 3, rounding_mode="trunc")),
        ("shl.b32 %r9, %r1, 40;", LANES * 0),
        ("bfe.u32 %r9, %r1, 1, 2;", (LANES >> 1) & 3),
        ("cvt.s64.s32 %rd4, %r1; bfe.s64 %rd5, %rd4, 1, 3; cvt.u32.u64 %r9, %rd5;", ((LANES >> 1 & 7) ^ 4) - 4),
        ("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.idx.b32 %r9, %r1, 7, 31, -1;", LANES * 0 + 7),
        ("lop3.b32 %r9, %r1, 12, 3, 0xEA;", (LANES & 12) | 3),
        ("prmt.b32 %r9, %r1, 0, 0x4440;", LANES & 255),
        ("setp.lt.s32 %p1, %r1, 9; selp.b32 %r9, 1, 0, %p1;", (LANES < 9).int()),
        ("mov.b32 %r9, 5; setp.gt.s32 %p1, %r1, 9; @%p1 mov.b32 %r9, 6; @!%p1 add.s32 %r9, %r9, 2;",
         torch.where(LANES > 9, 6, 7)),
        ("cvt.rn.f32.s32 %r2, %r1; mul.f32 %r3, %r2, 0f40400000; cvt.rzi.s32.f32 %r9, %r3;", LANES * 3),
        ("cvt.rn.f32.s32 %r2, %r1; mul.f32 %r3, %r2, 0f41B40000; cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, %r2; "
         "cvt.u32.u16 %r9, %rs1;", _e4m3(LANES * 22.5) * 256 + _e4m3(LANES)),
        ("add.s32 %r2, %r1, -4111; cvt.rn.f32.s32 %r3, %r2; cvt.rz.f16.f32 %rs1, %r3; cvt.f32.f16 %r4, %rs1; "
         "cvt.rzi.s32.f32 %r9, %r4;", torch.where(LANES < 16, -((4111 - LANES) // 4 * 4), -((4111 - LANES) // 2 * 2))),
        ("mov.b32 %r2, 0x3C004000; cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r2; cvt.u32.u16 %r9, %rs1;",
         LANES * 0 + 0x3840),
        ("mov.b16 %rs1, 0x3840; cvt.rn.f16x2.e4m3x2 %r9, %rs1;", LANES * 0 + 0x3C004000),
        ("sub.s32 %r2, %r1, 9; cvt.u16.u32 %rs1, %r2; and.b16 %rs1, %rs1, 255; cvt.s16.s8 %rs2, %rs1; "
         "cvt.s32.s16 %r9, %rs2;", LANES - 9),
        ("mov.b32 %r2, 0x38383838; mov.b32 %r10, 0f3F800000; mov.b32 %r11, %r10; mov.b32 %r12, %r10; "
         "mov.b32 %r13, %r10; mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r10,%r11,%r12,%r13}, "
         "{%r2,%r2,%r2,%r2}, {%r2,%r2}, {%r10,%r11,%r12,%r13}; cvt.rzi.s32.f32 %r9, %r12;", LANES * 0 + 33),
        ("elect.sync %r9|%p1, -1; @%p1 mov.b32 %r9, 77;", torch.where(LANES == 0, 77, 0)),
    ],
)  # fmt: skip
def test_what_instructions_compute(body: str, expected: torch.Tensor) -> None:
    assert torch.equal(_result(body), expected.int())


def test_lanes_that_part_meet_again() -> None:
    """Each lane loops as often as its number says; sums are then exchanged."""
    body = """
     mov.b32 %r9, 0; mov.b32 %r2, 0;
    LOOP: setp.ge.s32 %p1, %r2, %r1; @%p1 bra DONE;
     add.s32 %r9, %r9, %r2; add.s32 %r2, %r2, 1; bra.uni LOOP;
    DONE: shfl.sync.idx.b32 %r3, %r9, 31, 31, -1; add.s32 %r9, %r9, %r3;"""
    assert torch.equal(_result(body), (LANES * (LANES - 1) // 2 + 31 * 15).int())


_SHARE = """
 mov.b32 %r2, global_smem; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
 st.shared.b32 [%r4], %r1;
 {sync}
 xor.b32 %r5, %r3, 128; add.s32 %r6, %r2, %r5; ld.shared.b32 %r9, [%r6];"""


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_orders_warps_and_its_absence_is_found(seed: int) -> None:
    got = _result(_SHARE.format(sync="bar.sync 0, 64;"), 64, seed)
    assert torch.equal(got, (torch.arange(64) ^ 32).int())
    with pytest.raises(PtxError, match="race|nobody wrote"):
        _result(_SHARE.format(sync=""), 64, seed)


# Block 0 writes a number and then a flag, block 1 waits for the flag and reads the number.
_TELL = """
 mov.u32 %r2, %ctaid.x; setp.eq.s32 %p1, %r2, 1; setp.ne.s32 %p2, %r1, 0; mov.b32 %r5, 7; mov.b32 %r6, 1;
 @%p1 bra HEAR; @%p2 bra TOLD;
 st.global.b32 [%rd1+4], %r5;
TOLD: bar.sync 0;
 @%p2 bra DONE;
 {tell}
 bra.uni DONE;
HEAR: @%p2 bra HEARD;
POLL: {hear} setp.eq.s32 %p3, %r7, 0; @%p3 bra POLL;
 {then}
HEARD: bar.sync 0; setp.ne.s32 %p2, %r1, 32; @%p2 bra DONE;
 ld.global.b32 %r9, [%rd1+4]; st.global.b32 [%rd1+8], %r9;
DONE:"""
_ASK, _SET = "ld.global.gpu.acquire.b32 %r7, [%rd1];", "atom.global.gpu.release.exch.b32 %r8, [%rd1], %r6;"
_ADD = "atom.global.gpu.{}.add.u32 %r8, [%rd1], %r6;"


def _told(tell: str, hear: str, then: str, seed: int) -> list[int]:
    out = torch.zeros(64, dtype=torch.int32)
    run(_TELL.format(tell=tell, hear=hear, then=then), out, threads=64, blocks=2, seed=seed)
    return out[:3].tolist()


@pytest.mark.parametrize(
    ("tell", "hear", "then"),
    [
        (_SET, _ASK, ""),
        (_ADD.format("acq_rel"), "atom.global.acq_rel.gpu.or.b32 %r7, [%rd1], 0;", ""),
        # What the release said goes on through an atomic that is none, and fences make relaxed ones into both.
        (_SET + _ADD.format("relaxed"), _ASK, ""),
        ("fence.acq_rel.gpu; st.global.relaxed.gpu.b32 [%rd1], %r6;", "ld.volatile.global.b32 %r7, [%rd1];",
         "membar.gl;"),
        ("membar.sys;" + _ADD.format("relaxed"), "ld.global.relaxed.gpu.b32 %r7, [%rd1];", "fence.sc.gpu;"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_what_one_block_tells_another(tell: str, hear: str, then: str, seed: int) -> None:
    assert _told(tell, hear, then, seed)[1:] == [7, 7]


@pytest.mark.parametrize(
    ("tell", "hear", "then"),
    [
        (_ADD.format("relaxed"), _ASK, ""),
        (_ADD.format("acquire"), _ASK, ""),
        (_SET.replace("gpu", "cta"), _ASK, ""),
        (_SET, _ASK.replace("gpu", "cta"), ""),
        (_SET, "ld.volatile.global.b32 %r7, [%rd1];", ""),
        (_SET, "ld.global.b32 %r7, [%rd1];", ""),
        ("st.global.b32 [%rd1], %r6;", _ASK, ""),
        ("membar.cta;" + _ADD.format("relaxed"), _ASK, ""),
        ("fence.acq_rel.gpu;" + _ADD.format("relaxed"), "ld.volatile.global.b32 %r7, [%rd1];", "membar.cta;"),
        # A fence too late, and a store that ends what was released before.
        (_ADD.format("relaxed") + "fence.acq_rel.gpu;", _ASK, ""),
        (_SET + "st.global.relaxed.gpu.b32 [%rd1], %r5;", "ld.global.gpu.acquire.b32 %r7, [%rd1]; and.b32 %r7, %r7, 2;",
         ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_what_one_block_does_not_tell_another(tell: str, hear: str, then: str, seed: int) -> None:
    with pytest.raises(PtxError, match=r"race: warp . of block .* (reads|writes) byte . of out"):
        _told(tell, hear, then, seed)


def test_a_block_hears_what_is_told_to_it_alone() -> None:
    """Two warps of a block, by an atomic of its scope, about global and about shared memory."""
    body = """
 mov.u32 %r2, global_smem; mov.b32 %r5, 7; mov.b32 %r6, 1; setp.ge.u32 %p1, %r1, 32; @%p1 bra HEAR;
 setp.ne.s32 %p2, %r1, 0; @%p2 bra DONE;
 st.global.b32 [%rd1+4], %r5; st.shared.b32 [%r2], %r5; atom.global.cta.{}.add.u32 %r8, [%rd1], %r6; bra.uni DONE;
HEAR: setp.ne.s32 %p2, %r1, 32; @%p2 bra DONE;
POLL: atom.global.cta.acquire.or.b32 %r7, [%rd1], 0; setp.eq.s32 %p3, %r7, 0; @%p3 bra POLL;
 ld.global.b32 %r9, [%rd1+4]; ld.shared.b32 %r10, [%r2]; add.s32 %r9, %r9, %r10; st.global.b32 [%rd1+8], %r9;
DONE:"""
    out = torch.zeros(64, dtype=torch.int32)
    run(body.format("release"), out, threads=64)
    assert out[:3].tolist() == [1, 7, 14]
    with pytest.raises(PtxError, match="race"):
        run(body.format("relaxed"), torch.zeros(64, dtype=torch.int32), threads=64)


_MBARRIER = """
 mov.b32 %r2, global_smem; setp.eq.b32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32;
 @%p1 mbarrier.init.shared::cta.b64 [%r2], {count};
 bar.sync 0, 64;
 st.shared.b32 [%r2+16], 5;
 @%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
 @%p2 bra DONE;
 { .reg .pred complete;
 waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [%r2], 0; @!complete bra.uni waitLoop; }
DONE: mov.b32 %r9, 1;"""


def test_a_barrier_that_never_completes_is_a_deadlock() -> None:
    assert _result(_MBARRIER.replace("{count}", "1"), 64).eq(1).all()
    with pytest.raises(PtxError, match=r"deadlock[\s\S]*warp 1"):
        _result(_MBARRIER.replace("{count}", "2"), 64)


_ON_BARRIER = """
 mov.b32 %r2, global_smem; mov.b32 %r9, 1; setp.eq.b32 %p1, %r1, 0;
 @%p1 mbarrier.init.shared::cta.b64 [%r2+32], 1;
 {between}
 bar.sync 0, 32;
 {use}"""


@pytest.mark.parametrize(
    "use",
    [
        "@%p1 st.shared.b32 [%r2+36], 5;",
        "shl.b32 %r3, %r1, 3; add.s32 %r4, %r2, %r3; st.shared.v2.b32 [%r4], {%r1, %r1};",
        "@%p1 st.shared.b8 [%r2+39], %rs1;",
        "ld.shared.b64 %rd4, [%r2+32];",
        "@%p1 mbarrier.init.shared::cta.b64 [%r2+32], 1;",
        "and.b32 %r3, %r1, 7; shl.b32 %r3, %r3, 4; add.s32 %r4, %r2, %r3; "
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r1};",
        "@%p1 cp.async.ca.shared.global [%r2+32], [%rd1], 16; cp.async.commit_group; cp.async.wait_group 0;",
    ],
)
def test_memory_of_a_barrier_is_used_for_nothing_else_before_it_is_invalidated(use: str) -> None:
    """On an H200, a tile that was loaded to where there had been barriers had NaN in a row."""
    before = "mov.b16 %rs1, 7;"
    with pytest.raises(PtxError, match="belongs to an mbarrier that was not invalidated"):
        _result(before + _ON_BARRIER.format(between="", use=use))
    without = "@%p1 mbarrier.inval.shared::cta.b64 [%r2+32];"
    assert _result(before + _ON_BARRIER.format(between=without, use=use)).eq(1).all()


# Each lane copies four of the lanes' numbers to shared memory, where it reads the first of the next lane's.
_COPIES = """
 st.global.b32 [%rd3], %r1;
 mov.b32 %r2, global_smem; shl.b32 %r3, %r1, 4; and.b32 %r3, %r3, 511; add.s32 %r4, %r2, %r3; setp.lt.u32 %p1, %r1, 1;
 cvt.u64.u32 %rd4, %r3; and.b64 %rd4, %rd4, 127; add.s64 %rd5, %rd1, %rd4;
 @%p1 mbarrier.init.shared::cta.b64 [%r2+512], 32;
 bar.sync 0, 32;
 cp.async.cg.shared.global [%r4], [%rd5], 16, 16; {arrival}
 mov.b32 %r5, 0;
 WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+512], %r5; @!%p2 bra WAIT;
 add.s32 %r6, %r3, 16; and.b32 %r6, %r6, 511; add.s32 %r6, %r2, %r6; ld.shared.b32 %r9, [%r6];"""


def test_an_arrival_follows_the_copies_before_it() -> None:
    arrival = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+512];"
    assert torch.equal(_result(_COPIES.format(arrival=arrival)), 4 * (LANES + 1) % 32)
    for other, message in (
        ("", "deadlock"),
        (arrival.replace(".noinc", ""), "awaits in addition"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r2+512];", "nothing orders that"),
    ):
        with pytest.raises((PtxError, RuntimeError), match=message):
            _result(_COPIES.format(arrival=other))


_CHAIN = (
    """
 mov.b32 %r2, global_smem; shl.b32 %r3, %r1, 2; and.b32 %r3, %r3, 255; add.s32 %r4, %r2, %r3;
 mov.b32 %r14, 0x3F803F80; mov.b32 %r15, %r14; mov.b32 %r16, %r14; mov.b32 %r17, %r14;
 setp.lt.u32 %p1, %r1, 64; @%p1 st.shared.b32 [%r4], %r14;
 fence.proxy.async.shared::cta; bar.sync 0, 128;
 shr.u32 %r5, %r2, 4; add.s32 %r5, %r5, 524288; cvt.u64.u32 %rd4, %r5; mov.pred %p2, -1;
 mov.b32 %r10, 0f00000000; mov.b32 %r11, %r10; mov.b32 %r12, %r10; mov.b32 %r13, %r10;
 wgmma.fence.sync.aligned;
"""
    + 4
    * """
 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
   {%r10,%r11,%r12,%r13}, {%r14,%r15,%r16,%r17}, %rd4, %p2, 1, 1, 0;
 wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;"""
)


def test_products_that_follow_each_other_into_one_accumulator() -> None:
    """Ones: each adds 16, one is always in flight, and nobody reads the accumulator until none is."""
    end = " wgmma.wait_group.sync.aligned 0; cvt.rzi.s32.f32 %r9, %r11;"
    assert _result(_CHAIN + end, 128).eq(64).all()
    with pytest.raises((PtxError, RuntimeError)):
        _result(_CHAIN + end.replace("wgmma.wait_group.sync.aligned 0;", ""), 128)


def test_products_of_8_bits_that_follow_each_other() -> None:
    """Ones of e4m3: each product is over 32 of them, of A in registers and of B in shared memory."""
    chain = _CHAIN.replace("0x3F803F80", "0x38383838").replace("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3")
    end = " wgmma.wait_group.sync.aligned 0; cvt.rzi.s32.f32 %r9, %r11;"
    assert _result(chain.replace("1, 1, 0;", "1, 1;") + end, 128).eq(128).all()
    with pytest.raises(PtxError, match="product"):
        _result(chain + end, 128)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r9, [%rd3+128];", "outside|no tensor"),
        ("ld.global.b32 %r9, [%rd1+2];", "misaligned"),
        ("mov.b32 %r2, global_smem; ld.shared.b32 %r9, [%r2+1024];", "outside"),
        ("mov.b32 %r2, global_smem; ld.shared.b32 %r9, [%r2+8];", "nobody wrote"),
        ("LOOP: setp.eq.s32 %p1, %r1, %r1; @%p1 bra LOOP;", "no end"),
        ("setp.lt.s32 %p1, %r1, 7; @%p1 bra A; bar.sync 0, 32; A: mov.b32 %r9, 0;", "lanes apart"),
        ("mov.b32 %r2, global_smem; mbarrier.arrive.shared::cta.b64 _, [%r2];", "nobody wrote|no mbarrier"),
        ("setmaxnreg.dec.sync.aligned.u32 20;", "registers"),
    ],
)
def test_what_hardware_does_not_forgive(body: str, message: str) -> None:
    with pytest.raises((PtxError, RuntimeError), match=message):
        _result(body)


@pytest.mark.parametrize(
    "body", ["frobnicate.b32 %r9, %r1;", "add.weird.s32 %r9, %r1, 1;", "ld.global.odd.b32 %r9, [%rd3];"]
)
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(PtxError, match="line 19"):
        _result("\n" + body)


def test_swizzles_are_their_own_inverse_and_stay_within_eight_rows() -> None:
    bytes_ = np.arange(4096)
    for span, rows in ((128, 1024), (64, 512), (32, 256)):
        there = swizzled(bytes_, span)
        assert np.array_equal(swizzled(there, span), bytes_) and not np.array_equal(there, bytes_)
        assert np.array_equal(there // rows, bytes_ // rows) and np.array_equal(there % 16, bytes_ % 16)


def test_fragments_cover_a_tile_once() -> None:
    row, column = fragment(64)
    assert sorted(zip(row.ravel().tolist(), column.ravel().tolist(), strict=True)) == [
        (r, c) for r in range(16) for c in range(64)
    ]


def test_tensor_maps_refuse_what_the_driver_refuses() -> None:
    good = {"address": 4096, "size": 2, "shape": (8, 64), "strides": (128, 2), "box": (8, 64), "swizzle": 128}
    TensorMap(**good)
    for name, value in (("address", 4098), ("strides", (120, 2)), ("box", (8, 128)), ("shape", (0, 64))):
        with pytest.raises(PtxError):
            TensorMap(**(good | {name: value}))


_BOX = """
 mov.b32 %r2, global_smem; mov.b64 %rd5, test_param_2; cvta.param.u64 %rd6, %rd5;
 shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; add.s32 %r5, %r1, 7; setp.eq.b32 %p1, %r1, 0;
 st.shared.b32 [%r4], %r5; st.shared.b32 [%r4+128], %r1;
 @%p1 mbarrier.init.shared::cta.b64 [%r2+{barrier}], 1;
 fence.proxy.async.shared::cta; bar.sync 0, 32;
 @%p1 {copy}
 @%p1 cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"""
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd6, {{{column}, {row}}}], [%r2];"
_LOAD = ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd6, {{{column}, {row}}}], "
         "[%r2+512];")  # fmt: skip


def _box(copy: str, column: int, row: int, barrier: int = 512) -> torch.Tensor:
    """Copies a box of 8 x 8 numbers from or to a row and a column of a tensor of 4 x 8, and gives the tensor."""
    out = torch.full((4, 8), -1, dtype=torch.int32)
    tensor = TensorMap(out.data_ptr(), 4, (4, 8), (32, 4), (8, 8), 0)
    run(_BOX.format(copy=copy.format(column=column, row=row), barrier=barrier), out, tensor=tensor)
    return out


def test_a_box_is_cut_where_the_tensor_ends() -> None:
    first = _box(_STORE, 2, -3)
    assert first[:, :2].eq(-1).all() and torch.equal(first[0, 2:], torch.arange(24, 30, dtype=torch.int32) + 7)
    assert torch.equal(first[1:, 2:], torch.stack([torch.arange(8 * n, 8 * n + 6) for n in range(3)]).int())
    for column, row in ((8, 0), (0, 4), (-8, 0), (0, 2**31 - 9), (2**31 - 9, 0), (0, -(2**30))):
        assert _box(_STORE, column, row).eq(-1).all()


@pytest.mark.parametrize("copy", [_STORE, _LOAD], ids=["store", "load"])
@pytest.mark.parametrize(
    ("column", "row"), [(0, 2**31 - 4), (2**31 - 8, 0), (0, 2**31 - 1), (0, -(2**31) + 20), (-(2**31), 0)]
)
def test_boxes_beyond_the_coordinates_of_32_bits(copy: str, column: int, row: int) -> None:
    """As seen on an H200, for rows of a packed sequence that were to be stored nowhere: an illegal instruction."""
    with pytest.raises(PtxError, match="beyond 32 bits"):
        _box(copy, column, row)


@pytest.mark.parametrize("copy", [_STORE, _LOAD], ids=["store", "load"])
def test_no_box_lies_on_a_barrier(copy: str) -> None:
    with pytest.raises(PtxError, match="belongs to an mbarrier that was not invalidated"):
        _box(copy, 0, 0, barrier=248)


def test_warps_may_write_neighbouring_bytes() -> None:
    # The first warp writes the even bytes, the second the odd ones; each reads what the other wrote.
    body = """
 mov.u32 %r2, global_smem;
 and.b32 %r3, %r1, 31;
 shl.b32 %r4, %r3, 1;
 shr.u32 %r5, %r1, 5;
 add.s32 %r6, %r2, %r4;
 add.s32 %r7, %r6, %r5;
 cvt.u16.u32 %rs1, %r1;
 st.shared.b8 [%r7], %rs1;
 bar.sync 0;
 xor.b32 %r8, %r5, 1;
 add.s32 %r9, %r6, %r8;
 ld.shared.b8 %rs2, [%r9];
 cvt.u32.u16 %r10, %rs2;
 st.global.b32 [%rd3], %r10;
"""
    out = torch.zeros(64, dtype=torch.int32)
    run(body, out, threads=64)
    assert out.tolist() == [i ^ 32 for i in range(64)]


# Each of two blocks copies its numbers to the other, and arrives there.
_PAIR = """
 mov.u32 %r2, global_smem; mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; setp.eq.s32 %p1, %r1, 0;
 shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r2; mad.lo.s32 %r6, %r3, 100, %r1; st.shared.b32 [%r5], %r6;
 @%p1 mbarrier.init.shared::cta.b64 [%r2+512], 2;
 {fence} bar.sync 0, 32; {start}
 add.s32 %r7, %r2, 128; mapa.shared::cluster.u32 %r7, %r7, %r4;
 add.s32 %r8, %r2, 512; mapa.shared::cluster.u32 %r8, %r8, %r4;
 @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+512], 128;
 @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r2], 128, [%r8];
 {arrive}
 WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+512], 0; @!%p2 bra WAIT;
 ld.shared.b32 %r9, [%r5+128]; {end}
 mul.wide.u32 %rd4, %r3, 128; add.s64 %rd3, %rd3, %rd4; st.global.b32 [%rd3], %r9;"""
_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
_RIGHT = {
    "fence": "fence.proxy.async.shared::cta;",
    "start": _SYNC,
    "arrive": "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r8];",
    "end": _SYNC,
}


def _pair(seed: int, **other: str) -> torch.Tensor:
    out = torch.full((2, 32), -1, dtype=torch.int32)
    run(_PAIR.format(**_RIGHT | other), out, blocks=2, cluster=2, seed=seed)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_cluster_reach_each_other(seed: int) -> None:
    assert torch.equal(_pair(seed), torch.stack([LANES + 100, LANES]))
    for name, other, message in (
        ("fence", "", "a copy of warp 0 of block .* without a proxy fence"),
        ("start", "", "race|nobody wrote|no mbarrier"),
        ("start", "barrier.cluster.arrive.release.aligned;", "race|nobody wrote|no mbarrier"),
        ("arrive", "", "deadlock"),
        ("end", "", "race: .* which .* may still have to read|has ended"),
    ):
        with pytest.raises(PtxError, match=message):
            _pair(seed, **{name: other})


# Each of two blocks loads four of eight rows into both; a number of either half is stored as their sum.
_BOTH = """
 mov.b32 %r2, global_smem; mov.b64 %rd5, test_param_2; cvta.param.u64 %rd6, %rd5; mov.u32 %r3, %cluster_ctarank;
 setp.eq.s32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2+512], 1; bar.sync 0, 32; {sync}
 @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+512], 256;
 shl.b32 %r4, %r3, 7; add.s32 %r4, %r4, %r2; shl.b32 %r5, %r3, 2; mov.b32 %r6, 0; mov.b16 %rs1, {mask};
 @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
   [%r4], [%rd6, {{%r6, %r5}}], [%r2+512], %rs1;
 WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+512], 0; @!%p2 bra WAIT;
 shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r2; ld.shared.b32 %r8, [%r5]; ld.shared.b32 %r9, [%r5+128];
 add.s32 %r9, %r8, %r9; {sync}
 mul.wide.u32 %rd4, %r3, 128; add.s64 %rd3, %rd3, %rd4; st.global.b32 [%rd3+256], %r9;"""


@pytest.mark.parametrize("seed", range(4))
def test_a_box_arrives_at_all_blocks_of_the_mask(seed: int) -> None:
    def loaded(mask: int, sync: str = _SYNC) -> torch.Tensor:
        out = torch.arange(128, dtype=torch.int32)
        tensor = TensorMap(out.data_ptr(), 4, (8, 8), (32, 4), (4, 8), 0)
        run(_BOTH.format(mask=mask, sync=sync), out, blocks=2, cluster=2, seed=seed, tensor=tensor)
        return out[64:]

    assert torch.equal(loaded(3), (2 * LANES + 32).repeat(2))
    for mask in (1, 2):
        with pytest.raises(PtxError, match="deadlock"):
            loaded(mask)
    with pytest.raises(PtxError, match="race|nobody wrote|no mbarrier|has ended"):
        loaded(3, "")
