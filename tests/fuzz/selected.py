"""Random calls whose queries name what they see: single keys of a cache, single keys with gradients, blocks of keys.

On a machine with a GPU ``python -m tests.fuzz selected --backend hopper --device cuda`` computes them there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError, UnsupportedError, reference
from flashtile.api.keywords import masked_by
from flashtile.masks import selected_blocks
from flashtile.ops import dispatch, selected, selected_dense
from tests.cases import Call, Case, build, gradient_of, judge, results
from tests.fuzz.drawn import SMALL, Draw, Sizes, _cached, _latent, _plain, _within
from tests.fuzz.drawn import Drawn as DrawnCall
from tests.fuzz.functions import on_hopper
from tests.fuzz.judged import _of_latent_rows, cancels, within
from tests.kvcache import cases as kvcache
from tests.kvcache.cases import CacheCase
from tests.maxima import judge_maxima
from tests.poison import poisoned_memory
from tests.rule import Yardstick
from tests.selected import ANY, OF_HOPPER, OF_PORTABLE
from tests.selections import definition_of, finite_caches, judge_selected, lists_for

Kind = Literal["cached", "dense", "blocks"]
KINDS: tuple[Kind, ...] = ("cached", "dense", "blocks")
_BLOCKS = {"portable": OF_PORTABLE, "hopper": OF_HOPPER}
# Each query is a sequence of its own to kernels: few of them are many programs.
_SIZES = {"cpu": Sizes(100, 2**18), "portable": Sizes(24, 2**12, 64), "hopper": Sizes(100, 2**15)}


@dataclass(frozen=True)
class Drawn:
    """One call.

    Attributes:
        seed: Its number.
        kind: A call over a cache, a regular one with gradients, or one with lists of blocks.
        case: The call without lists.
        dtype: That of its tensors.
        most: Elements of a list.
        slots: Whether lists name rows of the cache.
        joined: Whether values are the keys' first columns, of a regular call.
        twice: Whether a list has an element twice.
        block: Rows and keys of a block.
    """

    seed: int
    kind: Kind
    case: Any
    dtype: torch.dtype
    most: int
    slots: bool = False
    joined: bool = False
    twice: bool = False
    block: tuple[int, int] = (0, 0)


def draw(seed: int, sizes: Sizes = SMALL, kind: Kind | None = None, backend: str = "cpu") -> Drawn:
    """Call number ``seed`` of an endless list, one that a backend can have; with a kind, of that kind's."""
    d = Draw(("selected", seed, kind), sizes)
    chosen, name = kind or d.pick(*KINDS), f"selected_{seed}"
    dtype = d.pick(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    most = d.pick(0, 1, 2, d.upto(d.sizes.longest, 1), d.upto(d.sizes.longest, 1), d.length(d.sizes.longest))
    if chosen == "cached":
        case = _over_cache(d, name)
        dtype = torch.bfloat16 if case.float8 == "rows" else dtype
        call = Drawn(seed, chosen, _within(case, sizes), dtype, most, d.chance(0.4), twice=d.chance(0.15))
    elif chosen == "dense":
        case, joined = _with_gradients(d, name)
        call = Drawn(seed, chosen, _within(case, sizes), dtype, most, joined=joined, twice=d.chance(0.15))
    else:
        case = replace(_within(_plain(d, name), sizes), intervals="", invariant=False)
        if backend == "hopper":
            case, _, _, dtype, _ = on_hopper((case, None, None, dtype, None))
        call = Drawn(seed, chosen, case, dtype, d.upto(9, 1), block=d.pick(*_BLOCKS.get(backend, ANY)))
    return call


def _over_cache(d: Draw, name: str) -> CacheCase:
    """A call over a cache, without what does not go with lists."""
    case = _latent(d, name) if d.chance(0.5) else _cached(d, name)
    return replace(
        case, sequences=tuple((old + new, rows, 0) for old, rows, new in case.sequences), appends=False,
        packed_new=False, rotary=0, rotary_start=False, interleaved=False, tables=False, slots="", alibi="", tree="",
        words=False, tree_rows=0, chunk=None, float8="h" if case.float8 == "eh" else case.float8,
        spare=case.spare if case.packed else 0,
    )  # fmt: skip


def _with_gradients(d: Draw, name: str) -> tuple[Case, bool]:
    """A regular call without what does not go with lists, and whether its values are columns of its keys."""
    case, joined = _plain(d, name), d.chance(0.5)
    (rows, keys), *_ = case.lengths or ((case.seqlen_q, case.seqlen_k),)
    case = replace(
        case, name=name, lengths=(), spare=0, seqlen_q=rows, seqlen_k=keys, mask=None, bias=None, bias_grad=False,
        bias_float=False, trimmed=False, large="", alibi="", dropout=0.0, chunk=None, intervals="", invariant=False,
        out="", scale=None if case.scale == 1.0 else case.scale, wanted=d.pick(None, None, None, "q", "kv", "k", "s"),
    )  # fmt: skip
    if joined and d.sizes.most_dim > 128 and d.chance(0.6):
        heads = d.pick(1, 3, 8, 16, 64, 128)
        return replace(case, head_dim=576, head_dim_v=512, heads=heads, kv_heads=1), True
    return replace(case, head_dim_v=d.upto(case.head_dim, 1) if joined else case.head_dim_v), joined


def on_cpu(seed: int, backend: str, kind: Kind | None = None) -> Drawn:
    """A call that a backend can have on CPU tensors, and that takes it about a second."""
    call = draw(seed, _SIZES.get(backend, SMALL), kind, backend)
    if backend == "portable" and call.dtype == torch.bfloat16:
        # The interpreter multiplies bfloat16 numbers as integers.
        is_rows = call.kind == "cached" and call.case.float8 == "rows"
        return replace(call, case=replace(call.case, float8="") if is_rows else call.case, dtype=torch.float16)
    if backend == "hopper" and call.kind == "dense":  # Triton's kernels compute the gradients
        return on_cpu(seed, backend, "cached")
    if backend == "hopper" and call.kind == "cached":
        plain = _of_latent_rows(DrawnCall(seed, "latent", replace(call.case, qv=True, kv_heads=1), call.dtype))
        return replace(call, case=plain.case, dtype=plain.dtype)
    return call


def judge_call(call: Drawn, backend: str | None, device: str = "cpu") -> None:
    """Asserts the rule for a call, or that what its lists have twice is told.

    Args:
        call: The call.
        backend: That computes it. Single keys on a GPU have no backward by "hopper", which stands for the library's
            choice there.
        device: Where.
    """
    if call.kind == "blocks":
        made = with_blocks(call, device)
        judge(made.wanting([n for n in made.leaves if n == "v"]) if cancels(made.problem) else made, backend)
        if call.seed % 4 == 0:
            judge_maxima(made, backend, gradients=False)
        return
    backend = None if backend == "hopper" and device != "cpu" else backend
    with mock.patch.dict(os.environ, {"FLASHTILE_CHECK": "1"}), poisoned_memory():
        (_judge_cached if call.kind == "cached" else _judge_dense)(call, backend, device)


def _judge_cached(call: Drawn, backend: str | None, device: str) -> None:
    made = kvcache.build(call.case, call.dtype, device, call.seed)
    lists = lists_for(made, call.most, call.seed, call.slots)
    if device != "cpu" and (against := dispatch.reasons(backend or "portable", made.problem, "decode")):
        with pytest.raises(UnsupportedError) as caught:
            judge_selected(made, lists, call.slots, backend=backend)
        assert all(reason in str(caught.value) for reason in against)
        return
    if call.slots:
        finite_caches(made)
    if call.twice and call.most > 1 and lists.numel():
        lists, alone, value = repeated(lists, call.seed)
        seen = definition_of(made, alone, call.slots)(torch.float64)["top"]
        if (seen != -torch.inf).any():
            name = "selected_slots" if call.slots else "selected"
            with pytest.raises(InvalidInputError, match=f"^{name}: has {value} twice"):
                judge_selected(made, lists, call.slots, backend=backend)
            return
    judge_selected(made, lists, call.slots, backend=backend)


class Joined(Call):
    """A call with values that are its keys' first columns."""

    def _with(self, leaves: dict[str, Tensor]) -> Call:
        made = super()._with(leaves)
        return replace(made, tensors=_joined(made))


def _joined(call: Call) -> Any:
    return replace(call.tensors, v=call.tensors.k[..., : call.problem.head_dim_v])


def _judge_dense(call: Drawn, backend: str | None, device: str) -> None:
    made = build(call.case, call.dtype, device, call.seed)
    if call.joined:
        leaves = {name: x for name, x in made.leaves.items() if name != "v"}
        made = Joined(made.case, made.problem, _joined(made), made.keywords, leaves)
    lists = random_lists(call, made)
    band = made.problem.band.dense(call.case.seqlen_q, call.case.seqlen_k, device=device)
    if call.twice and call.most > 1 and lists.numel():
        lists, alone, value = repeated(lists, call.seed)
        if (_masked(made, alone).tensors.attn_mask & band).any():
            with pytest.raises(InvalidInputError, match=f"^selected: has {value} twice"):
                made.run(backend, selected=lists)
            return
    masked = _masked(made, lists)
    kept = masked.tensors.attn_mask & band
    if not made.problem.sinks and int(kept.sum(-1).max() if kept.numel() else 0) <= 1:
        # Of one key a row gradients of scores are sums that cancel to 0, of which the rule says nothing.
        made = made.wanting([name for name in made.leaves if name == ("k" if call.joined else "v")])
        masked = replace(masked, leaves=made.leaves)
    dout, dlse = gradient_of(made), None
    if call.case.lse_grad:
        make = torch.Generator(device).manual_seed(12)
        shape = call.case.batch, call.case.heads, call.case.seqlen_q
        dlse = torch.randn(shape, generator=make, device=device)

    def named(of: Call, out: Tensor, lse: Tensor, top: Tensor) -> dict[str, Tensor]:
        values = results(of, out, lse, dout, dlse).values if of.leaves else {"out": out, "lse": lse}
        return values | {"max_scores": top}

    def by_definition(of: Call, dtype: torch.dtype) -> dict[str, Tensor]:
        return named(of, *reference.with_max_scores(of.problem, of.tensors, dtype))

    yardstick = Yardstick(
        lambda: by_definition(masked.upcast(), torch.float64), by_definition(masked, call.dtype), call.dtype
    )
    if call.case.layout != "expanded" and call.seed % 2:
        nobody = ~kept.any(2).any(1)
        with torch.no_grad():  # what nobody sees stays out
            for x in (made.tensors.k, made.tensors.v):
                x[nobody] = torch.nan
    out, lse, top = made.run(backend, selected=lists, return_max_scores=True)
    assert not top.requires_grad and lse.is_contiguous() and top.is_contiguous()
    assert out.dtype == call.dtype and lse.dtype == top.dtype == made.problem.lse_dtype
    yardstick.check(named(made, out, lse, top))


def random_lists(call: Drawn, made: Call) -> Tensor:
    """Lists ``(batch, seqlen_q, most)`` with no key twice, and with elements that are none; the first is empty."""
    make, keys = torch.Generator().manual_seed(call.seed), call.case.seqlen_k
    of_rows = call.case.batch * call.case.seqlen_q
    order = torch.rand(of_rows, max(keys + 5, call.most), generator=make).argsort(-1)[:, : call.most]
    none = torch.rand(order.shape, generator=make)
    lists = torch.where(none < 0.1, -1, torch.where(none < 0.15, -(2**31), torch.where(none < 0.2, 2**31 - 1, order)))
    lists[:1] = torch.where(torch.arange(call.most) % 2 == 0, -3, keys)
    return lists.int().view(call.case.batch, call.case.seqlen_q, call.most).to(made.tensors.q.device)


def _masked(made: Call, lists: Tensor) -> Call:
    """The call with a mask of all pairs in place of lists."""
    keys = made.problem.seqlen_k
    mask = torch.zeros(*lists.shape[:2], keys + 1, dtype=torch.bool, device=lists.device)
    mask.scatter_(2, torch.where((lists < 0) | (lists > keys), keys, lists).long(), True)
    tensors = replace(made.tensors, attn_mask=mask[:, None, :, :keys])
    return replace(made, problem=made.problem.but(mask=True), tensors=tensors)


def repeated(lists: Tensor, seed: int) -> tuple[Tensor, Tensor, int]:
    """Lists of which one has an element twice, the lists of this element alone, and the element."""
    pick, many = random.Random(seed), lists.flatten(0, -2).clone()
    row, (first, again) = pick.randrange(len(many)), pick.sample(range(lists.shape[-1]), 2)
    many[row, again] = many[row, first]
    alone = torch.full_like(many, -1)
    alone[row, 0] = many[row, first]
    return many.view_as(lists), alone.view_as(lists), int(many[row, first])


def with_blocks(call: Drawn, device: str = "cpu") -> Call:
    """A call with lists of blocks: repeated ones, some that there are not, some that are cut by a count."""
    made, case, pick = build(call.case, call.dtype, device, call.seed), call.case, random.Random(call.seed)
    make, p, (of_rows, of_keys) = torch.Generator().manual_seed(call.seed), made.problem, call.block
    heads, batch = pick.choice((1, case.kv_heads, case.heads)), pick.choice((1, p.batch))
    shape = batch, heads, -(-p.seqlen_q // of_rows), call.most
    indices = torch.randint(-1, -(-p.seqlen_k // of_keys) + 2, shape, generator=make, dtype=torch.int32)
    counts = torch.randint(0, call.most + 1, shape[:3], generator=make).to(device) if pick.random() < 0.5 else None
    mask = selected_blocks(
        indices.to(device), counts, call.block, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k
    )  # fmt: skip
    listed = masked_by(mask, None)
    problem = p.but(listed=listed.listed, by_head=heads not in (1, case.kv_heads))
    tensors = replace(made.tensors, **listed.tensors)
    return replace(made, problem=problem, tensors=tensors, keywords=made.keywords | {"block_mask": mask})


@contextmanager
def by_portable(deterministic: bool) -> Iterator[None]:
    """Within, the portable kernels compute calls of CPU tensors whose queries name keys, gradients too."""
    from flashtile.backends.portable import selected as rows
    from flashtile.backends.portable import selected_backward as backward

    def gradients(*given: Any) -> Any:
        return backward.gradients(*given, deterministic=deterministic)

    with (
        mock.patch.object(selected, "_compact", lambda t: rows.compacted),
        mock.patch.object(selected_dense, "_check_backward", lambda *_: None),
        mock.patch.object(selected_dense, "_gradients_of", lambda device_type: gradients),
    ):
        yield


def fuzz(
    backend: str, seed: int, count: int, say: Callable[[str], None], kind: Kind | None = None, device: str = "cpu",
    sizes: Sizes = SMALL,
) -> list[str]:  # fmt: skip
    """Judges so many calls from ``seed`` on; says and returns what is wrong, with the calls."""
    wrong = []
    for number in range(seed, seed + count):
        call = on_cpu(number, backend, kind) if device == "cpu" else draw(number, sizes, kind, backend)
        own = by_portable(number % 2 == 0) if (backend, device) == ("portable", "cpu") else nullcontext()
        try:
            with within(backend, number) if device == "cpu" else nullcontext(), own:
                judge_call(call, backend, device)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{backend}: {type(error).__name__}: {str(error)[:500]}\n    {call}")
            say(f"FAILED {wrong[-1]}")
    return wrong
