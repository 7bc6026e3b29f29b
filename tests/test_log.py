"""What ran: lines of the log, warnings of compiles, functions that are told of them, ranges of profilers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from flashtile.backends.gpu import archive, build, host, plan
from flashtile.call import events
from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.call.problem import AHEAD, Problem
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.ops import dispatch, log, plans
from tests import fresh
from tests.archive.machine import planned_for

NOT_GPUS = (
    "not hopper: needs cuda tensors, these are on cpu; no float32; not portable: needs cuda tensors, these are on cpu"
)
KERNEL = "cpu: PyTorch's CPU flash kernel on the whole sequence"
Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 4, 16)


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged; nothing is wanted yet, and all kinds of calls are new."""
    found: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("flashtile")
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    monkeypatch.setenv("FLASHTILE_LOG", "0")  # puts back what ``flashtile.log`` sets
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(events, "_hooks", type(events._hooks)())
    for name in ("_lines", "_named"):
        monkeypatch.setattr(log, name, set())
    with plans.own_plans():
        yield found


def test_each_new_kind_of_call_is_a_line(lines: list[str]) -> None:
    flashtile.log()
    q = Q.clone().requires_grad_()
    for _ in range(2):
        flashtile.attention(q, K, K, causal=True).sum().backward()
    about = "of float32 on cpu, batch 2, 5 x 7, 4 heads, head_dim 16, causal"
    assert lines == [f"INFO {direction} {about}: {KERNEL}; {NOT_GPUS}" for direction in ("forward", "backward")]


def test_other_lengths_are_no_new_kind(lines: list[str]) -> None:
    flashtile.log("calls")
    for length in (3, 4, 5):
        flashtile.attention(Q[:1, :length], K[:1], K[:1])
    flashtile.attention(Q, K, K, window_size=(2, 0))
    assert [line.split(":")[0] for line in lines] == [
        "INFO forward of float32 on cpu, batch 1, 3 x 7, 4 heads, head_dim 16, full",
        "INFO forward of float32 on cpu, batch 2, 5 x 7, 4 heads, head_dim 16, window(2, 0)",
    ]


def test_each_direction_has_lines(lines: list[str]) -> None:
    flashtile.log()
    flashtile.attention_with_kvcache(Q[:, :1], K, K, cache_seqlens=7)
    flashtile.attention(flashtile.quantize(Q.bfloat16(), K.bfloat16(), K.bfloat16()))
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    flashtile.attention_varlen(Q[0], Q[0], Q[0], bounds, bounds, 3, 3, out=torch.empty_like(Q[0]))
    assert [line.split(" of ")[0] for line in lines] == ["INFO decode", "INFO quantized", "INFO forward"]


def test_the_variable_has_the_same_values(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for n, value in enumerate(("", "0", "off", "compiles", "1", "Calls, compiles", "ranges,on"), 1):
        monkeypatch.setenv("FLASHTILE_LOG", value)
        flashtile.attention(Q[..., :n], K[..., :n], K[..., :n])
    assert [line.split(", ")[4] for line in lines] == ["head_dim 5", "head_dim 6", "head_dim 7"]


@pytest.mark.parametrize("value", ["call", "calls,all", "calls;compiles", "2"])
def test_an_unknown_value_names_the_known_ones(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=rf"^what: is '{value}', must be calls or compiles or ranges, several "):
        flashtile.log(value)
    monkeypatch.setenv("FLASHTILE_LOG", value)
    names = (
        "calls or compiles or ranges or 1 or true or yes or on or 0 or false or no or off, several with commas between"
    )
    with pytest.raises(InvalidInputError, match=rf"^FLASHTILE_LOG: is '{value}', must be {names}, or unset$"):
        flashtile.attention(Q, K, K)


def test_what_ran_before_is_told_once_it_is_asked_for(lines: list[str]) -> None:
    for what, told in ((None, 0), ("calls", 1), ("calls", 2), (None, 2), ("compiles", 2)):
        flashtile.log(what)
        flashtile.attention(Q, K, K)
        flashtile.attention(Q, K, K)
        assert len(lines) == told
    assert os.environ["FLASHTILE_LOG"] == "compiles"


def test_nothing_is_put_around_plans_unless_it_is_wanted() -> None:
    flashtile.log("compiles")
    flashtile.attention(Q, K, K)
    flashtile.log("calls")
    q = Q.clone().requires_grad_()
    flashtile.attention(q, K, K)
    runs = [call.run for call in plans.kept.values() if hasattr(call, "run")]
    assert [type(run).__name__ for run in runs] == ["_LoggedPlan"]
    flashtile.log(None)
    flashtile.attention(Q, K, K)
    assert [type(call.run).__name__ for call in plans.kept.values() if hasattr(call, "run")] == ["partial"]


def test_a_gradient_of_another_backend_has_a_line_of_its_own(lines: list[str]) -> None:
    """Emulated Hopper's kernels have none of a bias; PyTorch computes it here."""
    pytest.importorskip("triton.experimental.gluon")
    from tests.backends.hopper.emulated import on_cpu

    x = torch.randn(1, 70, 2, 64).bfloat16()
    bias = torch.zeros(70, 70, requires_grad=True)
    with on_cpu():
        flashtile.log()
        flashtile.attention(x.clone().requires_grad_(), x, x, attn_bias=bias).sum().backward()
    forward, cpu, hopper = lines
    assert ": hopper: " in forward and "; attention_forward interpreted" in forward and " tiles " in forward
    assert hopper.startswith("INFO backward of bfloat16") and "; attention_backward interpreted" in hopper
    assert ": cpu: " in cpu and "; not hopper: no gradient of attn_bias; not portable: needs cuda" in cpu


def test_a_backend_that_was_named_keeps_a_faster_one_away(lines: list[str]) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from tests.backends.hopper.emulated import on_cpu

    x = torch.randn(1, 70, 2, 64).bfloat16()
    with on_cpu():
        flashtile.log()
        flashtile.attention(x, x, x, backend="cpu")
        assert "  not hopper: could run it too, but cpu was named\n" in flashtile.explain(x, x, x, backend="cpu")
    assert "; not hopper: could run it too, but cpu was named; not portable: needs cuda tensors" in lines[0]


def test_calls_of_a_chain_are_told(lines: list[str]) -> None:
    """Without what they compute: the launches are interpreted as nothing."""
    pytest.importorskip("triton.experimental.gluon")
    from tests.backends.hopper.emulated import with_kernels
    from tests.distributed.test_chain import gradients

    with with_kernels(lambda launch: None, num_sms=4):
        flashtile.log("calls,ranges")
        _, _, chained = gradients((1024,), "zigzag", Band(None, 0), False, 64)
    told = [line for line in lines if line.startswith("INFO backward of bfloat16")]
    assert chained == [3, 3] and told and all("; attention_backward interpreted" in line for line in told)


def test_compiled_code_is_told_when_it_runs(lines: list[str]) -> None:
    """Without a graph break."""
    flashtile.log("calls,ranges")
    torch._dynamo.reset()
    whole = torch.compile(lambda q: flashtile.attention(q, K, K), fullgraph=True, backend="eager")
    found = whole(Q)
    assert [line.split(" of ")[0] for line in lines] == ["INFO forward"]
    torch.testing.assert_close(found, flashtile.attention(Q, K, K))
    assert len(lines) == 1


def _events(run: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    return [event.name for event in seen.events() if event.name.startswith("flashtile ")]


def test_each_call_is_a_range(lines: list[str]) -> None:
    q = Q.clone().requires_grad_()

    def run() -> None:
        flashtile.attention(q, K, K).sum().backward()

    assert _events(run) == []
    flashtile.log("ranges")
    about = "of float32 on cpu, batch 2, 5 x 7, 4 heads, head_dim 16, full"
    for _ in range(2):
        assert _events(run) == [f"flashtile cpu forward {about}", f"flashtile cpu backward {about}"]
    assert lines == []
    flashtile.log(None)
    assert _events(run) == []


def test_an_error_ends_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the range is NVTX's too."""
    open_ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)

    def fail(*call: object) -> None:
        assert open_ranges == ["flashtile portable " + about]
        raise RuntimeError("a kernel")

    with planned_for("sm_80"):
        flashtile.log("ranges")
        x = torch.empty(2, 5, 4, 64, device="meta").half()
        about = "forward of float16 on cuda, batch 2, 5 x 5, 4 heads, head_dim 64, full"
        monkeypatch.setattr(plan, "start", fail)
        monkeypatch.setattr(build, "find_build", lambda *_: build.LoadedKernel(None, (), "a test", 0, None, []))
        with pytest.raises(RuntimeError, match="^a kernel$"):
            flashtile.attention(x, x, x)
    assert open_ranges == []


# -- builds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sm_80(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A GPU that is not there: Triton compiles for it into a cache of its own; a call of some tensors without data."""
    triton = pytest.importorskip("triton")
    from flashtile.backends.gpu.launch import compile_kernel

    monkeypatch.setenv("FLASHTILE_KERNELS", "off")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    archive.archives.cache_clear()
    monkeypatch.setattr(build, "_builds", {})
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)

    def load(launch: Any, what: Any, device: int) -> Any:
        compiled = compile_kernel(launch.kernel, what, launch.options, target)
        compiled.function = 7
        return compiled

    monkeypatch.setattr(build, "load", load)
    x = torch.empty(2, 300, 4, 64, device="meta").half()
    with triton.knobs.cache.scope(), planned_for("sm_80"):
        triton.knobs.cache.dir = str(tmp_path / "cache")
        yield lambda length=300, **options: flashtile.attention(x[:, :length], x, x, backend="portable", **options)
    archive.archives.cache_clear()


ABOUT = "forward of float16 on cuda, batch 2, 300 x 300, 4 heads, head_dim 64, full"


def test_a_line_says_where_a_build_came_from(
    sm_80: Callable[..., Any], lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled, in this process already, in Triton's cache, or in an archive."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # as what builds archives has it
    seen: list[flashtile.Compilation] = []
    flashtile.on_compile(seen.append)
    flashtile.log("calls,compiles")
    sm_80()
    (first,) = seen
    assert first.kernel == "attention_forward" and first.call == ABOUT and first.seconds > 0
    took = f"{first.seconds:.1f} s"
    how, why = "portable: Triton, tiles 128x64, 4 warps, 3 stages", "not hopper: needs compute capability 9.0, this"
    assert lines[0] == f"WARNING compiled attention_forward in {took} for {ABOUT}"
    assert lines[1].startswith(f"INFO {ABOUT}: {how}; attention_forward compiled in {took}; {why}")
    sm_80(200)
    assert len(lines) == 2
    build._builds.clear()
    flashtile.log("calls,compiles")
    sm_80()
    assert [line.split("; ")[1] for line in lines[2:]] == ["attention_forward from Triton's cache"]

    place = tmp_path / "kernels.ftk"
    x = torch.empty(2, 300, 4, 64, device="meta").half()
    flashtile.warm_up(x, x, x, backend="portable", gpu="sm_80", backward=False, into=place)
    monkeypatch.setenv("FLASHTILE_KERNELS", str(place))
    archive.archives.cache_clear()
    build._builds.clear()
    flashtile.log("calls,compiles")
    sm_80()
    assert [line.split("; ")[1] for line in lines[3:]] == [f"attention_forward from an archive ({place})"]
    assert seen == [first]


def _forward_with(monkeypatch: pytest.MonkeyPatch, seconds: float | None) -> None:
    """Has each build made at once, in so many seconds."""
    made = build.LoadedKernel(None, (), "a test", 0, None, [], seconds=seconds)
    monkeypatch.setattr(build, "_compiled", lambda launch, device: made)
    monkeypatch.setattr(host.Launcher, "start", lambda *call: None)


def test_a_kind_of_call_may_find_its_build_there(
    sm_80: Callable[..., Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forward_with(monkeypatch, 2.04)
    flashtile.log()
    for left in (2, 3, 3):
        sm_80(window_size=(left, 0))
    assert [line.split("; ")[1] for line in lines] == [
        "attention_forward compiled in 2.0 s", "attention_forward loaded before",
    ]  # fmt: skip


def test_what_a_line_says_of_lengths_makes_no_kind(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's prompts have any number of rows, which Hopper's line names."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setenv("FLASHTILE_KERNELS", "off")
    archive.archives.cache_clear()
    monkeypatch.setattr(build, "_builds", {})
    _forward_with(monkeypatch, 2.04)
    flashtile.log()
    q, cache = torch.empty(120, 8, 64, device="meta").half(), torch.empty(64, 16, 2, 64, device="meta").half()
    bounds, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((3,), (2, 32)))
    with planned_for("sm_90"):
        for most in (100, 101, 102):
            flashtile.attention_with_kvcache(
                q, cache, cache, cache_seqlens=bounds[1:], page_table=table, cu_seqlens_q=bounds, max_seqlen_q=most
            )
    archive.archives.cache_clear()
    (line,) = lines
    assert ": hopper: 400 rows a key head: the forward's kernel" in line


def test_compiles_are_told_to_functions_until_these_are_removed(
    sm_80: Callable[..., Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forward_with(monkeypatch, 2.04)
    first: list[flashtile.Compilation] = []
    second: list[flashtile.Compilation] = []
    handle = flashtile.on_compile(first.append)
    with flashtile.on_compile(second.append):
        sm_80()
    sm_80(causal=True)
    handle.remove()
    sm_80(softcap=2.0)
    of_causal = ABOUT.replace("full", "causal")
    assert first == [("attention_forward", 2.04, ABOUT), ("attention_forward", 2.04, of_causal)]
    assert second == first[:1] and lines == []
    with pytest.raises(InvalidInputError, match=r"^f: is 3, must be a function of a Compilation$"):
        flashtile.on_compile(3)  # type: ignore[arg-type]


def test_what_is_loaded_is_no_compile(
    sm_80: Callable[..., Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forward_with(monkeypatch, None)
    flashtile.log("compiles")
    flashtile.on_compile(lambda made: pytest.fail("compiled"))
    sm_80()
    assert lines == []


def test_a_function_that_raises_fails_no_call(
    sm_80: Callable[..., Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forward_with(monkeypatch, 1.0)
    seen: list[flashtile.Compilation] = []
    flashtile.on_compile(lambda made: 1 / 0)
    flashtile.on_compile(seen.append)
    sm_80()
    assert lines == ["ERROR a function given to on_compile raised"] and len(seen) == 1


def test_builds_in_other_threads_know_their_call(sm_80: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``warm_up``, and of a backward that is built beside its forward."""
    _forward_with(monkeypatch, 1.0)
    seen: list[flashtile.Compilation] = []
    flashtile.on_compile(seen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = torch.empty(2, 300, 4, 64, device="meta", dtype=torch.float16, requires_grad=True)
    t, token = Tensors(x, x, x), AHEAD.set(None)
    problem = Problem.of(t, Options(grads=Grads(True, True, True)))
    assert problem.device_type == "cuda"
    made = dispatch.builds(dispatch.backend("portable"), problem, "backward", t)
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda each: each.make(), made))
    AHEAD.reset(token)
    names = ["attention_backward_dkdv", "attention_backward_dq", "prepare_rows"]
    assert sorted(seen) == [(name, 1.0, ABOUT.replace("forward", "backward")) for name in names]


def test_kernels_beside_attention_name_the_line_that_needed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[flashtile.Compilation] = []
    flashtile.on_compile(seen.append)
    events.compiled("merge_states", 0.5)
    line = test_kernels_beside_attention_name_the_line_that_needed_them.__code__.co_firstlineno + 3
    with ThreadPoolExecutor(1) as pool:
        pool.submit(events.compiled, "merge_states", 0.5).result()
    assert seen == [("merge_states", 0.5, f"{__file__}:{line}"), ("merge_states", 0.5, "")]


# -- where lines go --------------------------------------------------------------------------------------------------

PROGRAM = """
import logging, sys, torch, flashtile
q = torch.zeros(1, 3, 2, 8)
flashtile.attention(q, q, q)
logging.basicConfig(format="own %(message)s", stream=sys.stdout)
flashtile.attention(q, q, q, causal=True)
"""


def test_lines_go_to_stderr_or_to_the_handlers_of_the_program() -> None:
    environment = os.environ | {"FLASHTILE_LOG": "1"}
    done = fresh.run(PROGRAM, environment, check=True)
    about = "forward of float32 on cpu, batch 1, 3 x 3, 2 heads, head_dim 8"
    assert done.stdout == f"own {about}, causal: {KERNEL}; {NOT_GPUS}\n"
    first = rf"[-0-9]+ [:,0-9]+ flashtile\[\d+\] INFO: {re.escape(about)}, full: {re.escape(f'{KERNEL}; {NOT_GPUS}')}\n"
    assert re.fullmatch(first, done.stderr)
