"""Prompts over a cache on the Hopper forward: numbers, the bits of dense keys, and which calls are its own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile import reference
from flashtile.backends.gpu import host
from flashtile.backends.gpu.decode import launch as decode
from flashtile.backends.gpu.decode.config import bounded
from flashtile.backends.gpu.launch import lower
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.forward.paged import config as paged
from flashtile.backends.hopper.forward.paged import launch as cached
from flashtile.call.cached_arguments import FLOAT8, CacheTensors
from flashtile.call.cached_problem import bands_of, pages_of
from flashtile.call.problem import Problem, Tensors, described
from flashtile.core.masks import Band
from flashtile_lab.kernels.decode import described_call
from tests.backends.hopper.emulated import on_cpu
from tests.emulator.language import Language
from tests.emulator.values import value_of
from tests.kvcache.cases import CacheCase, build, judge
from tests.maxima import judge_cached_maxima
from tests.poison import poisoned_memory
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but

FULL: dict[str, Any] = {"causal": False}
WINDOW: dict[str, Any] = {"causal": False, "window": (40, 3)}


# 1 to 20 and 48 are those that TMA has no boxes for.
PAGE_SIZES = (0, 0, 1, 2, 4, 8, 20, 48, 16, 32, 64, 128, 256)


def case_of(sequences: tuple[tuple[int, int], ...], new: int = 0, **values: Any) -> CacheCase:
    """Sequences of (keys, queries), of whose keys a call has appended the last ``new``; few heads of 64 features."""
    old = tuple((keys - new if keys >= new else keys, rows, new) for keys, rows in sequences)
    return CacheCase("", old, appends=new > 0, **{"kv_heads": 1, "head_dim": 64} | values)


CASES = {
    "rows": case_of(((200, 130), (150, 130))),
    "lengths": case_of(((300, 70), (5, 70), (0, 70), (-1, 70), (128, 70)), heads=4, entries=True),
    "pages_of_16": case_of(((200, 140), (3, 140)), page_size=16),
    "pages_of_64": case_of(((260, 140), (129, 140)), 7, page_size=64, head_dim=128, layout="between"),
    "pages_of_1": case_of(((200, 140), (3, 140), (0, 140)), 2, page_size=1, heads=2, layout="between"),
    "pages_of_256": case_of(((300, 140), (256, 140)), page_size=256, heads=1, causal=False),
    "chunk": case_of(((280, 140), (90, 140)), page_size=32, causal=True, chunk=100),
    "pages_of_48": case_of(((260, 70), (129, 70)), page_size=48, heads=4, head_dim=128, softcap=5.0),
    "window": case_of(((280, 140), (90, 140)), page_size=32, **WINDOW, sinks=True, layout="between"),
    "wide": case_of(((150, 135),), page_size=64, heads=1, head_dim=256, softcap=5.0),
    "parts": case_of(((150, 135),), page_size=16, heads=1, head_dim=96, alibi="h"),
    "packed": case_of(((200, 90), (70, 3), (30, 4), (40, 0), (150, 33)), packed=True, page_size=16, spare=2,
                      sinks=True),
    "causal_each": case_of(((200, 140), (260, 140), (150, 140)), heads=1, causal_each=True, page_size=64),
    "causal_each_packed": case_of(((200, 90), (270, 64), (0, 3), (129, 129)), packed=True, causal_each=True, spare=2,
                                  heads=4, window=(None, 3), alibi="h"),
    "ragged": case_of(((200, 90), (70, 3), (0, 4), (300, 130)), packed=True, page_size=16, ragged="pages"),
    "pages_of_8": case_of(((200, 140), (3, 140), (129, 140)), page_size=8, ragged="pages"),
    "pages_of_8_wide": case_of(((150, 90), (70, 3), (0, 5)), packed=True, page_size=8, head_dim=128, heads=2),
    "ragged_of_128": case_of(((200, 140), (129, 140)), page_size=128, ragged="bound", heads=1),
    "eight_bits": case_of(((300, 130), (0, 130), (150, 130)), 7, float8="none", page_size=16, head_dim=128),
    "eight_bits_by_head": case_of(((200, 140), (3, 140)), float8="h", entries=True, heads=4, kv_heads=2),
    "eight_bits_by_entry": case_of(((200, 140), (-1, 140), (129, 140)), 3, float8="eh", entries=True, head_dim=96),
    "eight_bits_by_page": case_of(((260, 90), (70, 3), (129, 140)), 3, float8="eh", page_size=64, packed=True, spare=2,
                                  head_dim=192),
    "eight_bits_wide": case_of(((200, 140), (70, 140)), float8="eh", page_size=32, head_dim=256, heads=1, **WINDOW),
    "packed_apart": case_of(((200, 90), (129, 129)), 3, packed=True, entries=True, alibi="h"),
}  # fmt: skip


# Sequences of up to 16 packed rows and more than 40 keys.
LEAVES = (16, 40)


def call_of(case: CacheCase, seed: int = 0) -> tuple[Problem, CacheTensors]:
    """A call on Hopper, its keys appended; what lies behind them, and pages that nobody has, is no number."""
    call = build(case, torch.bfloat16, seed=seed)
    t, written = call.tensors, reference.appended(call.problem, call.tensors)
    # In place, for the caches' strides. What the call adds to the lengths is all that counts of k and v from here on.
    t.k_cache.copy_(written.k_cache)
    t.v_cache.copy_(written.v_cache)
    t.out.fill_(torch.nan)
    return call.problem.but(device_type="cuda", compute_capability=(9, 0)), t


def run(problem: Problem, tensors: CacheTensors, leaves: tuple[int, int] | None) -> Tensor:
    """Writes ``tensors.out``; returns lse, NaN where nothing is written."""
    t = tensors
    launched = cached.cached_launch(problem, t, leaves)
    counters = torch.zeros(1, dtype=torch.int32)
    lse = torch.full(problem.lse_shape(t.q), torch.nan)
    made = {"lse": lse, "counters": counters}
    host.run([host.Launcher(launched, t.q.device, t, made)], t, made)
    assert counters == 0
    return lse


def sixteen_bits(cache: Tensor, scale: Tensor | None, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of entries or pages; of an 8-bit cache times their scale, which is rounded once."""
    if cache.dtype != FLOAT8:
        return cache[places].flatten(0, 1)
    wide = cache.float()[places]
    if scale is not None:
        wide = wide * (scale if scale.dim() == 1 else scale[places, None])[..., None]
    return wide.to(dtype).flatten(0, 1)


def alone(case: CacheCase, problem: Problem, tensors: CacheTensors, b: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a sequence whose keys are a tensor of their own, by ``attention``'s plan."""
    t, (old, rows, new) = tensors, case.sequences[b]
    count = old + new if old >= 0 else 0
    start = int(t.cu_seqlens_q[b]) if t.cu_seqlens_q is not None else 0
    q = (t.q if case.packed else t.q[b])[start : start + rows]
    places = pages_of(t)[b][: -(-count // case.page_size)].long() if t.in_pages else (
        torch.tensor([b if t.cache_batch_idx is None else int(t.cache_batch_idx[b])] * (count > 0)).long()
    )  # fmt: skip
    k, v = (
        sixteen_bits(x, scale, places, q.dtype)[:count].contiguous()
        for x, scale in ((t.k_cache, t.k_scale), (t.v_cache, t.v_scale))
    )
    own = bounded(problem)
    own = own.but(
        band=bands_of(own, t)[b], causal_each=False, batch=1, varlen=False, seqlen_q=rows, seqlen_k=count,
        cached=False, page_size=0, kv_dtype=q.dtype,
    )  # fmt: skip
    dense = Tensors(q[None], k[None], v[None], t.alibi_slopes, sinks=t.sinks)
    out, lse = forward.plan(own, dense)(dense)
    return out[0], lse[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_dense_keys(name: str) -> None:
    judge_bits(CASES[name], len(name), LEAVES if name == "packed" else None)


@pytest.mark.parametrize("shard", slow_but(range(60), lambda shard: shard < 1))
def test_bits_of_random_calls(shard: int) -> None:
    for seed in range(5 * shard, 5 * shard + 5):
        case = random_case(random.Random(seed))
        judge_bits(case, seed, LEAVES if case.packed and seed % 2 else None)


def random_case(draw: random.Random) -> CacheCase:
    """Any combination of what a call on the forward may have, of up to 260 keys a sequence."""
    packed, kv_heads, page_size = draw.random() < 0.5, draw.choice([1, 1, 2]), draw.choice(PAGE_SIZES)
    rows, new = draw.choice([1, 33, 64, 65, 130, 150]), draw.choice([0, 0, 1, 9])

    def sequence() -> tuple[int, int]:
        keys = max(new, draw.choice([0, 1, 64, 128, 129, draw.randint(2, 260)]))
        return keys if draw.random() < 0.9 else -1, draw.choice([0, 1, 3, 40, rows]) if packed else rows

    return case_of(
        (*(sequence() for _ in range(draw.randint(1, 3))), (draw.randint(20, 260), rows)),
        new,
        heads=kv_heads * draw.choice([1, 2, 3, 8]),
        kv_heads=kv_heads,
        head_dim=draw.choice([64, 64, 96, 128, 192, 256]),
        page_size=page_size,
        packed=packed,
        spare=draw.choice([0, 3]) if packed else 0,
        entries=not page_size and draw.random() < 0.5,
        layout=draw.choice(["apart", "between"]),
        softcap=draw.choice([0.0, 0.0, 5.0]),
        alibi="h" * (draw.random() < 0.3),
        sinks=draw.random() < 0.3,
        causal_each=draw.random() < 0.2,
        ragged=draw.choice(["", "pages", "bound"]) if page_size else "",
        # 8-bit caches take pages that TMA has boxes for.
        float8=""
        if page_size and (page_size < 16 or page_size & (page_size - 1))
        else draw.choice(["", "", "none", "h", "eh"]),
        **draw.choice([FULL, {}, {}, WINDOW]),
    )


def judge_bits(case: CacheCase, seed: int, leaves: tuple[int, int] | None) -> None:
    """Asserts that each sequence's results are those of its keys in a tensor of their own, or that it is left out."""
    problem, tensors = call_of(case)
    with on_cpu(seed=seed), poisoned_memory():
        lse = run(problem, tensors, leaves)
        at = 0
        for b, (old, rows, new) in enumerate(case.sequences):
            count = old + new if old >= 0 else 0
            out, own = (
                (tensors.out[at : at + rows], lse[:, at : at + rows]) if case.packed else (tensors.out[b], lse[b])
            )
            at += rows
            if leaves is not None and rows * case.heads // case.kv_heads <= leaves[0] and count > leaves[1]:
                assert out.isnan().all() and own.isnan().all()  # left to another launch
                continue
            want, want_lse = alone(case, problem, tensors, b)
            assert want.isfinite().all() and (count > 0 or not want.any())
            assert torch.equal(out, want)
            if count > 0:
                assert torch.equal(own, want_lse)
            else:  # A plan without keys copies the sinks; a kernel multiplies by log2(e) and divides: four roundings.
                torch.testing.assert_close(own, want_lse, rtol=2**-22, atol=0)
    # Rows that belong to no sequence.
    assert not case.spare or not tensors.out[at:].any()


# Those without new keys, which Triton's kernel appends.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.appends])
def test_largest_scores(name: str) -> None:
    with on_cpu(seed=3, num_sms=2), mock.patch.object(cached, "cached_launch", wraps=cached.cached_launch) as started:
        judge_cached_maxima(*(build(CASES[name], torch.bfloat16) for _ in range(2)), "hopper")
    assert started.called


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["eight_bits_by_head", "eight_bits"])
def test_two_and_three_warpgroups_widen_to_the_same_bits(name: str) -> None:
    problem, tensors = call_of(CASES[name])
    found = []
    for plain in (tiles.two_warpgroups(64, 64), tiles.THREE_WARPGROUPS_64):
        config = paged.with_helpers(problem, plain)
        assert config.widens and config.helper_warps == {2: 4, 3: 2}[config.num_warpgroups]
        with on_cpu(seed=1, num_sms=1, forward=config), poisoned_memory():
            lse = run(problem, tensors, None)
        found.append((tensors.out.clone(), lse))
    assert all(map(torch.equal, *found))


# Layouts, swizzles, races of warps and accesses outside of memory. In 16 bits: pages of one and of half a block of 128
# keys, and of one and four of 64, with lengths at their ends. In 8: each width, kind of scale and number of warpgroups.
COMPILED = {
    "pages_of_256": case_of(((256, 66), (512, 66)), heads=2, page_size=256, head_dim=128),
    "pages_of_64": case_of(((64, 66), (128, 66)), heads=2, page_size=64, head_dim=128),
    "blocks_of_64": case_of(((64, 66), (256, 66), (0, 66)), heads=2, page_size=64, head_dim=256),
    "packed": case_of(((256, 66), (300, 2), (1, 1), (255, 30)), heads=2, page_size=256, head_dim=256, packed=True,
                      spare=2),
    "between": case_of(((256, 66), (512, 2)), heads=2, page_size=256, packed=True, layout="between", causal=False,
                       window=(300, 3)),
    "64": case_of(((140, 66),), float8="h", heads=2, page_size=64),
    "96": case_of(((140, 66), (60, 66)), 3, float8="eh", heads=2, page_size=16, head_dim=96),
    "128": case_of(((140, 66), (0, 66), (-1, 66)), float8="h", heads=2, head_dim=128, entries=True),
    "192": case_of(((140, 66), (64, 3)), float8="none", heads=2, page_size=32, head_dim=192, packed=True, spare=2,
                    sinks=True),
    "256": case_of(((140, 66),), float8="eh", heads=2, page_size=128, head_dim=256),
    "window": case_of(((300, 66),), float8="eh", heads=2, page_size=256, head_dim=128, **WINDOW),
    "three": case_of(((300, 200), (30, 2)), float8="eh", heads=1, page_size=16, packed=True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code(name: str) -> None:
    call = build(COMPILED[name], torch.bfloat16)
    problem = call.problem.but(device_type="cuda", compute_capability=(9, 0))
    chosen = paged.choose(problem, rows=call.tensors.q.shape[-3])
    if name == "three":
        chosen = paged.with_helpers(problem, tiles.THREE_WARPGROUPS_64)
    with hopper.on_cpu(Options(seed=len(name)), forward=chosen):
        judge(call, "hopper")


MIXED = {
    "by turns": (8, (300, 300, 200), [1, 72, 1, 200]),
    "a long prompt": (8, (40, 40, 200), [72, 200, 1, 1]),
    "many tiles": (0, (300, 300, 200), [72, 200, 1, 1]),
}


@pytest.mark.parametrize(("most", "keys", "rows"), MIXED.values(), ids=MIXED)
def test_decodes_and_a_prompt_alternate_unless_it_is_long(most: int, keys: tuple[int, ...], rows: list[int]) -> None:
    """One program computes them, so it loads queries in the order of tiles; rows: from a tile's first one on."""
    sequences = tuple(zip(keys, (1, 1, 200), strict=True))
    problem, tensors = call_of(case_of(sequences, packed=True, heads=1))
    loaded, real = [], Language.copy_in

    def copy_in(self: Language, desc: Any, at: Any, *rest: Any) -> None:
        if desc.memory.data_ptr() == tensors.q.data_ptr():
            # The map of packed rows ends where the sequence does.
            loaded.append(2**30 - int(value_of(at[2])))
        real(self, desc, at, *rest)

    limit = mock.patch.object(cached, "_MOST_TILES_OF_MIXED", most)
    with limit, mock.patch.object(Language, "copy_in", copy_in), on_cpu(num_sms=1):
        run(problem, tensors, None)
    assert loaded[::2] == rows


def test_a_warpgroup_without_rows_computes_the_first_block_alone() -> None:
    problem, tensors = call_of(case_of(((900, 1),), packed=True, heads=1))
    products, real = Counter[int](), Language.product

    def product(self: Language, *args: Any, **rest: Any) -> Any:
        products[self.task.actor] += 1
        return real(self, *args, **rest)

    with mock.patch.object(Language, "product", product), on_cpu(num_sms=1):
        run(problem, tensors, None)
    # Scores and values of eight blocks or one, and scores behind the last tile, which nobody reads.
    assert products == {0: 2 * 8 + 1, 1: 2 + 1}


@pytest.mark.parametrize(("rows", "keys", "warpgroups", "strip"), [(500, 512, 2, 32), (2048, 6144, 3, 64)])
def test_short_prompts_take_two_warpgroups_and_long_ones_three(
    rows: int, keys: int, warpgroups: int, strip: int
) -> None:
    few, _ = call_of(case_of(((1, 1),), heads=64, kv_heads=8, packed=True, page_size=16))
    problem = few.but(batch=8000 // rows, varlen=True, seqlen_q=rows, seqlen_k=keys, page_size=16)
    config = paged.choose(problem, rows=8000)
    assert (config.num_warpgroups, config.strip) == (warpgroups, strip)


def _kernel(problem: Problem, tensors: CacheTensors) -> str:
    return BACKEND.kernel("decode", problem, tensors).name


def test_packed_steps_on_the_kernel_for_wide_groups() -> None:
    case = case_of(
        ((300, 5), (70, 3), (40, 0), (129, 1)), heads=16, kv_heads=2, packed=True, page_size=16, spare=2, sinks=True
    )
    problem, tensors = call_of(case)
    assert _kernel(problem, tensors) == "wide groups"
    with on_cpu(seed=3), poisoned_memory(), mock.patch.object(decode, "multiprocessors", lambda device: 3):
        lse = BACKEND.plan("decode", problem, tensors)(tensors)
        at = 0
        for b, (_, rows, _) in enumerate(case.sequences):
            want, want_lse = alone(case, problem, tensors, b)
            # Both round probabilities and outputs to bfloat16: 2^-9 of each.
            assert (tensors.out[at : at + rows].float() - want.float()).norm() <= 6e-3 * want.float().norm()
            torch.testing.assert_close(lse[:, at : at + rows], want_lse, atol=1e-5, rtol=1e-5)
            at += rows
    assert not tensors.out[at:].any() and (lse[:, at:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "the forward's kernel"),
        ({"packed": True, "capacity": 2**14}, "up to 16 rows over more than 8192 keys in Triton"),
        ({"rows": 2}, "Triton with Hopper's tiles"),
        ({"rows": 16}, "splits merged in the same launch"),
        (
            {"page_size": 1},
            "the forward's kernel, TMA and WGMMA, tiles 2 x 64 x 128, head_dim 128, 2 stages, keys copied by 4 warps",
        ),
        ({"page_size": 48, "kv": FLOAT8}, "not the kernel for prompts: 8 bits in pages of 48"),
        ({"head_dim": 84}, "not the kernel for prompts: head_dim that is no multiple of 8"),
        ({"kv": FLOAT8}, "8 bits widened by 4 warps"),
        ({"kv": FLOAT8, "head_dim": 72}, "not the kernel for prompts: head_dim that is no multiple of 16"),
        ({"kv": FLOAT8, "dtype": torch.float32}, "not the kernel for prompts: dtype"),
    ],
    ids=str,
)
def test_which_kernel_and_why(change: dict[str, Any], says: str) -> None:
    facts: dict[str, Any] = {"rows": 100, "packed": False, "capacity": 4096, "page_size": 16, "head_dim": 128}
    facts |= {"dtype": torch.bfloat16, "kv": torch.bfloat16} | change
    problem = described(
        device_type="cuda", compute_capability=(9, 0), batch=4, num_heads_q=32, num_heads_kv=8, band=Band(None, 0),
        dtype=facts["dtype"], kv_dtype=facts["kv"], seqlen_q=facts["rows"], varlen=facts["packed"],
        head_dim=facts["head_dim"], head_dim_v=facts["head_dim"],
        seqlen_k=facts["capacity"], cached=True, page_size=facts["page_size"], softmax_scale=0.1,
    )  # fmt: skip
    said = BACKEND.describe(problem, "decode")
    assert says in said and ("rows over more than" in said) == (facts["packed"] and facts["capacity"] > 8192)


def test_calls_that_tma_cannot_read_stay_where_they_were() -> None:
    problem, tensors = call_of(CASES["pages_of_64"])
    assert _kernel(problem, tensors) == "prompts"
    tensors.cache_leftpad = torch.zeros(2, dtype=torch.int32)
    assert _kernel(problem, tensors) == "decode"


def test_copies_need_no_pages_of_whole_rows_but_places_of_32_bits() -> None:
    """Rows are 8 * 3 elements apart, pages no multiple of that, and 2^34 elements are too many."""
    problem, tensors = call_of(CASES["pages_of_48"])
    far = torch.empty_strided((9, 48, 1, 128), (2**31, 136, 128, 1), device="meta", dtype=torch.bfloat16)
    for cache, is_near in ((far[:7], True), (far, False)):
        for name in ("k_cache", "v_cache"):
            assert (_kernel(problem, replace(tensors, **{name: cache})) == "prompts") == is_near
    of_64 = problem.but(page_size=64)
    assert _kernel(of_64, replace(tensors, v_cache=far[:7])) == "decode"


@pytest.mark.parametrize("size", [*range(1, 70), 100, 127, 128, 129, 1000, 4097, 2**20 + 1, 2**30 - 1])
def test_numbers_are_divided_by_any_page_size(size: int) -> None:
    _, multiplier, shift = cached.paging_of(size)
    assert -(2**31) <= multiplier < 0
    numbers = {0, 1, size, 12345, 2**30, *(size * n + d for n in (1, 7, 2**30 // size) for d in (-1, 0, 1))}
    for n in (each for each in numbers if 0 <= each <= 2**30):
        assert 2 * n * (multiplier + 2**32) >> 32 >> shift == n // size


def test_one_build_serves_all_pages_that_are_copied() -> None:
    calls = [described_call((9, 0), seqlen_q=500, page_size=size, packed=True) for size in (1, 2, 3, 8, 12, 20, 48)]
    assert len({lower(cached.cached_launch(*call))[0] for call in calls}) == 1


@pytest.mark.parametrize("dims", [(96, 128), (128, 128)])
def test_warps_that_gather_leave_registers_for_all(dims: tuple[int, int]) -> None:
    problem, _ = call_of(CASES["pages_of_48"])
    plain = tiles.TWO_WARPGROUPS[dims]
    config = paged.with_helpers(problem, plain)
    assert config.gathers and config.helper_warps == (4 if dims == (128, 128) else 2)
    assert config.registers < plain.registers and config.shared_bytes == plain.shared_bytes
    with pytest.raises(ValueError, match="more registers than there are"):
        replace(config, registers=plain.registers)
