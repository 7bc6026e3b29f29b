"""A mask of your own: neighbours in an image, or anything before in the text around it.

Run it: python examples/08_your_own_mask.py
"""

import torch

import flashtile
from flashtile import mods

WIDTH, IMAGE, TEXT = 16, 256, 64


def see_all_before(b, h, q_idx, kv_idx):
    """Text sees all that comes before it, the image's pixels among it."""
    return (q_idx >= IMAGE) & (kv_idx <= q_idx)


def pixels(b, h, q_idx, kv_idx):
    """Both are of the image, whose pixels come first."""
    return (q_idx < IMAGE) & (kv_idx < IMAGE)


def main() -> None:
    torch.manual_seed(0)
    length = IMAGE + TEXT
    q, k, v = (torch.randn(1, length, 4, 32, requires_grad=True) for _ in range(3))
    near = mods.and_masks(pixels, mods.neighbourhood_2d(WIDTH, radius=2))
    mask = mods.or_masks(near, see_all_before)

    out = flashtile.attention(q, k, v, mask_mod=mask)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))

    # The same with the mask in memory: a byte for each pair.
    i, j = torch.arange(length)[:, None], torch.arange(length)
    dense = mask(None, None, i, j)
    want = flashtile.attention(q, k, v, attn_mask=dense)
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    errors = [(a - b).abs().max().item() for a, b in zip((out, *grads), (want, *wanted), strict=True)]
    print(f"out and gradients differ from those with a mask in memory by {max(errors):.1e}")

    # A mask that is a range is known by its form: its keys are skipped, and it is the keyword bit for bit.
    window = mods.window(31)
    same = torch.equal(
        flashtile.attention(q, k, v, mask_mod=window), flashtile.attention(q, k, v, causal=True, window_size=(31, 0))
    )
    print(f"a window written as a function equals window_size: {same}")
    print(f"{dense.float().mean():.0%} of the pairs are kept; a row keeps at most {dense.sum(1).max()} keys")


if __name__ == "__main__":
    main()
