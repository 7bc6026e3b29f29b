"""The examples run, and the model in the package is what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile_lab.examples import char_gpt
from flashtile_lab.examples.char_gpt import CharGPT, GPTConfig, Text, flash_attention, standard_attention

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def text() -> Text:
    return char_gpt.shakespeare()


def _printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_quickstart_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    out = _printed("01_quickstart.py", capsys)
    error = float(re.search(r"against float64: (\S+)", out)[1])
    assert 0 < error < (1e-2 if torch.cuda.is_available() else 1e-5)
    assert "forward: " in out


def test_varlen_and_window_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "packed equals one by one" in _printed("02_varlen.py", capsys)
    out = _printed("03_window_and_bias.py", capsys)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", out)]
    assert losses[-1] < 0.9 * losses[0]
    left, value = (float(x) for x in re.search(r"sinks: (\S+) of a value of (\S+) is", out).groups())
    assert abs(left) < abs(value)


def test_split_and_merge_gives_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    differences = re.findall(r"(?:out differs|lse) by ([^\s,]+)", _printed("04_split_and_merge.py", capsys))
    assert len(differences) == 5
    assert max(map(float, differences)) < 1e-5


def test_functions_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    out = _printed("08_your_own_mask.py", capsys)
    assert float(re.search(r"memory by (\S+)", out)[1]) < 1e-4 and "equals window_size: True" in out
    out = _printed("09_learned_bias.py", capsys)
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\S+),", out))
    assert last < 0.5 * first and float(re.search(r"differ by (\S+)", out)[1]) < 1e-4


def test_an_energy_is_trained_by_its_forces(capsys: pytest.CaptureFixture[str]) -> None:
    out = _printed("10_forces.py", capsys)
    assert float(re.search(r"fell to (\S+) of", out)[1]) < 0.7


@pytest.mark.long
def test_training_example_learns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["05", "--steps", "50", "--seqlen", "32", "--batch", "4"])
    out = _printed("05_train_char_gpt.py", capsys)
    first, last = (float(loss) for loss in re.findall(r"loss (\S+),", out))
    assert last < first - 0.8
    assert "JULIET" in out


@pytest.mark.long
def test_serving_example_writes_what_recomputing_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["06", "--requests", "2", "--steps", "4"])
    out = _printed("06_serve_char_gpt.py", capsys)
    found = re.findall(r"^(.+): ([\d,]+) tokens/s, (\d) of 2 texts as when recomputed", out, re.MULTILINE)
    assert [name for name, _, _ in found] == ["recomputed", "static cache, SDPA", "served"]
    assert all(rate != "0" for _, rate, _ in found)
    assert torch.cuda.is_available() or all(same == "2" for _, _, same in found)


@pytest.mark.long
def test_context_parallel_example_has_the_losses_of_one_process() -> None:
    # Its processes import the script by its path, so it is not run inside this one.
    command = [sys.executable, str(EXAMPLES / "07_context_parallel.py"), "--seqlen", "509", "--steps", "4"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    one, two = ([float(x) for x in line.split()] for line in re.findall(r"losses ([\d. ]+),", out))
    assert len(one) == 4 and one[-1] < one[0] - 0.2
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 2e-4


def test_both_attentions_agree_in_output_and_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 33, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 33, 3, 16, dtype=torch.float64)
    results = []
    for attention in (standard_attention, flash_attention):
        out = attention(q, k, v)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for standard, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, standard, rtol=1e-12, atol=1e-12)


def test_text_round_trips_and_splits(text: Text) -> None:
    assert len(text.alphabet) == 61
    assert text.decode(text.encode("To be, or not")) == "To be, or not"
    assert len(text.train) + len(text.held_out) == 129_891
    excerpts, following = char_gpt.batch_of(text.train, 16, 5, torch.Generator().manual_seed(0))
    assert excerpts.shape == (5, 16)
    assert torch.equal(excerpts[:, 1:], following[:, :-1])


def test_a_model_knows_nothing_at_first_and_never_sees_the_future(text: Text) -> None:
    torch.manual_seed(0)
    model = CharGPT(GPTConfig(61, seqlen=16, num_layers=2, num_heads=2, d_model=32))
    tokens = text.train[None, :16]
    assert char_gpt.loss_of(model, tokens, text.train[None, 1:17]).item() == pytest.approx(
        torch.tensor(61.0).log().item()
    )
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.out.weight)
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-3
    # Longer than it can see at once.
    assert model.write(tokens, 20).shape == (1, 36)
    assert torch.equal(model.write(tokens, 3)[:, :16], tokens)
