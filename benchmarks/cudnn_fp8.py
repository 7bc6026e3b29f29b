"""cuDNN's forward of e4m3 tensors, by the Python package nvidia-cudnn-frontend, which only ``make_call`` imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import Call, Outputs
from flashtile.call.blocks import LARGEST
from flashtile.call.quantized import E4M3

# What probabilities and outputs are multiplied by before they are rounded. No normal value is larger than 7, so that
# no output is larger than 448.
_OF_PROBS, OF_OUT = 256.0, 64.0


def make_call(tensors: Sequence[Tensor], causal: bool) -> Call:
    """Builds the graph for q, k and v, rounded here with a scale each; its call returns ``(out,)`` times ``OF_OUT``.

    Args:
        tensors: ``(batch, seqlen, num_heads, head_dim)``, all three of one shape.
        causal: Whether query i sees the keys up to its own.
    """
    import cudnn

    handle, dtypes = cudnn.create_handle(), {E4M3: cudnn.data_type.FP8_E4M3, torch.float32: cudnn.data_type.FLOAT}
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    wide = {f"{name}_data_type": cudnn.data_type.FLOAT for name in ("intermediate", "compute")}
    graph = cudnn.pygraph(io_data_type=dtypes[E4M3], handle=handle, **wide)
    memory: dict[Any, Tensor] = {}

    def returned(made: Any, x: Tensor) -> None:
        made.set_output(True).set_dim(tuple(x.shape)).set_stride(x.stride()).set_data_type(dtypes[x.dtype])
        memory[made] = x

    one = torch.ones(1, 1, 1, 1, device=tensors[0].device)
    given = {"descale_s": one / _OF_PROBS, "scale_s": one * _OF_PROBS, "scale_o": one * OF_OUT}
    for name, x in zip("qkv", tensors, strict=True):
        given[f"descale_{name}"] = one * x.abs().amax().float() / LARGEST
        given[name] = (x.float() / given[f"descale_{name}"]).to(E4M3).transpose(1, 2)
    arguments: dict[str, Any] = {}
    for name, x in given.items():
        arguments[name] = graph.tensor(name=name, dim=tuple(x.shape), stride=x.stride(), data_type=dtypes[x.dtype])
        memory[arguments[name]] = x
    if causal:
        arguments |= {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0}
    o, _, *peaks = graph.sdpa_fp8(**arguments, attn_scale=tensors[0].shape[-1] ** -0.5, generate_stats=False)
    out = torch.empty_like(tensors[0], dtype=E4M3)
    returned(o, out.transpose(1, 2))
    for peak in peaks:
        returned(peak, one.clone())
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    work = torch.empty(max(graph.get_workspace_size(), 16), dtype=torch.uint8, device=out.device)

    def call() -> Outputs:
        graph.execute(places, work.data_ptr(), handle=handle)
        return (out,)

    places = {made.get_uid(): x.data_ptr() for made, x in memory.items()}
    call.memory = memory  # type: ignore[attr-defined]  # of those addresses
    return call
