"""The operators of cached calls under opcheck, FakeTensor, torch.compile, export and transforms; plans; settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flashtile
from flashtile import InvalidInputError, explain
from flashtile.call.cached_arguments import CacheOptions, CacheTensors, read
from flashtile.ops import plans
from flashtile.ops.cached import CACHED
from flashtile.ops.operation import PlannedCall
from tests.kvcache.cases import CASES, CacheCase, build

Q, CACHE, NEW = torch.randn(2, 3, 4, 8), torch.randn(3, 16, 2, 8), torch.randn(2, 3, 2, 8)
LENGTHS = torch.tensor([5, 9], dtype=torch.int32)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


_NAMED = {case.name: case for case in CASES}


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """What the operator gets for a case."""
    call = build(_NAMED[name], dtype)
    case = call.case
    tensors = call.tensors
    tensors.out.zero_()
    # opcheck compares what it gets with NaN in it as different.
    for cache in (tensors.k_cache, tensors.v_cache):
        cache.nan_to_num_(0.0, 0.0, 0.0)
    plain = (
        call.keywords.get("max_seqlen_q"), call.keywords.get("max_seqlen_k"), case.scale, case.softcap,
        case.interleaved, None, case.chunk, False, False, case.invariant,
    )  # fmt: skip
    return CACHED.flatten(tensors, read(case.causal and not case.causal_each, case.window, True, plain))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", ["steps", "entries", "pages_leftpad", "packed_spare", "alibi_batch", "tree", "causal_each", "ragged"]
)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.flashtile.attention_with_kvcache.default, arguments(name))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name", ["append", "rotary_pages", "packed_mixed", "packed_new_alone", "everything", "tree_rotary", "slots_packed"]
)
def test_opcheck_append(name: str) -> None:
    torch.library.opcheck(torch.ops.flashtile.append_attention_with_kvcache.default, arguments(name))


def test_what_is_written_is_declared() -> None:
    for name, written in (
        ("attention_with_kvcache", {"out"}),
        ("append_attention_with_kvcache", {"out", "k_cache", "v_cache"}),
    ):
        schema = getattr(torch.ops.flashtile, name).default._schema
        found = {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write}
        assert found == written


@pytest.mark.parametrize("name", ["out_given", "append"])
def test_versions_of_what_is_written_grow(name: str) -> None:
    """Autograd finds by them that a tensor it saved was changed, also by a kernel that PyTorch does not see."""
    call = build(_NAMED[name], torch.float32)
    t = call.tensors
    plan = CACHED.guarded(call.problem, lambda t: t.out)
    before = t.out._version, t.k_cache._version, t.v_cache._version, t.q._version
    plan(t)
    grown = [x._version - n for x, n in zip((t.out, t.k_cache, t.v_cache, t.q), before, strict=True)]
    assert grown == ([1, 1, 1, 0] if call.case.appends else [1, 0, 0, 0])
    with torch.inference_mode():
        plan(CacheTensors(**vars(t) | {"out": torch.empty(t.out.shape)}))


def test_fake_tensors_have_the_real_shapes_and_strides() -> None:
    for name in ("wider_v", "packed_spare", "append_pages_of_3", "float8_append", "tree"):
        call = build(_NAMED[name], torch.float32)
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in call.keywords.items()}
            t = (mode.from_tensor(x) for x in (call.tensors.q, call.tensors.k_cache, call.tensors.v_cache))
            shown = flashtile.attention_with_kvcache(*t, **fake, return_lse=True)
        real = call.run("cpu")
        assert [(x.shape, x.stride(), x.dtype) for x in shown] == [(x.shape, x.stride(), x.dtype) for x in real]


def test_the_profiler_names_the_operators() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5)
        flashtile.attention_with_kvcache(Q, CACHE.clone(), CACHE.clone(), cache_seqlens=5, k=NEW, v=NEW)
    names = {event.key for event in profile.key_averages()}
    assert {"flashtile::attention_with_kvcache", "flashtile::append_attention_with_kvcache"} <= names


def generate(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
    """Two steps of a loop, on keys and values that are halves of one cache."""
    k_cache, v_cache = cache.unbind(2)
    first = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v)
    more = flashtile.attention_with_kvcache(
        q + first, k_cache, v_cache, cache_seqlens=lengths + k.shape[1], window_size=(6, 0), sinks=first[0, 0, :, 0]
    )
    return first + more


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole_with_an_append(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(generate, fullgraph=True, backend=backend)
    for rows in (1, 3, 4):
        q, new = torch.randn(2, rows, 4, 8), torch.randn(2, rows, 2, 8)
        caches = [torch.stack([CACHE, CACHE + 1], dim=2).clone() for _ in range(2)]
        want = generate(q, new, new, caches[0], LENGTHS)
        torch.testing.assert_close(compiled(q, new, new, caches[1], LENGTHS), want)
        assert torch.equal(*caches), "the caches of the compiled call hold the new keys"
        assert torch.equal(caches[1][0, 5 : 5 + rows, 0], new[0])


def test_compiles_with_separate_caches_and_numbers_as_lengths() -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return flashtile.attention_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=length, k=new, v=new, return_lse=True, softcap=3.0
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, theirs = [CACHE.clone(), CACHE.clone()], [CACHE.clone(), CACHE.clone()]
    for length in (0, 3, 6, 9, 12):
        torch.testing.assert_close(compiled(Q, *mine, NEW, length), step(Q, *theirs, NEW, length))
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[0][1, 12:15], NEW[1])


def test_a_function_leaves_lse_one_number_a_row() -> None:
    torch._dynamo.reset()

    def hidden(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(h == 0, -1e9, score)

    def step(q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return flashtile.attention_with_kvcache(
            q, cache, cache, cache_seqlens=9, cache_batch_idx=index(0, 2), causal=False, score_mod=hidden,
            return_lse=True, backend="cpu",
        )  # fmt: skip

    out, lse = step(Q, CACHE)
    torch.testing.assert_close(out[:, :, 0], CACHE[[0, 2], :9, 0].mean(1, keepdim=True).expand(-1, 3, -1))
    assert lse.is_contiguous() and torch.equal(lse[:, 0], torch.full((2, 3), -1e9))
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(Q, CACHE), (out, lse))


class Layer(torch.nn.Module):
    """One step that appends to its own cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", CACHE.clone())
        self.register_buffer("v_cache", CACHE.clone())

    def forward(self, q: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(q, self.k_cache, self.v_cache, cache_seqlens=lengths, k=new, v=new)


def test_exports_with_its_mutation() -> None:
    with torch.no_grad():
        program = torch.export.export(Layer(), (Q, NEW, LENGTHS))
        module, layer = program.module(), Layer()
        for lengths in (LENGTHS, LENGTHS + 3):
            torch.testing.assert_close(module(Q, NEW, lengths), layer(Q, NEW, lengths))
    held = dict(module.named_buffers())
    assert torch.equal(held["k_cache"], layer.k_cache) and torch.equal(layer.k_cache[0, 8:11], NEW[0])


def test_autocast_casts_queries_and_new_keys_but_no_cache() -> None:
    half = CACHE.bfloat16()
    mine, theirs, *values = (half.clone() for _ in range(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flashtile.attention_with_kvcache(Q, mine, values[0], cache_seqlens=5, k=NEW, v=NEW)
        with pytest.raises(InvalidInputError, match=r"^k_cache: dtype is torch.float32"):
            flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5)
    new = NEW.bfloat16()
    want = flashtile.attention_with_kvcache(Q.bfloat16(), theirs, values[1], cache_seqlens=5, k=new, v=new)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    assert torch.equal(mine, theirs) and torch.equal(*values)


def test_there_is_no_derivative_of_any_kind() -> None:
    def loss(q: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(q, CACHE, CACHE, cache_seqlens=5).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(
            InvalidInputError, match=r"^(q|out): (requires grad|has a tangent), but a cached call has no"
        ):
            transform(loss)(Q)
    with forward_ad.dual_level(), pytest.raises(InvalidInputError, match="^q: has a tangent"):
        loss(forward_ad.make_dual(Q, Q))
    tensors = CacheTensors(torch.empty(2, 3, 4, 8), Q.clone().requires_grad_(), CACHE, CACHE, LENGTHS)
    with pytest.raises(InvalidInputError, match="^q: requires grad"):
        torch.ops.flashtile.attention_with_kvcache(*CACHED.flatten(tensors, CacheOptions()))


def test_small_tensors_of_any_strides() -> None:
    """Kernels read these as contiguous."""

    def column(x: Tensor) -> Tensor:
        return torch.stack([x, x + 1], dim=-1)[..., 0]

    for name in ("everything", "everything_float8", "entries", "packed_new_of_other_counts"):
        calls = [build(_NAMED[name], torch.float32) for _ in range(2)]
        kept = ("out",)
        changes = {n: column(x) for n, x in calls[1].keywords.items() if isinstance(x, Tensor) and n not in kept}
        want, got = calls[0].run("cpu"), calls[1].run("cpu", **changes)
        for x, y in zip(want, got, strict=True):
            assert torch.equal(x, y)


def test_subclasses_are_tensors() -> None:
    want = flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENGTHS)
    with torch.no_grad():
        got = flashtile.attention_with_kvcache(
            torch.nn.Parameter(Q), torch.nn.Buffer(CACHE), CACHE, cache_seqlens=torch.nn.Buffer(LENGTHS)
        )
    assert torch.equal(got, want)


def test_an_int_is_a_length_for_all() -> None:
    want = flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=torch.tensor([7, 7], dtype=torch.int32))
    assert torch.equal(flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=7), want)
    numpy = pytest.importorskip("numpy")
    assert torch.equal(flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=numpy.int64(7)), want)


def test_a_number_is_a_scale_for_all() -> None:
    eight = {"k_cache": CACHE.to(torch.float8_e4m3fn), "v_cache": CACHE.to(torch.float8_e4m3fn)}
    scales = {"k_scale": torch.full((2,), 0.5), "v_scale": torch.full((2,), 3.0)}
    given = dict(q=Q, cache_seqlens=LENGTHS, k=NEW, v=NEW)
    want = {name: x.clone() for name, x in eight.items()}
    out = flashtile.attention_with_kvcache(**given, **want, **scales)
    assert torch.equal(flashtile.attention_with_kvcache(**given, **eight, k_scale=0.5, v_scale=3), out)
    assert all(torch.equal(eight[name].view(torch.uint8), x.view(torch.uint8)) for name, x in want.items())
    assert explain(**given, **eight, k_scale=0.5) == explain(**given, **eight)


def test_plans_are_kept_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = type(plans.kept)()
    monkeypatch.setattr(plans, "kept", known)
    base = dict(q=Q, k_cache=CACHE, v_cache=CACHE, cache_seqlens=LENGTHS)

    def count_with(**changes: Any) -> int:
        flashtile.attention_with_kvcache(**base | changes)
        return sum(type(x) is PlannedCall for x in known.values())

    assert count_with() == count_with() == 1
    assert count_with(cache_seqlens=LENGTHS + 1) == 1, "values are no part of a plan"
    moved = torch.zeros(CACHE.numel() + 1)[1:].view_as(CACHE).copy_(CACHE)
    odd = torch.zeros(3, dtype=torch.int32)[1:].copy_(LENGTHS)
    for count, changes in enumerate((
        dict(causal=False), dict(softcap=1.0), dict(q=Q[:, :2]), dict(q=Q.transpose(1, 2).contiguous().transpose(1, 2)),
        dict(k_cache=CACHE[:, :12], v_cache=CACHE[:, :12]), dict(k_cache=moved), dict(v_cache=moved),
        dict(cache_seqlens=odd), dict(cache_leftpad=LENGTHS), dict(cache_batch_idx=LENGTHS - LENGTHS),
        dict(page_table=LENGTHS[:, None] - LENGTHS[:, None]), dict(sinks=torch.zeros(4)),
        dict(sinks=torch.zeros(4).double()), dict(alibi_slopes=torch.zeros(4)), dict(alibi_slopes=torch.zeros(2, 4)),
        dict(out=torch.empty(2, 3, 5, 8)[:, :, 1:]), dict(k=NEW, v=NEW, k_cache=CACHE.clone(), v_cache=CACHE.clone()),
        dict(k=NEW[:, :2], v=NEW[:, :2], k_cache=CACHE.clone(), v_cache=CACHE.clone()), dict(backend="cpu"),
        dict(tree_mask=torch.ones(2, 3, 3).tril() > 0),
        dict(k=NEW, v=NEW, k_cache=CACHE.clone(), v_cache=CACHE.clone(), slot_mapping=torch.arange(6).view(2, 3)),
        dict(causal=LENGTHS > 5), dict(page_indptr=index(0, 1, 2), page_indices=index(0, 1)),
        dict(page_indptr=index(0, 1, 2), page_indices=index(0, 1), max_seqlen_k=16),
    )):  # fmt: skip
        assert count_with(**changes) == count_with(**changes) == count + 2, changes
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with pytest.raises(flashtile.UnsupportedError, match="hopper"):
        count_with()


def test_values_are_checked_in_every_call_on_a_cpu_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENGTHS)
    with pytest.raises(InvalidInputError, match="^cache_seqlens: 17 does not fit"):
        flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENGTHS + 8)
    call = build(CacheCase("wrong", ((5, 1, 0), (99, 1, 0)), capacity=100), torch.float32)
    asked = []
    on_gpu = call.problem.but(device_type="cuda")
    plan = CACHED.guarded(on_gpu, lambda t: asked.append(t) or t.out)
    bad = CacheTensors(**vars(call.tensors) | {"cache_seqlens": LENGTHS + 95})
    for value, is_checked in (("", False), ("0", False), ("1", True), ("on", True)):
        monkeypatch.setenv("FLASHTILE_CHECK", value)
        if is_checked:
            with pytest.raises(InvalidInputError, match="^cache_seqlens: 104 does not fit"):
                plan(bad)
        else:
            plan(bad)
    assert len(asked) == 2


def test_explain_says_who_runs_a_cached_call() -> None:
    from flashtile.ops import dispatch

    text = dispatch.explain(build(_NAMED["float8_pages"], torch.bfloat16).problem)
    assert "2 x a cache of 40 in pages of 4" in text and "decode: cpu: one sequence at a time" in text
    assert "not portable: " in text
