"""The Hopper kernels as compiled, against the oracle: forward, gradients, and that what is taken out is missed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flashtile.backends import hopper as hopper_backend
from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward import launch
from flashtile.backends.hopper.quantized import config as quantized_config
from flashtile.ops import dispatch
from tests.cases import Case, build, judge, one_sign
from tests.fuzz.selected import Drawn, with_blocks
from tests.partials import CHAINS, judge_chain
from tests.poison import poisoned_memory
from tests.ptx import hopper
from tests.ptx.launch import Build, Kernels, edited
from tests.ptx.machine import Options
from tests.ptx.text import PtxError
from tests.quantization import cases as quantization
from tests.quantization.cases import QuantizedCase
from tests.slow import slow_but
from tests.sums import judge_sums

CASES = (
    Case("full", batch=1, seqlen_q=200, seqlen_k=150, head_dim=64, lse_grad=True),
    Case("causal", batch=1, seqlen_q=140, seqlen_k=200, heads=2, kv_heads=1, head_dim=128, causal=True),
    Case("window", batch=1, seqlen_q=130, seqlen_k=150, heads=1, kv_heads=1, head_dim=256, window=(60, 9), softcap=5.0),
    Case("varlen", batch=3, lengths=((70, 130), (0, 5), (100, 90)), heads=2, kv_heads=1, head_dim=64, causal=True),
    Case("varlen_mods", batch=2, lengths=((70, 130), (30, 70)), heads=1, kv_heads=1, head_dim=64, causal=True, spare=20,
         alibi="bh", bias="hqk", bias_grad=False, mask="bqk", softcap=5.0, lse_grad=True),
    # No edge behind a first block; a skipped block, with ping-pong; keys that end in another block than the rows.
    Case("causal", batch=1, seqlen_q=200, seqlen_k=264, heads=1, kv_heads=1, head_dim=256, causal=True),
    Case("latent", batch=1, seqlen_q=130, seqlen_k=150, heads=2, kv_heads=1, head_dim=192, head_dim_v=128, causal=True,
         lse_grad=True),
    Case("causal", batch=1, seqlen_q=140, seqlen_k=200, heads=2, kv_heads=1, head_dim=88, causal=True),
    Case("varlen", batch=2, lengths=((70, 130), (100, 30)), heads=1, kv_heads=1, head_dim=160, window=(60, 9)),
    Case("full", batch=1, seqlen_q=130, seqlen_k=70, heads=1, kv_heads=1, head_dim=192),
    # Lines of keys that TMA can read.
    Case("mask", batch=1, seqlen_q=200, seqlen_k=208, heads=2, kv_heads=1, head_dim=64, mask="qk"),
    Case("bias", batch=1, seqlen_q=140, seqlen_k=272, heads=2, kv_heads=1, head_dim=128, causal=True, bias="hqk",
         bias_grad=False),
    Case("mask_of_keys", batch=1, seqlen_q=140, seqlen_k=208, heads=1, kv_heads=1, head_dim=256, mask="bk"),
    # Heads that share tiles.
    Case("group", batch=1, seqlen_q=20, seqlen_k=150, heads=10, kv_heads=2, head_dim=128, causal=True, sinks=True),
    Case("group_varlen", batch=2, lengths=((21, 130), (9, 30)), heads=3, kv_heads=1, head_dim=64, spare=3),
    Case("dropout", batch=2, seqlen_q=130, seqlen_k=150, heads=2, kv_heads=1, head_dim=64, causal=True, dropout=0.2),
    Case("dropout", batch=1, seqlen_q=70, seqlen_k=150, heads=1, kv_heads=1, head_dim=128, dropout=0.3),
    Case("dropout", batch=1, seqlen_q=70, seqlen_k=80, heads=1, kv_heads=1, head_dim=192, dropout=0.3),
)  # fmt: skip


# The first two share their kernels with what is taken out below, and with the sums.
QUICK = {(0, True), (1, False), (3, False), (10, True), (13, False), (15, True)}
RUNS = slow_but(
    [(case, at_wait) for case in CASES for at_wait in (True, False)],
    lambda each: (CASES.index(each[0]), each[1]) in QUICK,
)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("case", "at_wait"), RUNS, ids=str)
def test_compiled_kernels_under_the_rule(case: Case, at_wait: bool) -> None:
    # At head_dim 64 LLVM rounds masked probabilities behind a fence of the backward, which costs time alone.
    strict = case.name != "mask"
    with hopper.on_cpu(Options(seed=len(case.name), product_at_wait=at_wait, strict_fences=strict), 2):
        judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("at_wait", [True, False])
def test_queries_in_registers(at_wait: bool) -> None:
    """As long calls have them."""
    case = Case("full", batch=1, seqlen_q=200, seqlen_k=270, heads=1, kv_heads=1, head_dim=96)
    with hopper.on_cpu(Options(seed=3, product_at_wait=at_wait, strict_fences=True), 1, forward=tiles.HELD_96):
        judge(build(case, torch.bfloat16), "hopper")


QUANTIZED = (
    QuantizedCase("causal", ((140, 300),), head_dim=64, heads=2, kv_heads=1, causal=True, shifted=True),
    QuantizedCase("scales", ((130, 260),), head_dim=128, heads=1, kv_heads=1, sinks=True, half=True,
                  scales=("head", "block", "tensor")),
    QuantizedCase("packed", ((70, 140), (0, 3), (30, 20)), packed=True, head_dim=128, window=(40, 3), softcap=4.0,
                  spare=9),
    QuantizedCase("wide", ((40, 150),), head_dim=256, heads=1, kv_heads=1, causal=True),
    QuantizedCase("blocks", ((200, 400),), head_dim=128, heads=1, kv_heads=1),
    QuantizedCase("eight_bit_output_cut", ((70, 140),), head_dim=128, heads=1, kv_heads=1, out_scale=0.0005),
    QuantizedCase("wide_eight_bit_output", ((40, 150),), head_dim=256, heads=1, kv_heads=1, out_scale=0.004),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", slow_but(QUANTIZED, lambda case: case.name in ("causal", "packed")), ids=str)
def test_products_of_8_bits(case: QuantizedCase) -> None:
    with hopper.on_cpu(Options(seed=len(case.name), product_at_wait=True, strict_fences=True), 2):
        call = quantization.build(case)
        assert not dispatch.reasons("hopper", call.problem, "quantized")
        quantization.judge(call, "hopper")


# Other ways to the same numbers: the product behind the next scores; ping-pong.
WAYS: tuple[dict[str, Any], ...] = (
    {"behind": True},
    {"behind": True, "pingpong": True},
    {"behind": False, "pingpong": True},
)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", slow_but(QUANTIZED[:3], (QUANTIZED[0],).__contains__), ids=str)
def test_ways_to_products_of_8_bits(case: QuantizedCase, way: dict[str, Any]) -> None:
    call = quantization.build(case)
    tiles = dataclasses.replace(quantized_config.choose(call.problem), behind=False, pingpong=False)
    lses = []
    for each in (tiles, dataclasses.replace(tiles, **way)):
        # Plans are forgotten where a machine begins.
        options = Options(seed=3, product_at_wait=True, strict_fences=True)
        with hopper.on_cpu(options, 2), mock.patch.object(quantized_config, "choose", return_value=each):
            quantization.judge(call, "hopper")
            lses.append(call.run("hopper")[1])
    plain, lse = lses
    assert torch.where(plain == lse, 0.0, plain - lse).abs().max() < 1e-6


WANTED = (
    (Case("causal", batch=1, seqlen_q=140, seqlen_k=200, heads=2, kv_heads=1, head_dim=128, causal=True), "q"),
    (Case("full", batch=1, seqlen_q=200, seqlen_k=150, heads=1, kv_heads=1, head_dim=64), "kv"),
    (Case("causal", batch=1, seqlen_q=140, seqlen_k=150, heads=1, kv_heads=1, head_dim=256, causal=True), "v"),
    (Case("varlen", batch=2, lengths=((70, 130), (100, 30)), heads=2, kv_heads=1, head_dim=256), "k"),
    (Case("varlen", batch=2, lengths=((70, 130), (100, 30)), heads=2, kv_heads=1, head_dim=128, window=(60, 9)), "v"),
    (Case("full", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1, head_dim=256), "qv"),
    (Case("full", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1, head_dim=256), "kv"),
    (Case("full", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1, head_dim=96), "qk"),
    (Case("full", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1, head_dim=192, head_dim_v=128), "k"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "names"), slow_but(WANTED, WANTED[1:3].__contains__), ids=str)
def test_some_gradients_of_compiled_kernels(case: Case, names: str) -> None:
    with hopper.on_cpu(Options(seed=len(names), product_at_wait=True, strict_fences=True), 2):
        judge(build(case, torch.bfloat16).wanting(names), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cuts"), slow_but(CHAINS, CHAINS[1:2].__contains__), ids=str)
def test_a_chain_of_partial_results_of_compiled_kernels(case: Case, cuts: tuple[int, ...]) -> None:
    with hopper.on_cpu(Options(seed=3, strict_fences=True), 2), torch.no_grad():
        judge_chain(hopper_backend.BACKEND, case, cuts, torch.bfloat16)


SUMS: tuple[tuple[Case, tuple[int, ...]], ...] = (
    (Case("varlen", batch=3, lengths=((40, 70), (0, 5), (30, 20)), heads=2, kv_heads=1, head_dim=64, causal=True,
          spare=5), (21,)),
    (Case("varlen", batch=2, lengths=((70, 130), (40, 70)), heads=1, kv_heads=1, head_dim=120, lse_grad=True), (60,)),
    (Case("causal", batch=1, seqlen_q=80, seqlen_k=130, heads=1, kv_heads=1, head_dim=200, causal=True), (66,)),
    (Case("full", batch=1, seqlen_q=80, seqlen_k=130, heads=1, kv_heads=1, head_dim=96), (66,)),
    (Case("causal", batch=1, seqlen_q=80, seqlen_k=130, heads=1, kv_heads=1, head_dim=160, causal=True), (66,)),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cuts"), slow_but(SUMS, SUMS[:1].__contains__), ids=str)
def test_gradients_of_compiled_kernels_add_up_in_float32(case: Case, cuts: tuple[int, ...]) -> None:
    with hopper.on_cpu(Options(seed=5, product_at_wait=True, strict_fences=True), 2), poisoned_memory():
        judge_sums(hopper_backend.BACKEND, case, cuts, torch.bfloat16, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_all_of_one_sign(sign: float) -> None:
    case = Case("full", batch=1, seqlen_q=70, seqlen_k=300, heads=1, kv_heads=1, head_dim=64)
    with hopper.on_cpu(Options(), 1):
        judge(one_sign(build(case, torch.float16), sign), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize(("num_sms", "dim"), slow_but([(1, 128), (3, 128), (3, 192)], lambda each: each == (3, 128)))
def test_sums_in_a_fixed_order_end(num_sms: int, dim: int) -> None:
    """Several row blocks a tile and several tiles a row block: dq_order must advance."""
    case = Case("causal", batch=1, seqlen_q=260, seqlen_k=300, head_dim=dim, heads=2, kv_heads=1, causal=True)
    with hopper.on_cpu(Options(seed=num_sms, ordered_sums=True), num_sms):
        call = build(case, torch.bfloat16)
        call.keywords["deterministic"] = True
        judge(call, "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_sequence_of_nan_stays_within_its_coordinates(seed: int) -> None:
    """A sequence of NaN between two others, which it must not reach.

    Rows and coordinates of a packed sequence are far apart, see ``tiles.PACKED_ROWS``.
    """
    case = Case("varlen", batch=3, lengths=((40, 133), (150, 150), (20, 60)), heads=1, kv_heads=1, head_dim=64,
                causal=True)  # fmt: skip
    call = build(case, torch.bfloat16)
    tensors = dataclasses.replace(call.tensors, **{name: x.detach().clone() for name, x in call.leaves.items()})
    with hopper.on_cpu(Options(seed=seed), 1 + seed), poisoned_memory():
        plan = launch.plan(call.problem, tensors)
        clean, clean_lse = plan(tensors)
        for x, start in ((tensors.q, 40), (tensors.k, 133), (tensors.v, 133)):
            x[start : start + 150] = torch.nan
        out, lse = plan(tensors)
    assert out[40:190].isnan().all() and lse[:, 40:190].isnan().all()
    for own in (slice(0, 40), slice(190, None)):
        assert torch.equal(out[own], clean[own]) and torch.equal(lse[:, own], clean_lse[:, own])
        assert clean[own].isfinite().all()


@pytest.mark.slow
def test_what_tells_warps_what_to_run_has_the_line_that_the_sanitizers_judge_knows() -> None:
    """Bytes of what each warp shall run, read one by one, and written as constants: see ``benchmarks.sanitizer``."""
    built: dict[str, tuple[str, Path]] = {}

    def remember(self: Kernels, kernel: object, *rest: object) -> tuple[Build, list[object]]:
        made, values = original(self, kernel, *rest)
        function = getattr(kernel, "fn")  # noqa: B009
        built[function.__name__] = made.ptx, Path(function.__code__.co_filename)
        return made, values

    original = Kernels.build
    case = Case("causal", batch=1, seqlen_q=100, seqlen_k=100, heads=1, kv_heads=1, head_dim=64, causal=True)
    with hopper.on_cpu(Options(), 1), mock.patch.object(Kernels, "build", remember):
        out, _ = (call := build(case, torch.bfloat16)).run("hopper")
        torch.autograd.grad(out.float().sum(), list(call.leaves.values()))
    for name in ("attention_forward", "attention_backward"):
        ptx, path = built[name]
        lines = path.read_text().splitlines()
        start = next(number for number, line in enumerate(lines, start=1) if line.startswith(f"def {name}("))
        place = "/".join(path.parts[-2:])
        files = {number for number, file in re.findall(r'\.file\s+(\d+) "([^"]+)"', ptx) if file.endswith(place)}
        found: dict[str, set[int]] = {"ld": set(), "st": set()}
        number = line = ""
        for text in ptx.splitlines():
            if at := re.match(r"\s*\.loc\s+(\d+) (\d+)", text):
                number, line = at.groups()
            elif at := re.search(r"(ld)\.shared\.b8|(st)\.shared\.\S+\s+\[global_smem\+\d+\], \{[-0-9, ]+\}", text):
                assert number in files, text
                found[at[1] or at[2]].add(int(line))
        assert found["ld"] == {start} and start in found["st"], (name, found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "place", "message"),
    slow_but([
        (r"fence\.proxy\.async\.shared::cta;", 1, "without a proxy fence"),
        (r"wgmma\.wait_group\.sync\.aligned 1;", 0, "line"),
        (r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", -1, "deadlock"),
        (r"wgmma\.fence\.sync\.aligned;", 2, "wgmma.fence"),
    ], lambda each: each[2] in ("deadlock", "without a proxy fence")),
)  # fmt: skip
def test_what_is_taken_out_is_missed(monkeypatch: pytest.MonkeyPatch, pattern: str, place: int, message: str) -> None:
    case = Case("full", batch=1, seqlen_q=600, seqlen_k=300, heads=1, kv_heads=1, head_dim=64)
    with hopper.on_cpu(Options(strict_fences=True), 1):
        out, _ = (call := build(case, torch.bfloat16)).run("hopper")
        monkeypatch.setattr(Kernels, "build", edited("attention_backward", pattern, "", place))
        with pytest.raises((PtxError, RuntimeError), match=message):
            torch.autograd.grad(out.float().sum(), list(call.leaves.values()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    slow_but([
        (r"(atom\.global\.gpu\.)release(\.add\.u32)", r"\1relaxed\2"),
        (r"(ld\.global\.gpu\.)acquire", r"\1relaxed"),
        (r"(atom\.global\.)gpu(\.release\.add\.u32)", r"\1cta\2"),
    ], lambda each: "release(" in each[0]),
)  # fmt: skip
def test_a_dq_order_that_orders_nothing_is_missed(
    monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str
) -> None:
    case = Case("causal", batch=1, seqlen_q=70, seqlen_k=270, head_dim=128, heads=1, kv_heads=1, causal=True)
    with hopper.on_cpu(Options(ordered_sums=True), 3):
        call = build(case, torch.bfloat16)
        call.keywords["deterministic"] = True
        out, _ = call.run("hopper")
        monkeypatch.setattr(Kernels, "build", edited("attention_backward", pattern, replacement))
        with pytest.raises(PtxError, match="race: .* writes byte"):
            torch.autograd.grad(out.float().sum(), list(call.leaves.values()))


# Two programs a multiprocessor forward, dq by rows, dk and dv without sums of dq; tiles that take turns in each ring.
BLOCKS = Drawn(
    1, "blocks", Case("blocks", batch=1, seqlen_q=300, seqlen_k=300, heads=1, kv_heads=1, head_dim=64), torch.bfloat16,
    4, block=(64, 64),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("at_wait", [True, False])
def test_lists_of_small_blocks(at_wait: bool) -> None:
    with hopper.on_cpu(Options(seed=3, product_at_wait=at_wait, strict_fences=True), 1):
        judge(with_blocks(BLOCKS), "hopper")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "pattern", "place", "message"),
    [
        ("attention_forward", r"cp\.async\.bulk\.wait_group\.read\s+0;", 0, "race: .* which a copy of warp"),
        ("attention_backward_dq", r"cp\.async\.bulk\.wait_group\.read\s+0;", 0, "race: .* which a copy of warp"),
        ("attention_backward", r"fence\.proxy\.async\.shared::cta;", 1, "without a proxy fence"),
    ],
)
def test_what_is_taken_out_of_kernels_for_small_blocks_is_missed(
    monkeypatch: pytest.MonkeyPatch, kernel: str, pattern: str, place: int, message: str
) -> None:
    monkeypatch.setattr(Kernels, "build", edited(kernel, pattern, "", place))
    with hopper.on_cpu(Options(seed=3, strict_fences=True), 1), pytest.raises(PtxError, match=message):
        judge(with_blocks(BLOCKS), "hopper")
