"""The Hopper backward in the emulator: its variants, its order of sums, and what must not reach a gradient."""

from __future__ import annotations

import zlib
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.hopper.backward import config as backward_tiles
from flashtile.backends.hopper.backward import launch, workspace
from flashtile.core.masks import Band
from flashtile_lab.kernels.hopper import _problem
from tests.backends.hopper.emulated import BACKWARD_TILES, on_cpu
from tests.cases import Case, build, judge


@pytest.mark.one_in(50)
@pytest.mark.parametrize("name", BACKWARD_TILES)
def test_every_variant(name: str) -> None:
    config = BACKWARD_TILES[name]
    dim, dim_v = config.block_d - 8, config.block_dv - 8
    cases = (
        Case("causal", batch=1, seqlen_q=210, seqlen_k=270, head_dim=dim, head_dim_v=dim_v, causal=True, kv_heads=1),
        Case("varlen", batch=2, lengths=((200, 130), (70, 260)), head_dim=dim, head_dim_v=dim_v, heads=1, kv_heads=1,
             window=(90, 30), softcap=9.0),
    )  # fmt: skip
    # Pairs of programs get no packed sequences.
    for case in cases[: 1 if config.pairs else 2]:
        with on_cpu(zlib.crc32(name.encode()), 2, backward=config):
            judge(build(case, torch.bfloat16), "hopper")


# Programs that wait for each other take the emulator long.
ORDERED = (
    Case("full", batch=1, seqlen_q=200, seqlen_k=300, head_dim=64),
    Case("causal", batch=1, seqlen_q=260, seqlen_k=300, head_dim=128, heads=2, kv_heads=1, causal=True),
    Case("window_left", batch=1, seqlen_q=300, seqlen_k=300, head_dim=128, heads=1, kv_heads=1, window=(100, None)),
    Case("causal_96", batch=1, seqlen_q=200, seqlen_k=300, head_dim=96, heads=2, kv_heads=1, causal=True),
    Case("latent", batch=1, seqlen_q=200, seqlen_k=300, head_dim=192, head_dim_v=128, kv_heads=1, causal=True),
    Case("varlen_256", batch=2, lengths=((130, 150), (70, 100)), head_dim=256, heads=1, kv_heads=1, window=(100, 0)),
)


def _gradients(case: Case, seed: int, num_sms: int) -> list[torch.Tensor]:
    with on_cpu(seed, num_sms, ordered_sums=True):
        call = build(case, torch.bfloat16)
        call.keywords["deterministic"] = True
        out, _ = call.run("hopper")
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
        return list(torch.autograd.grad(out, list(call.leaves.values()), weight))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_deterministic_bits_depend_neither_on_the_order_of_events_nor_on_the_programs(case: Case) -> None:
    first = _gradients(case, 0, 1)
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in first)
    for seed, num_sms in ((1, 3), (2, 4)):
        assert all(torch.equal(a, b) for a, b in zip(first, _gradients(case, seed, num_sms), strict=True))


@pytest.mark.long
def test_deterministic_bits_of_split_groups() -> None:
    """Each split has sums of dk and dv of its own; added to one, they would depend on which of three comes first."""
    case = Case("causal", batch=1, seqlen_q=130, seqlen_k=150, head_dim=64, heads=6, kv_heads=1, causal=True)
    with mock.patch.object(workspace, "gqa_splits", lambda *args: 3):
        first = _gradients(case, 0, 1)
        for seed, num_sms in ((1, 3), (2, 4), (3, 6)):
            assert all(torch.equal(a, b) for a, b in zip(first, _gradients(case, seed, num_sms), strict=True))


@pytest.mark.long
def test_sums_are_in_any_order_unless_asked_for() -> None:
    """Otherwise the test before this one shows nothing."""
    case = Case("full", batch=1, seqlen_q=300, seqlen_k=900, head_dim=64)
    bits = set()
    for seed in range(12):
        with on_cpu(seed, 8):
            call = build(case, torch.bfloat16)
            out, _ = call.run("hopper")
            (dq,) = torch.autograd.grad((out.float() ** 2).sum(), [call.leaves["q"]])
            bits.add(dq.view(torch.int16).numpy().tobytes())
        if len(bits) > 1:
            return
    pytest.fail("every order gave the same bits")


@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_keys_past_the_end_weigh_nothing(dim: int) -> None:
    """Where all scores are far below 0, a key of zeros would have a probability of infinity."""
    call = build(Case("full", batch=1, seqlen_q=300, seqlen_k=150, heads=1, kv_heads=1, head_dim=dim), torch.bfloat16)
    with torch.no_grad():
        call.leaves["q"].add_(10.0)
        call.leaves["k"].sub_(10.0)
    with on_cpu():
        judge(call, "hopper")


SPLIT = (
    (2, Case("full", batch=2, seqlen_q=200, seqlen_k=150, head_dim=64, heads=4, kv_heads=2, sinks=True)),
    (3, Case("causal", batch=1, seqlen_q=150, seqlen_k=270, head_dim=120, heads=5, kv_heads=1, causal=True)),
    (2, Case("varlen", batch=3, lengths=((130, 70), (0, 60), (70, 160)), head_dim=64, heads=3, kv_heads=1,
             window=(90, 30), alibi="h")),
    (2, Case("latent", batch=1, seqlen_q=70, seqlen_k=150, head_dim=192, head_dim_v=128, heads=2, kv_heads=1)),
    (3, Case("varlen_256", batch=2, lengths=((70, 90), (100, 70)), head_dim=200, heads=3, kv_heads=1, causal=True)),
    (2, Case("varlen_spare_96", batch=2, lengths=((70, 90), (60, 150)), head_dim=88, heads=4, kv_heads=2, spare=20)),
)  # fmt: skip


@pytest.mark.one_in(20)
@pytest.mark.parametrize(("count", "case"), SPLIT, ids=str)
def test_groups_of_query_heads_have_gqa_splits(count: int, case: Case) -> None:
    used = []
    with mock.patch.object(workspace, "gqa_splits", lambda *args: used.append(args) or count), on_cpu(count):
        judge(build(case, torch.bfloat16), "hopper")
    assert used


def test_sums_in_a_fixed_order_are_added_from_registers() -> None:
    for dim in (96, 128):
        for varlen in (False, True):
            config = backward_tiles.choose(_problem(dim, Band(None, 0), varlen=varlen))
            ordered = backward_tiles.choose(_problem(dim, Band(None, 0), varlen=varlen, deterministic=True))
            assert config.dq_tma and ordered == backward_tiles.in_chain(config) and not ordered.dq_tma


@pytest.mark.parametrize(("dim", "seqlen", "heads"), [(64, 4096, 33), (64, 16384, 32), (96, 4096, 33), (128, 2048, 8),
                                                      (128, 4096, 4), (128, 16384, 1)])  # fmt: skip
def test_heads_at_once_of_sums_in_a_fixed_order(dim: int, seqlen: int, heads: int) -> None:
    for ordered in (True, False):
        p = _problem(dim, Band(), batch=32768 // seqlen, num_heads_q=16, num_heads_kv=16, seqlen_q=seqlen,
                     deterministic=ordered)  # fmt: skip
        found = launch._heads_at_once(p, backward_tiles.choose(p), 16, seqlen, seqlen, 132)
        assert found == (heads if ordered else 1)


def test_few_key_heads_are_split_and_many_are_not() -> None:
    config, full, causal = backward_tiles.BASE_128, Band(), Band(None, 0)

    def chosen(band: Band, batch: int, heads: int, heads_kv: int, seqlen: int) -> int:
        problem = _problem(128, band, batch=batch, num_heads_q=heads, num_heads_kv=heads_kv, seqlen_q=seqlen)
        return workspace.gqa_splits(problem, config, seqlen)

    # 64 tiles for 132 multiprocessors; 128 causal ones, of which the longest is twice the mean; 96, all of 16 heads.
    assert chosen(full, 2, 16, 1, 4096) == 2
    assert chosen(causal, 1, 32, 8, 2048) == 4
    assert chosen(causal, 1, 64, 4, 3000) == 8
    assert chosen(causal, 1, 32, 8, 8192) == chosen(full, 2, 16, 16, 4096) == chosen(full, 128, 16, 1, 4096) == 1
    assert chosen(causal, 1, 64, 8, 8192) == 4
    # Every split has heads.
    for heads in (2, 3, 5, 7, 12, 71):
        count = chosen(causal, 1, heads, 1, 1024)
        assert count > 1 and (count - 1) * -(-heads // count) < heads


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dims", [(40, 80), (64, 128), (128, 64), (192, 96), (160, 200)], ids=str)
def test_any_two_widths(dims: tuple[int, int]) -> None:
    case = Case("causal", batch=1, seqlen_q=130, seqlen_k=150, kv_heads=1, head_dim=dims[0], head_dim_v=dims[1],
                causal=True, lse_grad=True)  # fmt: skip
    with on_cpu():
        judge(build(case, torch.bfloat16), "hopper")


def test_what_is_handed_over_is_rounded_no_more_than_what_it_becomes() -> None:
    """Rounded as coarsely as bfloat16, it would leave errors of dq and dk 1.2 times as large."""
    call = build(Case("full", batch=1, seqlen_q=256, seqlen_k=256, heads=1, kv_heads=1, head_dim=128), torch.bfloat16)
    exact = [x.detach().double()[0, :, 0].requires_grad_() for x in call.leaves.values()]
    q, k, v = exact
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.enable_grad():
        wanted = torch.autograd.grad((q @ k.T / 128**0.5).softmax(1) @ v, exact, weight.double())
    errors = []
    for config in (backward_tiles.BY_GRADIENT_128, backward_tiles.BASE_128):
        with on_cpu(backward=config):
            out, _ = call.run("hopper")
            got = torch.autograd.grad(out, list(call.leaves.values()), weight[None, :, None])
        errors.append([float((a[0, :, 0] - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)])
    for handed_over, kept in zip(*errors, strict=True):
        assert handed_over < 1.05 * kept
