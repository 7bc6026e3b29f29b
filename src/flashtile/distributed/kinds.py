"""What calls over ranks share: ranks agree on it once, and later calls of the same shapes and options reuse it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import TENSORS, Grads, Tensors
from flashtile.call.backend import directions_of
from flashtile.call.problem import Problem
from flashtile.core import settings
from flashtile.core.errors import ExchangeError, InvalidInputError, UnsupportedError
from flashtile.core.states import in_one, sinks_gradient
from flashtile.distributed.copies import Copies, may_copy, reach
from flashtile.distributed.exchange import Messages, RankLine, add_up, agree, any_of, refuse_differences, shortened
from flashtile.distributed.heads import HeadExchange
from flashtile.distributed.launches import OfRows, RankPart, Wholes, four, has_pairs, with_
from flashtile.distributed.layouts import Dealt, ranges, shard_length
from flashtile.distributed.plan import make_plan
from flashtile.distributed.spec import Saved, Spec, Whole, saved_of
from flashtile.distributed.steps import Steps
from flashtile.ops import dispatch

COMMS = ("auto", "ring", "allgather", "ulysses")
# Operations that a Hopper GPU does (600 TFLOPS in 16 bits) while one byte crosses NVLink (249 GB/s), with a margin.
_HIDDEN = 3000
# Values that ranks exchange but that may differ between them.
_OWN = dict.fromkeys(("reach", "rows_q", "rows_k"), 0)


def make_kind(spec: Spec, t: Tensors) -> RingKind:
    """Compares the call with the other ranks' calls, and prepares it. All ranks raise the same error.

    Raises:
        InvalidInputError: Names the argument that differs between ranks, or is not valid on some rank.
        UnsupportedError: On some rank no backend can run the call, or calls over ranks do not support it.
        ExchangeError: A rank did not answer.
    """
    refused: list[str] = []
    try:
        _check(spec, t)
    except InvalidInputError as error:
        refused = [error.argument, error.message[:1000]]
    except UnsupportedError as error:
        refused = ["", str(error)[:1000]]
    said = {name: shortened(value) for name, value in _said(spec, t).items()}
    everyone = agree(spec.ranks, t.q.device, {"refused": refused, "reach": reach(t.q.device), **said})
    for rank, record in zip(spec.ranks.members, everyone, strict=True):
        if record["refused"]:
            argument, message = record["refused"]
            if argument:
                raise InvalidInputError(argument, f"on rank {rank}: {message}")
            raise UnsupportedError(f"on rank {rank}: {message}")
    refuse_differences(spec.ranks, [{**record, **_OWN} for record in everyone])
    _check_rows(spec, everyone)
    return RingKind(
        spec, t, spec.comm in ("auto", "ring") and may_copy(spec.ranks, [each["reach"] for each in everyone])
    )


def _said(spec: Spec, t: Tensors) -> dict[str, Any]:
    """By argument, the values that must be the same on all ranks; only ``rows_q`` and ``rows_k`` may differ."""
    o, axis = spec.options, 0 if spec.packed else 1

    def kind(x: Tensor | None) -> str | None:
        return None if x is None else f"{x.dtype} {(*x.shape[:axis], *x.shape[axis + 1 :])} a row"

    def whole(x: Tensor | None) -> str | None:
        return None if x is None else f"{x.dtype} of shape {tuple(x.shape)}"

    tensors = {"q": t.q, "k": t.k, "v": t.v, "alibi_slopes": t.alibi_slopes, "sinks": t.sinks}
    pairs = {"attn_mask": t.attn_mask, "attn_bias": t.attn_bias}
    kept = spec.intervals
    masks = [whole(t.row_keys), whole(t.key_rows), o.mirrored, *([] if kept is None else [kept.rows, kept.keys])]
    functions = [o.mods, [whole(x) for x in t.operands or ()]]
    lengths = zip("qk", (spec.lengths_q, spec.lengths_k), spec.inferred, strict=True)
    name = "cu_seqlens" if spec.packed else "seqlen"
    return {
        **{name: kind(x) for name, x in tensors.items()},
        **{name: whole(x) for name, x in pairs.items()},
        "block_mask": masks if t.row_keys is not None or t.key_rows is not None else None,
        "score_mod, mask_mod": functions if o.mods else None,
        **{f"{name}_{side}": None if inferred else all_of_them for side, all_of_them, inferred in lengths},
        "layout": [x.spans, x.lengths] if isinstance(x := spec.layout, Dealt) else x,
        "comm": spec.comm,
        "window_size, causal": [o.window_left, o.window_right],
        "requires_grad": [*o.grads.named, *o.grads.operands],
        "return_lse": spec.with_lse,
        settings.COPIES.name: settings.COPIES.get(),
        **{each: getattr(o, each) for each in ("softmax_scale", "softcap", "dropout_p", "deterministic", "backend")},
        "rows_q": spec.rows(t.q),
        "rows_k": spec.rows(t.k),
    }


def _check_rows(spec: Spec, everyone: list[dict[str, Any]]) -> None:
    """Raises if the number of rows on some rank is not its shard's."""
    ring, parts, members = spec.ranks.ring.size, spec.ranks.ulysses.size, spec.ranks.members
    for side, lengths, inferred in zip("qk", (spec.lengths_q, spec.lengths_k), spec.inferred, strict=True):
        total, first = sum(lengths), everyone[0][f"rows_{side}"]
        for i, record in enumerate(everyone):
            have, want = record[f"rows_{side}"], shard_length(shard_length(total, ring, i // parts), parts, i % parts)
            if inferred and have != first:
                must = f"give seqlen_{side}, the length of the whole, where ranks do not divide it"
                raise InvalidInputError(
                    side, f"has {have} rows on rank {members[i]} and {first} on rank {members[0]}: {must}"
                )
            if not inferred and have != want:
                of = f"of {total} rows in all it holds {want}"
                raise InvalidInputError(side, f"has {have} rows on rank {members[i]}, but {of} under every layout")


def _check(spec: Spec, t: Tensors) -> None:
    """Raises if this rank's call is wrong, whatever the other ranks call."""
    problem = _of_this_rank(spec, t)
    heads = _lines(spec, problem)[0]
    if spec.packed and len(spec.lengths_q) != len(spec.lengths_k):
        raise InvalidInputError("cu_seqlens_k", "holds another number of documents than cu_seqlens_q")
    if problem.num_heads_q % heads.size:
        have = f"has {problem.num_heads_q} heads over {problem.num_heads_kv}"
        cure = "comm='ring', 'allgather' or 'auto' exchanges none"
        if heads is spec.ranks.ulysses:
            cure = "comm='auto' exchanges none" if _is_line(spec) else "make the mesh one ring of all ranks"
        which = f"which the {heads.size} ranks that exchange heads do not divide evenly"
        raise InvalidInputError("q", f"{have}, {which}: {cure}")
    inner = problem.but(
        varlen=True, num_heads_q=problem.num_heads_q // heads.size, sinks=False,
        num_heads_kv=problem.num_heads_kv * _repeats(problem, heads) // heads.size,
        origins=_tells_origins(spec, t), out_dtype=problem.lse_dtype, grad_dtype=problem.lse_dtype,
    )  # fmt: skip
    for direction in reversed(directions_of(inner)):
        dispatch.select(inner, direction, spec.options.backend)


def _of_this_rank(spec: Spec, t: Tensors) -> Problem:
    """The problem of this rank's tensors. Packed documents are counted; their bounds are not needed."""
    bounds = torch.zeros(len(spec.lengths_q) + 1, dtype=torch.int32, device=t.q.device) if spec.packed else None
    mine: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    if not (has_pairs(t) or t.operands is not None):
        return Problem.of(dataclasses.replace(t, **mine), spec.options)
    alone: dict[str, Any] = dict.fromkeys(("attn_mask", "attn_bias", "row_keys", "key_rows", "operands", "numbers"))
    options = spec.options._replace(mods=(), grads=Grads(*spec.options.grads[:3]))
    problem = Problem.of(dataclasses.replace(t, **mine, **alone), options)
    # Tensors by pair belong to the whole call: they are checked on tensors without data that have the whole's lengths.
    values = {name: x for name in TENSORS if isinstance(x := getattr(t, name), Tensor)}
    for name, lengths in (("q", spec.lengths_q), ("k", spec.lengths_k), ("v", spec.lengths_k)):
        x = values[name]
        values[name] = x.new_empty((sum(lengths), *x.shape[1:]) if spec.packed else (len(x), lengths[0], *x.shape[2:]))
    longest = [max(x, default=0) if spec.packed else None for x in (spec.lengths_q, spec.lengths_k)]
    options = spec.options._replace(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    whole = Tensors(**{name: x.to("meta") for name, x in values.items()}, numbers=t.numbers)  # type: ignore[arg-type]
    whole.operands = None if t.operands is None else tuple(x.to("meta") for x in t.operands)
    if spec.packed:
        whole.cu_seqlens_q = whole.cu_seqlens_k = mine["cu_seqlens_q"].to("meta")
    of_whole = Problem.of(whole, options)
    return problem.but(grads=spec.options.grads, **{name: getattr(of_whole, name) for name in _OF_PAIRS})


# Fields of ``Problem`` that what is given for pairs of rows and keys decides.
_OF_PAIRS = ("bias_dtype", "mask", "row_keys", "key_rows", "by_head", "score_function", "mask_function")


def _needs_places(spec: Spec, t: Tensors) -> bool:
    """Whether results depend on positions in more ways than by the mask."""
    return has_pairs(t) or bool(spec.options.mods) or _tells_origins(spec, t)


def _tells_origins(spec: Spec, t: Tensors) -> bool:
    """Whether kernels need the origins of sequences."""
    return t.alibi_slopes is not None or spec.options.dropout_p > 0


def _lines(spec: Spec, problem: Problem) -> tuple[RankLine, RankLine]:
    """The ranks that exchange heads, and the ranks of the ring."""
    ring, ulysses = spec.ranks.ring, spec.ranks.ulysses
    alone = RankLine(None, 0, (ring.members[ring.rank],))
    if chosen(spec, problem) != "ulysses":
        is_uneven = spec.comm == "auto" and _is_line(spec) and problem.num_heads_q % ulysses.size
        return (alone, ulysses) if is_uneven else (ulysses, ring)
    if ring.size > 1 and ulysses.size > 1:
        must = "'ring', 'allgather' and 'auto' exchange heads along its other dimension"
        raise InvalidInputError("comm", f"is 'ulysses', but the mesh has a ring of {ring.size} ranks as well: {must}")
    return (ulysses, alone) if ring.size == 1 else (ring, alone)


def _is_line(spec: Spec) -> bool:
    """Whether all ranks exchange heads and hold contiguous shards: if heads cannot be exchanged, they form a ring."""
    return spec.ranks.ring.size == 1 and isinstance(spec.layout, str)


def _repeats(problem: Problem, heads: RankLine) -> int:
    """How many copies of each key head are sent, so that the ranks that exchange heads divide the copies evenly."""
    return heads.size // math.gcd(problem.num_heads_kv, heads.size)


def chosen(spec: Spec, problem: Problem) -> str:
    """What ``comm`` means for a call. "auto" is the ring if kernels hide it, else the way that sends fewer bytes.

    Kernels hide the ring if there are at least ``_HIDDEN`` operations for each byte that a rank sends. Around the ring,
    keys go once to each other rank, and once more in the backward, with their gradients in float32. Heads of q, k, v
    and out are sent once, and in the backward the heads of dout and of the gradients. If the mesh has a dimension
    "ulysses", heads are exchanged along it whatever ``comm`` is.
    """
    n, p = spec.ranks.ring.size, problem
    if spec.comm != "auto":
        return spec.comm
    if n == 1 or spec.ranks.ulysses.size > 1 or p.num_heads_kv % n:
        return "ring"
    width, size, both = p.head_dim + p.head_dim_v, p.dtype.itemsize, p.needs_grad
    keys, rows = (sum(x) * h * width for x, h in ((spec.lengths_k, p.num_heads_kv), (spec.lengths_q, p.num_heads_q)))
    # Bytes sent by all ranks, divided by n - 1.
    around = keys * (2 * size + p.lse_dtype.itemsize if both else size)
    across = (keys + rows) * size * (2 if both else 1) / n
    pairs = sum(spec.band.count(*lengths) for lengths in zip(spec.lengths_q, spec.lengths_k, strict=True))
    operations = 2 * width * p.num_heads_q * pairs * (3.5 if both else 1)
    is_hidden = operations >= _HIDDEN * around * (n - 1)
    return "ring" if is_hidden or around <= across else "ulysses"


def _messages(spec: Spec, ring: RankLine, problem: Problem, heads: int, keys: int, q: Tensor) -> Messages | Copies:
    """Copy engines, for shards of ``keys`` keys. If memory cannot be mapped, the process group, with a warning.

    Raises:
        ExchangeError: Memory cannot be mapped on this rank or another one, and the setting is on.
    """
    elements = keys * heads * max(problem.head_dim, problem.head_dim_v)
    sizes = {"keys": elements * problem.dtype.itemsize}
    if any(spec.options.grads[1:3]):
        sizes |= dict.fromkeys(("sums", "back") if ring.size > 3 else ("back",), elements * problem.lse_dtype.itemsize)
    made: Messages | Copies = Messages(ring)
    why, what = "another rank cannot", "the mapping of GPUs' memory"
    try:
        made = Copies(ring, q.device, sizes)
    except RuntimeError as error:
        why = str(error)
    if any_of(ring, what, q, isinstance(made, Messages)):
        if settings.COPIES.enabled():
            raise ExchangeError(what, ring.members, why)
        warnings.warn(f"flashtile: no copy engines: {why}", RuntimeWarning, stacklevel=2)
        made = Messages(ring)
    return made


class RingKind:
    """What repeated calls of the same layouts and options share. The ranks have agreed on it.

    Args:
        spec: Describes the calls.
        t: Tensors of such a call; their layouts are read.
        copies: Whether copy engines carry keys around a ring.
    """

    def __init__(self, spec: Spec, t: Tensors, copies: bool) -> None:
        problem = _of_this_rank(spec, t)
        self.spec, self._problem, self._keys = spec, problem, spec.rows(t.k)
        heads, ring = _lines(spec, problem)
        batch = 1 if spec.packed else problem.batch
        lengths_q, lengths_k = (x if batch else (0,) for x in (spec.lengths_q, spec.lengths_k))
        batch, layout = max(batch, 1), spec.layout
        self._heads: tuple[HeadExchange, HeadExchange] | None = None
        if heads.size > 1:
            made = [self._exchange(heads, ring, lengths, batch, t.q.device) for lengths in (lengths_q, lengths_k)]
            self._heads = made[0], made[1]
        if ring.size == 1 or ring is spec.ranks.ulysses:
            layout = "contiguous"
        self._repeats = _repeats(problem, heads)
        self._ring, each = ring, problem.num_heads_q // heads.size
        self._some = slice(heads.rank * each, (heads.rank + 1) * each)
        most = None
        if ring.size > 1 and spec.comm == "allgather":
            most = shard_length(sum(lengths_k), ring.size, 0) * batch
        plan = make_plan(
            lengths_q, lengths_k, ring.size, ring.rank, layout, spec.band, batch=batch, origins=_needs_places(spec, t),
            whole=most is not None, intervals=spec.intervals,
        )  # fmt: skip
        part = RankPart(problem.num_heads_q, self._some.start, _tells_origins(spec, t), problem.large_scores)
        messages: Messages | Copies = Messages(ring)
        if copies and ring.size > 1 and ring is spec.ranks.ring and spec.comm != "allgather":
            kv, keys = problem.num_heads_kv * self._repeats // heads.size, shard_length(sum(lengths_k), ring.size, 0)
            messages = _messages(spec, ring, problem, kv, keys * batch, t.q)
        # The share of the first half is the bytes of keys, which leave beside it, over these and the sums' bytes, which
        # return last.
        share = problem.dtype.itemsize / (problem.dtype.itemsize + problem.lse_dtype.itemsize)
        self._steps = Steps(plan, ring, spec.options, part, t.q.device, messages, most, share, self._repeats == 1)

    def _exchange(
        self, heads: RankLine, ring: RankLine, lengths: tuple[int, ...], batch: int, device: torch.device
    ) -> HeadExchange:
        ranks, layout = self.spec.ranks, self.spec.layout
        if heads is ranks.ring:
            shards = [ranges(lengths, heads.size, i, layout) for i in range(heads.size)]
        else:
            mine = shard_length(sum(lengths), ring.size, ring.rank)
            ends = [0, *itertools.accumulate(shard_length(mine, heads.size, i) for i in range(heads.size))]
            shards = [(range(*pair),) for pair in itertools.pairwise(ends)]
        return HeadExchange(heads, shards, batch, device)

    def forward(self, t: Tensors) -> tuple[Tensor, Tensor | None, Saved]:
        """Returns out and lse (None if not wanted) in the shapes of ``api.attention``, and what the backward needs."""
        q, k, v = (x if self.spec.packed else x.flatten(0, 1) for x in (t.q, t.k, t.v))
        sinks, slopes = t.sinks, t.alibi_slopes
        if self._heads is not None:
            of_rows, of_keys = self._heads
            if self._repeats > 1:
                k, v = (x.repeat_interleave(self._repeats, 1) for x in (k, v))
            (q,), (k, v) = of_rows.split(q), of_keys.split(k, v)
            sinks = None if sinks is None else sinks[self._some].contiguous()
            slopes = None if slopes is None else slopes[..., self._some].contiguous()
        inner = with_(t, q=q, k=k.contiguous(), v=v.contiguous(), alibi_slopes=slopes, sinks=None, **self._pairs(t))
        out, lse = self._steps.forward(inner, sinks)
        saved = saved_of(out, lse, sinks, inner)
        out_here, lse_here = out, in_one(lse, out) if self.spec.with_lse else None
        if self._heads is not None:
            out_here = self._heads[0].join(out)
            lse_here = None if lse_here is None else self._heads[0].join(lse_here.t()[..., None])[..., 0].t()
        return self._like_q(out_here, t.q), None if lse_here is None else self._lse_like_q(lse_here, t.q), saved

    def _pairs(self, t: Tensors) -> dict[str, Any]:
        """The parts of masks and biases for this rank's heads."""
        if self._heads is None or not has_pairs(t):
            return {}
        given = {name: getattr(t, name) for name in ("attn_mask", "attn_bias", "row_keys", "key_rows")}
        found = {name: x for name, x in given.items() if x is not None}
        return {
            name: four(x)[:, self._some] if x.dim() > 2 and four(x).shape[1] > 1 else x for name, x in found.items()
        }

    def backward(self, saved: Saved, t: Tensors, dout: Tensor, dlse: Tensor | None) -> Whole:
        """The gradients that are wanted. ``t`` has the whole bias, and the tensors that functions read."""
        q_like = dout
        if not self.spec.packed:
            dout = dout.flatten(0, 1)
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
        if self._heads is not None:
            (dout,) = self._heads[0].split(dout)
            dlse = None if dlse is None else self._heads[0].split(dlse.t()[..., None])[0][..., 0].t()
        dlse = None if dlse is None else dlse.contiguous()
        grads, inner = self.spec.options.grads, saved.tensors
        inner.k, inner.v = inner.k.contiguous(), inner.v.contiguous()
        inner.operands, inner.numbers = t.operands, t.numbers
        wholes = Wholes.zeros(inner, grads) if grads.bias or grads.operands else None
        rows = OfRows(saved.out.contiguous(), saved.lse.contiguous(), dout.contiguous(), dlse, wholes)
        dq = dk = dv = None
        if any(grads[:3]) or wholes is not None:
            total = self._steps.backward(inner, rows)
            dq, dk, dv = total.dq, *(self._of_keys(x, saved.k.dtype) for x in (total.dk, total.dv))
            dq = None if dq is None else self._like_q(dq if self._heads is None else self._heads[0].join(dq), q_like)
        dsinks = self._dsinks(saved.sinks, rows) if grads.sinks and saved.sinks is not None else None
        return Whole(dq, dk, dv, dsinks, *self._of_wholes(wholes, t))

    def _of_wholes(self, wholes: Wholes | None, t: Tensors) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The gradients of a bias and of the tensors that functions read, summed over all ranks' rows."""
        if wholes is None:
            return None, ()
        dbias = None
        if wholes.bias is not None and t.attn_bias is not None:
            found, whole = wholes.bias, four(t.attn_bias)
            if found.shape != whole.shape:
                found = torch.zeros_like(whole, dtype=found.dtype, memory_format=torch.contiguous_format)
                found[:, self._some] = wholes.bias
            # If each rank has some of the heads, the gradients of the other heads are zeros here.
            found = add_up(self.spec.ranks, "the sum of the gradients of attn_bias", found)
            dbias = found.view(t.attn_bias.shape).to(t.attn_bias.dtype)
        what = "the sum of the gradients of what score_mod reads"
        totals = (None if x is None else add_up(self.spec.ranks, what, x) for x in wholes.operands)
        pairs = zip(totals, t.operands or (), strict=True) if wholes.operands else ()
        return dbias, tuple(None if x is None else x.to(like.dtype) for x, like in pairs)

    def _of_keys(self, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The gradient of k or v in the rank's rows; gradients of repeated heads are summed in float32."""
        if x is None:
            return None
        if self._heads is not None:
            x = self._heads[1].join(x)
        if self._repeats > 1:
            x = x.unflatten(1, (-1, self._repeats)).sum(2).to(dtype)
        return x if self.spec.packed else x.unflatten(0, (self._problem.batch, self._keys))

    def _dsinks(self, sinks: Tensor, rows: OfRows) -> Tensor:
        """The gradient of sinks, summed over all ranks' rows."""
        dtype = rows.lse.dtype
        delta = (rows.dout.to(dtype) * rows.out.to(dtype)).sum(-1).t()
        if rows.dlse is not None:
            delta = delta - rows.dlse.to(dtype)
        found = delta.new_zeros(self._problem.num_heads_q)
        found[self._some] = sinks_gradient(sinks, rows.lse, delta)
        return add_up(self.spec.ranks, "the sum of the gradients of sinks", found).to(sinks.dtype)

    def _like_q(self, x: Tensor, q: Tensor) -> Tensor:
        return x if self.spec.packed else x.unflatten(0, q.shape[:2])

    def _lse_like_q(self, lse: Tensor, q: Tensor) -> Tensor:
        return lse.contiguous() if self.spec.packed else lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
