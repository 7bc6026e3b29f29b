"""The benchmark of several GPUs, on two processes of this machine."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import distributed, results
from benchmarks.cases import Case


def test_cases_are_of_the_whole():
    found = distributed.cases([8192], 2, ["16/16", "32/8"], ["causal", "packed", "window"], "bfloat16")
    assert [case.num_heads_kv for case in found] == [16] * 3 + [8] * 3
    causal, packed, window = found[:3]
    assert causal.seqlen_q == sum(packed.lengths) == 16384 and window.window == (2048, 0)
    documents, short = distributed.cases([8192], 2, ["16/16"], ["docs2k", "window1k"], "bfloat16")
    assert sum(documents.lengths) == 16384 and short.window == (1023, 0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        layouts = [distributed.layout_of(case, mesh) for case in (causal, packed, window, documents, short)]
    finally:
        dist.destroy_process_group()
    assert [layouts[0], layouts[2], layouts[4]] == ["zigzag", "contiguous", "contiguous"]
    assert [layouts[1].lengths, layouts[3].lengths] == [packed.lengths, documents.lengths]


def test_a_share_is_of_one_gpus_time_over_their_number():
    case = {**Case("forward", "bfloat16", 1, 64, 64, 2, 2, 128, causal=True).to_dict(), "ranks": 4}
    run = results.Run("distributed", "r", "d", {}, "c")
    rows = [
        run.row(case, distributed.ONE, median_ms=8.0, tflops=10.0),
        run.row(case, "flashtile-ring", median_ms=2.5, tflops=9.0),
        run.row(case, "torch-allgather-flash", error="refused: no"),
    ]
    table = distributed.shares(rows)
    assert len(table) == 3
    assert table[1][2:] == [distributed.ONE, "8.000", "10", ""]
    assert table[2][2:] == ["flashtile-ring", "2.500", "9", "0.800"]


@pytest.mark.long
def test_the_command_checks_and_times_on_the_cpu(tmp_path, capfd):
    out = tmp_path / "rows.jsonl"
    small = ["--device", "cpu", "--tokens", "32", "--heads", "2/2", "--dtype", "float32", "--rounds", "2"]
    options = ["--burst-ms", "0.1", "--masks", "causal,packed", "--out", str(out), "--commit", "abc"]
    assert distributed.main([*small, *options]) == 0
    rows = results.read([out])
    assert len(rows) == 2 * 2 * len(distributed.PROVIDERS)
    timed = [row for row in rows if row.median_ms is not None]
    assert {row.provider for row in timed} == {distributed.ONE, *(f"flashtile-{x}" for x in distributed.OURS)}
    assert all(row.error < 1e-5 and row.tflops > 0 and row.case["ranks"] == 2 for row in timed)
    # PyTorch's has no kernel for the CPU, and no packed sequences anywhere.
    others = [row.error for row in rows if row.provider in distributed.PEERS]
    assert {text.partition(":")[0] for text in others} == {"failed", "refused"}
    assert "share of the ideal" in capfd.readouterr().out


def test_a_wrong_result_gets_no_time(monkeypatch):
    import torch

    monkeypatch.setattr(distributed.dist, "all_reduce", lambda *args: None)
    case = Case("forward", "bfloat16", 1, 4, 4, 1, 1, 8)
    right = torch.ones(1, 4, 1, 8)
    assert distributed.compared((right * 1.001,), (right,), case, False) == pytest.approx(1e-3, rel=1e-3)
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(distributed.NotTimedError, match="wrong: relative error"):
            distributed.compared((wrong,), (right,), case, False)
