"""Small calls of every kernel, to be run under compute-sanitizer; each is checked against the oracle as it goes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool TOOL python -m tests.gpu.sanitize [BACKEND ...]

with TOOL memcheck, racecheck or initcheck. The last line for each backend counts its calls, since a tool that saw none
has nothing to complain of either. Forward and gradients are run where a backend has both.

The oracle computes in main memory. On the device, its products in bfloat16 leave through TMA, which initcheck does not
see, so that all that comes after them seemed to read what nobody had written: 1.5 million times on an H200.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import torch

from flashtile import UnsupportedError
from flashtile.ops import dispatch
from tests.cases import Case, build, judge
from tests.kvcache import cases as kvcache
from tests.kvcache.cases import CacheCase
from tests.quantization import cases as quantization
from tests.quantization.cases import QuantizedCase
from tests.selected import drawn
from tests.selected import judge as judge_blocks
from tests.selections import SELECTED, judge_selected, lists_for

CASES = (
    Case("full", seqlen_q=200, seqlen_k=150, head_dim=64),
    Case("causal", seqlen_q=150, seqlen_k=200, head_dim=128, causal=True, heads=4, kv_heads=2),
    Case("wide", seqlen_q=100, seqlen_k=100, head_dim=256, causal=True),
    Case("latent", seqlen_q=130, seqlen_k=150, head_dim=192, head_dim_v=128, causal=True),
    Case("parts", seqlen_q=150, seqlen_k=140, head_dim=96, heads=8, kv_heads=1),
    Case("window", seqlen_q=300, seqlen_k=300, head_dim=64, window=(70, 20), softcap=5.0),
    Case("odd", seqlen_q=61, seqlen_k=77, head_dim=33, head_dim_v=7, window=(20, 5)),
    Case("features", batch=1, seqlen_q=70, seqlen_k=70, head_dim=32, softcap=3.0, alibi="h", bias="hqk", mask="qk",
         sinks=True, dropout=0.2, causal=True),
    Case("mods", seqlen_q=130, seqlen_k=150, head_dim=64, alibi="h", bias="hqk", bias_grad=False, mask="qk",
         causal=True),
    Case("groups", seqlen_q=150, seqlen_k=260, head_dim=128, heads=6, kv_heads=1, causal=True),
    Case("big", seqlen_q=100, seqlen_k=150, head_dim=512, causal=True, wanted=""),
    Case("pairs", seqlen_q=256, seqlen_k=192, head_dim=128, bias="hqk", bias_grad=False, mask="qk"),
    Case("varlen_wide", batch=2, lengths=((70, 130), (90, 33)), head_dim=256, heads=2, kv_heads=1, window=(50, 9)),
    Case("varlen", batch=3, lengths=((40, 90), (0, 7), (65, 20)), head_dim=64, causal=True, sinks=True, spare=9),
)  # fmt: skip
CACHED = (
    CacheCase("cache", ((150, 1, 0), (0, 1, 0), (33, 1, 0)), heads=8, kv_heads=2, head_dim=64),
    CacheCase("cache_splits", ((900, 2, 0), (70, 2, 0)), heads=4, kv_heads=1, head_dim=128, sinks=True,
              window=(800, 0)),
    CacheCase("cache_pages", ((300, 1, 0), (15, 1, 0), (0, 1, 0)), heads=8, kv_heads=2, head_dim=128, page_size=16),
    CacheCase("cache_pages_of_1", ((130, 3, 0), (5, 3, 0)), page_size=1, head_dim=33, leftpad=(40, 0), softcap=9.0),
    CacheCase("cache_wide", ((200, 1, 0), (64, 1, 0)), heads=2, kv_heads=1, head_dim=256, layout="heads_first_stacked",
              page_size=64),
    CacheCase("cache_group", ((900, 1, 0), (70, 1, 0), (2100, 1, 0)), heads=71, kv_heads=1, head_dim=128),
    CacheCase("cache_group_pages", ((600, 4, 0), (33, 4, 0)), heads=16, kv_heads=2, head_dim=64, page_size=16),
    CacheCase("cache_append", ((127, 2, 2), (0, 2, 2)), appends=True, rotary=64, head_dim=64, page_size=16, alibi="bh"),
    CacheCase("cache_append_pairs", ((60, 5, 5), (3, 5, 5)), appends=True, rotary=24, interleaved=True, head_dim=64,
              entries=True),
    CacheCase("cache_packed", ((200, 1, 1), (0, 70, 70), (0, 0, 0), (9, 3, 3)), packed=True, appends=True, heads=4,
              kv_heads=1, head_dim=64, page_size=16, rotary=64, spare=5),
    CacheCase("cache_float8", ((300, 1, 1), (31, 1, 1)), appends=True, float8="eh", heads=4, kv_heads=1, head_dim=128,
              page_size=16),
)  # fmt: skip
QUANTIZED = (
    QuantizedCase("quantized", ((200, 150), (200, 150)), head_dim=64, heads=4, kv_heads=2, causal=True, shifted=True),
    QuantizedCase("quantized_128", ((150, 300),), head_dim=128, sinks=True, scales=("head", "block", "tensor")),
    QuantizedCase("quantized_wide", ((100, 200),), head_dim=256, causal=True, window=(90, 0)),
    QuantizedCase("quantized_odd", ((61, 77),), head_dim=48, head_dim_v=80, softcap=5.0, half=True),
    QuantizedCase("quantized_packed", ((40, 190), (0, 7), (165, 20)), packed=True, head_dim=64, causal=True,
                  sinks=True, spare=130, shifted=True),
)  # fmt: skip


# Seeds of calls over blocks that data select, and cached calls where queries name their keys.
BLOCKS, NAMED = (0, 3, 4), ("latent_decode", "latent_steps", "rows_pages")


def _of_selected(name: str, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """What judges each of these calls, forward and backward, and how to call it."""
    for seed in BLOCKS:
        call = drawn(seed, ((64, 64), (128, 64)), (torch.bfloat16,), 260, (64, 128))
        yield f"blocks {seed}", functools.partial(judge_blocks, call, device, name)
    for case in NAMED:
        of_cache = kvcache.build(SELECTED[case], torch.bfloat16, device)
        yield case, functools.partial(judge_selected, of_cache, lists_for(of_cache, 37), backend=name)


def main(backends: list[str], device: str = "cuda") -> None:
    """Runs the cases that a backend can run, in bfloat16, and asserts that it refuses the others."""
    for name in backends:
        right = refused = 0
        for case in CASES:
            call = build(case, torch.bfloat16, device)
            why = dispatch.reasons(name, call.problem, "forward")
            backward = dispatch.reasons(name, call.problem, "backward")
            judge(call, name, watched=True)
            if device == "cuda":
                torch.cuda.synchronize()
            right, refused = right + (not why), refused + bool(why)
            shown = f"refused: {'; '.join(why)}" if why else f"{'forward' if backward else 'forward, gradients'}: right"
            print(f"  {name} {case} {shown}", flush=True)
        for cached in CACHED:
            of_cache = kvcache.build(cached, torch.bfloat16, device)
            why = dispatch.reasons(name, of_cache.problem, "decode")
            kvcache.judge(of_cache, name, watched=True)
            right, refused = right + (not why), refused + bool(why)
            shown = f"refused: {'; '.join(why)}" if why else "right"
            print(f"  {name} {cached} {shown}", flush=True)
        for quantized in QUANTIZED:
            of_8_bits = quantization.build(quantized, device)
            why = dispatch.reasons(name, of_8_bits.problem, "quantized")
            quantization.judge(of_8_bits, name, watched=True)
            right, refused = right + (not why), refused + bool(why)
            shown = f"refused: {'; '.join(why)}" if why else "right"
            print(f"  {name} {quantized} {shown}", flush=True)
        why = dispatch.reasons(name, build(CASES[0], torch.bfloat16, device).problem, "forward")
        for shown, judge_call in _of_selected(name, device):
            try:
                judge_call()
                assert not why
            except UnsupportedError:
                assert why
            right, refused = right + (not why), refused + bool(why)
            print(f"  {name} {shown} {'refused' if why else 'right'}", flush=True)
        print(f"{name}: {right} calls right, {refused} refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["portable", "hopper"])
