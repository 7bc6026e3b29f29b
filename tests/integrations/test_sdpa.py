"""PyTorch's scaled_dot_product_attention, served: its numbers, what is left and why, and how far the switches reach."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.attention.bias
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from flashtile import UnsupportedError, attention
from flashtile.integrations import _attend, sdpa
from flashtile.ops import operation
from tests.rule import assert_close

PYTORCH = F.scaled_dot_product_attention


Q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(5))
KEY = Q.flip(2)


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Counts each test for itself, and sees that it leaves everything as it was."""
    sdpa.calls.clear()
    yield
    sdpa.disable()
    assert F.scaled_dot_product_attention is PYTORCH and imported_by_name is PYTORCH
    assert torch.backends.mha.get_fastpath_enabled()


@dataclass(frozen=True)
class Sample:
    """Shapes of one call; a mask's dtype is bool, its own, or None for query's. ``masked`` rows keep no key."""

    name: str
    q: tuple[int, ...] = (2, 4, 5, 8)
    k: tuple[int, ...] = (2, 4, 5, 8)
    v: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    masked: tuple[int, ...] = ()
    grad: bool = True
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Inputs; those of a float dtype require a gradient."""
        torch.manual_seed(0)
        shapes = {"query": self.q, "key": self.k, "value": self.v or self.k}
        made = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
        if self.mask is not None:
            drawn = torch.randn(self.mask)
            if self.mask_dtype is torch.bool:
                made["attn_mask"] = drawn > -0.5
                made["attn_mask"][..., list(self.masked), :] = False
            else:
                drawn[..., list(self.masked), :] = -torch.inf
                made["attn_mask"] = drawn.to(self.mask_dtype or dtype).requires_grad_(self.grad)
        return made


CAUSAL, GQA = {"is_causal": True}, {"enable_gqa": True}
# The first ten have the shapes of PyTorch's own OpInfo samples for the function.
SAMPLES = (
    Sample("3d", (4, 3, 8), (4, 6, 8)),
    Sample("3d_causal", (4, 3, 8), (4, 6, 8), keywords=CAUSAL),
    Sample("4d", (4, 4, 3, 8), (4, 4, 6, 8)),
    Sample("4d_causal", (4, 4, 3, 8), (4, 4, 6, 8), keywords=CAUSAL),
    Sample("broadcast", (4, 3, 8), (4, 4, 6, 8)),
    Sample("broadcast_causal", (4, 3, 8), (4, 4, 6, 8), keywords=CAUSAL),
    Sample("wider_v", (4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 16)),
    Sample("bias_square", (4, 4, 3, 8), (4, 4, 6, 8), mask=(3, 6)),
    Sample("gqa", (4, 4, 3, 8), (4, 2, 6, 8), keywords=GQA),
    Sample("gqa_causal", (4, 4, 3, 8), (4, 2, 6, 8), keywords=GQA | CAUSAL),
    Sample("2d", (5, 8), (7, 8), mask=(5, 7), mask_dtype=torch.bool),
    Sample("5d", (2, 3, 4, 5, 8), (2, 3, 4, 7, 8), keywords=CAUSAL),
    Sample("5d_mask", (2, 3, 4, 5, 8), (2, 3, 4, 7, 8), mask=(3, 1, 5, 7)),
    Sample("5d_mask_leading", (2, 3, 4, 5, 8), (2, 3, 4, 7, 8), mask=(2, 1, 4, 1, 7), mask_dtype=torch.bool),
    Sample("5d_mask_heads", (2, 3, 4, 5, 8), (2, 3, 4, 7, 8), mask=(4, 5, 7)),
    Sample("mixed_dims", (4, 5, 8), (2, 4, 7, 8), (4, 7, 8)),
    Sample("batch_of_one_key", (3, 4, 5, 8), (1, 4, 6, 8)),
    Sample("one_kv_head", (2, 4, 5, 8), (2, 1, 6, 8)),
    Sample("causal", keywords=CAUSAL),
    Sample("causal_more_rows", (2, 4, 9, 8), (2, 4, 4, 8), keywords=CAUSAL),
    Sample("causal_one_key", (2, 4, 9, 8), (2, 4, 1, 8), keywords=CAUSAL),
    Sample("causal_one_row", (2, 4, 1, 8), (2, 4, 9, 8), keywords=CAUSAL),
    Sample("scale", keywords={"scale": 0.7}),
    Sample("scale_negative", keywords={"scale": -0.3}),
    Sample("mask", mask=(2, 4, 5, 5), mask_dtype=torch.bool),
    Sample("mask_keys", mask=(2, 1, 1, 5), mask_dtype=torch.bool),
    Sample("mask_empty_rows", mask=(2, 1, 5, 5), mask_dtype=torch.bool, masked=(1, 3)),
    Sample("bias", mask=(2, 4, 5, 5)),
    Sample("bias_broadcast", mask=(2, 1, 5, 1)),
    Sample("bias_float32", mask=(1, 4, 5, 5), mask_dtype=torch.float32),
    Sample("bias_without_gradient", mask=(4, 5, 5), grad=False),
    Sample("bias_empty_rows", mask=(2, 1, 5, 5), masked=(0, 4)),
    Sample("no_rows", (2, 4, 0, 8)),
    Sample("no_rows_causal", (2, 4, 0, 8), keywords=CAUSAL),
    Sample("no_keys", (2, 4, 5, 8), (2, 4, 0, 8)),
    Sample("no_keys_causal", (2, 4, 5, 8), (2, 4, 0, 8), keywords=CAUSAL),
    Sample("no_batch", (0, 4, 5, 8), (0, 4, 5, 8)),
)


def results(leaves: dict[str, Tensor], call: Callable[..., Tensor], keywords: dict[str, Any]) -> dict[str, Tensor]:
    """The output and the gradients, by name."""
    out = call(**leaves, **keywords)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(out, tuple(wanted.values()), gradient_of(out))
    return {"out": out.detach()} | {f"d{name}": x for name, x in zip(wanted, grads, strict=True)}


def gradient_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)


def judge(leaves: dict[str, Tensor], got: dict[str, Tensor], keywords: dict[str, Any]) -> None:
    """The error rule, against PyTorch's math backend in float64."""
    doubled = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in leaves.items()
    }
    with sdpa_kernel(SDPBackend.MATH):
        plain = results(leaves, PYTORCH, keywords)
        assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in plain.items()}
        assert_close(got, lambda: results(doubled, PYTORCH, keywords), plain, leaves["query"].dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_served_calls_have_pytorchs_numbers(sample: Sample, dtype: torch.dtype) -> None:
    leaves = sample.leaves(dtype)
    with sdpa.use():
        got = results(leaves, imported_by_name, sample.keywords)
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (1, 0), sdpa.calls
    judge(leaves, got, sample.keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_finite_masks_hide_whole_have_their_softmax(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(2)
    # Scores are halves, which float32 holds beside the lowest float16.
    shapes = {"query": (2, 2, 3, 4), "key": (2, 2, 700, 4), "value": (2, 2, 700, 4)}
    leaves = {n: torch.randint(-1, 2, x, generator=make).to(dtype).requires_grad_() for n, x in shapes.items()}
    mask = torch.zeros(2, 1, 3, 700, dtype=dtype)
    mask[:, :, 1:] = torch.finfo(dtype).min
    with sdpa.use():
        got = results(leaves, F.scaled_dot_product_attention, {"attn_mask": mask})
    assert sdpa.calls.served == 1
    judge(leaves | {"attn_mask": mask}, got, {})


def test_parameters_are_served() -> None:
    leaves = {name: nn.Parameter(x.detach()) for name, x in Sample("").leaves(torch.float32).items()}
    with sdpa.use():
        got = results(leaves, F.scaled_dot_product_attention, {})
    assert sdpa.calls.served == 1
    judge(leaves, got, {})


@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("corner", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("switch", ["use", "enable"])
def test_causal_bias(corner: str, rows: int, switch: str) -> None:
    leaves = Sample("", (2, 4, rows, 8), (2, 4, 9, 8)).leaves(torch.float32)
    bias = getattr(torch.nn.attention.bias, corner)(rows, 9)
    with sdpa.use() if switch == "use" else enabled():
        got = results(leaves, lambda **t: F.scaled_dot_product_attention(**t, attn_mask=bias), {})
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (1, 0)
    judge(leaves, got, {"attn_mask": bias._materialize()})


class enabled:
    def __enter__(self) -> None:
        sdpa.enable()

    def __exit__(self, *error: object) -> None:
        sdpa.disable()


@pytest.mark.parametrize("mask", [None, (2, 1, 5, 5)])
def test_autocast_casts_as_pytorch_does(mask: tuple[int, ...] | None) -> None:
    leaves = Sample("", mask=mask).leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), sdpa.use():
        out = F.scaled_dot_product_attention(**leaves)
    low = {name: x.detach().bfloat16().requires_grad_() for name, x in leaves.items()}
    assert out.dtype == torch.bfloat16 and sdpa.calls.served == 1
    judge(low, results(low, sdpa.scaled_dot_product_attention, {}) | {"out": out.detach()}, {})
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves.values())


def tangent(x: Tensor) -> Tensor:
    with fwAD.dual_level():
        return fwAD.unpack_dual(attend(fwAD.make_dual(x, x.flip(0)), x, x)).tangent


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": torch.func.vmap(lambda x: attend(x, x, x, is_causal=True)),
    "grad": torch.func.grad(lambda x: attend(x, x, x, is_causal=True).sin().sum()),
    "per sample": torch.func.vmap(torch.func.grad(lambda x: attend(x, x, x).sin().sum())),
    "jvp": lambda x: torch.func.jvp(lambda q: attend(q, x, x), (x,), (x.flip(0),))[1],
    "forward mode": tangent,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(transform: Callable[[Tensor], Tensor]) -> None:
    with sdpa.use():
        got = transform(Q)
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (1, 0)
    with sdpa_kernel(SDPBackend.MATH):
        assert_close({"out": got}, lambda: {"out": transform(Q.double())}, {"out": transform(Q)}, Q.dtype)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtensors_are_served(mesh: DeviceMesh) -> None:
    whole = Sample("", keywords=CAUSAL).leaves(torch.float32)
    leaves = {name: distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for name, x in whole.items()}
    with sdpa.use():
        out = attend(*leaves.values(), is_causal=True)
        out.backward(distribute_tensor(gradient_of(out), mesh, out.placements))
        outcome(lambda: attend(leaves["query"], KEY, KEY))
    assert out.placements == (Shard(1),)
    got = {"out": out.full_tensor().detach()} | {f"d{name}": x.grad.full_tensor() for name, x in leaves.items()}
    assert (sdpa.calls.served, sdpa.calls.left) == (1, {"DTensors together with others": 1})
    judge(whole, got, CAUSAL)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_list_of_kernels_with_flash_and_math_is_served(compiled: bool) -> None:
    allowed = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def call(q: Tensor) -> Tensor:  # as torchtitan has it
        with sdpa_kernel(allowed, set_priority=True):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with sdpa.use():
        got = function(Q)
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (1, 0), sdpa.calls
    torch.testing.assert_close(got, call(Q))


def test_dropout_keeps_probabilities_scaled_or_drops_them() -> None:
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 4, 40, 8)
    eye = torch.eye(40).expand(2, 4, 40, 40)
    torch.manual_seed(3)
    with sdpa.use():
        probs, dropped = (F.scaled_dot_product_attention(q, k, eye, dropout_p=p) for p in (0.0, 0.25))
        torch.manual_seed(3)
        again = F.scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    assert torch.equal(dropped, again) and sdpa.calls.served == 3
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, probs / 0.75))
    share = (dropped == 0).float().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / probs.numel()) ** 0.5


def attend(*tensors: Tensor, allowed: list[SDPBackend] | None = None, **keywords: Any) -> Tensor:
    with sdpa_kernel(allowed) if allowed else nullcontext():
        return F.scaled_dot_product_attention(*tensors, **keywords)


def in_a_trace() -> Tensor:
    return torch.jit.trace(lambda q: attend(q, KEY, KEY), Q, check_trace=False)(Q)


def jagged() -> Tensor:
    rows = [torch.ones(n, 4, 8) for n in (3, 5)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


class Mine(Tensor):
    """A subclass without behaviour of its own."""


SQUARE = Q[..., :5]
# Name, part of the reason, call.
LEFT: tuple[tuple[str, str, Callable[[], Tensor]], ...] = (
    ("subclass", "a Mine", lambda: attend(Q.as_subclass(Mine), KEY, KEY)),
    ("mask_of_a_subclass", "a Mine", lambda: attend(Q, KEY, KEY, SQUARE.as_subclass(Mine))),
    ("no_tensor", "a NoneType", lambda: attend(None, KEY, KEY)),
    ("nested", "nested", lambda: attend(*[torch.nested.nested_tensor([*Q])] * 3)),
    ("jagged", "a NestedTensor", lambda: attend(*[jagged()] * 3)),
    ("meta", "tensors on meta", lambda: attend(*[Q.to("meta")] * 3)),
    ("two_devices", "several devices", lambda: attend(Q, KEY.to("meta"), KEY)),
    ("jit", "torch.jit", in_a_trace),
    ("dtypes", "dtypes torch.float32, torch.float64", lambda: attend(Q, KEY.double(), KEY)),
    ("integers", "dtypes torch.int64", lambda: attend(*[Q.long()] * 3)),
    ("dropout_of_1", "dropout_p 1.0", lambda: attend(Q, KEY, KEY, dropout_p=1.0)),
    ("dropout_over_1", "dropout_p 1.5", lambda: attend(Q, KEY, KEY, dropout_p=1.5)),
    ("one_dimension", "shapes", lambda: attend(*[Q[0, 0, 0]] * 3)),
    ("leading", "shapes", lambda: attend(Q.expand(3, 2, 4, 5, 8), KEY.expand(4, 2, 4, 5, 8), KEY)),
    ("head_dim", "shapes", lambda: attend(Q, KEY[..., :4], KEY)),
    ("lengths", "shapes", lambda: attend(*[x.double() for x in (Q, KEY, KEY[:, :, :4])], KEEP)),
    ("heads", "shapes", lambda: attend(Q, KEY[:, :2], KEY[:, :2])),
    ("heads_of_v", "shapes", lambda: attend(Q, KEY, KEY[:, :1])),
    ("heads_not_a_multiple", "shapes", lambda: attend(Q, KEY[:, :3], KEY[:, :3], enable_gqa=True)),
    ("no_heads", "shapes", lambda: attend(*[Q[:, :0]] * 3)),
    ("no_head_dim", "shapes", lambda: attend(Q[..., :0], KEY[..., :0], KEY)),
    ("mask_and_causal", "together", lambda: attend(Q, KEY, KEY, attn_mask=KEEP, is_causal=True)),
    ("integer_mask", "attn_mask of torch.int64", lambda: attend(Q, KEY, KEY, SQUARE.long())),
    ("half_mask", "attn_mask of torch.float16", lambda: attend(Q, KEY, KEY, SQUARE.half())),
    ("mask_shape", "mask of a shape", lambda: attend(Q, KEY, KEY, Q[..., :4])),
    ("mask_1d", "mask of a shape", lambda: attend(Q, KEY, KEY, Q[0, 0, 0, :5])),
    ("mask_5d", "mask of a shape", lambda: attend(Q, KEY, KEY, SQUARE[None])),
    ("scale", "scale: is inf", lambda: attend(Q, KEY, KEY, scale=float("inf"))),
    ("scale_tensor", "scale: is tensor", lambda: attend(Q, KEY, KEY, scale=torch.tensor(0.5))),
    ("math_only", "sdpa_kernel", lambda: attend(Q, KEY, KEY, allowed=[SDPBackend.MATH])),
    ("flash_only", "sdpa_kernel", lambda: attend(Q, KEY, KEY, allowed=[SDPBackend.FLASH_ATTENTION])),
)
KEEP = SQUARE > -0.5


def outcome(call: Callable[[], Any]) -> Any:
    try:
        out = call()
    except Exception as error:
        return type(error), str(error)
    return torch.nested.to_padded_tensor(out, 0.0) if out.is_nested else out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("reason", "call"), [x[1:] for x in LEFT], ids=[x[0] for x in LEFT])
@pytest.mark.filterwarnings("ignore::Warning")
def test_what_is_left_has_a_reason_and_pytorchs_result(reason: str, call: Callable[[], Tensor]) -> None:
    want = outcome(call)
    with sdpa.use():
        got = outcome(call)
    assert sdpa.calls.served == 0 and len(sdpa.calls.left) == 1, sdpa.calls
    (given,) = sdpa.calls.left
    assert reason in given and "softmax_scale" not in given  # PyTorch's names
    if isinstance(want, Tensor) and not want.is_meta:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    else:
        assert str(got) == str(want)


def test_an_explicit_backend_that_cannot_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with sdpa.use():
        out = attend(Q, KEY, KEY)
    assert torch.equal(out, attend(Q, KEY, KEY))
    assert sdpa.calls.served == 0 and "hopper: needs" in next(iter(sdpa.calls.left))
    assert str(sdpa.calls).startswith("0 calls ran with flashtile, 1 were left\n  1 left: ")


def test_compiled_code_that_no_backend_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with sdpa.use(), pytest.raises(UnsupportedError, match="hopper: needs"):
        torch.compile(attend, backend="eager", fullgraph=True)(Q, KEY, KEY)


def test_cudnn_turned_off_is_no_choice_of_a_kernel() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with sdpa.use():
            attend(Q, KEY, KEY)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert sdpa.calls.served == 1


def test_deterministic_algorithms_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*tensors: Tensor, deterministic: bool, **keywords: Any) -> Tensor:
        seen.append(deterministic)
        return attention(*tensors, deterministic=deterministic, **keywords)

    monkeypatch.setattr(_attend, "attention", spy)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            sdpa.scaled_dot_product_attention(Q, KEY, KEY)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


# How far the switches reach.


def test_arguments_are_pytorchs() -> None:
    for keywords in ({"is_causal": True}, {"attn_mask": KEEP, "dropout_p": 0.0}, {"scale": 0.5, "enable_gqa": True}):
        with sdpa.use():
            got = F.scaled_dot_product_attention(query=Q, key=KEY, value=KEY, **keywords)
        torch.testing.assert_close(got, PYTORCH(Q, KEY, KEY, **keywords))
    with sdpa.use(), pytest.raises(TypeError, match="takes from 3 to 6 positional arguments but 7 were given"):
        F.scaled_dot_product_attention(Q, KEY, KEY, None, 0.0, True, 0.5)
    assert sdpa.calls.served == 3


def test_use_serves_all_threads_while_any_is_inside() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with sdpa.use():
            inside.set()
            leave.wait()

    other = threading.Thread(target=stay)
    with sdpa.use():
        other.start()
        inside.wait()
    attend(Q, KEY, KEY)
    leave.set()
    other.join()
    attend(Q, KEY, KEY)
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (1, 0)


def test_enable_serves_all_threads_and_names_imported_before() -> None:
    sdpa.enable()
    sdpa.enable()
    copied = F.scaled_dot_product_attention
    threads = [threading.Thread(target=attend, args=(Q, KEY, KEY)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    imported_by_name(Q, KEY, KEY)
    assert sdpa.is_enabled() and sdpa.calls.served == 5
    sdpa.disable()
    sdpa.disable()
    copied(Q, KEY, KEY)
    imported_by_name(Q, KEY, KEY)
    assert not sdpa.is_enabled() and sdpa.calls.served == 5


def test_nested_switches_count_a_call_once() -> None:
    with sdpa.use(), sdpa.use(), enabled():
        attend(Q, KEY, KEY)
        attend(Q, KEY, KEY, dropout_p=1.0)
        imported_by_name(Q, KEY, KEY, dropout_p=1.0)
    assert (sdpa.calls.served, sdpa.calls.left) == (1, {"dropout_p 1.0": 2})


@pytest.mark.parametrize("switch", [sdpa.use, enabled])
def test_an_exception_inside_restores_everything(switch: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="must match the size"), switch():
        attend(Q, KEY[:, :2], KEY[:, :2])
    attend(Q, KEY, KEY)
    assert sdpa.calls.served == 0  # and the fixture looks at what the switches change


def test_enable_refuses_to_replace_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return PYTORCH(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with pytest.raises(UnsupportedError, match="is already replaced by tests.integrations.test_sdpa.*theirs"):
        sdpa.enable()
    assert not sdpa.is_enabled()
    monkeypatch.undo()


def test_fast_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa.use():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def modules() -> list[tuple[str, nn.Module, int]]:
    """Name, module of (2, 7, 16), attention calls."""
    torch.manual_seed(2)
    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2, enable_nested_tensor=False)
    return [
        ("encoder_layer", nn.TransformerEncoderLayer(**layer), 1),
        ("encoder", encoder, 2),
        ("decoder_layer", Twice(nn.TransformerDecoderLayer(**layer)), 2),
        ("multihead", Attention(nn.MultiheadAttention(16, 2, batch_first=True)), 1),
    ]


class Attention(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


class Twice(nn.Module):
    def __init__(self, inner: nn.TransformerDecoderLayer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.flip(1))


X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("module", "count"), [x[1:] for x in modules()], ids=[x[0] for x in modules()])
def test_pytorchs_modules_are_served(module: nn.Module, count: int, grad: bool, train: bool) -> None:
    module.train(train)

    def run(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        with torch.set_grad_enabled(grad):
            out = module.to(dtype)(X.to(dtype))
            grads = torch.autograd.grad(out.square().sum(), tuple(module.parameters())) if grad else ()
        module.float()
        names = [name for name, _ in module.named_parameters()]
        return {"out": out.detach()} | dict(zip(names, grads, strict=grad))

    plain = run()
    with sdpa.use():
        got = run()
    assert (sdpa.calls.served, sdpa.calls.left.total()) == (count, 0), sdpa.calls
    assert_close(got, lambda: run(torch.float64), plain, X.dtype)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_with_what_ran(reentrant: bool) -> None:
    leaves = Sample("", keywords=CAUSAL).leaves(torch.float32)
    with sdpa.use():
        out = checkpoint(lambda q, k, v: attend(q, k, v, is_causal=True), *leaves.values(), use_reentrant=reentrant)
        out.backward(gradient_of(out))
    assert sdpa.calls.served >= 1 and not sdpa.calls.left
    judge(leaves, {"out": out.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}, CAUSAL)


class Graphs:
    """A backend of torch.compile that notes which attention operators the compiled graphs call."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=self._note, bw_compiler=self._note)(graph, inputs)

    def _note(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names = {str(node.target) for node in graph.graph.nodes}
        self.seen.append({name.partition(".")[0] for name in names if "attention" in name or "encoder_layer" in name})
        return make_boxed_func(graph.forward)


def multihead(x: Tensor) -> Tensor:
    """For torch.compile one operation, in which it does not see the name that the switches change."""
    weights = torch.linspace(-0.5, 0.5, 48 * 16, dtype=x.dtype).view(48, 16).sin()
    tail = (None, None, None, False, 0.0, weights[:16], None)
    return F.multi_head_attention_forward(x, x, x, 16, 2, weights, *tail, need_weights=False)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("which", "switch"), [
    ("function", sdpa.use), ("multihead", enabled), ("encoder_layer", sdpa.use),
])  # fmt: skip
def test_compiled_code_follows_the_switch(which: str, switch: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    graphs = Graphs()
    runs: dict[str, Any] = {
        "function": lambda x: imported_by_name(x, x.flip(0), x, is_causal=True),
        "multihead": multihead,
        "encoder_layer": modules()[0][1].eval(),
    }
    run = runs[which]
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    with torch.no_grad():
        outside = compiled(X)
        with switch():
            inside = compiled(X)
        again, plain = compiled(X), run(X)
        assert ["flashtile" in seen for seen in graphs.seen] == [False, True]
        assert torch.equal(outside, again)
        wide = run.double() if isinstance(run, nn.Module) else run
        assert_close({"out": inside}, lambda: {"out": wide(X.double())}, {"out": plain}, X.dtype)


@pytest.mark.long
def test_compiled_inside_with_gradients_and_sizes_that_vary() -> None:
    torch._dynamo.reset()
    graphs = Graphs()
    with sdpa.use():
        compiled = torch.compile(F.scaled_dot_product_attention, backend=graphs, fullgraph=True, dynamic=True)
        for rows, keys in ((5, 7), (9, 4), (10, 3)):
            leaves = Sample("", (2, 4, rows, 8), (2, 4, keys, 8)).leaves(torch.float32)
            got = results(leaves, compiled, CAUSAL)
            judge(leaves, got, CAUSAL)
    assert graphs.seen and all(seen == {"flashtile"} for seen in graphs.seen)
    assert sdpa.calls.served == 3


def test_compiled_calls_are_counted_when_they_run() -> None:
    """Each time, the second run of a checkpoint included; what is left to PyTorch is, once for each graph."""

    def step(x: Tensor) -> Tensor:
        return attend(attend(x, x, x, is_causal=True), x, x)

    torch._dynamo.reset()
    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(1, 2, 5, 8, requires_grad=True)
    with sdpa.use():
        run = torch.compile(step, backend=counter, fullgraph=True)
        for _ in range(3):
            run(x).sum().backward()
        assert (sdpa.calls.served, sdpa.calls.left.total(), counter.frame_count) == (6, 0, 1)
        again = torch.compile(lambda x: checkpoint(step, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
        again(x).sum().backward()
        assert sdpa.calls.served == 10
        dropped = torch.compile(lambda x: attend(x, x, x, dropout_p=1.0), backend="eager", fullgraph=True)
        for _ in range(3):
            dropped(x)
    assert (sdpa.calls.served, sdpa.calls.left) == (10, {"dropout_p 1.0 (in compiled code, counted once)": 1})


def test_an_exported_call_is_counted_where_it_runs() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x, x, x)

    x = torch.randn(1, 2, 5, 8)
    with sdpa.use(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of side effects, for one
        program = torch.export.export(Net(), (x,), strict=True)
    assert sdpa.calls.served == 0
    torch.testing.assert_close(program.module()(x), attend(x, x, x))
    assert sdpa.calls.served == 1
    with mock.patch.dict(operation.COUNTERS, clear=True):  # where the integration was not imported
        program.module()(x)
    assert sdpa.calls.served == 1
