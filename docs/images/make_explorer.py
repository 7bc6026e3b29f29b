"""The explorer's screenshots: ``python docs/images/make_explorer.py`` draws them anew with Chromium."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from flashtile_lab.explore import write  # noqa: E402
from tests.browser import Scheme, browser  # noqa: E402

# File, width of the window, colours, the figures shown one below the other.
PICTURES: tuple[tuple[str, int, Scheme, tuple[str, ...]], ...] = (
    ("explorer-desktop", 1100, "light", ("traffic", "tiles")),
    ("explorer-timeline", 1100, "dark", ("timeline",)),
    ("explorer-phone", 390, "light", ("online", "backward")),
)


def main() -> None:
    """Writes every picture."""
    with tempfile.TemporaryDirectory() as folder, browser() as tab:
        page = write(Path(folder) / "explore.html").as_uri()
        for name, width, scheme, figures in PICTURES:
            tab.open(page, width=width, scheme=scheme)
            tab.run("explore.ready")
            place = (
                "(s => [s.top + scrollY, s.bottom + scrollY])(document.getElementById('{}').getBoundingClientRect())"
            )
            (top, _), *_, (_, bottom) = [tab.run(place.format(figure)) for figure in (figures[0], figures[-1])]
            tab.page.screenshot(
                path=HERE / f"{name}.webp",
                full_page=True,
                clip={"x": 0, "y": top, "width": width, "height": bottom - top},
                quality=85,
            )


if __name__ == "__main__":
    main()
