"""Every configuration of the Hopper forward that a sweep may choose gives the same bits, in the emulator."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward import launch
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, assert_forward_right, build
from tests.slow import named, slow_but

# Lengths at, before and past the ends of tiles and blocks; the first launch of a program may find it without a tile.
CASES = (
    Case("full", batch=2, seqlen_q=260, seqlen_k=390, head_dim=64),
    Case("causal", batch=2, seqlen_q=513, seqlen_k=513, heads=3, kv_heads=1, head_dim=64, causal=True),
    Case("causal_longer_q", batch=1, seqlen_q=400, seqlen_k=130, head_dim=64, causal=True, sinks=True),
    Case("causal_128", batch=1, seqlen_q=384, seqlen_k=384, heads=4, kv_heads=2, head_dim=128, causal=True),
    Case("window_128", batch=1, seqlen_q=300, seqlen_k=420, head_dim=128, window=(130, 20), softcap=5.0),
    Case("full_256", batch=1, seqlen_q=130, seqlen_k=200, head_dim=256),
    Case("causal_256", batch=1, seqlen_q=200, seqlen_k=200, heads=2, kv_heads=1, head_dim=256, causal=True),
    Case("varlen_64", batch=4, lengths=((200, 200), (1, 400), (0, 7), (130, 130)), head_dim=64, causal=True, spare=70),
    Case("full_96", batch=1, seqlen_q=270, seqlen_k=390, head_dim=96, head_dim_v=88),
    Case("causal_80", batch=1, seqlen_q=270, seqlen_k=330, heads=2, kv_heads=1, head_dim=80, causal=True),
    Case(
        "varlen_96", batch=4, lengths=((130, 300), (0, 7), (200, 0), (140, 140)), head_dim=96, causal=True, sinks=True
    ),
    Case("causal_192", batch=1, seqlen_q=300, seqlen_k=350, heads=2, kv_heads=1, head_dim=192, causal=True, sinks=True),
    Case("causal_192_128", batch=2, seqlen_q=200, seqlen_k=200, head_dim=192, head_dim_v=128, causal=True),
    Case(
        "window_160", batch=1, seqlen_q=200, seqlen_k=270, head_dim=136, head_dim_v=160, window=(130, 20), softcap=5.0
    ),
    Case("varlen_128", batch=3, lengths=((130, 260), (200, 20), (64, 128)), head_dim=128, window=(50, 0), sinks=True),
)

# Heads of a group: powers of two or not, more or fewer than strips of a tile; strips that sequences end in.
GROUPS = (
    Case("full", batch=2, seqlen_q=60, seqlen_k=390, heads=6, kv_heads=2, head_dim=64),
    Case("causal", batch=2, seqlen_q=113, seqlen_k=113, heads=2, kv_heads=1, head_dim=64, causal=True),
    Case("sinks_128", batch=1, seqlen_q=133, seqlen_k=213, heads=8, kv_heads=1, head_dim=128, causal=True, sinks=True),
    Case("full_96", batch=1, seqlen_q=30, seqlen_k=200, heads=14, kv_heads=2, head_dim=96, head_dim_v=88),
    Case("window_192", batch=1, seqlen_q=100, seqlen_k=300, heads=10, kv_heads=2, head_dim=192, window=(50, 20),
         softcap=5.0),
    Case("full_256", batch=1, seqlen_q=9, seqlen_k=200, heads=17, kv_heads=1, head_dim=256),
    Case("varlen_64", batch=4, lengths=((200, 200), (1, 400), (0, 7), (130, 130)), heads=4, kv_heads=2, head_dim=64,
         causal=True, spare=70),
    Case("varlen_128", batch=3, lengths=((130, 260), (20, 20), (64, 128)), heads=6, kv_heads=2, head_dim=128,
         window=(50, 0), sinks=True, spare=5),
)  # fmt: skip


def _variants(case: Case) -> list[tiles.ForwardTiles]:
    widths = tiles.widths(case.head_dim, case.head_dim_v or case.head_dim)
    table = {tiles.TWO_WARPGROUPS[widths]} | ({tiles.THREE_WARPGROUPS_64} if widths == (64, 64) else set())
    table |= {tiles.HELD_96} if widths == (96, 128) else set()
    table |= {dataclasses.replace(c, out_stages=1) for c in table}
    table |= {dataclasses.replace(c, overlap=False) for c in table}
    table |= {dataclasses.replace(c, dynamic=True, tile_stages=2) for c in table}
    if widths == (64, 64):
        table |= {dataclasses.replace(c, q_stages=3, tile_stages=4) for c in table if c.dynamic and c.out_stages == 1}
        one = tiles.ONE_WARPGROUP_64
        table |= {one, dataclasses.replace(one, dynamic=True, tile_stages=3)}
    return sorted(table, key=str)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", slow_but(CASES, named("full_256", "causal_longer_q", "varlen_128")), ids=str)
def test_bits_do_not_depend_on_the_configuration(case: Case) -> None:
    call = build(case, torch.bfloat16)
    first = None
    for seed, config in enumerate(_variants(case)):
        with on_cpu(seed, 1 + seed % 5), torch.no_grad():
            out, lse = launch.plan(call.problem, call.tensors, config)(call.tensors)
        if first is None:
            assert_forward_right(call, out, lse)
            first = out, lse
        assert torch.equal(out, first[0]), config
        assert torch.equal(lse, first[1]), config


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", slow_but(GROUPS, named("causal", "full_96", "varlen_128")), ids=str)
def test_bits_do_not_depend_on_what_shares_a_tile(case: Case) -> None:
    call = build(case, torch.bfloat16)
    alone = tiles.TWO_WARPGROUPS[tiles.widths(call.problem.head_dim, call.problem.head_dim_v)]
    table = [tiles.with_pack_gqa(alone, strip) for strip in (8, 16, 32)]
    table.append(dataclasses.replace(table[0], dynamic=True, tile_stages=2))
    if case.head_dim == 64 and case.window == (None, None):
        table.append(tiles.with_pack_gqa(tiles.THREE_WARPGROUPS_64, 16))
    with on_cpu(0, 3), torch.no_grad():
        out, lse = launch.plan(call.problem, call.tensors, alone)(call.tensors)
    assert_forward_right(call, out, lse)
    for seed, config in enumerate(table):
        with on_cpu(seed, 1 + seed % 4), torch.no_grad():
            got, got_lse = launch.plan(call.problem, call.tensors, config)(call.tensors)
        assert torch.equal(got, out), config
        assert torch.equal(got_lse, lse), config


@pytest.mark.long
@pytest.mark.parametrize("num_sms", slow_but([1, 3, 50], lambda n: n == 3))
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("causal", "full_256", "varlen_64")], ids=str)
def test_the_counter_of_tiles_is_left_at_zero(case: Case, num_sms: int) -> None:
    call = build(case, torch.bfloat16)
    config = dataclasses.replace(tiles.choose(call.problem), dynamic=True)
    for seed in range(3):
        with on_cpu(seed, num_sms), torch.no_grad():
            launch.plan(call.problem, call.tensors, config)(call.tensors)
        counter = launch.counter(call.tensors.q.device, None)
        assert counter.item() == 0
