from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import ablations, results, run
from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.checks import Reference
from benchmarks.providers import PROVIDERS, STEP, Eager, Flashtile, Sdpa, prepared
from benchmarks.session import OUT_OF_TIME, NotTimedError, Session
from benchmarks.timing import Deadline
from flashtile.core.errors import InvalidInputError, UnsupportedError

CPU = torch.device("cpu")
SMALL = Case("forward", "float32", 2, 48, 48, 2, 2, 16, causal=True)


class Fake(Eager):
    """Eager attention with a fault."""

    code = "a fault"

    def __init__(self, name, *, scale=1.0, fail=None, refuse=None, unwritten=False):
        self.name, self.scale, self.fail, self.refuse, self.unwritten = name, scale, fail, refuse, unwritten
        self.buffer = None

    def refusal(self, case, inputs):
        return self.refuse

    def prepare(self, case, inputs, what=None):
        if self.fail:
            raise RuntimeError(self.fail)
        call = super().prepare(case, inputs, what)

        def faulty():
            outputs = tuple(x.contiguous() * self.scale for x in call())
            if not self.unwritten:
                return outputs
            if self.buffer is None:
                self.buffer = outputs[0].clone()
            else:
                self.buffer[:, :, 1:] = outputs[0][:, :, 1:]  # row 0 is left as the last caller left it
            return (self.buffer,)

        return faulty


def session_of(folder, suite="cpu", deadline=None):
    return Session(results.new_run(suite, CPU, commit="abc"), CPU, folder / "rows.jsonl", deadline or Deadline())


def rows_of(folder, providers, cases=(SMALL,), deadline=None):
    session = session_of(folder, deadline=deadline)
    rows, code = session.each(
        cases, lambda c: c.name, lambda c: run.run_cell(c, providers, session, rounds=4, burst_ms=1e-9)
    )
    assert session.saved() == rows and code == (0 if len(rows) == len(cases) * len(providers) else OUT_OF_TIME)
    return rows


class Takes(Fake):
    """Eager attention that takes a while by a clock of its own: to prepare, and each call."""

    def __init__(self, name, *, prepare_s=0.0, call_s=0.0):
        super().__init__(name)
        self.now_s, self.prepare_s, self.call_s = 0.0, prepare_s, call_s

    def clock(self):
        return self.now_s

    def prepare(self, case, inputs, what=None):
        self.now_s += self.prepare_s
        call = super().prepare(case, inputs, what)

        def slow():
            self.now_s += self.call_s
            return call()

        return slow


def test_a_right_provider_is_timed_and_a_wrong_one_is_not(tmp_path):
    right, wrong = rows_of(tmp_path, [Fake("right"), Fake("wrong", scale=1.01)])
    assert right.median_ms > 0 and right.tflops == pytest.approx(SMALL.flops() / (right.median_ms * 1e9))
    assert 0 < right.error < 1e-5
    assert wrong.median_ms is wrong.tflops is wrong.spread is None
    assert wrong.error.startswith("wrong: relative error 0.01, limit ")


def test_an_output_left_unwritten_is_found(tmp_path):
    (row,) = rows_of(tmp_path, [Fake("lazy", unwritten=True)])
    assert row.median_ms is None and row.error.startswith("wrong: relative error nan")


def test_a_failure_and_a_refusal_cost_only_their_own_row(tmp_path):
    failed, refused, right = rows_of(tmp_path, [Fake("a", fail="boom"), Fake("b", refuse="too wide"), Fake("c")])
    assert failed.error == "failed: RuntimeError: boom"
    assert refused.error == "refused: too wide"
    assert right.median_ms > 0


def test_the_budget_stops_between_cells_and_keeps_the_rows(tmp_path, capsys):
    slow = Takes("slow", prepare_s=10.0)
    assert len(rows_of(tmp_path, [slow], cases=[SMALL] * 4, deadline=Deadline(25.0, slow.clock))) == 2
    assert "stopped after 2 of 4 cells" in capsys.readouterr().out


@pytest.mark.parametrize(("budget_s", "rows"), [(8.5, 0), (9.5, 1)])
def test_a_cell_of_fewer_than_three_rounds_is_dropped(tmp_path, capsys, budget_s, rows):
    slow = Takes("slow", call_s=1.0)
    assert len(rows_of(tmp_path, [slow], deadline=Deadline(budget_s, slow.clock))) == rows
    assert ("rounds were done at the deadline: stopped after 0" in capsys.readouterr().out) == (rows == 0)


def test_resuming_measures_only_what_is_missing_or_failed(command, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "suite", lambda name, dtype: [SMALL, replace(SMALL, seqlen_q=40, seqlen_k=40)])
    options = "cpu --rounds 2 --burst-ms 0.5 --providers eager,sdpa"
    rows, printed = command(run, f"{options} --cells s48")
    assert len(rows) == 2 and "cell (ms)" in printed
    rows, printed = command(run, f"{options} --resume")
    assert [row.case["seqlen_q"] for row in rows] == [48, 48, 40, 40]
    assert "2 rows appended" in printed.splitlines()[-1] and SMALL.name in printed
    assert command(run, f"{options} --resume")[0] == rows
    # Other sources, another provider: all measured again.
    for more, count in (("--commit abd", 8), ("--providers eager,sdpa,flashtile-cpu", 14)):
        assert len(command(run, f"{options} --resume {more}")[0]) == count
    out = tmp_path / "rows.jsonl"
    out.unlink()
    results.append(out, [replace(rows[0], error="failed: boom"), *rows[1:]])
    assert len(command(run, f"{options} --resume")[0]) == 6


def test_every_provider_says_which_code_runs_and_nothing_runs_in_its_place():
    assert PROVIDERS["flashtile-hopper"].code == "backend hopper of this library"
    assert "flash_attention" in PROVIDERS["fa2"].code
    inputs = make_inputs(SMALL, CPU)
    for direction in ("forward", "backward"):
        case = replace(SMALL, direction=direction)
        assert "needs cuda tensors" in PROVIDERS["flashtile-hopper"].refusal(case, inputs)
        with pytest.raises((UnsupportedError, InvalidInputError), match="hopper"):
            PROVIDERS["flashtile-hopper"].prepare(case, inputs)()


CPU_CASES = [
    SMALL,
    Case("forward", "float32", 1, 1, 70, 4, 2, 16),
    Case("forward", "float32", 1, 64, 64, 2, 2, 16, causal=True, window=(8, 0)),
    Case("forward", "float32", 3, 30, 30, 4, 2, 16, causal=True, lengths=(3, 30, 17)),
    Case("backward", "float32", 2, 48, 48, 2, 2, 16, causal=True),
]


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda c: c.name)
def test_real_providers_agree_with_float64_on_every_kind_of_case(case, tmp_path):
    rows = rows_of(tmp_path, [Flashtile(None), Flashtile("cpu"), Sdpa(), Eager()], cases=[case])
    for row in rows:
        packed_eager = row.provider == "eager" and case.lengths is not None
        assert row.error == "refused: no packed sequences" if packed_eager else isinstance(row.error, float)
        assert (row.median_ms is None) == packed_eager


def test_standard_attention_refuses_what_does_not_fit():
    case = Case("forward", "bfloat16", 512, 2**20, 2**20, 64, 64, 8)
    small = make_inputs(SMALL, CPU)
    assert Eager().refusal(case, small).startswith("does not fit: ")
    assert Eager().refusal(SMALL, small) is None


@pytest.mark.parametrize("name", ["fa2", "cudnn"])
@pytest.mark.parametrize("what", ["forward", "backward", STEP])
def test_arguments_of_pytorchs_operators_fit_their_schemas(name, what):
    case = Case("forward" if what == "forward" else "backward", "bfloat16", 2, 128, 128, 4, 4, 64, causal=True)
    tensors = [torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    provider = PROVIDERS[name]
    outputs = provider.native(provider.prepare(case, Inputs(*tensors, None), what)(), case)
    assert [tuple(x.shape) for x in outputs] == [(2, 128, 4, 64)] * (1 if what == "forward" else 3)
    assert all(x.is_contiguous() for x in outputs)


@pytest.mark.parametrize("change", ablations.CHANGES)
def test_the_changed_design_is_right_and_one_that_is_the_same_is_refused(change: str) -> None:
    case, provider = Case("forward", "bfloat16", 1, 200, 264, 1, 1, 128), PROVIDERS[f"flashtile-hopper-{change}"]
    inputs = make_inputs(case, CPU)
    with pytest.importorskip("tests.backends.hopper.emulated").on_cpu():
        if change in ("no-pingpong", "2-stages", "2-warpgroups"):
            with pytest.raises(NotTimedError, match="so is the design"):
                prepared(provider, case, inputs)
        else:
            assert Reference(case, inputs).error(prepared(provider, case, inputs)()) < Reference(case, inputs).limit


FEATURES = {
    "bias": ("flex", {"bias": "trained"}),
    "softcap": ("flex", {"bias": "constant", "causal": True, "softcap": 3.0}),
    "sinks": ("flex", {"causal": True, "window": (9, 0), "sinks": True}),
    "padding": ("sdpa", {"padded": True}),
    "dropout": ("sdpa", {"seqlen_q": 512, "seqlen_k": 512, "causal": True, "dropout": 0.1}),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_reach_those_that_have_them(name: str, direction: Any) -> None:
    peer, more = FEATURES[name]
    case = replace(Case(direction, "float32", 2, 40, 40, 4, 4 if peer == "sdpa" else 2, 16), **more)
    inputs = make_inputs(case, CPU)
    reference = Reference(case, inputs)
    for each in ("flashtile", peer):
        if (each, direction) == ("flex", "backward"):
            with pytest.raises(NotTimedError, match="no backward on the CPU"):
                prepared(PROVIDERS[each], case, inputs)
            continue
        outputs = PROVIDERS[each].native(prepared(PROVIDERS[each], case, inputs)(), case)
        assert reference.error(outputs) < reference.limit
        assert len(outputs) == (1 if direction == "forward" else 4 if case.bias == "trained" else 3)
    if case.padded:
        assert Reference(replace(case, padded=False), replace(inputs, mask=None)).error(outputs) > reference.limit
        return
    with pytest.raises(NotTimedError, match=f"refused: no {'bias' if case.bias else name}"):
        prepared(PROVIDERS["fa3"], case, inputs)
    for dropout in (0.0, 0.05) if case.dropout else ():  # of another probability
        other = replace(case, dropout=dropout)
        outputs = PROVIDERS["flashtile"].native(prepared(PROVIDERS["flashtile"], other, inputs)(), other)
        assert reference.error(outputs) > 1.5 * reference.limit
