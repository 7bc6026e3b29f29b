"""The suites of cached calls (decode, serving, latent rows): their references, what is timed, what gets no time."""

import contextlib
import math

import pytest
import torch

import flashtile
from benchmarks import caches, decode, latent, mla, serving, steps, table
from benchmarks.caches import DecodeCase
from benchmarks.latent import LatentCase
from benchmarks.providers import PROVIDERS
from benchmarks.steps import StepCase
from tests.benchmarks.test_run import session_of

CPU = torch.device("cpu")
PLAIN, MIXED = (group[0] for group in caches.groups("loop", 40, "cpu"))
DECODED = [*caches.groups("loop", 40, "cpu")[0], MIXED]
STEPS, LATENT = ([case for group in of.groups("loop", "cpu") for case in group] for of in (steps, latent))


def by_hand(case, tensors, sequence, head):
    """One query head in float64 by a loop over the rules of the public function; None past what it computes."""
    group = case.num_heads_q // case.num_heads_kv
    q = tensors["q"][sequence, :, head].double()
    before = int(tensors["cache_seqlens"][sequence])
    found = []
    for name in "kv":
        cache, keys = tensors[f"{name}_cache"], []
        for j in range(before):
            size = cache.shape[1]
            row = cache[tensors["page_table"][sequence, j // size], j % size] if "page_table" in tensors else None
            row = (cache[sequence, j] if row is None else row)[head // group].double()
            keys.append(row * tensors[f"{name}_scale"][head // group] if f"{name}_scale" in tensors else row)
        if name in tensors:
            keys.append(tensors[name][sequence, 0, head // group].double())
        found.append(torch.stack(keys))
    k, v = found
    if case.variant == "append":
        cos, sin = (tensors[f"rotary_{name}"][before].double() for name in ("cos", "sin"))

        def turned(x):
            low, high = x[: len(cos)], x[len(cos) :]
            return torch.cat([low * cos - high * sin, low * sin + high * cos]).bfloat16().double()

        q, k[-1] = turned(q[0])[None], turned(k[-1])
    out = []
    for i in range(case.seqlen_q):
        seen = len(k) - (case.seqlen_q - 1 - i)
        probs = torch.softmax(k[:seen] @ q[i] * case.head_dim**-0.5, dim=0)
        out.append(probs @ v[:seen])
    return torch.stack(out)


@pytest.mark.parametrize("case", DECODED, ids=lambda case: case.name)
def test_the_reference_is_what_the_call_means(case):
    (tensors,) = caches.make_calls(case, caches.draw_pool([case], CPU))
    wanted = torch.stack(
        [torch.stack([by_hand(case, tensors, b, h) for h in range(case.num_heads_q)], dim=1) for b in range(case.batch)]
    )
    reference = caches.DecodeReference(case, tensors)
    assert reference.error((wanted,)) < 1e-12 < reference.limit < 0.02
    out = flashtile.attention_with_kvcache(**tensors)
    assert reference.error((out,)) <= reference.limit
    wrong = wanted.clone()
    wrong[-1, -1, -1] *= 1.1
    assert reference.error((wrong,)) > reference.limit
    wrong[0, 0, 1] = math.nan
    assert math.isnan(reference.error((wrong,)))


def test_bytes_are_those_of_the_keys_that_are_there():
    case = DecodeCase(32, 8, 128, 8, 8192)
    assert case.gb_per_s(1.0) == pytest.approx(2 * 8 * 8192 * 8 * 128 * 2 / 1e6)
    assert DecodeCase(32, 8, 128, 8, 8192, variant="fp8").gb_per_s(1.0) == case.gb_per_s(1.0) / 2
    mixed = DecodeCase(32, 8, 128, 8, 8192, mixed=True)
    assert mixed.gb_per_s(1.0) == pytest.approx(case.gb_per_s(1.0) * sum(mixed.lengths) / (8 * 8192))
    latent_rows = LatentCase(16, 1, 64, 4096), LatentCase(16, 1, 64, 4096, "fp8")
    assert [x.gb_per_s(1.0) for x in latent_rows] == pytest.approx([64 * 4096 * n / 1e6 for n in (1152, 656)])


OPTIONS = "--device cpu --rounds 2 --burst-ms 0.1"


def test_decodes_are_checked_and_timed(command):
    options = f"{OPTIONS} --providers flashtile-cpu,sdpa,fa3"
    rows, printed = command(decode, f"{options} --measures loop host")
    assert len(rows) == 2 * 7 * 2 and {row.case["measure"] for row in rows} == {"loop", "host"}
    assert all(row.median_ms > 0 and row.error < 0.01 for row in rows if row.provider == "flashtile-cpu")
    sdpa = {DecodeCase(**row.case).name for row in rows if row.provider == "sdpa" and row.median_ms}
    assert sdpa == {"d16-h4x2-b2-k64-loop", "d16-h4x2-b2-k64-host"} and "time / plain" in printed
    assert len(command(decode, f"{options} --resume --cells *mixed*")[0]) == len(rows), "the cell is there"
    assert len(command(decode, f"{options} --cells *page1-loop")[0]) == len(rows) + 2 * 6, "it brings its plain cell"


def test_a_wrong_result_and_a_key_that_is_not_written_get_no_time(tmp_path, monkeypatch):
    whole = flashtile.attention_with_kvcache

    def forgets(*, k=None, v=None, cache_seqlens, **tensors):
        """Appends nothing, and reads the row that the last one wrote."""
        return whole(
            cache_seqlens=cache_seqlens + (k is not None), **{n: x for n, x in tensors.items() if "rot" not in n}
        )

    group = (PLAIN, DecodeCase(4, 2, 16, 2, 64, variant="append", measure="loop"))
    pool = caches.draw_pool(group, CPU)
    chosen = [PROVIDERS["flashtile-cpu"]]
    monkeypatch.setattr(flashtile, "attention_with_kvcache", forgets)
    rows = decode.run_group(group, chosen, session_of(tmp_path, "decode"), pool, 2, 0.1)
    assert rows[0].median_ms > 0 and rows[1].median_ms is None and rows[1].error.startswith("wrong: relative error nan")
    monkeypatch.setattr(flashtile, "attention_with_kvcache", lambda **tensors: whole(**tensors) * 1.1)
    rows = decode.run_group(group, chosen, session_of(tmp_path, "decode"), pool, 2, 0.1)
    assert [row.error[:22] for row in rows] == ["wrong: relative error "] * 2
    refused = decode.run_group(group, [PROVIDERS["flashtile-hopper"]], session_of(tmp_path, "decode"), pool, 2, 0.1)
    assert all(row.median_ms is None and row.error.startswith("refused: ") for row in refused)


def test_a_graph_holds_calls_for_a_millisecond_on_each_cache_in_turn(monkeypatch):
    made, recording = [], []

    class Graph:
        def replay(self):
            made.extend(recording)

    @contextlib.contextmanager
    def capture(graph):
        before = len(made)
        yield
        recording[:] = made[before:]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(decode, "loop_ms", lambda call, device, reps: 0.1)
    monkeypatch.setattr(decode, "time_burst", lambda call, reps, device: (call(), reps * 7.0)[1])
    calls = [lambda i=i: made.append(i) for i in range(3)]
    sample = decode.sampler("cold", calls, CPU, burst_ms=2.5)
    assert recording == [0, 1, 2] * 3 + [0]
    made.clear()
    assert sample() == pytest.approx(3 * 7.0 / 10) and made == recording


PACKED = StepCase("tiny-prompt", 4, 2, 16, 16, measure="loop")


@pytest.mark.parametrize("case", [*STEPS, *LATENT], ids=lambda case: case.name)
def test_the_reference_sees_every_sequence(case):
    (tensors,) = case.calls(caches.draw_pool([case], CPU))
    wide = {name: x.double() if name in ("q", "k_cache", "v_cache") else x for name, x in tensors.items()}
    if case in LATENT:
        assert tensors["v_cache"].data_ptr() == tensors["k_cache"].data_ptr()
        cache = (latent._columns(tensors["k_cache"]) if case.variant == "fp8" else tensors["k_cache"]).double()
        wide |= {"k_cache": cache, "v_cache": cache[..., :512]}
    exact, reference = flashtile.attention_with_kvcache(**wide), case.reference(tensors)
    assert reference.error((exact,)) < 1e-12 < reference.limit < 0.02
    assert reference.error((flashtile.attention_with_kvcache(**tensors),)) <= reference.limit
    for last in (0, exact.shape[0] - 1) if case in LATENT else (x - 1 for x in case.bounds[1:]):
        wrong = exact.clone()
        (wrong if case in LATENT else wrong.view(-1, *wrong.shape[-2:]))[last] *= 1.2
        assert reference.error((wrong,)) > reference.limit
    wrong[0, ..., 0] = torch.nan
    assert not reference.error((wrong,)) <= reference.limit


def test_steps_are_checked_and_timed(command):
    rows, printed = command(serving, f"{OPTIONS} --providers flashtile-cpu,fa3")
    assert [table.case_of(row) for row in rows] == STEPS and {row.suite for row in rows} == {"serving"}
    assert all(row.median_ms > 0 and 0 < row.error < 0.01 for row in rows)
    assert "d16-h4x2-tiny-page16-dense-loop" in printed


def test_what_own_bits_cost_is_printed(command):
    rows, printed = command(serving, f"{OPTIONS} --providers flashtile,flashtile-invariant,flashtile-strict")
    assert len(rows) == 3 * len(STEPS) and all(0 < row.error < 0.01 for row in rows)
    # Of dense variants too.
    lines = [line.split() for line in printed.splitlines() if line.startswith("flashtile-strict")]
    assert any(len(line) == 4 and all(float(x) > 0 for x in line[1:]) for line in lines)
    assert "time over flashtile" in printed


def forgetful():
    """Writes the last sequence's rows in its first call alone, and returns the same memory again."""
    kept = []

    def call(whole, **tensors):
        out = whole(**tensors)
        kept.append(out)
        kept[0][:-12] = out[:-12]
        return kept[0]

    return call


@pytest.mark.parametrize(
    "fault",
    [
        lambda whole, **tensors: whole(**tensors, causal=False),
        lambda whole, page_table, **tensors: whole(page_table=page_table.flip(1), **tensors),
        lambda whole, cache_seqlens, **tensors: whole(cache_seqlens=cache_seqlens - 1, **tensors),
        lambda whole, cu_seqlens_q, **tensors: whole(cu_seqlens_q=cu_seqlens_q.clamp(max=17), **tensors),
        forgetful(),
    ],
    ids=["mask", "pages", "lengths", "bounds", "unwritten"],
)
def test_a_wrong_step_gets_no_time(tmp_path, monkeypatch, fault):
    whole = flashtile.attention_with_kvcache
    monkeypatch.setattr(flashtile, "attention_with_kvcache", lambda **tensors: fault(whole, **tensors))
    pool, session = caches.draw_pool([PACKED], CPU), session_of(tmp_path, "serving")
    (row,) = decode.run_group((PACKED,), [PROVIDERS["flashtile-cpu"]], session, pool, 2, 0.1)
    assert row.median_ms is None and row.error.startswith("wrong: relative error ")


def test_latent_rows_are_checked_and_timed(command):
    rows, printed = command(mla, OPTIONS)
    assert [table.case_of(row) for row in rows] == LATENT and {row.suite for row in rows} == {"mla"}
    assert all(row.median_ms > 0 and 0 < row.error < 0.01 for row in rows)
    assert "h16-q1-b2-tiny-page16-loop" in printed
