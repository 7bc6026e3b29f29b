"""The pages keep their word: code blocks run, outputs are the ones shown, generated tables are up to date."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashtile
from benchmarks import results
from benchmarks.page import fill_tables
from docs.blocks import BLOCKS, CODE, PAGES, ROOT, check_types, refresh, run_code

SOURCE = ROOT / "src" / "flashtile"
_CODE_PAGES = [page for page in PAGES if CODE.search(page.read_text(encoding="utf-8"))]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def unchanged_modules() -> Iterator[None]:
    """Forgets what a page put into ``sys.modules`` under another package's name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"):
            del sys.modules[name]


def test_pages_with_code_are_found() -> None:
    use = {f"docs/{name}.md" for name in ("from-flash-attn", "from-flexattention", "from-sdpa", "serving", "training")}
    learn = {"README.md", "docs/algorithm.md", "docs/index.md", "docs/quickstart.md", "docs/semantics.md"}
    assert use | learn <= set(map(_name, _CODE_PAGES))


def test_output_that_differs_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python\nprint(1 + 1)\n```\n\n```text title="output"\n2\n```\n')
    run_code(page)
    page.write_text(page.read_text().replace("\n2\n", "\n3\n"))
    with pytest.raises(AssertionError, match="prints\n2"):
        run_code(page)


def test_a_wrong_type_in_a_page_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n```python\nx = 1\n```\n\n```python\nx = 'one'\n```\n")
    assert check_types([page]) == 1
    assert "page_md.py:8: error: Incompatible types in assignment" in capfd.readouterr().out
    page.write_text(page.read_text().replace("'one'", "2"))
    assert check_types([page]) == 0


@pytest.mark.parametrize("page", [
    "training", "serving", "from-flash-attn", "from-flexattention", "your-own-attention", "distributed", "mla", "fp8",
    "determinism", "no-gpu",
])  # fmt: skip
def test_a_question_is_answered_on_the_first_screen(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    answer = CODE.search(text)
    assert answer is not None and text[: answer.end()].count("\n") <= 28
    assert f"]({page}.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"](docs/{page}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


@pytest.mark.one_in(13)
@pytest.mark.parametrize("page", _CODE_PAGES, ids=_name)
@pytest.mark.usefixtures("unchanged_modules")
def test_code_runs_and_prints_what_is_shown(page: Path) -> None:
    run_code(page)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_generated_blocks_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert refresh(text) == text, "run: python docs/blocks.py"


@pytest.mark.parametrize(("page", "block"), [
    ("docs/support.md", "support_table"), ("docs/semantics.md", "settings_table"),
])  # fmt: skip
def test_pages_hold_what_the_code_prints(page: str, block: str) -> None:
    assert BLOCKS[block]() in (ROOT / page).read_text(encoding="utf-8")


# Of licences, of software and of GPUs.
_VERSIONS = r"\b(?:0\.1\.0|2\.0|2\.11|3\.11|8\.9|9\.0)\b"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/performance.md"])
def test_speeds_stand_in_tables_that_saved_rows_fill(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").partition("## How it is measured")[0]
    for written in (r"```.*?^```", r"<!-- (?:begin \w+|table: [\w-]+) -->.*?<!-- end.*?-->", _VERSIONS):
        text = re.sub(written, "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r".*(?:\b\d+\.\d+\b|\d ?%|TFLOPS|TB/s|\d times).*", text) == []


def test_a_number_changed_by_hand_is_seen() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    row = re.search(r"^\| decode, .*\| (0\.\d\d\d) \|", text, re.MULTILINE)
    assert row is not None
    changed = text[: row.start(1)] + "0.999" + text[row.end(1) :]
    assert fill_tables(changed, results.saved()) == text


def test_sections_that_the_code_cites_exist() -> None:
    algorithm = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^#+ (.+)$", algorithm, re.MULTILINE))
    cited = {
        (" ".join(title.split()), path.relative_to(ROOT).as_posix())
        for path in SOURCE.rglob("*.py")
        for title in re.findall(r'docs/algorithm\.md, "([^"]+)"', path.read_text(encoding="utf-8"))
    }
    assert {title for title, _ in cited} >= {"The monoid", "Backward"}
    missing = {(title, path) for title, path in cited if title not in headings}
    assert not missing


def named_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Without those that catch what is refused."""
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}


def test_semantics_has_every_rule_and_parameter() -> None:
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    rules = [int(n) for n in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)]
    assert rules == list(range(1, 33))
    for page in ("README.md", "docs/index.md"):
        assert "[thirty-two rules]" in (ROOT / page).read_text(encoding="utf-8").lower()
    used = {int(n) for n in re.findall(r"rules? (\d+)", (SOURCE / "reference.py").read_text(encoding="utf-8"))}
    assert used <= set(rules)
    functions = (
        flashtile.attention, flashtile.attention_varlen, flashtile.attention_with_kvcache, flashtile.merge_states,
    )  # fmt: skip
    parameters = {name for function in functions for name in named_parameters(function)}
    assert {name for name in parameters if not re.search(rf"\b{name}\b", text)} == set()


def test_public_names_are_in_the_api_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert {name for name in flashtile.__all__ if not re.search(rf"\b{name}\b", text)} == set()
    assert {*flashtile.__all__, "nn", "serving"} <= set(dir(flashtile))  # what is loaded on first use, too


def test_design_shows_the_layers_that_are_checked() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = text.partition("```text\n")[2].partition("```")[0]
    shown = [re.split(r"  +", line)[0] for line in block.splitlines()]
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.removeprefix("flashtile.").replace(".", "/") for layer in rules[0]["layers"]]
    assert [re.split(r" *[,|] *", line.replace("backends/", "")) for line in shown] == [
        re.split(r" *[:|] *", layer.replace("flashtile/", "").replace("backends/", "")) for layer in layers
    ]


def test_design_names_what_exists() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.(?:py|md|toml))`", text))
    trees = ("src", "extras", "tests", "docs")
    here = {path.relative_to(ROOT).as_posix() for tree in trees for path in (ROOT / tree).rglob("*")}
    assert {name for name in files if not any(f"/{path}".endswith(f"/{name}") for path in here)} == set()
    places = {
        "api": "api.attention", "arguments": "call.arguments", "backend": "call.backend", "dispatch": "ops.dispatch",
        "driver": "backends.gpu.driver", "host": "backends.gpu.host", "launch": "backends.gpu.launch",
        "ops": "ops.operators", "states": "core.states",
    }  # fmt: skip
    for module, name in re.findall(
        r"`(?:backends\.|call\.|gpu\.)?(api|arguments|ops|dispatch|host|driver|launch|backend|states)\.(\w+)", text
    ):
        if name != "py":
            assert hasattr(importlib.import_module(f"flashtile.{places[module]}"), name), f"{module}.{name}"


def test_formulas_become_mathml() -> None:
    from docs import mathml

    made = mathml.on_page_content(
        r'<p>If <span class="arithmatex">\(m = -\infty\)</span>, code: <code>\(x\)</code></p>'
    )
    assert made.startswith('<p>If <span class="arithmatex"><math') and made.endswith("<code>\\(x\\)</code></p>")
    assert '<mi>m</mi><mo>&#x0003D;</mo><mo form="prefix">&#x02212;</mo><mi>&#x0221E;</mi>' in made
    block = mathml.on_page_content('<div class="arithmatex">\\[\na &lt; \\max(b, c) .\n\\]</div>')
    assert 'display="block"' in block and "&#x0003C;" in block and ">max</mo>" in block
    with pytest.raises(ValueError, match="no MathML"):
        mathml.to_mathml(r"\nonsense x", "inline")


def test_one_version_everywhere() -> None:
    extras = tomllib.loads((ROOT / "extras" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None and newest is not None
    assert {flashtile.__version__, extras, cited[1], newest[1]} == {flashtile.__version__}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in t]
    assert {t for t in targets if not (ROOT / t).exists()} == set()
