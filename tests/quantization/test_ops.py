"""The operator of quantized calls, and the public functions above it: opcheck, compile, plans, settings, compat."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import InvalidInputError, Quantized
from flashtile.api.keywords import Asked
from flashtile.call.arguments import Plain
from flashtile.call.backend import Build, Direction
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import FLOAT8, TENSORS, tensor_values
from flashtile.compat import flash_attn_3 as fa3
from flashtile.ops import dispatch, plans
from flashtile.ops import operators as ops
from flashtile.ops.operation import PlannedCall
from tests.quantization.cases import CASES, QuantizedCall, build

_NAMED = {case.name: case for case in CASES}


def call_of(name: str) -> QuantizedCall:
    """A case whose numbers are all finite, as opcheck needs them."""
    call = build(_NAMED[name])
    finite = {name: _finite(getattr(call.tensors, name)) for name in TENSORS}
    return dataclasses.replace(call, tensors=dataclasses.replace(call.tensors, **finite))


def _finite(x: Tensor | None) -> Tensor | None:
    if x is None or x.dtype == torch.int32:
        return x
    return x.float().nan_to_num(0.0).to(x.dtype) if x.dtype == FLOAT8 else x.nan_to_num(0.0)


def inputs(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(2, rows, heads, 32, generator=make).to(dtype) for rows, heads in ((150, 4), (170, 2), (170, 2))]


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["causal", "blocks_causal", "mixed_scales", "packed_spare", "everything", "no_keys"])
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, close = call_of(name), torch.allclose

    def same(a: Tensor, b: Tensor, **keywords: Any) -> bool:
        """opcheck asks whether an input was changed; PyTorch does not compare 8-bit floats."""
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == FLOAT8 else close(a, b, **keywords)

    monkeypatch.setattr(torch, "allclose", same)
    torch.library.opcheck(
        torch.ops.flashtile.attention_quantized.default, ops.QUANTIZED.flatten(call.tensors, call.options)
    )


def test_fake_tensors_have_the_real_shapes_and_strides() -> None:
    for name in ("wider_v", "packed_spare", "scale"):
        call = build(_NAMED[name])
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(x) for n, x in vars(call.tensors).items() if x is not None}
            shown = ops.attend_quantized(dataclasses.replace(call.tensors, **fake), call.options)
        assert [(x.shape, x.stride(), x.dtype) for x in shown] == [
            (x.shape, x.stride(), x.dtype) for x in call.run("cpu")
        ]


def test_a_quantized_is_a_call() -> None:
    q, k, v = inputs()
    record = flashtile.quantize(q, k, v)
    sinks = torch.randn(4)
    for keywords in (
        dict(causal=True), dict(window_size=(30, 5), softmax_scale=0.3), dict(sinks=sinks), dict(deterministic=True),
    ):  # fmt: skip
        want, want_lse = flashtile.attention(q, k, v, return_lse=True, **keywords)
        out, lse = flashtile.attention(record, return_lse=True, **keywords)
        assert out.dtype == torch.bfloat16 and off(out, want) < 0.06 and off(lse, want_lse) < 0.01
        assert torch.equal(flashtile.attention(record, **keywords), out)
        at_once, lse_at_once = flashtile.attention(q, k, v, precision="fp8", return_lse=True, **keywords)
        assert torch.equal(at_once, out) and torch.equal(lse_at_once, lse)


def test_packed_sequences_are_the_dense_ones() -> None:
    q, k, v = inputs()
    rows_q, rows_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (150, 170))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    record = flashtile.quantize(*packed, cu_seqlens_q=rows_q, cu_seqlens_k=rows_k, max_seqlen_q=150, max_seqlen_k=170)
    out, lse = flashtile.attention_varlen(record, causal=True, return_lse=True)
    want, want_lse = flashtile.attention(flashtile.quantize(q, k, v), causal=True, return_lse=True)
    torch.testing.assert_close(out.view_as(want), want)
    torch.testing.assert_close(lse, want_lse.transpose(0, 1).flatten(1))
    at_once = flashtile.attention_varlen(*packed, rows_q, rows_k, 150, 170, causal=True, precision="fp8")
    assert torch.equal(at_once, out)


def test_softcap_leaves_the_keys_mean() -> None:
    q, k, v = inputs()
    want = flashtile.attention(q, k + 3.0, v, softcap=2.0)
    out = flashtile.attention(q, k + 3.0, v, softcap=2.0, precision="fp8")
    record = flashtile.quantize(q, k + 3.0, v, smooth_k=False)
    assert record.shift is None and torch.equal(flashtile.attention(record, softcap=2.0), out) and off(out, want) < 0.08
    assert flashtile.quantize(q, k, v).shift is not None


def test_output_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        tensors = inputs(dtype=dtype)
        assert flashtile.attention(*tensors, precision="fp8").dtype == dtype
        assert flashtile.attention(flashtile.quantize(*tensors)).dtype == dtype
    record = dataclasses.replace(flashtile.quantize(*inputs()), dtype=torch.float16)
    assert flashtile.attention(record).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = [x.float() for x in inputs()]
        assert torch.equal(flashtile.attention(*wide, precision="fp8"), flashtile.attention(*inputs(), precision="fp8"))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend: str) -> None:
    torch._dynamo.reset()

    def double(record: Quantized, sinks: Tensor) -> Tensor:
        out, lse = flashtile.attention(record, causal=True, sinks=sinks, return_lse=True)
        return out * 2 + lse.transpose(1, 2)[..., None]

    compiled, sinks = torch.compile(double, fullgraph=True, backend=backend), torch.randn(4)
    for rows in (150, 40, 129):
        q, k, v = inputs(rows)
        record = flashtile.quantize(q[:, :rows], k[:, :rows], v[:, :rows])
        torch.testing.assert_close(compiled(record, sinks), double(record, sinks))


def test_exports() -> None:
    record = flashtile.quantize(*inputs())

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flashtile.attention(dataclasses.replace(record, q=q), causal=True)

    with torch.no_grad():
        module = torch.export.export(Layer(), (record.q,)).module()
        other = flashtile.quantize(*inputs(1)).q
        assert torch.equal(module(other), Layer()(other))


def test_the_profiler_and_the_flop_counter_know_the_operator() -> None:
    record = flashtile.quantize(*inputs())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashtile.attention(record)
    assert "flashtile::attention_quantized" in {event.key for event in profile.key_averages()}
    for keywords, pairs in (({}, 150 * 170), (dict(causal=True), 150 * 170 - 149 * 150 // 2)):
        with FlopCounterMode(display=False) as counter:
            flashtile.attention(record, **keywords)
        assert counter.get_total_flops() == 2 * 2 * 4 * pairs * (32 + 32)


def test_plans_are_kept_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = type(plans.kept)()
    monkeypatch.setattr(plans, "kept", known)
    q, k, v = inputs()
    base = flashtile.quantize(q, k, v)
    count = 0
    for record, keywords in (
        (base, {}), (flashtile.quantize(*inputs(3)), {}), (base, dict(causal=True)), (base, dict(softmax_scale=0.1)),
        (base, dict(sinks=torch.zeros(4))), (flashtile.quantize(q[:, :149], k, v), {}), (base, dict(backend="cpu")),
        (flashtile.quantize(q, k, v, smooth_k=False), {}), (flashtile.quantize(q, k, v, scales="head"), {}),
        (flashtile.quantize(q, k, v, scales="tensor"), {}), (dataclasses.replace(base, dtype=torch.float16), {}),
    ):  # fmt: skip
        count += record is not base or bool(keywords) or count == 0
        if record.shift is not None and record.scales == "block" and not keywords and record.q.shape == base.q.shape:
            count -= record.dtype == base.dtype and record is not base  # other values alone
        for _ in range(2):
            flashtile.attention(record, **keywords)
            assert sum(type(x) is PlannedCall for x in known.values()) == count, keywords
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with pytest.raises(flashtile.UnsupportedError, match="hopper"):
        flashtile.attention(base)


def test_tensors_of_any_strides() -> None:
    for name in ("blocks_causal", "packed_spare", "everything"):
        call = build(_NAMED[name])
        apart = {
            n: torch.stack([x.view(torch.uint8) if x.dtype == FLOAT8 else x] * 2, -1)[..., 0]
            for n, x in zip(TENSORS, tensor_values(call.tensors), strict=True)
            if x is not None
        }
        apart = {n: x.view(torch.int8).view(FLOAT8) if x.dtype == torch.uint8 else x for n, x in apart.items()}
        other = dataclasses.replace(call, tensors=dataclasses.replace(call.tensors, **apart))
        assert not other.tensors.q.is_contiguous()
        for got, want in zip(other.run("cpu"), call.run("cpu"), strict=True):
            assert torch.equal(got, want)


def test_values_are_checked_on_a_cpu_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    call = build(_NAMED["packed"])
    asked: list[Any] = []
    on_gpu = call.problem.but(device_type="cuda")
    plan = ops.QUANTIZED.guarded(on_gpu, lambda t: asked.append(t) or t.q)
    for value in (0.0, -1.0, torch.inf, torch.nan):
        scale = call.tensors.k_scale.clone()
        scale[-1, 0] = value
        bad = dataclasses.replace(call.tensors, k_scale=scale)
        with pytest.raises(InvalidInputError, match="^k_scale: has .*, must be positive and finite$"):
            ops.attend_quantized(bad, call.options)
        asked.clear()
        for text, is_checked in (("", False), ("0", False), ("1", True)):
            monkeypatch.setenv("FLASHTILE_CHECK", text)
            if is_checked:
                with pytest.raises(InvalidInputError, match="^k_scale: has"):
                    plan(bad)
            else:
                plan(bad)
        assert len(asked) == 2


def test_explain_says_who_runs_a_call() -> None:
    q, k, v = inputs()
    text = flashtile.explain(flashtile.quantize(q, k, v), causal=True)
    assert "float8_e4m3fn to bfloat16 on cpu, batch 2, 150 x 170, 4 heads over 2" in text
    assert "quantized: cpu: values in float32, " in text and "not portable: " in text and "backward" not in text
    assert flashtile.explain(q, k, v, causal=True, precision="fp8") == text
    text = flashtile.explain(q.clone().requires_grad_(), k, v, precision="fp8", sinks=torch.zeros(4))
    assert "quantized: cpu: " in text and "backward: cpu: " in text and "forward: " not in text


def test_warm_up_builds_what_a_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Direction, Problem, Any]] = []

    def builds(self: object, problem: Problem, tensors: Any, direction: Direction) -> list[Build]:
        seen.append((direction, problem, tensors))
        return [Build(direction, lambda: None)]

    monkeypatch.setattr(type(dispatch.backend("cpu")), "builds", builds)
    q, k, v = (x.to("meta") for x in inputs())
    record = flashtile.quantize(*inputs())
    for call, directions in (
        (dict(q=record, causal=True), ["quantized"]), (dict(q=q, k=k, v=v, precision="fp8"), ["quantized", "backward"]),
        (dict(q=q, k=k, v=v, precision="fp8", backward=False), ["quantized"]),
    ):  # fmt: skip
        seen.clear()
        times = flashtile.warm_up(**call, device="cpu")
        assert [t.direction for t in times] == [direction for direction, *_ in seen] == directions
        _, problem, tensors = seen[0]
        assert problem.dtype == FLOAT8 and problem.device_type == "cpu" and problem.out_dtype == torch.bfloat16
        assert all(x is None or x.is_meta for x in tensor_values(tensors)) and tensors.v.shape == record.v.shape


def test_warm_up_builds_the_kernels_that_round(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from flashtile.api import quantized as api
    from flashtile.backends.gpu import build

    monkeypatch.setattr(build, "builds", lambda launches: [Build(name, lambda: None) for name in launches])
    given = Tensors(*(x.to("meta") for x in inputs()))
    asked, device = Asked("fp8", True), torch.device("cuda")
    names = [build.name for build in api.rounding_builds(given, asked, device)]
    assert {"quantize_q", "quantize_k", "quantize_v", "mean_of_keys"} <= set(names)
    capped = asked._replace(plain=Plain(softcap=9.0))
    assert "mean_of_keys" not in [build.name for build in api.rounding_builds(given, capped, device)]
    assert api.rounding_builds(given, asked, torch.device("cpu")) == []
    record = dataclasses.replace(given, q=flashtile.quantize(*inputs()), k=None, v=None)
    assert api.rounding_builds(record, asked._replace(precision=None), device) == []


def test_descales_of_flash_attention_3() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (x.float().to(FLOAT8) for x in inputs())
    descales = [torch.rand(2, 2, generator=make) + 0.5 for _ in range(3)]
    by_head = [x[:, None, :, None] for x in (descales[0].repeat_interleave(2, 1), *descales[1:])]
    wide = [x.float() * scale for x, scale in zip((q, k, v), by_head, strict=True)]
    keywords = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    want, want_lse = flashtile.attention(*wide, causal=True, softcap=9.0, return_lse=True)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, softcap=9.0, return_attn_probs=True, **keywords)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want.bfloat16())
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(
        fa3.flash_attn_func(q, k, v), flashtile.attention(*(x.float() for x in (q, k, v))).bfloat16()
    )
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (150, 170)]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*rows, *bounds, 150, 170, causal=True, softcap=9.0, **keywords)
    torch.testing.assert_close(packed, want.bfloat16().flatten(0, 1))
    used = torch.tensor([100, 170])
    some = fa3.flash_attn_varlen_func(*rows, *bounds, 150, 170, seqused_k=used, **keywords)
    for b, count in enumerate(used.tolist()):
        one = flashtile.attention(*(x[b : b + 1, : count if n else 150] for n, x in enumerate(wide)))
        torch.testing.assert_close(some[150 * b : 150 * b + 150], one[0].bfloat16())
    qkv = torch.cat((q.view(torch.uint8)[:, :150], k.view(torch.uint8)[:, :150], v.view(torch.uint8)[:, :150]), dim=2)
    out = fa3.flash_attn_qkvpacked_func(qkv.view(FLOAT8), num_heads_q=4, **keywords)
    torch.testing.assert_close(out, flashtile.attention(*(x[:, :150] for x in wide)).bfloat16())
    for name in keywords:
        with pytest.raises(InvalidInputError, match=f"^{name}: is given, but goes with a float8_e4m3fn q"):
            fa3.flash_attn_func(*wide, **{name: descales[0]})
        with pytest.raises(InvalidInputError, match=f"^{name}: "):
            fa3.flash_attn_func(q, k, v, **{name: descales[0][:1]})
