"""The implementations compared: each is a differentiable function of q, k and v, as its users call it.

The timed calls are made from that function: a forward, a backward given a saved forward, and a training step's forward
and backward. Work that a caller does once (views, masks, the forward before a backward) is not timed; work of every
step (preprocessing, conversions, allocating the outputs) is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from benchmarks import ablations, cudnn_fp8, fa3, flash_mla, flex
from benchmarks.cases import Case, Inputs
from benchmarks.checks import Call, Outputs
from benchmarks.session import NotTimedError
from benchmarks.timing import free_bytes
from flashtile.call.backend import Direction
from flashtile.core.errors import UnsupportedError
from flashtile.ops import dispatch

Attend = Callable[..., Tensor]
OURS = "flashtile"
MLA_PEER = "flash-mla"
STEP = "forward and backward"
# The relative error that attention in 8 bits may have: of normal numbers ours has 0.053, and cuDNN's, with an output in
# 8 bits too, 0.058 to 0.066. A scale or an order of keys that is wrong makes more than 0.1.
EIGHT_BIT_ERROR = 0.08


class Provider:
    """One implementation of attention, under the name that rows, tables and plots use.

    ``code`` says in one phrase which code runs; no other may. With ``heads_first`` its dense tensors are ``(batch,
    heads, seqlen, head_dim)``, views of ours; otherwise, and if packed, they are laid out as in ``Inputs``.
    ``limit`` is the relative error that it may have, None what its inputs' dtype allows. ``takes`` names the features
    of a case that it has, of bias, trained (bias), softcap, sinks, dropout and padding.
    """

    name: str
    code: str
    heads_first = False
    limit: float | None = None
    takes: tuple[str, ...] = ()

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all, or None."""
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        """Why it cannot run this case, or None."""
        return None

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        """The function of q, k and v, in its own layout."""
        raise NotImplementedError

    def prepare(self, case: Case, inputs: Inputs, what: str | None = None) -> Call:
        """The call to be timed, which returns ``(out,)`` or ``(dq, dk, dv)`` in the provider's own layout.

        ``what`` is ``forward``, ``backward`` or ``STEP``; None is the case's direction.
        """
        attend, what = self.attend(case, inputs), what or case.direction
        q, k, v, dout = self.native((inputs.q, inputs.k, inputs.v, inputs.dout), case)
        if what == "forward":
            return lambda: (attend(q, k, v),)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        wanted = leaves + [x for x in (inputs.bias,) if x is not None and x.requires_grad]
        if what == STEP:
            return lambda: torch.autograd.grad(attend(*leaves), wanted, dout)
        with torch.enable_grad():
            out = attend(*leaves)
        return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

    def native(self, tensors: Outputs, case: Case) -> Outputs:
        """Views of tensors that convert our layout to the provider's, or back."""
        if not self.heads_first or case.lengths is not None:
            return tensors
        # dout is the fourth of those that go in, a bias's gradient the fourth of those that come out.
        bias = (1, case.num_heads_q, case.seqlen_q, case.seqlen_k) if case.bias else None
        return tuple(x if x.shape == bias else x.transpose(1, 2) for x in tensors)

    def lacks(self, case: Case) -> str | None:
        """What a case needs and ``takes`` does not name, or None."""
        absent = [name for name in case.needs if name not in self.takes]
        return f"no {' or '.join(absent)}" if absent else None


class Flashtile(Provider):
    """This library: one backend by name, or without a name the one it selects; ``change``: as in ``ablations``."""

    takes = ("bias", "trained", "softcap", "sinks", "dropout", "padding")

    def __init__(self, backend: str | None, change: str = "") -> None:
        self.backend, self.change = backend, change
        self.name = "-".join(filter(None, (OURS, backend, change)))
        self.code = f"backend {backend} of this library" if backend else "this library's choice of a backend"

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if self.backend is None:
            return None
        chosen = dispatch.backend(self.backend)
        capabilities = chosen.capabilities(direction)
        if capabilities is None:
            return f"has no {direction}"
        return chosen.missing() if device.type in capabilities.device_types else f"does not run on {device.type}"

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        leaves = (x.detach().requires_grad_(case.direction == "backward") for x in (inputs.q, inputs.k, inputs.v))
        try:
            flashtile.explain(*leaves, **self._features(case, inputs))
        except UnsupportedError as error:
            return str(error)
        return None

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        attention: Attend = flashtile.attention if case.lengths is None else flashtile.attention_varlen  # type: ignore
        attend: Attend = functools.partial(attention, **self._features(case, inputs))
        return ablations.changed(attend, case, self.change) if self.change else attend

    def _features(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        features: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "backend": self.backend}
        features |= {"attn_bias": inputs.bias, "softcap": case.softcap, "sinks": inputs.sinks}
        features |= {"attn_mask": inputs.mask, "dropout_p": case.dropout}
        if case.lengths is not None:
            features |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            features |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        return features


class OwnBits(Flashtile):
    """This library's cached calls, batch-invariant; ``asked`` is the keyword's value."""

    def __init__(self, name: str, asked: bool | str) -> None:
        super().__init__(None)
        self.name, self.asked = f"{OURS}-{name}", asked
        self.code = f"this library's choice of a backend with batch_invariant={asked!r}"

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        return None if direction == "decode" else "is for cached calls alone"


class EightBits(Flashtile):
    """This library in 8 bits by one backend: tensors rounded before, with an output of 8 bits, or in the call."""

    limit = EIGHT_BIT_ERROR

    def __init__(self, backend: str, in_call: bool) -> None:
        super().__init__(backend)
        self.in_call = in_call
        self.name += "-fp8-call" if in_call else "-fp8"
        self.code += " in 8 bits, " + ("quantised in the call" if in_call else "of tensors quantised before")

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if direction == "backward" and not self.in_call:
            return "has no backward"
        return super().missing("quantized", device)

    def prepare(self, case: Case, inputs: Inputs, what: str | None = None) -> Call:
        if self.in_call:
            return super().prepare(case, inputs, what)
        features = self._features(case, inputs)
        names = [name for name in features if "seqlen" in name]
        lengths = {name: features.pop(name) for name in names}
        out_scale = torch.full((1,), 1 / cudnn_fp8.OF_OUT, device=inputs.q.device)
        record = flashtile.quantize(inputs.q, inputs.k, inputs.v, out_scale=out_scale, **lengths)
        del features["precision"]
        attention: Attend = flashtile.attention if case.lengths is None else flashtile.attention_varlen  # type: ignore
        return lambda: (attention(record, **features),)

    def native(self, tensors: Outputs, case: Case) -> Outputs:
        return tensors if self.in_call else tuple(x.float() / cudnn_fp8.OF_OUT for x in tensors)

    def _features(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        return super()._features(case, inputs) | {"precision": "fp8"}


class FlashAttention3(Provider):
    """FlashAttention-3's operators from the library FA3_SO, with ``libcudart.so.12`` from the same folder."""

    name, code = "fa3", "torch.ops.flash_attn_3"
    takes = ("softcap",)

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"does not run on {device.type}"
        if torch.cuda.get_device_capability(device) != (9, 0):
            return "needs compute capability 9.0"
        if not os.environ.get("FA3_SO"):
            return "FA3_SO does not name its library"
        try:
            fa3.load(os.environ["FA3_SO"])
        except OSError as error:
            return f"FA3_SO cannot be loaded: {error}"
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        return None if case.dtype in ("float16", "bfloat16") else f"no {case.dtype}"

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        left, right = case.window or (-1, -1)
        features: dict[str, Any] = {"is_causal": case.causal, "window_size_left": left, "window_size_right": right}
        features |= {"softcap": case.softcap} if case.softcap else {}
        if inputs.cu_seqlens is not None:
            features |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            features |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        return lambda q, k, v: fa3.FlashAttention3.apply(q, k, v, features)


class FlashMla(Provider):
    """FlashMLA's dense decode, an extension module that FLASH_MLA_SO names: it attends over latent rows alone."""

    name, code = MLA_PEER, "flash_mla's dense_decode_fwd"

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return "needs compute capability 9.0"
        if not os.environ.get("FLASH_MLA_SO"):
            return "FLASH_MLA_SO does not name its module"
        self.call = flash_mla.load(os.environ["FLASH_MLA_SO"])
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        return "not asked"


class SdpaKernel(Provider):
    """One CUDA backend of PyTorch's scaled_dot_product_attention, by its own operator: ``cudnn``."""

    name, code = "cudnn", "aten._scaled_dot_product_cudnn_attention"
    heads_first = True
    takes: tuple[str, ...] = ("bias", "dropout", "padding")

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"does not run on {device.type}"
        if self.name != "fa2" and not torch.backends.cudnn.is_available():
            return "this PyTorch has no cuDNN"
        return None

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.window is not None:
            return "no windows"
        if case.lengths is not None:
            return "no packed sequences"
        if case.num_heads_q != case.num_heads_kv:
            return "no grouped heads"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "causal is aligned top left"
        return None if case.dtype in ("float16", "bfloat16") else f"no {case.dtype}"

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        cudnn, causal = torch.ops.aten._scaled_dot_product_cudnn_attention, case.causal
        bias = inputs.bias if inputs.mask is None else torch.where(inputs.mask, 0.0, -torch.inf).to(case.torch_dtype)
        bias = None if bias is None else bias.expand(case.batch, -1, case.seqlen_q, -1)
        return lambda q, k, v: cudnn(q, k, v, bias, q.requires_grad, case.dropout, causal)[0]


class FlashAttention2(SdpaKernel):
    """PyTorch's FlashAttention-2, by the operator under scaled_dot_product_attention's, which has all its features.

    Values narrower than the keys are padded in the call, as its users do.
    """

    name, code = "fa2", "aten._flash_attention_forward"
    heads_first = False
    takes = ("dropout",)

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.dtype not in ("float16", "bfloat16"):
            return f"no {case.dtype}"
        return "head_dim is no multiple of 8" if case.head_dim % 8 else None

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        (left, right), bounds = case.window or (None, None), inputs.cu_seqlens
        windows = {"window_size_left": left, "window_size_right": right}
        wider = case.head_dim - (case.head_dim_v or case.head_dim)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            longest = (q.shape[1], k.shape[1]) if bounds is None else (case.seqlen_q, case.seqlen_k)
            v = F.pad(v, (0, wider)) if wider else v
            sizes = (bounds, bounds, *longest, case.dropout, case.causal, False)
            out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, **windows)[0]
            return out[..., :-wider] if wider else out

        return attend


class CudnnEightBits(SdpaKernel):
    """cuDNN's attention of e4m3 tensors by nvidia-cudnn-frontend: a scale a tensor, given before; an output in e4m3."""

    name, code = "cudnn-fp8", "cudnn.pygraph.sdpa_fp8"
    heads_first = False
    takes = ()
    limit = EIGHT_BIT_ERROR

    def missing(self, direction: Direction, device: torch.device) -> str | None:
        if importlib.util.find_spec("cudnn") is None:
            return "nvidia-cudnn-frontend is not installed"
        return super().missing(direction, device) if direction == "forward" else f"has no {direction} here"

    def prepare(self, case: Case, inputs: Inputs, what: str | None = None) -> Call:
        return cudnn_fp8.make_call((inputs.q, inputs.k, inputs.v), case.causal)

    def native(self, tensors: Outputs, case: Case) -> Outputs:
        return tuple(x.float() / cudnn_fp8.OF_OUT for x in tensors)


class Sdpa(Provider):
    """PyTorch's function as its users call it: with a boolean mask for a window, packed sequences one by one."""

    name, code = "sdpa", "torch.nn.functional.scaled_dot_product_attention"
    heads_first, takes = True, ("bias", "trained", "dropout", "padding")

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        features: dict[str, Any] = {"enable_gqa": case.num_heads_q > case.num_heads_kv, "dropout_p": case.dropout}
        sdpa: Attend = functools.partial(F.scaled_dot_product_attention, **features)
        if case.lengths is not None:
            lengths = list(case.lengths)

            def one_by_one(*packed: Tensor) -> Tensor:
                sequences = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in packed), strict=True)
                return torch.cat([sdpa(*each, is_causal=case.causal)[0].transpose(0, 1) for each in sequences])

            return one_by_one
        given = inputs.bias if inputs.bias is not None else inputs.mask
        if given is not None or (case.window is None and (not case.causal or case.seqlen_q == case.seqlen_k)):
            return functools.partial(sdpa, attn_mask=given, is_causal=case.causal)
        return functools.partial(sdpa, attn_mask=case.band.dense(case.seqlen_q, case.seqlen_k, device=inputs.q.device))


class Eager(Provider):
    """Standard attention: the whole score matrix in memory, in the input dtype."""

    name, code = "eager", "products, softmax and mask of PyTorch"
    heads_first = True

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.lengths is not None:
            return "no packed sequences"
        scores = case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k * case.torch_dtype.itemsize
        need = scores * (4 if case.direction == "forward" else 8)
        free = free_bytes(inputs.q.device)
        return f"does not fit: {need / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB free" if need > free else None

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        group, drop = case.num_heads_q // case.num_heads_kv, None
        if not case.band.unbounded:
            drop = ~case.band.dense(case.seqlen_q, case.seqlen_k, device=inputs.q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = (q * case.head_dim**-0.5) @ k.transpose(-1, -2)
            if drop is not None:
                scores = scores.masked_fill_(drop, -torch.inf)
            return torch.softmax(scores, dim=-1) @ v

        return attend


class Flex(Provider):
    """PyTorch's FlexAttention. It compiles for each cell, and is asked only for what others lack."""

    name, code = "flex", "torch.nn.attention.flex_attention"
    heads_first = True
    takes = ("bias", "trained", "softcap", "sinks")

    def refusal(self, case: Case, inputs: Inputs) -> str | None:
        if case.lengths is not None or not case.needs:
            return "not asked"
        return "no backward on the CPU" if case.direction == "backward" and not inputs.q.is_cuda else None

    def attend(self, case: Case, inputs: Inputs) -> Attend:
        return flex.make(case, inputs)


_OURS: list[Provider] = [Flashtile(name) for name in (None, "portable", "hopper", "cpu")]
_OURS += [Flashtile("hopper", change) for change in ablations.CHANGES]
_OURS += [OwnBits("invariant", True), OwnBits("strict", "strict")]
_OURS += [EightBits(name, in_call) for name in ("portable", "hopper", "cpu") for in_call in (False, True)]
_PEERS: list[Provider] = [FlashAttention3(), FlashMla(), SdpaKernel(), CudnnEightBits(), FlashAttention2(), Flex()]
_PEERS += [Sdpa(), Eager()]
PROVIDERS = {provider.name: provider for provider in _OURS + _PEERS}


def choose_providers(names: Sequence[str], direction: Direction, device: torch.device) -> list[Provider]:
    """The providers that can run on this machine; prints why others cannot, and raises for an unknown name."""
    found = []
    for name in names:
        if name not in PROVIDERS:
            raise ValueError(f"provider is {name!r}, must be one of {', '.join(PROVIDERS)}")
        why = PROVIDERS[name].missing(direction, device)
        print(f"{name}: {PROVIDERS[name].code}" if why is None else f"without {name}: {why}", flush=True)
        found += [PROVIDERS[name]] if why is None else []
    return found


def prepared(provider: Provider, case: Case, inputs: Inputs, what: str | None = None) -> Call:
    """A provider's call; ``NotTimedError`` if it refuses the case."""
    refusal = provider.lacks(case) or provider.refusal(case, inputs)
    if refusal is not None:
        raise NotTimedError(f"refused: {refusal}")
    return provider.prepare(case, inputs, what)
