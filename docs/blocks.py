"""What the pages take from the code: tables between markers. ``python docs/blocks.py`` writes them anew.

A block stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. A test compares what stands there with what
the code prints, so that no page promises what a backend no longer does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import flashtile
from flashtile.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def settings_table() -> str:
    """Every environment variable that flashtile reads, as a Markdown table."""
    rows = [f"| `{s.name}` | {f'`{s.default}`' if s.default else 'unset'} | {s.meaning} |" for s in SETTINGS]
    return "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows])


BLOCKS: dict[str, Callable[[], str]] = {"support_table": flashtile.support_table, "settings_table": settings_table}

_BLOCK = re.compile(r"<!-- begin (\w+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def refresh(text: str) -> str:
    """A page's text with every block as the code prints it now.

    Raises:
        KeyError: A block's name is not in ``BLOCKS``.
    """
    return _BLOCK.sub(lambda m: f"<!-- begin {m[1]} -->\n{BLOCKS[m[1]]()}\n<!-- end {m[1]} -->", text)


def main() -> None:
    """Rewrites the pages whose blocks are out of date, and names them."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = refresh(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
