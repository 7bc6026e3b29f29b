"""Trains a character GPT on one long text with one process, and with two that hold half of the rows each.

Run it: python examples/07_context_parallel.py --seqlen 8192 --steps 5
"""

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from flashtile import distributed
from flashtile_lab.examples.char_gpt import CharGPT, GPTConfig, batch_of, shakespeare


def train(rank: int, world: int, length: int, steps: int, meeting: str, losses: mp.SimpleQueue) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh, text = init_device_mesh("cpu", (world,), mesh_dim_names=("ring",)), shakespeare()
    torch.manual_seed(0)
    model = CharGPT(GPTConfig(len(text.alphabet), length, num_layers=2, d_model=64))
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=4e-3), torch.Generator().manual_seed(0)
    # A rank's rows are turned by their positions in the whole text, and attend to the keys of all ranks.
    rows, rotate = distributed.positions(mesh, seqlen=length), model.blocks[0].rotate
    call = {"mesh": mesh, "causal": True, "seqlen_q": length, "seqlen_k": length}
    attend = [lambda q, k, v: distributed.attention(rotate(q, rows), rotate(k, rows), v, **call)] * 2
    for _ in range(steps):
        tokens, following = (distributed.shard(x, mesh) for x in batch_of(text.train, length, 1, draw))
        logits = model(tokens, attend if world > 1 else None)
        # This rank's share of the mean over the whole text: gradients are summed, as losses are.
        loss = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        for each in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(each)
        optimizer.step()
        if rank == 0:
            losses.put(loss.item())
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=3)
    options, losses = parser.parse_args(), mp.get_context("spawn").SimpleQueue()
    for world in (1, 2):
        start_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (world, options.seqlen, options.steps, f"{folder}/meeting", losses), nprocs=world)
        curve = " ".join(f"{losses.get():.4f}" for _ in range(options.steps))
        print(f"{world} process{'es' * (world > 1)}: losses {curve}, {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
