"""What is said of interfaces, tried on the installed PyTorch and on ``flashtile.compat``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.call.problem import described
from flashtile.ops import dispatch
from flashtile_lab.reproduce._softmax import apart, draws


def backends(capability: tuple[int, int] | None, head_dim: int = 128) -> list[str]:
    """The backends that declare a bfloat16 forward on such a device, fastest first."""
    facts: dict[str, Any] = {"device_type": "cuda" if capability else "cpu", "compute_capability": capability}
    call = described(**facts, dtype=torch.bfloat16, head_dim=head_dim, head_dim_v=head_dim)
    declared = {name: dispatch.backend(name).capabilities("forward") for name in dispatch.NAMES}
    return [name for name, can in declared.items() if can is not None and not can.reasons(call)]


def sdpa(*tensors: Any, **options: Any) -> Any:
    """PyTorch's function in our layout."""
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), **options).transpose(1, 2)


def deprecated() -> tuple[bool, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.backends.cuda.sdp_kernel(enable_flash=True):
            told = any(issubclass(each.category, FutureWarning) for each in caught)
    return not told, "it warns that it is deprecated" if told else "no warning"


def sdpa_flash() -> list[float]:
    q, k, v = draws(3, 1, 60, 2, 32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return [apart(sdpa(q, k, v, is_causal=True), flashtile.attention(q, k, v, causal=True))]  # type: ignore[arg-type]
