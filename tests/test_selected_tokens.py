"""Calls where each query names the keys that it sees: values against the definition, refusals, compiled calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.selected import Reach, Selected
from flashtile.core import settings
from flashtile.ops import selected as ops
from flashtile.ops.cached import CACHED
from tests.kvcache.cases import CacheCase, build
from tests.poison import poisoned_memory
from tests.selections import SELECTED, finite_caches, judge_selected, lists_for
from tests.slow import one_of_each

Q, PAGES = torch.randn(2, 3, 4, 8), torch.randn(6, 4, 2, 8)
TABLE, LENGTHS = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32), torch.tensor([9, 11], dtype=torch.int32)
LISTS = torch.tensor([[[0, 8, 5, -1], [-7, 3, 40, 1], [-1, -1, 9, 11]], [[2, 10, 7, 3], [9, 8, 1, 0], [10, 5, -1, 6]]],
                     dtype=torch.int32)  # fmt: skip


def attend(q: Tensor, pages: Tensor, lists: Tensor, lengths: Tensor, **keywords: Any) -> Any:
    return flashtile.attention_with_kvcache(
        q, pages, pages, cache_seqlens=lengths, page_table=TABLE, selected=lists, return_lse=True, **keywords
    )


def _dtype(case: CacheCase) -> torch.dtype:
    return torch.bfloat16 if case.float8 == "rows" else torch.float32


@pytest.mark.parametrize("case", one_of_each(SELECTED.values()), ids=str)
def test_positions_are_those_of_the_definition(case: CacheCase) -> None:
    call = build(case, _dtype(case))
    with poisoned_memory():
        judge_selected(call, lists_for(call, 13))


@pytest.mark.parametrize("name", ["steps", "packed_spare", "spare_sinks", "latent_steps"])
def test_lists_of_one_and_of_none(name: str) -> None:
    call = build(SELECTED[name], torch.float32)
    for most in (0, 1):
        judge_selected(call, lists_for(call, most))


@pytest.mark.parametrize("case", one_of_each(SELECTED.values()), ids=str)
def test_slots_are_those_of_the_definition(case: CacheCase) -> None:
    call = build(case, _dtype(case))
    finite_caches(call)
    judge_selected(call, lists_for(call, 13, slots=True), slots=True)


@pytest.mark.skipif(settings.TRITON_INTERPRET.enabled(), reason="kernels are built without the interpreter")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_kernels_build_for_every_target(arch: str) -> None:
    """With everything that may be absent, and with nothing of it."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from flashtile.backends.gpu.launch import Pointer, compile_kernel, specialise
    from flashtile.backends.portable.selected import Sizes, launch_of

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    names = ("cu_seqlens", "lengths", "table", "indptr", "entries", "leftpad", "causal")
    for given in (names, ("lengths",), ("lengths", "cu_seqlens", "table"), ("cu_seqlens",), ()):
        kinds = {name: torch.int8 if name == "causal" else torch.int32 for name in given}
        of_slots = "lengths" not in given
        layouts = tuple(
            (name, Pointer(kinds[name], name) if name in given else None) for name in (names[:1] if of_slots else names)
        )
        bounds = (None, None) if len(given) < 2 else (7, 0)
        launch = launch_of((6, 2048), True, layouts, Sizes(4096, 3, 2, 64), Reach(*bounds, 4096, 64, 64))
        made = compile_kernel(launch.kernel, specialise(launch), launch.options, target)
        assert made.metadata.name == ("of_slots" if of_slots else "of_positions")


def test_nothing_that_a_query_does_not_name_reaches_it() -> None:
    """Rule 32 is stricter than rule 10: other keys of the sequence are not multiplied, not even by 0."""
    clean, _ = attend(Q, PAGES, LISTS, LENGTHS)
    for row, reached in ((5, (0, 0)), (8, (0, 0)), (3, (0, 1))):  # keys of the first sequence, and who names them
        pages = PAGES.clone()
        pages[TABLE[0, row // 4], row % 4] = torch.nan
        out, lse = attend(Q, pages, LISTS, LENGTHS, causal=False)
        want, want_lse = attend(Q, PAGES, LISTS, LENGTHS, causal=False)
        spoilt = out.isnan().flatten(2).all(-1)
        assert spoilt.nonzero().tolist() == [list(reached)] and torch.equal(out[~spoilt], want[~spoilt])
        assert torch.equal(lse.isnan().any(1), spoilt) and torch.equal(lse.nan_to_num(0)[1], want_lse[1])
    assert not clean.isnan().any() and not clean[0, 2].any()  # a list of none


def test_a_latent_cache_that_others_write_beside() -> None:
    """FlashMLA's call: queries of 576 columns over one head of rows, slots from an indexer; in 16 bits and in bytes."""
    q, rows = torch.randn(3, 2, 16, 576).bfloat16(), torch.randn(5, 64, 1, 576).bfloat16()
    slots = torch.stack([torch.randperm(320)[:100] for _ in range(6)]).int().view(3, 2, 100)
    slots[1, 0, 50:] = -1
    of_bytes = flashtile.serving.latent_rows(rows)
    for cache in (rows, of_bytes):
        out, lse = flashtile.attention_with_kvcache(
            q, cache, cache[..., :512], cache_seqlens=0, selected_slots=slots, return_lse=True
        )
        keys = rows.float().view(320, 576)
        if cache is of_bytes:
            scales = of_bytes[..., 512:528].view(torch.float32).repeat_interleave(128, -1)
            keys = torch.cat([(of_bytes[..., :512].float() * scales).bfloat16().float(), rows[..., 512:].float()], -1)
            keys = keys.view(320, 576)
        for b, i in ((0, 0), (1, 0), (2, 1)):
            own = keys[slots[b, i][slots[b, i] >= 0].long()]
            scores = q[b, i].float() @ own.T * 576**-0.5
            torch.testing.assert_close(lse[b, :, i], scores.logsumexp(-1), atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(out[b, i].float(), scores.softmax(-1) @ own[:, :512], atol=2e-2, rtol=2e-2)


def test_out_is_written_whatever_its_strides() -> None:
    want, _ = attend(Q, PAGES, LISTS, LENGTHS)
    for out in (torch.empty(2, 3, 4, 8), torch.full((3, 2, 4, 9), 7.0)[..., :8].transpose(0, 1)):
        version = out._version
        got, _ = attend(Q, PAGES, LISTS, LENGTHS, out=out)
        assert got is out and torch.equal(out, want) and out._version > version


# Inductor has the like with a backward, in test_selected_training.
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiles_whole(backend: str) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, pages: Tensor, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lists = scores.topk(4, dim=-1).indices.int()
        out, lse = attend(q * 2, pages, lists, lengths)
        return out + 1, lse + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (1, 3):
        scores = torch.randn(2, rows, 12)
        got, want = (run(Q[:, :rows], PAGES, scores, LENGTHS) for run in (compiled, step))
        torch.testing.assert_close(got, want)


def test_compiles_whole_over_latent_rows_by_slots() -> None:
    torch._dynamo.reset()
    q, rows = torch.randn(3, 1, 8, 40), torch.randn(5, 4, 1, 40)

    def step(q: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(q, rows, rows[..., :32], cache_seqlens=0, selected_slots=slots)

    slots = torch.tensor([[[1, 19, -1]], [[20, 3, 2]], [[7, 5, 6]]], dtype=torch.int32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, rows, slots), step(q, rows, slots))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["steps", "packed_spare", "spare_sinks", "latent_steps"])
@pytest.mark.parametrize("slots", [False, True])
def test_opcheck(name: str, slots: bool) -> None:
    call = build(SELECTED[name], torch.float32)
    t = call.tensors
    t.out.zero_()
    for cache in (t.k_cache, t.v_cache):
        cache.nan_to_num_(0.0, 0.0, 0.0)
    lists = lists_for(call, 6, slots=slots)
    options = CacheOptions(window_right=0, max_seqlen_q=call.keywords.get("max_seqlen_q"), return_max_scores=slots)
    given = Selected(None, lists) if slots else Selected(lists, None)
    operator = torch.ops.flashtile.selected_attention_with_kvcache.default
    torch.library.opcheck(operator, (*given, *CACHED.flatten(t, options)))


def test_there_is_no_gradient() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(InvalidInputError, match="^q: requires grad, but a cached call has no gradient"):
        attend(q, PAGES, LISTS, LENGTHS)
    out = torch.empty(2, 3, 4, 8)
    args = (*Selected(LISTS, None), *CACHED.flatten(CacheTensors(out, q, PAGES, PAGES, LENGTHS, TABLE), CacheOptions()))
    with pytest.raises(InvalidInputError, match="^q: requires grad, but a cached call has no gradient"):
        torch.ops.flashtile.selected_attention_with_kvcache(*args)
    with torch.no_grad():
        assert torch.equal(attend(q, PAGES, LISTS, LENGTHS)[0], attend(Q, PAGES, LISTS, LENGTHS)[0])


def test_a_key_named_twice_is_told() -> None:
    lists = LISTS.clone()
    lists[1, 2, 3] = 5
    with pytest.raises(InvalidInputError, match=r"^selected: has 5 twice for query \(1, 2\): it must name a key once"):
        attend(Q, PAGES, lists, LENGTHS)
    lists[1, 2, 1] = lists[1, 2, 3] = 40  # past the end: nothing is named
    attend(Q, PAGES, lists, LENGTHS)
    slots = torch.tensor([[3, 9, 3]], dtype=torch.int32).expand(2, 3, 3)
    with pytest.raises(InvalidInputError, match=r"^selected_slots: has 3 twice for query \(0, 0\)"):
        flashtile.attention_with_kvcache(Q, PAGES, PAGES, cache_seqlens=0, selected_slots=slots)


def test_rows_are_found_by_the_kernel_where_tensors_are_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And values are checked on request alone."""
    asked = []
    monkeypatch.setattr(ops.selected, "check_values", lambda *_: asked.append(1))
    for value, count in (("", 0), ("1", 1)):
        monkeypatch.setenv("FLASHTILE_CHECK", value)
        t = CacheTensors(torch.empty_like(Q), Q, PAGES, PAGES, LENGTHS, TABLE)
        real = CACHED.planned

        def planned(*given: Any, real: Any = real) -> Any:
            t, call = real(*given)
            shown = type("Shown", (), {"problem": call.problem.but(device_type="cuda"), "run": call.run})
            return t, shown

        with monkeypatch.context() as within:
            within.setattr(CACHED, "planned", planned)
            within.setattr(ops, "check_values", lambda *_: None)
            ops.checked(t, CacheOptions(window_right=0), Selected(LISTS, None))
        assert len(asked) == count


def test_what_is_prepared_and_explained() -> None:
    pytest.importorskip("triton")
    meta = {"k_cache": PAGES.to("meta"), "v_cache": PAGES.to("meta"), "cache_seqlens": LENGTHS.to("meta")}
    given = meta | {"page_table": TABLE.to("meta"), "selected": LISTS.to("meta")}
    assert "batch 6, 1 x a cache of 4 in pages of 1" in flashtile.explain(Q.to("meta"), **given)
    real = {"k_cache": PAGES, "v_cache": PAGES, "cache_seqlens": LENGTHS, "page_table": TABLE}
    said = flashtile.explain(Q, **real, selected=LISTS)
    assert "batch 6, 1 x a cache of 4 in pages of 1" in said and "decode: cpu: " in said
    with pytest.raises(InvalidInputError, match="^selected: has shape"):
        flashtile.explain(Q, **real, selected=LISTS[:1])


@pytest.mark.skipif(settings.TRITON_INTERPRET.enabled(), reason="kernels are built without the interpreter")
def test_the_kernel_is_built_ahead() -> None:
    pytest.importorskip("triton")
    half = {name: x.to("meta", torch.bfloat16) for name, x in {"k_cache": PAGES, "v_cache": PAGES}.items()}
    given = half | {"cache_seqlens": LENGTHS.to("meta")}
    lists = LISTS.to("meta")
    q = Q.to("meta", torch.bfloat16)
    made = flashtile.warm_up(q, **given, page_table=TABLE.to("meta"), selected=lists, gpu="sm_80")
    assert made[0].kernel == "of_positions" and len(made) > 1
    made = flashtile.warm_up(q, **given, selected_slots=lists, gpu="sm_80")
    assert made[0].kernel == "of_slots"
