"""Plans of GPU calls: what a call allocates, and the launches that it repeats, with operands found by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Launcher, is_current, start
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.masks import most_bounds
from flashtile.backends.gpu.trial import on_trial
from flashtile.call.backend import ASKED, Gradients, asked_for
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial

# What a call allocates: by the name of an operand, a function that makes it.
Memory = dict[str, Callable[[], Tensor]]
# What a call is given besides its record of tensors, and then also what it allocates, by the name of an operand.
Made = dict[str, Any]
# Takes a call's record of tensors, what it is given besides, and its kind; returns its memory and its launches.
Prepare = Callable[[Any, Made, Any], tuple[Memory, dict[str, Launch]]]


class Plan:
    """Repeats the launches of calls with the same layouts and options.

    A launch's operands are fields of the call's record of tensors, or what the call is given besides or allocates.
    """

    def __init__(
        self, device: torch.device, prepare: Prepare, attempt: Callable[[Callable[[], Any]], Any] = lambda make: make()
    ) -> None:
        """Prepares nothing yet: tiles may depend on those on trial when the plan runs.

        Args:
            device: The device of the calls' tensors.
            prepare: Called with a first call of each kind.
            attempt: Calls a function that prepares and builds; again if that fails and other tiles may not.
        """
        self._device, self._prepare, self._attempt = device, prepare, attempt
        self._number = device.index  # None for a CPU
        self._kinds: dict[Any, tuple[Memory, list[Launcher]]] = {}
        self._asked = ASKED.get()

    def run(self, tensors: Any, made: Made, kind: Any = None) -> Made:
        """Launches; ``made`` is what the call is given besides its tensors, to which its memory is added."""
        if not is_current(self._number):
            with torch.cuda.device(self._number):
                return self.run(tensors, made, kind)
        key = kind, on_trial(), _fills()
        found = self._kinds.get(key)
        if found is None:
            make = functools.partial(self._make, tensors, made, kind)
            found = self._kinds[key] = asked_for(self._asked, self._attempt, make)
        memory, launchers = found
        for name, allocate in memory.items():
            if name not in made:
                made[name] = allocate()
        start(launchers, tensors, made)
        return made

    def launches(self, tensors: Any, kind: Any = None, **given: Any) -> dict[str, Launch]:
        """The launches of a call by name, in order: what builds compile."""
        return self._prepare(tensors, given, kind)[1]

    def _make(self, tensors: Any, made: Made, kind: Any) -> tuple[Memory, list[Launcher]]:
        memory, launches = self._prepare(tensors, made, kind)
        operands = {name: allocate() for name, allocate in memory.items() if name not in made} | made
        launchers = [Launcher(each, self._device, tensors, operands) for each in launches.values()]
        made.update(operands)
        return memory, launchers


class EmptyPlan(functools.partial[Any]):
    """The plan of a call without rows or keys: a function that computes it without a kernel."""

    def launches(self, *_: Any, **given: Any) -> dict[str, Launch]:
        """As of ``Plan``: none."""
        return {}


class ForwardPlan(Plan):
    """A forward, as ``call.backend.Forward`` and ``QuantizedForward`` say; its kind: whether it merges a partial."""

    def __init__(self, *given: Any, max_scores: Callable[[], Tensor] | None = None) -> None:
        """As ``Plan``; max_scores: ``max_scores_memory``, for a call that returns them."""
        super().__init__(*given)
        self._max_scores = max_scores

    def __call__(
        self, tensors: Any, partial: Partial | None = None, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        made: Made = {}
        if into is not None:
            made["out"] = into
        if partial is not None:
            made["partial_out"], made["partial_lse"] = partial.out, partial.lse
        if self._max_scores is not None:
            lse = with_max_scores(made, self._max_scores)
            return self.run(tensors, made)["out"], lse
        self.run(tensors, made, partial is not None)
        return made["out"], made["lse"]


def forward_memory(problem: Problem, t: Any) -> Memory:
    """The memory that every forward has."""
    p, q = problem, t.q
    memory = {
        "out": empty(q.device, (*q.shape[:-1], p.head_dim_v), p.out_dtype),
        "lse": empty(q.device, p.lse_shape(q)),
        **table_memory(p, q),
    }
    if p.intervals:
        memory["bounds"] = empty(q.device, (most_bounds(p, t),), torch.int32)
    return memory


def max_scores_memory(problem: Problem, q: Tensor) -> Callable[[], Tensor] | None:
    """A function that makes lse and the largest scores, one after the other; None for a call without the latter."""
    shape = 2, *problem.lse_shape(q)
    return functools.partial(torch.empty, shape, dtype=torch.float32, device=q.device) if problem.max_scores else None


def with_max_scores(made: Made, allocate: Callable[[], Tensor]) -> Tensor:
    """``core.states.with_max_scores`` in new memory, where a call's launches find their two operands."""
    found = allocate()
    made["lse"], made["max_scores"] = found.unbind()
    return found.movedim(0, -1)


class BackwardPlan(Plan):
    """A backward, as ``call.backend.Backward`` says; its kind: whether it adds to sums."""

    def __init__(
        self, device: torch.device, prepare: Prepare, copies_dout: bool,
        finish: Callable[[Tensors, Made, bool], Gradients], *attempt: Any,
    ) -> None:  # fmt: skip
        """Prepares nothing yet, see ``Plan``.

        Args:
            device: As of ``Plan``.
            prepare: Likewise.
            copies_dout: Whether kernels need a dout of other strides.
            finish: Makes the gradients once all has been launched, from the tensors, what the call has made, and
                whether it adds.
            attempt: As of ``Plan``.
        """
        super().__init__(device, prepare, *attempt)
        self._copies_dout, self._finish = copies_dout, finish

    def __call__(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Gradients | None = None,
    ) -> Gradients:
        """The gradients that the problem wants, from the forward's results, added to ``sums`` if given."""
        made = self.given(out, lse, dout, dlse, sums)
        return self._finish(tensors, self.run(tensors, made, sums is not None), sums is not None)

    def given(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, sums: Gradients | None) -> Made:
        """What a call is given besides its tensors, as kernels read it."""
        # The forward's results are on 16 bytes, but a caller may bring others.
        if (out.data_ptr() | lse.data_ptr()) % 16:
            out, lse = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (out, lse))
        if self._copies_dout:
            dout = dout.contiguous()
        made: Made = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        if sums is not None:
            made["dq"], made["dk"], made["dv"] = sums.dq, sums.dk, sums.dv
        return made


def gradient_memory(problem: Problem, t: Tensors) -> Memory:
    """dq, dk and dv, those that are wanted."""
    wanted = problem.grads
    each = {"dq": (wanted.q, t.q), "dk": (wanted.k, t.k), "dv": (wanted.v, t.v)}
    return {name: empty(x.device, x.shape, problem.grad_dtype) for name, (is_wanted, x) in each.items() if is_wanted}


def table_memory(problem: Problem, q: Tensor) -> Memory:
    """The memory of a call's table of distances, if it has one."""
    if problem.score_function is None:
        return {}
    from flashtile.backends.gpu.functions import table_numbers  # what few programs need is not loaded by all

    numbers = table_numbers(problem)
    return {} if numbers is None else {"distances": empty(q.device, (numbers,))}


def empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    """A function that makes an empty contiguous tensor on the current device, which ``Plan.run`` sees to.

    As code of TorchInductor does it: in 0.7 us, where ``torch.empty`` takes 1.9 and ``torch.empty_like`` 1.2.
    """
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is None or _fills():
        return functools.partial(torch.empty, shape, dtype=dtype, device=device)
    return functools.partial(make, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


# Whether PyTorch may fill what is empty.
_fills = torch._C._get_deterministic_algorithms
