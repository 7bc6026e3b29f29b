"""The host side of the Hopper forward, as far as it can be checked without a GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.gpu.records import geometry
from flashtile.backends.hopper import records
from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward import launch
from flashtile.call.problem import Tensors
from flashtile.core.masks import Band
from flashtile_lab.kernels.hopper import _problem
from tests.problems import banded_problem


def _address(coordinate: tuple[int, ...], strides: list[int]) -> int:
    """What the copy engine adds to the base address, in elements of 2 bytes; addresses have 64 bits."""
    return sum(c * 2 * s for c, s in zip(coordinate, strides, strict=True)) % 2**64 // 2


@pytest.mark.parametrize("start, length, row", [(0, 5, 0), (17, 1, 0), (1000, 300, 299), (2**29, 7, 3)])
def test_packed_geometry_wraps_to_the_row(start: int, length: int, row: int) -> None:
    heads, dim = 6, 72
    shape, strides = geometry((10**9, heads, dim), (heads * dim, dim, 1), True)
    rows = 2**30
    here = (rows, start + length, rows - length + row, 4, 8)
    assert all(c < n for c, n in zip(here, shape, strict=True))
    assert _address(here, strides) == (start + row) * heads * dim + 4 * dim + 8
    past_the_end = rows - length + length
    assert past_the_end >= shape[2]
    assert all(s * 2 % 16 == 0 and s * 2 < 2**40 for s in strides[:-1])


def test_dense_geometry_replaces_strides_of_single_elements() -> None:
    x = torch.empty(1, 9, 1, 40)
    strides = (3, 40, 7, 1)
    assert geometry(tuple(x.shape), strides, False) == ((1, 9, 1, 40), (40, 40, 40, 1))


@pytest.mark.parametrize("head_dim, width", [(8, 64), (64, 64), (72, 96), (96, 96), (128, 128), (136, 160), (168, 192),
                                             (192, 192), (200, 256), (256, 256)])  # fmt: skip
def test_tiles_hold_a_row(head_dim: int, width: int) -> None:
    config = tiles.choose(_problem(head_dim, Band(), head_dim_v=64))
    assert (config.block_d, config.block_dv) == (width, 64)
    config = tiles.choose(_problem(128, Band(), head_dim_v=head_dim))
    assert (config.block_d, config.block_dv) == (128, 128 if width == 96 else width)


def test_what_shares_the_bits_of_queries_in_registers() -> None:
    held, same = tiles.HELD_96, tiles.TWO_WARPGROUPS[96, 128]
    assert (held.block_d, held.block_dv, held.block_m, held.block_n) == (96, 128, same.block_m, same.block_n)
    chosen = [tiles.choose(_problem(dim, Band(), seqlen_q=n)) for dim, n in ((96, 1025), (96, 1024), (80, 4096))]
    chosen.append(tiles.choose(_problem(96, Band(None, 0))))
    assert [(c.q_stages, c.stages) for c in chosen] == [(1, 3), (2, 2), (2, 2), (2, 2)]


def test_configurations_of_a_head_dim_share_what_the_bits_depend_on() -> None:
    same = tiles.TWO_WARPGROUPS[64, 64]
    for other in (tiles.ONE_WARPGROUP_64, tiles.THREE_WARPGROUPS_64):
        assert (other.block_d, other.block_dv, other.block_m, other.block_n) == (64, 64, same.block_m, same.block_n)
    assert all((c.block_d, c.block_dv) == dims for dims, c in tiles.TWO_WARPGROUPS.items())


@pytest.mark.parametrize(
    "change", [{"seqlen_q": 257}, {"seqlen_k": 257}, {"varlen": False}, {"num_heads_q": 32}, {"head_dim": 80},
               {"softcap": 5.0}, {"band": Band(9, 0)}, {"mask": True}, {"alibi": True}, {"dropout_p": 0.1}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_short_packed_sequences_have_programs_of_one_warpgroup(change: dict[str, Any]) -> None:
    problem = _problem(64, Band(None, 0), varlen=True, seqlen_q=256, seqlen_k=256).but(num_heads_q=8, num_heads_kv=8)
    chosen, other = tiles.choose(problem), tiles.choose(problem.but(**change))
    assert (chosen.num_warpgroups, chosen.programs) == (1, 2) and other.num_warpgroups > other.programs == 1


def _meets_edges(config: tiles.ForwardTiles, seqlen_q: int, seqlen_k: int, band: Band) -> bool:
    """Whether a warpgroup keeps some pairs of a block but not all, after its first block from above."""
    rows = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(-(-seqlen_k // config.block_n) * config.block_n)[None]
    keep = (keys < seqlen_k) & (keys <= rows + (10**6 if band.right is None else band.right))
    if band.left is not None:
        keep &= keys >= rows - band.left
    for group in keep.split(config.block_m):
        blocks = [block for block in group.split(config.block_n, dim=1) if block.any()]
        if any(not block.all() for block in blocks[:-1]):
            return True
    return False


@pytest.mark.parametrize("seqlen_q", [1, 33, 130, 200, 1000])
@pytest.mark.parametrize("group", [2, 3, 7, 8, 16, 71])
@pytest.mark.parametrize("strip", [8, 32])
def test_edges_where_heads_share_tiles(strip: int, group: int, seqlen_q: int) -> None:
    config = tiles.with_pack_gqa(tiles.TWO_WARPGROUPS[128, 128], strip)
    strips = torch.arange(-(-seqlen_q // strip) * group)
    positions = (strips // group)[:, None] * strip + torch.arange(strip)
    assert (positions.flatten().clamp(max=seqlen_q).bincount()[:seqlen_q] == group).all()
    for more_keys in (0, 64, 128, 100):
        band, seqlen_k = Band(None, 0), seqlen_q + more_keys
        problem = _problem(128, band, seqlen_q=seqlen_q, seqlen_k=seqlen_k).but(num_heads_q=group, num_heads_kv=1)
        if launch.meets_edges(problem, config, equal_lengths=False):
            continue
        for rows in positions.flatten().split(config.block_m):
            last_keys = rows[rows < seqlen_q] + more_keys
            assert (last_keys // config.block_n).unique().numel() <= 1


def test_heads_share_tiles_where_they_would_be_half_empty() -> None:
    def strip(band: Band = Band(), rows: int | None = None, **changes: Any) -> int:  # noqa: B008
        problem = _problem(128, band, seqlen_q=33, seqlen_k=4096).but(
            **{"num_heads_q": 32, "num_heads_kv": 8} | changes
        )
        return tiles.choose(problem, rows=rows).strip

    assert strip() < 64 and strip(Band(None, 0)) < 64 and strip(Band(100, 0), softcap=5.0) < 64
    # Tiles that are full already, of one head, or written row by row; what is read by row and head.
    assert strip(seqlen_q=4096) == strip(seqlen_q=128, seqlen_k=128) == 64
    assert strip(num_heads_kv=32) == strip(out_dtype=torch.float32) == 64
    assert strip(alibi=True) == strip(mask=True) == strip(bias_dtype=torch.bfloat16) == 64
    # Packed sequences by their mean length, as far as it is known.
    assert strip(varlen=True, batch=8, seqlen_q=4000, rows=8 * 100) < 64
    assert strip(varlen=True, batch=8, seqlen_q=4000, rows=8 * 3000) == strip(varlen=True, seqlen_q=4000) == 64
    # Rows that 32 bits do not count.
    assert strip(num_heads_q=2**14, num_heads_kv=1, batch=3, rows=2**18, varlen=True) == 64


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(None, 64), Band(None, 5), Band(None, -64), Band(70, 0)])
def test_a_loop_without_a_mask_meets_no_edge(band: Band, head_dim: int) -> None:
    for seqlen_q, more_keys in ((300, 0), (300, 64), (300, 32), (130, -64), (200, 128), (500, -63)):
        problem = _problem(head_dim, band, seqlen_q=seqlen_q, seqlen_k=seqlen_q + more_keys)
        config = tiles.choose(problem)
        said = launch.meets_edges(problem, config, equal_lengths=False)
        assert said or not _meets_edges(config, seqlen_q, seqlen_q + more_keys, band)
        # Nor is a mask carried along where lengths need none.
        assert said == (band.left is not None or (band.right is not None and (more_keys + band.right) % 64 != 0))
        packed = problem.but(varlen=True)
        assert launch.meets_edges(packed, config, equal_lengths=False) == (not band.unbounded)
        if band.left is None and (band.right or 0) % 64 == 0:
            assert not launch.meets_edges(packed, config, equal_lengths=True)


def test_boxes_fill_the_parts_of_a_tile() -> None:
    for (block_d, block_dv), config in (*tiles.TWO_WARPGROUPS.items(), ((64, 64), tiles.THREE_WARPGROUPS_64)):
        for varlen in (False, True):
            problem = _problem(block_d, Band(), head_dim_v=block_dv, varlen=varlen)
            made = launch.forward_launch(problem, described_tensors(problem), config)
            call = made.arguments["call"]
            q, k, v, out = (each.desc.box[-1] for each in (call.q, call.k, call.v, made.arguments["output"]))
            assert q == k
            for cols, width in ((q, config.block_d), (v, config.block_dv), (out, config.block_dv)):
                assert cols.bit_count() == 1 and cols >= 32
                assert all(part % cols == 0 for bit in range(9) if (part := width & 1 << bit))


@pytest.mark.gpu
@pytest.mark.parametrize("band", [Band(), Band(None, 0)], ids=str)
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)])
def test_configurations_of_a_head_dim_give_the_same_bits(dim: int, dim_v: int, band: Band) -> None:
    table = [tiles.TWO_WARPGROUPS[dim, dim_v]] + [tiles.THREE_WARPGROUPS_64] * (dim == dim_v == 64)
    table += [dataclasses.replace(c, overlap=False) for c in table]
    table += [tiles.ONE_WARPGROUP_64] * (dim == dim_v == 64)
    table += [dataclasses.replace(c, dynamic=True) for c in table]
    q, k, v = (torch.randn(3, 1500, 8, n, device="cuda", dtype=torch.bfloat16) for n in (dim, dim, dim_v))
    tensors = Tensors(q, k, v)
    problem = banded_problem(tensors, band)
    results = [launch.plan(problem, tensors, config)(tensors) for config in table]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_configs_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        dataclasses.replace(tiles.TWO_WARPGROUPS[128, 128], stages=3)
    with pytest.raises(ValueError, match="registers"):
        dataclasses.replace(tiles.THREE_WARPGROUPS_64, registers=168)
    with pytest.raises(ValueError, match="two buffers"):
        dataclasses.replace(tiles.TWO_WARPGROUPS[64, 64], q_stages=1)
    with pytest.raises(ValueError, match="whole strips"):
        dataclasses.replace(tiles.TWO_WARPGROUPS[128, 128], strip=32)
    with pytest.raises(ValueError, match="whole strips"):
        dataclasses.replace(tiles.TWO_WARPGROUPS[64, 64], strip=24)
    with pytest.raises(ValueError, match="one key block"):
        dataclasses.replace(tiles.THREE_WARPGROUPS_64, block_n=64)


@pytest.mark.parametrize("softmax_scale", [0.25, 0.0, -0.25])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scales_say_what_the_scores_mean(softmax_scale: float, softcap: float) -> None:
    problem = _problem(64, Band()).but(softmax_scale=softmax_scale, softcap=softcap)
    mods = records.plain_mods(problem, described_tensors(problem))
    assert mods.scale_log2 > 0
    for score in (-7.0, 0.3, 20.0):
        exponent = score
        if mods.scores is not None:
            cap = mods.scores[0].operands
            exponent = cap - 2 * cap / (2 ** (score * mods.prescale) + 1)
        elif mods.prescale is not None:
            exponent = score * mods.prescale
        natural = softmax_scale * score
        expected = softcap * math.tanh(natural / softcap) if softcap else natural
        assert exponent * mods.scale_log2 * math.log(2) == pytest.approx(expected, abs=1e-9)
