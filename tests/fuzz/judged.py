"""Computes drawn calls with a backend and judges the numbers by the rules of the case tables.

The CPU backend as it is, the portable one under Triton's interpreter, the Hopper one in the emulator of Gluon, or any
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch

from flashtile.call.backend import Backend
from flashtile.call.problem import Problem
from flashtile.ops import dispatch
from tests import cases, sums
from tests.cases import Case
from tests.fuzz.drawn import LONG, SMALL, Drawn, Kind, Sizes, draw
from tests.kvcache import cases as kvcache
from tests.kvcache.cases import CacheCase
from tests.maxima import judge_cached_maxima, judge_maxima
from tests.origins import judge_parts
from tests.partials import judge_chain
from tests.poison import poisoned_memory
from tests.quantization import cases as quantization
from tests.quantization import quantizer
from tests.quantization.cases import QuantizedCase

# In Triton's interpreter and the emulator a tile takes milliseconds.
TINY = Sizes(60, 2**16, 128)
TILES = Sizes(200, 2**18)


def judge(call: Drawn, backend: str, device: str = "cpu") -> None:
    """Asserts the rule of the call's kind, or that the backend refuses it with the reasons that it declares."""
    case = call.case
    if call.kind == "pieces":
        _judge_pieces(call, dispatch.backend(backend), device)
    elif isinstance(case, Case):
        made = cases.build(case, call.dtype, device, call.seed)
        if cancels(made.problem) and made.leaves:
            made = cases.build(replace(case, wanted="v"), call.dtype, device, call.seed)
        cases.judge(made, backend)
        if call.maxima:
            judge_maxima(made, backend, gradients=False)
    elif isinstance(case, CacheCase):
        kvcache.judge(kvcache.build(case, call.dtype, device, call.seed), backend)
        if call.maxima:
            judge_cached_maxima(*(kvcache.build(case, call.dtype, device, call.seed) for _ in range(2)), backend)
    elif isinstance(case, QuantizedCase):
        rounding = quantization.WIDE if backend == "cpu" else quantization.EIGHT_BIT
        quantization.judge(quantization.build(case, device, call.seed), backend, rounding)
    elif backend == "portable":
        apart = {torch.bfloat16: 0.02, torch.float16: 0.006, torch.float32: 0.006}[call.dtype]
        quantizer.check(case, quantizer.inputs(case, call.dtype, device), apart, 0.02)


def cancels(problem: Problem) -> bool:
    """Whether every row sees one key at most: gradients of its score are sums that cancel to exactly 0.

    The rule, a multiple of what another order of such a sum comes to, says nothing of them.
    """
    band = problem.band
    is_narrow = band.left is not None and band.right is not None and band.left + band.right <= 0
    return not problem.sinks and (problem.seqlen_k <= 1 or is_narrow)


def _judge_pieces(call: Drawn, backend: Backend, device: str) -> None:
    case, pieces = call.case, call.pieces
    assert isinstance(case, Case) and pieces is not None
    problem = cases.build(case, call.dtype, device).problem.but(deterministic=pieces.deterministic)
    directions = [each for each in ("forward", "backward") if not dispatch.reasons(backend.name, problem, each)]  # type: ignore[arg-type]
    with poisoned_memory():
        if "forward" in directions:
            with torch.no_grad():
                judge_chain(backend, case, pieces.cuts, call.dtype, exact=False, device=device)
        if "backward" in directions and not cancels(problem):
            judge_sums(backend, call, device)
        if pieces.origins and not dispatch.reasons(
            backend.name, problem.but(varlen=True, origins=True, dropout_p=0.1), "forward"
        ):
            dropout, alibi = "d" in pieces.origins, "a" in pieces.origins
            judge_parts(backend, call.dtype, dropout=dropout, alibi=alibi, head_dim=case.head_dim, device=device)


def judge_sums(backend: Backend, call: Drawn, device: str) -> None:
    """``tests.sums.judge_sums`` of the call's pieces."""
    assert isinstance(call.case, Case) and call.pieces is not None
    sums.judge_sums(
        backend, call.case, call.pieces.cuts, call.dtype, exact=False, deterministic=call.pieces.deterministic,
        device=device,
    )  # fmt: skip


@contextmanager
def within(backend: str, seed: int) -> Iterator[None]:
    """Where a backend runs on CPU tensors."""
    if backend != "hopper":
        yield
        return
    from flashtile.backends.hopper.latent import launch as latent
    from tests.backends.hopper.emulated import on_cpu

    with on_cpu(seed, num_sms=1 + seed % 3), mock.patch.object(latent, "multiprocessors", lambda device: 1 + seed % 7):
        yield


def on_cpu(seed: int, backend: str, kind: Kind | None = None) -> Drawn:
    """A call that takes the backend about a second on CPU tensors, and is one that it can have there."""
    sizes = {"portable": TINY, "hopper": TILES}.get(backend, SMALL)
    call = draw(seed, sizes, kind)
    if backend == "portable" and call.dtype == torch.bfloat16 and call.kind in ("cached", "latent", "quantizer"):
        # The interpreter multiplies bfloat16 numbers as integers.
        is_rows = isinstance(call.case, CacheCase) and call.case.float8 == "rows"
        return replace(call, case=replace(call.case, float8="") if is_rows else call.case, dtype=torch.float16)
    if backend == "hopper" and kind == "latent":
        return _of_latent_rows(call)
    if backend == "hopper" and call.kind in ("cached", "latent"):
        # Its kernels but those for wide groups and latent rows are Triton's, and so is the one that appends.
        return on_cpu(seed, backend, "plain")
    if backend == "hopper" and isinstance(call.case, Case) and call.case.layout == "sliced":
        # Of CPU tensors nobody asks whether they lie on 16 bytes.
        return replace(call, case=replace(call.case, layout="contiguous"))
    return call


def _of_latent_rows(call: Drawn) -> Drawn:
    """The call without what the kernel over latent rows leaves to Triton's."""
    case = call.case
    assert isinstance(case, CacheCase)
    sequences = tuple((max(old, 0) + new, rows, 0) for old, rows, new in case.sequences)
    plain = replace(
        case, sequences=sequences, appends=False, rotary=0, rotary_start=False, slots="", window=None, softcap=0.0,
        alibi="", tree="", leftpad=(), chunk=None, scale=0.1 if case.scale else None, head_dim=64,
        head_dim_v=512, packed_new=False,
        float8="rows" if call.seed % 3 == 0 else "", interleaved=False, tables=False, capacity=0,
        layout="apart" if case.layout == "apart" else "stacked",
    )  # fmt: skip
    return replace(
        call, case=plain, dtype=torch.float16 if call.dtype == torch.float16 and not plain.float8 else torch.bfloat16
    )


def fuzz(
    backend: str, seed: int, count: int, say: Callable[[str], None], kind: Kind | None = None, device: str = "cpu",
    sizes: Sizes = LONG,
) -> list[str]:  # fmt: skip
    """Judges so many calls from ``seed`` on; says and returns what is wrong, with the calls."""
    wrong = []
    for number in range(seed, seed + count):
        call = on_cpu(number, backend, kind) if device == "cpu" else draw(number, sizes, kind)
        try:
            with within(backend, number) if device == "cpu" else nullcontext():
                judge(call, backend, device)
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {str(error)[:500]}\n    {call}")
            say(f"FAILED {wrong[-1]}")
    return wrong
