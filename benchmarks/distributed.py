"""``python -m benchmarks.distributed``: one sequence over several GPUs, as a share of the ideal.

The ideal is one GPU's time on the whole sequence over the number of GPUs. A sample is a burst of calls that all ranks
start together, and its time is the slowest rank's; samples of all providers alternate, after their results were
compared with one GPU's. The peer is PyTorch's ``context_parallel``, with both of its ways to rotate keys. The command
starts a process for each GPU; under torchrun it is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

import flashtile
from benchmarks import results, timing
from benchmarks.calls import DIRECTIONS, as_row
from benchmarks.cases import Case, make_inputs, select
from benchmarks.providers import STEP
from benchmarks.session import NotTimedError, attempt, new_parser, shown
from benchmarks.table import Table, to_text
from benchmarks.varlen import draw_lengths
from flashtile import distributed
from flashtile.core import settings
from flashtile.distributed.layouts import Layout

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]

ONE = "one GPU"
# The ring by copy engines where they can, and by NCCL.
OURS = ("ring", "ring-nccl", "allgather", "ulysses")
# PyTorch's ways to rotate, and the kernels under its function.
PEERS = tuple(f"torch-{method}-{kernel}" for method in ("allgather", "alltoall") for kernel in ("flash", "cudnn"))
PROVIDERS = (ONE, *(f"flashtile-{comm}" for comm in OURS), *PEERS)
# bfloat16 of one GPU against bfloat16 of several: both are a rounding away from exact.
_LIMIT = {"bfloat16": 1e-2, "float32": 1e-5}


def cases(tokens: Sequence[int], world: int, heads: Sequence[str], masks: Sequence[str], dtype: str) -> list[Case]:
    """One case for each combination; ``tokens`` are a GPU's, ``heads`` are like "32/8"."""
    return [case_of(mask, each * world, shape, dtype) for each in tokens for shape in heads for mask in masks]


def case_of(mask: str, length: int, heads: str, dtype: str) -> Case:
    """One sequence under a causal mask or a window, of an eighth or of 1k keys, or documents, drawn or of 2k rows."""
    heads_q, heads_kv = map(int, heads.split("/"))
    case = Case("forward", dtype, 1, length, length, heads_q, heads_kv, 128, causal=True)
    if mask == "window":
        return replace(case, window=(max(1, length // 8), 0))
    if mask == "window1k":
        return replace(case, window=(1023, 0))
    if mask in ("packed", "docs2k"):
        lengths = draw_lengths(length, max(1, length // 1024), max(1, length // 4))
        if mask == "docs2k":  # some longer, some shorter
            lengths = draw_lengths(length, min(1024, length), min(4096, length))
        return replace(case, batch=len(lengths), seqlen_q=max(lengths), seqlen_k=max(lengths), lengths=lengths)
    return case


def layout_of(case: Case, mesh: DeviceMesh) -> Layout:
    """The layout that suits a case: work is even, and few keys travel."""
    given: dict[str, Any] = {"seqlen": case.seqlen_q}
    if case.lengths is not None:
        given = {"cu_seqlens": torch.tensor((0, *case.lengths)).cumsum(0)}
    return distributed.deal(mesh, causal=case.causal, window_size=case.window, **given)


def on_one(case: Case, inputs: Any, what: str) -> Call:
    """The whole call on this rank's GPU."""
    tensors = [x.requires_grad_(what == STEP) for x in (inputs.q, inputs.k, inputs.v)]
    keywords: dict[str, Any] = {"causal": case.causal, "window_size": case.window}
    if inputs.cu_seqlens is None:
        forward: Callable[[], Any] = functools.partial(flashtile.attention, *tensors, **keywords)
    else:
        for side in ("q", "k"):
            keywords |= {f"cu_seqlens_{side}": inputs.cu_seqlens, f"max_seqlen_{side}": case.seqlen_q}
        forward = functools.partial(flashtile.attention_varlen, *tensors, **keywords)
    return stepping(forward, tensors, inputs.dout, what)


def ours(comm: str, case: Case, inputs: Any, what: str, mesh: DeviceMesh) -> Call:
    """Our call of this rank's shards."""
    cut = shards(case, mesh)
    tensors = [cut(x).requires_grad_(what == STEP) for x in (inputs.q, inputs.k, inputs.v)]
    keywords: dict[str, Any] = {"causal": case.causal, "window_size": case.window}
    way, _, carrier = comm.partition("-")
    keywords |= {"mesh": mesh, "comm": way, "layout": layout_of(case, mesh)}
    if inputs.cu_seqlens is not None:
        keywords |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens)

    def forward() -> Any:
        os.environ[settings.COPIES.name] = "0" if carrier else "auto"
        return distributed.attention(*tensors, **keywords)

    return stepping(forward, tensors, cut(inputs.dout), what)


def shards(case: Case, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """What cuts a whole tensor to this rank's rows."""
    if case.lengths is None:
        return functools.partial(distributed.shard, mesh=mesh, layout=layout_of(case, mesh))
    bounds = torch.tensor((0, *case.lengths)).cumsum(0)
    return functools.partial(distributed.shard, mesh=mesh, layout=layout_of(case, mesh), dim=0, cu_seqlens=bounds)


def theirs(way: str, case: Case, inputs: Any, what: str, mesh: DeviceMesh, stack: contextlib.ExitStack) -> Call:
    """PyTorch's call; its context stays open until the stack is closed."""
    method, kernel = way.split("-")
    import torch.distributed.tensor.experimental._attention as parallel
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.lengths is not None or case.window is not None:
        raise NotTimedError("refused: context_parallel has neither packed sequences nor windows")
    whole = inputs.q, inputs.k, inputs.v, inputs.dout
    *tensors, dout = buffers = [x.detach().transpose(1, 2).contiguous() for x in whole]
    stack.enter_context(
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
    )
    q, k, v = tensors = [x.requires_grad_(what == STEP) for x in tensors]

    def forward() -> Tensor:
        parallel.set_rotate_method(method)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if kernel == "flash" else SDPBackend.CUDNN_ATTENTION):
            grouped = case.num_heads_q != case.num_heads_kv
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return stepping(forward, tensors, dout, what)


def stepping(forward: Callable[[], Any], tensors: list[Tensor], dout: Tensor, what: str) -> Call:
    """A call of the forward, or of the forward and the backward."""
    if what != STEP:
        return lambda: (forward(),)

    def step() -> Outputs:
        out = forward()
        return (out.detach(), *torch.autograd.grad(out, tensors, dout))

    return step


def compared(got: Outputs, want: Outputs, case: Case, is_theirs: bool) -> float:
    """The largest relative error of all ranks' results, ``|x - one| / |one|``; PyTorch's have heads before rows."""
    worst = torch.zeros(1, device=got[0].device)
    for x, one in zip(got, want, strict=True):
        x = x.transpose(1, 2) if is_theirs else x
        worst = torch.maximum(worst, (x.double() - one.double()).norm().float() / one.double().norm().float())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    error = worst.item()
    if not error <= _LIMIT[case.dtype]:
        raise NotTimedError(f"wrong: relative error {error:.3g}, limit {_LIMIT[case.dtype]:.3g}")
    return error


def measure(
    case: Case, what: str, run: results.Run, mesh: DeviceMesh, args: argparse.Namespace, deadline: timing.Deadline
) -> list[results.Row]:
    """Checks and times a case with every provider; a row each, the same on all ranks."""
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if args.device == "cuda" else "cpu")
    inputs, cut = make_inputs(case, device), shards(case, mesh)
    one = on_one(case, inputs, what)
    want = tuple(cut(x) for x in one())
    calls: dict[str, Call] = {}
    errors: dict[str, float | str] = {}
    with contextlib.ExitStack() as stack:
        for name in args.providers or PROVIDERS:
            kind, _, rest = name.partition("-")

            def make(kind: str = kind, rest: str = rest) -> tuple[Call, float]:
                if kind == ONE:
                    return one, 0.0
                if kind == "flashtile":
                    call = ours(rest, case, inputs, what, mesh)
                else:
                    call = theirs(rest, case, inputs, what, mesh, stack)
                return call, compared(call(), want, case, kind == "torch")

            found = attempt(device, name, make)
            if isinstance(found, str):
                errors[name] = found
            else:
                calls[name], errors[name] = found
        samples = {name: together(call, device, args.burst_ms) for name, call in calls.items()}
        times = {name: timing.summarise(x) for name, x in timing.interleaved(samples, args.rounds, deadline).items()}
    about = {**as_row(case, "distributed", what), "ranks": mesh.size(), "layout": str(layout_of(case, mesh))}
    flops = case.flops() * (3.5 if what == STEP else 1)
    rows = []
    for name, error in errors.items():
        gpus = 1 if name == ONE else mesh.size()
        measured = {**vars(times[name]), "tflops": flops / gpus / times[name].median_ms / 1e9} if name in times else {}
        rows.append(run.row(about, name, error=error, **measured))
    return rows


def together(call: Call, device: torch.device, burst_ms: float) -> Callable[[], float]:
    """A sample: a burst that all ranks start at once, and the time of the slowest, in milliseconds a call."""

    def slowest(value_ms: float) -> float:
        value = torch.tensor([value_ms], device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value.item())

    reps = timing.reps_for(slowest(timing.time_burst(call, 2, device)), burst_ms)
    head_start_ms = timing.head_start_of([slowest(reps * timing.host_ms(call, device))])

    # Devices sleep for cycles of clocks of their own.
    met = torch.zeros(1, device=device)

    def sample() -> float:
        dist.barrier()
        return slowest(timing.time_burst(call, reps, device, head_start_ms, lambda: dist.all_reduce(met)))

    return sample


def shares(rows: Sequence[results.Row]) -> Table:
    """A line per case and provider: milliseconds, TFLOPS of a GPU, and the share of the ideal in the same run."""
    table = [["case", "what", "provider", "ms", "TFLOPS a GPU", "share of the ideal"]]
    ideal = {(r.run, str(r.case)): r.median_ms / r.case["ranks"] for r in rows if r.provider == ONE and r.median_ms}
    for row in rows:
        best = ideal.get((row.run, str(row.case)))
        if row.median_ms is None or row.tflops is None:
            continue
        share = "" if best is None or row.provider == ONE else f"{best / row.median_ms:.3f}"
        fields = {name: x for name, x in row.case.items() if name in Case.__dataclass_fields__}
        case = Case.from_dict({**fields, "direction": "forward"})
        name = f"{case.name}-h{case.num_heads_q}/{case.num_heads_kv}"
        table.append([name, row.case["direction"], row.provider, f"{row.median_ms:.3f}", f"{row.tflops:.0f}", share])
    return table


def work(rank: int, world: int, args: argparse.Namespace) -> None:
    """One of the processes: measures every case; the first saves and prints."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=world)
    mesh = init_device_mesh(args.device, (world,), mesh_dim_names=("ring",))
    run = results.new_run("distributed", torch.device(args.device), args.commit)
    out = args.out or results.default_file(run.suite, run.device)
    deadline, rows = timing.Deadline(float("inf") if args.budget_s is None else args.budget_s), []
    made = cases(args.tokens, world, args.heads, args.masks, args.dtype)
    for case in select(made, args.cells):
        for what in DIRECTIONS:
            going = torch.tensor([deadline.allows(0)], device=args.device)
            dist.all_reduce(going, dist.ReduceOp.MIN)
            if not going:
                break
            found = measure(case, what, run, mesh, args, timing.Deadline())
            rows += found
            if rank == 0:
                results.append(out, found)
                print(case.name, what, *map(shown, found), sep=" | ", flush=True)
    if rank == 0:
        print(f"\n{to_text(shares(rows))}\n\n{len(rows)} rows appended to {out}")
    dist.destroy_process_group()


@contextlib.contextmanager
def rendezvous() -> Iterator[None]:
    """Where processes that this one starts meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    yield


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case; returns the process's exit code."""
    defaults = {
        "ranks": 2, "tokens": [8192, 32768], "heads": ["16/16", "32/8"],
        "masks": ["causal", "docs2k", "window1k", "packed", "window"],
        "dtype": "bfloat16", "rounds": 10, "burst_ms": 50.0, "cells": "",
    }  # fmt: skip
    args = new_parser("distributed", __doc__, defaults, resumes=False).parse_args(argv)
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
        return 0
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"needs {args.ranks} GPUs, or --device cpu", file=sys.stderr)
        return 2
    with rendezvous():
        spawn(work, (args.ranks, args), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
