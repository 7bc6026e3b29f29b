"""Printed functions in kernels, without a GPU: what a build depends on, how sums are made, and that they compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashtile import mods
from flashtile.backends.gpu.launch import Captured, compile_kernel, lower, specialise
from flashtile.backends.gpu.table import is_split
from flashtile.backends.portable import BACKEND
from flashtile.mods import record
from flashtile.mods.graph import parse, places_of
from flashtile.mods.places import reads_pairs, tabulated, way_of
from flashtile.mods.printed import source
from tests.cases import Case, build
from tests.mods.calls import with_functions
from tests.mods.functions import SCORES, Sizes


def test_how_places_depend_on_a_pair() -> None:
    sizes = Sizes(2, 2, 9, 9, torch.float32, torch.Generator().manual_seed(0))
    ways, of_pairs = {}, set()
    for name in SCORES:
        text = record.lowered(SCORES[name](sizes).function, "score_mod", "score", False).text
        graph = parse(text) if text else None
        ways[name] = [way_of(graph, p.load) for p in graph.partials] if graph else []
        of_pairs |= {name} if graph and reads_pairs(graph) else set()
    assert ways["by_distance"] == ways["buckets"] == ["diagonals"] and ways["graphormer"] == ["any"]
    assert ways["bias"] == ways["bias_turned"] == ["pairs"] and sorted(ways["read_twice"]) == ["keys", "rows"]
    assert ways["learned_temperature"] == ["rows", "rows"] and ways["gated"] == ["rows"]
    assert {"graphormer", "bias"} <= of_pairs and not {"by_distance", "buckets", "gated", "read_twice"} & of_pairs


_TABLE, _BY_ROW = torch.randn(2, 9), torch.randn(9)


@pytest.mark.parametrize(
    ("index", "way"),
    [
        (lambda q, kv: q - kv, "diagonals"), (lambda q, kv: kv - q + 4, "diagonals"),
        (lambda q, kv: (2 * q - kv - (q - 1)).abs(), "diagonals"), (lambda q, kv: (q > kv) * 3, "diagonals"),
        (lambda q, kv: torch.maximum(q, kv) - q, "diagonals"),
        (lambda q, kv: torch.maximum(q, q - 1) - kv, "diagonals"),
        (lambda q, kv: torch.where(q - kv > 3, 1, kv - q), "diagonals"), (lambda q, kv: q + kv, "any"),
        (lambda q, kv: 2 * q - kv, "any"), (lambda q, kv: q // 2 - kv // 2, "any"), (lambda q, kv: (q > 3) * kv, "any"),
        (lambda q, kv: (q * 0.5 - kv * 0.5).int(), "any"), (lambda q, kv: -(q % 4) + kv % 4, "any"),
    ],
)  # fmt: skip
def test_what_is_a_place_by_distance(index: Callable[..., torch.Tensor], way: str) -> None:
    """It is the same for all pairs of one distance, and is only then said to be; as values show."""

    def function(score, b, h, q_idx, kv_idx):
        return score + _TABLE[h, index(q_idx, kv_idx)] * _BY_ROW[q_idx]

    graph = parse(record.lowered(function, "score_mod", "score", False).text)
    load = next(n for n, node in enumerate(graph.nodes) if node.op == "load" and len(node.args) == 3)
    assert way_of(graph, load) == way
    at = {"h": torch.tensor(1), "b": torch.tensor(0), "score": torch.zeros(())}
    at |= {"i": torch.arange(9)[:, None], "j": torch.arange(9)}
    operands = [_TABLE if kind == "f2" else _BY_ROW for kind in graph.operands]
    found = places_of(graph, load, at, operands, (), torch.float32).expand(9, 9)
    same = all(len(found.diagonal(n).unique()) == 1 for n in range(-8, 9))
    assert same or way == "any"
    assert tabulated(graph) == ((load,) if way == "diagonals" else ())


def test_the_last_of_what_follows_from_the_distance_is_tabulated() -> None:
    buckets, gate = torch.randn(8, 2), torch.randn(2)

    def function(score, b, h, q_idx, kv_idx):
        bias = mods.t5(buckets)(0.0, b, h, q_idx, kv_idx) * gate[h]
        return score * torch.sigmoid(bias) + 0.1 * (q_idx - kv_idx)

    graph = parse(record.lowered(function, "score_mod", "score", False).text)
    values = [graph.nodes[n].op for n in tabulated(graph)]
    assert "sigmoid" in values and "log" not in values
    text = source(graph.text, True)
    assert text.count("functions.by_distance(") == len(values)
    fetch, score = text.index("def fetch"), text.index("def linear")
    assert "tl.load" not in text[fetch:score] and "tl.log" in text[text.index("def of_distance") :]
    assert source(graph.text).count("tl.log") > text.count("tl.log")


def test_new_values_and_lengths_need_no_other_build() -> None:
    keys = set()
    for rows in (64, 200, 333):
        case = Case("mods", seqlen_q=rows, seqlen_k=rows + 5, heads=2, kv_heads=2, head_dim=64)
        for score, mask in (("by_distance", "prefix"), ("capped", "neighbourhood")):
            call = with_functions(case, score, mask, torch.float16)
            described = call.problem.but(device_type="cuda", compute_capability=(9, 0), softcap=0.0)
            for direction in ("forward", "backward"):
                for name, launch in BACKEND.launches(described, call.tensors, direction).items():
                    key, leaves = lower(launch)
                    keys.add((score, name, key))
                    if score == "capped" and name.endswith("forward"):
                        assert any(isinstance(x, Captured) for x in leaves)
    assert len(keys) == len({(score, name) for score, name, _ in keys})


def test_keys_are_not_split_where_functions_or_lists_look_at_them() -> None:
    case = Case("mods", seqlen_q=3, seqlen_k=2048, heads=2, kv_heads=2)
    assert is_split(build(case, torch.float16).problem)
    assert not is_split(with_functions(case, "distance", None, torch.float16).problem)
    assert not is_split(with_functions(case, None, "documents", torch.float16).problem)
    assert not is_split(with_functions(case, None, None, torch.float16, listed=(16, 128)).problem)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("name", ["by_distance", "graphormer", "capped", "gated"])
@pytest.mark.parametrize("listed", [None, (128, 64)], ids=["", "listed"])
def test_kernels_compile(name: str, arch: str, listed: tuple[int, int] | None) -> None:
    from triton.backends.compiler import GPUTarget

    case = Case("mods", seqlen_q=256, seqlen_k=256, heads=4, kv_heads=2, head_dim=64, causal=listed is None)
    call = with_functions(case, name, "documents", torch.bfloat16, listed=listed)
    is_amd = arch == "gfx942"
    capability = None if is_amd else (int(arch[3]), int(arch[4:]))
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch[3:]), 32)
    described = call.problem.but(device_type="cuda", compute_capability=capability, softcap=0.0)
    for direction in ("forward", "backward"):
        for launch in BACKEND.launches(described, call.tensors, direction).values():
            made = compile_kernel(launch.kernel, specialise(launch), launch.options, target)
            assert made.metadata.shared <= 100_000


def test_what_pairs_read_is_loaded_key_by_key() -> None:
    """No warp of Triton 3.6 loads it for one key of 32 rows; an element at a time, as not all are neighbours."""
    from triton.backends.compiler import GPUTarget

    call = with_functions(Case("mods", seqlen_q=256, seqlen_k=256, head_dim=64), "graphormer", None, torch.bfloat16)
    described = call.problem.but(device_type="cuda", compute_capability=(9, 0))
    launch = BACKEND.launches(described, call.tensors, "forward")["attention_forward"]
    made = compile_kernel(launch.kernel, specialise(launch), launch.options, GPUTarget("cuda", 90, 32))
    assert "threadsPerWarp = [32, 1]" not in made.asm["ttgir"] and "ld.global.b16" in made.asm["ptx"]
