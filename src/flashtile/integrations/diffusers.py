"""flashtile as an attention backend of diffusers, under the name ``flashtile``.

diffusers keeps its backends in an enumeration and a registry that are closed to others, so ``register`` adds to private
structures. It does so only in releases of diffusers in which this was tested.

``enable()`` is usually all that is needed. Attention that asks diffusers for a backend gets flashtile, unless its model
was given another backend by name. Attention that calls ``scaled_dot_product_attention`` itself (U-Nets, VAEs, Stable
Diffusion 3) is served by ``flashtile.integrations.sdpa``. ``register()`` only makes the name known, for
``model.set_attention_backend("flashtile")`` and ``with attention_backend("flashtile"):``.

If the backend was named and flashtile cannot run a call, that is an error. ``calls`` is the counter of
``flashtile.integrations.sdpa``.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models import attention_dispatch
from torch import Tensor

from flashtile.core.errors import UnsupportedError
from flashtile.integrations import sdpa
from flashtile.integrations._attend import attend
from flashtile.integrations.sdpa import calls

__all__ = ["NAME", "TESTED", "calls", "disable", "enable", "register"]

NAME = "flashtile"
TESTED = ("0.37.0", "0.37.1", "0.38.0", "0.39.0", "0.40.0", "0.41.0", "0.42.0", "0.42.1")
"""Releases of diffusers in which the private registry has the form that this module knows."""

# The parts of the registry that ``register`` uses, and diffusers after it.
_PARTS = (
    "register", "get_active_backend", "set_active_backend", "_active_backend", "_backends", "_constraints",
    "_supported_arg_names", "_supports_context_parallel",
)  # fmt: skip


def register() -> None:
    """Makes the name ``flashtile`` known to diffusers. No call runs differently yet.

    Raises:
        UnsupportedError: This release of diffusers has a private registry that was not tested.
    """
    registry: Any = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    missing = [name for name in _PARTS if not hasattr(registry, name)]
    if diffusers.__version__ not in TESTED or missing:
        lacks = f" (its registry lacks {', '.join(missing)})" if missing else ""
        raise UnsupportedError(
            f"diffusers {diffusers.__version__}{lacks} is not one of the releases tested, {', '.join(TESTED)}: "
            "its table of backends is private. flashtile.integrations.sdpa serves its native backend in any release"
        )
    names = attention_dispatch.AttentionBackendName
    if NAME in names._value2member_map_:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    setattr(names, NAME.upper(), member)
    names._member_names_.append(NAME.upper())
    names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    registry.register(member, constraints=[attention_dispatch._check_device, attention_dispatch._check_shape])(_attend)


_before: tuple[Any, bool] | None = None


def enable() -> None:
    """Runs diffusers' attention with flashtile from now on, in all threads; a second time it does nothing.

    Raises:
        UnsupportedError: As ``register`` and ``sdpa.enable``.
    """
    global _before
    register()
    if _before is None:
        registry = attention_dispatch._AttentionBackendRegistry
        before = (registry._active_backend, sdpa.is_enabled())
        sdpa.enable()
        registry.set_active_backend(attention_dispatch.AttentionBackendName(NAME))
        _before = before


def disable() -> None:
    """Undoes ``enable``; models that were given the name keep it until ``model.reset_attention_backend()``."""
    global _before
    if _before is not None:
        backend, was_enabled = _before
        attention_dispatch._AttentionBackendRegistry.set_active_backend(backend)
        if not was_enabled:
            sdpa.disable()
        _before = None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend: q, k, v and the result are ``(batch, seqlen, heads, head_dim)``; the rest is as in SDPA.

    A mask ``(batch, seqlen_k)`` masks keys, as in diffusers' native backend.
    """
    if _parallel_config is not None:
        raise UnsupportedError("flashtile is no backend for diffusers' context parallelism")
    if return_lse:
        raise UnsupportedError("return_lse=True is not supported by the backend flashtile of diffusers")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    found = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, **calls.carried())
    if not isinstance(found, Tensor):
        raise UnsupportedError(f"flashtile, diffusers' attention backend, cannot run this call: {found}")
    calls.serve()
    return found.transpose(1, 2)
