"""What the pages take from the code, and the code that they hold.

``python docs/blocks.py`` writes the tables between markers anew. A table stands between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``. A test compares what stands there with what the code prints, so that no page promises what a
backend no longer does.

``python docs/blocks.py PAGE...`` runs the Python blocks of pages, with the flashtile that Python finds.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flashtile
from flashtile.core.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def settings_table() -> str:
    """Every environment variable that flashtile reads, as a Markdown table."""
    rows = [f"| `{s.name}` | {f'`{s.default}`' if s.default else 'unset'} | {s.meaning} |" for s in SETTINGS]
    return "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows])


def derivation() -> str:
    """The cells of docs/derivation.ipynb as Markdown."""
    cells = json.loads((ROOT / "docs" / "derivation.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts)


def reproduced() -> str:
    """Published figures beside ours, as ``flashtile-lab reproduce --markdown`` prints them."""
    from flashtile_lab import reproduce

    return reproduce.markdown()


def ring_model() -> str:
    """What the model of rings says of 8 to 4,096 devices, as a Markdown table."""
    from flashtile_lab import analysis

    columns = ["devices", "tokens each", "keys travel", "GB sent", "forward ms", "hidden", "share", "with the backward"]
    lines = ["| " + " | ".join(columns) + " |", "| ---: | ---: | --- |" + " ---: |" * 5]
    for world, tokens, ulysses in itertools.product((8, 64, 512, 4096), (2048, 8192, 32768), (1, 8)):
        way = {1: "ring", world: "all-to-all"}.get(ulysses, "all-to-all of 8, ring")
        shape = analysis.RingShape(tokens, world, ulysses=ulysses)
        model = functools.partial(analysis.ring_cost, shape, analysis.H200_KERNELS, analysis.H200_CLUSTER)
        forward, backward = model(), model(backward=True)
        both = (forward.ideal_s + backward.ideal_s) / (forward.total_s + backward.total_s)
        cells = [f"{world:,}", f"{tokens:,}", way, f"{forward.sent_bytes / 1e9:,.2f}", f"{forward.total_s * 1e3:,.2f}"]
        cells += [f"{forward.hidden:.0%}", f"{forward.share:.2f}", f"{both:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "support_table": flashtile.support_table,
    "settings_table": settings_table,
    "reproduced": reproduced,
    "derivation": derivation,
    "ring_model": ring_model,
}

_BLOCK = re.compile(r"<!-- begin (\w+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def refresh(text: str) -> str:
    """A page's text with every block as the code prints it now.

    Raises:
        KeyError: A block's name is not in ``BLOCKS``.
    """
    return _BLOCK.sub(lambda m: f"<!-- begin {m[1]} -->\n{BLOCKS[m[1]]()}\n<!-- end {m[1]} -->", text)


CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text title=\"output\"\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def run_code(page: Path) -> dict[str, Any]:
    """Runs a page's Python blocks, in order and in one namespace, and compares what they print with what is shown.

    Returns:
        The namespace: the functions and values that the page defines, by name.

    Raises:
        AssertionError: A block prints something else.
    """
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    for block in CODE.finditer(text):
        code, shown = block.groups()
        # Empty lines in front, so that a traceback shows the page's own line numbers.
        first_line = text[: block.start(1)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * first_line + code, str(page), "exec"), namespace)
        if shown is not None and not doctest.OutputChecker().check_output(shown, printed.getvalue(), doctest.ELLIPSIS):
            raise AssertionError(f"{page.name}:{first_line} prints\n{printed.getvalue()}")
    return namespace


# Their classes come from tables that are read when they are imported, which mypy does not see.
_MYPY = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
check_untyped_defs = true
[mypy-diffusers.*,transformers.*]
follow_imports = skip
"""


def check_types(pages: Sequence[Path] = PAGES) -> int:
    """Runs mypy over the code of each page, a module with the page's line numbers; returns its code."""
    with tempfile.TemporaryDirectory() as folder:
        for page in pages:
            text, lines = page.read_text(encoding="utf-8"), [""] * 10_000
            for block in CODE.finditer(text):
                first = text[: block.start(1)].count("\n")
                code = block[1].splitlines()
                lines[first : first + len(code)] = code
            if any(lines):
                name = re.sub(r"\W", "_", page.name)
                (Path(folder) / f"{name}.py").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        files, config = sorted(map(str, Path(folder).iterdir())), Path(folder) / "mypy.ini"
        config.write_text(_MYPY, encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
        return max(subprocess.run([*command, each], cwd=ROOT).returncode for each in files)


def main(pages: list[str]) -> None:
    """Runs the code of pages; without any, rewrites the pages whose tables are out of date, and names them."""
    if pages == ["--types"]:
        sys.exit(check_types())
    for name in pages:
        run_code(ROOT / name)
        print(f"{name} runs with {Path(flashtile.__file__).parent}")
    if pages:
        return
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = refresh(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
