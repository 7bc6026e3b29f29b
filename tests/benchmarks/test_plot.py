import re
from dataclasses import replace

import pytest

from benchmarks import page as pages
from benchmarks import plot, results
from tests.benchmarks.synthetic import decode_rows, memory_rows, serving_rows, suite_rows, training_rows

PAGE = "before\n<!-- table: forward-summary -->\nold\n<!-- end -->\nbetween\n<!-- table: cpu -->\n<!-- end -->\nafter\n"


def test_a_block_is_rewritten_and_the_rest_stays():
    page = pages.fill_tables(PAGE, suite_rows("forward"))
    assert page.startswith("before\n") and page.endswith("after\n") and "\nbetween\n" in page
    assert "old" not in page and "| flashtile-portable | fa2 | 36 | 0 | 1.400 |" in page
    assert "Not measured yet." in page
    assert pages.fill_tables(page, suite_rows("forward")) == page


def test_an_unknown_block_is_refused():
    with pytest.raises(ValueError, match="table is 'nonsense'"):
        pages.fill_tables("<!-- table: nonsense -->\n<!-- end -->", [])


def test_losses_and_memory_are_shown():
    blocks = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in ("forward-losses", "memory"))
    page = pages.fill_tables(blocks, suite_rows("forward") + memory_rows())
    assert "No cell was lost." in page
    assert re.search(r"\| forward-d128-causal-s1024 \| 0\.1 \| 0\.1 \| 32\.0 \|", page)


def test_the_first_table_has_a_line_for_each_suite_against_its_peer():
    rows = suite_rows("forward") + suite_rows("backward")
    # A later run without the portable kernels, of which the last run that has them is told.
    rows += [replace(r, run="2-a", provider="flashtile") for r in rows if r.provider == "flashtile-hopper"]
    rows += [replace(r, run="2-a") for r in rows if r.provider in ("fa3", "cudnn")]
    page = pages.fill_tables("<!-- table: headline -->\n<!-- end -->", rows)
    assert "| Hopper, forward | best peer | 36 | 0 | 1.048 | 1.048 | 1.048 |" in page
    assert "| portable, backward | fa2 | 24 | 0 | 1.400 | 1.400 | 1.400 |" in page
    assert page.count("\n|") == 6


@pytest.mark.parametrize("path", pages.DOCS_PAGES, ids=lambda path: path.name)
def test_the_pages_show_what_the_saved_rows_say(path):
    page = path.read_text(encoding="utf-8")
    assert page == pages.fill_tables(page, results.saved()), "run python -m benchmarks.plot"


def test_every_saved_file_is_named():
    section = pages.DOCS_PAGES[1].read_text(encoding="utf-8").partition("### What is saved")[2]
    named = set(re.findall(r"^\| `([\w/-]+\.jsonl)`", section, re.MULTILINE))
    assert named == {path.relative_to(results.RESULTS).as_posix() for path in results.RESULTS.rglob("*.jsonl")}


@pytest.mark.long
def test_every_curve_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = suite_rows("forward") + suite_rows("backward") + memory_rows()
    paths = plot.draw(rows, tmp_path, "svg")
    assert [p.name for p in paths] == ["forward.svg", "backward.svg", "memory.svg"]
    forward = paths[0].read_text()
    for word in ("flashtile-portable", "fa3", "causal, head_dim 256", "16k", "TFLOPS"):
        assert f"<!-- {word} -->" in forward
    again = plot.draw(rows, tmp_path / "again", "svg")
    assert again[0].read_bytes() == paths[0].read_bytes()


def test_training_is_drawn_and_told(tmp_path):
    pytest.importorskip("matplotlib")
    rows = training_rows()
    (path,) = plot.draw(rows, tmp_path, "svg")
    assert path.name == "train.svg"
    drawn = path.read_text()
    assert all(f"<!-- {word} -->" in drawn for word in ("flashtile-hopper", "eager", "nats a character", "2k", "step"))
    page = pages.fill_tables("<!-- table: train -->\n<!-- end -->\n", rows)
    assert "| flashtile-hopper | 200 | 4.0000 | 2.2550 | 0.0500 | 0.0500 |" in page
    assert "| context 2048 | 500,000 | 100,000 |" in page


def test_decoding_is_drawn_and_told(tmp_path):
    pytest.importorskip("matplotlib")
    rows = decode_rows()
    (path,) = plot.draw(rows, tmp_path, "svg")
    drawn = path.read_text()
    assert path.name == "decode.svg"
    for word in ("flashtile-hopper", "fa3", "batch 64, heads 32/8 of 128", "GB/s", "128k", "decode, bf16, Test device"):
        assert f"<!-- {word} -->" in drawn
    assert "heads 71/1 of 64" not in drawn, "not all panels"
    blocks = "".join(f"<!-- table: {n} -->\n<!-- end -->\n" for n in ("decode-summary", "decode", "decode-variants"))
    page = pages.fill_tables(blocks, rows)
    plain = sum(not row.case["variant"] for row in rows) // 2
    assert f"| flashtile-hopper | fa3 | {plain} | 0 | 1.250 |" in page
    # 8 sequences of 8192 keys in 8 heads of 128: 268 MB in 71.9 us.
    assert "| d128-h32x8-b8-k8k | 3733 (71.9 us) | 2986 (89.9 us) | 1.25 |" in page
    assert "| d128-h32x8-b8-k8k-fp8 | 3111 (43.1 us) | - |  |" in page
    assert "| d128-h32x8-b8-k8k-page16 | 1.03 | 1.00 |" in page and "| d128-h32x8-b8-k8k-fp8 | 0.60 | - |" in page
    assert not any(line.startswith("| d128-h32x8-b8-k8k | 1.0") for line in page.splitlines())
    chosen = [replace(row, provider=row.provider.removesuffix("-hopper")) for row in rows]
    headline = pages.fill_tables("<!-- table: headline -->\n<!-- end -->", chosen)
    assert f"| Hopper, decode | fa3 | {plain} | 0 | 1.250 | 1.250 | 1.250 |" in headline


def test_a_servers_steps_are_drawn_and_told(tmp_path):
    pytest.importorskip("matplotlib")
    rows = serving_rows()
    (path,) = plot.draw(rows, tmp_path, "svg")
    drawn = path.read_text()
    assert path.name == "serving.svg"
    for word in ("flashtile", "fa3", "d64-h64x8, page256", "d128-h16x2, contiguous", "speculative", "speed over fa3"):
        assert f"<!-- {word} -->" in drawn
    blocks = "".join(f"<!-- table: {n} -->\n<!-- end -->\n" for n in ("serving", "serving-summary", "serving-dense"))
    page = pages.fill_tables(blocks, rows)
    words = "80.0 (1.25) | " * 5 + "200.0 (0.50) | 80.0 (1.25) |"
    assert page.count(f" | {words}") == 12 and f"| d64-h64x8 page16 | {words}" in page
    # Of 84 cells 12 are lost: 1.25 ** (72 / 84) * 0.5 ** (12 / 84).
    assert "| flashtile | fa3 | 84 | 12 | 1.097 | 1.250 | 0.500 | d128-h32x8-prompts-page16 |" in page
    assert "| d128-h16x2-decode-mixed-contiguous-dense | 0.96 | 1.00 |" in page and page.count("-dense |") == 24
    headline = pages.fill_tables("<!-- table: headline -->\n<!-- end -->", rows)
    assert "| Hopper, a server's step | fa3 | 84 | 12 | 1.097 | 1.250 | 0.500 |" in headline


def test_dtypes_have_tables_of_their_own():
    blocks = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in ("forward-summary", "forward-fp16-summary"))
    page = pages.fill_tables(blocks, suite_rows("forward") + suite_rows("forward", "float16"))
    assert page.count("| flashtile-portable | fa2 | 36 | 0 | 1.400 |") == 2
    assert "Not measured yet." in pages.fill_tables(blocks, suite_rows("forward"))


def test_curves_hold_the_saved_numbers_and_skip_what_was_not_timed():
    rows = [r for r in suite_rows("forward") if r.case["head_dim"] == 64 and not r.case["causal"]]
    series = plot._series(plot.table.cells(rows), lambda r: r.tflops)
    assert [x for x, _ in series["eager"]] == [512, 1024, 2048, 4096]
    saved = {r.case["seqlen_k"]: r.tflops for r in rows if r.provider == "fa3"}
    assert dict(series["fa3"]) == saved


def test_nothing_saved_draws_nothing(tmp_path):
    assert plot.draw([], tmp_path, "svg") == []
    assert list(tmp_path.iterdir()) == []


def test_the_command_reads_rows_and_writes_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    results.append(tmp_path / "rows" / "a.jsonl", suite_rows("backward"))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: backward -->\n<!-- end -->\n")
    folders = ["--results", str(tmp_path / "rows"), "--plots", str(tmp_path / "plots"), "--pages", str(page)]
    assert plot.main([*folders, "--format", "png"]) == 0
    assert (tmp_path / "plots" / "backward.png").read_bytes().startswith(b"\x89PNG")
    assert page.read_text().count("| backward-d") == 24
