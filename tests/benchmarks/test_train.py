from dataclasses import replace

import pytest
import torch

from benchmarks import results, train
from benchmarks.session import OUT_OF_TIME, Session
from benchmarks.timing import Deadline
from flashtile_lab.examples.char_gpt import shakespeare

CPU = torch.device("cpu")
TINY = train.Recipe("loss", seqlen=16, batch=2, num_layers=1, num_heads=2, d_model=16, steps=6, learning_rate=5e-3)


@pytest.fixture(scope="module")
def text():
    return shakespeare()


@pytest.fixture
def session(tmp_path):
    return Session(results.new_run("train", CPU, commit="abc"), CPU, tmp_path / "rows.jsonl")


def test_every_attention_learns_alike_from_the_same_weights_and_excerpts(text, session, monkeypatch):
    monkeypatch.setattr(train, "PIECE", 4)
    rows, code = train.curves(TINY, ["flashtile-cpu", "sdpa", "eager"], text, session)
    assert session.saved() == rows and code == 0
    assert [(row.values["first_step"], len(row.values["losses"])) for row in rows] == [(0, 4)] * 3 + [(4, 2)] * 3
    losses = train.training_of(rows).losses
    assert list(map(len, losses.values())) == [6, 6, 6]
    assert losses["eager"][0] == pytest.approx(torch.tensor(float(len(text.alphabet))).log().item(), abs=2e-2)
    assert losses["eager"][-1] < losses["eager"][0] - 0.01
    for name in ("flashtile-cpu", "sdpa"):
        assert losses[name] == pytest.approx(losses["eager"], abs=2e-2)


def test_the_flash_kernel_is_called_as_its_schema_says_and_has_gradients():
    q, k, v = (torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    out = train.attention_of("fa2")(q, k, v)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert out.grad_fn.name().startswith("FlashAttentionBackward") and len(out.grad_fn.next_functions) == 3


def test_another_attention_has_another_curve(text, session, monkeypatch):
    honest = train.attention_of

    def attention_of(name):
        return (lambda q, k, v: honest("eager")(q * 0, k, v)) if name == "wrong" else honest(name)

    monkeypatch.setattr(train, "attention_of", attention_of)
    recipe = train.Recipe("loss", 16, 4, 1, 2, 32, 40, 2e-2)
    losses = train.training_of(train.curves(recipe, ["wrong", "eager"], text, session)[0]).losses
    assert losses["wrong"][0] == losses["eager"][0]
    assert max(abs(a - b) for a, b in zip(losses["wrong"], losses["eager"], strict=True)) > 5e-3


def test_an_attention_that_fails_costs_only_its_own_curve(text, session):
    rows, _ = train.curves(TINY, ["flashtile-hopper", "eager"], text, session)
    assert rows[0].provider == "flashtile-hopper" and rows[0].error.startswith("refused: ")
    assert "hopper" in rows[0].error and rows[0].values is None
    found = train.training_of(rows)
    assert list(found.losses) == ["eager"] and "flashtile-hopper, context 16" in found.errors


def test_a_loss_that_is_not_finite_ends_a_curve(session):
    row = train.curve_row(session, TINY, "sdpa", 100, [1.0, float("nan")], 0.1)
    assert row.error == "wrong: the loss of step 101 is nan" and row.values is None


def test_the_deadline_stops_all_curves_after_the_same_piece(text, session, monkeypatch):
    monkeypatch.setattr(train, "PIECE", 4)
    now_s = iter(range(100))
    late = replace(session, deadline=Deadline(5.0, lambda: next(now_s)))
    rows, code = train.curves(TINY, ["sdpa", "eager"], text, late)
    assert [len(row.values["losses"]) for row in rows] == [4, 4] and code == OUT_OF_TIME


def test_the_last_run_with_curves_counts(session):
    def piece(run, name, first, losses):
        recipe = {"measure": "loss", "seqlen": 16}
        values = {"first_step": first, "losses": losses, "seconds": 1.0}
        return results.Row("train", run, "d", {}, "c", recipe, name, None, None, None, None, values=values)

    rows = [piece("1", "eager", 0, [9.0]), piece("2", "eager", 0, [3.0, 2.0]), piece("2", "eager", 2, [1.0])]
    rows += [piece("2", "sdpa", 0, [3.0, 2.0]), piece("2", "sdpa", 4, [0.0])]
    training = train.training_of(rows)
    assert training.losses == {"eager": [3.0, 2.0, 1.0], "sdpa": [3.0, 2.0]}
    assert train.smooth([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2.0, 6.0] and train.smooth([4.0], 2) == [4.0]
    (table,) = train.tables(training)
    assert table[1][:2] == ["sdpa", "2"] and table[2][:4] == ["eager", "3", "3.0000", "2.0000"]


def test_the_command_measures_speeds_and_curves(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    small = ["--device", "cpu", "--tokens", "32", "--seqlen", "16", "--contexts", "16,32", "--width", "64"]
    options = ["--speed-width", "64", "--layers", "1", "--rounds", "1", "--steps", "3", "--out", str(out)]
    assert train.main([*small, *options, "--commit", "abc"]) == 0
    training = train.training_of(results.read([out]))
    assert sorted(training.tokens_per_s) == [16, 32]
    assert all(set(x) == {"flashtile-cpu", "sdpa", "eager"} for x in training.tokens_per_s.values())
    assert all(rate > 0 for x in training.tokens_per_s.values() for rate in x.values())
    assert list(map(len, training.losses.values())) == [3, 3, 3]
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "mean distance" in printed and not training.errors
