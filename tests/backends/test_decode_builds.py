"""Which cached calls share a build: a server's batch and tables change from step to step, and a build takes seconds."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashtile.backends.gpu.decode.config import choose
from flashtile.backends.gpu.decode.launch import append_launch, attention_launch
from flashtile.backends.gpu.launch import Launch, lower
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Precision, SequenceLayout, described
from flashtile.core.masks import Band


def launches(batch: int, rows: int, pages: int, heads: int) -> tuple[Launch, Launch]:
    """Of packed queries that are appended to pages of 16."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    problem = described(
        device_type="cuda", compute_capability=(9, 0), precision=Precision(*[torch.bfloat16] * 4), batch=batch,
        queries=SequenceLayout(rows, packed=True), keys=SequenceLayout(16 * pages, used=True, page_size=16),
        num_heads_q=2 * heads, num_heads_kv=heads, band=Band(None, 0),
    )  # fmt: skip
    q, new, cache = empty(rows, 2 * heads, 64), empty(rows, heads, 64), empty(512, 16, heads, 64)
    lengths, bounds = empty(batch, dtype=torch.int32), empty(batch + 1, dtype=torch.int32)
    tensors = CacheTensors(
        out=q, q=q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, k=new, v=new, cu_seqlens_q=bounds,
        cu_seqlens_k_new=bounds, page_table=empty(batch, pages, dtype=torch.int32),
    )  # fmt: skip
    return append_launch(problem, tensors), attention_launch(problem, tensors, choose(problem), num_sms=132)


@pytest.mark.parametrize("heads", [4, 5, 14])
def test_steps_of_a_server_share_builds(heads: int) -> None:
    steps = itertools.product((1, 2, 7, 16, 31), (40, 64, 512), (1, 4, 13, 32))
    made = [launches(*step, heads) for step in steps]
    append, attend = ({lower(each)[0] for each in kernel} for kernel in zip(*made, strict=True))
    assert len(append) == 1
    tiles = {(each.arguments["call"].schedule.BLOCK_M, *each.options.values()) for _, each in made}
    assert len(tiles) == 2
    assert len(attend) == 2 * len(tiles)  # with splits and, where there are few pages, without
