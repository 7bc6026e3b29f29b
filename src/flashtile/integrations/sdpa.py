"""PyTorch's ``scaled_dot_product_attention``, run by flashtile where it can. Calls left to PyTorch are counted.

``with use():`` and ``enable()`` replace the function's name in ``torch.nn.functional`` and in the modules that imported
it from there. Like PyTorch's ``sdpa_kernel`` they hold for all threads, including the thread in which a backward runs a
checkpointed forward again. They cost nothing outside of attention, and ``torch.compile`` sees them: code that was
compiled before is compiled again. A reference to the function in an object or a closure is not replaced. (A
``TorchFunctionMode`` would reach it, but costs two microseconds for every operation and every ``x.shape``, and has no
effect in a backward, which PyTorch runs without the mode.)

Meanwhile the fused inference path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` is off, because it
does not call the function.

``torch.nn.attention.activate_flash_attention_impl("flashtile")`` is another way, for CUDA tensors: importing this
module registers the name. PyTorch then chooses its kernels as always, and where it chooses flash attention, flashtile
runs, in C++ code too. A call that flashtile refuses is an error there. On Hopper PyTorch may ask cuDNN first: calls
that cuDNN ran count as left, and the first one warns.

``calls`` counts the calls that ran, and by reason the calls that were left to PyTorch.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from flashtile.core.errors import UnsupportedError
from flashtile.integrations._attend import attend, is_causal_bias
from flashtile.integrations._calls import Calls
from flashtile.integrations._flash_impl import Handle

__all__ = ["calls", "disable", "enable", "is_enabled", "scaled_dot_product_attention", "use"]

calls = Calls("sdpa")
"""Calls served and left, in all threads, since the program's start or ``calls.clear()``."""

register_flash_attention_impl("flashtile", register_fn=lambda: Handle(calls))

_PYTORCH = torch._C._nn.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name, run by flashtile where it can; the arguments, results and errors are PyTorch's.

    Two results differ where PyTorch leaves them open: a row with all keys masked is 0 and has gradients 0, and dropout
    draws other numbers. There are second derivatives.
    """
    found: Tensor | str = "sdpa_kernel or torch.backends.cuda turned PyTorch's flash or math attention off"
    if _left_open():
        found = attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **calls.carried())
    if isinstance(found, Tensor):
        calls.serve()
        return found
    calls.leave(found)
    # A CausalBias calls the function by its public name, which is now ours.
    bias: Any = attn_mask
    function = type(bias)._dispatch if is_causal_bias(bias) else _PYTORCH
    return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@torch.compiler.assume_constant_result
def _left_open() -> bool:
    # Trainers leave cuDNN's or the memory-efficient kernels out of their lists; that chooses none of the others.
    return torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled()


_lock = threading.Lock()
_holders, _serving, _enabled, _fast_path = 0, False, False, True


@contextmanager
def use() -> Iterator[None]:
    """Serves the calls of all threads inside the context, which may be nested.

    A backward that recomputes the forward, as with ``torch.utils.checkpoint``, belongs inside too.

    Raises:
        UnsupportedError: Another package has replaced ``torch.nn.functional.scaled_dot_product_attention``.
    """
    with _lock:
        _hold(1)
    try:
        yield
    finally:
        with _lock:
            _hold(-1)


def enable() -> None:
    """Serves the calls of all threads from now on; a second time it does nothing.

    Raises:
        UnsupportedError: Another package has replaced ``torch.nn.functional.scaled_dot_product_attention``.
    """
    global _enabled
    with _lock:
        _hold(0 if _enabled else 1)
        _enabled = True


def disable() -> None:
    """Undoes ``enable``."""
    global _enabled
    with _lock:
        _hold(-1 if _enabled else 0)
        _enabled = False


def is_enabled() -> bool:
    """Whether ``enable`` is in force."""
    return _enabled


def _hold(change: int) -> None:
    """Counts the requests to serve calls; serving starts with the first request and stops with the last."""
    global _holders, _serving, _fast_path
    present = F.scaled_dot_product_attention
    if change > 0 and present is not _PYTORCH and present is not _served_if_held:
        name = f"{getattr(present, '__module__', '')}.{getattr(present, '__qualname__', present)}"
        raise UnsupportedError(f"torch.nn.functional.scaled_dot_product_attention is already replaced by {name}")
    before, _holders = _holders, _holders + change
    _serving = _holders > 0
    if _serving and not before:
        _fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        _rebind({_PYTORCH: _served_if_held, _MULTI_HEAD: _multi_head})
    elif before and not _serving:
        torch.backends.mha.set_fastpath_enabled(_fast_path)
        _rebind({_served_if_held: _PYTORCH, _multi_head: _MULTI_HEAD})


def _served_if_held(*tensors: Any, **keywords: Any) -> Tensor:
    """The function behind the public name meanwhile. Code that copies the name keeps this function afterwards."""
    return (scaled_dot_product_attention if _serving else _PYTORCH)(*tensors, **keywords)


# PyTorch's context_parallel replaces a function under the function's own name.
_served_if_held.__name__ = "scaled_dot_product_attention"


# torch.compile treats F.multi_head_attention_forward as one operation, whatever it calls; this copy is traced as code.
# Its code object distinguishes it from the original, and without a __name__ its globals are found in the function.
_multi_head = types.FunctionType(
    _MULTI_HEAD.__code__.replace(),
    {name: value for name, value in vars(F).items() if name != "__name__"}
    | {"scaled_dot_product_attention": _served_if_held},
    argdefs=_MULTI_HEAD.__defaults__,
)


def _rebind(changes: dict[Any, Any]) -> None:
    """Rebinds names in loaded modules; in PyTorch itself only public names."""
    for name, module in list(sys.modules.items()):
        if (name.partition(".")[0] == "torch" and module is not F) or name == __name__:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and value in changes:
                setattr(module, key, changes[value])
