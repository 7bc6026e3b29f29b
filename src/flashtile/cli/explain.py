"""``flashtile explain``: which backend and tiles a call would take, from flags alone."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from flashtile.backends.gpu.described import described_tensors
from flashtile.call.arguments import Tensors, band_of, checked
from flashtile.call.backend import Direction, directions_of
from flashtile.call.problem import AHEAD, Problem, described, gpu_name, gpu_of
from flashtile.cli.options import MOST, DeviceType, DtypeName
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.ops import dispatch

# Flags with other names than the arguments of ``attention``.
_FLAGS = {"window_size": "--window", "softcap": "--softcap", "dropout_p": "--dropout", "backend": "--backend"}

Length = Annotated[int, typer.Option(min=1, max=MOST, help="Length of queries and keys, unless given apart.")]
OtherLength = Annotated[int | None, typer.Option(min=1, max=MOST, help="As --seqlen if left out.", show_default=False)]
Size = Annotated[int, typer.Option(min=1, max=MOST)]


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
    deterministic: Annotated[bool, typer.Option("--deterministic", help="A repeatable backward.")] = False,
    grad: Annotated[
        bool, typer.Option("--grad", help="Inputs that require gradients: explain the backward too.")
    ] = False,
    backend: Annotated[str | None, typer.Option(help="This backend and no other.")] = None,
    device: Annotated[DeviceType, typer.Option(help="auto is the GPU where there is one.")] = DeviceType.auto,
    arch: Annotated[
        str | None, typer.Option(metavar="MAJOR.MINOR", help="Explain for an NVIDIA GPU of this compute capability.")
    ] = None,
) -> None:
    """Which backend and tiles a call would run with, and why not the others.

    Nothing is computed and no memory is taken, so any size may be asked for, and with --arch a GPU that is not here.
    """
    device_type, capability = _device(device, arch)
    default_dtype = DtypeName.float32 if device_type == "cpu" else DtypeName.bfloat16
    try:
        plain, band = checked(softcap=softcap, dropout_p=dropout, backend=backend), band_of(causal, window)
    except InvalidInputError as error:
        raise error.renamed(_FLAGS) from None
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise InvalidInputError("--heads", f"is {heads}, must be a multiple of --kv-heads {kv_heads}")
    problem = described(
        device_type=device_type,
        compute_capability=capability,
        gpu=gpu_name(torch.device(device_type)) if arch is None else "",
        dtype=getattr(torch, (dtype or default_dtype).value),
        batch=batch,
        seqlen_q=seqlen_q or seqlen,
        seqlen_k=seqlen_k or seqlen,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        band=band,
        softmax_scale=head_dim**-0.5,
        softcap=plain["softcap"],
        alibi=alibi,
        mask=mask,
        bias_dtype=torch.float32 if bias else None,
        bias_grad=bias and grad,
        sinks=sinks,
        dropout_p=plain["dropout_p"],
        varlen=varlen,
        deterministic=deterministic,
        needs_grad=grad,
    )
    typer.echo(_explained(problem, backend, arch))


def _explained(problem: Problem, backend: str | None, arch: str | None) -> str:
    if problem.device_type == "cpu":
        return dispatch.explain(problem, backend)
    shapes = described_tensors(problem)
    if arch is None:
        return dispatch.explain(problem, backend, shapes=shapes)
    token = AHEAD.set(gpu_of(f"sm_{arch.replace('.', '')}"))
    try:
        return _explain_elsewhere(problem, backend, shapes)
    finally:
        AHEAD.reset(token)


def _device(device: DeviceType, arch: str | None) -> tuple[str, tuple[int, int] | None]:
    """The device type and, for an NVIDIA GPU, its compute capability: from --arch, or the machine's."""
    if arch is not None:
        found = re.fullmatch(r"(\d{1,3})\.(\d)", arch)
        if found is None:
            raise InvalidInputError("--arch", f"is {arch!r}, must be a compute capability such as 9.0")
        if device == DeviceType.cpu:
            raise InvalidInputError("--arch", "names a GPU, but --device is cpu")
        return "cuda", (int(found[1]), int(found[2]))
    if device == DeviceType.cpu or (device == DeviceType.auto and not torch.cuda.is_available()):
        return "cpu", None
    if not torch.cuda.is_available():
        raise InvalidInputError(
            "--device", "is cuda, but torch finds no GPU here; --arch 9.0 explains for one elsewhere"
        )
    return "cuda", None if torch.version.hip else torch.cuda.get_device_capability()


def _explain_elsewhere(problem: Problem, name: str | None, shapes: Tensors) -> str:
    """Like ``dispatch.explain``, but ignores what this machine lacks, because the call would run on another machine."""
    name = name or settings.BACKEND.get() or None
    assert problem.compute_capability is not None
    major, minor = problem.compute_capability
    lines = [f"{dispatch.describe_problem(problem)}, compute capability {major}.{minor}"]
    for direction in directions_of(problem):
        against = {each: _declared_reasons(each, problem, direction) for each in dispatch.NAMES}
        chosen = next((each for each in ([name] if name else dispatch.NAMES) if not against[each]), None)
        if chosen is None:
            asked = {name: against[name]} if name else against
            raise UnsupportedError(
                f"{name or 'no backend'} {'cannot run' if name else 'supports'} this {direction}", asked
            )
        lines.append(f"{direction}: {chosen}: {dispatch.backend(chosen).describe(problem, direction)}")
        lines += dispatch.kernels(dispatch.backend(chosen), problem, direction, shapes)
        for each, why in against.items():
            if each != chosen:
                lines.append(f"  not {each}: {'; '.join(why) or f'could run it too, but {chosen} was taken'}")
    return "\n".join(lines)


def _declared_reasons(name: str, problem: Problem, direction: Direction) -> list[str]:
    capabilities = dispatch.backend(name).capabilities(direction)
    return [f"has no {direction}"] if capabilities is None else capabilities.reasons(problem)
