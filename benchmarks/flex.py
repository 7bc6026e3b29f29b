"""PyTorch's FlexAttention as the provider that has every feature of suite ``models``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks.cases import Case, Inputs


def make(case: Case, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k and v, heads first, compiled on a GPU: afresh, as the compiler gives up after eight cells.

    A bias is read by its score function; sinks scale its output by how much of the denominator they leave.
    """
    bias, sinks, softcap, device = inputs.bias, inputs.sinks, case.softcap, inputs.q.device
    left, right, shift = case.band.left, case.band.right, case.seqlen_k - case.seqlen_q

    def keeps(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kept = k >= 0
        kept = kept if right is None else kept & (k <= q + (shift + right))
        return kept if left is None else kept & (k >= q + (shift - left))

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = torch.tanh(score / softcap) * softcap if softcap else score
        return score if bias is None else score + bias[0, h, q, k]

    mask, mod = None, changed if softcap or bias is not None else None
    if not case.band.unbounded:
        mask = create_block_mask(keeps, None, None, case.seqlen_q, case.seqlen_k, device=device)
    grouped = case.num_heads_q != case.num_heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sinks is None:
            return flex_attention(q, k, v, mod, mask, enable_gqa=grouped)  # type: ignore[return-value]
        out, aux = flex_attention(q, k, v, mod, mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
        lse: Tensor = aux.lse  # type: ignore[assignment]
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(out.dtype)

    if device.type != "cuda":
        return attend
    torch.compiler.reset()
    return torch.compile(attend, dynamic=False)
