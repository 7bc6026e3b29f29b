"""Random calls with random functions of the user's, judged by a backend like all calls, with what captured tensors get.

On a machine with a GPU ``python -m tests.fuzz functions --backend hopper --device cuda`` computes them there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from tests.cases import Case, judge
from tests.fuzz.drawn import FLOATS, SMALL, Draw, Sizes, _plain, _within
from tests.fuzz.judged import cancels, within
from tests.mods.calls import with_functions
from tests.mods.functions import MASKS, SCORES

Drawn = tuple[Case, str | None, str | None, torch.dtype, tuple[int, int] | None]
# By backend, on CPU tensors: what takes it a second or so.
_SIZES = {"portable": Sizes(40, 2**14, 64), "hopper": Sizes(150, 2**16, 256)}


def drawn(seed: int, sizes: Sizes | None = None) -> Drawn:
    """Call number ``seed``: a case, a score mod, a mask mod, a dtype, and the size of blocks of the mask's lists."""
    d = Draw(("mods", seed), sizes or replace(SMALL, longest=90, most_pairs=2**17, most_dim=64))
    case = _within(_plain(d, f"mods_{seed}"), d.sizes)
    softcap = case.softcap if d.chance(0.5) else 0.0
    # Of scores of tens a probability from lse errs more than one from a softmax, which is what the rule's draws know.
    case = replace(case, softcap=softcap, wanted=None, out="", scale=None if case.scale == 1.0 else case.scale)
    score = d.pick(*SCORES) if d.chance(0.8) else None
    mask = d.pick(*MASKS) if score is None or d.chance(0.6) else None
    listed = (d.pick(16, 32, 48, 64, 7), d.pick(16, 32, 64, 128, 20)) if mask and d.chance(0.6) else None
    case = replace(case, invariant=case.invariant and score is None)  # GPUs refuse both together
    return case, score, mask, d.pick(*FLOATS), None if case.intervals else listed


def on_hopper(call: Drawn) -> Drawn:
    """The like of a call that Hopper's kernels can run: in 16 bits, of whole 16 bytes.

    With a score mod it has no dropout. Lists are of blocks of whole tiles.
    """
    case, score, mask, dtype, listed = call
    dims = (max(40, -(-dim // 8) * 8) if dim else None for dim in (case.head_dim, case.head_dim_v))
    layout = "contiguous" if case.layout == "sliced" else case.layout
    dropout = 0.0 if score else case.dropout
    case = replace(case, dropout=dropout, layout=layout, **dict(zip(("head_dim", "head_dim_v"), dims, strict=True)))
    return case, score, mask, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16, listed and (
        128 * (1 + listed[0] // 48), 128 * (1 + listed[1] // 64)
    )  # fmt: skip


def on_portable(call: Drawn) -> Drawn:
    """The like of a call whose lists the portable kernels can follow: of blocks of whole tiles."""
    *rest, listed = call
    return (*rest, listed and (max(16, listed[0] // 16 * 16), max(16, listed[1] // 16 * 16)))


# By backend.
_LIKE = {"hopper": on_hopper, "portable": on_portable}


def judge_call(call: Drawn, backend: str, seed: int, device: str = "cpu") -> None:
    """Judges a call; with a gradient that a backend leaves to another, by the library's choice of both."""
    case, score, mask, dtype, listed = call
    # On a device of their own lists have bits by themselves.
    bits = backend == "hopper" and device == "cpu" and listed is not None and mask is not None and seed % 2 == 1
    made = with_functions(case, score, mask, dtype, seed, listed=listed, device=device, bits=bits)
    if cancels(made.problem) or mask == "nothing":
        made = made.wanting([name for name in made.leaves if name == "v"])  # type: ignore[assignment]
    by_choice = backend == "hopper" and (made.problem.operand_grad or made.problem.bias_grad)
    judge(made, None if by_choice else backend)


def fuzz(backend: str, seed: int, count: int, say: Callable[[str], None], device: str = "cpu") -> list[str]:
    """Judges so many calls from ``seed`` on; says and returns what is wrong, with the calls."""
    wrong = []
    sizes = _SIZES.get(backend) if device == "cpu" else Sizes(700, 2**22)
    for number in range(seed, seed + count):
        call = _LIKE.get(backend, lambda each: each)(drawn(number, sizes))
        try:
            with within(backend, number) if device == "cpu" else nullcontext():
                judge_call(call, backend, number, device)
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {str(error)[:500]}\n    {call}")
            say(f"FAILED {wrong[-1]}")
    return wrong
