import contextlib

import pytest
import torch

from benchmarks import results, tune
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable.config import PortableTiles


def test_tiles_are_injected_where_the_backend_looks_for_them():
    with tune.Candidate("portable", "dk", (256, 256), "64x64x8x2 T").injected():
        held = dict(on_trial())
    assert held == {
        "dk": PortableTiles(64, 64, 8, 2, tma=True),
        "dv": PortableTiles(64, 128, 8, 2, tma=True, one_loop=True),
    }
    assert not on_trial()


def test_a_wrong_candidate_is_not_timed_and_the_others_are_compared(tmp_path, capsys, monkeypatch):
    """The whole command with the CPU backend in place of a GPU's: what it makes of tiles is made up."""
    monkeypatch.setitem(tune.KERNELS, "cpu", ("forward",))
    named = lambda *_: [tune.Candidate("cpu", "forward", (16, 16), name) for name in (tune.TABLE, "a", "bad")]  # noqa: E731
    monkeypatch.setattr(tune, "candidates", named)
    monkeypatch.setattr(tune.Candidate, "injected", lambda self: contextlib.nullcontext())
    honest = tune.wrong
    monkeypatch.setattr(tune, "wrong", lambda c, *rest: "by 1" if c.name == "bad" else honest(c, *rest))
    here = lambda function, work, *_, **__: ((item, function(*item)) for item in work)  # noqa: E731
    monkeypatch.setattr(tune, "side_by_side", here)
    monkeypatch.setattr(tune, "HIDDEN_SIZE", 32)
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--head-dims", "16", "--seqlens", "64,32", "--masks", "causal", "--rounds", "2"]
    monkeypatch.setattr(tune, "TOTAL_TOKENS", 64)
    monkeypatch.setattr(tune, "choose_providers", lambda *_: [])
    assert tune.main(["cpu", "forward", *options, "--out", str(out), "--commit", "abc"]) == 1
    rows = results.read([out])
    assert {(r.case["config"], r.case["seqlen_k"]) for r in rows} == {(n, s) for n in ("table", "a") for s in (32, 64)}
    assert all(r.suite == "tune" and r.median_ms > 0 and r.case["kernel"] == "forward" for r in rows)
    printed = capsys.readouterr().out
    assert "bad: by 1" in printed and "a: right" in printed
    by_name = {line[1]: line[2:] for line in tune.summary(rows)[1:]}
    assert by_name["table"] == ["1.000", "1.000"] and float(by_name["a"][0]) > 0
    with pytest.raises(SystemExit):
        tune.main(["portable", "backward"])
    if not torch.cuda.is_available():
        assert tune.main(["hopper", "forward"]) == 2
