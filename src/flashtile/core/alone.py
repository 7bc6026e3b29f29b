"""A result that is one tensor, for callers who may expect a pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError


class Alone(Tensor):
    """A tensor that refuses to be unpacked as the ``(output, weights)`` of torch.nn.MultiheadAttention.

    For a batch of two, ``out, _ = tensor`` would silently be one sample; for any batch, ``tensor[0]`` is one sample.
    Operations on it return plain tensors, and so do copying and loading.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(x: Tensor) -> Tensor:
        """Makes x such a tensor, if x is a plain tensor that is not traced: traced tensors have no types."""
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        return x if is_traced or type(x) is not Tensor else x.as_subclass(Alone)

    def __iter__(self) -> Any:
        raise self._refusal("Samples are out.unbind(0)")

    def __getitem__(self, index: Any) -> Tensor:
        if type(index) is int and index in (0, 1):
            raise self._refusal(f"Sample {index} is out[{index}, ...]")
        return super().__getitem__(index)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    def _refusal(self, cure: str) -> InvalidInputError:
        what = "is the output alone, no pair with weights as torch.nn.MultiheadAttention's: write out = module(...)"
        return InvalidInputError("out", f"{what}. {cure}")
