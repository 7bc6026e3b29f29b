"""Host code imports no Triton: no module that planning reaches, no plan, no lowering, no explanation of a call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")

# With None in its place, an import of it fails. Modules of device code have its name at the beginning of a line, which
# the lint rule allows them alone.
CODE = """
import sys
sys.modules["triton"] = None
import importlib, pathlib, flashtile
root, seen = pathlib.Path(flashtile.__file__).parent, 0
for path in sorted(root.joinpath("backends").rglob("*.py")):
    if not any(line.startswith(("import triton", "from triton")) for line in path.read_text().splitlines()):
        importlib.import_module(".".join(("flashtile", *path.relative_to(root).with_suffix("").parts)))
        seen += 1
assert seen > 60, seen

from flashtile.cli import main
for arch in ("8.0", "9.0"):
    assert main(["explain", "--arch", arch, "--grad", "--causal"]) == 0

from flashtile.backends.gpu import build
build._no_compiler = lambda gluon: None  # as if it were here
build.expect_compiling = lambda: None  # has a thread import it
from flashtile.backends.gpu.launch import lower, text_of
from tests.fuzz.drawn import draw
from tests.fuzz.launches import merging, started
launches = merging()
for capability in ((8, 0), (9, 0)):
    for seed in range(50):
        launches += [each.launch for each in started(draw(seed), capability)]
assert all(text_of(lower(each)[0]) for each in launches)
names = {each.kernel.__name__ for each in launches}
assert len(names) > 20, names
"""


def test_no_triton() -> None:
    env = {name: x for name, x in os.environ.items() if not name.startswith(("TRITON_", "FLASHTILE_"))}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("  kernel ")]
    assert len(lines) == 4 + 4 and all("will be compiled (about " in line for line in lines)
