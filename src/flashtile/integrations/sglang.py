"""flashtile as an attention backend of SGLang: ``--attention-backend flashtile``.

SGLang finds ``register`` by an entry point of this package and calls it in each of its processes. The backend is loaded
when it is chosen.
"""

from __future__ import annotations

from typing import Any

NAME = "flashtile"
# Drafters' backends come from a table inside this function.
DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Makes the name known to SGLang; a second time it does nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The last two lists are for --enable-deterministic-inference, without and with prefixes in the cache.
    for known in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in known:
            known.append(NAME)
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create)
        HookRegistry.register(DRAFTS, offer_drafts, HookType.BEFORE)


def create(runner: Any) -> Any:
    """The backend of one of SGLang's model runners."""
    from flashtile.integrations._sglang_backend import Backend

    return Backend(runner)


def offer_drafts(
    factory: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False
) -> None:
    """Adds this backend to those a drafter may have, before SGLang looks for the one that was chosen.

    Args:
        factory: SGLang's maker of a drafter's backends.
        backend_name: Not read, as ``error_template`` is not.
        backend_map: By name, what makes a backend; returns its name too.
        error_template: For a name that is not among them.
        stamps_children: Whether the backend is for the steps that draft, and not for what is read of the target.
    """

    def make() -> tuple[str, Any]:
        if not stamps_children:
            return NAME, create(factory.draft_model_runner)
        from flashtile.integrations._sglang_backend import DraftSteps

        return NAME, DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)

    backend_map[NAME] = make
