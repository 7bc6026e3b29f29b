"""``flashtile explain``: which backend and tiles a call would take, from flags alone."""

from __future__ import annotations

import enum
import functools
from typing import Annotated, Any

import torch
import typer

import flashtile
from flashtile.cli.audit import function_of
from flashtile.cli.options import MOST, DeviceType, DtypeName
from flashtile.core.errors import InvalidInputError

# Flags with other names than the arguments of ``flashtile.explain``.
_FLAGS = {
    "window_size": "--window", "softcap": "--softcap", "dropout_p": "--dropout", "backend": "--backend",
    "gpu": "--arch", "attn_mask": "--mask", "attn_bias": "--bias", "alibi_slopes": "--alibi", "precision": "--fp8",
    "deterministic": "--deterministic", "score_mod": "--score-mod", "mask_mod": "--mask-mod",
}  # fmt: skip

Length = Annotated[int, typer.Option(min=1, max=MOST, help="Length of queries and keys, unless given apart.")]
OtherLength = Annotated[int | None, typer.Option(min=1, max=MOST, help="As --seqlen if left out.", show_default=False)]
Size = Annotated[int, typer.Option(min=1, max=MOST)]
# The dtypes of a cache in 8 bits.
CacheDtype = enum.StrEnum("CacheDtype", ["float8_e4m3fn", "float8_e5m2"])


def explain(
    seqlen: Length = 4096,
    seqlen_q: OtherLength = None,
    seqlen_k: OtherLength = None,
    batch: Size = 1,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Key and value heads; as --heads if left out.")
    ] = None,
    head_dim: Size = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=1, max=MOST, help="As --head-dim if left out.")] = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="float32 on a CPU, bfloat16 on a GPU if left out.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Query i sees keys up to its own.")] = False,
    window: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="LEFT RIGHT", help="Keys before and after the query's own; -1 is unbounded."),
    ] = None,
    softcap: Annotated[float, typer.Option(help="c of c * tanh(scores / c); 0 is none.")] = 0.0,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    mask: Annotated[bool, typer.Option("--mask", help="With a boolean attn_mask.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With an additive attn_bias.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="With sinks.")] = False,
    dropout: Annotated[float, typer.Option(help="Probability of dropping.")] = 0.0,
    varlen: Annotated[
        bool, typer.Option("--varlen", help="Packed sequences; lengths are those of the longest.")
    ] = False,
    score_mod: Annotated[
        str | None, typer.Option(metavar="PLACE:FUNCTION", help="A function, as model.py:bend.")
    ] = None,
    mask_mod: Annotated[str | None, typer.Option(metavar="PLACE:FUNCTION", help="Likewise.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Keys in a cache with room for --seqlen-k (attention_with_kvcache).")
    ] = False,
    page_size: Annotated[int, typer.Option(min=0, max=MOST, help="Rows of a page of the cache; 0 for none.")] = 0,
    cache_dtype: Annotated[CacheDtype | None, typer.Option(help="A cache in 8 bits.", show_default=False)] = None,
    append: Annotated[bool, typer.Option("--append", help="As many new keys as queries go into the cache.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help='With precision="fp8".')] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="A repeatable backward.")] = False,
    grad: Annotated[
        bool, typer.Option("--grad", help="Inputs that require gradients: explain the backward too.")
    ] = False,
    backend: Annotated[str | None, typer.Option(help="This backend and no other.")] = None,
    device: Annotated[DeviceType, typer.Option(help="auto is the GPU where there is one.")] = DeviceType.auto,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", "--gpu", metavar="GPU", help="Explain for a GPU that need not be here: H100, 9.0, sm_90, gfx942."
        ),
    ] = None,
) -> None:
    """Which backend and tiles a call would run with, and why not the others.

    Nothing is computed and no memory is taken, so any size may be asked for, and with --arch a GPU that is not here.
    """
    place = _device(device, arch)
    name = dtype or (DtypeName.float32 if place == "cpu" else DtypeName.bfloat16)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise InvalidInputError("--heads", f"is {heads}, must be a multiple of --kv-heads {kv_heads}")
    rows, keys, dim_v = seqlen_q or seqlen, seqlen_k or seqlen, head_dim_v or head_dim
    empty = functools.partial(_empty, getattr(torch, name.value))
    words = functools.partial(_empty, torch.int32)
    sizes = functools.partial(_rows, batch, packed=varlen)
    over_cache = cache or page_size > 0
    if not over_cache and (cache_dtype or append):
        raise InvalidInputError("--cache-dtype" if cache_dtype else "--append", "is given, but goes with --cache")
    q = empty(*sizes(rows), heads, head_dim, grad=grad)
    given: dict[str, Any] = {
        "causal": causal, "window_size": window, "softcap": softcap, "backend": backend, "gpu": arch, "device": place,
        "alibi_slopes": _empty(torch.float32, heads) if alibi else None,
        "sinks": _empty(torch.float32, heads) if sinks else None,
        "attn_mask": _empty(torch.bool, batch, heads, rows, keys) if mask else None,
        "attn_bias": _empty(torch.float32, 1, heads, rows, keys, grad=grad) if bias else None,
        "score_mod": score_mod and function_of(score_mod, "--score-mod"),
        "mask_mod": mask_mod and function_of(mask_mod, "--mask-mod"),
        "dropout_p": dropout, "deterministic": deterministic, "precision": "fp8" if fp8 else None,
    }  # fmt: skip
    bounds = words(batch + 1) if varlen else None
    if over_cache:
        held = functools.partial(_empty, getattr(torch, cache_dtype.value if cache_dtype else name.value))
        pages = -(-keys // page_size) if page_size else 1
        shape = (batch * pages, page_size or keys, kv_heads)
        given |= {
            "k_cache": held(*shape, head_dim), "v_cache": held(*shape, dim_v), "cache_seqlens": words(batch),
            "page_table": words(batch, pages) if page_size else None, "cu_seqlens_q": bounds,
            "max_seqlen_q": rows if varlen else None,
        }  # fmt: skip
        if cache_dtype:
            given |= {each: _empty(torch.float32, kv_heads) for each in ("k_scale", "v_scale")}
        if append:
            given |= {"k": empty(*sizes(rows), kv_heads, head_dim), "v": empty(*sizes(rows), kv_heads, dim_v)}
    else:
        given |= {each: empty(*sizes(keys), kv_heads, dim, grad=grad) for each, dim in (("k", head_dim), ("v", dim_v))}
        if varlen:
            given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": rows, "max_seqlen_k": keys}
    try:
        typer.echo(flashtile.explain(q, **given))
    except InvalidInputError as error:
        raise error.renamed(_FLAGS) from None


def _rows(batch: int, length: int, *, packed: bool) -> tuple[int, ...]:
    return (batch * length,) if packed else (batch, length)


def _empty(dtype: torch.dtype, *shape: int, grad: bool = False) -> torch.Tensor:
    """A tensor without memory."""
    try:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)
    except RuntimeError as error:
        sizes = " x ".join(map(str, shape))
        raise InvalidInputError("--seqlen", f"makes a tensor of {sizes} elements, more than PyTorch counts") from error


def _device(device: DeviceType, arch: str | None) -> str:
    """The device's type: of a GPU elsewhere, or this machine's."""
    if arch is not None:
        if device == DeviceType.cpu:
            raise InvalidInputError("--arch", "names a GPU, but --device is cpu")
        return "cuda"
    if device == DeviceType.cpu or (device == DeviceType.auto and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise InvalidInputError(
            "--device", "is cuda, but torch finds no GPU here; --arch 9.0 explains for one elsewhere"
        )
    return "cuda"
