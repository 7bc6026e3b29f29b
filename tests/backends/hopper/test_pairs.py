"""The backward by pairs of programs: its gradients, and mistakes in what the two tell each other."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gpu import driver
from flashtile.backends.gpu.described import described_tensors
from flashtile.backends.gpu.launch import Launch, parameter_of_map, specialise
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.backward import config, launch, pairs
from flashtile.call.problem import Grads, Problem, described
from flashtile.core.masks import Band
from tests import emulator
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, build, judge
from tests.fuzz.drawn import draw_for_pairs
from tests.ptx import hopper
from tests.ptx.launch import Kernels, edited
from tests.ptx.machine import Options
from tests.ptx.text import PtxError
from tests.slow import slow_but

# A pair has 128 keys: the last one's second program may have few, or none.
CASES = (
    Case("full", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1, head_dim=256),
    Case("full", batch=2, seqlen_q=130, seqlen_k=70, heads=1, kv_heads=1, head_dim=192, lse_grad=True),
    Case("one_row", batch=1, seqlen_q=1, seqlen_k=200, heads=2, kv_heads=2, head_dim=256),
    Case("causal", batch=1, seqlen_q=210, seqlen_k=270, heads=2, kv_heads=1, head_dim=248, causal=True),
    Case("few_rows", batch=1, seqlen_q=70, seqlen_k=330, heads=3, kv_heads=1, head_dim=256, causal=True),
    Case("few_keys", batch=1, seqlen_q=300, seqlen_k=90, heads=1, kv_heads=1, head_dim=168, causal=True),
    Case("values", batch=1, seqlen_q=130, seqlen_k=200, heads=2, kv_heads=1, head_dim=256, head_dim_v=72, causal=True),
    Case("softcap", batch=1, seqlen_q=260, seqlen_k=300, heads=2, kv_heads=1, head_dim=256, softcap=5.0),
    Case("alibi", batch=1, seqlen_q=100, seqlen_k=150, heads=2, kv_heads=1, head_dim=192, alibi="h", causal=True),
    Case("sinks", batch=1, seqlen_q=100, seqlen_k=150, heads=2, kv_heads=1, head_dim=192, sinks=True),
)
SMALL = CASES[0]
QUICK = (CASES[0], CASES[1], CASES[3], CASES[5])
# Five row blocks in two stages.
COMPILED = (
    Case("full", batch=1, seqlen_q=260, seqlen_k=100, heads=1, kv_heads=1, head_dim=256),
    Case("full", batch=1, seqlen_q=260, seqlen_k=100, heads=1, kv_heads=1, head_dim=192),
)
TILES = {192: config.PAIRS_192, 256: config.PAIRS_256}


@pytest.fixture(autouse=True)
def _by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other backward is there, and lengths do not matter."""
    monkeypatch.setattr(config, "choose", lambda problem: TILES[192 if problem.head_dim <= 192 else 256])
    monkeypatch.setattr(launch, "attention_backward", None)


@pytest.mark.parametrize("case", slow_but(CASES, QUICK.__contains__), ids=str)
def test_gradients_by_pairs(case: Case) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        with on_cpu(seed):
            judge(build(case, dtype), "hopper")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", slow_but(range(40), lambda seed: seed < 3))
def test_random_gradients_by_pairs(seed: int) -> None:
    case, dtype = draw_for_pairs(seed, 300)
    with on_cpu(seed):
        judge(build(case, dtype, seed=seed), "hopper")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.head_dim)
@pytest.mark.parametrize("at_wait", slow_but([True, False], lambda at_wait: at_wait))
def test_gradients_by_pairs_as_compiled(case: Case, at_wait: bool) -> None:
    with hopper.on_cpu(Options(seed=1, product_at_wait=at_wait, strict_fences=True)):
        judge(build(case, torch.bfloat16), "hopper")


def _long(**changes: Any) -> Problem:
    """Eight heads of 8,192 rows and as many keys, head_dim 256, all gradients wanted."""
    facts: dict[str, Any] = {"device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "batch": 1}
    facts |= {"seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 256}
    facts |= {"grads": Grads(q=True, k=True, v=True), **changes}
    return described(**{"head_dim_v": facts["head_dim"]} | facts)


PAIRED: tuple[dict[str, Any], ...] = (
    {}, {"head_dim": 192}, {"head_dim": 200, "band": Band(None, 0)}, {"softcap": 3.0, "alibi": True}, {"batch": 9},
    {"num_heads_kv": 4}, {"num_heads_q": 1, "num_heads_kv": 1},
)  # fmt: skip
APART: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 8191}, {"seqlen_k": 8191}, {"head_dim": 160}, {"head_dim": 128}, {"head_dim": 192, "head_dim_v": 128},
    {"varlen": True}, {"deterministic": True}, {"num_heads_kv": 2}, {"mask": True}, {"bias_dtype": torch.float32},
    {"band": Band(4096, 0)}, {"grads": Grads(k=True, v=True)}, {"row_keys": True}, {"listed": (128, 128)},
    {"grad_dtype": torch.float32}, {"dropout_p": 0.1},
)  # fmt: skip


def test_pairs_are_chosen_by_what_they_have_and_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for changes in (*PAIRED, *APART):
        chosen = config.choose(_long(**changes))
        assert (chosen.pairs is not None) == (changes in PAIRED), changes
        assert config.in_chain(chosen).pairs is None
    assert "by each of a pair of programs" in BACKEND.describe(_long(), "backward")
    assert "pair" not in BACKEND.describe(_long(deterministic=True), "backward")


def test_without_clusters_or_with_sums_to_add_to_programs_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _long()
    tensors = described_tensors(problem)

    def main(**more: bool) -> Launch:
        found = launch.launches(problem, tensors, tensors.q, None, config.PAIRS_256, **more)
        return found["attention_backward"]

    paired = main()
    assert (paired.cluster, paired.programs) == (2, 8 * 8192 // 64)
    assert paired.kernel is launch.attention_backward_pairs
    assert (main(adds=True).cluster, main(adds=True).kernel) == (1, launch.attention_backward)
    monkeypatch.setattr(launch, "_has_clusters", lambda tensors: False)
    assert (main().cluster, main().kernel) == (1, launch.attention_backward)


def test_the_maps_of_a_launch_are_found_among_its_parameters() -> None:
    problem = _long()
    tensors = described_tensors(problem)
    paired = launch.launches(problem, tensors, tensors.q, None, config.PAIRS_256)["attention_backward"]
    place, places = 0, {}
    for name, codes in driver.layout(specialise(paired).signature).items():
        places[name] = place
        place += len(codes)
    assert paired.arguments["Q_MAP"] == places["grid.call.q.desc"]
    assert paired.arguments["DOUT_MAP"] == places["grid.gradients.dout.desc"]
    with pytest.raises(LookupError, match="no map of bias"):
        parameter_of_map(paired, "bias")


def test_a_launch_of_clusters_has_their_size_as_an_attribute() -> None:
    layout = driver.BlockLayout({"n": "i64"}, 512, 0)
    apart, paired = (layout.content(8, (1, 0, 0), cluster) for cluster in (1, 2))
    assert struct.unpack_from("<QI", apart, 40) == (0, 0)
    address, count = struct.unpack_from("<QI", paired, 40)
    kind, *size = struct.unpack("<I4xIII", ctypes.string_at(address, 20))
    assert (count, kind, size) == (1, 4, [2, 1, 1])


@contextmanager
def _written(text: str, path: Path) -> Iterator[None]:
    """Within, the kernel's module has another text."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mistaken", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with mock.patch.object(launch, "attention_backward_pairs", module.attention_backward_pairs):
        yield


MISTAKES = {
    "no cluster_sync at the end": (
        r"    cluster_sync\(\)\n(?=\n\n|\Z)", "", r"race: .* of program|program \d, which has ended"),
    "a remote arrival before the reads are done": (
        r"( +dv = wait_for_products\(dv\)\n)( +release_rows\(.*\)\n)", r"\2\1", "race: .*pair_producer .* writes"),
    "a buffer reused before the other program has read it": (
        r"mbarrier\.wait\(ch\.others_free\.index\(0\), .*\)\n", "pass\n", r"race: .* channels\.others\[0\]"),
}  # fmt: skip


@pytest.mark.parametrize("seed", slow_but(range(3), lambda seed: seed == 0))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_between_the_programs_are_found_in_any_order(mistake: str, seed: int, tmp_path: Path) -> None:
    pattern, replacement, message = MISTAKES[mistake]
    text, count = re.subn(pattern, replacement, Path(pairs.__file__).read_text())
    assert count, pattern
    with _written(text, tmp_path / "mistaken.py"), on_cpu(seed), pytest.raises(emulator.MachineError, match=message):
        judge(build(CASES[3], torch.bfloat16), "hopper")


def test_halves_of_dq_that_are_exchanged_are_wrong_numbers(tmp_path: Path) -> None:
    text, count = re.subn(
        r"\+ ch\.rank \* \(64 \* half\)", "+ (ch.rank ^ 1) * (64 * half)", Path(pairs.__file__).read_text()
    )
    assert count
    with _written(text, tmp_path / "mistaken.py"), on_cpu(), pytest.raises(AssertionError):
        judge(build(SMALL, torch.bfloat16), "hopper")


def test_a_compiled_multicast_to_one_program_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with hopper.on_cpu(Options(seed=2)):
        out, _ = (call := build(SMALL, torch.bfloat16)).run("hopper")
        one = edited("attention_backward_pairs", r"mov\.b16 w, 3;", "mov.b16 w, 1;", place=1)
        monkeypatch.setattr(Kernels, "build", one)
        with pytest.raises(PtxError, match="deadlock"):
            torch.autograd.grad(out.float().sum(), list(call.leaves.values()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("pass", "has seen the end of phase|deadlock"),
        ("thread_barrier()", "which a product of warp . .* may still have"),
    ],
)
def test_a_compiled_wait_behind_the_last_barrier_of_its_warps_is_found(then: str, message: str, tmp_path: Path) -> None:
    """Triton writes a barrier before an arrival only if its warps have touched shared memory since the last one."""
    wait = "mbarrier.wait(ch.others_free.index(0), (used & 1) ^ 1)"
    text, copy = Path(pairs.__file__).read_text(), "        copy_to_other("
    assert wait in text and text.count(copy) == 1
    text = text.replace(wait, "pass").replace(copy, f"        {wait}\n        {then}\n{copy}")
    with _written(text, tmp_path / "mistaken.py"), hopper.on_cpu(Options()), pytest.raises(PtxError, match=message):
        judge(build(COMPILED[0], torch.bfloat16), "hopper")
