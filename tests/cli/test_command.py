"""The command itself: what it says about a machine and a call, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch

import flashtile
from flashtile.backends.gpu import build
from flashtile.cli import info, main
from flashtile.ops import dispatch


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info_says_what_torch_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["flashtile"] == flashtile.__version__
    assert facts["torch"] == torch.__version__
    assert facts["cpu_threads"] == torch.get_num_threads()
    assert len(facts["gpus"]) == torch.cuda.device_count()
    usable = {row["name"]: row["usable"] for row in facts["backends"]}
    assert tuple(usable) == dispatch.NAMES
    assert usable["cpu"]
    # Usable and without a reason against it are one and the same.
    assert all(row["usable"] == (not row["reasons"]) for row in facts["backends"])
    if not torch.cuda.is_available():
        assert not usable["hopper"] and not usable["portable"]
    table = run(capsys, "info")[1]
    assert all(word in table for word in (torch.__version__, *dispatch.NAMES, facts["launcher"]))


@pytest.mark.parametrize(
    ("triton", "gpu", "amd", "expected"),
    [
        (False, True, None, "not applicable (needs Triton, which is not installed)"),
        (True, False, None, "not applicable (no GPU that torch can use)"),
        (True, True, "7.0", "triton (AMD)"),
        (True, True, None, "triton (FLASHTILE_LAUNCHER=triton)"),
    ],
)
def test_info_says_what_launches_kernels(
    triton: bool, gpu: bool, amd: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: triton or None)
    build._no_compiler.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "hip", amd)
    monkeypatch.setenv("FLASHTILE_LAUNCHER", "triton")
    monkeypatch.setattr(build, "launcher", build.launcher.__wrapped__)  # past its cache
    assert info.launcher() == expected
    build._no_compiler.cache_clear()


CALLS = [
    (["--seqlen", "300", "--head-dim", "64"], {}, {}),
    (["--causal", "--grad", "--deterministic"], {"causal": True, "deterministic": True}, {}),
    (["--kv-heads", "2", "--window", "17", "-1", "--softcap", "30"], {"window_size": (17, -1), "softcap": 30.0}, {}),
    (["--seqlen-q", "1", "--dtype", "bfloat16", "--dropout", "0.1"], {"dropout_p": 0.1}, {}),
    (["--alibi", "--sinks", "--head-dim-v", "32"], {}, {"alibi_slopes": (4,), "sinks": (4,)}),
    (["--bias", "--batch", "3"], {}, {"attn_bias": (1, 4, 1, 300)}),
]


@pytest.mark.parametrize(("flags", "keywords", "extras"), CALLS)
def test_explain_says_what_the_library_says_of_real_tensors(
    capsys: pytest.CaptureFixture[str], flags: list[str], keywords: dict, extras: dict
) -> None:
    given = dict(zip(flags, [*flags[1:], ""], strict=True))
    dtype = getattr(torch, given.get("--dtype", "float32"))
    batch, seqlen_q = int(given.get("--batch", 1)), int(given.get("--seqlen-q", 300))
    grad = "--grad" in flags
    q = torch.zeros(batch, seqlen_q, 4, 64, dtype=dtype, requires_grad=grad)
    k = torch.zeros(batch, 300, int(given.get("--kv-heads", 4)), 64, dtype=dtype, requires_grad=grad)
    v = torch.zeros(*k.shape[:3], int(given.get("--head-dim-v", 64)), dtype=dtype, requires_grad=grad)
    tensors = {name: torch.zeros(shape) for name, shape in extras.items()}
    base = ["--seqlen", "300", "--heads", "4", "--head-dim", "64", "--device", "cpu"]
    code, out, _ = run(capsys, "explain", *base, *flags)
    assert code == 0
    assert out == flashtile.explain(q, k, v, **keywords, **tensors) + "\n"


def test_explain_speaks_of_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "--arch", "9.0", "--grad", "--dtype", "bfloat16")
    assert code == 0
    assert "compute capability 9.0" in out
    assert out.count("not cpu: needs cpu tensors, these are on cuda") == 2
    chosen = [line.split(":")[1].strip() for line in out.splitlines() if line.startswith(("forward", "backward"))]
    assert set(chosen) <= {"hopper", "portable"}
    assert run(capsys, "explain", "--gpu", "H100", "--grad", "--dtype", "bfloat16")[1] == out
    code, _, err = run(capsys, "explain", "--arch", "7.0", "--backend", "portable")
    assert code == 2
    assert "needs compute capability 8.0 or later, this device is 7.0" in err


def test_explain_takes_caches_functions_and_8_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    q, new = torch.zeros(3, 2, 4, 64), torch.zeros(3, 2, 2, 64)
    pages, table = torch.zeros(12, 16, 2, 64, dtype=torch.float8_e4m3fn), torch.zeros(3, 4, dtype=torch.int32)
    scale = torch.ones(2)
    sizes = {"--seqlen-q": 2, "--seqlen-k": 60, "--batch": 3, "--heads": 4, "--kv-heads": 2, "--head-dim": 64}
    base = [str(word) for each in sizes.items() for word in each]
    paged = ["--page-size", "16", "--cache-dtype", "float8_e4m3fn", "--append", "--causal", "--device", "cpu"]
    want = flashtile.explain(
        q, k_cache=pages, v_cache=pages.clone(), cache_seqlens=9, page_table=table + torch.arange(12).view(3, 4).int(),
        k=new, v=new, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    assert run(capsys, "explain", *base, *paged) == (0, want + "\n", "")
    assert "decode: hopper" in run(capsys, "explain", *base, *paged[:-2], "--varlen", "--gpu", "H100")[1]
    file = tmp_path / "model.py"
    file.write_text("def bend(score, b, h, q_idx, kv_idx):\n    return score * 0.5\n")
    said = run(capsys, "explain", "--score-mod", f"{file}:bend", "--gpu", "H100")[1]
    assert "score_mod (a function of the user's)" in said and "forward: hopper" in said
    said = run(capsys, "explain", "--fp8", "--grad", "--gpu", "H100")[1]
    assert "quantized: hopper" in said and "backward: hopper" in said


BAD = [
    (["explain", "--append"], "--append"),
    (["explain", "--cache-dtype", "float8_e5m2"], "--cache-dtype"),
    (["explain", "--cache", "--mask"], "--mask"),
    (["explain", "--score-mod", "nowhere.py:bend"], "--score-mod"),
    (["explain", "--heads", "1099511627776", "--batch", "1099511627776"], "--seqlen"),
    (["--bogus"], "--bogus"),
    (["nonsense"], "nonsense"),
    (["info", "--bogus"], "--bogus"),
    (["info", "more"], "more"),
    (["explain", "--seqlen", "0"], "--seqlen"),
    (["explain", "--seqlen", "-1"], "--seqlen"),
    (["explain", "--seqlen", "1e3"], "integer"),
    (["explain", "--seqlen-k", "0"], "--seqlen-k"),
    (["explain", "--window", "5"], "--window"),
    (["explain", "--window", "-2", "0"], "--window"),
    (["explain", "--heads", "4", "--kv-heads", "3"], "--kv-heads"),
    (["explain", "--dropout", "1"], "dropout"),
    (["explain", "--softcap", "nan"], "softcap"),
    (["explain", "--dtype", "int8"], "int8"),
    (["explain", "--backend", "warp"], "warp"),
    (["explain", "--backend", "hopper", "--device", "cpu"], "hopper"),
    (["explain", "--arch", "ninety"], "--arch"),
    (["explain", "--arch", "9.0", "--device", "cpu"], "--device"),
    (["explain", "--arch", "9.0", "--dtype", "float64"], "no float64"),
]


@pytest.mark.parametrize(
    ("arguments", "word"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("flashtile")
    assert word in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["-h"], ["info", "--help"], ["explain", "--help"]],
)
def test_help_shows_usage_and_examples(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: flashtile")
    # One example a line, not wrapped into a paragraph.
    assert any(line.strip().startswith("flashtile ") for line in out.splitlines())


@pytest.mark.parametrize("command", ["demo", "analyze", "explore", "reproduce", "kernels"])
def test_a_command_that_went_says_where(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and f"flashtile-lab {command}" in err and "pip install ./extras" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, flashtile.__version__ + "\n", "")


def _no_python_memory() -> None:
    raise MemoryError


def _no_torch_memory() -> None:
    torch.empty(2**55)


@pytest.mark.parametrize("failure", [_no_python_memory, _no_torch_memory])
def test_no_memory_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: object
) -> None:
    monkeypatch.setattr(info, "machine", failure)
    code, _, err = run(capsys, "info")
    assert code == 2
    assert re.match(r"flashtile: not enough memory: \w.+\n$", err)


def test_interruption_is_code_130_and_bugs_are_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "machine", interrupted)
    code, out, err = run(capsys, "info")
    assert code == 130 and "Traceback" not in out + err

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(info, "machine", broken)
    with pytest.raises(ZeroDivisionError):
        main(["info"])


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.long
def test_a_missing_extra_is_named_with_its_remedy() -> None:
    done = _python("import sys; sys.modules['typer'] = None; from flashtile.cli import main; sys.exit(main(['info']))")
    assert done.returncode == 2
    assert done.stderr == 'flashtile: typer is not installed: pip install "flashtile[cli]"\n'


@pytest.mark.long
def test_importing_the_library_loads_no_command() -> None:
    optional = ("typer", "click", "rich", "matplotlib", "flashtile.cli", "flashtile_lab")
    done = _python(f"import flashtile, sys; print([m for m in {optional} if m in sys.modules])")
    assert done.stdout == "[]\n"


@pytest.mark.long
def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashtile", "explain", "--seqlen", "-1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seqlen" in done.stderr and done.stderr.count("\n") == 1


def test_a_shape_of_too_few_numbers_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flashtile import cli

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("FLASHTILE_TILES", str(tmp_path / "tiles.json"))
    assert cli.main(["tune", "--shape", "1,2"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "--shape" in shown
