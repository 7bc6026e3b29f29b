"""Exported programs: sizes that vary, decompositions into PyTorch's operators, packages of AOTInductor, also in C++."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashtile
from flashtile import UnsupportedError, masks
from flashtile.nn import MultiheadAttention, TransformerBlock
from flashtile.ops import lists

attend, packed, cached = flashtile.attention, flashtile.attention_varlen, flashtile.attention_with_kvcache
ANY = torch.export.Dim.DYNAMIC
BOTH, FIRST = {0: ANY, 1: ANY}, {0: ANY}


class Calling(nn.Module):
    """A function as a module, which ``torch.export`` wants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cache(batch: int, rows: int, capacity: int) -> tuple[Tensor, ...]:
    caches = (torch.randn(batch, capacity, 2, 16) for _ in range(2))
    return torch.randn(batch, rows, 4, 16), *caches, int32(*range(3, 3 + batch))


def _new(batch: int, rows: int, capacity: int) -> tuple[Tensor, ...]:
    return *_cache(batch, rows, capacity), *(torch.randn(batch, rows, 2, 16) for _ in range(2))


def _pages(batch: int, rows: int, pages: int) -> tuple[Tensor, ...]:
    q, _, _, lengths = _cache(batch, rows, 1)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    return q, *(torch.randn(batch * pages, 4, 2, 16) for _ in range(2)), lengths, table


def _in_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    return layer


# A call, which dimensions of its tensors vary, and two lots of them.
VARYING: dict[str, tuple[Callable[..., Any], list[dict], list[tuple[Tensor, ...]]]] = {
    "appended": (
        lambda q, k, v, n, new_k, new_v: cached(q, k, v, cache_seqlens=n, k=new_k, v=new_v),
        [BOTH, BOTH, BOTH, FIRST, BOTH, BOTH], [_new(2, 3, 20), _new(3, 2, 30)],
    ),
    "cached": (
        lambda q, k, v, n: cached(q, k, v, cache_seqlens=n), [BOTH, BOTH, BOTH, FIRST],
        [_cache(2, 3, 20), _cache(3, 1, 30)],
    ),
    "paged": (
        lambda q, k, v, n, table: cached(q, k, v, cache_seqlens=n, page_table=table),
        [BOTH, FIRST, FIRST, FIRST, BOTH], [_pages(2, 3, 4), _pages(3, 2, 6)],
    ),
    "packed": (
        lambda x, bounds: packed(x, x, x, bounds, bounds, *[(bounds[1:] - bounds[:-1]).max().item()] * 2, causal=True),
        [FIRST, FIRST], [(torch.randn(7, 2, 16), int32(0, 3, 7)), (torch.randn(12, 2, 16), int32(0, 3, 7, 12))],
    ),
    "rows that data choose": (
        lambda x, keep, ids: (
            lambda y, of: attend(y, y, y, block_mask=masks.documents(of))
        )(x[keep][None], ids[keep][None]),
        [FIRST, FIRST, FIRST],
        [(torch.randn(n, 4, 16), torch.arange(n) % 3 < 2, torch.arange(n) // 3) for n in (9, 14)],
    ),
    "in torch's encoder": (
        _in_encoder(), [BOTH, BOTH], [(torch.randn(n, 3 * n, 32), torch.randn(3 * n, 3 * n)) for n in (2, 3)],
    ),
}  # fmt: skip


@pytest.mark.one_in(len(VARYING))
@pytest.mark.parametrize("name", VARYING)
def test_sizes_vary_after_export_and_loading(name: str) -> None:
    function, sizes, (first, second) = VARYING[name]
    with torch.no_grad():
        program = torch.export.export(Calling(function), first, dynamic_shapes=(tuple(sizes),), strict=name == "packed")
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        run = torch.export.load(file).module()
        for given in (first, second):
            copies = [x.clone() for x in given]  # caches are written
            torch.testing.assert_close(run(*copies), function(*given))


# What calls have besides q, of 4 heads, and k and v, of 2.
DECOMPOSED: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "capped": lambda q, k: {"causal": True, "softcap": 3.0},
    "window": lambda q, k: {"window_size": (3, 2), "sinks": torch.ones(4), "alibi_slopes": torch.arange(4.0)},
    "mask and bias": lambda q, k: {
        "attn_mask": q[:, None, :, :1, 0] > -1, "attn_bias": k[:, None, None, :, 0, 0], "return_lse": True,
        "return_max_scores": True,
    },
    "chunks": lambda q, k: {"attention_chunk": 5, "causal": True, "return_lse": True},
    "intervals": lambda q, k: {"block_mask": masks.rows(0, (q[:, None, :, 0, 0] > 0).int() + 3)},
    "functions": lambda q, k: {
        "mask_mod": lambda b, h, i, j: (i + j + b) % 3 != 0, "score_mod": lambda s, b, h, i, j: s + (i - j) * 0.5,
    },
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_programs_have_pytorchs_operators_alone(name: str) -> None:
    def call(q: Tensor, k: Tensor) -> Any:
        return attend(q, k, k, **DECOMPOSED[name](q, k))

    def given(batch: int, rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, rows, 4, 8), torch.randn(batch, rows + 4, 2, 8)

    program = torch.export.export(Calling(call), given(2, 9), dynamic_shapes=((BOTH, BOTH),))
    plain = program.run_decompositions(flashtile.decompositions())
    assert "flashtile" in program.graph_module.code and "flashtile" not in plain.graph_module.code
    for tensors in (given(2, 9), given(3, 5)):
        torch.testing.assert_close(plain.module()(*tensors), call(*tensors))


def test_decomposed_programs_take_any_number_of_rows_that_data_choose() -> None:
    def call(x: Tensor, keep: Tensor) -> Any:
        x = x[keep][None]
        return attend(x, x, x, causal=True, return_lse=True, return_max_scores=True)

    x, rows = torch.randn(9, 2, 8), torch.arange(9)
    plain = torch.export.export(Calling(call), (x, rows < 4)).run_decompositions(flashtile.decompositions())
    for keep in (rows < 4, rows % 2 == 0, rows < 1, rows < 0):
        torch.testing.assert_close(plain.module()(x, keep), call(x, keep))


def test_what_is_not_decomposed_is_refused() -> None:
    x, bounds = torch.randn(1, 16, 2, 8), int32(0, 7, 16)
    blocks = flashtile.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16)
    calls = {
        "packed sequences": lambda x: packed(x[0], x[0], x[0], bounds, bounds),
        "lists of blocks": lambda x: attend(x, x, x, block_mask=blocks),
        "dropout": lambda x: attend(x, x, x, dropout_p=0.5),
    }
    for what, call in calls.items():
        program = torch.export.export(Calling(call), (x,))
        with pytest.raises(UnsupportedError, match=f"^{what}: not among"):
            program.run_decompositions(flashtile.decompositions())


def test_empty_lists_of_a_block_mask_may_be_none() -> None:
    """AOTInductor makes them so."""
    found = (
        torch.ops.flashtile.block_kinds(torch.empty(0), *empty, "", (1, 1), (40, 40), (16, 16))
        for empty in (((), ()), (None, None))
    )
    want = lists.evaluated(None, (1, 1), (40, 40), (16, 16), (0, 3), torch.device("cpu")).unflatten(0, (1, 1))
    assert all(torch.equal(each, want) for each in found) and want.unique().numel() == 2


@pytest.mark.long
def test_a_package_of_aotinductor_runs(tmp_path: Path) -> None:
    """Of all that such a model may call, with a batch that varies."""

    def call(x: Tensor, pages: Tensor) -> Tensor:
        batch, rows = x.shape[:2]
        bounds, y = torch.arange(batch + 1, dtype=torch.int32) * rows, x.flatten(0, 1)
        blocks = flashtile.create_block_mask(lambda b, h, i, j: i >= j, None, None, rows, rows)
        table = torch.arange(4, dtype=torch.int32).expand(batch, 4)
        lengths = torch.full((batch,), 9, dtype=torch.int32)
        found = packed(y, y, y, bounds, bounds, causal=True).view_as(x) + attend(x, x, x, block_mask=blocks)
        found = found + attend(x, x, x, mask_mod=lambda b, h, i, j: (i + j) % 3 != 0)
        return found + cached(x, pages, pages.clone(), cache_seqlens=lengths, page_table=table)

    pages = torch.randn(8, 4, 2, 16)
    with torch.no_grad():
        program = torch.export.export(Calling(call), (torch.randn(3, 8, 4, 16), pages), dynamic_shapes=((FIRST, {}),))
        run = torch._inductor.aoti_load_package(package(program, tmp_path / "net.pt2"))
        for batch in (3, 5):
            x = torch.randn(batch, 8, 4, 16)
            torch.testing.assert_close(run(x, pages), call(x, pages))


def package(program: torch.export.ExportedProgram, path: Path) -> str:
    found: str = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return found


PAGE = Path(__file__).parents[1] / "docs" / "compiled.md"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("with_python", [True, False])
def test_packages_run_in_the_pages_program(with_python: bool, tmp_path: Path) -> None:
    """With Python in it, and without it once attention is decomposed; else it says what the page says."""
    code = re.search(r"```cpp\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    lines = code[1].splitlines()
    source, torchs = tmp_path / "main.cpp", Path(torch.__path__[0])
    source.write_text("\n".join(line for line in lines if with_python or "Py" not in line))
    flags = [f"-I{torchs}/include", f"-I{torchs}/include/torch/csrc/api/include", f"-L{torchs}/lib"]
    flags += [f"-Wl,-rpath,{torchs}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    if with_python:
        at = sysconfig.get_config_vars()
        flags += [f"-I{at['INCLUDEPY']}", f"-L{at['LIBDIR']}", f"-Wl,-rpath,{at['LIBDIR']}", "-ltorch_python"]
        flags += [f"-lpython{at['LDVERSION']}", *shlex.split(f"{at['LIBS']} {at['SYSLIBS']}")]
    subprocess.run(["g++", "-std=c++20", str(source), "-o", str(tmp_path / "main"), *flags], check=True)

    model, x = TransformerBlock(MultiheadAttention(64, 4, causal=True, rotary=True)).eval(), torch.arange(2048).sin()
    x = x.view(2, 16, 64)
    with torch.no_grad():
        program, want = torch.export.export(model, (x,)), model(x).abs().sum()
        decomposed = program.run_decompositions(flashtile.decompositions())
        packages = {kind: package(each, tmp_path / f"{kind}.pt2") for kind, each in
                    (("operators", program), ("plain", decomposed))}  # fmt: skip
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for kind, path in packages.items():
        run = subprocess.run([str(tmp_path / "main"), path], env=env, capture_output=True, text=True)
        if kind == "operators" and not with_python:
            assert run.returncode != 0 and "Could not find schema for flashtile::attention_forward" in run.stderr
            assert "Could not find schema for flashtile::attention_forward" in PAGE.read_text(encoding="utf-8")
        else:
            assert run.returncode == 0, run.stderr
            torch.testing.assert_close(float(run.stdout), want.item(), rtol=1e-5, atol=0)
