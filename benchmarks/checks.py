"""Correctness checks before timing: every provider's outputs against float64, on a few heads of each case.

A probe is one sequence and one key head with all its query heads: first, last and one in between. Whole heads are
compared, so every row and key of them is checked; the other heads are checked only for NaN and infinities. This costs
milliseconds at 16k tokens, where the whole batch in float64 would cost more than the timing.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.session import NotTimedError, attempt

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]
Maker = Callable[[], tuple[Call, Outputs]]

_ROWS_PER_CHUNK = 1024
_LEAST = 1e-3
# Share by which the distances of two draws of dropout may differ: some 10% where a row has 512 keys.
_DRAWS_LIMIT = 0.2
# Floor of the tolerance (twice low precision's own error): kernels may use an exponential good to some 20 ulp.
_FLOOR = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-4, "bfloat16": 1e-3}


@dataclass(frozen=True)
class Probe:
    """One sequence and one key head with its query heads; ``rows`` is its range in a packed tensor, else None."""

    sequence: int
    rows: slice | None
    heads_q: slice
    head_kv: int

    def queries(self, x: Tensor) -> Tensor:
        """``(group_size, seqlen_q, head_dim)`` of a tensor like q."""
        x = x[self.sequence] if self.rows is None else x[self.rows]
        return x[:, self.heads_q].transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """``(seqlen_k, head_dim)`` of a tensor like k."""
        x = x[self.sequence] if self.rows is None else x[self.rows]
        return x[:, self.head_kv]


class Reference:
    """The float64 results of a case on its probes, and the allowed error.

    With dropout everyone draws numbers of their own, so results are compared with those without: they are as far off
    as results with another draw are, and what is checked is by how much that distance differs.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.probes = probes(case)
        self._exact = [compute(case, inputs, probe, torch.float64) for probe in self.probes]
        self._drawn: list[list[float]] | None = None
        if case.dropout:
            drawn = [compute(case, inputs, probe, torch.float64, draws=True) for probe in self.probes]
            self._drawn = [_of_rows(x, exact) for x, exact in zip(drawn, self._exact, strict=True)]
            self.limit = _DRAWS_LIMIT
            return
        plain = [compute(case, inputs, probe, case.torch_dtype) for probe in self.probes]
        self.limit = 2 * max(map(_distance, plain, self._exact)) + _FLOOR[case.dtype]

    def error(self, outputs: Outputs) -> float:
        """The largest relative error ``|x - ref| / |ref|`` over probes and outputs; NaN if any is not finite.

        With dropout, how far that is from what another draw has, as a share of it.
        """
        if not all(bool(torch.isfinite(x).all()) for x in outputs):
            return float("nan")
        views = [_view(probe, outputs) for probe in self.probes]
        if self._drawn is None:
            return max(map(_distance, views, self._exact))
        found = map(_of_rows, views, self._exact)
        pairs = [pair for a, b in zip(found, self._drawn, strict=True) for pair in zip(a, b, strict=True)]
        return max(abs(ours / drawn - 1) for ours, drawn in pairs)


def judged(
    reference: Reference, device: torch.device, makers: Mapping[str, Maker], limits: Mapping[str, float | None] = {}
) -> tuple[dict[str, Call], dict[str, float | str]]:
    """The calls with correct outputs, and the error or failure reason of all, by name.

    ``makers`` make a call and its outputs, in the layout of q, k and v; ``limits`` replace the reference's.
    """

    def judge(name: str) -> tuple[Call, float]:
        call, outputs = makers[name]()
        error, limit = reference.error(outputs), limits.get(name) or reference.limit
        if not error <= limit:
            raise NotTimedError(f"wrong: relative error {error:.3g}, limit {limit:.3g}")
        return call, error

    made = {name: attempt(device, name, functools.partial(judge, name)) for name in makers}
    calls = {name: of[0] for name, of in made.items() if not isinstance(of, str)}
    return calls, {name: of if isinstance(of, str) else of[1] for name, of in made.items()}


def probes(case: Case) -> list[Probe]:
    """The first, the last and a randomly chosen (sequence, key head), from a fixed seed."""
    sequences, heads = len(case.sequences), case.num_heads_kv
    group = case.num_heads_q // heads
    middle = random.Random(case.name).randrange(sequences * heads)
    chosen = sorted({0, middle, sequences * heads - 1})
    starts = [0]
    for length, _ in case.sequences:
        starts.append(starts[-1] + length)
    found = []
    for index in chosen:
        sequence, head = divmod(index, heads)
        rows = None if case.lengths is None else slice(starts[sequence], starts[sequence + 1])
        found.append(Probe(sequence, rows, slice(head * group, (head + 1) * group), head))
    return found


def _view(probe: Probe, outputs: Outputs) -> Outputs:
    if len(outputs) == 1:
        return (probe.queries(outputs[0]),)
    # A bias's gradient, the last one, is a sum over the batch.
    dq, dk, dv, *_ = outputs
    return probe.queries(dq), probe.keys(dk), probe.keys(dv)


def _distance(got: Outputs, exact: Outputs) -> float:
    """Relative error in the Frobenius norm; the largest over the tensors.

    For a tensor that is zero except for rounding, like dq of a row with one key, the error is relative to ``_LEAST``.
    """
    pairs = zip(got, exact, strict=True)
    return max(float((g.double() - e.double()).norm() / e.double().norm().clamp_min(_LEAST)) for g, e in pairs)


def _of_rows(got: Outputs, exact: Outputs) -> list[float]:
    """The median relative error of each tensor's rows: of the whole, a row with few keys would be most."""
    pairs = zip(got, exact, strict=True)
    return [float(((g.double() - e).norm(dim=-1) / e.norm(dim=-1).clamp_min(_LEAST)).median()) for g, e in pairs]


def compute(case: Case, inputs: Inputs, probe: Probe, dtype: torch.dtype, *, draws: bool = False) -> Outputs:
    """The probe's results with every operation in ``dtype``; sums over chunks of rows stay in float32 or better.

    Dropout is left out unless it ``draws``, anew.
    """
    q, dout = probe.queries(inputs.q).to(dtype), probe.queries(inputs.dout).to(dtype)
    k, v = probe.keys(inputs.k).to(dtype), probe.keys(inputs.v).to(dtype)
    group, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[0]
    scale = head_dim**-0.5
    wide = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for start in range(0, seqlen_q, _ROWS_PER_CHUNK):
        rows = slice(start, min(start + _ROWS_PER_CHUNK, seqlen_q))
        keep = case.band.dense(seqlen_q, seqlen_k, rows=(rows.start, rows.stop), device=q.device)
        if inputs.mask is not None:
            keep = keep & inputs.mask[probe.sequence, 0]
        for head in range(group):
            products, slope, at = q[head, rows] @ k.T * scale, scale, probe.heads_q.start + head
            if case.softcap:
                capped = torch.tanh(products / case.softcap)
                products, slope = case.softcap * capped, scale * (1 - capped**2)
            if inputs.bias is not None:
                products = products + inputs.bias[0, at, rows].detach()
            scores = torch.where(keep, products, -torch.inf)
            if inputs.sinks is None:
                probs = torch.softmax(scores, dim=-1)
            else:
                sinks = inputs.sinks[at].to(dtype).expand(len(scores), 1)
                probs = torch.softmax(torch.cat([scores, sinks], dim=1), dim=-1)[:, :-1]
            factor: Tensor | float = 1.0
            if draws:
                factor = (torch.rand_like(probs) >= case.dropout) / (1 - case.dropout)
            out[head, rows] = (probs * factor) @ v
            if case.direction == "backward":
                dprobs = dout[head, rows] @ v.T * factor
                delta = (dout[head, rows] * out[head, rows]).sum(-1, keepdim=True)
                dscores = probs * (dprobs - delta) * slope
                dq[head, rows] = dscores @ k
                dk += dscores.T @ q[head, rows]
                dv += (probs * factor).T @ dout[head, rows]
    return (out,) if case.direction == "forward" else (dq, dk, dv)


def poison(outputs: Outputs) -> None:
    """Fills results with NaN before they are freed: the allocator reuses their memory for the next call's outputs.

    A kernel that leaves an element unwritten then returns NaN instead of an earlier, correct result.
    """
    for x in outputs:
        x.fill_(torch.nan)
