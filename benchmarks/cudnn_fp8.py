"""cuDNN's forward of e4m3 tensors, by the Python package nvidia-cudnn-frontend, which only ``make_call`` imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import Call, Outputs
from flashtile.quantization.record import E4M3, LARGEST

# What probabilities and outputs are multiplied by before they are rounded. No normal value is larger than 7, so that
# no output is larger than 448.
_OF_PROBS, OF_OUT = 256.0, 64.0


def make_call(tensors: Sequence[Tensor], causal: bool, **options: Any) -> Call:
    """Builds the graph for q, k and v, rounded here with a scale each; its call returns ``(out,)`` times ``OF_OUT``.

    Args:
        tensors: ``(batch, seqlen, num_heads, head_dim)``, all three of one shape.
        causal: Whether query i sees the keys up to its own.
        options: Of the graph, besides those for a call on the current stream.
    """
    import cudnn

    kinds, device, memory = cudnn.data_type, tensors[0].device, {}
    handle = None
    if device.type == "cuda":
        handle = options["handle"] = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    kinds_of = {E4M3: kinds.FP8_E4M3, torch.float32: kinds.FLOAT}
    wide = {f"{name}_data_type": kinds.FLOAT for name in ("intermediate", "compute")}
    graph = cudnn.pygraph(io_data_type=kinds.FP8_E4M3, **wide, **options)

    def given(name: str, x: Tensor) -> Any:
        made = graph.tensor(name=name, dim=tuple(x.shape), stride=x.stride(), data_type=kinds_of[x.dtype])
        memory[made] = x
        return made

    def returned(made: Any, x: Tensor) -> None:
        made.set_output(True).set_dim(tuple(x.shape)).set_stride(x.stride()).set_data_type(kinds_of[x.dtype])
        memory[made] = x

    one = torch.ones(1, 1, 1, 1, device=device)
    factors = {"descale_s": one / _OF_PROBS, "scale_s": one * _OF_PROBS, "scale_o": one * OF_OUT}
    for name, x in zip("qkv", tensors, strict=True):
        factors[f"descale_{name}"] = one * x.abs().amax().float() / LARGEST
        factors[name] = (x.float() / factors[f"descale_{name}"]).to(E4M3).transpose(1, 2)
    arguments = {name: given(name, x) for name, x in factors.items()}
    if causal:
        arguments |= {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0}
    o, _, *peaks = graph.sdpa_fp8(**arguments, attn_scale=tensors[0].shape[-1] ** -0.5, generate_stats=False)
    out = torch.empty_like(tensors[0], dtype=E4M3)
    returned(o, out.transpose(1, 2))
    for peak in peaks:
        returned(peak, one.clone())
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    work = torch.empty(max(graph.get_workspace_size(), 16), dtype=torch.uint8, device=device)
    places = {made.get_uid(): x.data_ptr() for made, x in memory.items()}

    def call() -> Outputs:
        graph.execute(places, work.data_ptr(), handle=handle)
        return (out,)

    # The graph reads the addresses of these.
    call.memory = memory  # type: ignore[attr-defined]
    return call
