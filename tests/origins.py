"""Parts of sequences, whose dropout and ALiBi must be those of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.call.arguments import Tensors
from flashtile.call.backend import Backend
from flashtile.core import philox
from flashtile.core.masks import Band, Origin
from tests.problems import banded_problem
from tests.rule import assert_close

_STATE = torch.tensor([2**40 + 5, 2**33 + 6])
_P, _HEADS = 0.3, 5


@dataclass(frozen=True)
class Part:
    """Rows and keys of a whole sequence: its place in the batch, and a slice of each."""

    b: int
    rows: slice
    keys: slice


# Steps of 1 from multiples of 4 and from others, larger steps, no keys, no rows.
PARTS = (
    Part(0, slice(0, 70), slice(8, 75)),
    Part(1, slice(33, 120, 2), slice(3, 150, 3)),
    Part(1, slice(5, 40), slice(20, 20)),
    Part(0, slice(60, 60), slice(1, 90, 4)),
    Part(2, slice(1, 128, 8), slice(130, 143)),
)


def judge_parts(
    backend: Backend, dtype: torch.dtype, *, dropout: bool, alibi: bool, head_dim: int = 16, device: str = "cpu"
) -> None:
    """Asserts the error rule for parts of longer sequences, of which a packed call has some of the heads."""
    make = torch.Generator().manual_seed(9)
    heads, seqlen_q, seqlen_k = range(2, 4), 140, 160
    slopes = torch.rand(len(PARTS), len(heads), generator=make) if alibi else None
    x = {
        name: torch.randn(len(PARTS), n, len(heads), head_dim, generator=make).to(dtype)
        for name, n in (("q", seqlen_q), ("k", seqlen_k), ("v", seqlen_k))
    }
    packed = {
        name: torch.cat([whole[n, part.rows if name == "q" else part.keys] for n, part in enumerate(PARTS)])
        for name, whole in x.items()
    }
    lengths = [(len(range(seqlen_q)[part.rows]), len(range(seqlen_k)[part.keys])) for part in PARTS]
    bounds = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
    origins = [
        Origin(
            part.b * _HEADS + heads.start, part.rows.start, part.rows.step or 1, part.keys.start, part.keys.step or 1,
            seqlen_k - seqlen_q,
        )
        for part in PARTS
    ]  # fmt: skip
    given: dict[str, Tensor | None] = {
        # Rows past the last part belong to none.
        **{name: torch.nn.functional.pad(whole, (0, 0, 0, 0, 0, 3), value=1.0) for name, whole in packed.items()},
        "alibi_slopes": slopes, "cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1],
        "rng_state": _STATE if dropout else None, "origins": torch.tensor(origins, dtype=torch.int32),
    }  # fmt: skip
    tensors = Tensors(**{name: None if each is None else each.to(device) for name, each in given.items()})  # type: ignore[arg-type]
    problem = banded_problem(tensors, Band(), needs_grad=True, dropout_p=_P if dropout else 0.0)
    dout = torch.randn(tensors.q.shape, generator=make).to(dtype)
    out, lse = backend.plan("forward", problem, tensors)(tensors)
    there = dout.to(device)
    grads = backend.plan("backward", problem, tensors, (there, None))(tensors, out, lse, there, None)
    assert (out[-3:] == 0).all() and (lse[:, -3:] == -torch.inf).all()
    got = {"out": out[:-3], "lse": lse[:, :-3], "dq": grads.dq[:-3], "dk": grads.dk[:-3], "dv": grads.dv[:-3]}

    # Each part by itself, its pairs taken from arrays over the whole sequences.
    kept = philox.keep(_STATE, _P, range(3), _HEADS, (0, seqlen_q), (0, seqlen_k))[:, heads.start : heads.stop]
    distance = (torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q) - torch.arange(seqlen_k)).abs()

    def by_hand(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in packed.values()]
        outs, lses = [], []
        parts = zip(*(x.split([n[i > 0] for n in lengths]) for i, x in enumerate(leaves)), strict=True)
        for n, (part, (q, k, v)) in enumerate(zip(PARTS, parts, strict=True)):
            scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
            if slopes is not None:
                scores = scores - slopes[n, :, None, None].to(dtype) * distance[part.rows, part.keys]
            lse = torch.logsumexp(scores, -1)
            probs = torch.exp(scores - lse[..., None])
            if dropout:
                probs = torch.where(kept[part.b][:, part.rows, part.keys], probs / (1 - _P), 0.0)
            outs.append(torch.einsum("hqk,khd->qhd", probs, v))
            lses.append(lse)
        out = torch.cat(outs)
        grads = torch.autograd.grad(out, leaves, dout[:-3].to(dtype))
        return {"out": out, "lse": torch.cat(lses, 1)} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    found = {name: x.cpu() for name, x in got.items()}
    assert_close(found, lambda: by_hand(torch.float64), by_hand(dtype), dtype)
