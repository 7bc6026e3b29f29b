"""Bad calls: each is refused at once by an error that names the argument."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_overloads

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks
from flashtile.api.keywords import CacheKeywords, DenseKeywords, Keywords
from flashtile.call import problem
from flashtile.call.problem import Tensors
from flashtile.core import settings
from flashtile.core.masks import Band
from flashtile.ops import dispatch, plans
from tests import fresh
from tests.problems import banded_problem

Q = torch.randn(2, 5, 4, 8)
K = torch.randn(2, 7, 2, 8)
CU = torch.tensor([0, 3, 5], dtype=torch.int32)
ROWS = torch.randn(5, 4, 8)


def call(**changes: object) -> Callable[[], object]:
    arguments: dict = {"q": Q, "k": K, "v": K} | changes
    return lambda: flashtile.attention(**arguments)


def packed(**changes: object) -> Callable[[], object]:
    arguments: dict = dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=CU, cu_seqlens_k=CU) | changes
    return lambda: flashtile.attention_varlen(**arguments)


BAD = {
    "q is a list": ("q", call(q=[1.0])),
    "k is None": ("k", call(k=None)),
    "q of rank 0": ("q", call(q=torch.tensor(1.0))),
    "q of rank 3": ("q", call(q=Q[0])),
    "v of rank 5": ("v", call(v=K[None])),
    "integer q": ("q", call(q=Q.int(), k=K.int(), v=K.int())),
    "complex q": ("q", call(q=Q.cfloat(), k=K.cfloat(), v=K.cfloat())),
    "fp8 q": ("q", call(q=Q.to(torch.float8_e4m3fn), k=K.to(torch.float8_e4m3fn), v=K.to(torch.float8_e4m3fn))),
    "mixed dtypes": ("k", call(k=K.half())),
    "mixed devices": ("v", call(v=K.to("meta"))),
    "head_dim": ("k", call(k=K[..., :6])),
    "batch": ("k", call(k=K[:1])),
    "seqlen_k": ("v", call(v=K[:, :3])),
    "num_heads_kv": ("v", call(v=K[:, :, :1])),
    "heads that do not divide": ("q", call(q=Q[:, :, :3])),
    "no heads": ("q", call(q=Q[:, :, :0])),
    "no head_dim": ("q", call(q=Q[..., :0], k=K[..., :0])),
    "negative dropout": ("dropout_p", call(dropout_p=-0.1)),
    "dropout 1": ("dropout_p", call(dropout_p=1.0)),
    "dropout nan": ("dropout_p", call(dropout_p=float("nan"))),
    "dropout text": ("dropout_p", call(dropout_p="a")),
    "softcap negative": ("softcap", call(softcap=-1.0)),
    "softcap infinite": ("softcap", call(softcap=float("inf"))),
    "block_mask a tensor": ("block_mask", call(block_mask=torch.ones(4, 6) > 0)),
    "block_mask of other rows": ("block_mask", call(block_mask=masks.rows(0, torch.ones(7, dtype=torch.int32)))),
    "block_mask of other keys": ("block_mask", call(block_mask=masks.columns(0, torch.ones(6, dtype=torch.int32)))),
    "block_mask elsewhere": ("block_mask", call(block_mask=masks.chunks(3, 5, seqlen_k=7).to("meta"))),
    "attention_chunk negative": ("attention_chunk", call(attention_chunk=-1)),
    "attention_chunk a bool": ("attention_chunk", call(attention_chunk=True)),
    "attention_chunk False": ("attention_chunk", call(attention_chunk=False)),
    "attention_chunk a float": ("attention_chunk", call(attention_chunk=8.0)),
    "attention_chunk past an int32": ("attention_chunk", call(attention_chunk=2**31)),
    "scale nan": ("softmax_scale", call(softmax_scale=float("nan"))),
    "scale tensor": ("softmax_scale", call(softmax_scale=torch.tensor(1.0))),
    "scale of 401 digits": ("softmax_scale", call(softmax_scale=10**400)),
    "scale of 5001 digits": ("softmax_scale", call(softmax_scale=-(10**5000))),
    "scale past float32": ("softmax_scale", call(softmax_scale=1e39)),
    "scale complex": ("softmax_scale", call(softmax_scale=1j)),
    "softcap of 401 digits": ("softcap", call(softcap=10**400)),
    "softcap below float32": ("softcap", call(softcap=1e-320)),
    "dropout of 401 digits": ("dropout_p", call(dropout_p=10**400)),
    "causal a number": ("causal", call(causal=1)),
    "window an int": ("window_size", call(window_size=4)),
    "window of three": ("window_size", call(window_size=(1, 2, 3))),
    "window below -1": ("window_size", call(window_size=(-2, 0))),
    "window of floats": ("window_size", call(window_size=(1.0, 0))),
    "float mask": ("attn_mask", call(attn_mask=torch.zeros(5, 7))),
    "window a set": ("window_size", call(window_size={1, 2})),
    "window a tensor": ("window_size", call(window_size=torch.tensor([1, 2]))),
    "window of tensors": ("window_size", call(window_size=(torch.tensor(1), 2))),
    "mask that requires grad": ("attn_mask", call(attn_mask=torch.zeros(5, 7, requires_grad=True))),
    "mask by batch and key": ("attn_mask", call(attn_mask=torch.ones(2, 7, dtype=torch.bool))),
    "mask shape": ("attn_mask", call(attn_mask=torch.ones(5, 6, dtype=torch.bool))),
    "mask rank": ("attn_mask", call(attn_mask=torch.ones(1, 1, 1, 5, 7, dtype=torch.bool))),
    "integer bias": ("attn_bias", call(attn_bias=torch.zeros(5, 7, dtype=torch.int32))),
    "bias heads": ("attn_bias", call(attn_bias=torch.zeros(3, 5, 7))),
    "slopes shape": ("alibi_slopes", call(alibi_slopes=torch.zeros(3))),
    "slopes of rank 4": ("alibi_slopes", call(alibi_slopes=torch.zeros(1, 1, 1, 4))),
    "slopes of rank 0": ("alibi_slopes", call(alibi_slopes=torch.tensor(1.0))),
    "slopes fp64": ("alibi_slopes", call(alibi_slopes=torch.zeros(4, dtype=torch.float64))),
    "fp8 bias": ("attn_bias", call(attn_bias=torch.zeros(5, 7).to(torch.float8_e4m3fn))),
    "quantised q": ("q", lambda: call(q=torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8))()),
    "boolean q": ("q", call(q=Q > 0, k=K > 0, v=K > 0)),
    "slopes dtype": ("alibi_slopes", call(alibi_slopes=torch.zeros(4, dtype=torch.int32))),
    "slopes grad": ("alibi_slopes", call(alibi_slopes=torch.zeros(4, requires_grad=True))),
    "sinks shape": ("sinks", call(sinks=torch.zeros(2))),
    "sinks integer": ("sinks", call(sinks=torch.zeros(4, dtype=torch.long))),
    "deterministic a number": ("deterministic", call(deterministic=1)),
    "return_lse None": ("return_lse", call(return_lse=None)),
    "causal a list": ("causal", call(causal=[True])),
    "causal a tensor": ("causal", call(causal=torch.tensor(True))),
    "return_lse a list": ("return_lse", call(return_lse=[True])),
    "backend a tensor": ("backend", call(backend=torch.tensor(1))),
    "scale a list": ("softmax_scale", call(softmax_scale=[0.5])),
    "softcap a list": ("softcap", call(softcap=[1.0])),
    "dropout a list": ("dropout_p", call(dropout_p=[0.1])),
    "deterministic a list": ("deterministic", call(deterministic=[True])),
    "backend unknown": ("backend", call(backend="fast")),
    "backend a list": ("backend", call(backend=["cpu"])),
    "cu_seqlens None": ("cu_seqlens_k", packed(cu_seqlens_k=None)),
    "cu_seqlens a list": ("cu_seqlens_q", packed(cu_seqlens_q=[0, 5])),
    "cu_seqlens int64": ("cu_seqlens_q", packed(cu_seqlens_q=CU.long())),
    "cu_seqlens of rank 2": ("cu_seqlens_q", packed(cu_seqlens_q=CU[None])),
    "cu_seqlens empty": ("cu_seqlens_q", packed(cu_seqlens_q=CU[:0], cu_seqlens_k=CU[:0])),
    "cu_seqlens lengths": ("cu_seqlens_k", packed(cu_seqlens_k=CU[:2])),
    "cu_seqlens start": ("cu_seqlens_q", packed(cu_seqlens_q=CU + 1)),
    "cu_seqlens falling": ("cu_seqlens_k", packed(cu_seqlens_k=torch.tensor([0, 4, 2], dtype=torch.int32))),
    "cu_seqlens past the rows": ("cu_seqlens_q", packed(cu_seqlens_q=torch.tensor([0, 3, 9], dtype=torch.int32))),
    "max_seqlen too small": ("max_seqlen_q", packed(max_seqlen_q=2)),
    "max_seqlen negative": ("max_seqlen_k", packed(max_seqlen_k=-1)),
    "max_seqlen past int32": ("max_seqlen_q", packed(max_seqlen_q=2**31)),
    "max_seqlen a tensor": ("max_seqlen_q", packed(max_seqlen_q=torch.tensor(5))),
    "max_seqlen a float": ("max_seqlen_k", packed(max_seqlen_k=3.0)),
    "dense q with cu_seqlens": ("q", packed(q=Q)),
    "mask smaller than a sequence": ("attn_mask", packed(attn_mask=torch.ones(2, 3, dtype=torch.bool))),
    "bias smaller than a sequence": ("attn_bias", packed(attn_bias=torch.ones(4, 1, 2))),
    "max_seqlen without cu_seqlens": ("max_seqlen_q", lambda: flashtile.explain(Q, K, K, max_seqlen_q=5)),
    "device unknown": ("device", lambda: flashtile.warm_up(Q, K, K, device="gpu")),
    "device None": ("device", lambda: flashtile.warm_up(Q, K, K, device=None)),
    "backward a text": ("backward", lambda: flashtile.warm_up(Q, K, K, device="cpu", backward="no")),
    "state a list": ("out_a", lambda: flashtile.merge_states([1.0], K, K, K)),
    "state sparse": ("out_b", lambda: flashtile.merge_states(Q, Q[..., 0].mT, Q.to_sparse(), Q[..., 0].mT)),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.parametrize("name", BAD)
def test_names_the_argument(name: str) -> None:
    argument, run = BAD[name]
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        run()
    assert caught.value.argument == argument
    assert isinstance(caught.value, ValueError)


def test_says_what_it_is_and_what_it_must_be() -> None:
    with pytest.raises(InvalidInputError, match=r"^k: head_dim is 6, but q has 8$"):
        call(k=K[..., :6])()
    with pytest.raises(InvalidInputError, match=r"multiple of k's num_heads_kv 2"):
        call(q=Q[:, :, :3])()


def test_says_which_ranks_and_which_view() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^alibi_slopes: has 4 .* 1 or 2: \(num_heads_q,\) or \(batch, num_heads_q"
    ):
        BAD["slopes of rank 4"][1]()
    with pytest.raises(InvalidInputError, match=r"give attn_mask\[:, None, None, :\]$"):
        BAD["mask by batch and key"][1]()
    with pytest.raises(InvalidInputError, match=r"^attn_mask: .*give attn_mask\.view\(2, 4, 1, 7\), where True keeps$"):
        call(attn_mask=torch.ones(8, 1, 7, dtype=torch.bool))()
    with pytest.raises(InvalidInputError, match=r"^attn_bias: .*give attn_bias\[:, None\]$"):
        call(attn_bias=torch.ones(2, 5, 7))()
    with pytest.raises(InvalidInputError, match=r"^softmax_scale: is 10{59}\.\.\., must be"):
        BAD["scale of 401 digits"][1]()
    many = torch.zeros(30, 40)
    with pytest.raises(InvalidInputError, match=r"^causal: is of type Tensor and shape \(30, 40\), must be"):
        call(causal=many)()


def test_slopes_may_be_float64_where_q_is() -> None:
    slopes = torch.rand(4)
    want = flashtile.attention(Q.double(), K.double(), K.double(), alibi_slopes=slopes)
    got = flashtile.attention(Q.double(), K.double(), K.double(), alibi_slopes=slopes.double())
    assert torch.equal(got, want)
    with pytest.raises(InvalidInputError, match="must be float32 or float64$"):
        flashtile.attention(Q.double(), K.double(), K.double(), alibi_slopes=slopes.half())


def test_a_window_wider_than_any_sequence_is_unbounded() -> None:
    want = flashtile.attention(Q, K, K, window_size=(None, 0))
    for wide in (2**31, 2**63 - 1, 2**70):
        assert torch.equal(flashtile.attention(Q, K, K, window_size=(wide, 0)), want)


WITHOUT_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.flatten(1).to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning", "ignore:.*beta state:UserWarning")
@pytest.mark.parametrize(
    "run", [flashtile.attention, flashtile.explain, functools.partial(flashtile.warm_up, device="cpu")]
)
@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
def test_tensors_without_strides_are_named(kind: str, run: Callable[..., object]) -> None:
    odd = WITHOUT_STRIDES[kind]
    features = {"attn_bias": torch.zeros(2, 4, 5, 7), "sinks": torch.zeros(4, 1)}
    for name, value in {"q": Q, "k": K, "v": K, **features}.items():
        with pytest.raises(InvalidInputError, match=f"^{name}: (is a nested|has the layout)"):
            run(**{"q": Q, "k": K, "v": K, name: odd(value)})


class Odd(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.nn.Buffer, lambda x: x.as_subclass(Odd)])
def test_tensors_that_are_subclasses_are_tensors(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    bias = torch.randn(4, 5, 7)
    got = flashtile.attention(kind(Q.clone()), K, K, attn_bias=kind(bias))
    torch.testing.assert_close(torch.Tensor(got.detach()), flashtile.attention(Q, K, K, attn_bias=bias))


WRONG_SETTINGS = [("FLASHTILE_BACKEND", "trition"), ("FLASHTILE_CHECK", "ture"), ("FLASHTILE_LAUNCHER", "driver"),
                  ("FLASHTILE_STRICT", "strict")]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS)
def test_a_misspelt_environment_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    values = {setting.name: setting.values for setting in settings.SETTINGS}[name]
    message = rf"^{name}: is '{value}', must be {' or '.join(values)}, or unset$"
    dense = torch.randn(1, 3, 2, 8)
    for run in (flashtile.attention, flashtile.explain):
        with plans.own_plans(), pytest.raises(InvalidInputError, match=message):
            run(dense, dense, dense)


@pytest.mark.parametrize(
    ("value", "enabled"), [("", False), ("0", False), ("OFF", False), (" 1 ", True), ("True", True)]
)
def test_what_switches_a_setting_on(value: str, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", value)
    assert settings.CHECK.enabled() == enabled


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(UnsupportedError, match="(?s)cannot run.*hopper: ."):
        flashtile.attention(Q, K, K, backend="hopper")


def test_backends_is_the_function_and_not_the_package() -> None:
    code = "import flashtile, flashtile.backends.cpu.plan; print(flashtile.backends())"
    done = fresh.run(code, check=True)
    assert done.stdout == f"{flashtile.backends()}\n"


def test_nobody_supports_it() -> None:
    meta = Q.to("meta")
    with pytest.raises(UnsupportedError) as caught:
        dispatch.select(banded_problem(Tensors(meta, meta, meta), Band()))
    assert set(caught.value.reasons) == set(flashtile.backends())
    assert all(caught.value.reasons.values())


def test_a_list_of_window_bounds_is_a_window_and_no_softcap_is_none() -> None:
    want = flashtile.attention(Q, K, K, window_size=(2, None))
    assert torch.equal(flashtile.attention(Q, K, K, window_size=[2, -1], softcap=None), want)


def test_arrays_are_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    for name in ("causal", "softmax_scale", "softcap", "dropout_p", "deterministic"):
        with pytest.raises(InvalidInputError, match=f"^{name}: "):
            call(**{name: numpy.ones(3)})()


@pytest.mark.parametrize("error", [
    InvalidInputError("q", "is wrong"), UnsupportedError("no backend", {"cpu": ["no", "never"]}),
], ids=repr)  # fmt: skip
def test_errors_can_be_pickled_and_copied(error: Exception) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_numbers_of_other_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    got = flashtile.attention(Q, K, K, window_size=(numpy.int64(2), numpy.int32(-1)), softmax_scale=numpy.float32(0.5))
    assert torch.equal(got, flashtile.attention(Q, K, K, window_size=(2, None), softmax_scale=0.5))


@pytest.mark.parametrize(("run", "message"), [
    (call(is_causal=True), "'is_causal': it is called causal"),
    (packed(scale=1.0), "'scale': it is called softmax_scale"),
    (call(dropout=0.1), "'dropout': it is called dropout_p"), (call(colour=1), "'colour'$"),
    (call(dropuot=0.1), "'dropuot', did you mean dropout_p"),
    (lambda: flashtile.attention(Q, K, K, True), "too many, True: give causal"),
    (lambda: flashtile.attention(Q, K, K, causl=True), "'causl', did you mean causal?"),
    (lambda: flashtile.attention_with_kvcache(Q, K, K, 3), "cache_seqlens"),
    (lambda: flashtile.explain(Q, K, K, scale=1.0), "it is called softmax_scale"),
    (lambda: flashtile.warm_up(Q, K, K, scale=1.0, device="cpu"), "^warm_up.*softmax_scale"),
])  # fmt: skip
def test_keywords_of_other_libraries_are_named(run: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run()


def test_int64_bounds_get_a_hint() -> None:
    with pytest.raises(InvalidInputError, match=r"must be int32: give cu_seqlens_q\.int\(\)$"):
        packed(cu_seqlens_q=CU.long())()


def test_heads_before_rows_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "_warned", False)
    heads_first = torch.randn(1, 4, 258, 8)
    with plans.own_plans(), pytest.warns(UserWarning, match=r"258 heads of 4 rows; .*transpose\(1, 2\)") as caught:
        flashtile.attention(heads_first, heads_first[:, :2, :129], heads_first[:, :2, :129])
        flashtile.attention(heads_first[:, :3], heads_first[:, :3], heads_first[:, :3])
    assert len(caught) == 1
    with plans.own_plans(), warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(problem, "_warned", False)
        right = heads_first.transpose(1, 2)
        flashtile.attention(right, right, right)
        flashtile.attention(heads_first[:, :, :128], heads_first[:, :, :128], heads_first[:, :, :128])
        long = torch.randn(1, 129, 258, 8)
        flashtile.attention(heads_first, long, long)
    with plans.own_plans(), pytest.warns(UserWarning, match="258 heads of 4 rows"):
        torch.compile(lambda x: flashtile.attention(x, x, x), backend="aot_eager", dynamic=True)(heads_first)


def test_overloads_have_the_keywords_of_the_functions() -> None:
    results = {"return_lse", "return_max_scores"}
    shared = {"q", "k", "v", *results, *Keywords.__annotations__}
    assert {*DenseKeywords.__annotations__} == {*Keywords.__annotations__, "selected"}
    bounds = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    cached = {"q", "k_cache", "v_cache", "cache_seqlens", *results, *CacheKeywords.__annotations__}
    for function, names in (
        (flashtile.attention, shared | {"selected"}),
        (flashtile.attention_varlen, shared | bounds | {"batch_invariant", "out"}),
        (flashtile.attention_with_kvcache, cached),
    ):  # fmt: skip
        assert names == set(inspect.signature(function).parameters) - {"_more", "_unknown"}
        assert [str(inspect.signature(each).return_annotation) for each in get_overloads(function)] == [
            "Tensor", "tuple[Tensor, Tensor]", "Tensor | tuple[Tensor, Tensor]",
            "tuple[Tensor, Tensor]", "tuple[Tensor, Tensor, Tensor]", "Tensor | tuple[Tensor, ...]",
        ]  # fmt: skip


def test_explain_answers_for_meta_tensors_as_the_call_does() -> None:
    meta = Q.to("meta")
    assert flashtile.attention(meta, meta, meta).shape == Q.shape
    assert "no backend: a call makes results of the right shapes" in flashtile.explain(meta, meta, meta)
    for run in (flashtile.attention, flashtile.explain):
        with pytest.raises(InvalidInputError, match="^k: "):
            run(meta, meta[..., :4], meta)


def test_a_slower_backend_is_refused_or_warned_of_if_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dispatch.backend("cpu").capabilities("forward")
    assert whole is not None
    lacking = replace(whole, features=whole.features - {"softcap"})
    hopper: Any = type(dispatch.backend("hopper"))
    own = hopper.capabilities

    def capabilities(self: Any, direction: Any) -> Any:
        return lacking if self.name == "hopper" else own(self, direction)

    monkeypatch.setattr(hopper, "capabilities", capabilities)
    monkeypatch.setattr(hopper, "missing", lambda self: None)
    want = flashtile.attention(Q, K, K, softcap=5.0)
    for strict in ("1", "on", "warn", "0"):
        monkeypatch.setenv("FLASHTILE_STRICT", strict)
        with plans.own_plans(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if strict in ("1", "on"):
                with pytest.raises(UnsupportedError, match="^cpu would run this forward of .*\n  hopper: no softcap$"):
                    flashtile.attention(Q, K, K, softcap=5.0)
                assert torch.equal(flashtile.attention(Q, K, K, softcap=5.0, backend="cpu"), want)
            else:
                assert torch.equal(flashtile.attention(Q, K, K, softcap=5.0), want)
        assert [str(each.message).endswith("hopper: no softcap") for each in caught] == [True] * (strict == "warn")


def test_strict_calls_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    x = torch.empty(1, 256, 4, 64, device="meta")
    with pytest.raises(UnsupportedError, match="hopper: no float32"):
        flashtile.explain(x, x, x, gpu="H100")
    assert "forward: portable" in flashtile.explain(x, x, x, gpu="H100", backend="portable")
    assert "forward: portable" in flashtile.explain(x, x, x, gpu="A100")
    half = x.half()
    assert "forward: hopper" in flashtile.explain(half, half, half, gpu="H100")
    tiny = half[:, :64]  # there the portable kernels are the faster ones
    assert "slower up to" in flashtile.explain(tiny, tiny, tiny, gpu="H100")
    half.requires_grad_()
    bias = torch.empty(1, 4, 256, 256, device="meta", requires_grad=True)
    with pytest.raises(UnsupportedError, match="this backward .*\n.*no gradient of attn_bias"):
        flashtile.explain(half, half, half, attn_bias=bias, gpu="H100")
