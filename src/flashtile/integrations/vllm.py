"""flashtile as an attention backend of vLLM: ``--attention-backend FLASHTILE``.

vLLM finds ``register`` by an entry point of this package, as one of its general plug-ins, and calls it in each of its
processes. The backend is loaded when it is chosen.
"""

from __future__ import annotations

from typing import Any

NAME = "FLASHTILE"
PATH = "flashtile.integrations._vllm_backend.Backend"


def register() -> None:
    """Makes the name known to vLLM; a second time it does nothing."""
    member()


def member() -> Any:
    """The member of vLLM's ``AttentionBackendEnum`` with our name.

    vLLM sends its configuration to its processes before they load plug-ins, and sends an enumeration's member as its
    value, which the processes do not know yet. So our member is sent as a call of this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, PATH)
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (member, ())
    return AttentionBackendEnum[NAME]
