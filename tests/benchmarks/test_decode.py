"""The suite of cached calls: its cells, its reference, what is timed, and how the peers are called."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

import flashtile
from benchmarks import caches, decode, results
from benchmarks.caches import DecodeCase
from benchmarks.providers import PROVIDERS
from benchmarks.table import cells
from tests.benchmarks.test_run import session_of

CPU = torch.device("cpu")
TINY, MIXED = (group[0] for group in caches.groups("loop", 40, "cpu"))
EVERY = [*caches.groups("loop", 40, "cpu")[0], MIXED]


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


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
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


def test_the_cells_are_those_that_the_suite_is_to_show():
    found = [case for group in caches.groups("graph", 40) for case in group]
    names = [case.name for case in found]
    assert len(names) == len(set(names))
    assert {"d128-h32x8-b1-k1k", "d64-h71x1-b128-k128k", "d256-h16x8-b64-mixed", "d128-h32x32-b8-k128k"} <= {*names}
    assert all(f"d128-h32x8-b8-k32k-{variant}" in names for variant in caches.VARIANTS if variant)
    assert max(case.cache_bytes for case in found) <= 40e9 and "d128-h32x8-b128-k128k" not in names
    assert {case.batch for case in found if case.mixed} == {8, 64, 128}
    assert {case.seqlen_k * case.batch for group in caches.groups("host", 40) for case in group} == {1024}
    cold = [group[0] for group in caches.groups("cold", 40)]
    assert cold and all(case.copies * case.cache_bytes >= caches.COLD_BYTES >= case.cache_bytes for case in cold)
    assert all(DecodeCase(**result) == case for case in found for result in [vars(case)])


def test_bytes_are_those_of_the_keys_that_are_there():
    case = DecodeCase(32, 8, 128, 8, 8192)
    assert case.gb_per_s(1.0) == pytest.approx(2 * 8 * 8192 * 8 * 128 * 2 / 1e6)
    eight_bits = DecodeCase(32, 8, 128, 8, 8192, variant="fp8")
    assert eight_bits.gb_per_s(1.0) == case.gb_per_s(1.0) / 2
    mixed = DecodeCase(32, 8, 128, 8, 8192, mixed=True)
    assert mixed.gb_per_s(1.0) == pytest.approx(case.gb_per_s(1.0) * sum(mixed.lengths) / (8 * 8192))
    assert mixed.lengths == mixed.lengths and len({*mixed.lengths}) == 8 and max(mixed.lengths) <= 8192
    odd = DecodeCase(4, 2, 16, 3, 50, variant="page16")
    assert odd.cache_shape == (12, 16, 2, 16)


def test_pages_lie_in_any_order_and_copies_are_others():
    case = DecodeCase(4, 2, 16, 2, 64, variant="page16", measure="cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "COLD_BYTES", 5 * case.cache_bytes - 1)
        calls = caches.make_calls(case, caches.draw_pool([case], CPU))
    assert len(calls) == 5 and all(torch.equal(each["q"], calls[0]["q"]) for each in calls)
    places = {each[name].data_ptr() for each in calls for name in ("k_cache", "v_cache")}
    assert len(places) == 10
    pages = calls[0]["page_table"]
    assert sorted(pages.flatten().tolist()) == list(range(8)) != pages.flatten().tolist()


def test_the_command_checks_times_and_compares_variants(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--rounds", "2", "--burst-ms", "0.1", "--out", str(out), "--commit", "abc"]
    options += ["--providers", "flashtile-cpu,sdpa,fa3"]
    assert decode.main([*options, "--measures", "loop", "host"]) == 0
    rows = results.read([out])
    assert len(rows) == 2 * 7 * 2 and {row.case["measure"] for row in rows} == {"loop", "host"}
    assert all(row.median_ms > 0 and row.error < 0.01 for row in rows if row.provider == "flashtile-cpu")
    sdpa = {DecodeCase(**row.case).name for row in rows if row.provider == "sdpa" and row.median_ms}
    assert sdpa == {"d16-h4x2-b2-k64-loop", "d16-h4x2-b2-k64-host"}
    lines = decode.variants_table(cells(rows))
    assert len(lines) == 1 + 2 * 5
    times = {(row.case["variant"], row.case["measure"]): row.median_ms for row in rows[::2] if not row.case["mixed"]}
    shown = next(line for line in lines if line[0] == "d16-h4x2-b2-k64-q4-host")
    assert shown == [shown[0], f"{times['q4', 'host'] / times['', 'host']:.2f}", "-"]
    assert "time / plain" in capsys.readouterr().out
    assert decode.main([*options, "--resume", "--cells", "*mixed*"]) == 0
    assert len(results.read([out])) == len(rows), "the cell is there"
    assert decode.main([*options, "--cells", "*page1-loop"]) == 0
    assert len(results.read([out])) == len(rows) + 2 * 6, "a variant brings its plain cell"
    assert decode.main(["--list", "--cells", "d64-h71x1-b8-*"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "d64-h71x1-b8-k128k"


def test_a_wrong_result_and_a_key_that_is_not_written_get_no_time(tmp_path, monkeypatch):
    whole = flashtile.attention_with_kvcache

    def forgets(*, k=None, v=None, cache_seqlens, **tensors):
        """Appends nothing, and reads the row that the last one wrote."""
        return whole(
            cache_seqlens=cache_seqlens + (k is not None), **{n: x for n, x in tensors.items() if "rot" not in n}
        )

    group = (TINY, DecodeCase(4, 2, 16, 2, 64, variant="append", measure="loop"))
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


def flash_attention_3(monkeypatch):
    """Makes up its operator, with the names of the real one's schema and its rule: packed queries need the longest's
    length. Returns the set of what it was called with: is_causal, num_splits, the longest, whether there are pages."""
    seen = set()

    def fwd(
        q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1,
        window_size_right=-1, attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None,
        num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert (cu_seqlens_q is None) == (max_seqlen_q is None) == (q.dim() == 4)
        assert scheduler_metadata is pack_gqa is None
        seen.add((is_causal, num_splits, max_seqlen_q, page_table is None))
        own = {"k": k_new, "v": v_new, "cache_seqlens": seqused_k, "page_table": page_table, "rotary_cos": rotary_cos}
        own |= {"rotary_sin": rotary_sin, "causal": is_causal, "softmax_scale": softmax_scale}
        return flashtile.attention_with_kvcache(q, k, v, cu_seqlens_q=cu_seqlens_q, **own), None, None, None

    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd), raising=False)
    return seen


def test_flash_attention_3_is_called_as_its_own_function_calls_it(tmp_path, monkeypatch):
    seen = flash_attention_3(monkeypatch)
    rows = decode.run_group(
        tuple(EVERY), [PROVIDERS["fa3"]], session_of(tmp_path, "decode"), caches.draw_pool(EVERY, CPU), 2, 0.1
    )
    assert {row.case["variant"] for row in rows if row.median_ms is None} == {"fp8"}
    assert all(row.error < 0.01 for row in rows if row.median_ms)
    assert {each[:3] for each in seen} == {(True, 0, None)}


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
    decode.sampler("graph", calls[:1], CPU, burst_ms=2.5)
    assert recording == [0] * 10
    monkeypatch.setattr(decode, "loop_ms", lambda call, device, reps: 9.0)
    decode.sampler("graph", calls[:1], CPU, burst_ms=2.5)
    assert recording == [0], "one long call is enough"
