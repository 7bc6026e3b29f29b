"""The pages as a reader sees them: built, opened in Chromium, wide and light, narrow and dark."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest

from docs.blocks import ROOT
from tests.browser import Scheme, Tab, browser

pytestmark = pytest.mark.slow

PAGES = sorted("" if page.stem == "index" else f"{page.stem}/" for page in (ROOT / "docs").glob("*.md"))
VIEWS: list[tuple[int, Scheme]] = [(1280, "light"), (390, "dark")]
# Between text and what is behind it, as WCAG 2.2 asks for text of usual size.
LEAST_CONTRAST = 4.5

# What is wrong with the page that is open, as a list of sentences.
_FAULTS = r"""
(() => {
  const found = [];
  const size = element => element.getBoundingClientRect();
  const name = element => element.outerHTML.slice(0, 120);
  if (document.documentElement.scrollWidth > innerWidth) found.push(`is ${document.documentElement.scrollWidth} wide`);
  for (const formula of document.querySelectorAll('.arithmatex'))
    if (!formula.querySelector('math')) found.push(`no MathML: ${name(formula)}`);
    else if (formula.scrollHeight > formula.clientHeight && getComputedStyle(formula).overflowY === 'auto')
      found.push(`scrolls down: ${name(formula)}`);
  for (const math of document.querySelectorAll('math')) {
    const drawn = [...math.querySelectorAll('mi, mn, mo, mtext')].filter(each => size(each).width && size(each).height);
    if (!size(math).width || !size(math).height || !drawn.length) found.push(`not drawn: ${name(math)}`);
  }
  for (const image of document.querySelectorAll('article img'))
    if (!image.complete || !image.naturalWidth || !image.naturalHeight || !size(image).width)
      found.push(`no image: ${image.src}`);

  // Colours as [r, g, b, alpha]; a colour over another; luminance as in WCAG.
  const numbers = colour => { const c = colour.match(/[\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const behind = element => element
    ? over(numbers(getComputedStyle(element).backgroundColor), behind(element.parentElement)) : [255, 255, 255, 1];
  const texts = document.createTreeWalker(document.querySelector('article') || document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || element.closest('script, style, .headerlink') || !size(element).width) continue;
    if (!element.closest('pre, code, math') && /\\[(\[]|\$\$|\\[a-zA-Z]{2,}/.test(text)) found.push(`raw TeX: ${text}`);
    const below = behind(element), shown = over(numbers(getComputedStyle(element).color), below);
    const [a, b] = [light(shown), light(below)].sort((x, y) => y - x), contrast = (a + 0.05) / (b + 0.05);
    if (contrast < LEAST) found.push(`contrast ${contrast.toFixed(1)}: ${text.slice(0, 60)}`);
  }
  return found;
})()
""".replace("LEAST", str(LEAST_CONTRAST))


def faults(tab: Tab, url: str, width: int = 1280, scheme: Scheme = "light") -> list[str]:
    """Opens a page and says what is wrong with it: what it shows, what it asked for, what it complained about."""
    tab.open(url, width=width, scheme=scheme)
    found = [*tab.run(_FAULTS), *(f"{kind}: {text}" for kind, text in tab.said if kind in ("error", "exception"))]
    theirs = [e for e in map(urlsplit, tab.asked) if e.scheme != "blob" and e.netloc != urlsplit(url).netloc]
    return [*found, *(f"asks for {each.geturl()}" for each in theirs)]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def serve(folder: Path) -> Iterator[str]:
    """The address of a server of the folder's files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site").resolve()
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return made


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    yield from serve(folder)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_shown_without_faults(site: str, tab: Tab, page: str, tmp_path: Path) -> None:
    found = {}
    for width, scheme in VIEWS:
        if wrong := faults(tab, site + page, width, scheme):
            picture = tmp_path / f"{width}-{scheme}.png"
            tab.page.screenshot(path=picture, full_page=True)
            found[f"{width} {scheme}, see {picture}"] = wrong
    assert found == {}


def test_formulas_plots_and_both_schemes_are_there(site: str, tab: Tab) -> None:
    tab.open(f"{site}algorithm/")
    assert tab.run("document.querySelectorAll('math').length") > 100
    assert tab.run("document.querySelectorAll('math[display=block]').length") > 10
    assert tab.run("document.querySelectorAll('table math').length") > 5
    tab.open(f"{site}performance/")
    plots = tab.run("[...document.querySelectorAll('article img')].map(each => each.src)")
    assert len(plots) == 5 and all(each.endswith(".svg") for each in plots)
    colours = []
    for scheme in ("light", "dark"):
        tab.open(site, scheme=scheme)
        colours.append(tab.run("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2


class _Places(HTMLParser):
    """The addresses that a page links, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {given.get("id") or ""}
        self.links |= {given.get("href") or ""} if tag == "a" else set()


def test_links_within_the_site_lead_somewhere(folder: Path) -> None:
    found = {path.parent: _Places(path.read_text(encoding="utf-8")) for path in folder.rglob("index.html")}
    ours = {
        (here, link)
        for here, page in found.items()
        for link in page.links
        if not urlsplit(link).scheme and not link.startswith("/")
    }
    assert len(found) == len(PAGES) and len(ours) > 500

    def leads_somewhere(here: Path, link: str) -> bool:
        path, name = urldefrag(link)
        page = found.get((here / path).resolve())
        return (here / path).is_file() or (page is not None and name in page.names | {""})

    assert {(here.name, link) for here, link in ours if not leads_somewhere(here, link)} == set()


BAD_PAGE = r"""<!doctype html><title>bad</title><body style="background: rgb(30, 30, 30); color: rgb(60, 60, 60)">
<article><p>\(e^s\) in $$ signs</p><p style="color: white; width: 3000px">wide</p><img src="nothing.png">
<p style="color: white"><span class="arithmatex">e</span> <math></math>
<code style="color: red">\frac is code</code></p>
<script src="http://localhost:1/script.js"></script><script>console.error("complaint"); undefined.x</script></article>
"""


def test_the_faults_of_a_bad_page_are_seen(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(BAD_PAGE)
    for address in serve(tmp_path):
        found = "\n".join(faults(tab, f"{address}bad.html", 390))
    for word in ("is 3", "raw TeX: \\(e^s\\)", "contrast 1.", "no image", "no MathML", "not drawn", "asks for http://localhost:1",
                 "error: complaint", "exception: Cannot read", "404"):  # fmt: skip
        assert word in found, f"{word} is not in\n{found}"
    assert "raw TeX: \\frac" not in found
