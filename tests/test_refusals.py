"""Bad calls: each is refused at once by an error that names the argument."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError, dispatch
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

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
    "scale nan": ("softmax_scale", call(softmax_scale=float("nan"))),
    "scale tensor": ("softmax_scale", call(softmax_scale=torch.tensor(1.0))),
    "causal a number": ("causal", call(causal=1)),
    "window an int": ("window_size", call(window_size=4)),
    "window of three": ("window_size", call(window_size=(1, 2, 3))),
    "window below -1": ("window_size", call(window_size=(-2, 0))),
    "window of floats": ("window_size", call(window_size=(1.0, 0))),
    "float mask": ("attn_mask", call(attn_mask=torch.zeros(5, 7))),
    "mask shape": ("attn_mask", call(attn_mask=torch.ones(5, 6, dtype=torch.bool))),
    "mask rank": ("attn_mask", call(attn_mask=torch.ones(1, 1, 1, 5, 7, dtype=torch.bool))),
    "integer bias": ("attn_bias", call(attn_bias=torch.zeros(5, 7, dtype=torch.int32))),
    "bias heads": ("attn_bias", call(attn_bias=torch.zeros(3, 5, 7))),
    "slopes shape": ("alibi_slopes", call(alibi_slopes=torch.zeros(3))),
    "slopes dtype": ("alibi_slopes", call(alibi_slopes=torch.zeros(4, dtype=torch.int32))),
    "slopes grad": ("alibi_slopes", call(alibi_slopes=torch.zeros(4, requires_grad=True))),
    "sinks shape": ("sinks", call(sinks=torch.zeros(2))),
    "sinks integer": ("sinks", call(sinks=torch.zeros(4, dtype=torch.long))),
    "deterministic a number": ("deterministic", call(deterministic=1)),
    "return_lse None": ("return_lse", call(return_lse=None)),
    "causal a list": ("causal", call(causal=[True])),
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
    "max_seqlen a float": ("max_seqlen_k", packed(max_seqlen_k=3.0)),
    "dense q with cu_seqlens": ("q", packed(q=Q)),
}


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


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(UnsupportedError, match="(?s)cannot run.*hopper: ."):
        flashtile.attention(Q, K, K, backend="hopper")


def test_nobody_supports_it() -> None:
    meta = Q.to("meta")
    with pytest.raises(UnsupportedError) as caught:
        dispatch.select(Problem.build(Tensors(meta, meta, meta), Band()))
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
