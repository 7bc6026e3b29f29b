import pytest
import torch

from benchmarks import results, train
from benchmarks.session import Session
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


def test_the_command_measures_speeds_and_curves(command):
    small = "--device cpu --tokens 32 --seqlen 16 --contexts 16,32 --width 64 --speed-width 64 --layers 1"
    rows, printed = command(train, f"{small} --rounds 1 --steps 3")
    training = train.training_of(rows)
    assert sorted(training.tokens_per_s) == [16, 32] and not training.errors
    assert all(set(x) == {"flashtile-cpu", "sdpa", "eager"} for x in training.tokens_per_s.values())
    assert all(rate > 0 for x in training.tokens_per_s.values() for rate in x.values())
    assert list(map(len, training.losses.values())) == [3, 3, 3] and "tokens/s" in printed
