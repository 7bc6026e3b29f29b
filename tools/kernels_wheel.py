"""Checks the wheel of kernels in a folder: what it holds, for which release, and that no file of it is too large.

``python tools/kernels_wheel.py DIST sm_80 sm_90`` names the architectures that it must have. With ``--again LIST`` some
kernels of each are compiled again from the list, without any cache, and must be the same byte for byte.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flashtile_kernels"
MOST_BYTES = 6_000_000
# Kernels of an architecture that are compiled again.
SAMPLE = 2
METADATA = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")


def complaints(wheel: Path, archs: list[str], version: str) -> list[str]:
    """One line for each thing that is wrong with the wheel of a release."""
    about = f"{PACKAGE}-{version}.dist-info"
    if wheel.name != f"{PACKAGE}-{version}-py3-none-any.whl":
        return [f"{wheel.name} is no wheel of flashtile {version} for any machine"]
    with zipfile.ZipFile(wheel) as packed:
        files = {each.filename: each.file_size for each in packed.infolist()}
        required = packed.read(f"{about}/METADATA").decode().splitlines()
    expected = {f"{PACKAGE}/__init__.py", *(f"{about}/{each}" for each in METADATA)}
    expected |= {f"{PACKAGE}/{arch}.ftk" for arch in archs}
    found = [f"{wheel.name} lacks {each}" for each in sorted(expected - files.keys())]
    found += [f"{wheel.name} should not hold {each}" for each in sorted(files.keys() - expected)]
    if f"Requires-Dist: flashtile=={version}" not in required:
        found.append(f"{wheel.name} does not require flashtile {version} alone")
    large = {name: size for name, size in files.items() if size > MOST_BYTES}
    return found + [f"{name} has {size:,} bytes, at most {MOST_BYTES:,} are allowed" for name, size in large.items()]


def described(wheel: Path, archs: list[str]) -> list[str]:
    """A line for each architecture: how many kernels there are, and their bytes."""
    found = []
    for arch, opened in _archives(wheel, archs):
        size = opened.place.stat().st_size
        found.append(f"{arch}: {opened.count} kernels, {size:,} bytes")
    return found


def built_again(wheel: Path, archs: list[str], calls: Path) -> list[str]:
    """One line for each kernel of the sample that is another when it is compiled here."""
    from flashtile.backends.gpu import ahead

    found = []
    for arch, opened in _archives(wheel, archs):
        launches = _launches(calls, arch)
        if sorted(launches) != sorted(opened):
            found.append(f"{arch} has {opened.count} kernels, the list has {len(launches)}, or others")
            continue
        step = -(-len(launches) // SAMPLE)
        for key in sorted(launches)[::step]:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TRITON_CACHE_DIR"] = folder
                _, made = ahead.compiled_line(ahead.as_json(launches[key]), int(arch.removeprefix("sm_")))
            kept: Any = opened.find(key)
            if isinstance(made, str) or (made.about, made.code) != (kept.about, kept.code):
                found.append(f"{arch}: {launches[key].kernel} is another when it is built again")
            else:
                print(f"{arch}: {launches[key].kernel} is the same, {len(made.code):,} bytes")
    return found


def _launches(calls: Path, arch: str) -> dict[bytes, Any]:
    import typer

    from flashtile.backends.gpu import ahead
    from flashtile.cli.app import app
    from flashtile.cli.build import list_calls, list_launches

    recorder = ahead.Recorder(lists=True)
    token = ahead.RECORDER.set(recorder)
    try:
        command: Any = typer.main.get_command(app)
        list_launches(list_calls(calls, command.commands["build"]), arch)
    finally:
        ahead.RECORDER.reset(token)
    return recorder.launches


def _archives(wheel: Path, archs: list[str]) -> list[tuple[str, Any]]:
    from flashtile.backends.gpu.archive import Archive

    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return [(arch, Archive(folder / PACKAGE / f"{arch}.ftk")) for arch in archs]


def main() -> int:
    """Prints what is wrong; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("archs", nargs="+")
    parser.add_argument("--again", type=Path, metavar="LIST")
    asked = parser.parse_args()
    from flashtile import __version__

    (wheel,) = asked.dist.glob("*.whl")
    found = complaints(wheel, asked.archs, __version__)
    if not found:
        print("\n".join(described(wheel, asked.archs)))
        found = [] if asked.again is None else built_again(wheel, asked.archs, asked.again)
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
