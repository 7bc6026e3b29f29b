"""The implementations under test, each behind the same three questions.

A provider says whether it is there at all, why it refuses a case, and gives the call to be timed. What a caller would
do once (views, masks, the forward before a backward) stays outside that call; what every step pays (preprocessing,
conversions, allocating the outputs) stays inside.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import flashtile
from benchmarks.cases import Case, Direction, Inputs
from benchmarks.plain import Call, Eager, SdpaCpu, to_bshd
from flashtile import dispatch, ops
from flashtile.problem import Tensors


class Provider(Protocol):
    """One implementation of attention.

    Attributes:
        name: How rows, tables and plots call it.
    """

    name: str

    def runs(self, direction: Direction) -> str:
        """Which code runs a direction, in one phrase; nothing else may run in its place."""

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all, or None."""

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        """Why it cannot run this case, or None."""

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        """The call to be timed. It returns ``(out,)`` or ``(dq, dk, dv)`` in the layout of q, k and v."""


class Flashtile:
    """One backend of this library, forward through the public functions, backward through the operator.

    Args:
        backend: Its name; nothing else may run in its place.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"flashtile-{backend}"

    def runs(self, direction: Direction) -> str:
        forward = f"forward by backend {self.backend}"
        return forward if direction == "forward" else f"backward by backend {self.backend} (untimed: {forward})"

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        chosen = dispatch.backend(self.backend)
        capabilities = chosen.capabilities(direction)
        if capabilities is None:
            return f"has no {direction}"
        if device.type not in capabilities.device_types:
            return f"does not run on {device.type}"
        return chosen.missing()

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        problem = self._options(case).problem(self._tensors(inputs))
        # A backward needs the results of a forward, which the same backend must give.
        directions: tuple[Direction, ...] = ("forward", "backward") if case.direction == "backward" else ("forward",)
        reasons = [reason for each in directions for reason in dispatch.reasons(self.backend, problem, each)]
        return "; ".join(dict.fromkeys(reasons)) or None

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        if case.direction == "backward":
            return self._backward(case, inputs)
        q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
        features: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "backend": self.backend}
        if cu_seqlens is None:
            return lambda: (_only(flashtile.attention(q, k, v, **features)),)
        lengths = (case.seqlen_q, case.seqlen_k)
        return lambda: (_only(flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, *lengths, **features)),)

    def _backward(self, case: Case, inputs: Inputs) -> Call:
        tensors, options = self._tensors(inputs), self._options(case)
        out, lse = ops.attention(tensors, options)
        arguments = (*_values(tensors), *_values(options))
        backward = torch.ops.flashtile.attention_backward
        return lambda: backward(inputs.dout, None, out, lse, *arguments)[:3]

    def _tensors(self, inputs: Inputs) -> Tensors:
        cu_seqlens = inputs.cu_seqlens
        return Tensors(inputs.q, inputs.k, inputs.v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)

    def _options(self, case: Case) -> ops.Options:
        packed = case.lengths is not None
        return ops.Options(
            max_seqlen_q=case.seqlen_q if packed else None,
            max_seqlen_k=case.seqlen_k if packed else None,
            window_left=case.band.left,
            window_right=case.band.right,
            needs_grad=case.direction == "backward",
            backend=self.backend,
        )


class FlashAttention3:
    """FlashAttention-3's operators, from a library that the environment variable FA3_SO names.

    ``libcudart.so.12`` is loaded from beside it, if there; it may be packed with xz.
    """

    name = "fa3"

    def runs(self, direction: Direction) -> str:
        return f"torch.ops.flash_attn_3.{'fwd' if direction == 'forward' else 'bwd'}"

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"does not run on {device.type}"
        if torch.cuda.get_device_capability(device) != (9, 0):
            return "needs compute capability 9.0"
        if not os.environ.get("FA3_SO"):
            return "FA3_SO does not name its library"
        try:
            _load_fa3(os.environ["FA3_SO"])
        except OSError as error:
            return f"FA3_SO cannot be loaded: {error}"
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        return None if case.dtype in ("float16", "bfloat16") else f"no {case.dtype}"

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = inputs.q, inputs.k, inputs.v
        left, right = case.window or (-1, -1)
        features: dict[str, Any] = {
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": left,
            "window_size_right": right,
        }
        if inputs.cu_seqlens is not None:
            features |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            features |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        # One split is what FlashAttention-3's own Python function asks for.
        forward = functools.partial(torch.ops.flash_attn_3.fwd, q, k, v, num_splits=1, **features)
        out, lse = _first_call(forward)[:2]
        if case.direction == "forward":
            return lambda: (forward()[0],)
        backward = functools.partial(torch.ops.flash_attn_3.bwd, inputs.dout, q, k, v, out, lse, **features)
        _first_call(backward)
        return lambda: backward()[:3]


class Sdpa:
    """One CUDA backend of PyTorch's scaled_dot_product_attention, through its own operators.

    Args:
        name: ``fa2`` (PyTorch's flash backend) or ``cudnn``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def runs(self, direction: Direction) -> str:
        kernel = "flash" if self.name == "fa2" else "cudnn"
        return f"aten._scaled_dot_product_{kernel}_attention" + ("_backward" if direction == "backward" else "")

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"does not run on {device.type}"
        if self.name == "cudnn" and not torch.backends.cudnn.is_available():
            return "this PyTorch has no cuDNN"
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.window is not None:
            return "no windows"
        if case.lengths is not None and self.name != "fa2":
            return "no packed sequences"
        if case.num_heads_q != case.num_heads_kv:
            return "no grouped heads"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "causal is aligned top left"
        return None if case.dtype in ("float16", "bfloat16") else f"no {case.dtype}"

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        if inputs.cu_seqlens is not None:
            return self._packed(case, inputs, inputs.cu_seqlens)
        q, k, v, dout = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        aten = torch.ops.aten
        backward = case.direction == "backward"
        forward: Callable[[], Any]
        if self.name == "fa2":
            forward = functools.partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, case.causal)
        else:
            forward = functools.partial(
                aten._scaled_dot_product_cudnn_attention, q, k, v, None, backward, 0.0, case.causal
            )
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _first_call(forward)
        if not backward:
            return lambda: to_bshd(forward()[:1])
        saved = (dout, q, k, v, out, lse)
        if self.name == "fa2":
            plain = (cum_q, cum_k, max_q, max_k, 0.0, case.causal, seed, offset)
            grad = functools.partial(aten._scaled_dot_product_flash_attention_backward, *saved, *plain)
        else:
            biased = (seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, case.causal)
            grad = functools.partial(aten._scaled_dot_product_cudnn_attention_backward, *saved, *biased)
        _first_call(grad)
        return lambda: to_bshd(grad()[:3])

    def _packed(self, case: Case, inputs: Inputs, cu_seqlens: Tensor) -> Call:
        """The flash kernel under the operator above, which takes packed sequences in the layout of q, k and v."""
        aten = torch.ops.aten
        q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
        plain = (cu_seqlens, cu_seqlens, case.seqlen_q, case.seqlen_k, 0.0, case.causal)
        forward = functools.partial(aten._flash_attention_forward, q, k, v, *plain, False)
        out, lse, seed, offset = _first_call(forward)[:4]
        if case.direction == "forward":
            return lambda: (forward()[0],)
        saved = (dout, q, k, v, out, lse)
        grad = functools.partial(aten._flash_attention_backward, *saved, *plain, seed, offset)
        _first_call(grad)
        return lambda: grad()[:3]


PROVIDERS: dict[str, Provider] = {
    p.name: p
    for p in (
        Flashtile("portable"),
        Flashtile("hopper"),
        FlashAttention3(),
        Sdpa("cudnn"),
        Sdpa("fa2"),
        Flashtile("cpu"),
        SdpaCpu(),
        Eager(),
    )
}

OURS = "flashtile"


def _values(record: Any) -> list[Any]:
    """The fields of a record in order, tensors as they are."""
    return [getattr(record, f.name) for f in fields(record)]


def _only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _first_call(call: Callable[[], Any]) -> Any:
    """Calls an operator and, if that fails, says what its schema is: the peers' signatures move between versions."""
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        packet = getattr(call, "func", None)
        schema = getattr(getattr(packet, "default", None), "_schema", "unknown")
        raise RuntimeError(f"{error}\nschema: {schema}") from error


@functools.cache
def _load_fa3(path: str) -> None:
    library = Path(path)
    if library.suffix == ".xz":
        library = _unpacked(library)
    runtime = Path(path).parent / "libcudart.so.12"
    if runtime.exists():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))


def _unpacked(archive: Path) -> Path:
    """The library beside other temporary files, unpacked once a machine."""
    import lzma
    import shutil
    import tempfile

    target = Path(tempfile.gettempdir()) / f"flashtile-benchmarks-{os.getuid()}" / archive.stem
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(f".partial-{os.getpid()}")
        with lzma.open(archive) as packed, partial.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 24)
        partial.rename(target)
    return target
