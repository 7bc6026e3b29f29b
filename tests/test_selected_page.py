"""docs/selected.md: its functions compute what their papers define, and train as the dense formulas do.

A dense formula makes the matrix of all pairs in plain PyTorch, and chooses blocks in its own way: by the value of the
last one that is chosen, not by numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from docs.blocks import ROOT, run_code

BLOCK = 16


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_code(ROOT / "docs" / "selected.md")


def heads_first(x: Tensor, num_heads: int) -> Tensor:
    """``(batch, seqlen, heads, dim)`` as ``(batch, num_heads, seqlen, dim)``: key heads are repeated."""
    return x.repeat_interleave(num_heads // x.shape[2], 2).transpose(1, 2)


def dense(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the pairs kept, ``(batch, heads, seqlen_q, seqlen_k)``, and its probabilities."""
    q, k, v = (heads_first(x, q.shape[2]) for x in (q, k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~kept, -torch.inf)
    probs = torch.where(kept.any(-1, keepdim=True), scores.softmax(-1).nan_to_num(), 0.0)
    return (probs @ v).transpose(1, 2), probs


def largest(scores: Tensor, top: int) -> Tensor:
    """Which are among the ``top`` largest of the last dimension; -inf never is."""
    least = scores.sort(-1, descending=True).values[..., min(top, scores.shape[-1]) - 1, None]
    return (scores >= least) & (scores > -torch.inf)


def means(x: Tensor, size: int) -> Tensor:
    """Means over ``size`` tokens, the last one over those that are left."""
    return torch.stack([part.mean(1) for part in x.split(size, 1)], 1)


def pairs(blocks: Tensor, rows: int, seqlen: int) -> Tensor:
    """Which pairs lie in the blocks kept, ``(batch, heads, lists, blocks)``, of ``rows`` rows."""
    return blocks.repeat_interleave(rows, 2).repeat_interleave(BLOCK, 3)[:, :, :seqlen, :seqlen]


def dense_vsa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, top: int, block: int) -> Tensor:
    small = [means(x, block) for x in (q, k, v)]
    num_blocks = small[0].shape[1]
    coarse, probs = dense(*small, torch.ones(1, 1, num_blocks, num_blocks, dtype=torch.bool))
    fine, _ = dense(q, k, v, pairs(largest(probs, top), block, q.shape[1]))
    return coarse.repeat_interleave(block, 1) * gate + fine


def dense_moba(q: Tensor, k: Tensor, v: Tensor, top: int, block: int, rows: int = 1) -> Tensor:
    seqlen = q.shape[1]
    queries, keys = means(q, rows).transpose(1, 2), heads_first(means(k, block), q.shape[2])
    first, number = torch.arange(0, seqlen, rows)[:, None], torch.arange(keys.shape[2])
    scores = (queries @ keys.mT).masked_fill(first < number * block, -torch.inf)
    scores = scores.masked_fill(first // block == number, torch.inf)
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    return dense(q, k, v, pairs(largest(scores, top), rows, seqlen) & causal)[0]


def dense_nsa(
    q: Tensor, compressed: Any, selected: Any, near: Any, gates: Tensor, top: int, block: int, window: int
) -> Tensor:
    seqlen, num_blocks = q.shape[1], -(-q.shape[1] // block)
    row, number, key = torch.arange(seqlen)[:, None], torch.arange(num_blocks), torch.arange(seqlen)
    ended = (number + 1) * block <= row + 1
    coarse, probs = dense(q, *compressed, ended[None, None, :, : compressed[0].shape[1]])
    group = q.shape[2] // selected[0].shape[2]
    sums = functional.pad(probs.unflatten(1, (-1, group)).sum(2), (0, num_blocks - probs.shape[-1]))
    sums = sums.masked_fill(number * block > row, -torch.inf)
    for fixed in (number == 0, number == row // block, number == row // block - 1):
        sums = sums.masked_fill(fixed, torch.inf)
    kept = pairs(largest(sums, top), 1, seqlen).repeat_interleave(group, 1)
    fine, _ = dense(q, *selected, kept & (key <= row))
    local, _ = dense(q, *near, ((key <= row) & (key > row - window))[None, None])
    return (torch.stack((coarse, fine, local), -1) * gates[..., None, :]).sum(-1)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in made]


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and gradients."""
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view(ours.shape)
    grads = (torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, theirs))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("top", [1, 3])
def test_vsa_is_its_formula(page: dict[str, Any], top: int) -> None:
    inputs = drawn((2, 96, 4, 8), (2, 96, 2, 8), (2, 96, 2, 8), (2, 96, 4, 8))
    assert_same(page["vsa"](*inputs, top, BLOCK), dense_vsa(*inputs, top, BLOCK), inputs)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("top", [1, 3])
def test_moba_is_its_formula(page: dict[str, Any], top: int, rows: int) -> None:
    """Also where the last block is not whole."""
    inputs = drawn((2, 108, 4, 8), (2, 108, 2, 8), (2, 108, 2, 8))
    assert_same(page["moba"](*inputs, top, BLOCK, rows), dense_moba(*inputs, top, BLOCK, rows), inputs)


@pytest.mark.parametrize("seqlen", [96, 108, 10])
def test_nsa_is_its_formula(page: dict[str, Any], seqlen: int) -> None:
    """Also where the last block is not whole, and where none has ended."""
    keys, whole = (2, seqlen, 2, 8), (2, seqlen // BLOCK, 2, 8)
    inputs = drawn((2, seqlen, 4, 8), whole, whole, keys, keys, keys, keys, (2, seqlen, 4, 3))
    q, *others, gates = inputs
    each = q, others[:2], others[2:4], others[4:], gates, 4, BLOCK, 20
    assert_same(page["nsa"](*each), dense_nsa(*each), inputs)


class Layer(nn.Module):
    """Tokens, one layer of attention in ``heads`` heads of 16, and logits of the tokens."""

    def __init__(self, attend: Callable[..., Tensor], heads: int, outputs: int, seqlen: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        width = 16 * heads
        self.tokens, self.places = nn.Embedding(24, width), nn.Parameter(0.3 * torch.randn(seqlen, width))
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 16 * outputs)
        self.out, self.logits = nn.Linear(width, width), nn.Linear(width, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        made = self.inputs(self.norm(x)).unflatten(-1, (-1, 16))
        return self.logits(x + self.out(self.attend(made, self.heads).flatten(2)))


def of_vsa(vsa: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    def attend(made: Tensor, heads: int) -> Tensor:
        q, k, v, gate = made.split(heads, 2)
        return vsa(q, k, v, gate, 3, BLOCK)

    return attend


def of_moba(moba: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda made, heads: moba(*made.split(heads, 2), 3, BLOCK)


def of_nsa(nsa: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Both heads share a key head, and three of six key heads' worth are compressed by their means."""

    def attend(made: Tensor, heads: int) -> Tensor:
        q, keys, gates = made[:, :, :heads], made[:, :, heads : heads + 6].split(1, 2), made[:, :, heads + 6]
        compressed = [x.unflatten(1, (-1, BLOCK)).mean(2) for x in keys[:2]]
        gates = gates[..., : 3 * heads].unflatten(-1, (heads, 3)).sigmoid()
        return nsa(q, compressed, keys[2:4], keys[4:], gates, 4, BLOCK, 24)

    return attend


METHODS = {
    "vsa": (of_vsa, dense_vsa, 8),
    "moba": (of_moba, dense_moba, 6),
    "nsa": (of_nsa, dense_nsa, 9),
}


@pytest.mark.parametrize("name", METHODS)
def test_training_is_that_of_the_dense_formula(page: dict[str, Any], name: str) -> None:
    """50 steps in float32 from the same weights: the losses of each step, and the weights after the last."""
    bind, formula, outputs = METHODS[name]
    torch.manual_seed(0)
    models = [Layer(bind(attend), 2, outputs, 128) for attend in (page[name], formula)]
    models[1].load_state_dict(models[0].state_dict())
    start = {key: x.clone() for key, x in models[0].state_dict().items()}
    # The second half repeats the first: what a token becomes is seen 64 tokens before.
    tokens = torch.randint(24, (2, 64)).repeat(1, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in models]
    losses: list[list[float]] = [[], []]
    for _ in range(50):
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            logits = model(tokens)[:, :-1].flatten(0, 1)
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    torch.testing.assert_close(*losses, rtol=2e-5, atol=1e-5)
    for key, x in models[0].state_dict().items():
        torch.testing.assert_close(x, models[1].state_dict()[key], rtol=2e-5, atol=1e-5)
        assert not torch.equal(x, start[key]), key
    assert losses[0][-1] < losses[0][0] / 2, losses[0]
