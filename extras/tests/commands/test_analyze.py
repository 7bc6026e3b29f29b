"""`flashtile-lab analyze`, from its flags to its tables and its JSON."""

import json

import pytest
from typer.testing import CliRunner

from flashtile_lab.commands.analyze import app

COMMANDS = ["memory", "traffic", "flops", "roofline", "tiles", "peak", "transformer", "decode", "ring"]


def run(*args):
    # A wide terminal, so that no number is broken over two lines.
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(args))


def records(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("args", "cells"),
    [
        (["memory"], ["0.52", "0.10", "33.55", "0.57", "58.5x", "536.87", "2.20", "244.5x"]),
        (["traffic"], ["34.60", "67.63", "4,096", "64"]),
        (["traffic", "--head-dim", "768", "--dtype", "fp32"], ["37.75", "268.44", "12.58", "331.35"]),
        (["flops"], ["8.59", "21.47", "0.50"]),
        (["roofline"], ["989.4", "compute", "memory"]),
        (["tiles", "--block", "128"], ["128x128", "112.0", "113.0", "yes"]),
        (["peak"], ["16,777,216", "24,832", "675.6x"]),
        (["transformer"], ["18.52", "56.10", "2.15", "17.18"]),
        (["decode"], ["4.2", "536.9", "4.0", "28.0", "461.4", "16", "131,072"]),
        (["decode", "--page-size", "16", "--cache-dtype", "float8"], ["268.4", "8.0", "0.01%", "14.0"]),
        (["ring"], ["4,096", "8,192", "137.41", "2.11", "53.21", "661", "0.925"]),
        (["ring", "--backward", "--ulysses", "8", "--gpus", "64"], ["0.85"]),
    ],
)
def test_tables_show_the_figures(args, cells):
    result = run(*args)
    assert result.exit_code == 0, result.output
    words = result.stdout.replace("│", " ").split()
    assert [cell for cell in cells if cell not in words] == []


def test_options_reach_the_models():
    assert records("flops", "--heads", "2", "--batch", "3", "--causal")[0]["forward_exps"] == 6 * 4096 * 4097 // 2
    full, causal = records("traffic"), records("traffic", "--causal")
    assert causal[1]["tile_visits"] == 64 * 65 // 2 < full[1]["tile_visits"]
    assert records("memory", "--block", "128x32", "--seqlen", "64")[0]["tiled_tiles_bytes"] == 2 * 64 * 192 + 2 * 4096
    (step,) = records("decode", "--seqlen", "4k", "--batch", "2", "--seqlen-q", "3", "--page-size", "5")
    assert step["kv_bytes"] == 2 * 4096 * 8 * 2 * 128 * 2 and step["page_table_bytes"] == 2 * 820 * 4
    assert step["flops"] == 4 * 128 * 2 * 32 * (4094 + 4095 + 4096) and step["programs"] == 16
    by_heads = records("decode", "--heads-kv", "8,1", "--seqlen", "1k,4k", "--block", "16x128")
    assert [(one["num_heads_kv"], one["seqlen"]) for one in by_heads] == [(8, 1024), (8, 4096), (1, 1024), (1, 4096)]
    assert [one["programs"] for one in by_heads] == [8, 8, 2, 2]
    older = records("decode", "--device", "A100")[0]
    assert older["roofline"]["time_s"] == pytest.approx(older["total_bytes"] / 2.039e12)
    (one,) = records(
        "ring", "--gpus", "16", "--tokens", "1k", "--heads-kv", "4", "--window", "100", "--layout", "striped"
    )
    assert (one["world"], one["tokens"], one["steps"], one["num_heads_kv"]) == (16, 1024, 16, 4)
    assert one["sent_bytes"] == 15 * 1024 * 4 * 256 * 2
    links = ["--gpus", "2", "--tflops", "1000", "--gb-per-s", "1", "--latency-us", "5", "--heads-kv", "1"]
    assert records("ring", *links)[0]["transfer_s"] == pytest.approx(5e-6 + 8192 * 512 / 1e9)
    (far,) = records("ring", *links, "--node", "1", "--node-gb-per-s", "2", "--node-latency-us", "9", "--backward")
    assert far["transfer_s"] == pytest.approx(2 * 9e-6 + 8192 * (512 + 1024) / 2e9)
    (full,) = records("ring", "--gpus", "2", "--no-causal", "--scheme", "allgather", "--dtype", "float32")
    assert full["flops"] == 4 * 128 * 32 * 16384**2 and full["sent_bytes"] == 8192 * 8 * 256 * 4
    grouped = records("transformer", "--seqlen", "4096", "--heads-kv", "8")[0]
    assert grouped["kv_cache_bytes"] * 4 == records("transformer", "--seqlen", "4096")[0]["kv_cache_bytes"]


def test_tiles_respect_the_budget():
    found = records("tiles", "--on-chip-kb", "100", "--head-dim", "128")
    assert found
    assert all(tile["total_bytes"] <= 100 * 1024 for tile in found)
    assert records("tiles", "--on-chip-kb", "1") == []
    assert "Nothing fits" in run("tiles", "--on-chip-kb", "1").stdout
    (asked,) = records("tiles", "--on-chip-kb", "112", "--block", "128")
    assert asked["fits"] is False


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_unknown_flags(command):
    assert run(command, "--help").exit_code == 0
    assert run(command, "--bogus").exit_code == 2


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["memory", "--seqlen", "0"], "--seqlen"),
        (["peak", "--seqlen", "4096,x"], "--seqlen"),
        (["flops", "--seqlen", "9" * 400], "--seqlen"),
        (["memory", "--dtype", "int3"], "int3"),
        (["memory", "--block", "0"], "--block"),
        (["memory", "--head-dim", "0"], "head-dim"),
        (["flops", "--device", "X9"], "X9"),
        (["roofline", "--peak-tflops", "100"], "--bandwidth-tbps"),
        (["roofline", "--peak-tflops", "0", "--bandwidth-tbps", "1"], "greater than 0"),
        (["tiles", "--on-chip-kb", "0"], "--on-chip-kb"),
        (["transformer", "--heads", "3"], "num_heads"),
        (["decode", "--heads-kv", "5"], "num_heads_kv"),
        (["decode", "--dtype", "float32"], "16-bit"),
        (["ring", "--gpus", "0"], "--gpus"),
        (["ring", "--scheme", "star"], "scheme"),
        (["ring", "--gb-per-s", "0"], "bytes_per_s"),
    ],
)
def test_bad_input_ends_with_code_2_and_no_traceback(args, word):
    result = run(*args, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert word in result.stderr
    assert "Traceback" not in result.stderr
