"""What the form of ``explain`` needs: the choices, what backends declare, and the tiles that they would take.

Refusals follow from the declared capabilities, which the page reads as data. Tiles come from functions of Python; for
each backend and direction a table holds their one line for every combination of what those functions look at.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from flashtile.call.arguments import band_of
from flashtile.call.backend import FEATURES, Capabilities, Direction
from flashtile.call.problem import Problem, described
from flashtile.ops import dispatch

HEADS, HEADS_KV = 16, 4
FORM: dict[str, list[Any]] = {
    "device": ["cpu", "8.0", "9.0", "10.0"],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "head_dim": [64, 96, 128, 192, 256, 512],
    "seqlen": [512, 1024, 4096, 16384, 131072],
    "mask": ["full", "causal", "window", "causal window"],
}
_WINDOWS = {"window": (255, 255), "causal window": (255, 0)}
_FLAG = [False, True]
_GPU_HEAD_DIMS = FORM["head_dim"][:-1]
_HOPPER_AXES = {"head_dim": _GPU_HEAD_DIMS, "seqlen": FORM["seqlen"], "mask": FORM["mask"], "softcap": _FLAG,
                "varlen": _FLAG}  # fmt: skip
_PORTABLE_AXES = {"device": FORM["device"][1:], "dtype": FORM["dtype"][:3], "head_dim": _GPU_HEAD_DIMS,
                  "seqlen": FORM["seqlen"], "mask": FORM["mask"], "featured": _FLAG, "varlen": _FLAG,
                  "grouped": _FLAG}  # fmt: skip
# What the choice of tiles looks at. Names that are no field of the form are questions about several of them:
# pairs (mask or bias), special (softcap or dropout), added (mask, ALiBi or bias), featured (any of those), bias.
_AXES: dict[tuple[str, Direction], dict[str, list[Any]]] = {
    ("hopper", "forward"): {**_HOPPER_AXES, "attn_mask": _FLAG, "attn_bias": _FLAG},
    ("hopper", "backward"): {**_HOPPER_AXES, "pairs": _FLAG, "alibi": _FLAG, "deterministic": _FLAG},
    ("portable", "forward"): _PORTABLE_AXES,
    ("portable", "backward"): {**_PORTABLE_AXES, "bias": _FLAG},
    ("cpu", "forward"): {"mask": FORM["mask"], "special": _FLAG, "added": _FLAG},
    ("cpu", "backward"): {
        "mask": FORM["mask"],
        "special": _FLAG,
        "added": _FLAG,
        "bias": _FLAG,
        "dtype": FORM["dtype"],
    },
}


def problem_of(call: dict[str, Any]) -> Problem:
    """The problem of a form's values; flags that are missing are False."""

    def has(*names: str) -> bool:
        return any(call.get(name, False) for name in names)

    device, head_dim = call.get("device", "9.0"), call.get("head_dim", 64)
    mask, bias = call.get("mask", "full"), has("attn_bias", "bias")
    return described(
        device_type="cpu" if device == "cpu" else "cuda",
        compute_capability=None if device == "cpu" else tuple(int(n) for n in device.split(".")),
        dtype=getattr(torch, call.get("dtype", "bfloat16")),
        seqlen_q=call.get("seqlen", 4096),
        seqlen_k=call.get("seqlen", 4096),
        num_heads_q=HEADS,
        num_heads_kv=HEADS_KV if has("grouped") else HEADS,
        head_dim=head_dim,
        head_dim_v=head_dim,
        band=band_of(mask == "causal", _WINDOWS.get(mask)),
        softmax_scale=head_dim**-0.5,
        softcap=30.0 if has("softcap", "special", "featured") else 0.0,
        alibi=has("alibi", "added"),
        mask=has("attn_mask", "pairs"),
        bias_dtype=torch.float32 if bias else None,
        bias_grad=bias and has("grad"),
        sinks=has("sinks"),
        dropout_p=0.1 if has("dropout") else 0.0,
        varlen=has("varlen"),
        deterministic=has("deterministic"),
        needs_grad=has("grad"),
    )


def _tiles(name: str, direction: Direction) -> dict[str, Any]:
    """The axes, the lines, and which line each combination has, the last axis fastest.

    A line is told by its number in two digits of base 36.
    """
    axes, texts, codes = _AXES[name, direction], {}, []  # type: ignore[var-annotated]
    for values in itertools.product(*axes.values()):
        call = {**dict(zip(axes, values, strict=True)), "grad": direction == "backward"}
        text = dispatch.backend(name).describe(problem_of(call), direction)
        codes.append(texts.setdefault(text, len(texts)))
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    coded = "".join(digits[code // 36] + digits[code % 36] for code in codes)
    return {"axes": [[axis, values] for axis, values in axes.items()], "texts": list(texts), "codes": coded}


def _capabilities(declared: Capabilities | None) -> dict[str, Any] | None:
    if declared is None:
        return None
    fields = dataclasses.asdict(declared)
    fields |= {feature.name: feature.name in fields["features"] for feature in FEATURES}
    del fields["features"], fields["limits"]
    return {**fields, "dtypes": [str(dtype).removeprefix("torch.") for dtype in declared.dtypes]}


def table() -> dict[str, Any]:
    """Everything, as JSON values."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    backends = {
        name: {direction: _capabilities(dispatch.backend(name).capabilities(direction)) for direction in directions}
        for name in dispatch.NAMES
    }
    return {
        "form": FORM,
        "features": [{"name": feature.name, "label": feature.label} for feature in FEATURES],
        "backends": backends,
        "tiles": {f"{name} {direction}": _tiles(name, direction) for name, direction in _AXES},
    }
