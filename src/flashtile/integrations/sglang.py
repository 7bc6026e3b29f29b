"""flashtile as an attention backend of SGLang: ``--attention-backend flashtile``.

SGLang finds ``register`` by an entry point of this package and calls it in each of its processes. The backend is loaded
when it is chosen.
"""

from __future__ import annotations

from typing import Any

NAME = "flashtile"


def register() -> None:
    """Makes the name known to SGLang; a second time it does nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    # The last two lists are for --enable-deterministic-inference, without and with prefixes in the cache.
    for known in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in known:
            known.append(NAME)
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The backend of one of SGLang's model runners."""
    from flashtile.integrations._sglang_backend import Backend

    return Backend(runner)
