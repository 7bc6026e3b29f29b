"""The portable kernels as compiled for two architectures, against the oracle: forward and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends import portable as portable_backend
from flashtile.backends.portable.backward import launch
from flashtile.backends.portable.quantized.config import choose
from tests.cases import Case, build, judge
from tests.mods.calls import with_functions
from tests.origins import judge_parts
from tests.ptx import portable
from tests.ptx.machine import Options
from tests.quantization import cases as quantization
from tests.quantization.cases import QuantizedCase
from tests.slow import slow_but
from tests.sums import judge_sums

CASES = (
    Case("causal", batch=1, seqlen_q=140, seqlen_k=160, heads=2, kv_heads=1, head_dim=128, causal=True, lse_grad=True),
    Case("window", batch=1, seqlen_q=90, seqlen_k=150, head_dim=72, head_dim_v=40, window=(60, 9), softcap=5.0),
    Case("varlen", batch=3, lengths=((70, 130), (0, 5), (100, 90)), heads=2, kv_heads=1, head_dim=64, causal=True),
    Case("everything", batch=1, seqlen_q=60, seqlen_k=70, heads=2, kv_heads=1, head_dim=32, causal=True,
         window=(40, 0), softcap=5.0, alibi="bh", mask="bqk", bias="hk", sinks=True, dropout=0.2),
    # Rows of pairs in units of 16 and 8; a bias's gradient over several sequences and heads.
    Case("bias", batch=3, seqlen_q=100, seqlen_k=144, heads=2, kv_heads=1, head_dim=64, bias="hqk"),
    Case("bias_and_mask", batch=2, seqlen_q=70, seqlen_k=72, heads=3, kv_heads=3, head_dim=32, bias="qk", mask="bk",
         causal=True),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in CASES for arch in ("sm_90", "sm_80")],
        lambda each: (each[0].name, each[1]) in (("causal", "sm_80"), ("everything", "sm_90"), ("bias", "sm_90")),
    ),
    ids=str,
)
def test_compiled_kernels_under_the_rule(case: Case, arch: str) -> None:
    with portable.on_cpu(Options(seed=len(case.name)), arch):
        judge(build(case, torch.bfloat16), "portable")


# Tiles of several parts and of the widest columns: these are chosen apart.
FLOAT32 = (
    Case("causal", batch=1, seqlen_q=70, seqlen_k=80, heads=2, kv_heads=1, head_dim=64, causal=True, lse_grad=True),
    Case("128", batch=1, seqlen_q=70, seqlen_k=80, heads=1, kv_heads=1, head_dim=128, causal=True),
    Case("wide", batch=1, seqlen_q=70, seqlen_k=80, heads=1, kv_heads=1, head_dim=256),
    Case("odd", batch=1, seqlen_q=90, seqlen_k=70, head_dim=72, head_dim_v=40, window=(60, 9), softcap=5.0),
    *CASES[3:5],
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in FLOAT32 for arch in ("sm_90", "sm_80")],
        lambda each: each[0].name == "causal",
    ),
    ids=str,
)
def test_float32_by_products_of_bfloat16(case: Case, arch: str) -> None:
    """Under float32's own rule: three products instead of six are three times over it."""
    with portable.on_cpu(Options(seed=len(case.name)), arch):
        judge(build(case, torch.float32), "portable")


# Listed blocks of 16 keys and of 16 rows, and what has tiles of 16 keys without lists, on sm_80.
SIXTEEN = (
    (Case("listed", batch=1, seqlen_q=33, seqlen_k=40, heads=2, kv_heads=1, head_dim=64, dropout=0.5), (32, 16)),
    (Case("listed", batch=1, seqlen_q=33, seqlen_k=33, heads=1, kv_heads=1, head_dim=64, dropout=0.3), (16, 16)),
    (Case("wide", batch=1, seqlen_q=20, seqlen_k=35, heads=1, kv_heads=1, head_dim=320, mask="qk", dropout=0.3), None),
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize(("case", "listed"), SIXTEEN, ids=str)
def test_dropout_in_tiles_of_16(case: Case, listed: tuple[int, int] | None, arch: str) -> None:
    """With a mask in bytes, which Triton takes into account when it lays out the probabilities for their product."""
    call = with_functions(case, None, "random_pairs" if listed else None, torch.bfloat16, frozen=True, listed=listed)
    # Several warps write the same numbers of so small a tile, which a watch would report.
    with portable.on_cpu(Options(seed=2, watch=False), arch):
        judge(call, "portable")


def _gradients(arch: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    q, k, v, dout = tensors
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with portable.on_cpu(Options(seed=1), arch):
        out = flashtile.attention(*inputs, causal=True, backend="portable")
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, inputs, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", slow_but(("sm_90", "sm_80"), lambda arch: arch == "sm_90"))
@pytest.mark.parametrize("value", slow_but((torch.nan, torch.inf), lambda value: value != torch.inf))
def test_float32_that_is_not_finite_as_compiled(value: float, arch: str) -> None:
    """The lower parts of such a number are NaN, whose products Triton takes for 0: the number itself still arrives."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 70, 2, 32) for _ in range(4)]
    clean = _gradients(arch, tensors)
    for place, reached in ((0, slice(17, 18)), (1, slice(17, None)), (2, slice(17, None)), (3, slice(17, 18))):
        dirty = [x.clone() for x in tensors]
        dirty[place][0, 17, 1, 3] = value
        got = _gradients(arch, dirty)
        for name, x in got.items():
            assert torch.equal(x[:, :, 0], clean[name][:, :, 0]), (place, name)
        bad = {name: ~x[0, :, 1].isfinite() for name, x in got.items()}
        if place == 2:
            assert bad["out"][reached, 3].all() and not bad["out"][:, :3].any() and not bad["out"][:, 4:].any()
        if value != torch.inf:
            assert place == 3 or place == 2 or bad["out"][reached].all()
            assert bad["dq"][reached].all()
            assert bad["dk"][:18].all() and (place == 2 or place == 3 or bad["dv"][:18].all())
            assert place != 3 or bad["dv"][:18, 3].all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_of_any_size_as_compiled(scale: float) -> None:
    """The third part of bfloat16 is 2^-16 of a number, so numbers from about 1e-33 on keep their 24 bits."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 70, 2, 32) for _ in range(4))
    plain, scaled = (_gradients("sm_90", [q * s, k / s, v * s, dout]) for s in (1.0, scale))
    for name, factor in (("out", scale), ("dv", 1.0)):
        want = plain[name].double()
        assert (scaled[name].double() / factor - want).norm() < 1e-6 * want.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("arch", slow_but(("sm_90", "sm_80"), lambda arch: arch == "sm_90"))
def test_a_compiled_gradient_of_a_large_bias(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_SUMS", 0)
    with portable.on_cpu(Options(seed=8), arch):
        judge(build(replace(CASES[4], batch=4), torch.bfloat16), "portable")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_gradients_of_compiled_kernels_add_up_in_float32(arch: str) -> None:
    case = Case("varlen", batch=2, lengths=((40, 70), (20, 30)), heads=2, kv_heads=1, head_dim=40, causal=True, spare=5)
    with portable.on_cpu(Options(seed=6), arch):
        judge_sums(portable_backend.BACKEND, case, (21,), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_parts_of_sequences_of_compiled_kernels(arch: str) -> None:
    with portable.on_cpu(Options(seed=7), arch):
        judge_parts(portable_backend.BACKEND, torch.bfloat16, dropout=True, alibi=True)


QUANTIZED = (
    QuantizedCase("causal", ((70, 150),), head_dim=64, heads=2, kv_heads=1, causal=True, shifted=True),
    QuantizedCase("scales", ((70, 150),), head_dim=128, heads=1, kv_heads=1, sinks=True, half=True,
                  scales=("head", "block", "tensor")),
    QuantizedCase("packed", ((70, 140), (0, 3), (30, 20)), packed=True, head_dim=64, window=(40, 3), softcap=4.0,
                  spare=9),
    QuantizedCase("wide", ((40, 150),), head_dim=256, heads=1, kv_heads=1, causal=True),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in QUANTIZED for arch in ("sm_90", "sm_89")],
        lambda each: (each[0].name, each[1]) in (("causal", "sm_89"), ("causal", "sm_90"), ("packed", "sm_90")),
    ),
    ids=str,
)
def test_products_of_8_bits(case: QuantizedCase, arch: str) -> None:
    """The machine's own products and order of P's columns: the roundings are those of the emulation."""
    call = quantization.build(case)
    with portable.on_cpu(Options(seed=len(case.name)), arch):
        quantization.judge(call, "portable")
        out, lse = call.run("portable")
        block_n = choose(call.problem).block_n
    want, want_lse = quantization.emulated(call, block_n)
    assert (out.double() - want).norm() < (torch.finfo(out.dtype).eps + 1e-5) * want.norm()
    exists = want_lse != -torch.inf
    assert (lse.double() - want_lse)[exists].abs().mean() < 1e-5
