"""``attention`` over a sequence that is sharded over the ranks of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.api.keywords import Asked, Common, asked_of
from flashtile.call.arguments import Options, Tensors, integer, is_plain, other_tensors
from flashtile.call.prepared import autocast, autocast_is_on
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError, shown
from flashtile.distributed import dtensors
from flashtile.distributed.exchange import Ranks, ranks_of, share
from flashtile.distributed.intervals import Kept
from flashtile.distributed.kinds import COMMS, RingKind, make_kind
from flashtile.distributed.layouts import Layout, check_layout
from flashtile.distributed.spec import Saved, Spec
from flashtile.distributed.values import document_lengths, intervals
from flashtile.masks import Intervals
from flashtile.ops import plans


class OverRanks(Common, total=False):
    """The keywords of ``flashtile.attention`` that calls over ranks take."""

    causal: bool
    attn_mask: Tensor | None
    attn_bias: Tensor | None
    block_mask: Intervals | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    dropout_p: float
    deterministic: bool
    return_lse: bool


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout = "zigzag",
    comm: str = "auto",
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **keywords: Unpack[OverRanks],
) -> Any:
    """Exact attention over a sequence with rows that are spread over a mesh's ranks; each rank calls it with its rows.

    The results equal those which ``flashtile.attention``, or with cu_seqlens ``attention_varlen``, computes for the
    whole tensors, to the rounding of float32 sums. Dropout drops the same probabilities. All ranks must make the same
    call; the first call of a kind is compared among them.

    Args:
        q: This rank's queries, ``(batch, rows, num_heads_q, head_dim)``, or ``(rows, num_heads_q, head_dim)`` with
            cu_seqlens, as ``shard`` gives them. DTensors that are sharded along the rows over the mesh work as well.
        k: This rank's keys, likewise, in the same layout of the keys' own length.
        v: This rank's values.
        mesh: The ranks. A mesh of one dimension is a ring, around which keys travel. Along a dimension named "ulysses"
            heads are exchanged for rows; a mesh with both, ("ring", "ulysses"), exchanges heads first.
        layout: The rows that a rank has: "zigzag", "contiguous" or "striped", or a result of ``deal``; see ``shard``.
        comm: "ring"; "allgather": all keys at once; "ulysses": heads for rows along the whole mesh; "auto" chooses.
        seqlen_q: Queries of the whole sequence; by default this rank's rows times the ranks, if all ranks have as many.
        seqlen_k: Keys of the whole sequence, likewise.
        cu_seqlens_q: Bounds of the documents in the whole sequence, as in ``attention_varlen``, the same on all ranks.
            Their values are needed on the host: the call waits once for bounds on a GPU.
        cu_seqlens_k: The same for keys.
        max_seqlen_q: Not needed; checked.
        max_seqlen_k: Not needed; checked.
        **keywords: causal, window_size, softmax_scale, softcap, alibi_slopes, sinks, attn_mask, attn_bias, block_mask,
            score_mod, mask_mod, dropout_p, deterministic, return_lse and backend of ``flashtile.attention``, with
                positions in the whole sequence. Keys that no row of a rank sees, by lengths, window and block_mask, do
                not travel to it; block_mask's values are read on the host once. Masks, biases, sinks and tensors that
                functions read belong to the whole sequence and are the same on all ranks. Every rank gets their
                gradients, summed over all ranks' rows. The first rank's generator draws which probabilities are
                dropped.

    Returns:
        This rank's rows of out, or ``(out, lse)``.

    Raises:
        InvalidInputError: Names the argument. All ranks raise it, also if they were called differently.
        UnsupportedError: No backend can run the call, or calls over ranks do not support it.
        ExchangeError: Another rank died, stalled or makes another call. Names the step and the rank.

    Source: Liu et al. 2023, arXiv:2310.01889; Brandon et al. 2023, arXiv:2311.09431 (striped); Jacobs et al. 2023,
    arXiv:2309.14509 (ulysses).
    """
    given = locals()
    return _opaque()(given)


def _opaque() -> Any:
    """``_call``, disabled for torch.compile, which then traces the code before and after it without a break."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_call)
    # Importing torch._dynamo takes seconds.
    return _disabled(_call) if "torch._dynamo" in sys.modules else _call


_disabled = functools.cache(torch.compiler.disable)


def _call(given: dict[str, Any]) -> Any:
    """Runs the call with these arguments."""
    keywords = given.pop("keywords")
    q, k, v, mesh = (given[name] for name in ("q", "k", "v", "mesh"))
    if any(hasattr(x, "placements") for x in (q, k, v)):  # DTensors
        return dtensors.run(attention, **given, **keywords)
    for name, x in keywords.items():
        if hasattr(x, "placements"):
            raise InvalidInputError(name, "is a DTensor, but q, k and v are not: give the whole as a plain tensor")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError("torch.func: attention over ranks has no transforms")
    tensors, asked, _ = asked_of("attention", (q, k, v), keywords, OverRanks)
    with_mods = asked.functions != (None, None)
    if not with_mods:
        options = asked.read(tensors)
    if autocast_is_on():
        tensors = autocast(tensors, q.device.type)
    ranks = ranks_of(mesh)
    if mesh.device_type != q.device.type:
        raise InvalidInputError("mesh", f"is one of {mesh.device_type} devices, but q is on {q.device}")
    check_layout(given["layout"])
    if given["comm"] not in COMMS:
        raise InvalidInputError("comm", f"is {shown(given['comm'])}, must be one of {', '.join(COMMS)}")
    (lengths_q, inferred_q), (lengths_k, inferred_k) = (_lengths(side, given, ranks) for side in "qk")
    inferred, packed = (inferred_q, inferred_k), given["cu_seqlens_q"] is not None
    if packed != (given["cu_seqlens_k"] is not None):
        raise InvalidInputError(f"cu_seqlens_{'k' if packed else 'q'}", "is None, but the other one is given")
    if with_mods:
        options = _with_mods(tensors, asked, lengths_q, lengths_k)
    spec = Spec(
        ranks, given["layout"], given["comm"], lengths_q, lengths_k, inferred, packed, options, asked.return_lse,
        _intervals(tensors, lengths_q, lengths_k),
    )  # fmt: skip
    return _run(_kind(spec, tensors), tensors)


def _intervals(t: Tensors, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> Kept | None:
    """The pairs that an interval mask keeps; None for a mask that does not fit, which is refused later."""
    if t.row_keys is None and t.key_rows is None:
        return None
    for ends, lengths in ((t.row_keys, lengths_q), (t.key_rows, lengths_k)):
        if ends is not None and (ends.dim() != 4 or ends.shape[2] not in (1, max(lengths, default=0))):
            return None
    return intervals(t.row_keys, t.key_rows, lengths_q, lengths_k)


def _with_mods(t: Tensors, asked: Asked, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> Options:
    """The options of a call with score_mod or mask_mod. Sets in ``t`` the tensors that the functions read."""
    from flashtile.call.functions import functions_of  # what few programs need is not loaded by all

    shifts = {k - q for q, k in zip(lengths_q, lengths_k, strict=False)} or {0}
    # A band is counted from the first row: it is the same for all documents that have the same shift.
    found = functions_of(*asked.functions, t, asked.plain.softcap, len(shifts) == 1)
    t.operands, t.numbers = found.operands, found.numbers
    return found.options(asked.read(t), min(shifts))


def _kind(spec: Spec, t: Tensors) -> RingKind:
    """The kind of a call. A new kind is compared among the ranks."""
    given = None if is_plain(t) else tuple(None if x is None else plans.layout(x) for x in other_tensors(t))
    key = (
        "distributed", spec, settings.BACKEND.raw(), settings.COPIES.raw(), plans.products(t.q), *plans.layout(t.q),
        *plans.layout(t.k), *plans.layout(t.v), given, *map(plans.layout, t.operands or ()),
    )  # fmt: skip
    kind: RingKind | None = plans.kept.get(key)
    if kind is None:
        kind = make_kind(spec, t)
        plans.keep(key, kind)
    return kind


def _run(kind: RingKind, t: Tensors) -> Any:
    spec = kind.spec
    if spec.options.dropout_p > 0:
        state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=t.q.device)
        t = dataclasses.replace(t, rng_state=share(spec.ranks, "the draw of dropout", state))
    if any(spec.options.grads):
        out, lse = _apply(kind, t, t.q, t.k, t.v, t.sinks, t.attn_bias, *(t.operands or ()))
    else:
        out, lse, _ = kind.forward(t)
    return (out, lse) if spec.with_lse else out


class _RingAttention(torch.autograd.Function):
    """The call under autograd. The backward sends keys around once more, followed by their gradients."""

    @staticmethod
    def forward(ctx: Any, kind: RingKind, t: Tensors, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, lse, saved = kind.forward(t)
        ctx.save_for_backward(*saved, t.attn_bias, *(t.operands or ()))
        ctx.kind, ctx.shape, ctx.numbers = kind, out.shape, t.numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("create_graph: attention over ranks has no second derivatives")
        count = len(Saved._fields)
        saved, (bias, *operands) = Saved(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        dout = saved.out.new_zeros(ctx.shape) if dout is None else dout
        t = saved.tensors
        t.attn_bias, t.numbers = bias, ctx.numbers
        t.operands = None if ctx.numbers is None else tuple(operands)
        found = ctx.kind.backward(saved, t, dout, dlse)
        doperands = found.doperands or (None,) * len(operands)
        return None, None, *found[:5], *doperands


# This skips the wrapper of Function.apply, as ``ops`` does.
_apply = super(torch.autograd.Function, _RingAttention).apply


def _lengths(side: str, given: dict[str, Any], ranks: Ranks) -> tuple[tuple[int, ...], bool]:
    """Lengths of the whole's documents, or of its one sequence, and whether they are inferred.

    Raises:
        InvalidInputError: Names an argument that is not a length, or contradicts another one.
    """
    name, bounds_name, x = f"seqlen_{side}", f"cu_seqlens_{side}", given[side]
    seqlen, longest, cu_seqlens = given[name], given[f"max_{name}"], given[bounds_name]
    if cu_seqlens is None:
        if longest is not None:
            raise InvalidInputError(f"max_{name}", "is given, but goes with cu_seqlens alone")
        if seqlen is None:
            return ((x.shape[1] if x.dim() > 1 else 0) * len(ranks.members),), True
        return (integer(name, seqlen, 0),), False
    if seqlen is not None:
        raise InvalidInputError(name, f"is given together with {bounds_name}, which says it")
    lengths = document_lengths(bounds_name, cu_seqlens)
    if longest is not None and max(lengths, default=0) > integer(f"max_{name}", longest, 0):
        raise InvalidInputError(f"max_{name}", f"is {longest}, but {bounds_name} holds a sequence of {max(lengths)}")
    return lengths, False
