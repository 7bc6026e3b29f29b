"""The explorer's screenshots: ``python docs/images/make_explorer.py`` draws them anew with Chromium."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from flashtile.explore import write  # noqa: E402
from tests.browser import browser  # noqa: E402

# File, width of the window, colours, the figures shown one below the other.
PICTURES = (
    ("explorer-desktop", 1100, "light", ("traffic", "tiles")),
    ("explorer-timeline", 1100, "dark", ("timeline",)),
    ("explorer-phone", 390, "light", ("online", "backward")),
)


def main() -> None:
    """Writes every picture."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        page = write(Path(folder) / "explore.html").as_uri()
        for name, width, scheme, figures in PICTURES:
            tab.open(page, width=width, scheme=scheme)
            tab.run("explore.ready")
            place = (
                "(s => [s.top + scrollY, s.bottom + scrollY])(document.getElementById('{}').getBoundingClientRect())"
            )
            (top, _), *_, (_, bottom) = [tab.run(place.format(figure)) for figure in (figures[0], figures[-1])]
            clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
            taken = tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip, format="webp", quality=85)
            (HERE / f"{name}.webp").write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
