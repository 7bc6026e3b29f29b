"""Derivatives and vmap of the operators: reverse mode, forward mode, and functorch's transforms of both.

The operators' kernels for the dispatcher's autograd and vmap keys. They hand on to the keys below, so transforms nest:
each level of ``torch.func`` runs them once, on its own wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashtile.call.arguments import (
    GRADIENTS,
    TENSORS,
    Grads,
    Options,
    Tensors,
    differentiable,
    grads_of,
)
from flashtile.call.problem import Problem
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.states import with_max_scores, without_max_scores
from flashtile.ops import operation
from flashtile.ops import operators as ops
from flashtile.ops.operation import LIBRARY, Operator

_MISSING = "attention has no {} cannot be differentiated"
_THIRD = "third derivative: its second derivative"
_OF_CAPTURED = "second derivative of captured tensors (detach those that score_mod reads)"


class Below:
    """Calls an operator at the keys below autograd.

    There the other transforms see it, for which gradients must be enabled, as they are outside an autograd function.
    """

    def __init__(self, operator: Operator, keyset: Any) -> None:
        operation.register()  # before what counts or shards sees the operator, whoever calls it
        self.operator, self.keyset = operator.overload, keyset & torch._C._after_autograd_keyset

    def __call__(self, *args: Any) -> Any:
        """The operator's results."""
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return self.operator.redispatch(self.keyset, *args)


class _Reverse(torch.autograd.Function):
    """The forward operator with its gradients."""

    @staticmethod
    def forward(ctx: Any, below: Below, options: Options, t: Tensors, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = below(*ops.REGULAR.flatten(t, options))
        saved = without_max_scores(lse) if options.return_max_scores else lse
        ctx.save_for_backward(*ops.flat_tensors(t), out, saved)
        ctx.options, ctx.numbers = options, t.numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:  # as in ``operators``
            return (None,) * len(ctx.needs_input_grad)
        *inputs, out, lse = ctx.saved_tensors
        options = ctx.options._replace(grads=grads_of("grads", ctx.needs_input_grad[3:]))
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else ops.plain_gradient(dlse, out, options)
        t = ops.of_flat(inputs, ctx.numbers)
        return None, None, None, *ops.watched_gradients(options, t, out, lse, dout, dlse)


class _Underivable(torch.autograd.Function):
    """An operator that is a derivative itself; differentiating it raises an error that says ``what`` there is not."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], what: str, *args: Any) -> Any:
        ctx.what, ctx.likes = what, [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in args]
        return below(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not _is_traced():
            raise UnsupportedError(_MISSING.format(ctx.what))
        # AOTAutograd traces the backward of all outputs, also of those that are detached: their gradients will be 0.
        zero = torch.ops.flashtile.no_derivative(grads, ctx.what)
        wanted = zip(ctx.likes, ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(zero.to(like[1]).expand(like[0]) if like and is_wanted else None for like, is_wanted in wanted),
        )


class _Twice(torch.autograd.Function):
    """An operator that computes a derivative, and ``gradients``, which computes the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, below: Below, gradients: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in args))
        ctx.gradients, ctx.others = gradients, [None if isinstance(x, Tensor) else x for x in args]
        ctx.set_materialize_grads(False)
        return below(*args)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        names, found = ctx.gradients(grads, args)
        wanted = zip(names, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(found.get(name) if is_wanted else None for name, is_wanted in wanted)


def _of_backward(grads: Sequence[Tensor | None], args: list[Any]) -> tuple[Iterable[str], dict[str, Tensor]]:
    """The gradients of the backward's arguments, by name."""
    given = ops.BACKWARD.named(args)
    return given, ops.SECOND.named_results(ops.SECOND.overload(*_directions(grads, given), *args))


def _of_jvp(grads: Sequence[Tensor | None], args: list[Any]) -> tuple[Iterable[str], dict[str, Tensor]]:
    """The same of the forward-mode operator: of its tangents those are the first derivatives."""
    given, count = ops.JVP.named(args), len(GRADIENTS)
    dout, dlse = grads
    dout = torch.zeros_like(given["out"]) if dout is None else dout
    others = dout, dlse, given["out"], given["lse"]
    found = ops.SECOND.named_results(ops.SECOND.overload(*args[:count], *others, *args[count + 2 :]))
    t, options = ops.REGULAR.unflatten(args[count + 2 :])
    options = options._replace(grads=grads_of("grads", [x is not None for x in differentiable(t)]))
    first = ops.watched_gradients(options, t, given["out"], given["lse"], dout, dlse)
    return given, {name: found[name] for name in GRADIENTS} | dict(zip(GRADIENTS.values(), first, strict=False))


def _of_second(grads: Sequence[Tensor | None], args: list[Any]) -> tuple[Iterable[str], dict[str, Tensor]]:
    """The gradients of the second derivative's directions: the matrix that multiplies these is symmetric."""
    given, changes = ops.SECOND.named(args), _changes(ops.SECOND.named_results(grads), args[len(GRADIENTS) :])
    return given, {name: dx for name, dx in zip(given, changes, strict=False) if dx is not None}


def _directions(grads: Sequence[Tensor | None], given: dict[str, Any]) -> list[Tensor | None]:
    """What arrives for the gradients of q, k, v, attn_bias and sinks; None for those that were not computed."""
    wanted = grads_of("grads", given["grads"]).named
    return [x if is_wanted else None for x, is_wanted in zip(grads, wanted, strict=False)]


def _no_derivative(grads: list[Tensor], what: str) -> Tensor:
    """A zero, the gradient of what has none where all that arrives is 0."""
    if any(bool(x.any()) for x in grads):
        raise UnsupportedError(_MISSING.format(what))
    return grads[0].new_zeros((), dtype=torch.float32)


# Function.apply would look for functorch's own way of nesting, which the dispatcher already provides.
_apply_reverse = super(torch.autograd.Function, _Reverse).apply
_apply_underivable = super(torch.autograd.Function, _Underivable).apply
_apply_twice = super(torch.autograd.Function, _Twice).apply


def once(run: Callable[..., Any], what: str, *inputs: Tensor | None) -> Any:
    """The results of ``run(*inputs)``, which are derivatives and have none."""
    with enable_single_level_autograd_function():
        return _apply_underivable(run, what, *inputs)


def _forward(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The forward operator under autograd: dual tensors get their tangents, others a node in the graph."""
    below = Below(ops.FORWARD, keyset)
    primals, tangents = _unpacked(args)
    t, options = ops.REGULAR.unflatten(primals)
    inputs = ops.leaves_of(t)
    needed = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs]
    if any(needed):
        # Under vmap the caller could not see which tensors require a gradient at an outer level.
        asked = *options.grads.named, *(options.grads.operands or (False,) * len(t.operands or ()))
        options = options._replace(grads=grads_of("grads", [*map(max, needed, asked)]))
        with enable_single_level_autograd_function():
            out, lse = _apply_reverse(below, options, t, *inputs)
    else:
        out, lse = below(*primals)
    if all(x is None for x in tangents):
        return out, lse
    of = dict(zip(TENSORS, tangents, strict=False))
    if of["alibi_slopes"] is not None:
        raise InvalidInputError("alibi_slopes", "has a tangent, but slopes have no derivative; use attn_bias")
    if of["operands"] is not None:
        raise UnsupportedError("score_mod: no forward-mode derivative of the tensors that it captures")
    alone = without_max_scores(lse) if options.return_max_scores else lse
    dout, dlse = ops.JVP.overload(*(of[name] for name in GRADIENTS), out, alone, *primals)
    if alone.dim() == out.dim():  # what rounding lse lost has no derivative
        dlse = torch.stack([dlse, torch.zeros_like(dlse)], dim=-1)
    if options.return_max_scores:  # nor have largest scores
        dlse = with_max_scores(dlse, torch.zeros_like(dlse))
    return forward_ad.make_dual(out, dout, level=0), forward_ad.make_dual(lse, dlse, level=0)


def _unpacked(args: tuple[Any, ...]) -> tuple[list[Any], list[Tensor | None]]:
    """The arguments without tangents, and their tangents."""
    # Level 0 is the only one that PyTorch has; without it unpack_dual sees no tangents in compiled code.
    tangents = [_tangent(x) for x in args]
    pairs = zip(args, tangents, strict=True)
    return [
        x if dx is None or isinstance(x, list) else forward_ad.unpack_dual(x, level=0).primal for x, dx in pairs
    ], tangents


def _tangent(x: Any) -> Tensor | None:
    """The tangent of an argument, of a list of tensors the first that there is."""
    if isinstance(x, list):
        return next((dx for dx in map(_tangent, x) if dx is not None), None)
    return forward_ad.unpack_dual(x, level=0).tangent if isinstance(x, Tensor) else None


def _backward(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """The backward operator under autograd. It is a gradient: forward mode and reverse mode of it are one operator."""
    below, (primals, tangents) = Below(ops.BACKWARD, keyset), _unpacked(args)
    needs_graph, is_dual = _needs_graph(primals), any(x is not None for x in tangents)
    results: tuple[Tensor, ...]
    if (needs_graph or is_dual) and (missing := _missing_for_functions(primals[4:])):
        results = underivable(ops.BACKWARD, f"{missing}: its backward")(keyset, *args)
        return results
    if needs_graph:
        with enable_single_level_autograd_function():
            results = _apply_twice(below, _of_backward, *primals)
    else:
        results = below(*primals)
    if not is_dual:
        return results
    of = ops.BACKWARD.named(tangents)
    if of["alibi_slopes"] is not None:
        raise InvalidInputError("alibi_slopes", "has a tangent, but slopes have no derivative; use attn_bias")
    if of["operands"] is not None:
        raise UnsupportedError(_MISSING.format(f"{_OF_CAPTURED}: its backward"))
    wanted = grads_of("grads", ops.BACKWARD.named(primals)["grads"]).named
    dual = (
        forward_ad.make_dual(x, dx, level=0) if is_wanted and dx is not None else x
        for x, dx, is_wanted in zip(results, _changes(of, primals), wanted, strict=False)
    )
    return *dual, results[-1]


def _changes(of: dict[str, Any], args: Sequence[Any]) -> list[Tensor | None]:
    """How much the backward's gradients at ``args`` change when its arguments change by ``of``; None for 0."""
    changes: list[Tensor | None] = [None] * len(GRADIENTS)
    if any(of[name] is not None for name in GRADIENTS):
        changes = list(ops.SECOND.overload(*(of[name] for name in GRADIENTS), *args)[: len(GRADIENTS)])
    if of["dout"] is not None or of["dlse"] is not None:
        dout = torch.zeros_like(args[0]) if of["dout"] is None else of["dout"]
        linear = ops.BACKWARD.overload(dout, of["dlse"], *args[2:])
        changes = [x if y is None else x + y for x, y in zip(linear, changes, strict=False)]
    return changes


def _second(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """The second derivative's operator under autograd: it is linear in its directions, and has no other derivative."""
    results: tuple[Tensor, ...]
    count = len(GRADIENTS)
    if _is_traced() or not _needs_graph(args[:count]) or any(x is not None for x in _unpacked(args)[1]):
        results = underivable(ops.SECOND, _THIRD)(keyset, *args)
    else:
        # PyTorch runs these nodes only for who asks for gradients past them, and then they raise.
        given = [once(_same, _THIRD, x) if isinstance(x, Tensor) and x.requires_grad else x for x in args[count:]]
        with enable_single_level_autograd_function():
            results = _apply_twice(Below(ops.SECOND, keyset), _of_second, *args[:count], *given)
    return results


def _is_traced() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _forward_mode(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
    """The forward-mode operator under autograd: its results have gradients, and no tangents."""
    primals, tangents = _unpacked(args)
    results: tuple[Tensor, ...]
    is_dual = any(x is not None for x in tangents)
    missing = "second derivative" if is_dual else _needs_graph(primals) and _missing_for_functions(primals[7:])
    if missing or not _needs_graph(primals):
        results = underivable(ops.JVP, f"{missing}: its forward-mode derivative")(keyset, *args)
        return results
    with enable_single_level_autograd_function():
        results = _apply_twice(Below(ops.JVP, keyset), _of_jvp, *args)
    return results


def _needs_graph(args: Sequence[Any]) -> bool:
    """Whether some tensor among an operator's arguments requires grad, where gradients are enabled."""
    flat = (x for arg in args for x in (arg if isinstance(arg, list) else [arg]))
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)


def _missing_for_functions(args: Sequence[Any]) -> str | None:
    """The second derivative that the call of these arguments lacks because of its function of scores; None for none."""
    t, options = ops.REGULAR.unflatten(args)
    function = Problem.of(t, options).score_function
    if function is None:
        return None
    from flashtile.mods import curve  # what few programs need is not loaded by all

    read = len(function.operands)
    if any(options.grads.operands[:read]) or any(x.requires_grad for x in (t.operands or ())[:read]):
        return _OF_CAPTURED
    why = curve.reason(function.text)
    return why and f"second derivative of this score_mod ({why})"


def underivable(operator: Operator, what: str) -> Any:
    """A kernel for the autograd keys of an operator that is a derivative itself: it says ``what`` there is not."""

    def under_autograd(keyset: Any, *args: Any) -> Any:
        below = Below(operator, keyset)
        if any(tangent is not None for tangent in _unpacked(args)[1]):
            raise UnsupportedError(_MISSING.format(what))
        if not _needs_graph(args):
            return below(*args)
        with enable_single_level_autograd_function():
            return _apply_underivable(below, what, *args)

    return under_autograd


class _Fold:
    """A call under vmap; its mapped dimension becomes part of the batch.

    ``given`` and ``dims`` hold the operator's arguments and their mapped dimensions by name.
    """

    def __init__(self, operator: Operator, size: int, given: dict[str, Any], dims: dict[str, int | None]) -> None:
        self.operator, self.size, self.given, self.dims = operator, size, given, dims
        self.grads = grads_of("grads", given["grads"]) if operator is ops.BACKWARD else Grads()
        self.batch = self._sample_shape("q")[0]

    def _sample_shape(self, name: str) -> tuple[int, ...]:
        shape, dim = list(self.given[name].shape), self.dims[name]
        if dim is not None:
            del shape[dim]
        return tuple(shape)

    def fits(self) -> bool:
        """Whether folding gives what the samples one by one would give.

        Not for packed calls; with dropout, where random numbers depend on the place in the batch; with users'
        functions, which may too; with block lists of each sample; and where a sum over the batch must not run over
        samples.
        """
        given = self.given
        if given["cu_seqlens_q"] is not None or given["rng_state"] is not None or given["mods"]:
            return False
        if self.dims["row_items"] is not None or self.operator is ops.SECOND:
            return False
        if self.grads.sinks or self.dims["sinks"] is not None or self.dims.get("dsinks") is not None:
            return False
        shape = self._sample_shape("attn_bias") if self.grads.bias else ()
        return not self.grads.bias or self.batch == 1 or (len(shape) == 4 and shape[0] == self.batch)

    def arguments(self) -> list[Any]:
        """The operator's arguments for the larger batch."""
        return [self._folded(name, x) if isinstance(x, Tensor) else x for name, x in self.given.items()]

    def _folded(self, name: str, x: Tensor) -> Tensor:
        dim, rank = self.dims[name], _BROADCASTS.get(name)
        if name in ("sinks", "dsinks", "row_items", "key_items"):
            return x
        if dim is None:
            # One for all sequences stays so, but where each sample needs a gradient or has a tangent of its own.
            own = self.grads.bias or self.given.get("dbias") is not None
            shared = rank is not None and (x.dim() < rank or (rank == 4 and x.shape[0] == 1))
            if shared and not (own and name in ("attn_bias", "dbias")):
                return x
            x = x.expand(self.size, *x.shape)
        else:
            x = x.movedim(dim, 0)
        if rank is not None:
            x = x.reshape(self.size, *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
            if x.shape[1] == 1:
                x = x.expand(self.size, self.batch, *x.shape[2:])
        return x.flatten(0, 1)

    def unfolded(self, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The results with the mapped dimension first, and where it is; gradients that nobody asked for have none."""
        if self.operator is not ops.BACKWARD:
            return tuple(x.unflatten(0, (self.size, self.batch)) for x in results), (0,) * len(results)
        found = [
            x.reshape(self.size, *self._sample_shape(name)) if wanted else x
            for name, x, wanted in zip(GRADIENTS, results, self.grads.named, strict=False)
        ]
        dims = (0 if wanted else None for wanted in self.grads.named)
        return (*found, results[-1]), (*dims, None)


# Tensors that may lack leading dimensions -> the number of all.
_BROADCASTS = {
    **dict.fromkeys(("attn_mask", "attn_bias", "row_keys", "key_rows", "row_blocks", "key_blocks", "dbias"), 4),
    "alibi_slopes": 2,
}


def _sample(x: Any, dim: Any, n: int) -> Any:
    """An argument of sample n."""
    if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_sample(each, of, n) for each, of in zip(x, dim, strict=True)]
    return x.select(dim, n) if isinstance(x, Tensor) and dim is not None else x


def _vmap(operator: Operator) -> Any:
    """An operator's rule for vmap: one call with a larger batch where that is the same, else a call per sample."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        run = operator.overload
        fold = _Fold(operator, info.batch_size, operator.named(args), operator.named(in_dims))
        if fold.fits():
            return fold.unfolded(run(*fold.arguments()))
        if info.batch_size == 0:
            raise UnsupportedError("vmap over no samples, of packed sequences or with dropout or sinks")
        samples = [
            run(*(_sample(x, dim, n) for x, dim in zip(args, in_dims, strict=True))) for n in range(info.batch_size)
        ]
        results = tuple(torch.stack(column) for column in zip(*samples, strict=True))
        return results, (0,) * len(results)

    return rule


def register() -> None:
    """Registers the kernels."""
    kernels = {
        ops.FORWARD: _forward,
        ops.BACKWARD: _backward,
        ops.SECOND: _second,
        ops.JVP: _forward_mode,
    }
    for operator, kernel in kernels.items():
        LIBRARY.impl(operator.name, kernel, "Autograd", with_keyset=True)
        torch.library.register_vmap(f"flashtile::{operator.name}", _vmap(operator), lib=LIBRARY)
    # It looks at values, so no CUDA graph may hold it.
    LIBRARY.define("no_derivative(Tensor[] grads, str what) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl("no_derivative", _no_derivative, device)
    torch.library.register_fake(
        "flashtile::no_derivative", lambda grads, what: grads[0].new_empty((), dtype=torch.float32), lib=LIBRARY
    )
