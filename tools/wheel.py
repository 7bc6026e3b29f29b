"""Checks what a folder's sdist and wheel hold, by name: every file of the package, and nothing else in the wheel."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def files(folder: str) -> set[str]:
    """The files of a folder, named from the root, without what Python leaves there and what is built there."""
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file())
    return {name for name in found if "__pycache__" not in name and not name.endswith((".ftk", ".whl"))}


def differences(dist: Path) -> list[str]:
    """One line for each file that is missing or too many."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    package = {each.removeprefix("src/") for each in files("src")}
    expected = package | {f"{name}-{version}.dist-info/{each}" for each in METADATA}
    found = [f"{wheel.name} lacks {each}" for each in sorted(expected - packed)]
    found += [f"{wheel.name} should not hold {each}" for each in sorted(packed - expected)]
    with tarfile.open(sdist) as archive:
        sources = {each.name.partition("/")[2] for each in archive if each.isfile()}
    wanted = {"pyproject.toml", "LICENSE"}.union(
        *map(files, ("src", "extras", "tests", "tools", "docs", "examples", "kernels"))
    )
    found += [f"{sdist.name} lacks {each}" for each in sorted(wanted - sources)]
    found += [f"{sdist.name} should not hold {each}" for each in sorted(sources) if each.endswith(".ftk")]
    print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size >> 10} KiB; {sdist.name}: {len(sources)} files")
    return found


if __name__ == "__main__":
    complaints = differences(Path(sys.argv[1]))
    print("\n".join(complaints), end="")
    sys.exit(bool(complaints))
