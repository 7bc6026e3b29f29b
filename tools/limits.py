"""Prints violations of the size limits and fails if there are any. Limits are raised here, with a reason."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Lines of Python per tree. src: the kernels and their host code take 7,000 lines, flash-attn's signatures 1,500,
# other libraries 1,000, derivatives, vmap and DTensors 500, serving 3,100, sequences over ranks 3,000, tiles that
# users measure 690, tensors of 8 bits 3,500, the backward in parts, its GQA splits and its chains over ranks 700,
# portable tiles in parts and shared groups 280, tiles of biases and masks 290, products on top of biases and ALiBi by
# a product 110, decoding for wide groups on Hopper 660, sums to which GQA splits and parts of a batch add 110, wide
# loads of biases 60, tiles that the heads of a group share 230, float32 on tensor cores and tiles for it 30, prompts
# over a cache on the Hopper forward 330, draft trees (rule, kernel, servers' masks of them) 440, plug-ins for vLLM,
# SGLang and transformers' continuous batching 610, functions of users traced, evaluated, printed and differentiated
# 3,000 and a library of them 300, interval masks and chunks 1,450, new arguments of calls over a cache 550, heads to
# 512 on Hopper 620 and their gradients 1,060, 8-bit caches widened and pages of any size in its forward 580, latent
# rows (MLA: queries of the values, and their kernel on Hopper, with shares of even calls and folds by halves) 1,110,
# these in 8 bits (rows of 656 bytes: what they are, refusals, every backend, a role that widens them) 280,
# functions of users in Hopper's kernels 200, lists of blocks (made, converted, followed by every backend) 1,020, bits
# of what masks keep of their partial blocks 270, division of indices and comparison of distances 60, FlexAttention's
# names 260, functions and intervals over a cache 140, over ranks spans of keys by pair of ranks, work that stands
# apart, layouts for masks, masks, biases and functions of the whole 1,350, tables of what users' functions compute by
# distance, and sums by diagonals, 340, dropout in Hopper's kernels 230, builds beside a forward's 75, queries in
# registers, short products and adds by a third warpgroup at head_dim 80 and 96 70, outputs of 8 bits 35, rows of
# several heads rounded by a program 40, builds for a GPU that is not there 85, static caches of transformers by their
# lengths 60, spans of heads and memory that outlives a call 35, tiles where no descriptor can read 35, rows of huge
# finite scores (lse in two parts, repairs of what Hopper's kernels lose) 480, short sequences of a CPU at once 420,
# what functions read watched or read again, and traced and guarded in compiled code 420, masks that change, are sliced
# by sample and are made in compiled code 390, sizes that are symbols 120, refusals of what was silently wrong 170,
# kernels built ahead (their archives, kernels by name, the command that builds them and its models, what is told of
# them) 1,690: with those it is more than the 23,000 of the design.
# Two lines in five are docstrings.
# benchmarks: attention in 8 bits, cuDNN's among it, takes 200, biases, sinks and FlexAttention 140, the steps of
# a server 310, ways to widen 8-bit caches 140, latent rows beside FlashMLA 220, heads past 256 30, functions of users
# beside FlexAttention 360, what else users run (dropout, padding, few queries, float32) 70, ablations 65, outputs of
# 8 bits like cuDNN's 5, first calls in fresh processes 330.
# tests: what is tested twice is tested once; a capability brings its own tests. What Triton 3.6 forgets takes 90, what
# others reported of their libraries (huge scores, what changes between calls, symbols, refusals) 1,850, kernels built
# ahead (hostile files, a machine that is not there, the case tables without Triton) 1,720.
TOTAL_LINES = {"src/flashtile": 47_800, "extras/flashtile_lab": 6_380, "benchmarks": 6_310, "tests": 41_820}
# Of these the total alone is limited: a table of cases is as long as it is, and a test takes all that it is tried with.
TOTAL_ALONE = ("tests",)
FILE_LINES = 400
KERNEL_FILE_LINES = 700
FUNCTION_LINES = 80
PARAMETERS = 12
KERNEL_FOLDERS = (*(f"src/flashtile/backends/{name}/" for name in ("gpu/device", "gpu/decode", "portable", "hopper")),)
# Exempt: their parameters are public. Most are another package's, and those of a command are its options.
PUBLIC = (
    "src/flashtile/api/attention.py",
    "src/flashtile/api/cached.py",
    "src/flashtile/distributed/attention.py",
    "src/flashtile/distributed/cache.py",
    "src/flashtile/api/quantize.py",
    "src/flashtile/nn.py",
    "src/flashtile/compat/",
    "src/flashtile/cli/build.py",
    "src/flashtile/cli/explain.py",
    "extras/flashtile_lab/commands/fp8.py",
    "extras/flashtile_lab/commands/ring.py",
)
# Path or path:function -> (lines, reason).
RAISED: dict[str, tuple[int, str]] = {
    "src/flashtile/api/cached.py:attention_with_kvcache": (145, "39 arguments, each with its line of documentation"),
    "src/flashtile/api/attention.py:attention": (105, "22 arguments, each with its line of documentation"),
    "src/flashtile/backends/hopper/forward/kernel.py:attention_forward": (98, "warps are given to roles in four ways"),
    "src/flashtile/distributed/cache.py:attention_with_sharded_kvcache": (105, "18 arguments, likewise"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def over() -> list[str]:
    """One line for each limit that is exceeded."""
    found = []
    for tree, most in TOTAL_LINES.items():
        total = 0
        for path in sorted((ROOT / tree).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text()
            total += text.count("\n")
            found += of_file(name, text) if tree not in TOTAL_ALONE else ()
        print(f"{tree}: {total} lines of {most}")
        if total > most:
            found.append(f"{tree}: {total} lines, at most {most}")
    return found


def of_file(name: str, text: str) -> Iterator[str]:
    """One line for each limit that a file exceeds; ``name`` is its path from the root."""
    lines, usual = text.count("\n"), KERNEL_FILE_LINES if name.startswith(KERNEL_FOLDERS) else FILE_LINES
    limit = RAISED.get(name, (usual, ""))[0]
    if lines > limit:
        yield f"{name}: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, Function):
            continue
        place, length = f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
        limit = RAISED.get(f"{name}:{node.name}", (FUNCTION_LINES, ""))[0]
        if length > limit:
            yield f"{place}: {length} lines, at most {limit}"
        count = len(parameters(node))
        if count > PARAMETERS and not name.startswith(PUBLIC):
            yield f"{place}: {count} parameters, at most {PARAMETERS}"


def parameters(node: Function) -> list[str]:
    """Names of a function's parameters, without ``self`` and ``cls``."""
    given = node.args
    all_of_them = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    names = [each.arg for each in all_of_them if each is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


if __name__ == "__main__":
    complaints = over()
    print("\n".join(complaints))
    sys.exit(bool(complaints))
