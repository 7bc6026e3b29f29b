"""``flashtile explain``: which backend and tiles a call would take, from flags alone."""

from __future__ import annotations

import enum
from typing import Annotated, Any, NamedTuple

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
Mod = Annotated[str | None, typer.Option(metavar="PLACE:FUNCTION", help="A function, as model.py:bend.")]
Arch = Annotated[
    str | None,
    typer.Option("--arch", "--gpu", metavar="GPU", help="A GPU that need not be here: H100, 9.0, sm_90 or gfx942."),
]
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
    score_mod: Mod = None,
    mask_mod: Mod = None,
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
    arch: Arch = None,
) -> None:
    """Which backend and tiles a call would run with, and why not the others.

    Nothing is computed and no memory is taken, so any size may be asked for, and with --arch a GPU that is not here.
    """
    place = _device(device, arch)
    name = dtype or (DtypeName.float32 if place == "cpu" else DtypeName.bfloat16)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise InvalidInputError("--heads", f"is {heads}, must be a multiple of --kv-heads {kv_heads}")
    over_cache = cache or page_size > 0
    if not over_cache and (cache_dtype or append):
        raise InvalidInputError("--cache-dtype" if cache_dtype else "--append", "is given, but goes with --cache")
    call = _CallOfFlags(
        batch, seqlen_q or seqlen, seqlen_k or seqlen, heads, kv_heads, (head_dim, head_dim_v or head_dim),
        getattr(torch, name.value), varlen, grad,
    )  # fmt: skip
    scores = (heads, call.rows, call.keys)
    given: dict[str, Any] = {
        "causal": causal, "window_size": window, "softcap": softcap, "backend": backend, "gpu": arch, "device": place,
        "alibi_slopes": _empty(torch.float32, heads) if alibi else None,
        "sinks": _empty(torch.float32, heads) if sinks else None,
        "attn_mask": _empty(torch.bool, batch, *scores) if mask else None,
        "attn_bias": _empty(torch.float32, 1, *scores, grad=grad) if bias else None,
        "score_mod": score_mod and function_of(score_mod, "--score-mod"),
        "mask_mod": mask_mod and function_of(mask_mod, "--mask-mod"),
        "dropout_p": dropout, "deterministic": deterministic, "precision": "fp8" if fp8 else None,
        **(call.over_cache(page_size, cache_dtype, append) if over_cache else call.sides()),
    }  # fmt: skip
    try:
        typer.echo(flashtile.explain(call.packed(call.rows, heads, head_dim), **given))
    except InvalidInputError as error:
        raise error.renamed(_FLAGS) from None


class _CallOfFlags(NamedTuple):
    """The sizes of a call, and its tensors without memory."""

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    varlen: bool
    grad: bool

    def packed(self, length: int, *others: int) -> torch.Tensor:
        """Rows of all sequences, one after another or not."""
        rows = (self.batch * length,) if self.varlen else (self.batch, length)
        return _empty(self.dtype, *rows, *others, grad=self.grad)

    def kv(self, length: int) -> dict[str, Any]:
        """K and v."""
        return {each: self.packed(length, self.kv_heads, dim) for each, dim in zip("kv", self.dims, strict=True)}

    def sides(self) -> dict[str, Any]:
        """What ``attention`` or ``attention_varlen`` has besides q."""
        if not self.varlen:
            return self.kv(self.keys)
        bounds, lengths = self.words(self.batch + 1), {"max_seqlen_q": self.rows, "max_seqlen_k": self.keys}
        return {**self.kv(self.keys), "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, **lengths}

    def over_cache(self, page_size: int, cache_dtype: CacheDtype | None, append: bool) -> dict[str, Any]:
        """What ``attention_with_kvcache`` has besides q."""
        pages = -(-self.keys // page_size) if page_size else 1
        rows = (self.batch * pages, page_size or self.keys, self.kv_heads)
        dtype = getattr(torch, cache_dtype.value) if cache_dtype else self.dtype
        given: dict[str, Any] = {
            f"{side}_cache": _empty(dtype, *rows, dim) for side, dim in zip("kv", self.dims, strict=True)
        }
        given |= {"cache_seqlens": self.words(self.batch), **(self.kv(self.rows) if append else {})}
        if page_size:
            given["page_table"] = self.words(self.batch, pages)
        if self.varlen:
            given |= {"cu_seqlens_q": self.words(self.batch + 1), "max_seqlen_q": self.rows}
        if cache_dtype:
            given |= {f"{side}_scale": _empty(torch.float32, self.kv_heads) for side in "kv"}
        return given

    @staticmethod
    def words(*shape: int) -> torch.Tensor:
        """Numbers of rows, sequences or pages."""
        return _empty(torch.int32, *shape)


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
