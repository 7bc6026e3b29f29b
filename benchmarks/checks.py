"""Numbers before times: every provider's outputs against float64, on a few heads of each case.

A probe is one sequence and one key head with all its query heads: first, last and one between. Whole heads are
compared, so that every row and every key of them counts; of all other heads only NaN and infinities would be seen. That
costs milliseconds at 16k tokens, where the whole batch in float64 would cost more than the timing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs

Outputs = tuple[Tensor, ...]

_ROWS_A_CHUNK = 1024
# Under twice the low precision's own error stands a floor: kernels may use an exponential that is good to some 20 ulp.
_FLOOR = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-4, "bfloat16": 1e-3}


@dataclass(frozen=True)
class Probe:
    """One sequence and one key head, as slices of the tensors.

    Attributes:
        sequence: Index of the sequence.
        rows: Rows of a packed tensor, or None for dense tensors.
        heads_q: Query heads of the group.
        head_kv: Key head.
    """

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
    """The float64 results of a case on its probes, and the error that a provider may have.

    Args:
        case: The cell.
        inputs: Its tensors.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.probes = probes(case)
        self._exact = [compute(case, inputs, probe, torch.float64) for probe in self.probes]
        plain = [compute(case, inputs, probe, case.torch_dtype) for probe in self.probes]
        self.limit = 2 * max(map(_distance, plain, self._exact)) + _FLOOR[case.dtype]

    def error(self, outputs: Outputs) -> float:
        """The largest relative error ``|x - ref| / |ref|`` over probes and outputs; NaN if any element is not finite.

        Args:
            outputs: ``(out,)`` forward, ``(dq, dk, dv)`` backward, in the layout of q, k and v.
        """
        if not all(bool(torch.isfinite(x).all()) for x in outputs):
            return float("nan")
        return max(_distance(_view(p, outputs), exact) for p, exact in zip(self.probes, self._exact, strict=True))


def probes(case: Case) -> list[Probe]:
    """First, last and one seeded (sequence, key head) between."""
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
    dq, dk, dv = outputs
    return probe.queries(dq), probe.keys(dk), probe.keys(dv)


def _distance(got: Outputs, exact: Outputs) -> float:
    """Relative error in the Frobenius norm, the worst of the tensors."""
    pairs = zip(got, exact, strict=True)
    return max(float((g.double() - e.double()).norm() / e.double().norm().clamp_min(1e-300)) for g, e in pairs)


def compute(case: Case, inputs: Inputs, probe: Probe, dtype: torch.dtype) -> Outputs:
    """The probe's results with every operation in ``dtype``; sums over chunks of rows stay in float32 or better."""
    q, dout = probe.queries(inputs.q).to(dtype), probe.queries(inputs.dout).to(dtype)
    k, v = probe.keys(inputs.k).to(dtype), probe.keys(inputs.v).to(dtype)
    group, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[0]
    scale = head_dim**-0.5
    wide = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for start in range(0, seqlen_q, _ROWS_A_CHUNK):
        rows = slice(start, min(start + _ROWS_A_CHUNK, seqlen_q))
        keep = case.band.dense(seqlen_q, seqlen_k, rows=(rows.start, rows.stop), device=q.device)
        for head in range(group):
            scores = torch.where(keep, q[head, rows] @ k.T * scale, -torch.inf)
            probs = torch.softmax(scores, dim=-1)
            out[head, rows] = probs @ v
            if case.direction == "backward":
                dprobs = dout[head, rows] @ v.T
                delta = (dout[head, rows] * out[head, rows]).sum(-1, keepdim=True)
                dscores = probs * (dprobs - delta) * scale
                dq[head, rows] = dscores @ k
                dk += dscores.T @ q[head, rows]
                dv += probs.T @ dout[head, rows]
    return (out,) if case.direction == "forward" else (dq, dk, dv)


def poison(outputs: Outputs) -> None:
    """Fills results with NaN, to be dropped: the allocator hands their memory to the next call's outputs.

    A kernel that leaves an element unwritten then returns NaN instead of an earlier, right result.
    """
    for x in outputs:
        x.fill_(torch.nan)
