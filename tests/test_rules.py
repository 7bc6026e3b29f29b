"""Rules that a comparison of numbers alone would not show: isolation, repeatability, memory, what importing loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import flashtile
from tests import fresh

KEYWORDS = [{"causal": True}, {"window_size": (3, 1)}, {"causal": True, "softcap": 2.0}, {"mask": True}]


def keywords(spec: dict, seqlen: int) -> tuple[dict, torch.Tensor]:
    """The keywords of a call and which pairs it keeps."""
    if "mask" in spec:
        keep = torch.rand(seqlen, seqlen, generator=torch.Generator().manual_seed(3)) < 0.5
        return {"attn_mask": keep}, keep
    right = 0 if spec.get("causal") else spec["window_size"][1]
    left = spec["window_size"][0] if "window_size" in spec else seqlen
    i, j = torch.arange(seqlen)[:, None], torch.arange(seqlen)
    return spec, (j <= i + right) & (j >= i - left)


@pytest.mark.parametrize("spec", KEYWORDS, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_poisoned_element_reaches_only_rows_that_attend_to_it(spec: dict, poison: float, where: str) -> None:
    seqlen = 40
    data = {name: torch.randn(1, seqlen, 2, 8) for name in "qkv"}
    kwargs, keep = keywords(spec, seqlen)
    clean = flashtile.attention(**data, **kwargs)
    data[where][0, 17, 1, 3] = poison
    dirty = flashtile.attention(**data, **kwargs)
    reached = torch.zeros(seqlen, dtype=torch.bool)
    if where == "q":
        reached[17] = bool(keep[17].any())
    else:
        reached = keep[:, 17]
    torch.testing.assert_close(dirty[:, :, 0], clean[:, :, 0])
    if where == "v":
        # Rows that mask it may show it too: rule 10.
        assert not torch.isfinite(dirty[0, reached, 1, 3]).any()
        torch.testing.assert_close(dirty[0, :, 1, 4:], clean[0, :, 1, 4:])
        return
    torch.testing.assert_close(dirty[0, ~reached, 1], clean[0, ~reached, 1])
    if torch.isnan(torch.tensor(poison)):
        assert torch.isnan(dirty[0, reached, 1]).all()


@pytest.mark.parametrize("spec", KEYWORDS, ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_gradients_show_a_poisoned_element_in_its_sequence_and_head_group_alone(spec: dict, where: str) -> None:
    """Every gradient it has a part in is NaN; what masks it may be; other sequences and key heads are not."""
    seqlen = 20
    kwargs, keep = keywords(spec, seqlen)
    data = {name: torch.randn(2, seqlen, 4 if name in ("q", "dout") else 2, 8) for name in ("q", "k", "v", "dout")}
    grads = []
    for value in (data[where][1, 15, 1, 0].item(), torch.nan):
        data[where][1, 15, 1, 0] = value
        leaves = [data[name].clone().requires_grad_() for name in "qkv"]
        grads.append(torch.autograd.grad(flashtile.attention(*leaves, **kwargs), leaves, data["dout"]))
    for clean, dirty in zip(*grads, strict=True):
        heads = dirty.shape[2] // 2  # heads of the poisoned group: q's 0 and 1, or k's 0 or 1
        group = slice(0, 2) if where in ("q", "dout") and heads == 2 else slice(0, 1)
        if where in ("k", "v"):
            group = slice(heads, 2 * heads)
        spoilt = torch.zeros(dirty.shape, dtype=torch.bool)
        spoilt[1, :, group] = True
        torch.testing.assert_close(dirty[~spoilt], clean[~spoilt])
    dq, dk, dv = grads[1]
    if where in ("k", "v"):
        rows = keep[:, 15]
        assert dq[1, rows, 2:].isnan().any(dim=-1).all()
    else:
        keys = keep[15]
        assert (dv if where == "dout" else dk)[1, keys, 0].isnan().any(dim=-1).all()


def test_what_lies_past_a_length_reaches_nothing() -> None:
    """Rule 9: rows past the last sequence, and other packed sequences."""
    cu_seqlens = torch.tensor([0, 7, 20], dtype=torch.int32)
    data = [torch.randn(24, 2, 8) for _ in range(3)]
    clean, dirty = ([x.clone() for x in data] for _ in range(2))
    for x in dirty:
        x[20:] = torch.nan
        x[:7] = torch.inf
    results = []
    for tensors in (clean, dirty):
        leaves = [x.requires_grad_() for x in tensors]
        out, lse = flashtile.attention_varlen(*leaves, cu_seqlens, cu_seqlens, window_size=(3, 1), return_lse=True)
        results.append([out, lse.T, *torch.autograd.grad(out[7:20].sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got[7:], want[7:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"window_size": (9, 0)}, {"softcap": 3.0}], ids=str)
def test_the_forward_is_the_same_alone_and_in_any_batch(kwargs: dict, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(5, 67, 4, 16, dtype=dtype) for _ in range(3))
    whole = flashtile.attention(q, k, v, **kwargs)
    assert torch.equal(flashtile.attention(q, k, v, **kwargs), whole)
    for b in (0, 3):
        alone = flashtile.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], **kwargs)
        assert torch.equal(alone[0], whole[b])
    lengths = torch.arange(6, dtype=torch.int32) * 67
    packed = flashtile.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), lengths, lengths, **kwargs)
    assert torch.equal(packed.view_as(whole), whole)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


_LOW = torch.finfo(torch.float32).min


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(1, 60), (8, 8), (31, 31), (49, 30)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "mask", "bias", "softcap", "nan"])
def test_many_short_sequences_have_the_bits_that_each_has_alone(
    kind: str, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    """Computed at once, by however many threads; some of them with a NaN or with scores that are large."""
    make = torch.Generator().manual_seed(3)
    rows, keys = lengths
    q, k, v = (torch.randn(150, n, 3, 16, generator=make).to(dtype) for n in (rows, keys, keys))
    keep, bias = torch.rand(150, 1, rows, keys, generator=make) < 0.7, torch.randn(150, 3, 1, keys, generator=make)
    keep[5], bias[7] = False, _LOW
    if kind == "nan":
        k[9, keys - 1, 1], v[11, 0, 1, 2] = torch.nan, torch.inf
    given = {"plain": {}, "bias": {"attn_bias": bias}, "softcap": {"softcap": 5.0}}.get(kind, {"attn_mask": keep})
    whole = flashtile.attention(q, k, v, causal=True, return_lse=True, **given)
    for b in (0, 5, 7, 9, 11, 149):
        own = {name: x[b : b + 1] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        alone = flashtile.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True, return_lse=True, **own)
        for want, got in zip(alone, whole, strict=True):
            assert torch.equal(want[0].nan_to_num(7.0), got[b].nan_to_num(7.0)), b
    bounds = [torch.arange(151, dtype=torch.int32) * n for n in lengths]
    packed = flashtile.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)), *bounds, rows, keys, causal=True, return_lse=True, **given
    )
    assert torch.equal(packed[0].view_as(whole[0]).nan_to_num(7.0), whole[0].nan_to_num(7.0))
    assert torch.equal(packed[1].view(3, 150, rows).transpose(0, 1).nan_to_num(7.0), whole[1].nan_to_num(7.0))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_short_sequences_of_all_lengths_are_those_alone(causal: bool) -> None:
    """Out, lse and gradients, however they are ordered in between; rows of no sequence come last."""
    make = torch.Generator().manual_seed(6)
    lengths = torch.randint(0, 9, (2, 90), generator=make) % torch.tensor([[9], [4]])
    bounds = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
    q, k, v = (torch.randn(int(bounds[n, -1]) + 3, 2, 16, generator=make).requires_grad_() for n in (0, 1, 1))
    given = {"causal": causal, "return_lse": True, "sinks": torch.ones(2)}
    out, lse = flashtile.attention_varlen(q, k, v, *bounds, **given)
    dout, dlse = torch.randn(out.shape, generator=make), torch.randn(lse.shape, generator=make)
    outputs = (out, lse.where(lse.isfinite(), 0.0))
    whole = torch.autograd.grad(outputs, (q, k, v), (dout, dlse))
    alone = [torch.zeros_like(x) for x in (q, k, v)]
    for b in range(90):
        rows, keys = (slice(int(bounds[n, b]), int(bounds[n, b + 1])) for n in (0, 1))
        own = [x[at][None].detach().requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        one, one_lse = flashtile.attention(*own, **given)
        assert torch.equal(one[0], out[rows]) and torch.equal(one_lse[0], lse[:, rows])
        grads = torch.autograd.grad((one, one_lse), own, (dout[rows][None], dlse[:, rows][None]))
        for total, x, at in zip(alone, grads, (rows, keys, keys), strict=True):
            total[at] = x[0]
    assert not out[-3:].any() and (lse[:, -3:] == -torch.inf).all()
    torch.testing.assert_close(list(whole), alone)


def test_short_sequences_are_computed_at_once() -> None:
    """Products of scores are few, whatever is added to them; the peak is that of a slice."""
    q = torch.randn(600, 8, 2, 16, requires_grad=True)
    flat, bounds = q.flatten(0, 1), torch.arange(601, dtype=torch.int32) * 8
    keep, table = torch.rand(600, 1, 1, 8) < 0.7, torch.randn(1, 2, 8, 8)
    for given in ({}, {"attn_mask": keep}, {"attn_bias": table}, {"dropout_p": 0.1}, {"softcap": 2.0, "causal": True}):
        for packed in (False, True):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
                if packed:
                    out = flashtile.attention_varlen(flat, flat, flat, bounds, bounds, 8, 8, **given)
                else:
                    out = flashtile.attention(q, q, q, **given)
                torch.autograd.grad(out.sum(), q)
            names = [event.name for event in found.events()]
            assert sum("flash_attention_for_cpu" in name or name == "aten::bmm" for name in names) < 40, (given, packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("seqlen_k", [1, 5, 17])
def test_nan_is_not_lost_among_few_keys(seqlen_k: int, where: str, dtype: torch.dtype) -> None:
    data = {"q": torch.randn(1, 3, 2, 8), "k": torch.randn(1, seqlen_k, 2, 8), "v": torch.randn(1, seqlen_k, 2, 8)}
    data = {name: x.to(dtype) for name, x in data.items()}
    data[where][0, 0, 1, 2] = torch.nan
    out, lse = flashtile.attention(**data, return_lse=True)
    reached = slice(0, 1) if where == "q" else slice(None)
    assert out[0, reached, 1, 2].isnan().all() and not out[:, :, 0].isnan().any()
    assert where == "v" or lse[0, 1, reached].isnan().all()


def test_seeded_dropout_repeats_and_unseeded_does_not() -> None:
    q = torch.randn(1, 30, 2, 8)
    results = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        results.append(flashtile.attention(q, q, q, dropout_p=0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


MEMORY = """
import resource, torch, flashtile
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
warm = torch.randn(1, 256, 2, 64, requires_grad=True)
flashtile.attention(warm, warm, warm, causal=True).sum().backward()
q, k, v = (torch.randn(1, 16384, 2, 64, requires_grad={grad}) for _ in range(3))
dout = torch.randn(1, 16384, 2, 64)
before = peak()
out = flashtile.attention(q, k, v, causal=True)
if {grad}: torch.autograd.backward(out, dout)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("grad", "times"), [(False, 2), (True, 5)])
def test_memory_is_linear(grad: bool, times: int) -> None:
    script = MEMORY.format(grad=grad)
    extra = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert extra < times * 4 * 16384 * 2 * 64 * 4


IMPORTED = """
import sys, torch
before = set(sys.modules)
import flashtile
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "typer", "rich", "matplotlib", "numpy", "einops", "click"}))
"""


def test_importing_loads_nothing_optional() -> None:
    done = fresh.run(IMPORTED, check=True)
    assert done.stdout.strip() == "[]"


LOADED = """
import sys, torch
before = set(sys.modules)
import flashtile
print(*sorted(set(sys.modules) - before))
"""


def test_importing_loads_little() -> None:
    """With PyTorch there already, the package's own records and checks, and no kernel's host code."""
    done = fresh.run(LOADED, check=True)
    new = done.stdout.split()
    with_code = set(new) - {f"flashtile.{package}" for package in ("api", "backends", "call", "core", "ops")}
    assert "flashtile.ops.operators" in new and len(with_code) <= 40
    assert not [name for name in new if name.startswith("flashtile.backends.")]
