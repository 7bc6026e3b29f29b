"""A sliding window costs what it keeps, and a learned bias gets its gradient without being expanded.

Run it: python examples/03_window_and_bias.py
"""

import time

import torch

import flashtile


def milliseconds(call: object) -> float:
    assert callable(call)
    call()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8192, 2, 64) for _ in range(3))
    causal = milliseconds(lambda: flashtile.attention(q, k, v, causal=True))
    # Row i keeps keys i - 255 to i: both ends are inclusive.
    window = milliseconds(lambda: flashtile.attention(q, k, v, causal=True, window_size=(255, 0)))
    print(f"8192 tokens: causal {causal:.0f} ms, window of 256 {window:.0f} ms")

    # One bias for each head, shared by the batch: (1, heads, seqlen_q, seqlen_k).
    q, k, v = (torch.randn(2, 256, 4, 32) for _ in range(3))
    bias = torch.zeros(1, 4, 256, 256, requires_grad=True)
    target = torch.randn(2, 256, 4, 32)
    optimizer = torch.optim.Adam([bias], lr=0.1)
    for step in range(21):
        loss = (flashtile.attention(q, k, v, attn_bias=bias) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2d}: loss {loss.item():.4f}, gradient of the bias {bias.grad.norm():.1e}")

    # ALiBi, softcap and sinks combine with any mask.
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    out = flashtile.attention(q, k, v, causal=True, alibi_slopes=slopes, softcap=20.0, sinks=torch.zeros(4))
    # Row 0 sees one key, so without its sink it would be that key's value.
    print(f"with ALiBi, softcap and sinks: {out[0, 0, 0, 0]:.3f} of a value of {v[0, 0, 0, 0]:.3f} is left in row 0")


if __name__ == "__main__":
    main()
