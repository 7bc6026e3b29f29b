"""Random steps of a server: packed batches of decodes, chunks, prompts, drafts and sequences without rows.

A batch is judged as any cached call, and each of its sequences must give the same bits alone as with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashtile.call.cached_arguments import MOST_TREE_ROWS
from flashtile.ops import dispatch
from tests.fuzz.drawn import FLOATS, SMALL, Draw, Drawn, Sizes, _within
from tests.kvcache.alone import judge_alone
from tests.kvcache.cases import CacheCase, build, judge
from tests.maxima import judge_cached_maxima
from tests.trees import KINDS as TREES

# In Triton's interpreter a tile takes milliseconds.
TINY = Sizes(50, 2**15, 64)
# On a GPU a kernel takes some ten seconds to build, and a sequence of these lengths may be split.
ON_GPU, KINDS_ON_GPU = Sizes(600, 2**25, 128, odd_dims=False), 16


def draw_batch(seed: int, sizes: Sizes = SMALL, kinds: int = 0) -> Drawn:
    """Batch number ``seed`` of an endless list; with ``kinds`` of so few kinds, by what kernels are compiled for."""
    d = Draw(("mixed", seed), sizes)
    k = Draw(("kind", seed % kinds), sizes) if kinds else d
    dtype = k.pick(*FLOATS[:2], *FLOATS)
    appends, has_trees, paged = k.chance(0.75), k.chance(0.25), k.chance(0.75)
    sequences = tuple(_sequence(d, appends) for _ in range(d.upto(8, 2)))
    (head_dim, head_dim_v), band = k.head_dims(), k.band()
    layout = k.pick("apart", "apart", "heads_first", "stacked", "heads_first_stacked", "between", "sliced")
    given: dict[str, Any] = dict(
        rotary=2 * k.pick(k.upto(head_dim // 2, 1), head_dim // 2) if appends and head_dim > 1 and k.chance(0.6) else 0,
        interleaved=k.chance(), tables=k.chance(), rotary_start=k.chance(),
        page_size=k.pick(1, 1, 2, 3, 8, 16, 16, 32, 64, 128) if paged else 0,
        ragged=k.pick("", "", "pages", "bound"), entries=k.chance(), slots=k.pick("", "own", "some", "anywhere"),
        float8=k.pick("", "", "none", "h", "eh"), e5m2=k.chance(0.5), causal_each=k.chance(),
        leftpad=tuple(d.upto(max(old, 0) + 2) for old, _, _ in sequences) if k.chance(0.25) else (),
        alibi=k.pick("", "", "h", "bh"), sinks=k.chance(), out=k.pick("", "whole", "part"),
        spare=d.pick(0, 0, 1, 5), say_longest=k.chance(0.8), tree_rows=k.pick(4, 12, MOST_TREE_ROWS),
        tree=k.pick(*TREES), words=k.chance(0.5), invariant=Draw(("own bits", seed % (kinds or 10)), sizes).chance(0.2),
    )  # fmt: skip
    case = CacheCase(
        f"mixed_{seed}", sequences, packed=True, appends=appends, head_dim=head_dim,
        head_dim_v=None if layout == "between" else head_dim_v, layout=layout, **_heads(k, kinds > 0), **band,
        **k.scores(), **given,
    )  # fmt: skip
    case = _within(_allowed(case, has_trees=has_trees), sizes)
    return Drawn(seed, "cached", case, dtype, maxima=k.chance(0.2))


def _heads(d: Draw, few: bool) -> dict[str, int]:
    """Query heads and key heads: any, or some that ``_within`` need not change."""
    heads, kv_heads = d.pick((8, 2), (16, 1), (4, 4), (24, 8)) if few else (0, 0)
    return {"heads": heads, "kv_heads": kv_heads} if few else d.heads()


def _sequence(d: Draw, appends: bool) -> tuple[int, int, int]:
    """Keys before, queries and new keys of one sequence."""
    most = d.sizes.longest
    old, rows = {
        "decode": (d.length(most), 1),
        "drafts": (d.length(most), d.upto(12, 2)),
        "chunk": (d.length(most), d.upto(max(most // 3, 2), 2)),
        "prompt": (0, d.length(most // 2)),
        "idle": (d.length(most), 0),
        "empty": (0, 0),
        "absent": (-1, d.upto(3)),
    }[d.pick("decode", "decode", "decode", "drafts", "chunk", "chunk", "prompt", "idle", "empty", "absent")]
    return old, rows, rows if appends else 0


def _allowed(case: CacheCase, *, has_trees: bool) -> CacheCase:
    """The case without what does not go with the rest of it."""
    changes: dict[str, Any] = {}
    if not case.page_size:
        changes["ragged"] = ""
    else:
        changes["entries"] = False
    if not case.appends:
        changes["slots"] = ""
    if not case.rotary:
        changes |= {"interleaved": False, "rotary_start": False}
    if not case.float8:
        changes["e5m2"] = False
    else:
        changes["invariant"] = False  # scales of pages do not go with it
    changes |= {"causal": True, "causal_each": False} if has_trees else {"tree": "", "tree_rows": 0, "words": False}
    return replace(case, **changes)


def judge_batch(call: Drawn, backend: str, device: str = "cpu") -> bool:
    """Asserts both rules, or the refusal; returns whether the backend computes such batches."""
    assert isinstance(call.case, CacheCase)
    made = build(call.case, call.dtype, device, call.seed)
    judge(made, backend)
    if call.maxima:
        judge_cached_maxima(*(build(call.case, call.dtype, device, call.seed) for _ in range(2)), backend)
    if dispatch.reasons(backend, made.problem, "decode"):
        return False
    judge_alone(call.case, call.dtype, backend, device)
    return True


def fuzz(
    backend: str, seed: int, count: int, say: Callable[[str], None], device: str = "cpu", kinds: int | None = None
) -> list[str]:
    """Judges so many batches from ``seed`` on; says what is wrong, and a line of what was done. Returns the faults.

    ``kinds``: see ``draw_batch``; by default few on a GPU.
    """
    sizes = ON_GPU if device == "cuda" else TINY if backend == "portable" else SMALL
    kinds = (KINDS_ON_GPU if device == "cuda" else 0) if kinds is None else kinds
    wrong, computed, sequences = list[str](), 0, 0
    for number in range(seed, seed + count):
        call = draw_batch(number, sizes, kinds)
        if backend == "portable" and device == "cpu" and call.dtype == torch.bfloat16:
            call = replace(call, dtype=torch.float16)  # the interpreter multiplies bfloat16 numbers as integers
        sequences += len(call.case.sequences)  # type: ignore[union-attr]
        try:
            computed += judge_batch(call, backend, device)
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {str(error)[:500]}\n    {call}")
            say(f"FAILED {wrong[-1]}")
    done = f"{count} mixed batches from {seed} on, {sequences} sequences, each alone too"
    say(f"{done}: right by {backend} on {device} {computed}, refused {count - computed - len(wrong)}")
    return wrong
