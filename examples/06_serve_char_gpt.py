"""Serves a small character GPT over a paged cache, and counts its tokens per second beside two plainer loops.

Run it: python examples/06_serve_char_gpt.py --requests 16
The server is flashtile_lab/examples/serve_gpt.py, the other loops are flashtile_lab/examples/plain_loops.py.
"""

import argparse
import random
import time

import torch

from flashtile_lab.examples.char_gpt import CharGPT, GPTConfig, batch_of, loss_of, shakespeare
from flashtile_lab.examples.plain_loops import Request, recompute, static_cache
from flashtile_lab.examples.serve_gpt import Server

TEXT = shakespeare()


def some(count: int) -> list[Request]:
    """Requests that begin alike, each with a prompt of its own behind it, and a length."""
    tokens, draw, prefix = TEXT.held_out.tolist(), random.Random(0), Request(TEXT.held_out[:160].tolist(), 0)
    starts = [draw.randrange(160, len(tokens) - 80) for _ in range(count)]
    return [Request(tokens[i : i + draw.randrange(8, 80)], draw.randrange(20, 160), i, prefix) for i in starts]


def serve(model: CharGPT, requests: list[Request]) -> None:
    server = Server(model)
    server.share(requests[0].prefix)
    server.submit(*requests)
    for request, token in server.stream():
        print(TEXT.alphabet[token] if request is requests[0] else "", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="of training, at first")
    options, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, draw = CharGPT(GPTConfig(len(TEXT.alphabet), seqlen=256)).to(device), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(options.steps):
        loss = loss_of(model, *(each.to(device) for each in batch_of(TEXT.train, 256, 4, draw)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"training, step {step} of {options.steps}: loss {loss.item():.2f}", flush=True)
    model, expected = model.to(torch.bfloat16 if device == "cuda" else torch.float32), []
    for name, loop in (("recomputed", recompute), ("static cache, SDPA", static_cache), ("served", serve)):
        print(f"{name}: {options.requests} texts are written ...", flush=True)
        loop(model, some(2))  # first calls take longer
        requests, start = some(options.requests), time.perf_counter()
        loop(model, requests)
        rate = sum(each.count for each in requests) / (time.perf_counter() - start)
        expected = expected or requests
        same = sum(ours.tokens == theirs.tokens for ours, theirs in zip(requests, expected, strict=True))
        print(f"\n{name}: {rate:,.0f} tokens/s, {same} of {len(requests)} texts as when recomputed")


if __name__ == "__main__":
    main()
