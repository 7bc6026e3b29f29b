"""warm_up: every kernel of a described call is built, side by side, and nothing is computed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.call.backend import MEANWHILE, Build, Direction
from flashtile.call.problem import Problem, Tensors, compute_capability, gpu_of
from flashtile.ops import dispatch, plans
from tests.cases import Case
from tests.fuzz.drawn import Drawn
from tests.fuzz.launches import started


def _meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Direction, Problem, Tensors]]:
    """What the CPU backend was asked to build; two kernels a direction, which wait for one another."""
    seen: list[tuple[Direction, Problem, Tensors]] = []
    meet = {"forward": threading.Barrier(2, timeout=60), "backward": threading.Barrier(2, timeout=60)}

    def builds(self: object, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        seen.append((direction, problem, tensors))
        return [Build(f"{direction}_{n}", meet[direction].wait) for n in range(2)]

    monkeypatch.setattr(type(dispatch.backend("cpu")), "builds", builds)
    return seen


def test_builds_both_directions_at_once(asked: list[tuple[Direction, Problem, Tensors]]) -> None:
    q, kv, sinks = _meta(2, 70, 4, 16), _meta(2, 90, 2, 16), _meta(4)
    times = flashtile.warm_up(q, kv, kv, causal=True, sinks=sinks, dropout_p=0.5, device="cpu")
    assert [(t.backend, t.direction, t.kernel) for t in times] == [
        ("cpu", direction, f"{direction}_{n}") for direction in ("forward", "backward") for n in range(2)
    ]
    assert all(t.seconds >= 0 for t in times)
    (_, forward, tensors), (_, backward, _) = asked
    assert (
        forward == backward and forward.device_type == "cpu" and forward.grads.named == (True, True, True, False, True)
    )
    assert (forward.seqlen_q, forward.seqlen_k, forward.group_size, str(forward.band)) == (70, 90, 2, "causal")
    assert tensors.rng_state is not None and tensors.k is tensors.v


def test_builds_what_is_asked_for(asked: list[tuple[Direction, Problem, Tensors]]) -> None:
    x = torch.randn(30, 2, 16).transpose(0, 1).contiguous().transpose(0, 1)
    bounds = torch.tensor([0, 10, 30], dtype=torch.int32)
    call = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=20, max_seqlen_k=20, device="cpu")
    flashtile.warm_up(x, x, x, **call, backward=False)
    flashtile.warm_up(x.requires_grad_(), x.detach(), x.detach(), **call)
    assert [direction for direction, *_ in asked] == ["forward", "forward", "backward"]
    assert asked[0][1].varlen and not asked[0][1].needs_grad and asked[2][1].grads.named == (True, *[False] * 4)
    tensors = asked[0][2]
    assert tensors.q.is_meta and tensors.q.stride() == x.stride() and tensors.cu_seqlens_q is tensors.cu_seqlens_k


def test_a_backend_without_kernels_builds_nothing() -> None:
    x = _meta(1, 8, 1, 8)
    assert flashtile.warm_up(x, x, x, device="cpu") == []


def test_refuses_what_the_call_would_refuse() -> None:
    x = _meta(1, 8, 1, 8)
    with pytest.raises(InvalidInputError, match="^dropout_p: "):
        flashtile.warm_up(x, x, x, dropout_p=1.0, device="cpu")
    with pytest.raises(UnsupportedError, match="hopper"):
        flashtile.warm_up(x, x, x, backend="hopper", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInputError, match="^device: "):
            flashtile.warm_up(x, x, x)


@pytest.mark.parametrize(("gpu", "capability"), [("sm_80", (8, 0)), ("gfx942", None)])
def test_builds_for_another_gpu_are_what_a_call_there_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, capability: tuple[int, int] | None
) -> None:
    from triton.backends.compiler import GPUTarget

    from flashtile.backends.gpu.launch import compile_kernel, specialise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = Case("dims", batch=1, seqlen_q=64, seqlen_k=64, head_dim=16, causal=True)
    q, k = _meta(1, 64, call.heads, 16), _meta(1, 64, call.kv_heads, 16)
    built = flashtile.warm_up(q, k, k, causal=True, backward=False, gpu=gpu)
    assert [(each.backend, each.kernel) for each in built] == [("portable", "attention_forward")]
    assert (there := set(tmp_path.iterdir()))
    arch = GPUTarget("cuda", 80, 32) if capability else GPUTarget("hip", gpu, 64)
    for each in started(Drawn(0, "plain", replace(call, wanted=""), torch.float16), capability):
        compile_kernel(each.launch.kernel, specialise(each.launch), each.launch.options, arch)
    assert set(tmp_path.iterdir()) == there
    assert compute_capability(torch.device("cuda")) is None or torch.cuda.is_available()


def test_what_is_no_gpu_is_refused() -> None:
    x = _meta(1, 8, 1, 8)
    for wrong in ("h101", "sm_9", 90, "gfx", "90"):
        with pytest.raises(InvalidInputError, match="^gpu: is .*, must be a GPU, like 'H100', 'sm_90'"):
            flashtile.warm_up(x, x, x, gpu=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="^gpu: is given, but goes with device='cuda' alone, which is 'cpu'"):
        flashtile.warm_up(x, x, x, gpu="sm_90", device="cpu")


def test_explain_and_warm_up_know_gpus_by_their_names() -> None:
    for name, arch in (("H100", 90), ("a100", 80), ("RTX 4090", 89), ("9.0", 90), ("10.0", 100), ("MI300X", "gfx942")):
        assert gpu_of(name).arch == arch
    x = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    meta, bounds = x.detach().to("meta").requires_grad_(), torch.tensor([0, 100, 300])
    said = [flashtile.explain(t, t, t, causal=True, gpu=gpu) for t in (x, meta) for gpu in ("H100", "sm_90")]
    assert len(set(said)) == 1 and compute_capability(torch.device("cuda")) is None
    assert said[0].splitlines()[0].endswith("causal, compute capability 9.0")
    assert "\nforward: hopper: " in said[0] and "\nbackward: hopper: " in said[0] and "will be compiled" in said[0]
    assert "\nforward: portable: " in flashtile.explain(x, x, x, gpu="A100")
    assert flashtile.explain(meta, meta, meta, device="cpu") == flashtile.explain(x, x, x)
    packed = dict(cu_seqlens_q=bounds.int().to("meta"), cu_seqlens_k=bounds.int().to("meta"), gpu="H100")
    assert "packed" in flashtile.explain(meta[0], meta[0], meta[0], **packed)
    one = meta.detach()
    cache = dict(k_cache=one, v_cache=one, cache_seqlens=_meta(1, dtype=torch.int32), gpu="H100")
    assert "\ndecode: hopper: " in flashtile.explain(one[:, :1], **cache)
    assert "quantize_k: will be compiled" in flashtile.explain(one, one, one, precision="fp8", gpu="H100")
    with pytest.raises(InvalidInputError, match="^gpu: is given, but goes with device='cuda' alone"):
        flashtile.explain(x, x, x, gpu="H100", device="cpu")


def test_the_bias_of_a_gpu_elsewhere_has_its_gradient_from_the_portable_kernels() -> None:
    x, bias = _meta(1, 128, 4, 64).requires_grad_(), _meta(1, 4, 128, 128).requires_grad_()
    backward = flashtile.explain(x, x, x, attn_bias=bias, gpu="H100").partition("\nbackward: ")[2].splitlines()[0]
    assert backward.startswith("hopper: ") and "; gradient of attn_bias: portable: " in backward


def test_caches_by_position_are_refused_with_the_form_by_name() -> None:
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 4, 16)
    lengths = torch.zeros(2, dtype=torch.int32)
    for function in (flashtile.explain, flashtile.warm_up):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got k twice: .*\(q, k_cache="):
            function(q, cache, cache, k=q)  # type: ignore[misc]
        with pytest.raises(
            InvalidInputError, match=r"^k_cache: is None, but cache_seqlens is given: .* k_cache=\.\.\."
        ):
            function(q, cache, cache, cache_seqlens=lengths, device="cpu")
    assert "decode: cpu" in flashtile.explain(q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, k=q, v=q)


def test_a_backward_is_built_while_its_forward_is(
    asked: list[tuple[Direction, Problem, Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = type(dispatch.backend("cpu"))
    plan, threads = backend.plan, threading.active_count()

    def compiles(self: object, direction: Direction, *call: Any) -> Any:
        after = MEANWHILE.get()
        assert (after is not None) == (direction == "forward" and call[0].needs_grad)
        if after is not None:
            after()
        return plan(self, direction, *call)

    monkeypatch.setattr(backend, "plan", compiles)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    leaf, x = torch.randn(1, 9, 1, 8, requires_grad=True), torch.randn(1, 9, 1, 8)
    with plans.own_plans():
        flashtile.attention(x, x, x, causal=True)
        assert not asked
        flashtile.attention(x, leaf, x, causal=True).sum().backward()
    while threading.active_count() > threads:
        time.sleep(0.01)
    ((direction, problem, tensors),) = asked
    assert direction == "backward" and problem.grads.named[:3] == (False, True, False) and tensors.q.is_meta
    assert MEANWHILE.get() is None


# Which thread imports what, in a process that has imported nothing yet: two that import Gluon at once may each wait for
# the other, which Python 3.11 ends with an error.
_FIRST_BUILDS = """
import sys, torch, flashtile
from flashtile.backends.gpu import build, launch

alone = []

class Watch:
    def find_spec(name, path=None, target=None):
        if name.startswith("triton.experimental"):
            alone.append(launch.IMPORTS.locked())

sys.meta_path.insert(0, Watch)
build.compile_kernel = lambda kernel, what, options, target: launch.source_of(kernel, what, False)
x = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16, device="meta")
assert len(flashtile.warm_up(x, x, x, device="cuda", gpu="sm_90")) > 2 and alone and all(alone)
"""


@pytest.mark.long
def test_threads_that_build_import_triton_one_at_a_time() -> None:
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", _FIRST_BUILDS], check=True, timeout=120)
