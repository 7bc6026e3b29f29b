"""Trains a small character GPT on Shakespeare with flashtile's attention, then lets it write.

Run it: python examples/05_train_char_gpt.py --steps 300
The model is flashtile_lab/examples/char_gpt.py.
"""

import argparse
import time

import torch

from flashtile_lab.examples.char_gpt import CharGPT, GPTConfig, batch_of, loss_of, shakespeare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = shakespeare()
    model = CharGPT(GPTConfig(len(text.alphabet), options.seqlen)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.steps + 1, pct_start=0.1)
    draw = torch.Generator().manual_seed(0)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        excerpts, following = batch_of(text.train, options.seqlen, options.batch, draw)
        loss = loss_of(model, excerpts.to(device), following.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == 1 or step % 50 == 0:
            rate = step * excerpts.numel() / (time.perf_counter() - start)
            print(f"step {step:4d}: loss {loss.item():.3f}, {rate:,.0f} tokens/s")

    prompt = text.encode("\nJULIET:\n")[None].to(device)
    print(text.decode(model.write(prompt, 300)[0]))


if __name__ == "__main__":
    main()
