"""The wheel of kernels: its lists, the numbers that stand for all others, and what is looked for in what was built."""

from __future__ import annotations

import importlib.util
import random
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

import flashtile
from flashtile import InvalidInputError
from flashtile.backends.gpu import ahead
from flashtile.backends.gpu.archive import Archive, Found
from flashtile.cli import build, models
from flashtile.cli.app import app
from flashtile.cli.models import Call, LayerShape, Uses

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
COMMAND: Any = typer.main.get_command(app)
BUILD = COMMAND.commands["build"]


def _keys(calls: Iterable[Call], arch: str) -> set[bytes]:
    recorder = ahead.Recorder(lists=True)
    token = ahead.RECORDER.set(recorder)
    try:
        assert build.list_launches(list(calls), arch) == [] and not recorder.left_out
    finally:
        ahead.RECORDER.reset(token)
    return recorder.asked


LAYERS = {
    "training": (LayerShape(32, 8, 128, True), Uses(torch.bfloat16)),
    "full": (LayerShape(32, 32, 256, False), Uses(torch.float16)),
    "window": (LayerShape(8, 4, 256, True, 1024), Uses(torch.bfloat16, backward=False)),
    "serving": (LayerShape(32, 8, 128, True), Uses(torch.bfloat16, False, False, pages=(16,), appends=(True,))),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_numbers_need_no_other_kernels(arch: str, name: str) -> None:
    """Of sequences, and of rows of each."""
    shape, uses = LAYERS[name]
    draw = random.Random(name)
    if uses.pages:
        # Past 32 sequences what a program searches is another width for each power of two.
        batches = [1, *(draw.choice([*range(3, 32), *range(130, 256)]) for _ in range(5))]
        lengths = [draw.randint(40, 8000) for _ in range(5)]
    else:
        batches, lengths = [2, 5, 24, 48], [draw.randint(20, 9000) for _ in range(12)]
    kept = _keys(models.calls(shape, uses), arch)
    drawn = _keys(models.calls(shape, uses._replace(batches=tuple(batches), lengths=tuple(lengths))), arch)
    assert drawn and drawn <= kept


def test_packed_sequences_attend_to_themselves() -> None:
    calls = [given for _, _, given in models.calls(*LAYERS["training"]) if "cu_seqlens_q" in given]
    assert calls and all(given["cu_seqlens_q"] is given["cu_seqlens_k"] for given in calls)


@pytest.mark.parametrize("file", ["calls.txt", "few.txt"])
def test_each_line_names_calls(file: str) -> None:
    lines = [line for line in (ROOT / "kernels" / file).read_text().splitlines() if line and not line.startswith("#")]
    options = [BUILD.make_context("line", [*line.split(), "--arch=sm_90", "--out=x"]).params for line in lines]
    calls = [build.wanted_calls(each) for each in options]
    assert all(calls) and len(build.list_calls(ROOT / "kernels" / file, BUILD)) == sum(map(len, calls))


def test_of_latent_rows_values_are_views() -> None:
    (*_, latent) = models.models()["deepseek-v3"]
    uses = Uses(torch.bfloat16, pages=(64,), lengths=(64,), batches=(2,))
    calls = list(models.calls(latent, uses))
    assert {len(given) for _, given, _ in calls} == {1, 2}
    assert all(options["v_cache"]._base is options["k_cache"] for _, _, options in calls)
    assert len(_keys(calls, "sm_90")) > 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--heads 4 --jobs 2", "^--list: has in line 2 what is not an option of layers"),
        ("--serving --heads 4", "^--serving: is given, but no --pages"),
        ("--heads 4,3/2", "^--heads: is 3/2, the first must be a multiple"),
        ("--model llama9", "^--model: is 'llama9'"),
    ],
)
def test_a_wrong_line_is_refused(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "list").write_text(f"# The second is wrong.\n{line}\n")
    with pytest.raises(InvalidInputError, match=why):
        build.list_calls(tmp_path / "list", BUILD)


def test_what_is_not_asked_for_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is there already is not built again."""
    built: list[int] = []
    about: dict[str, Any] = {"arch": "sm_80", "kernel": "k", "name": "k", "num_warps": 4, "shared": 0}
    about |= {"leaves": [], "maps": [], "files": ["nn.py"]}

    def compiled(recorder: ahead.Recorder, *_: Any) -> None:
        built.append(len(recorder.launches))
        for key in recorder.launches:
            recorder.add(key, Found({**about, "key": key.hex()}, b"code"))

    monkeypatch.setattr(build, "_compile", compiled)
    (tmp_path / "list").write_text("--heads 4 --head-dim 64 --seqlen 512 --batch 2 --forward --dtype bf16,fp16  # two")
    place = str(tmp_path / "k.ftk")

    def run(*words: str) -> set[bytes]:
        assert COMMAND.main(["build", "--arch", "sm_80", "-o", place, *words], standalone_mode=False) is None
        return set(Archive(place))

    both = run("--list", str(tmp_path / "list"))
    one = ["--heads", "4", "--head-dim", "64", "--seqlen", "512", "--batch", "2", "--forward"]
    assert len(both) == 2 and run(*one) == both
    exactly = run(*one, "--exact")
    assert len(exactly) == 1 and exactly < both and built == [2, 0, 0]
    assert "1 kernels, 0 of them new" in capsys.readouterr().out


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_wheel", ROOT / "tools" / "kernels_wheel.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


VERSION = flashtile.__version__
INFO = f"flashtile_kernels-{VERSION}.dist-info/"
GOOD = {
    "flashtile_kernels/__init__.py": "",
    "flashtile_kernels/sm_80.ftk": "kernels",
    INFO + "METADATA": f"Requires-Dist: flashtile=={VERSION}\n",
    **dict.fromkeys((INFO + "RECORD", INFO + "WHEEL", INFO + "licenses/LICENSE"), ""),
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"flashtile_kernels/sm_80.ftk": None}, "lacks flashtile_kernels/sm_80.ftk"),
        ({"flashtile_kernels/sm_90.ftk": ""}, "should not hold flashtile_kernels/sm_90.ftk"),
        ({"flashtile_kernels/sm_80.ftk": "x" * 6_000_001}, "has 6,000,001 bytes, at most 6,000,000"),
        ({INFO + "METADATA": "Requires-Dist: flashtile\n"}, f"does not require flashtile {VERSION} alone"),
    ],
)
def test_what_a_wheel_holds_is_looked_at(tmp_path: Path, change: dict[str, str | None], why: str | None) -> None:
    wheel = tmp_path / f"flashtile_kernels-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in (GOOD | change).items():
            if text is not None:
                packed.writestr(name, text)
    found = _tool().complaints(wheel, ["sm_80"], VERSION)
    assert found == [] if why is None else len(found) == 1 and why in found[0]


def test_it_is_of_this_release() -> None:
    about = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text())["project"]
    assert (about["version"], about["dependencies"]) == (VERSION, [f"flashtile=={VERSION}"])
    assert (ROOT / "kernels" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
