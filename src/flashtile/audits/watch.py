"""Sees each attention call of a model while it runs: by PyTorch's function mode, and by names that are rebound."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from flashtile import attention, attention_varlen, attention_with_kvcache, explain
from flashtile.audits import calls
from flashtile.audits.calls import SeenCall
from flashtile.core.errors import InvalidInputError, UnsupportedError

# What is done with a call: takes the layer's name and module, returns what the call shall return, or None for as it is.
Handler = Callable[[str, nn.Module, SeenCall], Tensor | None]

_Reader = Callable[[Mapping[str, Any], Tensor, str, float], SeenCall]

# Methods that leave the numbers as they are, and those that multiply them.
_SAME = {
    "__getitem__", "__get__", "bfloat16", "clone", "contiguous", "double", "expand", "flatten", "float", "half",
    "movedim", "permute", "repeat", "repeat_interleave", "reshape", "squeeze", "swapaxes", "to", "transpose", "type_as",
    "unflatten", "unsqueeze", "view",
}  # fmt: skip
_TIMES, _OVER = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}, {"div", "div_", "__truediv__", "__itruediv__"}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
# Functions of other packages, known by name: packages, and copies of them from a hub, share these.
_FLASH: dict[str, _Reader] = {
    "flash_attn_func": calls.of_flash,
    "flash_attn_varlen_func": calls.of_flash,
    "flash_attn_with_kvcache": calls.of_cache,
}


class _Kernels(TorchDispatchMode):
    """The kernels of ``scaled_dot_product_attention`` that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "attention" in name and "fused_sdp_choice" not in name:
            self.names.append(name.partition("::")[2].removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return func(*args, **(kwargs or {}))


class Watch(TorchFunctionMode):
    """Sees attention calls, and attention that is written out as products around a softmax.

    Args:
        model: The model that will run.
        handler: Gets each call once it is done; an attribute that may be changed.
        batch: The batch of the model's inputs, for written-out attention in which batch and heads are one dimension.
    """

    def __init__(self, model: nn.Module, handler: Handler, batch: int) -> None:
        super().__init__()
        self.handler, self._batch, self._model = handler, batch, model
        self._layers: list[tuple[str, nn.Module]] = [("", model)]
        self._inside, self._kernel, self.count = 0, "", 0
        self._is_running = False
        self._factors, self._products, self._probs = (WeakIdKeyDictionary() for _ in range(3))
        # Softmaxes over what could be scores that nothing is known about, by layer.
        self.unknown: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watches in this context."""
        hooks: list[Any] = []
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for name, module in self._model.named_modules():
                hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
            self._rebind(replaced)
            self._is_running = True
            # Compiled parts run as the code that they were compiled from.
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            self._is_running = False
            for place, key, value in replaced:
                place[key] = value
            torch.backends.mha.set_fastpath_enabled(fast)
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._layers.append((name, module))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._layers.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside:
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._sdpa(func, args, kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            return self._follow(name, args, kwargs, result)
        return result

    def _handle(self, call: SeenCall) -> Tensor | None:
        self.count += 1
        self._inside += 1
        if call.q.dtype != call.out.dtype:  # as autocast rounds them
            call = call.but(**{name: getattr(call, name).to(call.out.dtype) for name in "qkv"})
        if 0 in (*call.q.shape, *call.k.shape):
            call = call.but(unknown="nothing to compute")
        try:
            with torch.autocast(call.q.device.type, enabled=False):
                return self.handler(*self._layers[-1], call)
        finally:
            self._inside -= 1

    def _factor(self, *tensors: Any) -> float:
        """By what tensors have been multiplied, as far as it was seen."""
        product = 1.0
        for x in tensors:
            product *= self._factors.get(x, 1.0) if isinstance(x, Tensor) else 1.0
        return product

    def _sdpa(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        kernels = _Kernels()
        with kernels:
            result: Tensor = func(*args, **kwargs)
        given = calls.bound(_like_sdpa, args, kwargs)
        call = calls.of_sdpa(given, result, self._factor(given["query"], given["key"]))
        kernel = kernels.names[0] if kernels.names else "math"
        if kernel.startswith("flash") and result.is_cuda:
            served = torch.nn.attention.current_flash_attention_impl()
            kernel = f"{kernel} by {served}" if served else kernel
        math = call.q.dtype if kernel == "math" else torch.float32
        found = self._handle(call.but(function=f"{call.function} ({kernel})", score_dtype=math))
        return result if found is None else found.transpose(1, 2).reshape(result.shape).to(result.dtype)

    def _follow(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        """Follows queries and keys that are multiplied by numbers, their products, a softmax, and its product."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name in _TIMES | _OVER and len(args) == 2:
            number = next((float(x) for x in args if isinstance(x, int | float)), None)
            if number is not None and tensors:
                self._factors[result] = self._factor(tensors[0]) * (number if name in _TIMES else 1 / number)
        elif name in _SAME and tensors and tensors[0] in self._factors:
            self._factors[result] = self._factors[tensors[0]]
        if name in _PRODUCTS:
            names = ("input", "batch1", "mat1", "batch2", "mat2", "other", "tensor2")
            return self._multiply(name, (*args, *(kwargs[key] for key in names if key in kwargs)), result)
        if name == "softmax" and tensors:
            found = self._products.get(tensors[0])
            if found is not None:
                self._probs[result] = (*found, tensors[0], 0.0)
            elif tensors[0].dim() == 4 and min(tensors[0].shape[-2:]) > 1:
                self.unknown.append(self._layers[-1][0])
            return result
        for follows in (self._products, self._probs):
            source = next((x for x in tensors if x in follows and x.numel() == result.numel()), None)
            if source is not None:
                follows[result] = follows[source]
                if name == "dropout" and follows is self._probs:
                    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
                    p = given.get("p", 0.5) if given.get("training", given.get("train", True)) else 0.0
                    follows[result] = (*follows[source][:-1], p)
                break
        return result

    def _multiply(self, name: str, args: Any, result: Tensor) -> Tensor:
        """Notes a product that may be scores; and handles the product of probabilities and values."""
        pair = _factors_of(name, args)
        if pair is None:
            return result
        a, b, to, usual = pair
        probs = next((x for x in args if isinstance(x, Tensor) and x in self._probs), None)
        if probs is None:
            if to == usual:
                self._products[result] = a, b.mT, self._factor(*(x for x in args if isinstance(x, Tensor)))
            return result
        q, k, factor, scores, dropout_p = self._probs[probs]
        if a.numel() != scores.numel():
            return result
        out = torch.einsum(f"{to}->{usual}", result) if to else result
        q, k, v, out, scores = (self._with_heads(x) for x in (q, k, b, out, scores))
        rows, keys = q.shape[2], k.shape[2]
        call = SeenCall(
            "softmax, written out", q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2),
            calls.own_rows(rows, keys, q.device), factor=factor, scores=scores, dropout_p=dropout_p,
            score_dtype=q.dtype, aligned=rows == keys,
        )  # fmt: skip
        found = self._handle(call)
        if found is None:
            return result
        found = found.transpose(1, 2).to(result.dtype)
        return torch.einsum(f"{usual}->{to}", found) if to else found.reshape(result.shape)

    def _with_heads(self, x: Tensor) -> Tensor:
        """``(batch * heads, rows, dim)`` with a dimension of heads."""
        if x.dim() == 4:
            return x
        batch = self._batch if x.dim() == 3 and len(x) % self._batch == 0 else 1
        return x.reshape(batch, -1, *x.shape[-2:])

    def _rebind(self, replaced: list[tuple[dict[str, Any], str, Any]]) -> None:
        """Replaces functions in loaded modules; what stood there before is added to a list."""
        fixed: dict[Any, _Reader] = {
            attention: calls.of_flash,
            attention_varlen: calls.of_flash,
            attention_with_kvcache: calls.of_cache,
        }
        for place, name, reader in (
            ("torch.nn.attention.flex_attention", "flex_attention", calls.of_flex),
            ("torch.nn.attention.varlen", "varlen_attn", calls.of_varlen),
            ("transformers.integrations.flex_attention", "compile_friendly_flex_attention", calls.of_flex),
        ):
            if place in sys.modules:
                fixed[getattr(sys.modules[place], name)] = reader
        made: dict[int, Any] = {}
        names = {function.__name__ for function in fixed} | set(_FLASH)
        for name, module in list(sys.modules.items()):
            if name.startswith("flashtile.audits"):
                continue
            contents = getattr(module, "__dict__", None) or {}
            for key, value in list(contents.items()):
                if type(value) is not types.FunctionType or value.__name__ not in names:
                    continue
                original = getattr(value, "_torchdynamo_orig_callable", value)
                read = fixed.get(original) or _FLASH.get(value.__name__)
                # transformers compiles that name once, and would keep ours.
                if read is not None and (name, key) != ("transformers.integrations.flex_attention", "flex_attention"):
                    made.setdefault(id(value), self._wrapped(value, read))
                    contents[key] = made[id(value)]
                    replaced.append((contents, key, value))
        interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        table = getattr(interface, "_global_mapping", {})
        for key, value in list(table.items()):
            table[key] = self._wrapped(value, calls.of_transformers, last=True)
            replaced.append((table, key, value))

    def _wrapped(self, function: Any, read: Any, last: bool = False) -> Callable[..., Any]:
        """The function, with each call handled; if ``last``, only calls in which nothing was seen."""
        home = getattr(function, "__module__", None) or "unnamed"
        is_ours = home.startswith("flashtile.api")

        def seen(*args: Any, **kwargs: Any) -> Any:
            # Code that copies the name meanwhile keeps this function afterwards.
            if self._inside or not self._is_running:
                if is_ours and self._is_running and not self._kernel:
                    self._kernel = _backend(args, kwargs)
                return function(*args, **kwargs)
            if last:
                return run(args, kwargs)
            with _pop_mode_temporarily():
                return run(args, kwargs)

        def run(args: Any, kwargs: Any) -> Any:
            before, self._kernel = self.count, ""
            self._inside += not last
            try:
                # FlexAttention is a kernel only where it is compiled.
                with torch.compiler.set_stance("default" if read is calls.of_flex else "force_eager"):
                    result = function(*args, **kwargs)
            finally:
                self._inside -= not last
            if last and self.count > before:
                return result
            out = result[0] if isinstance(result, tuple) else result
            given = calls.bound(_like_transformers if last else function, args, kwargs)
            tensors = [x for x in given.values() if isinstance(x, Tensor)][:2]
            name = "flex_attention"
            if read is not calls.of_flex:
                name = f"{home.partition('.')[0]}.{function.__name__}"
            kernel = _backend(args, kwargs) if is_ours else self._kernel and f"flashtile's {self._kernel}"
            call = read(given, out, f"{name} ({kernel})" if kernel else name, self._factor(*tensors))
            found = self._handle(call)
            if found is None:
                return result
            found = found.to(out.dtype)
            if read is calls.of_flex:
                found = found.transpose(1, 2)
            found = found.reshape(out.shape)
            return (found, *result[1:]) if isinstance(result, tuple) else found

        seen.__name__, seen.__wrapped__ = function.__name__, function  # type: ignore[attr-defined]
        return seen


def _like_sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> None: ...  # fmt: skip


def _like_transformers(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> None: ...


def _backend(args: Any, kwargs: Any) -> str:
    """The backend that runs a call of flashtile's."""
    try:
        text = explain(*args, **kwargs)
    except (InvalidInputError, UnsupportedError, TypeError):
        return ""
    line = next((line for line in text.splitlines() if line.startswith("forward: ")), "")
    return line.removeprefix("forward: ").partition(":")[0]


def _factors_of(name: str, args: Any) -> tuple[Tensor, Tensor, str, str] | None:
    """A product's factors ``(..., rows, n)`` and ``(..., n, columns)``, and einsum's letters of its result and of that.

    None if it is no product of matrices with a batch, or one of einsum's that has no such form.
    """
    if name != "einsum":
        a, b = args[-2:]
        return (a, b, "", "") if isinstance(b, Tensor) and min(a.dim(), b.dim()) > 2 else None
    sides, _, to = str(args[0]).replace(" ", "").partition("->")
    if len(args) != 3 or sides.count(",") != 1 or "." in sides or not to:
        return None
    one, two = sides.split(",")
    batch = "".join(x for x in to if x in one and x in two)
    rows, columns = ("".join(x for x in to if x not in side) for side in (two, one))
    summed = "".join(x for x in one if x in two and x not in to)
    if (len(rows), len(columns), len(summed), len(batch)) != (1, 1, 1, 2):
        return None
    a = torch.einsum(f"{one}->{batch}{rows}{summed}", args[1])
    return a, torch.einsum(f"{two}->{batch}{summed}{columns}", args[2]), to, batch + rows + columns


# The original treats itself as one operation under a mode; this copy runs as code.
_MULTI_HEAD = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
