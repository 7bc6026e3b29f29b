"""A learned bias of the distance, T5's: its gradient comes out of the kernels, and no bias is ever in memory.

Run it: python examples/09_learned_bias.py
"""

import torch

import flashtile
from flashtile import mods


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 4, 32) for _ in range(3))
    truth = torch.randn(32, 4)
    target = flashtile.attention(q, k, v, score_mod=mods.t5(truth))

    table = torch.zeros(32, 4, requires_grad=True)
    temperature = torch.ones(4, requires_grad=True)
    score = mods.t5(table)

    def biased(scores, b, h, q_idx, kv_idx):
        return score(scores * temperature[h], b, h, q_idx, kv_idx)

    optimizer = torch.optim.Adam([table, temperature], lr=0.05)
    for step in range(61):
        loss = (flashtile.attention(q, k, v, score_mod=biased) - target).square().mean() * 1000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2d}: loss {loss.item():.4f}, gradient of the table {table.grad.norm():.1e}")

    # The gradient is that of the bias in memory, (heads, 200, 200), sent back to the table by PyTorch.
    i, j = torch.arange(200)[:, None], torch.arange(200)
    bias = torch.stack([mods.t5(table)(torch.zeros(200, 200), None, torch.tensor(h), i, j) for h in range(4)])
    want = torch.autograd.grad(flashtile.attention(q, k, v, attn_bias=bias).square().sum(), table)[0]
    got = torch.autograd.grad(flashtile.attention(q, k, v, score_mod=mods.t5(table)).square().sum(), table)[0]
    print(f"gradients differ by {(got - want).abs().max() / want.abs().max():.1e} of the largest")


if __name__ == "__main__":
    main()
