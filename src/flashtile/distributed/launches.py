"""The packed calls of a step, with backend plans that are made when first needed; stages; running results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.call.backend import Backward, Chain, Forward, Gradients
from flashtile.call.problem import Problem
from flashtile.core.states import Partial, in_parts
from flashtile.distributed.calls import RingCall
from flashtile.distributed.plan import RingPlan
from flashtile.distributed.ring import OwnShare, RingStep
from flashtile.ops import dispatch
from flashtile.ops import operators as ops

# Keys and values of a shard.
Keys = tuple[Tensor, Tensor]


class RankPart(NamedTuple):
    """The part of the whole call that a rank's tensors are.

    Attributes:
        heads: Query heads of the whole call.
        first_head: The rank's first query head.
        with_origins: Whether kernels are told where sequences lie in the whole.
        large_scores: ``Problem.large_scores``.
    """

    heads: int
    first_head: int
    with_origins: bool = True
    large_scores: bool = False


class OfRows(NamedTuple):
    """The tensors by row that the backward needs, contiguous; see ``call.backend.Backward``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    wholes: Wholes | None = None

    def of(self, rows: tuple[int, int]) -> OfRows:
        """The same tensors for some of the rows."""
        if rows == (0, self.out.shape[0]):
            return self
        some, dlse = slice(*rows), self.dlse
        lse, dlse = (None if x is None else x[:, some].contiguous() for x in (self.lse, dlse))
        assert lse is not None
        return self._replace(out=self.out[some], lse=lse, dout=self.dout[some], dlse=dlse)


def some_of(t: Tensors, rows: tuple[int, int], keys: tuple[int, int]) -> Tensors:
    """The tensors of some rows and some keys."""
    if rows == (0, t.q.shape[0]) and keys == (0, t.k.shape[0]):
        return t
    (first, stop), (key, key_stop) = rows, keys
    return with_(t, q=t.q[first:stop], k=t.k[key:key_stop], v=t.v[key:key_stop])


def with_(t: Tensors, **changes: Any) -> Tensors:
    """A copy with other tensors, in a third of the time that ``dataclasses.replace`` takes."""
    made = object.__new__(Tensors)
    vars(made).update(vars(t), **changes)
    return made


class Wholes(NamedTuple):
    """Sums of the gradients of tensors by pair of the whole call, in the shapes of a call's tensors.

    Attributes:
        bias: Sums for attn_bias, of four dimensions, in lse's dtype; None if not wanted.
        operands: Sums for the tensors that score mods read, or empty.
    """

    bias: Tensor | None
    operands: tuple[Tensor | None, ...]

    @classmethod
    def zeros(cls, t: Tensors, grads: Grads) -> Wholes:
        """Sums that are zero."""
        bias = None
        if grads.bias and t.attn_bias is not None:
            bias = torch.zeros_like(four(t.attn_bias), dtype=wide(t), memory_format=torch.contiguous_format)
        wanted = zip(t.operands or (), grads.operands, strict=True) if grads.operands else ()
        return cls(bias, tuple(torch.zeros_like(x, dtype=wide(t)) if each else None for x, each in wanted))


class CallPlan:
    """One call of a step, with backend plans that are made when first needed."""

    def __init__(self, call: RingCall, options: Options, part: RankPart, device: torch.device, is_last: bool) -> None:
        self._bounds, band = (call.cu_seqlens_q, call.cu_seqlens_k), call.band
        self.options = options._replace(
            window_left=band.left,
            window_right=band.right,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            grads=options.grads._replace(sinks=False),
        )
        # The number of tensors that each mod reads.
        self._read: tuple[int, ...] = ()
        if options.mods:
            self._read, self.options = _of_parts(self.options)
        self._bounds_q = self._bounds_k = _int32(call.cu_seqlens_q, device)
        if call.cu_seqlens_k != call.cu_seqlens_q:
            self._bounds_k = _int32(call.cu_seqlens_k, device)
        self._origins: Tensor | None = None
        self._places: CallPlaces | None = None
        if call.origins:
            if part.with_origins:
                rows = [o._replace(head=o.head * part.heads + part.first_head) for o in call.origins]
                self._origins = _int32(rows, device)
            self._entries = _int32([o.head for o in call.origins], device)
            self._table = _int32([(*o[:5], part.first_head) for o in call.origins], device)
            self._places = CallPlaces(call, device)
        self._is_last = is_last
        # Whether dk and dv are in the keys' dtype, since no other call adds to them.
        self.rounds = False
        self._forward: Forward | None = None
        self._backwards: dict[Any, Backward] = {}

    def _given(self, t: Tensors, keys: Keys) -> Tensors:
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self._entries)
        bounds, state = (self._bounds_q, self._bounds_k), t.rng_state
        given = Tensors(t.q, *keys, slopes, None, None, None, *bounds, rng_state=state, origins=self._origins)
        if has_pairs(t):
            assert self._places is not None
            self._places.fill(given, t, self.options.grads.bias)
        if t.operands is not None:
            found, operands = iter(t.operands), list[Tensor]()
            for count in self._read:
                operands += [*itertools.islice(found, count), self._table]
            given.operands, given.numbers = tuple(operands), t.numbers
        return given

    def forward(self, t: Tensors, keys: Keys, state: Partial | None, into: Tensor | None = None) -> Partial:
        """The state after these keys. The last call returns q's dtype, and writes out into ``into`` if it is given."""
        given = self._given(t, keys)
        if self._forward is None:
            dtype = t.q.dtype if self._is_last else wide(t)
            self._forward = ops.REGULAR.plan("forward", given, self.options, out_dtype=dtype)
        return Partial(*self._forward(given, state, into if self._is_last else None))

    def backward(
        self, t: Tensors, keys: Keys, rows: OfRows, sums: Gradients | None, chain: Chain | None = None,
        heads: tuple[int, int] | None = None,
    ) -> Gradients:  # fmt: skip
        """The sums, with this call's gradients added; new ones if there are none. ``heads``: see ``Chain``."""
        given = self._given(t, keys)
        # Hooks of saved tensors may have changed the strides of q; all other tensors are contiguous.
        key = t.q.stride(), t.q.data_ptr() % 16, rows.dlse is None
        run: Any = self._backwards.get(key)
        if run is None:
            dtype = t.q.dtype if self.rounds else wide(t)
            douts = rows.dout, rows.dlse
            run = self._backwards[key] = ops.REGULAR.plan("backward", given, self.options, douts, grad_dtype=dtype)
        if chain is not None:
            return run.in_chain(given, *rows[:4], sums, chain, heads)
        found = run(given, *rows[:4], sums)
        if rows.wholes is not None:
            if rows.wholes.bias is not None and self._places is not None:
                self._places.add(rows.wholes.bias, found.dbias)
            if found.doperands:
                tables = set(itertools.accumulate(count + 1 for count in self._read))
                own = [x for n, x in enumerate(found.doperands, 1) if n not in tables]
                for total, x in zip(rows.wholes.operands, own, strict=True):
                    if total is not None and x is not None:
                        total += x
        return found

    def may_chain(self, t: Tensors) -> bool:
        """Whether the call may be part of a ``Chain``. ``t`` may have any keys."""
        if has_pairs(t) or t.operands is not None:
            return False
        bounds_q, bounds_k = self._bounds
        k, v = (x.new_empty((bounds_k[-1], *x.shape[1:])) for x in (t.k, t.v))
        problem = Problem.of(self._given(t, (k, v)), self.options)
        chosen = dispatch.select(problem.but(grad_dtype=problem.lse_dtype), "backward", self.options.backend)
        can = chosen.capabilities("backward")
        places = zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True)
        ends = [end for row, (key, key_stop) in places if key < key_stop and row[0] < row[1] for end in row]
        rows = can.chain_rows if can and max(problem.head_dim, problem.head_dim_v) <= can.chain_head_dim else 0
        # Shorter sequences may have a kernel of their own.
        is_long = max(problem.seqlen_q, problem.seqlen_k) >= rows > 0
        return is_long and all(end % rows == 0 or end == bounds_q[-1] for end in ends)


def _of_parts(options: Options) -> tuple[tuple[int, ...], Options]:
    """The number of tensors that each mod reads, and options with mods that also read the places of sequences."""
    from flashtile.mods.graph import parse  # what few programs need is not loaded by all
    from flashtile.mods.parts import of_part

    counts = tuple(len(parse(text).operands) for text in options.mods)
    wanted, flags = iter(options.grads.operands), list[bool]()
    for count in counts if options.grads.operands else ():
        flags += [*itertools.islice(wanted, count), False]
    mods, grads = tuple(map(of_part, options.mods)), options.grads._replace(operands=tuple(flags))
    return counts, options._replace(mods=mods, grads=grads)


def has_pairs(t: Tensors) -> bool:
    """Whether a call has tensors with an element for each pair, row or key of the whole."""
    return any(x is not None for x in (t.attn_mask, t.attn_bias, t.row_keys, t.key_rows))


def four(x: Tensor) -> Tensor:
    """A mask or a bias as a tensor of four dimensions."""
    return x[(None,) * (4 - x.dim())]


class CallPlaces:
    """The places of a call's sequences in the whole; they select the parts of the whole's masks and biases.

    Args:
        call: A call with origins.
        device: The device of the tensors.
    """

    def __init__(self, call: RingCall, device: torch.device) -> None:
        lengths = [[b - a for a, b in itertools.pairwise(x)] for x in (call.cu_seqlens_q, call.cu_seqlens_k)]
        self._longest = call.max_seqlen_q, call.max_seqlen_k
        values = [
            [o.head, o.row, o.row_step, o.key, o.key_step, q, k] for o, q, k in zip(call.origins, *lengths, strict=True)
        ]
        with torch.inference_mode(False):
            found = torch.tensor(values, dtype=torch.int64, device=device).view(-1, 7)
        self._entry, *sides = found.unbind(1)
        # First position, step and length of each sequence's rows, and of its keys.
        self._sides = (sides[0], sides[1], sides[4]), (sides[2], sides[3], sides[5])

    def fill(self, given: Tensors, t: Tensors, bias_grad: bool) -> None:
        """Sets the call's parts of the whole's masks, biases and intervals."""
        if t.attn_mask is not None:
            given.attn_mask = self._part(t.attn_mask)
        if t.attn_bias is not None:
            bias = self._part(t.attn_bias)
            # The gradients of several calls are summed, in float32.
            given.attn_bias = bias.to(wide(t)) if bias_grad else bias
        for name, mine, others in (("row_keys", 0, 1), ("key_rows", 1, 0)):
            ends = getattr(t, name)
            if ends is not None:
                setattr(given, name, self._ends(ends, mine, others))

    def add(self, total: Tensor, part: Tensor | None) -> None:
        """Adds the gradient of a part to the gradient of the whole."""
        assert part is not None
        b, (row, key) = self._entries(total), (self._positions(total, side) for side in (0, 1))
        heads = torch.arange(total.shape[1], device=total.device)
        place = b[:, None, None, None], heads[:, None, None], row[:, None, :, None], key[:, None, None, :]
        total.index_put_(place, four(part).to(total.dtype), accumulate=True)

    def _entries(self, x: Tensor) -> Tensor:
        return self._entry if x.shape[0] > 1 else torch.zeros_like(self._entry)

    def _positions(self, x: Tensor, side: int) -> Tensor:
        """The index of each sequence's rows or keys in a tensor of the whole; ``(sequences, longest or 1)``."""
        size, (first, step, _) = x.shape[2 + side], self._sides[side]
        if size == 1:
            return torch.zeros_like(first)[:, None]
        each = torch.arange(self._longest[side], device=x.device)
        return (first[:, None] + step[:, None] * each).clamp(0, size - 1)

    def _part(self, x: Tensor) -> Tensor:
        """The sequences' parts of a mask or bias: ``(sequences, heads or 1, longest rows or 1, longest keys or 1)``."""
        x = four(x)
        row, key = (self._positions(x, side) for side in (0, 1))
        return x[self._entries(x)[:, None, None], :, row[:, :, None], key[:, None, :]].permute(0, 3, 1, 2)

    def _ends(self, ends: Tensor, mine: int, others: int) -> Tensor:
        """Intervals of the other side for each sequence, as indices of the sequence, cut at its ends."""
        place = ends[..., 0]
        size, (first, step, _) = place.shape[2], self._sides[mine]
        at = torch.zeros_like(first)[:, None]
        if size > 1:
            at = first[:, None] + step[:, None] * torch.arange(self._longest[mine], device=ends.device)
        found = ends[self._entries(ends)[:, None], :, at.clamp(0, size - 1)].transpose(1, 2)
        first, step, length = (x[:, None, None, None] for x in self._sides[others])
        # Positions of a sequence are ``step`` apart: the first index that is not before the end.
        found = -((first - found) // step.clamp(min=1))
        return torch.minimum(found.clamp(min=0), length).to(torch.int32).contiguous()


def wide(t: Tensors) -> torch.dtype:
    """The dtype of results to which others are added, which is lse's dtype."""
    return torch.promote_types(t.q.dtype, torch.float32)


def _int32(values: Sequence[Any], device: torch.device) -> Tensor:
    # A training step cannot save a tensor that was made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


class Stage(NamedTuple):
    """A step with its launches, and the steps before and after it, with transfers that are posted before the launches.

    Attributes:
        here: The step; an empty one after the last step.
        before: The step before. Its sums leave now, or come home.
        following: The step after. Its keys and sums arrive.
        launches: The step's calls. For step 0, the forward's calls into which the keys of other steps are merged.
    """

    here: RingStep
    before: RingStep
    following: RingStep
    launches: list[CallPlan]


def stages_of(plan: RingPlan, launches_of: Callable[[RingStep], list[CallPlan]]) -> list[Stage]:
    """The stages of a plan, in order. The first runs step 0."""
    steps = {step.number: step for step in plan.steps}
    after = {step.number + 1 for step in plan.steps if step.sums_to is not None or step.sums_back is not None}
    found = []
    for number in sorted({*steps, *(number - 1 for number in steps if number), *after}):
        here, before, following = (steps.get(number + i, RingStep(number + i, 0, (), ())) for i in (0, -1, 1))
        found.append(Stage(here, before, following, launches_of(here)))
    return found


class Running:
    """The running result of some rows.

    Args:
        t: The tensors of all rows.
        share: The rows, and the own keys that they see.
        sinks: For each head, the score of a key with value 0.
        into: A tensor that receives the rows' out.
        large_scores: ``Problem.large_scores``.
    """

    def __init__(
        self, t: Tensors, share: OwnShare, sinks: Tensor | None, into: Tensor | None, large_scores: bool
    ) -> None:
        self._t, self._large_scores = some_of(t, share.rows, share.keys), large_scores
        self._into = None if into is None else into[slice(*share.rows)]
        self._state = None if sinks is None else self._start(sinks)

    def add(self, launches: Iterable[CallPlan], keys: Keys | None = None) -> None:
        """Merges the results of calls over ``keys``, by default over the own keys."""
        for launch in launches:
            self._state = launch.forward(self._t, keys or (self._t.k, self._t.v), self._state, self._into)

    def result(self) -> tuple[Tensor, Tensor]:
        """Out in q's dtype, and lse."""
        state = self._state or self._start(None)
        out = state.out.to(self._t.q.dtype)
        if self._into is not None and out.data_ptr() != self._into.data_ptr():
            self._into.copy_(out)
        return out, state.lse

    def _start(self, sinks: Tensor | None) -> Partial:
        """The state before any key."""
        t, dtype = self._t, wide(self._t)
        out = t.q.new_zeros((*t.q.shape[:2], t.v.shape[2]), dtype=dtype)
        lse = t.q.new_full((t.q.shape[1], t.q.shape[0]), -torch.inf, dtype=dtype)
        if sinks is not None:
            lse.copy_(sinks[:, None])
        return Partial(out, in_parts(lse, torch.zeros_like(lse)) if self._large_scores else lse)
