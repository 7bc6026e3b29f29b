"""The plain arguments of a call: types, numbers and flags are refused here before anything touches a tensor."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.errors import InvalidInputError
from flashtile.masks import Band
from flashtile.problem import Tensors


def band_of(causal: bool, window_size: Sequence[int | None] | None) -> Band:
    """The Band of the keywords ``causal`` and ``window_size``; causal overrides the right bound.

    Raises:
        InvalidInputError: If either is not what it must be.
    """
    if not isinstance(causal, bool):
        raise InvalidInputError("causal", f"is {causal!r}, must be True or False")
    left, right = window_bounds(window_size)
    return Band(left, 0 if causal else right)


def window_bounds(window_size: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """The bounds of the keyword ``window_size``, None where unbounded.

    Raises:
        InvalidInputError: If it is not what it must be.
    """
    if window_size is None:
        return None, None
    must = "must be a pair (left, right) of integers >= 0, with -1 or None for unbounded"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidInputError("window_size", f"is {window_size!r}, {must}")
    for bound in window_size:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, numbers.Integral) or bound < -1):
            raise InvalidInputError("window_size", f"has {bound!r}, {must}")
    left, right = (None if bound is None or bound == -1 else int(bound) for bound in window_size)
    return left, right


def check_tensors(t: Tensors) -> None:
    """Refuses what is not a tensor where one is needed.

    Raises:
        InvalidInputError: Naming the argument.
    """
    if not (isinstance(t.q, Tensor) and isinstance(t.k, Tensor) and isinstance(t.v, Tensor)):
        name = next(name for name in ("q", "k", "v") if not isinstance(getattr(t, name), Tensor))
        raise InvalidInputError(name, f"is a {type(getattr(t, name)).__name__}, must be a torch.Tensor")
    for name in ("alibi_slopes", "attn_mask", "attn_bias", "sinks", "cu_seqlens_q", "cu_seqlens_k"):
        value = getattr(t, name)
        if value is not None and not isinstance(value, Tensor):
            raise InvalidInputError(name, f"is a {type(value).__name__}, must be a torch.Tensor or None")
    if t.alibi_slopes is not None and t.alibi_slopes.requires_grad:
        raise InvalidInputError(
            "alibi_slopes", "requires grad, but slopes have no gradient; detach them or use attn_bias"
        )


def check_numbers(**numbers: object) -> None:
    """Refuses what is not a number, a length or a flag where one is needed.

    Args:
        **numbers: Plain arguments by name: ``softmax_scale``, ``softcap``, ``dropout_p``, ``deterministic``,
            ``return_lse``, ``max_seqlen_q``, ``max_seqlen_k``.

    Raises:
        InvalidInputError: Naming the argument.
    """
    for name, value in numbers.items():
        _NUMBER_CHECKS[name](name, value)


def _finite(name: str, value: object) -> float:
    # Comparisons rather than math.isfinite, which a compiler cannot trace on a symbolic number.
    is_number = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if not is_number or value != value or value in (math.inf, -math.inf):
        raise InvalidInputError(name, f"is {value!r}, must be a finite number")
    return value  # type: ignore[return-value]


def _check_scale(name: str, value: object) -> None:
    if value is not None:
        _finite(name, value)


def _check_softcap(name: str, value: object) -> None:
    if _finite(name, value) < 0:
        raise InvalidInputError(name, f"is {value!r}, must be 0 (none) or positive")


def _check_dropout(name: str, value: object) -> None:
    if not 0 <= _finite(name, value) < 1:
        raise InvalidInputError(name, f"is {value!r}, must be at least 0 and less than 1")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInputError(name, f"is {value!r}, must be True or False")


def _check_length(name: str, value: object) -> None:
    if value is None or isinstance(value, torch.SymInt):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise InvalidInputError(name, f"is {value!r}, must be an integer >= 0 or None")


_NUMBER_CHECKS = {
    "softmax_scale": _check_scale,
    "softcap": _check_softcap,
    "dropout_p": _check_dropout,
    "deterministic": _check_flag,
    "return_lse": _check_flag,
    "max_seqlen_q": _check_length,
    "max_seqlen_k": _check_length,
}
