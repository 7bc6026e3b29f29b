"""The comparison of two trees' machine code says what differs, and reads binaries by their sections."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "same_code.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_code", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(code: str = "a", **numbers: int) -> dict[str, Any]:
    return {"code": code, "instructions": 100, "registers": 64, "spills": 0, "shared": 1024} | numbers


_NUMBERS = "instructions 100 -> {}, registers 64 -> {}, spills 0 -> 0, shared 1024 -> 1024"


@pytest.mark.parametrize(
    ("base", "here", "counts", "same", "wrong", "said"),
    [
        ({"k": _build()}, {"k": _build()}, False, 1, [], []),
        ({"k": _build()}, {"k": _build("b")}, False, 0, ["differs: k: " + _NUMBERS.format(100, 64)], []),
        ({"k": _build()}, {"k": _build(registers=65)}, False, 0, ["differs: k: " + _NUMBERS.format(100, 65)], []),
        ({"k": _build()}, {"k": _build("b", instructions=99)}, True, 0, [],
         ["does not grow: k: " + _NUMBERS.format(99, 64)]),
        ({"k": _build()}, {"k": _build("b", instructions=99, registers=65)}, True, 0,
         ["grows: k: " + _NUMBERS.format(99, 65)], []),
        ({"k": _build(), "l": _build()}, {"k": _build()}, True, 1, ["only at the base: l"], []),
        ({"k": _build()}, {"k": _build(), "l": _build()}, False, 1, [], ["only here: l"]),
        ({"k": _build()}, {"k": {"error": "x"}}, True, 0, ["does not build: k: x"], []),
        ({"k": {"error": "y"}}, {"k": {"error": "x"}}, False, 0, [], ["does not build at the base either: k: x"]),
        ({"k": {"error": "y"}}, {"k": _build()}, False, 0, [], ["builds only here: k"]),
    ],
)  # fmt: skip
def test_comparison(
    tool: ModuleType, base: Any, here: Any, counts: bool, same: int, wrong: list[str], said: list[str]
) -> None:
    assert tool.compared(base, here, counts) == (same, wrong, said)


def _elf(sections: list[tuple[str, bytes]]) -> bytes:
    """A file of the given sections, their names last."""
    names, offsets = b"\0", []
    for name, _ in [*sections, (".shstrtab", b"")]:
        offsets.append(len(names))
        names += name.encode() + b"\0"
    body, headers = b"", b""
    for offset, data in zip(offsets, [*(data for _, data in sections), names], strict=True):
        headers += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        body += data
    count = len(offsets)
    return b"\0" * 40 + struct.pack("<QIHHHHHH", 64 + len(body), 0, 64, 0, 0, 64, count, count - 1) + body + headers


def test_only_instructions_and_constants_count(tool: ModuleType) -> None:
    code = struct.pack("<QQQQ", 0x1234_0221, 7, 0x918, 0)  # one instruction and one NOP

    def read(*sections: tuple[str, bytes]) -> dict[str, Any]:
        return tool.code_of({"cubin": _elf(list(sections))})

    kernel = read((".debug_line", b"file.py"), (".text.kernel", code), (".nv.constant2.kernel", b"4"))
    assert kernel["instructions"] == 1
    assert read((".text.renamed", code), (".nv.constant2.renamed", b"4")) == kernel
    assert read((".text.kernel", code), (".nv.constant2.kernel", b"5"))["code"] != kernel["code"]
    assert read((".text.kernel", code[:8] + b"\1" + code[9:]), (".nv.constant2.kernel", b"4")) != kernel


def test_the_list_of_builds_is_found(tool: ModuleType) -> None:
    module = importlib.import_module(tool.list_module(TOOL.parents[1]))
    assert any("attention_forward" in job.label for job in module.jobs("sm_90a"))
