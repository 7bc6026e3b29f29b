"""The device vocabulary against plain PyTorch, helper by helper, in Triton's interpreter."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from flashtile.backends.gpu.device import dropout, functions, mods, records
from flashtile.backends.gpu.device.records import Dropout, Mod, Mods, ScoreTensor, SlopeTensor
from flashtile.backends.gpu.device.softmax import LOG2_E
from flashtile.backends.gpu.device.tiles import (
    grouped_tile,
    key_blocks,
    longest_first,
    packed_tile,
    packed_tiles,
    phase_blocks,
    query_blocks,
    sequence_of,
)
from flashtile.backends.gpu.host import interpret
from flashtile.backends.gpu.launch import Const, Launch
from flashtile.backends.gpu.records import named, num_packed_tiles, threshold_bits
from flashtile.core import philox
from flashtile.core.masks import Band

BANDS = [
    Band(),
    Band(None, 0),
    Band(3, None),
    Band(2, 5),
    Band(0, 0),
    Band(4, -2),
    Band(-1, 3),
    Band(None, None, 5),
    Band(None, 0, 4),
    Band(3, 1, 6),
    Band(None, None, 1),
]


@triton.jit
def _ranges_kernel(out_ptr, first, last, seqlen_q, seqlen_k, band, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    if OF_KEYS:
        a, b, c, d = query_blocks(first, last, seqlen_q, seqlen_k, band, BLOCK)
    else:
        a, b, c, d = key_blocks(first, last, seqlen_q, seqlen_k, band, BLOCK)
    tl.store(out_ptr, a)
    tl.store(out_ptr + 1, b)
    tl.store(out_ptr + 2, c)
    tl.store(out_ptr + 3, d)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("of_keys", [False, True])
def test_block_ranges_cover_and_full_blocks_are_full(band: Band, of_keys: bool) -> None:
    block, tile = 4, 6
    for seqlen_q, seqlen_k in itertools.product((1, 11, 16), (0, 3, 16, 19)):
        keep = band.dense(seqlen_q, seqlen_k)
        if of_keys:
            keep = keep.T
        for start in range(0, keep.shape[0], tile):
            stop = min(start + tile, keep.shape[0])
            out = torch.full((4,), -99, dtype=torch.int32)
            given = records.KeyBand(band.left, band.right, band.chunk)
            _ranges_kernel[(1,)](out, start, stop - 1, seqlen_q, seqlen_k, given, BLOCK=block, OF_KEYS=of_keys)
            low, full_low, full_high, high = out.tolist()
            assert low <= full_low <= full_high <= high, (band, seqlen_q, seqlen_k, start)
            assert high * block < keep.shape[1] + block
            part = keep[start:stop]
            outside = part.clone()
            outside[:, low * block : high * block] = False
            assert not outside.any(), (band, seqlen_q, seqlen_k, start)
            assert part[:, full_low * block : full_high * block].all()
            assert full_high * block <= keep.shape[1] or full_high == full_low
            if band.unbounded:
                assert full_high - full_low == keep.shape[1] // block


@triton.jit
def _phases_kernel(out_ptr, a, b, c, d, ONE_LOOP: tl.constexpr):
    for phase in tl.static_range(3):
        start, stop = phase_blocks(phase, a, b, c, d, ONE_LOOP)
        tl.store(out_ptr + 2 * phase, start)
        tl.store(out_ptr + 2 * phase + 1, stop)


def test_phases_take_every_block_once() -> None:
    out = torch.full((3, 2), -1, dtype=torch.int32)
    _phases_kernel[(1,)](out, 2, 3, 7, 9, ONE_LOOP=False)
    assert out.tolist() == [[2, 3], [3, 7], [7, 9]]
    _phases_kernel[(1,)](out, 2, 3, 7, 9, ONE_LOOP=True)
    assert out[2].tolist() == [2, 9]


@triton.jit
def _twice(scores, operands, at):
    return scores * 2.0


@triton.jit
def _twice_linear(scores, operands, at):
    return scores * 2.0, scores * 0.0 + 2.0


@triton.jit
def _pairs_kernel(x_ptr, given, out_ptr, b, h, seqlen_q, seqlen_k, M: tl.constexpr, N: tl.constexpr):
    rows, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    head = mods.head_of(given, b, h, seqlen_q, seqlen_k)
    at = mods.pairs_of(head, rows + head.shift, j)
    x, scale_log2, slope = mods.apply(tl.load(x_ptr + rows * N + j), given, head, at, True)
    tl.store(out_ptr + rows * N + j, mods.select(x * scale_log2, given, head, at, 7.0, True))
    tl.store(out_ptr + (rows + 16) * N + j, mods.select(x, given, head, at, 7.0, False))
    tl.store(out_ptr + (rows + 32) * N + j, slope + x * 0.0)


@pytest.mark.parametrize("given", [(), ("bias",), ("mask",), ("alibi",), ("bias", "mask", "alibi")], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_score_and_mask_mods_are_applied_in_order(given: tuple[str, ...], own: bool) -> None:
    torch.manual_seed(0)
    rows, keys, b, h, cap = 9, 13, 1, 2, 3.0
    x, bias, slopes = torch.randn(16, 16), torch.randn(2, 4, rows, keys), torch.rand(2, 4)
    kept = torch.rand(2, 4, rows, keys) > 0.5
    out = torch.full((48, 16), torch.nan)

    def pairs(tensor: torch.Tensor) -> ScoreTensor:
        return ScoreTensor(tensor, *tensor.stride()[:3], Const(1))

    alibi = Mod(mods.alibi, None, mods.slope_of_head, SlopeTensor(slopes, 4, len(slopes) - 1))
    transforms, names = named(
        first=Mod(_twice, _twice_linear, None, cap) if own else Mod(mods.softcap, mods.softcap_linear, None, cap),
        alibi=alibi if "alibi" in given else None,
        bias=Mod(mods.bias, None, mods.tensor_of_head, pairs(bias)) if "bias" in given else None,
    )
    mask = Mod(mods.select_tensor, None, mods.tensor_of_head, pairs(kept.view(torch.uint8)))
    masks, mask_names = named(mask=mask if "mask" in given else None)
    both = Mods(0.5, transforms, records.KeyBand(None, 0), masks, None, None, names, mask_names, True, "ieee")
    arguments = {"x_ptr": x, "given": both, "out_ptr": out, "b": b, "h": h, "seqlen_q": rows, "seqlen_k": keys,
                 "M": 16, "N": 16}  # fmt: skip
    interpret(Launch(_pairs_kernel, 1, arguments, {}))
    product = x[:rows, :keys] * 0.5
    want = product * 2 if own else cap * torch.tanh(product / cap)
    slope = torch.full_like(want, 2.0) if own else 1 - (want / cap) ** 2
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    if "alibi" in given:
        want = want - slopes[b, h] * (i - j).abs()
    if "bias" in given:
        want = want + bias[b, h]
    inside = torch.where(kept[b, h], want, 7.0) if "mask" in given else want
    at_edge = torch.where(j <= i, torch.where(inside == 7.0, inside, inside * LOG2_E.value), 7.0)
    for got, expected in ((out[:16], at_edge), (out[16:32], inside), (out[32:], slope)):
        torch.testing.assert_close(got[:rows, :keys], expected, rtol=1e-6, atol=1e-6)
    assert (out[:rows, keys:] == 7.0).all()


@triton.jit
def _dropout_kernel(call, out_ptr, b, h, row, key, M: tl.constexpr, N: tl.constexpr):
    kept = dropout.keep_tile(call.mods.dropout, dropout.philox_key_of(call, b, h), b, row, key, M, N)
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], kept.to(tl.int8))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("state", [(0, 0), (123456789012345, 7), (-3, 2**35 + 5), (2**63 - 1, -1)])
def test_dropout_is_the_defined_mask(dropout_p: float, state: tuple[int, int]) -> None:
    rng = torch.tensor(state, dtype=torch.int64)
    limit = threshold_bits(philox.threshold(dropout_p))
    places = ((0, 0, 0, 0, 32, 64), (3, 1, 16, 32, 32, 64), (5, 3, 1008, 4096, 32, 64), (1, 2, 48, 16, 16, 32))
    for batch, head, row, key, m, n in places:
        out = torch.full((m, n), 9, dtype=torch.int8)
        drops = Dropout(rng, limit, 1.0, None, False)
        made = Mods(1.0, None, records.KeyBand(None, None), None, drops, None, "", "", False, "ieee")
        rows = records.Sequences(None, 8, 2000)
        call = records.Call(None, None, None, rows, rows, records.Heads(4, 1), made)
        arguments = {"call": call, "out_ptr": out, "b": batch, "h": head, "row": row, "key": key, "M": m, "N": n}
        interpret(Launch(_dropout_kernel, 1, arguments, {}))
        expected = philox.keep(rng, dropout_p, range(batch, batch + 1), 4, (row, row + m), (key, key + n))[0, head]
        assert torch.equal(out, expected.to(torch.int8))


@triton.jit
def _scores_kernel(x_ptr, out_ptr, cap, slope, N: tl.constexpr):
    j = tl.arange(0, N)
    x = tl.load(x_ptr + j)
    at = mods.At(0, 0, None, 100, j, 0, 0, ())
    capped, slope_out = mods.softcap_linear(x, cap, at)
    tl.store(out_ptr + j, capped)
    tl.store(out_ptr + N + j, slope_out)
    tl.store(out_ptr + 2 * N + j, mods.alibi(x * 0.0, slope, at))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # far from 0 exp2 overflows on purpose
def test_score_transforms() -> None:
    n, cap = 1024, 20.0
    x = torch.linspace(-60, 60, n)
    x[0], x[-1], x[5] = -1e30, 1e30, 1e-20
    out = torch.full((3, n), torch.nan)
    _scores_kernel[(1,)](x, out, cap, 0.25, N=n)
    tanh = torch.tanh(x.double() / cap)
    torch.testing.assert_close(out[0].double(), cap * tanh, rtol=4e-7, atol=1e-30)
    torch.testing.assert_close(out[1].double(), 1 - tanh**2, rtol=1e-6, atol=5e-7)
    assert torch.equal(out[2], -0.25 * (100 - torch.arange(n)).abs().float())


@triton.jit
def _tiles_kernel(cu_ptr, out_ptr, num_sequences, total, rows_per_token, BLOCK: tl.constexpr, SPARE: tl.constexpr):
    tile = tl.program_id(0)
    b, block = packed_tile(cu_ptr, num_sequences, tile, BLOCK, rows_per_token, SPARE)
    seq = sequence_of(records.Sequences(cu_ptr, num_sequences, total), b)
    start, length = seq.batch_index + seq.start, seq.length
    tl.store(out_ptr + tile * 4, b)
    tl.store(out_ptr + tile * 4 + 1, block)
    tl.store(out_ptr + tile * 4 + 2, start)
    tl.store(out_ptr + tile * 4 + 3, length)


@pytest.mark.parametrize("lengths", [[5], [0, 0, 9], [16, 16], [1, 1, 1, 1, 1], [33, 0, 7, 15], []])
@pytest.mark.parametrize("spare", [0, 3, 40])
@pytest.mark.parametrize("heads, strip", [(1, 1), (3, 8), (5, 4), (2, 16)])
def test_packed_tiles_reach_every_row_once(lengths: list[int], spare: int, heads: int, strip: int) -> None:
    """Also where a position has rows of several heads, in whole strips of positions."""
    block = 16
    bounds = [0, *itertools.accumulate(lengths)]
    total = bounds[-1] + spare
    tiles = num_packed_tiles(total, len(lengths), block, heads, strip - 1)
    out = torch.full((tiles, 4), -1, dtype=torch.int32)
    offsets = torch.tensor(bounds, dtype=torch.int32)
    _tiles_kernel[(tiles,)](offsets, out, len(lengths), total, heads, BLOCK=block, SPARE=strip - 1)
    needed = [-(-length // strip) * strip * heads for length in (*lengths, spare)]
    seen = [torch.zeros(rows, dtype=torch.int32) for rows in needed]
    for b, m, start, length in out.tolist():
        assert m >= 0 and start == bounds[b]
        assert length == (lengths[b] if b < len(lengths) else spare)
        seen[b][m * block : (m + 1) * block] += 1
    assert all((rows == 1).all() for rows in seen)


@triton.jit
def _tensor_of_tiles_kernel(cu_ptr, out_ptr, num_sequences, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    tiles = tl.arange(0, WIDTH)
    b, block = packed_tiles(cu_ptr, num_sequences, tl.minimum(tiles, count - 1), BLOCK)
    tl.store(out_ptr + tiles * 2, b, mask=tiles < count)
    tl.store(out_ptr + tiles * 2 + 1, block, mask=tiles < count)


@pytest.mark.parametrize("lengths", [[5], [0, 0, 9], [1, 1, 1, 1, 1], [33, 0, 7, 15, 0, 16, 16], []])
def test_packed_tiles_are_found_together_as_alone(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths) + 20
    count = num_packed_tiles(total, len(lengths), 16)
    alone, together = torch.full((count, 4), -1, dtype=torch.int32), torch.full((count, 2), -1, dtype=torch.int32)
    _tiles_kernel[(count,)](offsets, alone, len(lengths), total, 1, BLOCK=16, SPARE=0)
    _tensor_of_tiles_kernel[(1,)](offsets, together, len(lengths), count, BLOCK=16, WIDTH=32)
    assert torch.equal(together, alone[:, :2])


@triton.jit
def _grouped_kernel(out_ptr, num_blocks, num_heads, heads_at_once):
    pid = tl.program_id(0)
    block, head = grouped_tile(pid, num_blocks, num_heads, heads_at_once)
    tl.store(out_ptr + pid * 2, head)
    tl.store(out_ptr + pid * 2 + 1, block)


@pytest.mark.parametrize(("blocks", "heads", "at_once"), [(3, 5, 2), (1, 4, 3), (4, 3, 1), (2, 3, 100)])
def test_grouped_tiles_finish_a_group_of_heads_block_by_block(blocks: int, heads: int, at_once: int) -> None:
    out = torch.full((blocks * heads, 2), -1, dtype=torch.int32)
    _grouped_kernel[(blocks * heads,)](out, blocks, heads, at_once)
    groups = [range(first, min(first + at_once, heads)) for first in range(0, heads, at_once)]
    assert out.tolist() == [[head, block] for group in groups for block in range(blocks) for head in group]


@triton.jit
def _order_kernel(out_ptr, R: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, longest_first(pid, tl.num_programs(0), R))


def test_longest_first() -> None:
    out = torch.empty(5, dtype=torch.int32)
    _order_kernel[(5,)](out, R=True)
    assert out.tolist() == [4, 3, 2, 1, 0]
    _order_kernel[(5,)](out, R=False)
    assert out.tolist() == [0, 1, 2, 3, 4]


@triton.jit
def _divided_kernel(out_ptr, a_ptr, near_ptr, number, N: tl.constexpr):
    at, n = tl.arange(0, N), tl.cast(number, tl.int32)
    of_n, a = functions.divisor(n), tl.load(a_ptr + at)
    tl.store(out_ptr + at, functions.index_div(a, of_n[0], of_n[1], of_n[2], of_n[3], of_n[4]))
    tl.store(out_ptr + N + at, functions.index_rem(a, of_n[0], of_n[1], of_n[2], of_n[3], of_n[4]))
    tl.store(out_ptr + 2 * N + at, functions.is_within(a, tl.load(near_ptr + at), n).to(tl.int32))


def test_indices_are_divided_and_compared_exactly() -> None:
    """Around multiples of the divisor, where a multiplier that is one off shows, up to the greatest index."""
    make, count = torch.Generator().manual_seed(0), 256
    near_powers = [2**n + more for n in range(1, 30) for more in (-1, 0, 1)]
    drawn = [int(torch.randint(1, 2 ** (2 + n % 28), (), generator=make)) for n in range(60)]
    for n in [*near_powers, *drawn, *(-x for x in (1, 2, 3, 7, 128, 1000003))]:
        size = abs(n)
        most = 2**30 - 1 - size
        multiples = torch.randint(0, max(most // size, 1), (count,), generator=make) * size
        a = (multiples + torch.randint(-1, 2, (count,), generator=make)).clamp(0, most)
        a[:8], a[8:16] = torch.arange(8).clamp(max=most), most - torch.arange(8).clamp(max=most)
        near = a + n * torch.randint(-1, 2, (count,), generator=make) + torch.randint(-1, 2, (count,), generator=make)
        out = torch.empty(3, count, dtype=torch.int32)
        _divided_kernel[(1,)](out, a.int(), near.int(), n, N=count)
        want = torch.stack((torch.div(a, n, rounding_mode="floor"), a % n, ((a - near).abs() <= n).long()))
        assert torch.equal(out.long(), want), n
