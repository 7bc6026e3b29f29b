"""Models of transformers over sequences that ranks share: losses and gradients are those of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flashtile import InvalidInputError, UnsupportedError, distributed
from tests.distributed.pool import Pool

transformers = pytest.importorskip("transformers")

LENGTH = 37
# Zigzag for those with full attention, and a window over neighbours.
MODELS = {"llama": "zigzag", "mistral": "contiguous", "gemma3": "striped", "gpt_oss": "zigzag"}


def made(name: str) -> nn.Module:
    from flashtile.integrations.transformers import enable
    from tests.integrations.test_transformers import make

    model = make(name)
    enable(model)
    return model


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True))


def trains(mesh: DeviceMesh, name: str, layout: Any, bounds: tuple[int, ...] | None, how: str = "") -> None:
    from flashtile.integrations.transformers import over_ranks

    model = made(name)
    tokens = torch.randint(1, 64, (1 if bounds else 2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    positions = torch.arange(LENGTH)
    for start, stop in itertools.pairwise(bounds) if bounds else ():
        positions[start:stop] -= start
    whole = model(tokens, position_ids=positions[None], use_cache=False).logits
    want = nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten())
    wanted = gradients(model, want)

    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    length: dict[str, Any] = {"cu_seqlens": bounds} if bounds else {"seqlen": LENGTH}
    cut = {"cu_seqlens": bounds} if bounds else {}
    mine = [distributed.shard(x, mesh, layout, **cut) for x in (tokens, labels)]
    rows = distributed.positions(mesh, layout, **length)
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    with over_ranks(mesh, layout=layout, **length):
        logits = run(mine[0], position_ids=rows[None], use_cache=False).logits
    torch.testing.assert_close(logits, distributed.shard(whole.detach(), mesh, layout, **cut), rtol=1e-4, atol=1e-4)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[1].flatten(), reduction="sum") / labels.numel()
    found = gradients(model, loss)
    total = loss.detach().clone()
    for x in (total, *found):
        dist.all_reduce(x, group=mesh.get_group())
    torch.testing.assert_close(total, want.detach(), rtol=1e-5, atol=1e-6)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    for parameter, got, right in zip(names, found, wanted, strict=True):
        # Sinks have the gradient of all rows on every rank already.
        got = got / mesh.size() if "sinks" in parameter else got
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-5, msg=lambda text, name=parameter: f"{name}: {text}")


@pytest.mark.long
@pytest.mark.parametrize("name", list(MODELS))
def test_models_train(pool: Pool, name: str) -> None:
    pool.run(trains, name, MODELS[name], None, mesh=3)


@pytest.mark.long
def test_documents_and_checkpoints(pool: Pool) -> None:
    pool.run(trains, "llama", "zigzag", (0, 5, 21, 37), "checkpointed", mesh=2)


@pytest.mark.long
def test_compiled_models(pool: Pool) -> None:
    pool.run(trains, "llama", "zigzag", None, "compiled", mesh=2)


def refusals(mesh: DeviceMesh) -> None:
    from flashtile.integrations.transformers import over_ranks

    model, tokens = made("llama"), torch.ones(1, 8, dtype=torch.int64)
    rows = distributed.positions(mesh, seqlen=16)[None]
    with over_ranks(mesh, seqlen=16):
        model(tokens, position_ids=rows, use_cache=False)
        with pytest.raises(InvalidInputError, match="position_ids: are not those of this rank's rows"):
            model(tokens, use_cache=False)
        with pytest.raises(UnsupportedError, match="attention_mask, or a cache"):
            model(tokens, position_ids=rows, attention_mask=torch.ones_like(tokens), use_cache=False)
        with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
            bounds = torch.tensor([0, 8], dtype=torch.int32)
            model(tokens, position_ids=rows, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(UnsupportedError, match="neither causal nor full"), over_ranks(mesh, seqlen=16):
        made("llama4")(tokens, position_ids=rows, use_cache=False)
    alone = model(tokens, use_cache=False).logits
    assert alone.shape == (1, 8, 64)


def test_what_is_refused(pool: Pool) -> None:
    pool.run(refusals, mesh=2)
