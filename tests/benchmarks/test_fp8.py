"""Suite fp8: its cells, its checks, cuDNN's graph on a stand-in that reads the memory it is given, tables and plot."""

import ctypes
import enum
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cudnn_fp8, results, run, table
from benchmarks.cases import Case, make_inputs, suite
from benchmarks.cudnn_fp8 import OF_OUT
from benchmarks.providers import PROVIDERS
from benchmarks.session import Session
from flashtile.call.quantized import E4M3

CPU = torch.device("cpu")
SMALL = Case("forward", "bfloat16", 2, 160, 160, 2, 2, 32, causal=True)
ROUNDED = replace(SMALL, direction="quantized", causal=False)


def measured(folder, case, *names):
    session = Session(results.new_run("fp8", CPU, commit="abc"), CPU, folder / "rows.jsonl")
    return {each.provider: each for each in run.run_cell(case, [PROVIDERS[n] for n in names], session, rounds=2)}


def test_the_cells_are_what_the_goals_are_stated_for():
    cells = suite("fp8")
    attention = [c for c in cells if c.direction == "forward"]
    assert len(cells) == len({c.name for c in cells}) == 27 and len(attention) == 24
    assert {(c.head_dim, c.causal, c.seqlen_q) for c in attention} == {
        (d, x, n) for d in (64, 128, 256) for x in (False, True) for n in (2048, 8192, 16384, 32768)
    }
    assert {c.batch * c.seqlen_q for c in cells} == {16384, 32768} and {c.num_heads_q * c.head_dim for c in cells} == {
        2048
    }
    # 2 bytes read and 1 written of a number, and 2 more of each of k in 1,024 of 2,048 keys.
    assert {c.rounding_bytes for c in cells if c not in attention} == {10 * 16384 * 2048}


def test_both_ways_are_timed_and_right(tmp_path):
    rows = measured(tmp_path, SMALL, "flashtile-cpu-fp8", "flashtile-cpu-fp8-call", "flashtile-cpu")
    errors = {name: each.error for name, each in rows.items()}
    # What is rounded before has an output of 8 bits.
    assert 0.03 < errors["flashtile-cpu-fp8-call"] < errors["flashtile-cpu-fp8"] < 0.06
    assert errors["flashtile-cpu"] < 0.005 and all(each.tflops > 0 for each in rows.values())


def test_packed_sequences_are_quantised_before_too():
    case = replace(SMALL, lengths=(160, 30))
    x = make_inputs(case, CPU)
    before, inside = (PROVIDERS[f"flashtile-cpu-fp8{end}"].prepare(case, x)()[0] for end in ("", "-call"))
    before = before.float() / OF_OUT
    assert before.shape == x.q.shape and (before - inside).norm() < 0.03 * inside.norm()


@pytest.mark.parametrize("name", ["k_scale", "v"])
def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch, name):
    """A scale of one block in three that is off by a half, or one key in 16 in another's place, pass no check."""
    quantize = run.flashtile.quantize

    def faulty(*tensors, **keywords):
        found = quantize(*tensors, **keywords)
        x = getattr(found, name).clone()
        if name == "v":
            x.view(torch.uint8)[..., 1::8] = x.view(torch.uint8)[..., 2::8]
        else:
            x[..., 0] *= 1.5
        return replace(found, **{name: x})

    monkeypatch.setattr(run.flashtile, "quantize", faulty)
    found = measured(tmp_path, SMALL, "flashtile-cpu-fp8")["flashtile-cpu-fp8"]
    assert found.median_ms is None and found.error.startswith("wrong: ") and found.error.endswith("limit 0.08")


def test_rounding_is_timed_beside_a_copy(tmp_path):
    rows = measured(tmp_path, ROUNDED, "flashtile-cpu")
    assert list(rows) == [table.ROUNDING, table.COPY]
    assert all(each.error is None and each.median_ms > 0 for each in rows.values())
    cells = table.cells(rows.values())
    assert table.rounding_table(cells)[1][0] == "2 x 160 rows, 2 heads of 32" and len(table.fp8_table(cells)) == 1


class Tensor:
    """A tensor of the stand-in's graph."""

    def __init__(self, uid, **described):
        self.uid, self.is_output = uid, False
        self.__dict__.update(described)

    def get_uid(self):
        return self.uid

    def set_output(self, value):
        self.is_output = value
        return self

    def __getattr__(self, name):
        def put(value):
            setattr(self, {"set_dim": "dim", "set_stride": "stride", "set_data_type": "data_type"}[name], value)
            return self

        return put

    def at(self, places):
        """The tensor's elements, in the memory at its address."""
        dtype = {"FP8_E4M3": E4M3, "FLOAT": torch.float32}[self.data_type.name]
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True)) + 1
        raw = (ctypes.c_uint8 * (last * dtype.itemsize)).from_address(places[self.uid])
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).as_strided(self.dim, self.stride)


class Graph:
    """``sdpa_fp8`` as documented: descaled operands, probabilities and output scaled and rounded to e4m3."""

    def __init__(self, **options):
        assert options["io_data_type"].name == "FP8_E4M3" and options["compute_data_type"].name == "FLOAT"
        self.count = 0

    def tensor(self, **described):
        self.count += 1
        return Tensor(self.count, **described)

    def sdpa_fp8(self, **given):
        self.given, self.results = given, [self.tensor() for _ in range(4)]
        return self.results

    def build(self, modes):
        assert len(modes) == 2

    def get_workspace_size(self):
        return 0

    def execute(self, places, workspace, handle):
        t = {name: x.at(places).float() for name, x in self.given.items() if isinstance(x, Tensor)}
        q, k, v = (t[name] * t[f"descale_{name}"] for name in "qkv")
        scores = q @ k.mT * self.given["attn_scale"]
        if self.given.get("right_bound") == 0:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        probs = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = (probs * t["scale_s"]).to(E4M3).float() * t["descale_s"]
        out, *_, peak = self.results
        out.at(places).copy_((rounded @ v / probs.sum(-1, keepdim=True) * t["scale_o"]).to(E4M3))
        peak.at(places).fill_(1.0)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_is_given_what_it_documents(monkeypatch, tmp_path, causal):
    names = {"data_type": ["FP8_E4M3", "FLOAT"], "heur_mode": ["A", "FALLBACK"], "diagonal_alignment": ["TOP_LEFT"]}
    kinds = {name: enum.Enum(name, values) for name, values in names.items()}
    cudnn = SimpleNamespace(**kinds, pygraph=Graph, create_handle=object, set_stream=lambda handle, stream: None)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    found = measured(tmp_path, replace(SMALL, causal=causal), "cudnn-fp8")["cudnn-fp8"]
    assert isinstance(found.error, float), found.error
    assert 0.04 < found.error < 0.07


def test_cudnn_says_what_it_lacks(capsys):
    assert PROVIDERS["cudnn-fp8"].missing("forward", torch.device("cuda")) == "nvidia-cudnn-frontend is not installed"
    assert "windows" in PROVIDERS["cudnn-fp8"].refusal(replace(SMALL, window=(3, 0)), None)
    assert cudnn_fp8.OF_OUT * 6.9 < 448
