"""The Hopper kernels' own source, run on the CPU: the case table, and what no table of results shows."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import flashtile
from flashtile.backends.hopper import tensor_maps
from flashtile.call.problem import Tensors
from flashtile.core import philox
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from tests.backends.hopper.emulated import on_cpu
from tests.cases import CASES, Case, build, judge, one_sign
from tests.fuzz.drawn import Kind
from tests.fuzz.judged import fuzz
from tests.maxima import judge_maxima
from tests.problems import banded_problem
from tests.quantization import cases as quantization
from tests.quantization.cases import QuantizedCase
from tests.slow import named, one_of_each, slow_but

# Alignment is not looked at on a CPU, where nothing needs it.
TABLE = [case for case in CASES if case.name != "sliced"]

# Several tiles and key blocks a program, ends of sequences inside blocks.
LONG = (
    Case("full", batch=1, seqlen_q=300, seqlen_k=420, head_dim=64),
    Case("causal", batch=2, seqlen_q=513, seqlen_k=513, heads=3, kv_heads=1, head_dim=64, causal=True),
    Case("causal_128", batch=1, seqlen_q=260, seqlen_k=390, heads=2, kv_heads=2, head_dim=128, causal=True, sinks=True),
    Case("causal_256", batch=1, seqlen_q=300, seqlen_k=200, heads=2, kv_heads=1, head_dim=256, causal=True),
    Case("full_256", batch=1, seqlen_q=130, seqlen_k=200, head_dim=200),
    Case("window", batch=1, seqlen_q=700, seqlen_k=650, head_dim=64, window=(130, 20), softcap=5.0),
    Case("window_left", batch=1, seqlen_q=400, seqlen_k=700, head_dim=72, window=(200, None)),
    Case("negative_scale", batch=1, seqlen_q=200, seqlen_k=330, head_dim=96, scale=-0.1, causal=True),
    Case("full_72", batch=1, seqlen_q=200, seqlen_k=390, head_dim=72),
    Case("causal_160", batch=1, seqlen_q=260, seqlen_k=300, heads=2, kv_heads=1, head_dim=160, causal=True),
    Case("window_192", batch=1, seqlen_q=270, seqlen_k=330, head_dim=192, window=(130, 20), softcap=5.0),
    Case("latent", batch=2, seqlen_q=200, seqlen_k=330, heads=2, kv_heads=1, head_dim=192, head_dim_v=128, causal=True),
    Case("wide_v", batch=1, seqlen_q=260, seqlen_k=200, head_dim=64, head_dim_v=128, sinks=True),
    Case("narrow_v", batch=1, seqlen_q=150, seqlen_k=330, head_dim=128, head_dim_v=64, window=(200, None)),
    Case("narrow_v_96", batch=1, seqlen_q=260, seqlen_k=300, head_dim=96, head_dim_v=64, causal=True),
    Case("odd_v", batch=1, seqlen_q=200, seqlen_k=150, head_dim=40, head_dim_v=80),
    Case("varlen_96", batch=3, lengths=((130, 260), (0, 20), (64, 128)), head_dim=88, head_dim_v=96, causal=True),
    Case("varlen_latent", batch=2, lengths=((130, 200), (70, 64)), head_dim=192, head_dim_v=128, causal=True, spare=9),
    Case("varlen", batch=4, lengths=((200, 200), (1, 400), (0, 7), (333, 333)), head_dim=64, causal=True, spare=70),
    Case("varlen_128", batch=3, lengths=((130, 260), (300, 20), (64, 128)), head_dim=128, window=(50, 0), sinks=True),
    Case("varlen_256", batch=3, lengths=((130, 260), (300, 0), (64, 128)), head_dim=256, spare=3, lse_grad=True),
    Case("alibi_causal", batch=2, seqlen_q=300, seqlen_k=390, heads=4, kv_heads=2, head_dim=64, causal=True,
         alibi="bh"),
    Case("alibi_full", batch=1, seqlen_q=200, seqlen_k=300, head_dim=128, alibi="h", sinks=True),
    Case("alibi_window", batch=1, seqlen_q=300, seqlen_k=260, head_dim=256, window=(130, 20), softcap=5.0, alibi="h"),
    Case("mask", batch=2, seqlen_q=200, seqlen_k=330, heads=2, kv_heads=1, head_dim=64, mask="bhqk"),
    Case("mask_keys_causal", batch=2, seqlen_q=260, seqlen_k=260, head_dim=128, mask="bk", causal=True),
    Case("bias_256", batch=1, seqlen_q=130, seqlen_k=200, head_dim=256, bias="hqk", bias_grad=False, scale=-0.1),
    Case("chunk", batch=1, seqlen_q=300, seqlen_k=300, head_dim=64, chunk=100),
    Case("chunk_causal", batch=2, seqlen_q=260, seqlen_k=390, kv_heads=1, head_dim=128, chunk=128, causal=True),
    Case("chunk_256", batch=1, seqlen_q=300, seqlen_k=200, head_dim=256, chunk=70, deterministic=True),
    Case("varlen_chunk", batch=3, lengths=((130, 260), (300, 20), (64, 128)), head_dim=128, chunk=90, sinks=True,
         deterministic=True),
    Case("varlen_chunk_64", batch=3, lengths=((200, 200), (1, 400), (333, 333)), head_dim=64, chunk=150, causal=True,
         spare=70),
    Case("documents", batch=2, seqlen_q=300, seqlen_k=300, head_dim=64, intervals="documents"),
    Case("documents_causal", batch=2, seqlen_q=300, seqlen_k=300, kv_heads=1, head_dim=128, causal=True,
         intervals="documents"),
    Case("rows", batch=2, seqlen_q=200, seqlen_k=330, head_dim=128, intervals="rows of heads"),
    Case("columns", batch=2, seqlen_q=300, seqlen_k=230, head_dim=64, intervals="columns of heads", window=(150, 20)),
    Case("intervals_256", batch=1, seqlen_q=200, seqlen_k=200, head_dim=256, intervals="both", sinks=True, softcap=5.0),
    Case("prefix", batch=2, seqlen_q=260, seqlen_k=300, head_dim=96, intervals="prefix", lse_grad=True),
    Case("varlen_documents", batch=3, lengths=((130, 130), (300, 300), (64, 64)), head_dim=128, intervals="documents",
         causal=True, spare=9),
    Case("varlen_intervals", batch=3, lengths=((130, 230), (300, 20), (0, 64)), kv_heads=1, head_dim=64, spare=70,
         intervals="both", chunk=90),
    Case("varlen_mods", batch=3, lengths=((130, 260), (0, 20), (100, 128)), heads=2, kv_heads=1, head_dim=64, spare=70,
         alibi="bh", bias="bhqk", bias_grad=False, mask="bqk", softcap=4.0, causal=True, lse_grad=True),
    Case("dropout", batch=1, seqlen_q=300, seqlen_k=420, head_dim=64, dropout=0.2, lse_grad=True),
    Case("dropout_causal_128", batch=2, seqlen_q=200, seqlen_k=260, heads=4, kv_heads=2, head_dim=128, causal=True,
         dropout=0.1, sinks=True),
    Case("dropout_192", batch=1, seqlen_q=150, seqlen_k=200, head_dim=192, window=(130, 20), softcap=5.0, dropout=0.3),
    Case("varlen_dropout", batch=4, lengths=((200, 200), (1, 300), (0, 7), (133, 133)), head_dim=64, causal=True,
         spare=70, dropout=0.4, bias="hqk", bias_grad=False),
    Case("varlen_mods_128", batch=2, lengths=((130, 200), (70, 64)), head_dim=128, alibi="h", bias="qk",
         bias_grad=False, mask="q", window=(90, 30), sinks=True),
)  # fmt: skip


# Of 8-bit tensors.
LONG_8 = (
    QuantizedCase("long", ((300, 420),), head_dim=128, heads=2, kv_heads=1, shifted=True),
    QuantizedCase("long_causal", ((513, 513),), head_dim=64, heads=3, kv_heads=1, causal=True, sinks=True),
    QuantizedCase("long_256", ((150, 300),), head_dim=256, causal=True, scales=("head", "block", "tensor")),
    QuantizedCase("long_window", ((400, 650),), head_dim=96, window=(130, 20), softcap=5.0, half=True),
    QuantizedCase("long_packed", ((200, 200), (1, 400), (0, 7), (333, 150)), packed=True, head_dim=128, causal=True,
                  spare=70, shifted=True),
)  # fmt: skip
QUICK_8 = named(
    "blocks_causal", "window_left", "one_kv_head", "mixed_scales", "narrower_v", "tiles_without_keys", "dim_256",
    "packed_spare", "everything", "long", "long_causal", "long_packed",
)  # fmt: skip


# Numbers of programs and dtypes, each case with one of them in ``make test`` and with all in ``make test-all``.
PROGRAMS, DTYPES = (1, 2, 5), (torch.float16, torch.bfloat16)
MANY_TILES = slow_but(
    [(case, num_sms, dtype) for case in LONG for num_sms in PROGRAMS for dtype in DTYPES],
    lambda each: each[1:] == (PROGRAMS[LONG.index(each[0]) % 3], DTYPES[LONG.index(each[0]) % 2]),
)
ORDERS = ("causal", "window", "causal_256", "varlen_latent")
SIGNS = [(dim, kwargs, sign) for dim in (64, 128, 256) for kwargs in ({}, {"causal": True}, {"window": (150, 0)})
         for sign in (-1.0, 1.0)]  # fmt: skip


def _few(case: Case) -> str | None:
    """The leaves of a test of a forward's: all of a few cases, whose backward runs too."""
    return None if case.name in ("full", "group_causal", "varlen_spare") else ""


def _seed(case: Case) -> int:
    return zlib.crc32(case.name.encode())


@pytest.mark.parametrize("case", one_of_each(TABLE), ids=str)
def test_the_case_table(case: Case) -> None:
    with on_cpu(_seed(case)):
        judge(build(case, torch.float16), "hopper")


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_largest_scores(case: Case) -> None:
    with on_cpu(_seed(case)):
        judge_maxima(build(dataclasses.replace(case, wanted=_few(case)), torch.float16), "hopper")


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_largest_scores_of_many_tiles(case: Case) -> None:
    with on_cpu(_seed(case), num_sms=2):
        judge_maxima(build(dataclasses.replace(case, wanted=""), torch.bfloat16), "hopper")


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_largest_scores_of_one_sign(dim: int, sign: float) -> None:
    """The maximum is an integer's, of either sign."""
    case = Case("one_sign", batch=1, seqlen_q=150, seqlen_k=300, heads=1, kv_heads=1, head_dim=dim)
    with on_cpu(seed=1):
        judge_maxima(one_sign(build(case, torch.bfloat16), sign), "hopper", gradients=False)


# Shapes of biases and masks over 300 queries and 272 keys, which TMA can read, of 2 sequences and 2 heads.
SCORE_SHAPES = {
    "mask": (1, 1, 300, 272), "mask of keys": (2, 1, 1, 272), "bias": (2, 2, 300, 272), "bias of keys": (2, 1, 1, 272),
    "both": (1, 2, 300, 272),
}  # fmt: skip


def _unreadable(x: torch.Tensor) -> torch.Tensor:
    """A copy with an odd address and an odd stride of rows."""
    *sizes, keys = x.shape
    room = torch.zeros(x.numel() // keys * (keys + 1) + 1, dtype=x.dtype)
    return room[1:].view(*sizes, keys + 1)[..., :keys].copy_(x)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("what", SCORE_SHAPES)
@pytest.mark.parametrize("dim", slow_but([64, 96, 128, 256], (128).__eq__))
def test_biases_and_masks_have_the_same_bits_by_tma_and_by_loads(dim: int, what: str) -> None:
    draw = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, n, 2, dim, generator=draw).bfloat16() for n in (300, 272, 272))
    keywords: dict[str, torch.Tensor] = {}
    if "mask" in what or what == "both":
        keywords["attn_mask"] = torch.rand(SCORE_SHAPES[what], generator=draw) < 0.7
    if "bias" in what or what == "both":
        keywords["attn_bias"] = torch.randn(SCORE_SHAPES[what], generator=draw).bfloat16()
    odd = {name: _unreadable(x) for name, x in keywords.items()}
    assert all(tensor_maps.score_map(x, 128, 64) is not None for x in keywords.values())
    assert all(tensor_maps.score_map(x, 128, 64) is None for x in odd.values())
    with on_cpu(dim, num_sms=2), torch.no_grad():
        for causal in (False, True):
            by_tma, by_loads = (
                flashtile.attention(q, k, v, causal=causal, backend="hopper", **each) for each in (keywords, odd)
            )
            assert torch.equal(by_tma, by_loads)
            bias = {name: x.double() if name == "attn_bias" else x for name, x in keywords.items()}
            wide = (x.double() for x in (q, k, v))
            want = flashtile.attention(*wide, causal=causal, backend="cpu", **bias)
            assert (by_tma.double() - want).norm() < 2**-8 * want.norm()


def test_what_broadcasts_along_keys_is_not_read_by_tma() -> None:
    for shape in ((1, 1, 1, 1), (1,), (2, 3, 1, 1)):
        rows = torch.zeros(*shape[:-1], 16)
        assert tensor_maps.score_map(rows, 128, 64) is not None
        assert tensor_maps.score_map(rows[..., :1], 128, 64) is None


@pytest.mark.one_in(100)
@pytest.mark.parametrize(("case", "num_sms", "dtype"), MANY_TILES, ids=str)
def test_many_tiles_a_program(case: Case, num_sms: int, dtype: torch.dtype) -> None:
    with on_cpu(_seed(case) + num_sms, num_sms):
        judge(build(case, dtype), "hopper")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", slow_but(quantization.CASES + LONG_8, QUICK_8), ids=str)
def test_tensors_of_8_bits(case: QuantizedCase) -> None:
    with on_cpu(zlib.crc32(case.name.encode()), num_sms=2):
        call = quantization.build(case)
        assert not dispatch.reasons("hopper", call.problem, "quantized")
        quantization.judge(call, "hopper")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "quantized", "pieces"])
@pytest.mark.parametrize("shard", slow_but(range(20), lambda shard: shard < 1))
def test_random_calls(shard: int, kind: Kind) -> None:
    assert not fuzz("hopper", 5 * shard, 5, print, kind)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", slow_but(LONG, named(*ORDERS)), ids=str)
def test_bits_depend_neither_on_the_order_of_events_nor_on_the_programs(case: Case) -> None:
    runs = []
    for seed, num_sms in ((0, 1), (1, 4), (2, 4)):
        with on_cpu(seed, num_sms), torch.no_grad():
            runs.append(build(case, torch.bfloat16).run("hopper"))
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])


# What dropout drops goes by a sequence's number in the batch.
ALONE = [case for case in LONG if case.batch == 1 and not case.dropout]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", slow_but(ALONE, named(*ORDERS)), ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(case: Case) -> None:
    alone = build(case, torch.bfloat16)
    q, k, v = (alone.leaves[name].detach() for name in "qkv")
    others = [torch.randn_like(x) for x in (q, k, v)]
    whole = [torch.cat([b, a, b]) for a, b in zip((q, k, v), others, strict=True)]
    with on_cpu(num_sms=4), torch.no_grad():
        out, lse = alone.run("hopper")
        got, got_lse = flashtile.attention(*whole, return_lse=True, backend="hopper", **alone.keywords)
    assert torch.equal(got[1], out[0]) and torch.equal(got_lse[1], lse[0])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("head_dim", "kwargs", "sign"), slow_but(SIGNS, lambda each: each in SIGNS[::5]), ids=str)
def test_scores_all_of_one_sign(head_dim: int, kwargs: dict[str, Any], sign: float) -> None:
    case = Case("one sign", batch=1, seqlen_q=300, seqlen_k=300, heads=2, kv_heads=1, head_dim=head_dim, **kwargs)
    with on_cpu(num_sms=4):
        judge(one_sign(build(case, torch.float16), sign), "hopper")


@pytest.mark.parametrize("head_dim", [64, 256])
def test_lengths_known_to_be_equal_change_no_bit(head_dim: int) -> None:
    """One tensor of offsets for queries and keys tells a kernel more than two of the same content."""
    offsets = torch.tensor([0, 200, 217, 217, 345, 346], dtype=torch.int32)
    q, k, v = (torch.randn(346, 2, head_dim).bfloat16() for _ in range(3))
    with on_cpu(num_sms=4), torch.no_grad():
        (out, lse), (other_out, other_lse) = (
            flashtile.attention_varlen(q, k, v, offsets, other, causal=True, return_lse=True, backend="hopper")
            for other in (offsets, offsets.clone())
        )
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    want = flashtile.attention_varlen(q, k, v, offsets, offsets, causal=True, backend="cpu")
    torch.testing.assert_close(out, want, rtol=0, atol=2e-2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head_dim", [64, 128, 200])
def test_dropout_keeps_what_its_definition_keeps(head_dim: int) -> None:
    """Each pair once: of equal scores, unit values show them in out, unit gradients of out in dv."""
    rows, keys, heads, state = 130, 200, 2, torch.tensor([2**40 + 3, 5])
    q, k = torch.zeros(2, rows, heads, head_dim).half(), torch.zeros(2, keys, heads, head_dim).half()
    kept = philox.keep(state, 0.25, range(2), heads, (0, rows), (0, keys))
    for at in range(0, keys, head_dim):
        v = torch.eye(keys)[:, at : at + head_dim]
        v = torch.nn.functional.pad(v, (0, head_dim - v.shape[1]))[None, :, None].expand(2, -1, heads, -1).half()
        dout = torch.nn.functional.pad(torch.eye(rows), (0, max(0, at + head_dim - rows)))[:, at : at + head_dim]
        t = Tensors(q=q, k=k, v=v.contiguous(), rng_state=state)
        problem = banded_problem(t, Band(), needs_grad=True, dropout_p=0.25)
        dout = dout[None, :, None].expand(2, -1, heads, -1).half().contiguous()
        with on_cpu(at, num_sms=2):
            backend = dispatch.backend("hopper")
            out, lse = backend.plan("forward", problem, t)(t)
            grads = backend.plan("backward", problem, t, (dout, None))(t, out, lse, dout, None)
        assert grads.dv is not None
        width = min(head_dim, keys - at)
        assert torch.equal(out[..., :width] != 0, kept[..., at : at + width].transpose(1, 2))
        width = min(head_dim, rows - at)
        if width > 0:
            assert torch.equal(grads.dv[..., :width] != 0, kept[:, :, at : at + width].permute(0, 3, 1, 2))


def test_another_head_dim_v_is_not_refused() -> None:
    case = Case("latent", seqlen_q=64, seqlen_k=65, head_dim=192, head_dim_v=128)
    problem = dataclasses.replace(
        build(case, torch.bfloat16).problem, device_type="cuda", compute_capability=(9, 0)
    )  # fmt: skip
    assert dispatch.select(problem, "forward").name == "hopper"
    assert dispatch.select(problem, "backward").name == "hopper"
