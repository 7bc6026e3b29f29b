"""Rules that a comparison of numbers alone would not show: isolation, repeatability, memory, what importing loads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flashtile

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
    torch.testing.assert_close(dirty[0, ~reached, 1], clean[0, ~reached, 1])
    if where == "v":
        assert not torch.isfinite(dirty[0, reached, 1, 3]).any()
        torch.testing.assert_close(dirty[0, :, 1, 4:], clean[0, :, 1, 4:])
    elif torch.isnan(torch.tensor(poison)):
        assert torch.isnan(dirty[0, reached, 1]).all()


@pytest.mark.parametrize("where", [0, 1])
def test_gradients_of_rows_before_a_poisoned_key_stay_clean(where: int) -> None:
    q, *keys = (torch.randn(1, 20, 1, 8) for _ in range(3))
    grads = []
    for value in (keys[where][0, 15, 0, 0].item(), torch.nan):
        keys[where] = keys[where].clone()
        keys[where][0, 15, 0, 0] = value
        leaf = q.clone().requires_grad_()
        grads.append(torch.autograd.grad(flashtile.attention(leaf, *keys, causal=True).sum(), leaf)[0])
    torch.testing.assert_close(grads[1][:, :15], grads[0][:, :15])
    assert grads[1][:, 15:].isnan().all()


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


def test_gradients_of_keys_behind_a_poisoned_row_stay_clean() -> None:
    q, k, v = (torch.randn(1, 20, 1, 8) for _ in range(3))
    grads = []
    for value in (q[0, 5, 0, 0].item(), torch.nan):
        q = q.clone()
        q[0, 5, 0, 0] = value
        leaves = [k.clone().requires_grad_(), v.clone().requires_grad_()]
        grads.append(torch.autograd.grad(flashtile.attention(q, *leaves, causal=True).sum(), leaves))
    for clean, dirty in zip(*grads, strict=True):
        torch.testing.assert_close(dirty[:, 6:], clean[:, 6:])
        assert dirty[:, :6].isnan().all()


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
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TIMED = """
import torch, time
start = time.perf_counter()
import flashtile
print(time.perf_counter() - start)
"""


def test_importing_is_quick() -> None:
    runs = [subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.15
