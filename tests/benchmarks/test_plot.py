"""The pages' tables, which hold what every function that makes one says of the saved rows, and the plots."""

import re

import pytest

from benchmarks import page as pages
from benchmarks import plot, results


def test_a_block_without_rows_says_so_and_an_unknown_one_is_refused():
    page = "before\n<!-- table: forward-fp16-summary -->\nold\n<!-- end -->\nafter\n"
    bfloat16 = [row for row in results.saved() if row.suite == "forward" and row.case["dtype"] == "bfloat16"]
    for rows in ([], bfloat16):
        assert pages.fill_tables(page, rows) == page.replace("old", "\nNot measured yet.\n")
    with pytest.raises(ValueError, match="table is 'nonsense'"):
        pages.fill_tables("<!-- table: nonsense -->\n<!-- end -->", [])


@pytest.mark.parametrize("path", pages.DOCS_PAGES, ids=lambda path: path.name)
def test_the_pages_show_what_the_saved_rows_say(path):
    page = path.read_text(encoding="utf-8")
    assert page == pages.fill_tables(page, results.saved()), "run python -m benchmarks.plot"


def test_every_saved_file_is_named():
    section = pages.DOCS_PAGES[1].read_text(encoding="utf-8").partition("### What is saved")[2]
    named = set(re.findall(r"^\| `([\w/-]+\.jsonl)`", section, re.MULTILINE))
    assert named == {path.relative_to(results.RESULTS).as_posix() for path in results.RESULTS.rglob("*.jsonl")}


DRAWN = {
    "forward": ("flashtile-portable", "fa3", "causal, head_dim 256", "16k", "TFLOPS"),
    "backward": ("fa2", "full, head_dim 64", "sequence length"),
    "decode": ("fa3", "batch 64, heads 32/8 of 128", "GB/s", "128k", "decode, bf16, NVIDIA H200"),
    "fp8": ("cudnn-fp8", "32k", "forward in 8 bits, NVIDIA H200"),
    "overview": ("cudnn", "fa3", "decode, 8 sequences, GB/s", "backward, causal, TFLOPS"),
    "serving": ("flashtile", "fa3", "d64-h64x8, page256", "d128-h16x2, contiguous", "speculative", "speed over fa3"),
    "memory": ("eager", "extra memory, MiB"),
    "train": ("flashtile-hopper", "eager", "nats a character", "2k", "step"),
    "train-fp8": ("over eager's", "step"),
}


@pytest.mark.long
def test_the_command_draws_every_suite_the_same_way_twice_and_writes_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    for folder in ("plots", "again"):
        page.write_text("<!-- table: backward -->\n<!-- end -->\n")
        assert plot.main(["--plots", str(tmp_path / folder), "--pages", str(page)]) == 0
    assert page.read_text().count("| backward-d") == 24
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {*DRAWN}
    for name, words in DRAWN.items():
        drawn = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert [word for word in words if f"<!-- {word} -->" not in drawn] == [], name
        assert drawn == (tmp_path / "again" / f"{name}.svg").read_text()
    assert "heads 71/1 of 64" not in (tmp_path / "plots" / "decode.svg").read_text(), "not all panels"
    assert "<!-- copy -->" not in (tmp_path / "plots" / "fp8.svg").read_text()


def test_a_png_is_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    training = [row for row in results.saved() if row.suite == "train"]
    (path,) = plot.draw(training, tmp_path, "png")
    assert path.name == "train.png" and path.read_bytes().startswith(b"\x89PNG")
