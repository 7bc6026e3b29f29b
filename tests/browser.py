"""Headless Chromium, the system's own, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from playwright.sync_api import Page, sync_playwright

Scheme = Literal["light", "dark"]
TIMEOUT_MS = 120_000


def executable() -> str:
    """The path of Chromium.

    Raises:
        RuntimeError: There is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise RuntimeError("no chromium: .ci/run installs Debian's (apt-get install chromium); without root, ask for it")


class Tab:
    """A page of the browser, and what was seen of it since the last ``open``.

    Attributes:
        page: Playwright's page.
        said: The kind and the text of each message of its console, its exceptions (``"exception"``) among them.
        asked: The addresses that it requested, except ``data:``.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[tuple[str, str]] = []
        self.asked: list[str] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda each: self.said.append((each.type, f"{each.text} {each.location['url']}")))
        page.on("pageerror", lambda each: self.said.append(("exception", str(each))))
        page.on("request", lambda each: self.asked.append(each.url))
        # A reader who comes for the first time: the theme keeps the colour scheme that it showed.
        page.add_init_script("try { localStorage.clear() } catch {}")

    def open(self, url: str, *, width: int = 1280, scheme: Scheme = "light") -> None:
        """Loads a page anew, in a window of that width in pixels, for readers who prefer that colour scheme."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.said.clear()
        self.asked.clear()
        self.page.goto(url)
        # The theme sets its colours by a script, and fades from one to the other.
        self.run("new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))")
        self.run("Promise.all(document.getAnimations().map(each => each.finished)).then(() => 0)")

    def run(self, script: str) -> Any:
        """The value of an expression in JavaScript, awaited."""
        return self.page.evaluate(script)


@contextmanager
def browser() -> Iterator[Tab]:
    """A running browser. In a container the tests may be root's, whom Chromium refuses its sandbox."""
    program = executable()
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=program, chromium_sandbox=False) as chromium,
    ):
        yield Tab(chromium.new_page())
