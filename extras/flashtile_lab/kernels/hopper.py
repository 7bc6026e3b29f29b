"""The Hopper kernels in the configurations worth watching."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu.described import described_quantized, described_tensors
from flashtile.backends.hopper import BACKEND
from flashtile.call.arguments import FLOAT8, grads_of
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from flashtile.mods import library
from flashtile.mods.record import ModKey, OperandKind, lowered
from flashtile_lab.kernels.build import KernelBuild, kernel_builds

_FULL, _CAUSAL, _WINDOW = Band(), Band(None, 0), Band(128, 0)
_NO_SPILL = {"attention_forward": 0}
_EVERYTHING: dict[str, Any] = {"varlen": True, "softcap": 30.0, "sinks": True}


def builds(arch: str) -> list[KernelBuild]:
    """The forward: both masks at the usual head dims, long and short, then each feature; bf16 if not said.

    Packed sequences under a causal mask attend to themselves. Of two lengths that differ by one, edges of the mask lie
    anywhere. Of the tiles that consist of parts, those of the head dims in use. Then the backward likewise.
    """
    if arch != "sm_90a":
        return []
    forwards = _forward_problems() + _big_problems()
    made = [build for problem in forwards for build in builds_of(problem, "forward")] + _joining_builds()
    made += [build for problem in _backward_problems() for build in builds_of(problem, "backward")[1:2]]
    # With every feature, and with so few tiles of keys that groups of query heads are split.
    few = {"varlen": True, "num_heads_q": 4, "num_heads_kv": 1, "seqlen_q": 900, "batch": 5}
    big = [_problem(512, _WINDOW, **_EVERYTHING), _problem(512, _CAUSAL, **few)]
    made += [build for problem in big for build in builds_of(problem, "backward") if "big" in build.name]
    made += _adding_builds() + _interval_builds() + _function_builds()
    # The kernels before and after the main one do not know the mask.
    rows = [_problem(dim, _FULL, varlen=varlen) for dim in (128, 64, 256) for varlen in (False, True)]
    rows.append(_problem(192, _FULL, head_dim_v=128))
    rows.append(_wanting(128, "kv"))
    made += [build for problem in rows for build in builds_of(problem, "backward")[::2]]
    made += [build for problem in _split_problems() for build in builds_of(problem, "backward", ("gqa_splits",))[1::2]]
    packed = {"varlen": True, "batch": 1000}
    short = [
        _problem(dim, band, seqlen_q=n, **packed)
        for n in (16, 32, 64, 128)
        for dim, band in ((64, _FULL), (128, _CAUSAL))
    ]
    made += [build for problem in short for build in builds_of(problem, "backward")]
    made += _decode_builds() + _cached_builds()
    return made + [build for problem in _quantized_problems() for build in builds_of(problem, "quantized")]


def _function_builds() -> list[KernelBuild]:
    """Users' functions that gather by pair, have a slope, mask documents; lists of 128, with bits, and of 64."""
    documents, tree = library.documents(torch.zeros(64, dtype=torch.int32)), library.tree([-1, 0, 1, 1])
    table, image, packed = library.relative(torch.zeros(8, 65)), library.neighbourhood_2d(128, 6), {"varlen": True}
    causal, lists, small = (_CAUSAL, ()), (_FULL, (128, 128)), (64, 64)
    bits: Any = [(128, _FULL, {}), (64, _FULL, {}), (64, _FULL, packed), (256, _FULL, {}), (128, _CAUSAL, packed)]
    calls: list[tuple[int, Any, Any, tuple[Band, tuple[int, ...]], dict[str, Any]]] = [
        (128, table, documents, causal, packed), (256, library.temperature(torch.zeros(8)), documents, causal, {}),
        *((dim, None, None, (band, (128, 128, 1)), more) for dim, band, more in bits),
        (128, None, documents, lists, {}), (64, None, documents, lists, packed), (256, None, documents, lists, {}),
        (128, None, tree, lists, packed), (128, None, image, lists, {}), (128, table, None, (_FULL, (128, 128, 1)), {}),
        *((dim, None, None, (_FULL, small), {}) for dim in (64, 128, 256)), (128, None, None, (_FULL, (128, 64)), {}),
        (128, None, None, (_CAUSAL, small), packed), (128, None, documents, (_FULL, small), {}),
    ]  # fmt: skip
    made: list[KernelBuild] = []
    for dim, score, mask, (band, listed), more in calls:
        keys = [None if f is None else _key(f, what) for f, what in ((score, "score"), (mask, "mask"))]
        problem = _problem(dim, band, score_function=keys[0], mask_function=keys[1], listed=listed, **more)
        made += builds_of(problem, "forward")
        made += [build for build in builds_of(problem, "backward") if build.name.startswith("attention_backward")]
    return made


def _key(f: Any, what: str) -> ModKey:
    found = lowered(f, f"{what}_mod", what, False)
    return ModKey(found.text, tuple(OperandKind(x.dtype, x.dim()) for x in found.operands))


def _interval_builds() -> list[KernelBuild]:
    """Interval masks in both forms, and of one that both kernels have to read in the other form."""
    apart: dict[str, Any] = {"row_keys": True, "key_rows": True}
    either = {**apart, "band": _CAUSAL, "mirrored": True}
    made: list[KernelBuild] = []
    for dim, mask, varlen in (
        (128, either, False),
        (64, either, True),
        (256, either, False),
        (128, apart, False),
        (64, apart, False),
    ):
        problem = _problem(dim, _FULL, varlen=varlen).but(**mask)
        made += builds_of(problem, "forward")
        made += [
            each for each in builds_of(problem, "backward") if each.name in ("interval_bounds", "attention_backward")
        ]
    return made


def _decode_builds() -> list[KernelBuild]:
    """The decode of wide groups: 71 heads over one, small pages; over latent rows; prompts over 8-bit caches."""
    from flashtile.backends.hopper.decode import config, launch
    from flashtile.backends.hopper.forward.paged.launch import cached_launch
    from flashtile.backends.hopper.latent.launch import latent_launch
    from flashtile_lab.kernels.decode import described_call, latent_call

    calls: list[dict[str, Any]] = [*({"head_dim": dim, "num_heads_q": 568} for dim in (128, 64, 256))]
    made: list[KernelBuild] = []
    calls += [{"num_heads_q": 568, "max_scores": True}]
    for call in [*calls, {"seqlen_q": 4, "num_heads_q": 64, "page_size": 16}]:
        problem, tensors = described_call((9, 0), **call)
        wide = launch.wide_launch(problem, tensors, config.choose(problem), 132)
        made += kernel_builds("hopper", "decode", problem, {"wide_cache_attention": wide}, limits(problem))
    small = ", rows of 656 bytes"
    for size, rows, top in (
        (64, "", False), (16, "", False), (64, small, False), (64, "", True), (1, "", False), (1, small, False),
    ):  # fmt: skip
        problem, tensors = latent_call((9, 0), size, eight_bits=rows != "")
        problem = problem.but(max_scores=top)
        latent = {"latent_attention": latent_launch(problem, tensors)[0]}
        made += kernel_builds("hopper", "decode", problem, latent, limits(problem), (f"pages of {size}{rows}",))
    for dim, scales in ((128, False), (128, True), (64, False), (256, False)):
        problem, tensors = described_call(
            (9, 0), head_dim=dim, seqlen_q=512, packed=True, page_size=64, kv=FLOAT8, scales=scales
        )
        # At 256 before and after loops; on Triton 3.9 there at every width.
        limit = {"attention_forward": 128 if _is_new_triton() else 32}
        forward = {"attention_forward": cached_launch(problem, tensors)}
        more = ("float8 cache", *(("scales",) if scales else ()))
        made += kernel_builds("hopper", "decode", problem, forward, limit, more)
    return made


def _cached_builds() -> list[KernelBuild]:
    """Prompts over a cache on the forward: in pages that TMA has boxes for, and in others, whose rows threads copy."""
    from flashtile.backends.hopper.forward.paged.launch import cached_launch
    from flashtile_lab.kernels.decode import described_call

    usual: dict[str, Any] = {"seqlen_q": 512, "packed": True}
    calls: list[tuple[int, dict[str, Any]]] = [
        *((size, usual) for size in (0, 16, 256)),
        (1, usual),
        (1, {"seqlen_q": 512}),
        (1, {"seqlen_q": 2048, "head_dim": 64, "num_heads_q": 64, "packed": True}),
        (1, usual | {"head_dim": 256, "num_heads_q": 16}),
        (1, usual | {"head_dim": 96}),
        (1, usual | {"softcap": 30.0, "alibi": True, "sinks": True, "band": _WINDOW}),
    ]
    made: list[KernelBuild] = []
    for size, call in calls:
        problem, tensors = described_call((9, 0), page_size=size, **call)
        launches, name = {"attention_forward": cached_launch(problem, tensors)}, f"pages of {size}" if size else "cache"
        made += kernel_builds("hopper", "decode", problem, launches, limits(problem), (name,))
    return made


def builds_of(problem: Problem, direction: Direction, more: tuple[str, ...] = ()) -> list[KernelBuild]:
    """The builds of a direction of one problem; ``more`` as in ``kernel_builds``."""
    tensors = described_quantized(problem) if direction == "quantized" else described_tensors(problem)
    return kernel_builds(
        "hopper", direction, problem, BACKEND.launches(problem, tensors, direction), limits(problem), more
    )


def limits(problem: Problem) -> dict[str, int]:
    """Most bytes that a thread of each kernel may spill."""
    return {
        "attention_quantized": _quantized_limit(problem),
        "attention_forward": _forward_limit(problem),
        # 268 with ALiBi, a mask and a bias; on Triton 3.9 up to 552.
        "big_heads_forward": 600 if _is_new_triton() else 300 if problem.mask or problem.bias_dtype is not None else 0,
        "attention_backward": _backward_limit(problem),
        # With ALiBi, a mask and a bias.
        **{f"big_backward_d{of}": 64 if problem.mask and _is_new_triton() else 0 for of in "qkv"},
        # All but a few bytes at head_dim 256 are the scheduler's, which has few registers.
        "wide_cache_attention": 128,
        # Where a part ends and four threads exchange the columns of outputs, once a tile; the loops over blocks load a
        # few spilled addresses (SASS, 2026-11-29). Roles over rows of 8 bits have fewer registers.
        "latent_attention": (288 if _is_new_triton() else 208) + 56 * problem.row_scale,
    }


def _quantized_problems() -> list[Problem]:
    """8-bit calls: both masks at the usual head dims, then features."""
    precision = {"dtype": FLOAT8, "out_dtype": torch.bfloat16, "needs_grad": False}
    features: list[tuple[int, Band, dict[str, Any]]] = [
        *((dim, band, {}) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)),
        (128, _WINDOW, {"varlen": True, "sinks": True, "num_heads_q": 32}),
        (64, _CAUSAL, {"softcap": 30.0}),
        (256, _CAUSAL, {"dtype": FLOAT8, "out_dtype": FLOAT8}),
    ]
    return [_problem(dim, band, **precision | used) for dim, band, used in features]


def _usual() -> list[Problem]:
    usual = [_problem(dim, band) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)]
    return usual + [_problem(dim, band, seqlen_q=512) for dim in (128, 64) for band in (_FULL, _CAUSAL)]


def _forward_problems() -> list[Problem]:
    in_parts = [
        _problem(dim, band, head_dim_v=dim_v)
        for dim, dim_v in ((96, 96), (80, 80), (192, 192), (192, 128))
        for band in (_FULL, _CAUSAL)
    ] + [_problem(96, _FULL, varlen=True, sinks=True)]
    features: list[tuple[Band, dict[str, Any]]] = [
        (_CAUSAL, {"dtype": torch.float16}),
        (_CAUSAL, {"seqlen_k": 8193}),
        (_WINDOW, {}),
        (_CAUSAL, {"varlen": True}),
        (_FULL, {"varlen": True}),
        (_WINDOW, _EVERYTHING),
        (_CAUSAL, {"dropout_p": 0.1}),
        (_CAUSAL, {"max_scores": True}),
        (_FULL, {"max_scores": True}),
    ]
    others = [_problem(dim, band, **used) for dim in (64, 128, 256) for band, used in features]
    short: dict[str, Any] = {"varlen": True, "seqlen_q": 200}
    others += [_problem(64, _FULL, **short), _problem(64, _CAUSAL, sinks=True, max_scores=True, **short)]
    wide = ((96, 96), (192, 192), (192, 128), (160, 160), (128, 256))
    wide_problems = [_problem(dim, _WINDOW, head_dim_v=dim_v, **_EVERYTHING) for dim, dim_v in wide]
    mods = [*_with_mods(64, 128), _problem(256, _CAUSAL, alibi=True)]
    return _usual() + in_parts + others + wide_problems + mods + _shared_problems()


def _big_problems() -> list[Problem]:
    """Head dimensions past 256."""
    others: list[tuple[int, Band, dict[str, Any]]] = [
        (320, _CAUSAL, {}),
        (384, _CAUSAL, {"varlen": True}),
        (512, _WINDOW, _EVERYTHING),
        (512, _CAUSAL, {"num_heads_q": 32, "num_heads_kv": 4, "seqlen_q": 5, "dtype": torch.float16}),
        (512, _FULL, {"bias_dtype": torch.bfloat16, "alibi": True, "mask": True}),
        (512, _CAUSAL, {"head_dim_v": 128}),
        (128, _CAUSAL, {"head_dim_v": 512}),
    ]
    return [_problem(512, band) for band in (_FULL, _CAUSAL)] + [
        _problem(dim, band, **used) for dim, band, used in others
    ]


def _shared_problems() -> list[Problem]:
    """Calls of few queries, whose tiles the heads of a group share."""
    kinds: list[tuple[Band, dict[str, Any]]] = [
        (_FULL, {"seqlen_q": 33}),
        (_CAUSAL, {"seqlen_q": 40}),
        (_CAUSAL, {"seqlen_q": 64, "varlen": True}),
        (_WINDOW, {"seqlen_q": 64} | _EVERYTHING),
    ]
    group: dict[str, Any] = {"num_heads_q": 28, "num_heads_kv": 4, "seqlen_k": 2000}
    return [_problem(dim, band, **group | used) for dim in (128, 64, 256) for band, used in kinds]


def _joining_builds() -> list[KernelBuild]:
    """The forward to and from partial results (``states.Partial``)."""
    from flashtile.backends.hopper.forward import config, launch

    made = []
    for dim, out_dtype in ((128, torch.float32), (64, torch.float32), (256, torch.float32), (128, torch.bfloat16)):
        problem = _problem(dim, _CAUSAL).but(out_dtype=out_dtype)
        joining = launch.forward_launch(problem, described_tensors(problem), config.choose(problem), is_joined=True)
        made += kernel_builds("hopper", "forward", problem, {"attention_forward": joining}, _NO_SPILL, ("partial",))
    return made + builds_of(_problem(128, _CAUSAL).but(out_dtype=torch.float32), "forward")


def _adding_builds() -> list[KernelBuild]:
    """The backward to float32 gradients and to sums of them, most of all of packed sequences: a step of a chain."""
    from flashtile.backends.hopper.backward import config, launch

    made = []
    packed: list[tuple[int, Band, dict[str, Any]]] = [(dim, _CAUSAL, {"varlen": True}) for dim in (128, 64, 256)]
    others: list[tuple[int, Band, dict[str, Any]]] = [
        (192, _CAUSAL, {"varlen": True, "head_dim_v": 128}),
        (128, _FULL, {"varlen": True}),
        (128, _CAUSAL, {"varlen": True, "deterministic": True}),
        (128, _CAUSAL, {}),
    ]
    for dim, band, used in packed + others:
        problem = _problem(dim, band, **used).but(grad_dtype=torch.float32)
        tensors = described_tensors(problem)
        by_name = launch.launches(problem, tensors, tensors.q, None, config.choose(problem), adds=True)
        made += kernel_builds("hopper", "backward", problem, by_name, limits(problem), ("sums",))
        if used == {"varlen": True} and band is _CAUSAL:
            chained = launch.chain_launches(
                problem, tensors, tensors.q, None, config.choose(problem), True, False, False
            )
            by_name = {"attention_backward": chained["attention_backward"]}
            made += kernel_builds("hopper", "backward", problem, by_name, limits(problem), ("sums", "chain"))
        if used == {"varlen": True}:
            made += builds_of(problem, "backward")[1:]
    return made


def _backward_problems() -> list[Problem]:
    features: list[tuple[Band, dict[str, Any]]] = [
        (_CAUSAL, {"dtype": torch.float16}),
        (_WINDOW, {}),
        (_CAUSAL, {"varlen": True, "deterministic": True}),
        (_WINDOW, {"varlen": True, "softcap": 30.0}),
        (_CAUSAL, {"dropout_p": 0.1}),
        (_FULL, {"dropout_p": 0.1, "softcap": 30.0}),
    ]
    others = [_problem(dim, band, **used) for dim in (128, 64, 256) for band, used in features]
    for dim, dim_v in ((96, 96), (192, 192), (192, 128), (160, 160)):
        others += [_problem(dim, band, head_dim_v=dim_v) for band in (_FULL, _CAUSAL)]
        others += [_problem(dim, _WINDOW, head_dim_v=dim_v, **_EVERYTHING | more) for more in ({}, {"mask": True})]
    some = ((128, "q"), (64, "kv"), (256, "v"), (256, "q"), (256, "kv"), (64, "q"), (128, "kv"))
    return _usual() + others + _with_mods(128, 64, 256) + [_wanting(dim, names) for dim, names in some]


def _split_problems() -> list[Problem]:
    """Groups of query heads that are split: of one key head."""
    kinds: list[tuple[Band, dict[str, Any]]] = [(_FULL, {}), (_CAUSAL, {"varlen": True, "deterministic": True})]
    one: dict[str, Any] = {"num_heads_kv": 1, "seqlen_q": 2048}
    return [_problem(dim, band, **one, **used) for dim in (128, 64, 256) for band, used in kinds]


def _wanting(head_dim: int, names: str) -> Problem:
    """A call that wants the gradients of some of q, k and v."""
    return _problem(head_dim, _CAUSAL, grads=grads_of("grads", [name in names for name in "qkv"]))


def _with_mods(*dims: int) -> list[Problem]:
    """ALiBi on one side and on both, bias and mask, and all of them with everything else."""
    both: dict[str, Any] = {"bias_dtype": torch.bfloat16, "mask": True}
    kinds: list[tuple[Band, dict[str, Any]]] = [
        (_CAUSAL, {"alibi": True}),
        (_FULL, {"alibi": True}),
        (_FULL, both),
        (_WINDOW, _EVERYTHING | {"alibi": True} | both),
    ]
    return [_problem(dim, band, **features) for dim in dims for band, features in kinds]


def _problem(head_dim: int, band: Band, **values: Any) -> Problem:
    seqlen = values.pop("seqlen_q", 8192)
    usual: dict[str, Any] = {
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "dtype": torch.bfloat16,
        "batch": 2,
        "seqlen_q": seqlen,
        "seqlen_k": values.pop("seqlen_k", seqlen),
        "num_heads_q": 8,
        "num_heads_kv": 8,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "band": band,
        "softmax_scale": head_dim**-0.5,
        "needs_grad": True,
    }
    return described(**usual | values)


def _is_new_triton() -> bool:
    """Whether it is Triton 3.9 or later, which spills more."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def _forward_limit(problem: Problem) -> int:
    """No spill; on Triton 3.9 32 to 64 bytes where a window meets every feature (measured 2026-11-20).

    With ALiBi, bias, mask or dropout up to 40 bytes, few in loops; 152 at head_dim 160 on Triton 3.9, where
    dropout spills 136 at 128, 80 of them without ping-pong, and 96 at 256. With intervals of keys up to 232 in blocks
    that they cut, with those of rows 8 at head_dim 256. A producer that gathers spills 56, once a tile, and at 96,
    with boxes of 32 columns, 184; on Triton 3.9 80. Users' functions 72 and 112; lists of blocks 8 and 72.
    """
    from flashtile.backends.hopper.forward.paged.config import gathers

    if problem.score_function is not None:
        return 128 if _is_new_triton() else 80
    if problem.listed:
        return 96 if _is_new_triton() else 16
    if problem.key_rows and not problem.mirrored:
        return 256
    if problem.intervals and problem.head_dim > 128:
        return 16
    if gathers(problem):
        return 192 if problem.head_dim % 64 else 96 if _is_new_triton() else 64
    has_mods = problem.alibi or problem.mask or problem.bias_dtype is not None or problem.dropout_p > 0
    has_most = problem.head_dim == 160 or (problem.dropout_p > 0 and _is_new_triton())
    return (160 if has_most else 64) if has_mods or _is_new_triton() else 0


def _quantized_limit(problem: Problem) -> int:
    """Bytes that a thread of the 8-bit forward may spill, outside of loops but for head_dim 256 (2026-11-23).

    Triton 3.6.0 and 3.7.1: none at head_dim 128, 24 with a window; 8 with a band at 64; at 256, where the output takes
    128 registers and scores 64, 88 and with a band 176 (240 were in loops). Triton 3.9.0: up to 40, at 256 up to 264.
    """
    at_256, others = (272, 40) if _is_new_triton() else (184, 32)
    return at_256 if max(problem.head_dim, problem.head_dim_v) > 128 else others


def _backward_limit(problem: Problem) -> int:
    """Bytes that a thread of the backward may spill: indices computed ahead of all loops.

    dk, dv and two blocks of scores take 192 of the 240 registers. Measured (2026-11-22), Triton 3.7.1: at most 40 bytes
    up to head_dim 192; at 256 with bias and mask up to 168. Triton 3.9.0: up to 88 at 64, up to 14 instructions of a
    loop; 128 at 128 with a softcap. With intervals of rows up to 112, on 3.9.0 168; with a table gathered by
    pair, and documents, 208, on 3.9.0 312; with lists of blocks and what a mask loads in partial ones up to 120, on
    3.9.0 272 (2026-11-26).
    """
    if problem.score_function is not None:
        return 384
    if problem.listed:
        return 288 if _is_new_triton() else 128
    if problem.row_keys and not problem.mirrored:
        return 192
    reads_score_tensors = problem.mask or problem.bias_dtype is not None
    has_softcap = problem.softcap > 0 and 64 < problem.head_dim <= 128
    usual = 192 if reads_score_tensors and problem.head_dim > 192 else 128 if has_softcap else 64
    return usual + 64 if _is_new_triton() else usual
