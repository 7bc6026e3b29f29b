"""The emulator finds what it says it finds, and computes what the compiler would."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.hopper.device.gluon_compat import (
    arrive_after_copies,
    as_box,
    copy_async,
    tma_load,
    tma_store,
)
from tests import emulator
from tests.emulator.values import _OF_INTEGERS, Number, Value

SIDE = 16


@gluon.jit
def load_tiles(x_desc, tiles, full, empty, NUM_TILES: gl.constexpr, STAGES: gl.constexpr):
    for i in range(NUM_TILES):
        mbarrier.wait(empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(i % STAGES), 16 * 16 * 4)
        tma_load(x_desc, [i * 16, 0], full.index(i % STAGES), tiles.index(i % STAGES))


@gluon.jit
def double_tiles(
    out_desc, tiles, full, empty, out_s, NUM_TILES: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr
):
    for i in range(NUM_TILES):
        if FAULT != "no wait":
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        if FAULT == "early release":
            mbarrier.arrive(empty.index(i % STAGES), count=1)
        x = tiles.index(i % STAGES).load(gl.AutoLayout())
        if FAULT == "two releases":
            mbarrier.arrive(empty.index(i % STAGES), count=2)
        elif FAULT != "no release" and FAULT != "early release":
            mbarrier.arrive(empty.index(i % STAGES), count=1)
        if FAULT != "buffer in use":
            tma.store_wait(0)
        out_s.store(x + x)
        if FAULT != "no fence":
            fence_async_shared()
        tma_store(out_desc, [i * 16, 0], out_s)
    if FAULT != "leaves early":
        tma.store_wait(0)


@gluon.jit
def doubled(x_desc, out_desc, NUM_TILES: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 16, 16], x_desc.layout)
    out_s = gl.allocate_shared_memory(gl.float32, [16, 16], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize([
        (double_tiles, (out_desc, tiles, full, empty, out_s, NUM_TILES, STAGES, FAULT)),
        (load_tiles, (x_desc, tiles, full, empty, NUM_TILES, STAGES)),
    ], [1], [24])  # fmt: skip


def _described(x: torch.Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [SIDE, SIDE], layout)


def _double(fault: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(5 * SIDE, SIDE)
    out = torch.full_like(x, torch.nan)
    emulator.launch(doubled, (1,), (_described(x), _described(out), 5, 2, fault), seed=seed)
    return x, out


@pytest.mark.parametrize("seed", range(5))
def test_tiles_go_through_a_ring(seed: int) -> None:
    x, out = _double("", seed)
    assert torch.equal(out, 2 * x)


# Each of these may work on a GPU, and mostly does.
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "fault, message",
    [
        ("no wait", "reads tiles|everybody waits"),
        ("early release", "tiles"),
        ("no release", r"everybody waits(.|\n)*load_tiles.* for parity . of empty\[.\], in phase .: 1 of 1 arrivals"),
        ("two releases", "2 arrivals where 1 of 1"),
        ("no fence", r"a copy of double_tiles.* reads out_s.* without a proxy fence after .* at test_emulator.py:\d+"),
        ("buffer in use", "may still have to read"),
        ("leaves early", "before its copies have left"),
    ],
)
def test_every_fault_is_found_in_any_order(fault: str, message: str, seed: int) -> None:
    with pytest.raises(emulator.MachineError, match=message):
        _double(fault, seed)


@gluon.jit
def multiplied(x_desc, out_ptr, FAULT: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float32, [16, 16], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), 16 * 16 * 4)
    tma_load(x_desc, [0, 0], full.index(0), x_s)
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([16, 16], gl.float32, gl.AutoLayout())
    first = warpgroup_mma(x_s, x_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    second = warpgroup_mma(x_s, x_s, first, is_async=True)
    if FAULT == "written while read":
        x_s.store(zeros)
    if FAULT != "no wait":
        second = warpgroup_mma_wait(0, deps=[second])
    rows = gl.arange(0, 16, gl.AutoLayout())
    gl.store(out_ptr + rows[:, None] * 16 + rows[None, :], second)


def test_products_add_up_in_order_and_are_waited_for() -> None:
    x, out = torch.randn(SIDE, SIDE), torch.full((SIDE, SIDE), torch.nan)
    emulator.launch(multiplied, (1,), (_described(x), out, ""))
    torch.testing.assert_close(out, x @ x.T + x @ x)
    with pytest.raises(emulator.MachineError, match="register"):
        emulator.launch(multiplied, (1,), (_described(x), out, "no wait"))
    with pytest.raises(emulator.RaceError, match="may still have to read"):
        emulator.launch(multiplied, (1,), (_described(x), out, "written while read"))


@gluon.jit
def side_by_side(x_desc, out_ptr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float32)
    tile = gl.allocate_shared_memory(gl.float32, [1, 16, 32], layout).index(0)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), 2 * 16 * 16 * 4)
    tma_load(x_desc, [0, 0], full.index(0), tile.slice(FIRST, 16, 1))
    tma_load(x_desc, [16, 0], full.index(0), tile.slice(SECOND, 16, 1))
    mbarrier.wait(full.index(0), 0)
    rows, cols = gl.arange(0, 16, gl.AutoLayout()), gl.arange(0, 32, gl.AutoLayout())
    gl.store(out_ptr + rows[:, None] * 32 + cols[None, :], tile.load(gl.AutoLayout()))


def test_boxes_of_one_buffer_are_loaded_side_by_side() -> None:
    x, out = torch.randn(2 * SIDE, SIDE), torch.full((SIDE, 2 * SIDE), torch.nan)
    emulator.launch(side_by_side, (1,), (_described(x), out, 0, SIDE))
    assert torch.equal(out, torch.cat([x[:SIDE], x[SIDE:]], 1))
    with pytest.raises(emulator.RaceError, match="writes tile"):
        emulator.launch(side_by_side, (1,), (_described(x), out, 0, 0))
    with pytest.raises(emulator.MachineError, match="columns 8 to 24"):
        emulator.launch(side_by_side, (1,), (_described(x), out, 0, 8))


@gluon.jit
def one_below_the_other(x_desc, out_ptr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float32)
    tile = gl.allocate_shared_memory(gl.float32, [1, 16, 16], layout).index(0)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), 2 * 8 * 16 * 4)
    tma_load(x_desc, [0, 16, 0, 0], full.index(0), as_box(tile.slice(FIRST, 8, 0), x_desc))
    tma_load(x_desc, [0, 0, 0, 0], full.index(0), as_box(tile.slice(SECOND, 8, 0), x_desc))
    mbarrier.wait(full.index(0), 0)
    rows = gl.arange(0, 16, gl.AutoLayout())
    gl.store(out_ptr + rows[:, None] * 16 + rows[None, :], tile.load(gl.AutoLayout()))


def test_boxes_of_rows_are_loaded_one_below_the_other() -> None:
    x, out = torch.randn(1, 32, 1, SIDE), torch.full((SIDE, SIDE), torch.nan)
    layout = gl.NVMMASharedLayout.get_default_for([8, SIDE], gl.float32)
    described = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 8, 1, SIDE], layout)
    emulator.launch(one_below_the_other, (1,), (described, out, 0, 8))
    assert torch.equal(out, torch.cat([x[0, 16:24, 0], x[0, :8, 0]]))
    with pytest.raises(emulator.RaceError, match="writes tile"):
        emulator.launch(one_below_the_other, (1,), (described, out, 8, 8))
    with pytest.raises(emulator.MachineError, match="rows 4 to 12"):
        emulator.launch(one_below_the_other, (1,), (described, out, 0, 4))


@gluon.jit
def copy_rows(x_ptr, rows_ptr, tiles, full, empty, NUM_TILES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(NUM_TILES):
        if FAULT != "no claim":
            mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        starts = gl.load(rows_ptr + i * 16 + gl.arange(0, 16, gl.AutoLayout()))
        at = x_ptr + starts[:, None] * 16 + gl.arange(0, 16, gl.AutoLayout())[None, :]
        copy_async(tiles.index(0), at, mask=(starts >= 0)[:, None])
        if FAULT == "counted":
            arrive_after_copies(full.index(0))
        elif FAULT != "no arrival":
            arrive_after_copies(full.index(0), increment_count=False)


@gluon.jit
def store_tiles(out_desc, tiles, full, empty, NUM_TILES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(NUM_TILES):
        mbarrier.wait(full.index(0), i & 1)
        if FAULT != "no fence":
            fence_async_shared()
        tma_store(out_desc, [i * 16, 0], tiles.index(0))
        tma.store_wait(0)
        mbarrier.arrive(empty.index(0), count=1)


@gluon.jit
def gathered(x_ptr, rows_ptr, out_desc, NUM_TILES: gl.constexpr, FAULT: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.float32, [1, 16, 16], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=64)
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize([
        (store_tiles, (out_desc, tiles, full, empty, NUM_TILES, FAULT)),
        (copy_rows, (x_ptr, rows_ptr, tiles, full, empty, NUM_TILES, FAULT)),
    ], [2], [24])  # fmt: skip


def _gather(fault: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(40, SIDE), torch.full((3 * SIDE, SIDE), torch.nan)
    rows = torch.randint(-1, 40, (3 * SIDE,), dtype=torch.int32)
    emulator.launch(gathered, (1,), (x, rows, _described(out), 3, fault), seed=seed)
    return torch.where(rows[:, None] < 0, 0.0, x[rows.long()]), out


@pytest.mark.parametrize("seed", range(5))
def test_threads_copy_rows(seed: int) -> None:
    want, out = _gather("", seed)
    assert torch.equal(out, want)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "fault, message",
    [
        ("no claim", "tiles"),
        ("counted", "awaits in addition"),
        ("no arrival", "everybody waits|that no arrival follows"),
        ("no fence", r"a copy of store_tiles.* reads tiles.* without a proxy fence after the write of a copy"),
    ],
)
def test_every_fault_of_copies_by_threads_is_found(fault: str, message: str, seed: int) -> None:
    with pytest.raises(emulator.MachineError, match=message):
        _gather(fault, seed)


@triton.jit
def upper_products(x_ptr, y_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, tl.umulhi(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def test_upper_halves_are_those_of_unsigned_products() -> None:
    x, y = (torch.tensor(each, dtype=torch.int32) for each in ((-1, 5, -(2**31), 7), (-1, -1, 2, 2**30)))
    out = torch.zeros(4, dtype=torch.int32)
    emulator.launch(upper_products, (1,), (x, y, out))
    assert out.tolist() == [-2, 4, 1, 1]


@triton.jit
def scalar_arithmetic(out_ptr, a, b, x):
    tl.store(out_ptr + 0, a // b)
    tl.store(out_ptr + 1, a % b)
    tl.store(out_ptr + 2, tl.maximum(x, 3.0).to(tl.int32))
    tl.store(out_ptr + 3, (a * 2147483647).to(tl.int32))
    tl.store(out_ptr + 4, tl.where(a < 0, a, 7))


def test_numbers_are_those_of_c() -> None:
    out = torch.zeros(5, dtype=torch.int32)
    emulator.launch(scalar_arithmetic, (1,), (out, -7, 2, float("nan")))
    assert out.tolist() == [-3, -1, 3, (-7 * 2147483647 + 2**31) % 2**32 - 2**31, -7]


def test_memory_has_ends() -> None:
    with pytest.raises(emulator.MachineError, match="element 4 of memory that has 4"):
        emulator.launch(scalar_arithmetic, (1,), (torch.zeros(4, dtype=torch.int32), 1, 1, 1.0))


@gluon.jit
def in_turn(turn_ptr, out_ptr, ASK: gl.constexpr, TELL: gl.constexpr, SCOPE: gl.constexpr):
    program = gl.program_id(0)
    if ASK == "volatile":
        while gl.load(turn_ptr, volatile=True) < program:
            pass
    elif ASK == "weak":
        while gl.load(turn_ptr) < program:
            gl.atomic_add(turn_ptr, 0, sem="relaxed")
    else:
        while gl.atomic_add(turn_ptr, 0, sem=ASK, scope=SCOPE) < program:
            pass
    gl.store(out_ptr + program, gl.load(out_ptr + (program - 1), mask=program > 0, other=-1) + 1)
    gl.atomic_add(turn_ptr, 1, sem=TELL, scope=SCOPE)


@pytest.mark.parametrize("resident", [1, 2, 5])
def test_programs_can_wait_for_those_before_them(resident: int) -> None:
    turn, out = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    emulator.launch(in_turn, (5,), (turn, out, "acquire", "release", "gpu"), resident=resident)
    assert out.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("resident", [1, 5])
@pytest.mark.parametrize(
    "ask, tell, scope",
    [("relaxed", "release", "gpu"), ("volatile", "release", "gpu"), ("weak", "release", "gpu"),
     ("acquire", "relaxed", "gpu"), ("release", "acquire", "gpu"), ("acq_rel", "acq_rel", "cta")],
)  # fmt: skip
def test_an_order_that_atomics_do_not_give_is_a_race(ask: str, tell: str, scope: str, resident: int) -> None:
    """Of programs that run one after the other, too."""
    turn, out = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    with pytest.raises(emulator.RaceError, match="program 0"):
        emulator.launch(in_turn, (5,), (turn, out, ask, tell, scope), resident=resident)


@gluon.jit
def summed(x_ptr, out_ptr):
    gl.atomic_add(out_ptr, gl.load(x_ptr + gl.program_id(0)), sem="relaxed")


def test_sums_in_any_order_are_races_where_their_order_must_be_fixed() -> None:
    x, out = torch.arange(5.0), torch.zeros(1)
    emulator.launch(summed, (5,), (x, out))
    assert out.item() == 10
    with pytest.raises(emulator.RaceError, match="nothing orders that"):
        emulator.launch(summed, (5,), (x, out), ordered_sums=True)


@gluon.jit
def unspecialised_branch(x_ptr):
    x = gl.load(x_ptr + gl.arange(0, 4, gl.AutoLayout()))
    if x > 0:
        gl.store(x_ptr, 0)


def test_a_branch_on_a_tensor_is_refused() -> None:
    with pytest.raises(emulator.MachineError, match="branch on a tensor"):
        emulator.launch(unspecialised_branch, (1,), (torch.ones(4),))


@pytest.mark.parametrize("name", _OF_INTEGERS)
def test_numbers_are_counted_as_tensors_are(name: str) -> None:
    """Whatever their dtypes, with Python's numbers on either side; what tensors refuse is refused."""
    compute = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    most = 2**31 - 1
    numbers = [Number(n, kind) for kind in (torch.int32, torch.int64) for n in (0, 1, -1, 7, -most, most)]
    numbers += [Number(n, torch.bool) for n in (False, True)]
    plain = (True, 0, 5, -3, most)
    for a, b in [*itertools.product(numbers, (*numbers, *plain)), *itertools.product(plain, numbers)]:
        if "shift" in name and not 0 <= int(b) < 32:
            continue
        got, want = (
            _outcome(compute, *given)
            for given in ((a, b), (Value(x.data) if isinstance(x, Number) else x for x in (a, b)))
        )
        assert (got is None) == (want is None), (a.data, b)
        assert got is None or (got.dtype == want.dtype and torch.equal(got, want)), (name, got, want)


def _outcome(compute: Callable[[Any, Any], Value], a: Any, b: Any) -> torch.Tensor | None:
    try:
        return compute(a, b).data
    except RuntimeError:
        return None
