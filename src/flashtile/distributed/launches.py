"""The packed calls of a step: the backend's plans of them, made when they are first needed; stages; running results."""

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
from flashtile.distributed.calls import Call
from flashtile.distributed.plan import Plan, Step
from flashtile.distributed.ring import Share
from flashtile.ops import dispatch
from flashtile.ops import operators as ops

# Keys and values of a shard.
Keys = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """Which part of the whole call a rank's tensors are.

    Attributes:
        heads: Query heads of the whole.
        first_head: The first of this rank's.
        with_origins: Whether kernels are told where sequences lie in the whole.
        large_scores: ``Problem.large_scores``.
    """

    heads: int
    first_head: int
    with_origins: bool = True
    large_scores: bool = False


class OfRows(NamedTuple):
    """What the backward needs of the rows, contiguous; see ``call.backend.Backward``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    wholes: Wholes | None = None

    def of(self, rows: tuple[int, int]) -> OfRows:
        """That of some of them."""
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
    """Sums of the gradients of what belongs to pairs of the whole, in the shapes of a call's tensors.

    Attributes:
        bias: Of attn_bias, four dimensions, in lse's dtype; None if it is not wanted.
        operands: Of what score mods read, or empty.
    """

    bias: Tensor | None
    operands: tuple[Tensor | None, ...]

    @classmethod
    def zeros(cls, t: Tensors, grads: Grads) -> Wholes:
        """Those of nothing."""
        bias = None
        if grads.bias and t.attn_bias is not None:
            bias = torch.zeros_like(four(t.attn_bias), dtype=wide(t), memory_format=torch.contiguous_format)
        wanted = zip(t.operands or (), grads.operands, strict=True) if grads.operands else ()
        return cls(bias, tuple(torch.zeros_like(x, dtype=wide(t)) if each else None for x, each in wanted))


class CallPlan:
    """One call of a step with the backend's plans of it, made when they are first needed."""

    def __init__(self, call: Call, options: Options, part: Part, device: torch.device, is_last: bool) -> None:
        self._bounds, band = (call.cu_seqlens_q, call.cu_seqlens_k), call.band
        self.options = options._replace(
            window_left=band.left,
            window_right=band.right,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            grads=options.grads._replace(sinks=False),
        )
        # Of what each mod reads, how many tensors there are.
        self._read: tuple[int, ...] = ()
        if options.mods:
            self._read, self.options = _of_parts(self.options)
        self._bounds_q = self._bounds_k = _int32(call.cu_seqlens_q, device)
        if call.cu_seqlens_k != call.cu_seqlens_q:
            self._bounds_k = _int32(call.cu_seqlens_k, device)
        self._origins: Tensor | None = None
        self._places: Places | None = None
        if call.origins:
            if part.with_origins:
                rows = [o._replace(head=o.head * part.heads + part.first_head) for o in call.origins]
                self._origins = _int32(rows, device)
            self._entries = _int32([o.head for o in call.origins], device)
            self._table = _int32([(*o[:5], part.first_head) for o in call.origins], device)
            self._places = Places(call, device)
        self._is_last = is_last
        # Whether dk and dv are in the keys' dtype: no others are added to them.
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
        """The state after these keys; in q's dtype if the call is the last, whose out may be written into a tensor."""
        given = self._given(t, keys)
        if self._forward is None:
            dtype = t.q.dtype if self._is_last else wide(t)
            self._forward = ops.REGULAR.plan("forward", given, self.options, out_dtype=dtype)
        return Partial(*self._forward(given, state, into if self._is_last else None))

    def backward(
        self, t: Tensors, keys: Keys, rows: OfRows, sums: Gradients | None, chain: Chain | None = None,
        heads: tuple[int, int] | None = None,
    ) -> Gradients:  # fmt: skip
        """The sums with this call's gradients added; new ones if there are none. Heads: see ``Chain``."""
        given = self._given(t, keys)
        # Hooks of saved tensors may have given q other strides; all others are contiguous.
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
        """Whether the call may be one of a ``Chain``; t has any keys."""
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
        return rows > 0 and all(end % rows == 0 or end == bounds_q[-1] for end in ends)


def _of_parts(options: Options) -> tuple[tuple[int, ...], Options]:
    """How many tensors each mod reads, and the options with mods that read where sequences lie in the whole too."""
    from flashtile.mods.graph import parse  # what few programs need is not loaded by all
    from flashtile.mods.parts import of_part

    counts = tuple(len(parse(text).operands) for text in options.mods)
    wanted, flags = iter(options.grads.operands), list[bool]()
    for count in counts if options.grads.operands else ():
        flags += [*itertools.islice(wanted, count), False]
    mods, grads = tuple(map(of_part, options.mods)), options.grads._replace(operands=tuple(flags))
    return counts, options._replace(mods=mods, grads=grads)


def has_pairs(t: Tensors) -> bool:
    """Whether a call has tensors with an element for a pair, a row or a key of the whole."""
    return any(x is not None for x in (t.attn_mask, t.attn_bias, t.row_keys, t.key_rows))


def four(x: Tensor) -> Tensor:
    """A mask or a bias with all its dimensions."""
    return x[(None,) * (4 - x.dim())]


class Places:
    """Where a call's sequences lie in the whole, and so which parts of masks and biases of the whole are theirs.

    Args:
        call: It has origins.
        device: Of the tensors.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
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
        """Gives the call its parts of what the whole has."""
        if t.attn_mask is not None:
            given.attn_mask = self._part(t.attn_mask)
        if t.attn_bias is not None:
            bias = self._part(t.attn_bias)
            # Gradients of many calls are added up.
            given.attn_bias = bias.to(wide(t)) if bias_grad else bias
        for name, mine, others in (("row_keys", 0, 1), ("key_rows", 1, 0)):
            ends = getattr(t, name)
            if ends is not None:
                setattr(given, name, self._ends(ends, mine, others))

    def add(self, total: Tensor, part: Tensor | None) -> None:
        """Adds the gradient of a part to that of the whole."""
        assert part is not None
        b, (row, key) = self._entries(total), (self._positions(total, side) for side in (0, 1))
        heads = torch.arange(total.shape[1], device=total.device)
        place = b[:, None, None, None], heads[:, None, None], row[:, None, :, None], key[:, None, None, :]
        total.index_put_(place, four(part).to(total.dtype), accumulate=True)

    def _entries(self, x: Tensor) -> Tensor:
        return self._entry if x.shape[0] > 1 else torch.zeros_like(self._entry)

    def _positions(self, x: Tensor, side: int) -> Tensor:
        """Of each sequence's rows, or keys, their places in a tensor of the whole; ``(sequences, longest or 1)``."""
        size, (first, step, _) = x.shape[2 + side], self._sides[side]
        if size == 1:
            return torch.zeros_like(first)[:, None]
        each = torch.arange(self._longest[side], device=x.device)
        return (first[:, None] + step[:, None] * each).clamp(0, size - 1)

    def _part(self, x: Tensor) -> Tensor:
        """``(sequences, heads or 1, longest rows or 1, longest keys or 1)`` of a mask or a bias."""
        x = four(x)
        row, key = (self._positions(x, side) for side in (0, 1))
        return x[self._entries(x)[:, None, None], :, row[:, :, None], key[:, None, :]].permute(0, 3, 1, 2)

    def _ends(self, ends: Tensor, mine: int, others: int) -> Tensor:
        """Intervals of the other side, counted from its first of each sequence, as far as it has them."""
        place = ends[..., 0]
        size, (first, step, _) = place.shape[2], self._sides[mine]
        at = torch.zeros_like(first)[:, None]
        if size > 1:
            at = first[:, None] + step[:, None] * torch.arange(self._longest[mine], device=ends.device)
        found = ends[self._entries(ends)[:, None], :, at.clamp(0, size - 1)].transpose(1, 2)
        first, step, length = (x[:, None, None, None] for x in self._sides[others])
        # The first of every so many that is not before an end.
        found = -((first - found) // step.clamp(min=1))
        return torch.minimum(found.clamp(min=0), length).to(torch.int32).contiguous()


def wide(t: Tensors) -> torch.dtype:
    """The dtype of results to which others are added, that of lse."""
    return torch.promote_types(t.q.dtype, torch.float32)


def _int32(values: Sequence[Any], device: torch.device) -> Tensor:
    # A training step could not save a tensor that was made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


class Stage(NamedTuple):
    """A step with its launches, and the steps before and after it: what of theirs is posted before the launches.

    Attributes:
        here: The step; after the last one it may be none.
        before: Its sums leave now, or come back.
        following: Its keys and sums arrive.
        launches: The step's calls; of step 0 those of the forward that keys of other steps are merged into.
    """

    here: Step
    before: Step
    following: Step
    launches: list[CallPlan]


def stages_of(plan: Plan, launches_of: Callable[[Step], list[CallPlan]]) -> list[Stage]:
    """The stages of a plan, in order; the first is that of step 0."""
    steps = {step.number: step for step in plan.steps}
    after = {step.number + 1 for step in plan.steps if step.sums_to is not None or step.sums_back is not None}
    found = []
    for number in sorted({*steps, *(number - 1 for number in steps if number), *after}):
        here, before, following = (steps.get(number + i, Step(number + i, 0, (), ())) for i in (0, -1, 1))
        found.append(Stage(here, before, following, launches_of(here)))
    return found


class Running:
    """The running result of some rows.

    Args:
        t: The tensors of all rows.
        share: Which rows, and which of the rank's own keys they see.
        sinks: Of each head, a key whose value is 0.
        into: What gets the rows' out.
        large_scores: ``Problem.large_scores``.
    """

    def __init__(self, t: Tensors, share: Share, sinks: Tensor | None, into: Tensor | None, large_scores: bool) -> None:
        self._t, self._large_scores = some_of(t, share.rows, share.keys), large_scores
        self._into = None if into is None else into[slice(*share.rows)]
        self._state = None if sinks is None else self._start(sinks)

    def add(self, launches: Iterable[CallPlan], keys: Keys | None = None) -> None:
        """Merges the results of calls, over the own keys if no others are given."""
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
