"""``python tools/same_code.py BASE``: whether this working tree's kernels compile to the machine code that BASE's have.

The builds that each tree lists itself, as ``flashtile-lab kernels`` shows them, are compiled by that tree's own
sources, without a GPU, and compared by name. What counts is the code alone: of a binary's sections those with
instructions and constants, so that names of files, functions and lines do not.

Exits with 1 if the code, the registers, the spilled bytes or the shared memory of a kernel differ, if one no longer
builds, or if one of BASE's is not built here. With ``--counts``, for changes after which the code cannot be the same,
as the order of a kernel's parameters, only if instructions, registers, spilled bytes or shared memory grow.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120", "gfx942", "gfx950")
COUNTS = ("instructions", "registers", "spills", "shared")
# A build's numbers, or why there are none: {"code": "...", "instructions": 1, ...} or {"error": "..."}.
Build = Mapping[str, Any]


def compared(base: Mapping[str, Build], here: Mapping[str, Build], counts: bool) -> tuple[int, list[str], list[str]]:
    """How many builds are the same, what is wrong, and what is only worth saying."""
    same, wrong, said = 0, list[str](), list[str]()
    for name in sorted(base.keys() | here.keys()):
        old, new = base.get(name), here.get(name)
        if old is None or new is None:
            (wrong if new is None else said).append(f"only {'here' if old is None else 'at the base'}: {name}")
        elif "error" in new:
            both = "error" in old
            (said if both else wrong).append(f"does not build{' at the base either' * both}: {name}: {new['error']}")
        elif "error" in old:
            said.append(f"builds only here: {name}")
        elif old == new:
            same += 1
        else:
            grown = [key for key in COUNTS if new[key] > old[key]]
            numbers = ", ".join(f"{key} {old[key]} -> {new[key]}" for key in COUNTS)
            line = f"{'differs' if not counts else 'grows' if grown else 'does not grow'}: {name}: {numbers}"
            (wrong if grown or not counts else said).append(line)
    return same, wrong, said


def sections(binary: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each section of a 64-bit ELF file that has contents."""
    start, size, count, names = struct.unpack_from("<40xQ10xHHH", binary)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + size * number) for number in range(count)]
    of_names = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        if kind != 8:  # SHT_NOBITS
            end = binary.index(0, of_names + name)
            yield binary[of_names + name : end].decode(), binary[offset : offset + length]


def code_of(asm: Mapping[str, Any]) -> dict[str, Any]:
    """The hash of a compiled kernel's code and its number of instructions."""
    found = dict(sections(asm["cubin"] if "cubin" in asm else asm["hsaco"]))
    # The parameters (.nv.constant0) are zeros as long as they are; tables of constants are code too.
    parts = sorted(
        (name.split(".")[1:3], data) for name, data in found.items() if re.match(r"\.text|\.nv\.const", name)
    )
    digest = hashlib.sha256(b"".join(data for _, data in parts)).hexdigest()
    if "cubin" in asm:
        text = b"".join(data for name, data in found.items() if name.startswith(".text"))
        # Instructions of 16 bytes, their operation in the lowest 12 bits: 0x918 is the NOP that fills up a function.
        count = sum(word & 0xFFF != 0x918 for word, _ in struct.iter_unpack("<QQ", text))
    else:
        count = len(re.findall(r"^\t[a-z]\w+", asm["amdgcn"], re.MULTILINE))
    return {"code": digest, "instructions": count}


def list_module(tree: Path) -> str:
    """The dotted name of the module that lists and compiles a tree's builds."""
    for root in (tree / "src", tree / "extras"):
        for path in sorted(root.rglob("*.py")):
            if re.search(r"^def jobs\(", path.read_text(), re.MULTILINE):
                return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    raise SystemExit(f"{tree}: no module of src or extras has a function jobs")


def compile_one(module: Any, job: Any) -> tuple[str, Build]:
    """A job's build by the imported module; what Triton returns on the way has the binary."""
    import triton

    compile_kernel, made = triton.compile, list[Any]()

    def kept(*args: Any, **options: Any) -> Any:
        made.append(compile_kernel(*args, **options))
        return made[-1]

    triton.compile = kept
    try:
        (outcome,) = module.run([job], 1)
    finally:
        triton.compile = compile_kernel
    if outcome.report is None:
        return job.label, {"error": str(outcome.error).splitlines()[0][:200]}
    report = outcome.report
    numbers = {"registers": report.registers, "spills": report.spill_bytes, "shared": report.shared_bytes}
    return job.label, code_of(made[-1].asm) | numbers


_todo: list[Any] = []
_module: Any = None


def _by_number(number: int) -> tuple[str, Build]:
    return compile_one(_module, _todo[number])


def work(name: str, archs: list[str], only: str, workers: int) -> dict[str, Build]:
    """Every build of a tree, which PYTHONPATH leads to, by architecture and name."""
    global _module
    _module, found = importlib.import_module(name), dict[str, Build]()
    for arch in archs:
        _todo[:] = [job for job in _module.jobs(arch) if re.search(only, f"{arch} {job.label}")]
        # Forked, because kernels cannot be sent to another process; Triton keeps global state, so not threads.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            times = Counter[str]()  # a tree may list two builds under one name
            for label, build in pool.map(_by_number, range(len(_todo))):
                times[label] += 1
                found[f"{arch} {label}" + f" #{times[label]}" * (times[label] > 1)] = build
    return found


def builds_of(tree: Path, cache: Path, asked: argparse.Namespace) -> dict[str, Build]:
    """Every build of a tree, from a process that imports that tree."""
    paths = (tree / "src", tree / "extras", tree)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        # Past the folder of this script, whose other modules nobody should import.
        command = [sys.executable, "-P", __file__, "--worker", list_module(tree), file.name, json.dumps(vars(asked))]
        subprocess.run(command, check=True, cwd=tree, env=environment)
        found: dict[str, Build] = json.loads(Path(file.name).read_text())
        return found


def main() -> int:
    """The command; ``--worker`` is how it calls itself."""
    if sys.argv[1:2] == ["--worker"]:
        name, result, options = *sys.argv[2:4], json.loads(sys.argv[4])
        found = work(name, options["arch"] or list(ARCHS), options["only"], options["workers"])
        Path(result).write_text(json.dumps(found))
        return 0
    parser = argparse.ArgumentParser(description="Compares the machine code of this tree's kernels with a commit's.")
    parser.add_argument("base", metavar="BASE", help="the commit")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="one architecture; may be repeated; default all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="builds whose name has this regular expression")
    parser.add_argument("--counts", action="store_true", help="fail only where a number grows")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept between runs; default nowhere")
    asked = parser.parse_args()
    cache, asked.cache = asked.cache, None
    with tempfile.TemporaryDirectory() as folder:
        place, tar = Path(folder), Path(folder) / "base.tar"
        subprocess.run(["git", "archive", "-o", str(tar), asked.base], check=True, cwd=ROOT)
        (place / "base").mkdir()
        subprocess.run(["tar", "-xf", str(tar), "-C", str(place / "base")], check=True)
        kept = (cache or place / "cache").resolve()
        base, here = (builds_of(tree, kept / tree.name, asked) for tree in (place / "base", ROOT))
    same, wrong, said = compared(base, here, asked.counts)
    print("\n".join([*said, *wrong, f"{same} of {len(base)} builds of {asked.base} are the same here"]))
    return 1 if wrong or not base else 0


if __name__ == "__main__":
    sys.exit(main())
