"""Prints violations of the size limits and fails if there are any. Limits are raised here, with a reason.

``--features`` prints what the library's lines are for instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Most lines of Python in each tree: what it has, and what the open work is said to need. Whoever raises a limit says
# here what for. Two lines in five are docstrings. src: 250 for a kernel of its own over a cache, and for records of
# users' functions and dropout, so that the plain kernels read without them; 830 for the backward by pairs of programs,
# with what PTX does for clusters; 1,240 for second derivatives, of reverse and of forward mode, with kernels of their
# own and with functions of scores; 270 for largest scores on every backend, and the overloads of their results; 380 for
# batch-invariant calls, 100 of them their own path on CPUs; 960 for keys that queries name, 640 for their gradients,
# 960 for blocks that data select, 400 of them the kernels that make lists, and 250 for copies of single latent
# rows; 1,640 for audits of models, 340 to say what ran, 240 for what PyTorch's hooks and its compiled and exported code
# need, 120 for drafts of SGLang, 60 for a tile that two programs fold, 200 for the backward of short packed sequences,
# and 220 to ask of a GPU that is not there, to refuse slower backends and for prefixes by document; 35 for less of the
# host's time.
# extras: 20 for builds of second derivatives, 60 for selected keys. benchmarks: ways to widen by another row of the
# table take 10; 490 for keys that data select, of blocks and alone, with their references; 630 for what bounds a cell,
# what is lost and why, what is stale, and one command for every suite. tests: 126 for a mod that
# follows its recipe; 750 for clusters in the emulator and in the PTX machine, and for the pairs' mistakes; 510 for
# second derivatives; 80 for random pairs; 620 for largest scores; 860 for batch-invariant calls, with random batches;
# 2,200 for keys that queries name or data select, and 200 for the benchmark; 690 for audits of models, 400 for what
# ran, 700 for PyTorch's hooks and code that is compiled or exported, 580 for drafts of SGLang, 260 for the hub's
# repository, 490 for random calls over what queries name, 100 for short packed sequences, 210 for what newcomers ask,
# 330 for the pages of numbers, 410 for an emulator, an interpreter and processes that take less time.
TOTAL_LINES = {"src/flashtile": 56_690, "extras/flashtile_lab": 6_460, "benchmarks": 7_480, "tests": 50_700}


class Feature(NamedTuple):
    """What a part of the library's size is for.

    Attributes:
        name: The feature.
        users: Who needs it.
        files: Its files, as patterns in ``src/flashtile``: their lines are counted.
        among: Its lines in files of other things, as they were counted when it came.
    """

    name: str
    users: str
    files: tuple[str, ...] = ()
    among: int = 0


# Features of more than 200 lines: ``python tools/limits.py --features`` counts them.
FEATURES = (
    Feature(
        "functions of users",
        "FlexAttention's users: research, documents, neighbourhoods",
        (
            "mods/*.py",
            "backends/gpu/functions.py",
            "backends/gpu/device/functions.py",
            "backends/hopper/device/functions.py",
            "backends/portable/backward/operands.py",
            "backends/portable/backward/scatter.py",
            "call/functions.py",
        ),
        300,
    ),
    Feature(
        "lists of blocks, and bits of partial ones",
        "FlexAttention's users: block masks",
        (
            "ops/lists.py",
            "backends/portable/lists*.py",
            "call/blocks.py",
            "api/blocks.py",
        ),
        700,
    ),
    Feature(
        "interval masks and chunks, and what lists share with them",
        "documents in a few bytes a row; Llama 4's chunks",
        ("masks.py", "backends/*/masks.py", "backends/gpu/device/masks.py"),
        450,
    ),
    Feature("one sequence over ranks", "context parallel training and serving", ("distributed/*.py",)),
    Feature(
        "calls over a cache",
        "servers: vLLM, SGLang, transformers",
        (
            "backends/gpu/decode/*.py",
            "backends/hopper/decode/*.py",
            "backends/cpu/decode.py",
            "api/cached.py",
            "ops/cached.py",
            "call/cached_*.py",
            "serving/*.py",
        ),
    ),
    Feature(
        "prompts over a cache in Hopper's forward",
        "servers with long prompts, 8-bit caches, pages of any size",
        ("backends/hopper/forward/paged/*.py",),
    ),
    Feature(
        "latent rows (MLA)",
        "servers of DeepSeek's models",
        ("backends/hopper/latent/*.py", "call/latent.py", "serving/latent_rows.py"),
        400,
    ),
    Feature("draft trees", "speculative decoding", ("serving/trees.py",), 330),
    Feature(
        "tensors of 8 bits",
        "pipelines of FP8: diffusion, prompts",
        (
            "call/quantized*.py",
            "api/quantize*.py",
            "backends/*/quantized/*.py",
            "backends/portable/rounding/*.py",
            "backends/cpu/quantized.py",
            "backends/cpu/rounding.py",
            "compat/_descaled.py",
        ),
        300,
    ),
    Feature(
        "head_dim to 512",
        "Gemma's and diffusion's wide heads",
        ("backends/hopper/big_heads/*.py", "backends/hopper/big_backward/*.py"),
    ),
    Feature(
        "tiles that users measure",
        "every GPU but an H100 or H200",
        ("tuning.py", "cli/tune.py", "backends/portable/tuned.py"),
    ),
    Feature(
        "audits of models",
        "whoever trains or serves a model with a mask or a kernel that may be wrong",
        ("audits/*.py", "cli/audit.py"),
    ),
    Feature(
        "kernels built ahead",
        "servers and images without a compiler; whoever waits for a first call",
        (
            "backends/gpu/ahead.py",
            "backends/gpu/archive.py",
            "backends/gpu/named.py",
            "core/trusted.py",
            "cli/build.py",
            "cli/models.py",
        ),
        400,
    ),
    Feature("dropout", "training", ("core/philox.py", "ops/dropout.py", "backends/*/device/dropout.py"), 150),
    Feature(
        "flash-attn's signatures",
        "code written for FlashAttention-2 and -3",
        ("compat/[!f_]*.py", "compat/_[!d]*.py", "compat/flash_attn_*.py"),
    ),
    Feature("FlexAttention's names", "code written for it", ("compat/flex_attention.py",)),
    Feature("transformers, diffusers, vLLM, SGLang, PyTorch's own function", "their users", ("integrations/*.py",)),
    Feature(
        "vmap, forward mode, DTensors",
        "torch.func, MeanFlow, tensor parallel training",
        ("ops/transforms.py", "ops/sharding.py", "backends/cpu/jvp.py", "backends/cpu/tangents.py"),
    ),
    Feature(
        "second derivatives",
        "gradient penalties, forces of atomistic models, Hessians",
        ("backends/*/second.py", "backends/portable/second/*.py", "ops/second.py"),
    ),
    Feature(
        "rows of huge finite scores",
        "masks of finfo.min; models in training that diverge",
        ("backends/portable/repair.py",),
        390,
    ),
    Feature("largest scores", "QK-clip in training, monitors of logits", (), 255),
    Feature("attention of a CPU", "whoever has no GPU; every test", ("backends/cpu/*.py",)),
)
# Of these the total alone is limited: a table of cases is as long as it is, and a test takes all that it is tried with.
TOTAL_ALONE = ("tests",)
FILE_LINES = 500
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
    "src/flashtile/api/cached.py:attention_with_kvcache": (172, "42 arguments, each with its line of documentation"),
    "src/flashtile/api/attention.py:attention": (127, "25 arguments, each with its line of documentation"),
    "src/flashtile/api/attention.py:attention_varlen": (82, "26 arguments, likewise"),
    "src/flashtile/distributed/cache.py:attention_with_sharded_kvcache": (105, "18 arguments, likewise"),
    "src/flashtile/nn.py:forward": (90, "13 arguments, likewise"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def over() -> list[str]:
    """One line for each limit that is exceeded."""
    found = list[str]()
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


def lines_of(feature: Feature) -> int:
    """The lines that a feature takes in ``src/flashtile``."""
    source = ROOT / "src" / "flashtile"
    files = {path for pattern in feature.files for path in source.glob(pattern)}
    return feature.among + sum(path.read_text().count("\n") for path in files)


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
    if sys.argv[1:] == ["--features"]:
        for each in sorted(FEATURES, key=lines_of, reverse=True):
            print(f"{lines_of(each):6,}  {each.name}: {each.users}")
        sys.exit()
    complaints = over()
    print("\n".join(complaints))
    sys.exit(bool(complaints))
