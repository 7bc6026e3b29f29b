"""Bad calls in 8 bits: each is refused at once by an error that names the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, Quantized, UnsupportedError
from flashtile.api.quantized import of_record
from flashtile.call.quantized_call import FLOAT8, problem_of
from flashtile.ops import dispatch
from tests.quantization.cases import CASES, build

Q, K, V = (torch.randn(2, 150, heads, 32).bfloat16() for heads in (4, 2, 2))
RECORD = flashtile.quantize(Q, K, V)
PLAIN = flashtile.quantize(Q, K, V, smooth_k=False, scales="tensor")
CU = torch.tensor([0, 100, 300], dtype=torch.int32)
PACKED = flashtile.quantize(*(x.flatten(0, 1) for x in (Q, K, V)), cu_seqlens_q=CU, cu_seqlens_k=CU)


def e5m2(x: Tensor) -> Tensor:
    return x.view(torch.uint8).view(torch.float8_e5m2)


def cut(x: Tensor, count: int = 1) -> Tensor:
    return x[..., :-count]


def column(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., -1] = value
        return x

    return change


# What the error names -> the record's fields that are changed, by what.
BAD_RECORDS: dict[str, tuple[str, Quantized, dict[str, Any]]] = {
    "q e5m2": ("q", RECORD, {"q": e5m2}),
    "k e5m2": ("k", RECORD, {"k": e5m2}),
    "v e5m2": ("v", RECORD, {"v": e5m2}),
    "k of 16 bits": ("k", RECORD, {"k": lambda x: x.bfloat16()}),
    "q a list": ("q", RECORD, {"q": lambda x: [1.0]}),
    "v None": ("v", RECORD, {"v": lambda x: None}),
    "q of rank 3": ("q", RECORD, {"q": lambda x: x[0]}),
    "k head_dim": ("k", RECORD, {"k": lambda x: x[..., :16]}),
    "k heads": ("q", RECORD, {"k": lambda x: x[:, :, [0, 0, 0]], "v": lambda x: x[:, [0, 0, 0]]}),
    "v heads": ("v", RECORD, {"v": lambda x: x[:, :1]}),
    "v columns": ("v", RECORD, {"v": lambda x: cut(x, 128)}),
    "v row-major": ("v", RECORD, {"v": lambda x: x.transpose(1, 3)}),
    "two out_scales": ("out_scale", RECORD, {"out_scale": lambda x: torch.ones(2)}),
    "out_scale of no rank": ("out_scale", RECORD, {"out_scale": lambda x: torch.tensor(1.0)}),
    "out_scale of 16 bits": ("out_scale", RECORD, {"out_scale": lambda x: torch.ones(1).bfloat16()}),
    "head_dim 24": ("q", RECORD, {"q": lambda x: x[..., :24], "k": lambda x: x[..., :24]}),
    "head_dim 272": ("q", RECORD, {n: lambda x: x[..., [0] * 272] for n in "qk"}),
    "head_dim_v 20": ("v", RECORD, {"v": lambda x: x[:, :, :20]}),
    "q_scale too few": ("q_scale", RECORD, {"q_scale": lambda x: x[:, :3]}),
    "q_scale of a row": ("q_scale", RECORD, {"q_scale": lambda x: torch.ones(2, 4, 150)}),
    "k_scale of rank 2": ("k_scale", RECORD, {"k_scale": lambda x: x[0]}),
    "k_scale of q's heads": ("k_scale", RECORD, {"k_scale": lambda x: torch.ones(2, 4, 2)}),
    "v_scale a number": ("v_scale", RECORD, {"v_scale": lambda x: 1.0}),
    "v_scale of 16 bits": ("v_scale", RECORD, {"v_scale": lambda x: x.half()}),
    "v_scale elsewhere": ("v_scale", RECORD, {"v_scale": lambda x: x.to("meta")}),
    "q_scale dense": ("q_scale", PACKED, {"q_scale": lambda x: x[None]}),
    "q_scale 0": ("q_scale", RECORD, {"q_scale": column(0.0)}),
    "k_scale negative": ("k_scale", RECORD, {"k_scale": column(-1.0)}),
    "k_scale infinite": ("k_scale", RECORD, {"k_scale": column(torch.inf)}),
    "v_scale nan": ("v_scale", PACKED, {"v_scale": column(torch.nan)}),
    "v_scale one nan": ("v_scale", PLAIN, {"v_scale": column(torch.nan)}),
    "shift rows": ("shift", RECORD, {"shift": cut}),
    "shift of 16 bits": ("shift", RECORD, {"shift": lambda x: x.bfloat16()}),
    "dtype": ("dtype", RECORD, {"dtype": lambda x: torch.float32}),
    "cu_seqlens_q alone": ("cu_seqlens_k", PACKED, {"cu_seqlens_k": lambda x: None}),
    "cu_seqlens_q int64": ("cu_seqlens_q", PACKED, {"cu_seqlens_q": lambda x: x.long()}),
    "cu_seqlens_k falling": ("cu_seqlens_k", PACKED, {"cu_seqlens_k": lambda x: x.flip(0) - x.min() + x * 0}),
    "max_seqlen_k too small": ("max_seqlen_k", PACKED, {"max_seqlen_k": lambda x: 199}),
    "max_seqlen_q dense": ("max_seqlen_q", RECORD, {"max_seqlen_q": lambda x: 150}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_wrong_record_names_the_field(name: str) -> None:
    argument, record, changes = BAD_RECORDS[name]
    wrong = dataclasses.replace(record, **{field: change(getattr(record, field)) for field, change in changes.items()})
    run = flashtile.attention_varlen if record is PACKED else flashtile.attention
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        run(wrong)
    assert caught.value.argument == argument


MASK = torch.ones(150, 150, dtype=torch.bool)
# What goes with no call in 8 bits, for a Quantized and with precision="fp8" alike.
BAD_KEYWORDS: dict[str, dict[str, Any]] = {
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "attn_mask": {"attn_mask": MASK},
    "attn_bias": {"attn_bias": MASK.float()},
    "dropout_p": {"dropout_p": 0.1},
    "causal": {"causal": 1},
    "window_size": {"window_size": (1,)},
    "softmax_scale": {"softmax_scale": torch.inf},
    "sinks": {"sinks": torch.zeros(3)},
    "return_lse": {"return_lse": None},
    "backend": {"backend": "fast"},
}


@pytest.mark.parametrize("argument", BAD_KEYWORDS)
def test_keywords_are_refused_by_name(argument: str) -> None:
    for run in (
        lambda **keywords: flashtile.attention(RECORD, **keywords),
        lambda **keywords: flashtile.attention(Q, K, V, precision="fp8", **keywords),
        lambda **keywords: flashtile.attention(Q.clone().requires_grad_(), K, V, precision="fp8", **keywords),
        lambda **keywords: flashtile.attention_varlen(PACKED, **keywords),
        lambda **keywords: flashtile.explain(RECORD, **keywords),
    ):
        with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
            run(**BAD_KEYWORDS[argument])
        assert caught.value.argument == argument


BAD_CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "precision a number": ("precision", lambda: flashtile.attention(Q, K, V, precision=8)),
    "precision of int8": ("precision", lambda: flashtile.attention(Q, K, V, precision="int8")),
    "precision of a record": ("precision", lambda: flashtile.attention(RECORD, precision="fp8")),
    "float32": ("q", lambda: flashtile.attention(Q.float(), K.float(), V.float(), precision="fp8")),
    "e4m3 without a record": ("q", lambda: flashtile.attention(RECORD.q, RECORD.k, RECORD.k)),
    "head_dim 24": ("q", lambda: flashtile.attention(Q[..., :24], K[..., :24], V, precision="fp8")),
    "head_dim_v 40": ("v", lambda: flashtile.attention(Q, K, V[..., [0] * 40], precision="fp8")),
    "k missing": ("k", lambda: flashtile.attention(Q)),
    "k missing for fp8": ("k", lambda: flashtile.attention(Q, precision="fp8")),
    "q None": ("q", lambda: flashtile.attention(None, K, V)),
    "k given": ("k", lambda: flashtile.attention(RECORD, K)),
    "v given": ("v", lambda: flashtile.attention(RECORD, v=V)),
    "record as k": ("k", lambda: flashtile.attention(Q, RECORD, V)),
    "packed": ("q", lambda: flashtile.attention(PACKED)),
    "dense": ("q", lambda: flashtile.attention_varlen(RECORD)),
    "cu_seqlens_q given": ("cu_seqlens_q", lambda: flashtile.attention_varlen(PACKED, cu_seqlens_q=CU)),
    "cu_seqlens_k given": ("cu_seqlens_k", lambda: flashtile.attention_varlen(PACKED, cu_seqlens_k=CU)),
    "max_seqlen_q given": ("max_seqlen_q", lambda: flashtile.attention_varlen(PACKED, max_seqlen_q=200)),
    "cu_seqlens_q missing": ("cu_seqlens_q", lambda: flashtile.attention_varlen(Q[0], K[0], V[0])),
    "softcap of smoothed keys": ("softcap", lambda: flashtile.attention(RECORD, softcap=5.0)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_name_the_argument(name: str) -> None:
    argument, call = BAD_CALLS[name]
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        call()
    assert caught.value.argument == argument


def test_says_what_it_is_and_what_it_must_be() -> None:
    for message, call in {
        "q: dtype is torch.float8_e5m2, must be float8_e4m3fn": BAD_RECORDS["q e5m2"],
        "q: head_dim is 24, must be a multiple of 16 and at most 256": BAD_RECORDS["head_dim 24"],
        "q_scale: has shape (2, 3, 2), must be (2, 4, 2), (batch, num_heads, blocks), or 1 where one scale serves "
        "several": BAD_RECORDS["q_scale too few"],
        "v: has 128 columns, must have 256: whole blocks of 128 keys": BAD_RECORDS["v columns"],
        "q_scale: has 0.0, must be positive and finite": BAD_RECORDS["q_scale 0"],
    }.items():
        _, record, changes = call
        wrong = dataclasses.replace(record, **{f: change(getattr(record, f)) for f, change in changes.items()})
        with pytest.raises(InvalidInputError) as caught:
            flashtile.attention(wrong)
        assert str(caught.value) == message
    with pytest.raises(InvalidInputError, match=r"^softcap: .*: quantize with smooth_k=False$"):
        flashtile.attention(RECORD, softcap=5.0)
    with pytest.raises(InvalidInputError, match=r"^q: is a Quantized of packed sequences: flashtile.attention_varlen"):
        flashtile.attention(PACKED)


@pytest.mark.parametrize("backend", [name for name in flashtile.backends() if name != "cpu"])
def test_an_explicit_backend_never_falls_back(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=f"(?s)cannot run this quantized call.*{backend}: ."):
        flashtile.attention(RECORD, backend=backend)


def test_gpus_without_products_of_8_bits_and_amd_are_refused_with_reasons() -> None:
    problem = build(CASES[0]).problem
    for capability, reason in (
        ((8, 0), "needs compute capability 8.9 or later, this device is 8.0"),
        (None, "needs an NVIDIA GPU"),
    ):  # fmt: skip
        gpu = problem.but(device_type="cuda", compute_capability=capability)
        assert reason in dispatch.reasons("portable", gpu, "quantized")
        with pytest.raises(UnsupportedError, match="no backend supports this quantized call"):
            dispatch.select(gpu, "quantized")
    for later in ((8, 9), (9, 0), (10, 0)):
        gpu = problem.but(device_type="cuda", compute_capability=later)
        assert dispatch.reasons("portable", gpu, "quantized") in ([], ["needs Triton, which is not installed"])


def test_nobody_supports_it() -> None:
    record = dataclasses.replace(RECORD, **{n: getattr(RECORD, n).to("meta") for n in ("q", "k", "v")})
    record = dataclasses.replace(
        record, **{n: getattr(RECORD, n).to("meta") for n in ("q_scale", "k_scale", "v_scale", "shift")}
    )
    from flashtile.call.quantized_call import QuantizedOptions

    problem = problem_of(of_record(record, None), QuantizedOptions())
    assert problem.dtype == FLOAT8
    with pytest.raises(UnsupportedError) as caught:
        dispatch.select(problem, "quantized")
    assert set(caught.value.reasons) == set(flashtile.backends()) and all(caught.value.reasons.values())
