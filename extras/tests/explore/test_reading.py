"""The page as a reader meets it, in Chromium: faults, keyboard, contrast, and that every control does something."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from extras.tests.explore.moving import evaluated
from tests.browser import Scheme, Tab
from tests.test_site import _FAULTS as FAULTS
from tests.test_site import VIEWS, faults

pytestmark = pytest.mark.slow

FIGURES = ("time", "matrix", "traffic", "tiles", "online", "backward", "timeline", "fp8", "ladder", "explain")


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_is_shown_without_faults(tab: Tab, address: str, width: int, scheme: Scheme) -> None:
    assert faults(tab, address, width, scheme) == []
    # Most figures are drawn after the page has loaded: once more, with all of them.
    assert tab.run("explore.ready") and tab.run(FAULTS) == []
    assert tab.said == [] and tab.asked == [address]
    assert tab.run("Object.keys(explore.numbers)") == list(FIGURES)
    assert tab.run("[...document.querySelectorAll('section')].map(each => each.id)") == list(FIGURES)
    # A sentence of what to see, something drawn, and lines of source under each.
    for figure in FIGURES:
        assert tab.run(f"document.querySelector('#{figure} .see').textContent.length") > 60
        assert tab.run(f"document.querySelector('#{figure} .plot').getBoundingClientRect().height") > 100
        assert tab.run(f"document.querySelector('#{figure} .sources pre').textContent.length") > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(tab: Tab, address: str, scheme: Scheme) -> None:
    found = find_spec("axe_core_python")
    assert found is not None and found.origin is not None, "pip install axe-core-python, or '.[dev]'"
    axe = (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    tab.open(address, scheme=scheme)
    tab.run("explore.ready")
    tab.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
    tab.run(axe + "; 0")
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    ran = f"axe.run({{ runOnly: {tags} }}).then(r => JSON.stringify([r.violations, r.passes.map(p => p.id)]))"
    violations, passes = json.loads(tab.run(ran))
    assert [(v["id"], [n["html"][:160] for n in v["nodes"]][:4]) for v in violations] == []
    assert "color-contrast" in passes


def test_the_keyboard_reaches_and_moves_everything(opened: Tab) -> None:
    controls = "document.querySelectorAll('.controls input, .controls select, .controls button')"
    visible = f"[...{controls}].filter(e => e.offsetParent)"
    wanted = opened.run(f"{visible}.length")
    opened.run("window.reached = new Set(); document.addEventListener('focusin', e => reached.add(e.target)); 0")
    for _ in range(wanted + 120):
        opened.page.keyboard.press("Tab")
    assert opened.run(f"{visible}.filter(e => !reached.has(e)).map(e => e.outerHTML)") == []
    assert (
        opened.run("[...document.querySelectorAll('summary, a')].filter(e => e.offsetParent && !reached.has(e)).length")
        == 0
    )
    # A slider by the arrow keys, a box and a button by the space bar.
    before = opened.run("explore.numbers.time")
    opened.run("document.querySelector('#time [name=log]').focus()")
    opened.page.keyboard.press("ArrowRight")
    opened.run("document.querySelector('#time [name=causal]').focus()")
    opened.page.keyboard.press("Space")
    after = opened.run("explore.numbers.time")
    assert opened.run("explore.figures.time.state.log") == 14 and opened.run("explore.figures.time.state.causal")
    assert after["tiledProduct"] == pytest.approx(before["tiledProduct"] * 2, rel=1e-3)
    step = opened.run("explore.figures.tiles.state.step")
    opened.run("document.querySelector('#tiles button[aria-label=step]').focus()")
    opened.page.keyboard.press("Space")
    assert opened.run("explore.figures.tiles.state.step") == step + 1


# For every control and every other control that decides whether it is seen: what changes when it is moved.
UNCHANGED = """() => {
  const still = [];
  let moved = 0;
  for (const [name, figure] of Object.entries(explore.figures)) {
    const choices = [...figure.section.querySelectorAll('.controls select')];
    const views = [null, ...choices.flatMap(s => [...s.options].map(o => [s, o.value]))];
    const controls = [...figure.section.querySelectorAll('.controls [name], .controls button')];
    for (const control of controls) {
      let changed = false;
      for (const view of views) {
        const start = { ...figure.state };
        if (view && view[0] !== control) { view[0].value = view[1]; view[0].dispatchEvent(new Event('input')); }
        if (control.offsetParent) {
          const before = figure.plot.innerHTML;
          if (control.tagName === 'BUTTON') control.click();
          else if (control.type === 'checkbox') control.click();
          else {
            const middle = (Number(control.min) + Number(control.max)) / 2;
            if (control.tagName === 'SELECT')
              control.selectedIndex = (control.selectedIndex + 1) % control.options.length;
            else if (control.type === 'text') control.value = '4 -1 2.5';
            else control.value = Number(control.value) > middle ? control.min : control.max;
            control.dispatchEvent(new Event('input'));
          }
          changed ||= figure.plot.innerHTML !== before;
        }
        Object.assign(figure.state, start);
        figure.draw();
        if (changed) break;
      }
      if (changed) moved += 1; else still.push(`${name}: ${control.outerHTML}`);
    }
  }
  return [moved, still];
}"""


def test_every_control_changes_its_figure(opened: Tab) -> None:
    moved, still = evaluated(opened, UNCHANGED)
    assert still == [] and moved > 70
    assert opened.said == []


def test_the_theme_can_be_chosen(opened: Tab) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(colour)
    opened.run("document.getElementById('theme').click()")
    dark = opened.run(colour)
    opened.run("document.getElementById('theme').click()")
    assert light != dark and opened.run(colour) == light
