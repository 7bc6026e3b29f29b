"""The kernel over latent rows: numbers in the emulator, how work is shared, and which calls are its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu.decode import config as portable
from flashtile.backends.gpu.decode import launch
from flashtile.backends.gpu.trial import trial
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.latent import config
from flashtile.backends.hopper.latent import launch as latent
from flashtile.backends.hopper.latent.config import LatentTiles, copies
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.kvcache.cases import CacheCase, build, judge
from tests.kvcache.cases import latent_case as case_of
from tests.kvcache.selected import judge_selected
from tests.maxima import judge_cached_maxima

CASES = (
    case_of("one", (300,)),
    case_of("lengths", (500, 3, 0, 64)),
    case_of("no_rows", (33, 5), 0),
    case_of("alike", (300, 310)),
    case_of("few_rows", (900,), heads=4),
    case_of("two_tiles", (333, 70), heads=128),
    case_of("steps", (300, 65), 2, heads=40, sinks=True),
    case_of("more_rows_than_keys", (5, 200), 8, heads=9),
    case_of("apart", (200, 129), heads=24, layout="apart", entries=True, causal=False),
    case_of("pages", (500, 77, 0), page_size=64),
    case_of("small_pages", (333, 70), 2, page_size=16),
    case_of("large_pages", (333, 70), page_size=128),
    case_of("ragged", (333, 0, 70), page_size=16, ragged="pages"),
    case_of("causal_each", (333, 70, 129), 5, causal_each=True, page_size=32),
    case_of("key_heads", (150, 20), heads=6, kv_heads=2, layout="apart"),
    CacheCase("packed", ((300, 1, 0), (20, 20, 0), (0, 3, 0), (130, 0, 0)), packed=True, spare=2, heads=8, kv_heads=1,
              head_dim=64, head_dim_v=512, qv=True, layout="stacked", page_size=64),
)  # fmt: skip


# In pages that TMA has no boxes for, so that threads copy their rows.
COPIED = (
    case_of("tokens", (200, 0, 1, 65), page_size=1),
    case_of("tokens_of_64_heads", (63, 64, 129), heads=64, page_size=1),
    case_of("tokens_of_128_heads", (200, 64), heads=128, page_size=1, sinks=True),
    case_of("pairs", (65, 1, 63, 0), 2, page_size=2),
    case_of("pairs_of_128_heads", (64, 200), heads=128, page_size=2),
    case_of("pages_of_3", (200, 63), 2, heads=24, page_size=3, layout="apart"),
    case_of("pages_of_24", (64, 130, 0), page_size=24),
    case_of("tokens_in_a_list", (65, 0, 200), page_size=1, ragged="pages"),
    case_of("tokens_causal_each", (200, 70, 129), 5, causal_each=True, page_size=1),
    case_of("tokens_of_key_heads", (150, 20), heads=6, kv_heads=2, layout="apart", page_size=1),
    CacheCase("tokens_packed", ((300, 1, 0), (20, 20, 0), (0, 3, 0), (130, 0, 0)), packed=True, spare=2, heads=8,
              kv_heads=1, head_dim=64, head_dim_v=512, qv=True, layout="stacked", page_size=1),
)  # fmt: skip


@contextmanager
def running(num_sms: int) -> Iterator[None]:
    """Within, a device of so many multiprocessors; counters must be 0 before and after."""
    left: list[Tensor] = []

    def zeros(device: torch.device, count: int) -> Tensor:
        left.append(torch.zeros(count, dtype=torch.int32))
        return left[-1]

    with (
        mock.patch.multiple(launch, zeros=zeros),
        mock.patch.object(latent, "multiprocessors", lambda device: num_sms),
        mock.patch.object(latent, "latent_launch", wraps=latent.latent_launch) as started,
    ):
        yield
    assert started.called and left and not any(each[::2].any() for each in left)


# Every second case, and processors in turn, since each number of them divides the keys otherwise; the others are long.
IN_TURN = [
    pytest.param(case, num_sms, id=f"{case}-{num_sms}", marks=() if 2 * turn == at % 6 else pytest.mark.long)
    for at, case in enumerate(CASES)
    for turn, num_sms in enumerate((1, 4, 7))
]


@pytest.mark.parametrize(("case", "num_sms"), IN_TURN)
def test_numbers(case: CacheCase, num_sms: int) -> None:
    with on_cpu(seed=num_sms), running(num_sms):
        judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores(case: CacheCase) -> None:
    with on_cpu(seed=3), running(4):
        judge_cached_maxima(build(case, torch.bfloat16), build(case, torch.bfloat16), "hopper")


def rows_of(case: CacheCase) -> CacheCase:
    """The case over rows of 656 bytes."""
    return dataclasses.replace(case, name=f"{case.name}_656", float8="rows", layout="apart")


@pytest.mark.parametrize(
    ("case", "num_sms"),
    [
        pytest.param(
            rows_of(case),
            num_sms,
            id=f"{case}-{num_sms}",
            marks=() if at % 4 == 0 and turn == at // 4 % 2 else pytest.mark.long,
        )
        for at, case in enumerate(case for case in CASES if case.kv_heads == 1)
        for turn, num_sms in enumerate((1, 4))
    ],
)
def test_rows_of_656_bytes(case: CacheCase, num_sms: int) -> None:
    with on_cpu(seed=num_sms), running(num_sms):
        judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.one_in(10)
@pytest.mark.parametrize("num_sms", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("float8", [False, True], ids=("16", "656"))
@pytest.mark.parametrize("case", COPIED, ids=str)
def test_rows_that_threads_copy(case: CacheCase, float8: bool, num_sms: int) -> None:
    """What no sequence has is NaN or infinite, in pages that no table names and past a page's last key."""
    if float8 and case.kv_heads > 1:
        return  # calls over such rows have one key head
    call = build(rows_of(case) if float8 else case, torch.bfloat16)
    assert copies(call.problem)
    with on_cpu(seed=len(case.name)), running(num_sms):
        judge(call, "hopper")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("float8", [False, True], ids=("16", "656"))
@pytest.mark.parametrize("heads", [64, 128])
def test_selected_tokens(heads: int, float8: bool) -> None:
    with on_cpu(seed=heads), running(3):
        judge_selected(6, heads, 70, "hopper", "cpu", float8=float8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copiers", [2, 4])
@pytest.mark.parametrize("case", [case_of("boxes", (200, 0, 65), page_size=16), COPIED[0]], ids=str)
def test_tiles_on_trial_copy_any_pages(case: CacheCase, copiers: int) -> None:
    tiles = LatentTiles(copiers=copiers)
    assert f"rows copied by {copiers} warps" in str(tiles)
    with mock.patch.object(config, "tried", lambda kernel: tiles), on_cpu(seed=copiers), running(4):
        judge(build(case, torch.bfloat16), "hopper")


def test_nan_in_a_copied_row_reaches_its_own_sequence_alone() -> None:
    call = build(case_of("nan", (65, 70), page_size=1), torch.bfloat16)
    t = call.tensors
    assert t.page_table is not None
    t.v_cache[t.page_table[0, 64]] = torch.nan
    with on_cpu(seed=2), running(3):
        out, _ = call.run("hopper")
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("heads", "length", "num_sms"), [(16, 1100, 9), (40, 2500, 20)])
def test_folds_of_many_states(heads: int, length: int, num_sms: int) -> None:
    """Some rows of all states at once, four and then one: ``folds.share_tile``."""
    with on_cpu(seed=heads), running(num_sms):
        judge(build(case_of("many", (length,), heads=heads), torch.bfloat16), "hopper")


def test_other_calls_stay_with_the_triton_kernel() -> None:
    call = build(CASES[0], torch.bfloat16)
    problem = call.problem.but(device_type="cuda", compute_capability=(9, 0))
    assert BACKEND.kernel("decode", problem, call.tensors).name == "latent rows"
    for changes in (
        {"band": Band(100, 0)}, {"softcap": 2.0}, {"alibi": True}, {"softmax_scale": -1.0}, {"head_dim": 80},
        {"head_dim_v": 256}, {"dtype": torch.float32}, {"aligned": False},
    ):  # fmt: skip
        assert "not the kernel for latent rows: " in BACKEND.describe(problem.but(**changes), "decode"), changes
    padded = dataclasses.replace(call.tensors, cache_leftpad=call.tensors.cache_seqlens)
    assert BACKEND.kernel("decode", problem, padded).name == "decode"
    assert "a scorer and two summers" in BACKEND.describe(problem, "decode")
    with trial(decode=portable.DecodeTiles(64, 64, 4, 3)):
        assert BACKEND.kernel("decode", problem, call.tensors).name == "decode"


@contextmanager
def patient(patience: int) -> Iterator[None]:
    """Within, a program looks so often whether the other of its tile has stored its state; 0: it does not wait."""
    launched = latent.latent_launch

    def launch_of(*args: object) -> launch.Attention:
        made = launched(*args)  # type: ignore[arg-type]
        call = made.launch.arguments["call"]
        call = call._replace(schedule=call.schedule._replace(PATIENCE=patience))
        arguments = {**made.launch.arguments, "call": call}
        return made._replace(launch=made.launch._replace(arguments=arguments))

    with mock.patch.object(latent, "latent_launch", launch_of):
        yield
