"""Attention without the score matrix: the same numbers, in memory linear in the length.

Run it: python examples/01_quickstart.py
"""

import torch

import flashtile


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    # (batch, seqlen, heads, head_dim); two key and value heads serve eight query heads.
    q = torch.randn(2, 1024, 8, 64, device=device, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 1024, 2, 64, device=device, dtype=dtype, requires_grad=True)
    v = torch.randn(2, 1024, 2, 64, device=device, dtype=dtype, requires_grad=True)

    out = flashtile.attention(q, k, v, causal=True)
    out.square().mean().backward()
    print(f"out {tuple(out.shape)}, gradient of k {tuple(k.grad.shape)}")

    # The same by definition, with the whole score matrix, in float64.
    q64, k64, v64 = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    scores = q64 @ k64.repeat_interleave(4, dim=1).transpose(-1, -2) / 64**0.5
    future = torch.ones(1024, 1024, dtype=torch.bool, device=device).triu(1)
    exact = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v64.repeat_interleave(4, dim=1)
    error = (out.transpose(1, 2) - exact).abs().max() / exact.abs().max()
    print(f"largest error against float64: {error:.1e}")

    print(flashtile.explain(q, k, v, causal=True))


if __name__ == "__main__":
    main()
