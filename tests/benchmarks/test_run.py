import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import ablations, memory, results, run
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


class Clock:
    """Seconds that pass only when something says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Takes(Fake):
    """Eager attention that takes a while by a clock of its own: to prepare, and each call."""

    def __init__(self, name, clock, *, prepare_s=0.0, call_s=0.0):
        super().__init__(name)
        self.clock, self.prepare_s, self.call_s, self.calls = clock, prepare_s, call_s, 0

    def prepare(self, case, inputs, what=None):
        self.clock.now_s += self.prepare_s
        call = super().prepare(case, inputs, what)

        def slow():
            self.clock.now_s += self.call_s
            self.calls += 1
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
    clock = Clock()
    slow = Takes("slow", clock, prepare_s=10.0)
    assert len(rows_of(tmp_path, [slow], cases=[SMALL] * 4, deadline=Deadline(25.0, clock))) == 2
    assert "stopped after 2 of 4 cells" in capsys.readouterr().out
    assert rows_of(tmp_path / "none", [Fake("a")], deadline=Deadline(-1.0, clock)) == []


@pytest.mark.parametrize(("budget_s", "rows"), [(8.5, 0), (9.5, 1), (100.0, 1)])
def test_a_cell_of_fewer_than_three_rounds_is_dropped(tmp_path, capsys, budget_s, rows):
    clock = Clock()
    slow = Takes("slow", clock, call_s=1.0)
    assert len(rows_of(tmp_path, [slow], deadline=Deadline(budget_s, clock))) == rows
    assert ("rounds were done at the deadline: stopped after 0" in capsys.readouterr().out) == (rows == 0)


HANGING = """
import sys, threading
from benchmarks import providers, run, session
from tests.benchmarks.test_run import SMALL, Fake
from dataclasses import replace

hangs = threading.Event()

class Hangs(Fake):
    def prepare(self, case, inputs, what=None):
        if case.seqlen_q != 48:
            hangs.set()
            threading.Event().wait()
        return super().prepare(case, inputs, what)

class Timer(threading.Thread):
    '''Goes off when something hangs, however long that takes to come about.'''
    def __init__(self, seconds, stop):
        super().__init__(target=lambda: (hangs.wait(), stop()), daemon=True)
    def cancel(self):
        pass

session.threading.Timer = Timer
providers.PROVIDERS["hangs"] = Hangs("hangs")
run.suite = lambda name, dtype: [SMALL, replace(SMALL, seqlen_q=49, seqlen_k=49)]
sys.exit(run.main(["cpu", "--providers", "hangs,eager", "--rounds", "2", "--burst-ms", "0.5", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_a_budget_ends_a_run_that_hangs_and_shows_the_rows_before(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", HANGING, "--out", str(out), "--budget-s", "1e6", "--commit", "abc"]
    done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == OUT_OF_TIME, done.stderr
    assert {row.provider for row in results.read([out])} == {"hangs", "eager"}
    assert done.stdout.rstrip().endswith(f"2 rows appended to {out}")
    assert "in the middle of a cell" in done.stdout and SMALL.name in done.stdout


def test_resuming_measures_only_what_is_missing_or_failed(tmp_path, capsys, monkeypatch):
    other = replace(SMALL, seqlen_q=40, seqlen_k=40)
    monkeypatch.setattr(run, "suite", lambda name, dtype: [SMALL, other])
    out = tmp_path / "rows.jsonl"
    options = ["cpu", "--rounds", "2", "--burst-ms", "0.5", "--out", str(out), "--providers"]
    assert run.main([*options, "eager,sdpa", "--cells", "s48", "--commit", "abc"]) == 0
    assert run.main([*options, "eager,sdpa", "--resume", "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    assert "2 rows appended" in printed.splitlines()[-1] and printed.count(SMALL.name) > 2
    assert [row.case["seqlen_q"] for row in results.read([out])] == [48, 48, 40, 40]
    assert run.main([*options, "eager,sdpa", "--resume", "--commit", "abc"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"0 rows appended to {out}")
    # Other sources, another provider: all measured again.
    for names, commit in (("eager", "abd"), ("eager,sdpa,flashtile-cpu", "abc")):
        before = len(results.read([out]))
        assert run.main([*options, names, "--resume", "--commit", commit]) == 0
        assert len(results.read([out])) == before + 2 * len(names.split(","))
    rows = results.read([out])[:4]
    out.unlink()
    results.append(out, [replace(rows[0], error="failed: boom"), *rows[1:]])
    assert run.main([*options, "eager,sdpa", "--resume", "--commit", "abc"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"2 rows appended to {out}")


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


def test_gpu_providers_say_why_they_are_missing_here():
    assert PROVIDERS["fa3"].missing("forward", CPU) == "does not run on cpu"
    assert PROVIDERS["flashtile-cpu"].missing("forward", torch.device("cuda")) == "does not run on cuda"


def test_standard_attention_refuses_what_does_not_fit():
    case = Case("forward", "bfloat16", 512, 2**20, 2**20, 64, 64, 8)
    small = make_inputs(SMALL, CPU)
    assert Eager().refusal(case, small).startswith("does not fit: ")
    assert Eager().refusal(SMALL, small) is None


def test_the_command_runs_a_cell_and_prints_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "suite", lambda name, dtype: [SMALL])
    out = tmp_path / "cpu.jsonl"
    assert run.main(["cpu", "--rounds", "2", "--burst-ms", "0.5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "cell (ms)" in printed and "cpu / best peer" in printed and "rows appended to" in printed
    assert {r.provider for r in results.read([out])} == {"flashtile-cpu", "sdpa"}


def test_the_command_refuses_what_it_cannot_do(capsys):
    assert run.main(["cpu", "--providers", "nobody"]) == 2
    assert "must be one of" in capsys.readouterr().err
    assert run.main(["cpu", "--cells", "nothing"]) == 2
    if not torch.cuda.is_available():
        assert run.main(["forward"]) == 2
        assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fa2", "cudnn"])
@pytest.mark.parametrize("what", ["forward", "backward", STEP])
def test_arguments_of_pytorchs_operators_fit_their_schemas(name, what):
    case = Case("forward" if what == "forward" else "backward", "bfloat16", 2, 128, 128, 4, 4, 64, causal=True)
    tensors = [torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    provider = PROVIDERS[name]
    outputs = provider.native(provider.prepare(case, Inputs(*tensors, None), what)(), case)
    assert [tuple(x.shape) for x in outputs] == [(2, 128, 4, 64)] * (1 if what == "forward" else 3)
    assert all(x.is_contiguous() for x in outputs)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_arguments_fit_the_schema_of_the_flash_kernel(direction):
    case = Case(direction, "bfloat16", 2, 100, 100, 4, 4, 64, causal=True, lengths=(28, 100))
    tensors = [torch.empty(128, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    outputs = PROVIDERS["fa2"].prepare(case, Inputs(*tensors, bounds))()
    assert [tuple(x.shape) for x in outputs] == [(128, 4, 64)] * (1 if direction == "forward" else 3)
    assert PROVIDERS["cudnn"].refusal(case, make_inputs(case, CPU)) == "no packed sequences"
    assert PROVIDERS["fa2"].refusal(case, make_inputs(case, CPU)) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flash_attention_2_takes_groups_windows_and_narrower_values(direction):
    case = Case(direction, "bfloat16", 2, 40, 60, 4, 2, 64, causal=True, window=(16, 0), head_dim_v=32)
    shapes = ((40, 4, 64), (60, 2, 64), (60, 2, 32), (40, 4, 32))
    tensors = [torch.empty(2, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    outputs = PROVIDERS["fa2"].prepare(case, Inputs(*tensors, None))()
    wanted = shapes[3:] if direction == "forward" else shapes[:3]
    assert [tuple(x.shape[1:]) for x in outputs] == [*wanted]


def test_growth_is_the_exponent_between_the_two_longest():
    assert memory.growth([(1024, 10), (2048, 100), (4096, 200)]) == pytest.approx(1.0)
    assert memory.growth([(1024, 1), (2048, 4)]) == pytest.approx(2.0)
    assert memory.growth([(1024, 1)]) is None and memory.growth([(1024, 0), (2048, 0)]) is None


@pytest.mark.parametrize("more", [{"bias": "trained"}, {"bias": "constant", "causal": True, "softcap": 3.0},
                                  {"causal": True, "window": (9, 0), "sinks": True}], ids=str)  # fmt: skip
def test_features_of_models_reach_those_that_have_them(more: dict[str, Any]) -> None:
    for direction in ("forward", "backward"):
        case = Case(direction, "float32", 2, 40, 40, 4, 2, 16, **more)
        inputs = make_inputs(case, CPU)
        reference = Reference(case, inputs)
        for name in ("flashtile", "flex") if direction == "forward" else ("flashtile",):
            outputs = PROVIDERS[name].native(prepared(PROVIDERS[name], case, inputs)(), case)
            assert reference.error(outputs) < reference.limit
            assert len(outputs) == (1 if direction == "forward" else 4 if case.bias == "trained" else 3)
    with pytest.raises(NotTimedError, match=f"refused: no {'bias' if case.bias else 'sinks'}"):
        prepared(PROVIDERS["fa2"], case, inputs)
    with pytest.raises(NotTimedError, match="no backward on the CPU"):
        prepared(PROVIDERS["flex"], case, inputs)
    assert PROVIDERS["flex"].refusal(SMALL, make_inputs(SMALL, CPU)) == "not asked"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_padding_reaches_those_that_have_it(direction: Any) -> None:
    case = Case(direction, "float32", 3, 20, 40, 2, 2, 16, padded=True)
    inputs = make_inputs(case, CPU)
    reference = Reference(case, inputs)
    for name in ("flashtile", "sdpa"):
        outputs = PROVIDERS[name].native(prepared(PROVIDERS[name], case, inputs)(), case)
        assert reference.error(outputs) < reference.limit
    assert Reference(replace(case, padded=False), replace(inputs, mask=None)).error(outputs) > reference.limit


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_is_compared_with_another_draw(direction: Any) -> None:
    case = Case(direction, "float32", 2, 512, 512, 2, 2, 16, causal=True, dropout=0.1)
    inputs = make_inputs(case, CPU)
    reference = Reference(case, inputs)
    for name in ("flashtile", "sdpa"):
        outputs = PROVIDERS[name].native(prepared(PROVIDERS[name], case, inputs)(), case)
        assert reference.error(outputs) < reference.limit
    # Without dropout, and with half of it.
    for dropout in (0.0, 0.05):
        other = replace(case, dropout=dropout)
        outputs = PROVIDERS["flashtile"].native(prepared(PROVIDERS["flashtile"], other, inputs)(), other)
        assert reference.error(outputs) > 1.5 * reference.limit
    with pytest.raises(NotTimedError, match="refused: no dropout"):
        prepared(PROVIDERS["fa3"], case, inputs)


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
