"""``python -m benchmarks.first_call``: what the first call of each kind takes in a fresh process, and its backward.

Each sample is a process of its own. Its device has been used and its inputs exist: with an empty Triton cache, with
the cache that left, and with an archive of kernels built ahead (``--kernels``, or those that are installed) beside an
empty cache. FlexAttention's calls are compiled by ``torch.compile``. Numbers are checked against PyTorch in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from benchmarks.results import ROOT, Row
from benchmarks.session import Session, new_parser, run_command, words
from benchmarks.table import Table, to_text

# Tests put a machine without a GPU here.
DEVICE = "cuda"
STATES = ("empty cache", "warm cache", "archive")
# Relative to the norm: what 16 and 8 bits lose.
_MOST_ERROR, _MOST_ERROR_OF_8_BITS = 0.02, 0.1


def _dense(dim: int = 128, heads: tuple[int, int] = (16, 16), batch: int = 2, rows: int = 2048) -> list[Tensor]:
    shapes = ((batch, rows, n, dim) for n in (heads[0], heads[1], heads[1]))
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def _plain(inputs: Sequence[Tensor], causal: bool, cap: float = 0.0, left: int | None = None) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if not cap:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    scores = cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)
    i = torch.arange(q.shape[2], device=q.device)
    drop = (i > i[:, None]) | (i < i[:, None] - (left or 0))
    return (scores.masked_fill(drop, -torch.inf).softmax(-1) @ v).transpose(1, 2)


Made = tuple[Callable[[], Tensor], list[Tensor], Callable[[], Tensor]]


def _of_dense(dim: int = 128, heads: tuple[int, int] = (16, 16), **options: Any) -> Made:
    inputs, cap = _dense(dim, heads), options.get("softcap", 0.0)
    causal, left = options.get("causal", False), options.get("window_size", (None,))[0]
    return lambda: flashtile.attention(*inputs, **options), inputs, lambda: _plain(inputs, causal, cap, left)


def _packed() -> Made:
    inputs = [x.detach().flatten(0, 1).requires_grad_() for x in _dense()]
    ends = [0, 1000, 1001, 2048, 4096]
    bounds = torch.tensor(ends, device=DEVICE, dtype=torch.int32)

    def plain() -> Tensor:
        parts = [[x[None, a:b] for x in inputs] for a, b in itertools.pairwise(ends)]
        return torch.cat([_plain(part, True)[0] for part in parts])

    q, k, v = inputs
    return lambda: flashtile.attention_varlen(q, k, v, bounds, bounds, 2048, 2048, causal=True), inputs, plain


def _decode(append: bool = False, dim: int = 128, heads: tuple[int, int] = (32, 8)) -> Made:
    lengths = torch.tensor([1, 77, 500, 1024, 2000, 4095, 6000, 8000], device=DEVICE, dtype=torch.int32)
    caches = [torch.randn(1024, 64, heads[1], dim, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
    table = torch.randperm(1024, device=DEVICE, dtype=torch.int32).view(8, -1)
    q = torch.randn(8, 1, heads[0], dim, device=DEVICE, dtype=torch.bfloat16)
    new = [torch.randn(8, 1, heads[1], dim, device=DEVICE, dtype=torch.bfloat16) if append else None for _ in "kv"]

    def plain() -> Tensor:
        outs = []
        for b, count in enumerate(lengths.tolist()):
            k, v = (cache[table[b].long()].flatten(0, 1)[None, :count] for cache in caches)
            if append:
                k, v = (torch.cat([x, y[None, b]], 1) for x, y in zip((k, v), new, strict=True) if y is not None)
            outs.append(_plain((q[b : b + 1], k, v), False))
        return torch.cat(outs)

    def call() -> Tensor:
        found: Tensor = flashtile.attention_with_kvcache(
            q, *caches, cache_seqlens=lengths, page_table=table, k=new[0], v=new[1]
        )
        return found

    return call, [], plain


def _biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (j - i) * 0.001


def _flex() -> Made:
    from torch.nn.attention.flex_attention import flex_attention

    inputs, compiled = _dense(), torch.compile(flex_attention)

    def call() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        found: Tensor = compiled(q, k, v, score_mod=_biased).transpose(1, 2)
        return found

    return call, inputs, lambda: _with_distance(inputs)


def _with_distance(inputs: list[Tensor]) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in inputs)
    i = torch.arange(q.shape[2], device=q.device)
    bias = (i - i[:, None]) * 0.001
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _function() -> Made:
    inputs = _dense()
    return lambda: flashtile.attention(*inputs, score_mod=_biased), inputs, lambda: _with_distance(inputs)


def _quantized() -> Made:
    inputs = [x.detach() for x in _dense()]
    return lambda: flashtile.attention(*inputs, precision="fp8"), [], lambda: _plain(inputs, False)


class _Server:
    """A layer of Llama-3 8B in a server, called as the plug-in for vLLM does, over pages of 16 rows.

    q, k and v are parts of one projection, keys and values lie side by side in the server's cache, and what steps
    differ in are parts of the tensors that it keeps for the most sequences.
    """

    heads, heads_kv, dim, size, most = 32, 8, 128, 16, 256

    def __init__(self) -> None:
        pages = 32 * 512
        self.cache = torch.randn(pages, self.heads_kv, self.size, 2 * self.dim, device=DEVICE, dtype=torch.bfloat16)
        shuffled = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        # Sequences share pages, but for the first 32.
        self.table = shuffled.repeat(self.most // 32).view(self.most, 512)
        self.before = torch.empty(self.most, device=DEVICE, dtype=torch.int32)
        self.bounds = torch.empty(self.most + 1, device=DEVICE, dtype=torch.int32)
        wide = (self.heads + 2 * self.heads_kv) * self.dim
        self.projected = torch.randn(8192, wide, device=DEVICE, dtype=torch.bfloat16)

    def step(self, rows: Sequence[int], before: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The result of a step with so many new rows of each sequence after so many; with its q, k and v."""
        count, total = len(rows), sum(rows)
        widths = [self.heads * self.dim, self.heads_kv * self.dim, self.heads_kv * self.dim]
        new = [x.unflatten(-1, (-1, self.dim)) for x in self.projected[:total].split(widths, dim=-1)]
        q, k, v = new
        out = torch.empty(total, self.heads, self.dim, device=DEVICE, dtype=torch.bfloat16)
        self.before[:count] = torch.tensor(before, dtype=torch.int32)
        self.bounds[: count + 1] = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
        options: dict[str, Any] = {"cu_seqlens_q": self.bounds[: count + 1], "max_seqlen_q": max(rows)}
        into = out
        if max(rows) == 1:
            q, k, v, into, options = q[:, None], k[:, None], v[:, None], out[:, None], {}
        caches = self.cache.transpose(1, 2).split(self.dim, dim=-1)
        flashtile.attention_with_kvcache(
            q, *caches, k=k, v=v, cache_seqlens=self.before[:count], page_table=self.table[:count], out=into,
            causal=True, window_size=None, softmax_scale=self.dim**-0.5, softcap=0.0, **options,
        )  # fmt: skip
        return out, new


def _server() -> Made:
    """A server's start: prompts, chunks beside single tokens, and single tokens of 1 to 256 sequences."""
    server = _Server()
    firsts = [
        (count, [length] * count) for length in (512, 2048, 4096) for count in (1, 2, 4) if count * length <= 8192
    ]
    mixed = [[1] * count + [chunk] for count in (1, 7, 31, 63, 255) for chunk in (64, 481, 1985)]
    singles = [1, 2, 4, *range(8, 257, 8)]
    kept: list[Any] = []

    def call() -> Tensor:
        outs = []
        for count, rows in firsts:
            out, new = server.step(rows, [0] * count)
            if sum(rows) == 512:
                outs.append(out)
                kept.append([x[None] for x in new])
        for rows in mixed:
            server.step(rows, [100 + n for n in range(len(rows))])
        for count in reversed(singles):
            out, new = server.step([1] * count, [200 + 17 * n for n in range(count)])
        return torch.cat([*outs, out])

    def plain() -> Tensor:
        # The last step is a token after the 200 of one sequence, and has written it.
        k, v = server.cache.transpose(1, 2)[server.table[0].long()].flatten(0, 1)[None, :201].split(server.dim, dim=-1)
        q = server.projected[:1, : server.heads * server.dim].view(1, 1, server.heads, server.dim)
        return torch.cat([*(_plain(each, True)[0] for each in kept), _plain((q, k, v), False)[0]])

    return call, [], plain


def _lengths() -> Made:
    """A call before the clock starts, then forwards and backwards of twenty new lengths."""
    drawn = [7, 50, 300, 800, *random.Random(0).sample(range(1025, 8193), 16)]
    many = [_dense(rows=rows) for rows in (2048, *drawn)]
    douts = [torch.randn_like(each[0]) for each in many]
    flashtile.attention(*many[0], causal=True).backward(douts[0])
    torch.cuda.synchronize()

    def call() -> Tensor:
        for each, dout in zip(many[1:], douts[1:], strict=True):
            out = flashtile.attention(*each, causal=True)
            out.backward(dout)
        return out.detach()

    return call, [], lambda: _plain(many[-1], True).detach()


CASES: dict[str, Callable[[], Made]] = {
    "d128 causal": lambda: _of_dense(causal=True), "d128 full": _of_dense, "packed": _packed,
    "d64, 16 over 4 heads": lambda: _of_dense(64, (16, 4), causal=True),
    "window and softcap": lambda: _of_dense(window_size=(256, 0), softcap=30.0),
    "decode, pages of 64": _decode, "decode with append": lambda: _decode(True),
    "decode, 64 over 2 heads of 64": lambda: _decode(False, 64, (64, 2)),
    "portable, d128": lambda: _of_dense(causal=True, backend="portable"),
    "8 bits": _quantized, "a function of the user's": _function, "20 new lengths": _lengths,
    "a server's start": _server,
    "FlexAttention, the same function": _flex,
}  # fmt: skip


def _child(name: str) -> dict[str, Any]:
    """Times one case in this process."""
    torch.manual_seed(0)
    (torch.randn(64, 64, device=DEVICE) @ torch.randn(64, 64, device=DEVICE)).sum().item()
    call, inputs, plain = CASES[name]()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"forward_s": time.perf_counter() - start_s}
    if inputs:
        start_s = time.perf_counter()
        out.sum().backward()
        torch.cuda.synchronize()
        found["backward_s"] = time.perf_counter() - start_s
    found["imports_triton"] = "triton" in sys.modules
    from flashtile.backends.gpu import build

    found["compiled"] = sum(not each.archive for each in build._builds.values())
    found["loaded"] = len(build._builds) - found["compiled"]
    grads = [x.grad.clone() for x in inputs if x.grad is not None]
    for x in inputs:
        x.grad = None
    want = plain()
    if inputs:
        want.sum().backward()
    pairs = [(out, want), *((got, x.grad) for got, x in zip(grads, inputs, strict=True))]
    found["error"] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs if b is not None)
    most = _MOST_ERROR_OF_8_BITS if name == "8 bits" else _MOST_ERROR
    return found if found["error"] < most else {"wrong": f"error {found['error']:.1e}"}


def rows_of(name: str, state: str, session: Session, cache: str, kernels: str) -> Row:
    """One process."""
    env = {key: x for key, x in os.environ.items() if not key.startswith(("TRITON_", "FLASHTILE_"))}
    env |= {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}-inductor"}
    env["FLASHTILE_KERNELS"] = kernels if state == "archive" else "off"
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", name]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    case = {"measure": f"first call, {state}", "name": name}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return session.run.row(case, "flashtile", error=f"failed: {said}"[:600])
    values = json.loads(done.stdout.splitlines()[-1])
    if "wrong" in values:
        return session.run.row(case, "flashtile", error=f"wrong: {values['wrong']}")
    provider = "flex-attention" if name.startswith("FlexAttention") else "flashtile"
    return session.run.row(
        case, provider, median_ms=values["forward_s"] * 1e3, spread=0.0, error=values.pop("error"), values=values
    )


def first_table(rows: Sequence[Row]) -> Table:
    """Seconds, a line a case: forward, backward, kernels compiled, and whether Triton was imported."""
    lines = [["what", "state", "forward, s", "backward, s", "compiled", "imports Triton"]]
    for row in rows:
        state, values = row.case["measure"].partition(", ")[2], row.values or {}
        if row.median_ms is None:
            lines.append([row.case["name"], state, str(row.error)[:60], "", "", ""])
            continue
        back = f"{values['backward_s']:.2f}" if "backward_s" in values else ""
        compiled, imports = str(values.get("compiled", "")), str(values["imports_triton"])
        lines.append([row.case["name"], state, f"{row.median_ms / 1e3:.2f}", back, compiled, imports])
    return lines


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    states, names = args.states or STATES, args.cases or list(CASES)
    with tempfile.TemporaryDirectory() as folder:

        def measured(name: str) -> list[Row]:
            found = []
            for state in states:
                if state == "archive" and name.startswith("FlexAttention"):
                    continue
                # The warm cache is the one that an empty one has become.
                cache = os.path.join(folder, f"{name}{'' if state != 'archive' else state}".replace(" ", "-"))
                found.append(rows_of(name, state, session, cache, args.kernels))
            return found

        rows, code = session.each(names, str, measured)
    return rows, code, to_text(first_table(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    parser = new_parser("first_call", __doc__, {})
    parser.add_argument("--kernels", default="", help="archives, absolute paths; by default those that are installed")
    parser.add_argument("--states", type=words, metavar="A,B", help=f"of {', '.join(STATES)}")
    parser.add_argument("--cases", type=lambda text: text.split(";"), metavar="A;B", help="by name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(_child(args.child)))
        return 0
    return run_command(args, "first_call", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
